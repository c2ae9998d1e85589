"""UniLab's PPO on a Go2 (it has no Go1), by its own command and with its own settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.progress import Progress, main

FIGURES = {"steps": r"Total steps:?\s+([\d,]+)", "mean": r"Mean reward:?\s+(-?[\d.]+)"}
"""Output of rsl_rl, with which it learns, after every iteration."""


def train(progress: Progress) -> None:
    tools = Path(sys.executable).parent
    subprocess.run([tools / "unilab-pull-assets"], check=True, stdout=sys.stderr)
    command = [tools / "train", "--algo", "ppo", "--task", "go2_joystick_flat", "--sim", "mujoco"]
    settings = ["training.no_play=true", f"algo.seed={progress.seed}", "algo.max_iterations=100000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *settings], cwd=progress.out, **pipes) as process:
        found: dict[str, float] = {}
        try:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr)
                for name, pattern in FIGURES.items():
                    if match := re.search(pattern, line):
                        found[name] = float(match[1].replace(",", ""))
                if "Total steps" in line and "steps" in found:
                    progress.point(int(found["steps"]), found.get("mean"))
        finally:
            process.terminate()
    if process.returncode:
        raise SystemExit(process.returncode)


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="unilab",
            algorithms=("ppo",),
            tasks=("walk-go1",),
            own_engine=True,
            note="its task go2_joystick_flat with its own settings, another robot",
        )
    )
