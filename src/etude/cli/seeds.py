"""`etude train RECIPE --seeds N`: ordinary runs of one recipe, each a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from etude.compare.sweeps.processes import (
    Process,
    Processes,
    is_finished,
    jobs_for,
    last_line,
    start,
    wait_for_writer,
)
from etude.core.errors import RESUMABLE, EtudeError, UsageError
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import files
from etude.runs.folder import RECIPE, RunFolder

say = partial(print, flush=True)
_OWN = ("seeds", "jobs", "folder", "seed")
"""Options that are the command's own, and not passed on to its runs."""


class Stopped(EtudeError):
    """A signal ended the command; its runs are saved."""

    exit_code = RESUMABLE

    def __init__(self, done: int, total: int) -> None:
        super().__init__(
            f"Stopped: {done} of {total} runs are finished. The same command goes on with the rest."
        )


@dataclass
class Seeds:
    """The runs of a recipe with several seeds, in one folder: s0, s1 ..."""

    recipe: Recipe
    folder: Path
    seeds: range
    jobs: int
    arguments: list[str]
    """Of a run's command: recipe and options, without seed and folder."""
    trust: bool = False
    failed: list[int] = field(default_factory=list)
    processes: Processes = field(init=False)

    def __post_init__(self) -> None:
        self.processes = Processes(self.jobs)

    def path(self, seed: int) -> Path:
        return self.folder / f"s{seed}"

    def check(self) -> None:
        """Refuse a folder that holds something else, before anything is trained."""
        if (self.folder / RECIPE).exists():
            raise UsageError(
                f"{self.folder} is a run itself: name another folder for the runs of the seeds."
            )
        for seed in self.seeds:
            path = self.path(seed)
            if not os.path.lexists(path):
                continue
            known = recipes.load(RunFolder.open(path, write=False).recipe, self.trust)
            refused, said = recipes.changes(known, self.recipe.replace(seed=seed))
            apart = refused + [text for text in said if not text.startswith("start_from ")]
            if apart:
                raise UsageError(
                    f"{path} is a run of another recipe: {apart[0]}. Name another --folder."
                )

    def is_finished(self, seed: int) -> bool:
        """Whether a run has ended and was evaluated."""
        return is_finished(self.path(seed), self.recipe)

    def train(self) -> None:
        """Do the runs that are missing or not finished; raises where one of them cannot be."""
        waiting = [seed for seed in self.seeds if not self.is_finished(seed)]
        ready = len(self.seeds) - len(waiting)
        say(
            f"{len(self.seeds)} runs of {self.recipe.name} in {self.folder}, seeds "
            f"{self.seeds[0]} to {self.seeds[-1]}"
            + (f"; {ready} {'is' if ready == 1 else 'are'} finished already" if ready else "")
            + (f"; {min(self.jobs, len(waiting))} side by side" if self.jobs > 1 else "")
            + ". If this is stopped, the same command goes on."
        )
        files.make_folder(self.folder)
        self.processes.run(waiting, self._start, self._ended)
        done = sum(map(self.is_finished, self.seeds))
        if self.processes.signal:
            raise Stopped(done, len(self.seeds))
        if self.failed:
            names = ", ".join(str(seed) for seed in sorted(self.failed))
            raise EtudeError(
                f"{done} of {len(self.seeds)} runs are finished; seed {names} failed, as said "
                "above. The same command goes on with what is missing."
            )

    def _start(self, seed: int) -> Process:
        path = self.path(seed)
        if path.exists():
            wait_for_writer(path)
            verb = ["resume", str(path), *(["--trust"] if self.trust else [])]
        else:
            verb = ["train", *self.arguments, "--seed", str(seed), "--folder", str(path)]
        log = path.with_suffix(".log") if self.jobs > 1 else None
        say(f"\nSeed {seed}: {verb[0]}" if log is None else f"Seed {seed}: {verb[0]}, see {log}")
        return start(verb, log)

    def _ended(self, seed: int, code: int) -> bool:
        failed = code != 0 or not self.is_finished(seed)
        if failed and not self.processes.signal:
            self.failed.append(seed)
        if self.jobs > 1:
            log = self.path(seed).with_suffix(".log")
            say(f"Seed {seed}: {f'failed: {last_line(log)}' if failed else 'done'}")
        return False


def passed_on(arguments: list[str], own: Sequence[str] = _OWN) -> list[str]:
    """The arguments without the options of the command itself, and their values."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if re.match(r"--?[a-zA-Z]", argument):
            name, equals, _ = argument.lstrip("-").partition("=")
            skips = name in own and not equals
            if name in own:
                continue
        elif skips:
            skips = False
            continue
        kept.append(argument)
    return kept


def train_seeds(
    recipe: Recipe,
    count: int,
    jobs: int | None,
    folder: str | None,
    arguments: list[str],
    trust: bool,
) -> None:
    """Train a recipe with `count` seeds, from its own on, and compare what came of it.

    arguments: those of the command, from the recipe's name on.
    """
    if "RANK" in os.environ:
        raise UsageError("--seeds starts processes of its own: leave torchrun out, or --seeds.")
    name = re.sub(r"[^\w.-]+", "-", recipe.name).strip(".-") or "run"
    same = Path("runs") / name / f"seeds-{recipes.digest(recipe.replace(seed=0))[:8]}"
    runs = Seeds(
        recipe,
        Path(folder) if folder else same,
        range(recipe.seed, recipe.seed + count),
        jobs or jobs_for(recipe),
        passed_on(arguments),
        trust,
    )
    runs.check()
    runs.train()
    from etude.compare.comparison import compare
    from etude.compare.outputs import to_table
    from etude.compare.reading import read

    found = compare([read(runs.path(seed)) for seed in runs.seeds])
    width = shutil.get_terminal_size((100, 24)).columns
    print(f"\n{to_table(found, width, sys.stdout.isatty())}", end="")
    print(f"Again, with files: etude compare {runs.folder} -o curves.png runs.csv")
