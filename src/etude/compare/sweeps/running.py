"""Running a sweep: plan the trials, and continue the best of each rung from their checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from etude.api import create
from etude.building.build import SUMMARY
from etude.compare.sweeps.halving import (
    BASE,
    DIVERGED,
    Sweep,
    Trial,
    notes,
    pauses,
    settings,
    shown_score,
)
from etude.compare.sweeps.processes import (
    Process,
    Processes,
    is_finished,
    last_line,
    wait_for_writer,
)
from etude.core.errors import RESUMABLE, EtudeError, NonFinite, UsageError
from etude.core.output import waiting
from etude.core.user_code import Untrusted, remember_trust
from etude.planning import recipes
from etude.planning.memory import check_plan
from etude.planning.plan import make_plan
from etude.planning.recipe import Recipe, Resolved
from etude.planning.resolve import resolve
from etude.runs import checkpoint
from etude.runs.folder import RunFolder

Say = Callable[[str], None]
Start = Callable[[list[str], Path], Process]
"""Starts `etude VERB ...`, with its output appended to a file."""
_MOST_DEATHS = 3
"""Times in a row that the process of a trial may be killed without a new checkpoint."""


class Stopped(EtudeError):
    """A signal stopped the command; its trials are saved."""

    exit_code = RESUMABLE

    def __init__(self, folder: Path) -> None:
        super().__init__(f"Stopped and saved. Continue with: etude sweep --resume {folder}")


def run(sweep: Sweep, start: Start, workers: int, say: Say, trust: bool = False) -> None:
    """Run a sweep to its end, from its current state."""
    asked = sweep.asked
    while not sweep.is_done:
        prepare(sweep, say)
        bracket, rung = sweep.rung
        trials = sweep.contenders()
        many = f"{len(trials)} trial{'' if len(trials) == 1 else 's'}"
        which = f"Bracket {bracket + 1} of {asked.brackets}, rung" if asked.brackets > 1 else "Rung"
        to = (
            f"{100 * asked.share(rung):.0f} % of the budget"
            if rung + 1 < asked.rungs
            else "the end"
        )
        say(f"{which} {rung + 1} of {asked.rungs}: {many} to {to}")
        _Rung(sweep, trials, start, workers, say, trust).run()
        sweep.complete_rung(trials)


def prepare(sweep: Sweep, say: Say) -> None:
    """Draw, plan and save the trials of the current bracket, unless that was done before."""
    if not any(trial.bracket == sweep.rung[0] for trial in sweep.trials):
        plan(sweep, sweep.draw(), say)
        sweep.save()
        remember_trust(sweep.folder / BASE, recipes.texts(sweep.recipe))


@waiting("planning trials")
def plan(sweep: Sweep, trials: list[Trial], say: Say) -> None:
    """Plan the rungs of trials, or store why a trial cannot be run; raise if none can."""
    for trial in trials:
        try:
            recipe = recipe_of(sweep, trial)
            loops = resolved(recipe, sweep.folder).loops
            trial.pauses = pauses(recipe, loops, sweep.asked)
        except Untrusted:
            raise
        except UsageError as error:
            trial.refused = str(error)
            continue
        ends = [loops.at(iterations) for iterations in trial.pauses]
        is_offline = loops.steps_per_iteration == 0
        trial.steps = [end.updates if is_offline else end.timesteps for end in ends]
    refused = [trial for trial in trials if trial.refused]
    if len(refused) == len(trials):
        raise UsageError(f"None of the {len(trials)} trials can be run: {refused[0].refused}")
    if refused:
        say(f"{len(refused)} of {len(trials)} trials cannot be run, and cost nothing:")
    for line in notes(refused):
        say(f"  {line}")


def resolved(recipe: Recipe, folder: Path) -> Resolved:
    """Resolve a recipe, and check that memory and disk of this machine suffice."""
    made = resolve(recipe)
    check_plan(make_plan(made).bytes, folder, lambda text: None)
    return made


def recipe_of(sweep: Sweep, trial: Trial) -> Recipe:
    """The base recipe with the values of a trial."""
    return sweep.recipe.replace(
        **{name.replace(".", "__"): value for name, value in trial.values.items()}
    )


class _Rung:
    """The trials of a rung, each in a process that ends with the rung."""

    def __init__(
        self,
        sweep: Sweep,
        trials: list[Trial],
        start: Start,
        workers: int,
        say: Say,
        trust: bool,
    ) -> None:
        self.sweep, self.start, self.say, self.trust = sweep, start, say, trust
        self.trials = {trial.number: trial for trial in trials}
        self.number = sweep.rung[1]
        self.processes = Processes(workers)
        self.failures: dict[int, str] = {}
        self._deaths: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        waiting = [n for n, trial in self.trials.items() if not self._has_reached(trial)]
        self.processes.run(waiting, self._begin, self._ended)
        if self.processes.signal:
            raise Stopped(self.sweep.folder)
        for number, words in self.failures.items():
            folder = self.sweep.folder
            raise EtudeError(
                f"t{number} failed: {words.rstrip('.')}. The others of this rung are done; `etude "
                f"sweep --resume {folder}` tries it again, and with --drop {number} goes on "
                "without it."
            )

    def _log(self, trial: Trial) -> Path:
        return self.sweep.path(trial).with_suffix(".log")

    def _has_reached(self, trial: Trial) -> bool:
        """Whether a trial has reached the end of the rung."""
        path, is_last = self.sweep.path(trial), self.number + 1 == self.sweep.asked.rungs
        if is_last or (path / SUMMARY).exists():
            return is_finished(path, recipe_of(self.sweep, trial))
        return iterations_of(path) >= trial.pauses[self.number]

    def _begin(self, number: int) -> Process:
        trial = self.trials[number]
        path = self.sweep.path(trial)
        if path.exists():
            wait_for_writer(path)
        else:
            create(resolved(recipe_of(self.sweep, trial), path), path)
        verb = ["resume", str(path), *(["--trust"] if self.trust else [])]
        if self.number + 1 < self.sweep.asked.rungs:
            verb += ["--pause-after", str(trial.pauses[self.number])]
        return self.start(verb, self._log(trial))

    def _ended(self, number: int, code: int) -> bool:
        trial, sweep = self.trials[number], self.sweep
        if code == 0 and not self._has_reached(trial):
            self.failures[number] = "its process ended with code 0 before the run was finished"
            self.say(f"  {trial.name}: failed: {self.failures[number]}")
        elif code == 0:
            score = shown_score(*sweep.score(trial, self.number))
            self.say(f"  {trial.name}: {score} at {trial.steps[self.number]:,} ({settings(trial)})")
        elif self.processes.signal:
            pass
        elif code == NonFinite.exit_code:
            trial.failed = DIVERGED
            sweep.save()
            self.say(f"  {trial.name}: {DIVERGED} ({settings(trial)})")
        elif code < 0 or code > 128 or code == RESUMABLE:
            at = number, iterations_of(sweep.path(trial))
            self._deaths[at] += 1
            if self._deaths[at] < _MOST_DEATHS:
                self.say(f"  {trial.name}: its process was killed; it goes on from its checkpoint")
                return True
            self.failures[number] = f"its process was killed {_MOST_DEATHS} times in a row"
        else:
            self.failures[number] = last_line(self._log(trial))
            self.say(f"  {trial.name}: failed: {self.failures[number]}")
        return False


def iterations_of(path: Path) -> int:
    """The iteration of the newest checkpoint of a run; 0 without one."""
    found = checkpoint.newest_verified(RunFolder(path).checkpoints, lambda text: None, repair=False)
    if found is None:
        return 0
    return int(checkpoint.load_document(found)["clock"]["now"]["iterations"])
