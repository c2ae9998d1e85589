"""In place of `fresh_attempt.py`: a run of a second without any library, good or broken.

FAKE_RUN says how: "good", "wrong" (its result depends on how it came about), "crash" or "hang".
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

PHASES = ("loading", "creating", "restoring", "between", "collect", "train", "test", "save")


def main() -> None:
    folder, phase_file, way = Path(sys.argv[2]), Path(sys.argv[3]), os.environ["FAKE_RUN"]
    with phase_file.open("r+b", buffering=0) as stream:

        def phase(name: str, iterations: int) -> None:
            stream.seek(0)
            stream.write(bytes([PHASES.index(name), iterations]))

        restoring = folder.exists()
        phase("restoring" if restoring else "creating", 0)
        folder.mkdir(exist_ok=True)
        with (folder / "attempts").open("a") as attempts:
            attempts.write(f"{way} ")
        if restoring and way == "crash":
            sys.exit("this run always fails")
        for iteration in range(1, 5):
            for name in ("collect", "train", "test", "save"):
                phase(name, iteration)
                time.sleep(0.03)
        while way == "hang" and restoring:
            time.sleep(1.0)
    seen = (folder / "attempts").read_text() if way == "wrong" else ""
    (folder / "summary.json").write_text(f"the result {seen}")


if __name__ == "__main__":
    main()
