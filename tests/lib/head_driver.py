"""A run on a Ray cluster of its own whose head, or Ray's process beside it, is struck.

    python tests/lib/head_driver.py RECIPE FOLDER gcs_server|raylet|PID SIGNAL SECONDS [PAUSE]

SECONDS: how long it is waited for then; 0 for as long as a person would wait. PAUSE: seconds that
the run does something else after the strike.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from etude.api import train
from etude.core.contracts import Fragment
from etude.core.errors import EtudeError
from etude.planning import recipes
from etude.rollout import elastic
from etude.training.loop import Callback, Context


class Strike(Callback):
    """A signal to one of Ray's processes after the fourth iteration."""

    def __init__(self, what: str, number: int, pause: float = 0.0) -> None:
        self.what, self.number, self.pause = what, number, pause

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        if context.clock.now.iterations == 4:
            ray: Any = sys.modules["ray"]
            own = ray._private.worker._global_node.all_processes
            process = None if self.what.isdigit() else own[self.what][0].process
            os.kill(int(self.what) if process is None else process.pid, self.number)
            print(f"struck at {time.monotonic()}", flush=True)
            if process is not None and self.number == signal.SIGKILL:
                process.wait()
            time.sleep(self.pause)


def main() -> int:
    recipe, folder, what, number, seconds, *pause = sys.argv[1:]
    elastic.HEADLESS = float(seconds) or elastic.HEADLESS
    elastic.QUIET = min(elastic.QUIET, elastic.HEADLESS / 4.0)
    try:
        train(
            recipes.load(Path(recipe), trust=True),
            folder,
            callbacks=[Strike(what, int(number), *map(float, pause))],
            say=print,
        )
    except EtudeError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
