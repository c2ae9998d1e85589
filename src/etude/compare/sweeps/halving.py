"""A sweep's state: what was asked, the trials, and the scores of the rungs that are complete.

All that is done next follows from these, so a sweep that was killed goes on as if it had not been.
They are one sealed file, `sweep.json`, which is replaced as a whole; beside it are the recipe that
is varied, `base.yaml`, and the trials, ordinary run folders t0, t1 ...
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from etude.compare.comparison import METRICS as USUAL
from etude.compare.comparison import RETURN, SUCCESS
from etude.compare.sweeps import values
from etude.compare.sweeps.values import Scored, Values, Vary
from etude.core.clock import Interval, Loops
from etude.core.errors import Damaged, UsageError
from etude.core.metrics.declared import numbers
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import files
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.folder import METRICS, RECIPE
from etude.runs.lock import Lock
from etude.runs.metrics_log import DiskHistory
from etude.training.logs.curves import number

STATE, BASE = "sweep.json", "base.yaml"
DIVERGED = "diverged: not a finite number"


@dataclass(frozen=True)
class Asked:
    """What a person asked for; with the base recipe, all that a sweep follows from."""

    vary: tuple[str, ...]
    sampler: Literal["grid", "random", "tpe"] = "random"
    seed: int = 0
    trials: int = 0
    """Of each bracket."""
    brackets: int = 1
    rungs: int = 1
    reduction_factor: int = 3
    metric: str | None = None
    minimize: bool = False

    def left(self, trials: int, rung: int) -> int:
        """How many of a bracket's trials take part in a rung, the first of which is 0."""
        return max(trials // self.reduction_factor**rung, 1) if trials else 0

    def share(self, rung: int) -> float:
        """The part of its budget that a trial has spent at the end of a rung."""
        return float(self.reduction_factor) ** (rung + 1 - self.rungs)


def most_rungs(trials: int, factor: int) -> int:
    """As many rungs as leave one trial for the last."""
    return 1 + int(math.log(trials) / math.log(factor) + 1e-9)


@dataclass
class Trial:
    """One point of a sweep: a run that is planned at its full budget."""

    number: int
    bracket: int
    values: Values
    refused: str = ""
    """Why it cannot be run, in the plan's words; "" for one that can."""
    pauses: list[int] = field(default_factory=list)
    """Iterations at the end of each rung; the last is the run's end."""
    steps: list[int] = field(default_factory=list)
    """What counts its progress there: environment steps, or updates on a dataset."""
    scores: list[float] = field(default_factory=list)
    """At the rungs that are complete."""
    ties: list[float] = field(default_factory=list)
    """The mean reward there, by which trials of the same success are ranked; 0 without one."""
    failed: str = ""
    """Why it did not get further; "" for one that has not failed."""

    @property
    def name(self) -> str:
        return f"t{self.number}"


class Sweep:
    """A sweep in its folder, for the one process that holds its lock."""

    def __init__(self, folder: Path, recipe: Recipe, asked: Asked) -> None:
        self.folder, self.recipe, self.asked = folder, recipe, asked
        self.metric = asked.metric
        self.trials: list[Trial] = []
        self.complete = 0
        """Rungs that are complete, over all brackets."""
        self.varied: list[Vary] = [values.parse(text, recipe) for text in asked.vary]
        self._lock: Lock | None = None

    @classmethod
    def create(cls, folder: Path, recipe: Recipe, asked: Asked) -> Sweep:
        """A new sweep, of which nothing is on disk before `save`; or the one in the folder, if
        that was asked the same."""
        if (folder / STATE).exists():
            sweep = cls.open(folder)
            same = recipes.digest(sweep.recipe) == recipes.digest(recipe)
            if asked != sweep.asked or not same:
                sweep.close()
                raise UsageError(
                    f"{folder} is another sweep: name another --folder, or continue that one with "
                    f"`etude sweep --resume {folder}`."
                )
            return sweep
        if (folder / RECIPE).exists():
            raise UsageError(f"{folder} is a run: name another --folder for the sweep.")
        return cls(folder, recipe, asked)

    @classmethod
    def open(cls, folder: Path, trust: bool = False) -> Sweep:
        """The sweep in a folder, locked for this process."""
        path = folder / STATE
        if not path.is_file():
            raise UsageError(f"{folder} is not a sweep: it has no {STATE}. Check the path.")
        lock = Lock(folder)
        try:
            known = decode_sealed(path.read_bytes())
            asked = Asked(**{**known["asked"], "vary": tuple(known["asked"]["vary"])})
            sweep = cls(folder, recipes.load(folder / BASE, trust), asked)
            sweep.trials = [Trial(**each) for each in known["trials"]]
            for trial in sweep.trials:  # JSON has them by name.
                trial.values = {vary.field: trial.values[vary.field] for vary in sweep.varied}
            sweep.metric, sweep.complete = known["metric"], known["complete"]
        except (ValueError, KeyError, TypeError) as error:
            lock.release()
            raise Damaged(path, f"{path} cannot be read: {error}.") from error
        except BaseException:
            lock.release()
            raise
        sweep._lock = lock
        return sweep

    def save(self) -> None:
        """Replace the state on disk; the first time, make the folder."""
        if self._lock is None:
            files.make_folder(self.folder)
            self._lock = Lock(self.folder)
            if (self.folder / STATE).exists():
                raise UsageError(f"Another process has begun a sweep in {self.folder} just now.")
            files.replace_file(self.folder / BASE, [recipes.dump(self.recipe).encode()])
        self._lock.check(self.folder)
        document = {
            "asked": asdict(self.asked),
            "metric": self.metric,
            "complete": self.complete,
            "trials": [asdict(trial) for trial in self.trials],
        }
        files.replace_file(self.folder / STATE, [encode_sealed(document)])

    def close(self) -> None:
        """Give up the lock; the process's end does the same."""
        if self._lock is not None:
            self._lock.release()

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.name

    @property
    def rung(self) -> tuple[int, int]:
        """(bracket, rung) that is under way; the bracket after the last where all is done."""
        return divmod(self.complete, self.asked.rungs)

    @property
    def is_done(self) -> bool:
        return self.complete >= self.asked.rungs * self.asked.brackets

    def draw(self) -> list[Trial]:
        """Choose the trials of the bracket under way."""
        bracket, first = self.rung[0], len(self.trials)
        asked, varied = self.asked, self.varied
        if asked.sampler == "grid":
            drawn = values.all_of(varied)
        elif asked.sampler == "random":
            drawn = values.at_random(varied, asked.seed, first, asked.trials)
        else:
            drawn = values.by_optuna(
                varied, asked.seed, first, asked.trials, self._past(), asked.minimize
            )
        new = [Trial(first + i, bracket, each) for i, each in enumerate(drawn)]
        self.trials += new
        return new

    def _past(self) -> list[Scored]:
        """The trials of earlier brackets that were run, with their scores."""
        past: list[Scored] = []
        for trial in self.trials:
            missing = [None] * (self.asked.rungs - len(trial.scores))
            if not trial.refused:
                past.append((trial.values, [*trial.scores, *missing]))
        return past

    def contenders(self) -> list[Trial]:
        """The trials of the rung under way, which are the best of the rung before it."""
        bracket, rung = self.rung
        possible = [t for t in self.trials if t.bracket == bracket and not t.refused]
        if rung == 0:
            return [t for t in possible if not t.failed]
        last = [t for t in possible if len(t.scores) >= rung]
        best = sorted(last, key=lambda t: self.rank(t, rung - 1))
        chosen = best[: self.asked.left(len(possible), rung)]
        return sorted((t for t in chosen if not t.failed), key=lambda t: t.number)

    def rank(self, trial: Trial, rung: int) -> tuple[float, float, int]:
        """What trials of a rung are sorted by: the best first, of equals the first drawn."""
        score = trial.scores[rung]
        return (score if self.asked.minimize else -score), -trial.ties[rung], trial.number

    def complete_rung(self, trials: Sequence[Trial]) -> None:
        """Note the scores of a rung whose trials have all come to its end, or failed."""
        rung, left = self.rung[1], [trial for trial in trials if not trial.failed]
        if self.metric is None and left:
            names = [{n for row in self._rows(t, rung) for n in row} for t in left]
            common = set.intersection(*names)
            self.metric = next((name for name in USUAL if name in common), None)
            if self.metric is None:
                raise UsageError(
                    "These trials have neither an evaluation nor a return to be ranked by: name "
                    f"a column of their {METRICS}, `etude sweep --resume {self.folder} --metric "
                    "NAME`."
                )
        scores = [self.score(trial, rung)[1] for trial in left]
        for trial, score in zip(left, scores, strict=True):
            rewards = (row[RETURN] for row in self._rows(trial, rung) if RETURN in row)
            trial.scores.append(score)
            last = deque(rewards, 1) if self.metric == SUCCESS else None
            trial.ties.append(last[0] if last else 0.0)
        self.complete += 1
        self.save()

    def score(self, trial: Trial, rung: int) -> tuple[str, float]:
        """The metric and its last value up to the end of a rung."""
        metrics = (self.metric,) if self.metric is not None else USUAL
        last: dict[str, float] = {}
        for row in self._rows(trial, rung):
            last |= {name: row[name] for name in metrics if name in row}
        for metric in metrics:
            if metric in last:
                return metric, last[metric]
        raise UsageError(
            f"{self.path(trial) / METRICS} has no {' or '.join(metrics)} up to iteration "
            f"{trial.pauses[rung]:,}: name a column that it has, `etude sweep --resume "
            f"{self.folder} --metric NAME`."
        )

    def _rows(self, trial: Trial, rung: int) -> Iterator[dict[str, float]]:
        """The rows of a trial up to the end of a rung."""
        rows = map(numbers, DiskHistory(self.path(trial) / METRICS))
        return (row for row in rows if row.get("iterations", 0) <= trial.pauses[rung])

    def best(self) -> Trial | None:
        """The best of all trials that have their whole budget behind them."""
        whole = [t for t in self.trials if len(t.scores) == self.asked.rungs]
        return min(whole, key=lambda t: self.rank(t, -1), default=None)


def shown_score(metric: str | None, score: float) -> str:
    """A score as people read it."""
    is_share = metric is not None and metric.endswith("success_rate")
    return f"{score:.1%}" if is_share else number(score)


def pauses(recipe: Recipe, loops: Loops, asked: Asked) -> list[int]:
    """The iterations at which a trial's rungs end: where the first evaluation at or after the
    rung's share of the budget has been logged. Refuses rungs that fall on one iteration."""
    every = Interval.parse(recipe.evaluation.every)
    found: list[int] = []
    for rung in range(asked.rungs - 1):
        at = max(math.ceil(loops.iterations * asked.share(rung) - 1e-9), 1)
        while at < loops.iterations and not _is_due(loops, at, every):
            at += 1
        while at < loops.iterations and at % loops.iterations_per_cycle:
            at += 1
        found.append(at)
    found.append(loops.iterations)
    if len(set(found)) < len(found):
        raise UsageError(
            f"{asked.rungs} rungs do not fit: they would end at iterations "
            f"{', '.join(f'{at:,}' for at in found)}. Evaluate more often with "
            f"--evaluation.every ('{recipe.evaluation.every}' now), or use fewer --rungs."
        )
    return found


def fitting(recipe: Recipe, loops: Loops, asked: Asked) -> Asked:
    """What is asked, with as many rungs as a recipe has evaluations for."""
    for rungs in range(asked.rungs, 1, -1):
        fewer = replace(asked, rungs=rungs)
        with suppress(UsageError):
            pauses(recipe, loops, fewer)
            return fewer
    return replace(asked, rungs=1)


def _is_due(loops: Loops, iteration: int, every: Interval) -> bool:
    """Whether the policy is tested at the end of an iteration; always, where it never is."""
    before, after = loops.at(iteration - 1), loops.at(iteration)
    return every.count == 0 or before.is_due(every, after)
