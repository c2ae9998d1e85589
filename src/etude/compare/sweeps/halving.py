"""The state of a sweep by successive halving: options, trials and scores; and its table.

The next step follows from the state alone, so a killed sweep continues without a difference. The
state is one sealed file, `sweep.json`, which is replaced as a whole. Beside it are the base recipe,
`base.yaml`, and the trials, which are ordinary run folders t0, t1, ...
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from etude.compare.comparison import METRICS as USUAL
from etude.compare.comparison import RETURN, SUCCESS
from etude.compare.reading import shown
from etude.compare.sweeps import values
from etude.compare.sweeps.values import Scored, Values, Vary
from etude.core.clock import Interval, Loops
from etude.core.errors import Damaged, UsageError
from etude.core.metrics import numbers
from etude.core.output import csv_text, rendered
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import files
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.file_system import Lock
from etude.runs.folder import METRICS, RECIPE
from etude.runs.metrics_log import DiskHistory
from etude.training.logs.curves import number

STATE, BASE = "sweep.json", "base.yaml"
DIVERGED = "diverged: not a finite number"


@dataclass(frozen=True)
class Asked:
    """The options of a sweep."""

    vary: tuple[str, ...]
    sampler: Literal["grid", "random", "tpe"] = "random"
    seed: int = 0
    trials: int = 0
    """Trials per bracket."""
    brackets: int = 1
    rungs: int = 1
    reduction_factor: int = 3
    metric: str | None = None
    minimize: bool = False

    def left(self, trials: int, rung: int) -> int:
        """The number of trials in a rung, counted from 0, of a bracket with that many trials."""
        return max(trials // self.reduction_factor**rung, 1) if trials else 0

    def share(self, rung: int) -> float:
        """The share of its budget that a trial has spent at the end of a rung."""
        return float(self.reduction_factor) ** (rung + 1 - self.rungs)


def most_rungs(trials: int, factor: int) -> int:
    """The number of rungs after which one trial is left."""
    return 1 + int(math.log(trials) / math.log(factor) + 1e-9)


@dataclass
class Trial:
    """A trial: a run that is planned with its full budget."""

    number: int
    bracket: int
    values: Values
    refused: str = ""
    """The error of its plan; "" if it can be run."""
    pauses: list[int] = field(default_factory=list)
    """Iterations at the end of each rung; the last is the end of the run."""
    steps: list[int] = field(default_factory=list)
    """Environment steps at the end of each rung; updates when learning from a dataset."""
    scores: list[float] = field(default_factory=list)
    """Scores at the completed rungs."""
    ties: list[float] = field(default_factory=list)
    """Mean rewards at the completed rungs, which rank trials of equal success; 0 without one."""
    failed: str = ""
    """The reason of its failure; "" without one."""

    @property
    def name(self) -> str:
        return f"t{self.number}"


class Sweep:
    """A sweep in its folder. One process at a time holds its lock."""

    def __init__(self, folder: Path, recipe: Recipe, asked: Asked) -> None:
        self.folder, self.recipe, self.asked = folder, recipe, asked
        self.metric = asked.metric
        self.trials: list[Trial] = []
        self.complete = 0
        """Number of completed rungs over all brackets."""
        self.varied: list[Vary] = [values.parse(text, recipe) for text in asked.vary]
        self._lock: Lock | None = None

    @classmethod
    def create(cls, folder: Path, recipe: Recipe, asked: Asked) -> Sweep:
        """The sweep in the folder if its options are the same, or a new one.

        `save` writes it to disk.
        """
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
    def open(cls, folder: Path, trust: bool = False, write: bool = True) -> Sweep:
        """Open the sweep in a folder; write: lock it for this process."""
        path = folder / STATE
        if not path.is_file():
            raise UsageError(f"{folder} is not a sweep: it has no {STATE}. Check the path.")
        lock = Lock(folder) if write else None
        try:
            known = decode_sealed(path.read_bytes())
            asked = Asked(**{**known["asked"], "vary": tuple(known["asked"]["vary"])})
            sweep = cls(folder, recipes.load(folder / BASE, trust), asked)
            sweep.trials = [Trial(**each) for each in known["trials"]]
            for trial in sweep.trials:  # JSON has them sorted by name
                trial.values = {vary.field: trial.values[vary.field] for vary in sweep.varied}
                known_numbers = (*trial.scores, *trial.ties, *trial.steps, trial.number)
                if not all(isinstance(each, int | float) for each in known_numbers):
                    raise ValueError(f"trial {trial.number} has scores that are not numbers")
            sweep.metric, sweep.complete = known["metric"], known["complete"]
        except (ValueError, KeyError, TypeError) as error:
            if lock is not None:
                lock.release()
            raise Damaged(path, f"{path} cannot be read: {error}.") from error
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        sweep._lock = lock
        return sweep

    def save(self) -> None:
        """Write the state to disk; make the folder first if it is new."""
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
        """Release the lock, as the end of the process does."""
        if self._lock is not None:
            self._lock.release()

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.name

    @property
    def rung(self) -> tuple[int, int]:
        """The current (bracket, rung); the bracket after the last when the sweep is done."""
        return divmod(self.complete, self.asked.rungs)

    @property
    def is_done(self) -> bool:
        return self.complete >= self.asked.rungs * self.asked.brackets

    def draw(self) -> list[Trial]:
        """Draw the trials of the current bracket."""
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
        """The trials of earlier brackets with their scores."""
        past: list[Scored] = []
        for trial in self.trials:
            missing = [None] * (self.asked.rungs - len(trial.scores))
            if not trial.refused:
                past.append((trial.values, [*trial.scores, *missing]))
        return past

    def contenders(self) -> list[Trial]:
        """The trials of the current rung: the best of the rung before it."""
        bracket, rung = self.rung
        possible = [t for t in self.trials if t.bracket == bracket and not t.refused]
        if rung == 0:
            return [t for t in possible if not t.failed]
        last = [t for t in possible if len(t.scores) >= rung]
        best = sorted(last, key=lambda t: self.rank(t, rung - 1))
        chosen = best[: self.asked.left(len(possible), rung)]
        return sorted((t for t in chosen if not t.failed), key=lambda t: t.number)

    def rank(self, trial: Trial, rung: int) -> tuple[float, float, int]:
        """The sort key of the trials of a rung: the best first, then the first drawn."""
        score = trial.scores[rung]
        return (score if self.asked.minimize else -score), -trial.ties[rung], trial.number

    def complete_rung(self, trials: Sequence[Trial]) -> None:
        """Store the scores of a rung whose trials have all reached its end, or failed."""
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
        """(metric, last value) up to the end of a rung."""
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
        """The log rows of a trial up to the end of a rung."""
        rows = map(numbers, DiskHistory(self.path(trial) / METRICS))
        return (row for row in rows if row.get("iterations", 0) <= trial.pauses[rung])

    def best(self) -> Trial | None:
        """The best of the trials with their whole budget."""
        whole = [t for t in self.trials if len(t.scores) == self.asked.rungs]
        return min(whole, key=lambda t: self.rank(t, -1), default=None)


def shown_score(metric: str | None, score: float) -> str:
    """A score as text."""
    is_share = metric is not None and metric.endswith("success_rate")
    return f"{score:.1%}" if is_share else number(score)


def pauses(recipe: Recipe, loops: Loops, asked: Asked) -> list[int]:
    """The iterations at which the rungs of a trial end.

    A rung ends when the first evaluation at or after its share of the budget has been logged. Rungs
    that would end at the same iteration are refused.
    """
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
    """The options with as many rungs as the evaluations of a recipe allow."""
    for rungs in range(asked.rungs, 1, -1):
        fewer = replace(asked, rungs=rungs)
        with suppress(UsageError):
            pauses(recipe, loops, fewer)
            return fewer
    return replace(asked, rungs=1)


def _is_due(loops: Loops, iteration: int, every: Interval) -> bool:
    """Whether an evaluation is due at an iteration; True for all if evaluation is disabled."""
    before, after = loops.at(iteration - 1), loops.at(iteration)
    return every.count == 0 or before.is_due(every, after)


def ordered(sweep: Sweep) -> list[Trial]:
    """All trials, sorted by completed rungs, then by score; refused ones last."""

    def key(trial: Trial) -> tuple[Any, ...]:
        rank = sweep.rank(trial, -1) if trial.scores else (0.0, 0.0, trial.number)
        return bool(trial.refused), -len(trial.scores), *rank

    return sorted(sweep.trials, key=key)


def settings(trial: Trial) -> str:
    """The values of a trial as text: "learning_rate 0.001, gamma 0.95"."""
    return ", ".join(f"{n.rpartition('.')[2]} {shown(v)}" for n, v in trial.values.items())


def notes(trials: Sequence[Trial]) -> list[str]:
    """The reasons why trials were refused or failed, each once: "t0, t3: ..."."""
    found: dict[str, list[str]] = {}
    for trial in trials:
        if why := trial.refused or trial.failed:
            found.setdefault(why, []).append(trial.name)
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def rung_titles(sweep: Sweep) -> list[str]:
    """The column titles of rungs: steps, or shares of the budget if steps differ between trials."""
    planned = [trial.steps for trial in sweep.trials if trial.steps and not trial.refused]
    if planned and all(steps == planned[0] for steps in planned):
        return [f"at {step:,}" for step in planned[0]]
    return [f"at {100 * sweep.asked.share(rung):.0f} %" for rung in range(sweep.asked.rungs)]


def to_table(sweep: Sweep, width: int = 100, color: bool = False) -> str:
    """The table for the terminal."""
    best = sweep.best()
    order = "lower is better" if sweep.asked.minimize else "higher is better"
    title = f"{sweep.metric or 'No scores'}, {order}; of {len(sweep.trials)} trials the best first"
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trial", no_wrap=True)
    for name in sweep.trials[0].values:
        table.add_column(name.rpartition(".")[2], justify="right", overflow="fold")
    for rung in rung_titles(sweep):
        table.add_column(rung, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for trial in ordered(sweep):
        scores = [shown_score(sweep.metric, score) for score in trial.scores]
        word = "best" if trial is best else "refused" if trial.refused else ""
        word = "failed" if trial.failed else word
        cells = [Text(shown(value)) for value in trial.values.values()]
        rungs = [*scores, *[""] * (sweep.asked.rungs - len(scores))]
        table.add_row(trial.name, *cells, *rungs, word, style="bold" if trial is best else "")
    return rendered([title, table, *map(Text, notes(sweep.trials))], width, color)


def to_json(sweep: Sweep) -> dict[str, Any]:
    """The table for programs."""
    best = sweep.best()
    return {
        "metric": sweep.metric,
        "minimize": sweep.asked.minimize,
        "best": None if best is None else str(sweep.path(best)),
        "trials": [
            {
                "trial": trial.number,
                "bracket": trial.bracket,
                "run": None if trial.refused else str(sweep.path(trial)),
                "values": trial.values,
                "steps": trial.steps[: len(trial.scores)],
                "scores": trial.scores,
                "refused": trial.refused,
                "failed": trial.failed,
            }
            for trial in sweep.trials
        ],
    }


def to_csv(sweep: Sweep) -> str:
    """A row for each trial and completed rung; one without a score for trials without any."""
    rows = [["trial", *sweep.trials[0].values, "step", sweep.metric or "score", "note"]]
    for trial in sweep.trials:
        values = [v if isinstance(v, str) else json.dumps(v) for v in trial.values.values()]
        note = trial.refused or trial.failed
        pairs = zip(trial.steps, trial.scores, strict=False)
        points: list[tuple[Any, Any]] = [*pairs] or [("", "")]
        rows += [[trial.name, *values, *point, note] for point in points]
    return csv_text(rows)
