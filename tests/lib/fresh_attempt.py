"""One attempt at a run in an interpreter of its own, for those who kill it.

    python fresh_attempt.py RECIPE.yaml FOLDER PHASE-FILE SEED

Trains, or resumes where the folder is there. The first byte of the phase file says what is going
on, as a number of `PHASES`, and the second counts iterations, up to 255. The libraries are loaded
in an order that follows from the seed. Whoever starts it sets PYTHONHASHSEED; where things lie in
memory differs from one start to the next anyhow.
"""

from __future__ import annotations

import importlib
import mmap
import random
import sys
from pathlib import Path

PHASES = ("loading", "creating", "restoring", "between", "collect", "train", "test", "save")
ITERATIONS = 1
"""The byte that counts them."""
SIZE = 16
"""Bytes of a phase file."""
LIBRARIES = ["numpy", "torch", "mujoco", "gymnasium", "h5py", "safetensors", "pydantic", "yaml"]


def main() -> int:
    recipe, folder, phase_file = map(Path, sys.argv[1:4])
    order = LIBRARIES.copy()
    random.Random(sys.argv[4]).shuffle(order)
    for name in order:
        importlib.import_module(name)
    import etude
    from etude.core.errors import EtudeError
    from etude.planning import recipes

    with phase_file.open("r+b") as stream, mmap.mmap(stream.fileno(), SIZE) as shared:

        def on_phase(phase: str) -> None:
            shared[0] = PHASES.index(phase or "between")
            if phase == "collect":
                shared[ITERATIONS] = min(shared[ITERATIONS] + 1, 255)

        try:
            if folder.exists():
                shared[0] = PHASES.index("restoring")
                etude.resume(folder, on_phase=on_phase)
            else:
                wanted = recipes.load(recipe, trust=True)
                shared[0] = PHASES.index("creating")
                etude.train(wanted, folder, on_phase=on_phase)
        except EtudeError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
