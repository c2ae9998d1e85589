"""Shared code of all runners: arguments, printed lines, end of a run.

A runner is a module `benchmarks/runners/PEER.py` that calls `main(train, ...)`. It is started as
`python -m benchmarks.runners.PEER TASK --seed 0 --steps 5000 --cap 60 --out FOLDER` and prints one
JSON object per line: first what it is, then points of its curve, last why it ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tasks import TASKS, Task

WINDOW = 100
"""Number of the newest finished training episodes in means of return and success."""
BETWEEN = 0.25
"""Seconds between two points of a curve, at least."""
EPISODES = "episodes.jsonl"
"""File with the finished episodes of a run, by the step of the point after them."""
NEVER = 10**12
"""Steps for libraries that need a length; `Finished` ends the run."""


LIBRARY_ENDED = "the library ended"
"""Why a run ended that was not ended by `Finished`."""


class Finished(BaseException):
    """The run has its steps, its seconds or its score. Libraries must not catch it."""


def since_start() -> float:
    """Seconds since this process began, so that imports and compilation count."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begun = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun


class Progress:
    """The curve of one run, printed as it grows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.task: Task = options.task
        self.seed: int = options.seed
        self.out: Path = options.out
        self.resume: bool = options.resume
        self.steps = 0
        """Environment steps so far; a resumed run begins at those of its checkpoint."""
        self.limit: int = options.steps
        self._cap, self._until_target = options.cap, options.target
        self._between = 0.0 if options.all_points else BETWEEN
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._successes: deque[float] = deque(maxlen=WINDOW)
        self._new: list[tuple[float, float | None]] = []
        self._last = -math.inf
        self._begun: float | None = None
        self._in_environments: float | None = None

    @property
    def checkpoint_every(self) -> int:
        """Environment steps between two checkpoints: ten in a run."""
        return max(self.limit // 10 // self.task.rollout, 1) * self.task.rollout

    def goes_on_from(self, steps: int) -> None:
        """A resumed run says at which step its checkpoint was. What its means are over is what it
        had seen until then, not only what it sees from there on."""
        self.steps = steps
        say(went_on_from=steps)
        kept = self.out / EPISODES
        lines = kept.read_text().splitlines(keepends=True) if kept.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a kill may have cut the last
        for until, episodes in map(json.loads, whole):
            if until <= steps:
                for total, success in episodes:
                    self._remember(total, success)

    def episode(self, total: float, success: float | None = None) -> None:
        """A finished training episode."""
        self._new.append((float(total), None if success is None else float(success)))
        self._remember(*self._new[-1])

    def _remember(self, total: float, success: float | None) -> None:
        self._returns.append(total)
        if success is not None:
            self._successes.append(success)

    def in_environments(self, seconds: float) -> None:
        """Add the time of environment steps; counted from the first update on."""
        if self._begun is not None:
            self._in_environments = seconds + (self._in_environments or 0.0)

    @property
    def environment_share(self) -> float | None:
        """Share of the seconds since the first update spent in environments; None if unknown."""
        if self._in_environments is None or self._begun is None:
            return None
        return round(self._in_environments / (since_start() - self._begun), 4)

    def point(self, steps: int, mean: float | None = None, success: float | None = None) -> None:
        """After an update. mean, success: where a library only tells these, not its episodes."""
        self.steps = steps
        if self._new:
            with (self.out / EPISODES).open("a") as file:
                file.write(json.dumps([steps, self._new]) + "\n")
            self._new = []
        seconds = since_start()
        self._begun = seconds if self._begun is None else self._begun
        mean = _mean(self._returns) if mean is None else mean
        success = _mean(self._successes) if success is None else success
        score = success if self.task.score == "success" else mean
        full = len(self._returns) == WINDOW or not self._returns
        ends = {
            "steps": steps >= self.limit,
            "cap": seconds - self._begun >= self._cap,
            "target": self._until_target
            and full
            and score is not None
            and score >= self.task.target,
        }
        why = next((name for name, true in ends.items() if true), None)
        if why is not None or seconds - self._last >= self._between:
            say(seconds=round(seconds, 3), steps=steps, mean=mean, success=success)
            self._last = seconds
        if why is not None:
            raise Finished(why)


class Steps:
    """Counts what passes through a vector environment, whichever kind the library has."""

    def __init__(self, progress: Progress, num_envs: int, rollout: int | None = None) -> None:
        """rollout: steps of all environments between two updates; default the task's."""
        self._progress, self._num_envs = progress, num_envs
        self._rollout = rollout or progress.task.rollout
        self._returns = np.zeros(num_envs)
        self._since, self._begun = 0, 0.0

    def before(self) -> None:
        """Before a step: where a rollout is full, the update on it is over."""
        if self._since >= self._rollout:
            self._since = 0
            self._progress.point(self._progress.steps)
        self._begun = time.perf_counter()

    def after(self, rewards: Any, done: Any, success: Any = None) -> None:
        """After a step. rewards [num_envs], done [num_envs] bool, success [num_envs] or None."""
        self._progress.in_environments(time.perf_counter() - self._begun)
        self._returns += rewards
        self._since += self._num_envs
        self._progress.steps += self._num_envs
        for i in np.flatnonzero(done):
            self._progress.episode(self._returns[i], None if success is None else float(success[i]))
            self._returns[i] = 0.0


def say(**line: Any) -> None:
    """One JSON object on a line of its own; numbers that are not finite become null."""
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()
    }
    print(json.dumps(finite), flush=True)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return round(sum(numbers) / len(numbers), 4) if numbers else None


def main(
    train: Callable[[Progress], dict[str, Any] | None],
    *,
    package: str,
    algorithms: Sequence[str] = ("ppo", "sac"),
    tasks: Sequence[str] = tuple(TASKS),
    resumes: str | None = None,
    note: str = "",
    own_engine: bool = False,
    arguments: list[str] | None = None,
) -> int:
    """Run one peer on one task.

    package: the distribution whose version is printed. algorithms, tasks: what it offers; for
    others, the answer is "not_offered". resumes: its documented way to resume after a crash, or
    None. note: how it was run. own_engine: its task is its own. train: returns further items for
    the last line.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NEVER, help="environment steps, at most")
    parser.add_argument("--cap", type=float, default=600.0, help="seconds after the first update")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--target", action="store_true", help="end at the task's score")
    parser.add_argument("--all-points", action="store_true", help="print the curve whole")
    parser.add_argument("--smallest", action="store_true", help="the size at which CI runs it")
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    options.task = task = task.smallest() if options.smallest else task
    if task.algorithm not in algorithms:
        say(not_offered=f"it has no {task.algorithm.upper()}")
        return 0
    if task.name not in tasks:
        say(not_offered=f"its runner has no {task.name}")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    progress = Progress(options)
    say(version=version(package), resumes=resumes, note=note, own_engine=own_engine)
    more: dict[str, Any] | None = None
    why = LIBRARY_ENDED
    try:
        more = train(progress)
    except Finished as ending:
        why = str(ending)
    last = {"seconds": round(since_start(), 3), "steps": progress.steps}
    say(end=why, **last, environment_share=progress.environment_share, **more or {})
    return 0


def version(package: str) -> str:
    """The installed version of a distribution; "here" for what is part of this repository."""
    return importlib.metadata.version(package) if package else "here"
