"""`etude train RECIPE --seeds N`: runs of a recipe with several seeds, one process each."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from etude.cli.options import terminal_width, without_options
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
from etude.runs.folder import RECIPE, RunFolder, file_name

say = partial(print, flush=True)
_OWN = ("seeds", "jobs", "folder", "seed")
"""Options of the command that its runs are not given."""


class Stopped(EtudeError):
    """A signal ended the command; its runs are saved."""

    exit_code = RESUMABLE

    def __init__(self, done: int, total: int) -> None:
        super().__init__(
            f"Stopped: {done} of {total} runs are finished. The same command continues the rest."
        )


@dataclass
class Seeds:
    """Runs of a recipe with several seeds, in the folders s0, s1, ... of one folder."""

    recipe: Recipe
    folder: Path
    seeds: range
    jobs: int
    arguments: list[str]
    """Recipe and options of `etude train`, without seed and folder."""
    trust: bool = False
    failed: list[int] = field(default_factory=list)
    processes: Processes = field(init=False)

    def __post_init__(self) -> None:
        self.processes = Processes(self.jobs)

    def path(self, seed: int) -> Path:
        return self.folder / f"s{seed}"

    def check(self) -> None:
        """Refuse a folder with runs of another recipe."""
        if (self.folder / RECIPE).exists():
            raise UsageError(
                f"{self.folder} is a run: name another folder for the runs of the seeds."
            )
        for seed in self.seeds:
            path = self.path(seed)
            if not os.path.lexists(path):
                continue
            known = recipes.load(RunFolder.open(path, write=False).recipe, self.trust)
            refused, allowed = recipes.changes(known, self.recipe.replace(seed=seed))
            differing = refused + [text for text in allowed if not text.startswith("start_from ")]
            if differing:
                raise UsageError(
                    f"{path} is a run of another recipe: {differing[0]}. Name another --folder."
                )

    def is_finished(self, seed: int) -> bool:
        """Whether a run is finished and evaluated."""
        return is_finished(self.path(seed), self.recipe)

    def train(self) -> None:
        """Start or resume the runs that are not finished; raises if one of them fails."""
        waiting = [seed for seed in self.seeds if not self.is_finished(seed)]
        ready = len(self.seeds) - len(waiting)
        say(
            f"{len(self.seeds)} runs of {self.recipe.name} in {self.folder}, seeds "
            f"{self.seeds[0]} to {self.seeds[-1]}"
            + (f"; {ready} {'is' if ready == 1 else 'are'} finished already" if ready else "")
            + (f"; {min(self.jobs, len(waiting))} side by side" if self.jobs > 1 else "")
            + ". If this is stopped, the same command continues."
        )
        files.make_folder(self.folder)
        self.processes.run(waiting, self._start, self._ended)
        done = sum(map(self.is_finished, self.seeds))
        if self.processes.signal:
            raise Stopped(done, len(self.seeds))
        if self.failed:
            names = ", ".join(str(seed) for seed in sorted(self.failed))
            raise EtudeError(
                f"{done} of {len(self.seeds)} runs are finished; seed {names} failed, see "
                "above. The same command continues with the missing runs."
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


def train_seeds(
    recipe: Recipe,
    count: int,
    jobs: int | None,
    folder: str | None,
    arguments: list[str],
    trust: bool,
) -> None:
    """Train a recipe with `count` seeds, from its own seed on, and compare the runs.

    arguments: the recipe's name and the options of `etude train`.
    """
    if "RANK" in os.environ:
        raise UsageError("--seeds starts processes itself: leave out torchrun or --seeds.")
    same = (
        Path("runs")
        / file_name(recipe.name)
        / f"seeds-{recipes.digest(recipe.replace(seed=0))[:8]}"
    )
    runs = Seeds(
        recipe,
        Path(folder) if folder else same,
        range(recipe.seed, recipe.seed + count),
        jobs or jobs_for(recipe),
        without_options(arguments, _OWN),
        trust,
    )
    runs.check()
    runs.train()
    from etude.compare.comparison import compare
    from etude.compare.outputs import to_table
    from etude.compare.reading import read

    found = compare([read(runs.path(seed)) for seed in runs.seeds])
    width = terminal_width()
    print(f"\n{to_table(found, width, sys.stdout.isatty())}", end="")
    print(f"Again, with files: etude compare {runs.folder} -o curves.png runs.csv")
