"""Comparison of groups of runs over seeds: curves, final scores, probability of improvement.

Scores are arrays [..., num_runs, num_tasks]. Intervals of means are those of Agarwal et al. (2021):
the bootstrap draws runs with replacement for each task separately (stratified); ends are
percentiles. A bootstrap of a probability that all pairs of runs agree on has no width, so that
interval is in closed form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from etude.compare.reading import RunRecord, key_of, printable, shown
from etude.core.errors import UsageError
from etude.core.intervals import wilson_of
from etude.training.logs.curves import number

SUCCESS, RETURN = "eval/success_rate", "eval/mean_reward"
METRICS = (SUCCESS, RETURN, "rollout/ep_rew_mean")
"""Default metrics: the first that all runs have is compared."""
USUAL_SUCCESS = 0.9
_MOST_POINTS, _MOST_GROUPS = 200, 26
_SAME_END = 0.99
"""Smallest ratio of the last steps of two runs with the same budget, which iterations of different
sizes round to different numbers."""
_MISSING = object()


class Reached(NamedTuple):
    """When a run first reached the level of success."""

    step: int
    seconds: float


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    letter: str
    label: str
    runs: tuple[RunRecord, ...]
    steps: list[int]
    values: Scores
    """The metric of each run at those steps, [num_runs, num_points]."""
    reached: tuple[Reached | None, ...]
    """When each run reached the level of success; None if it did not."""

    @property
    def name(self) -> str:
        return f"{self.letter}  {self.label}"

    @property
    def final(self) -> Scores:
        """The score of each run, [num_runs, 1]: its last value."""
        return self.values[:, -1:]

    def median(self, part: int) -> float:
        """The median over runs of the step (0) or the seconds (1) at success.

        It is infinite if half of the runs never succeeded.
        """
        each = [math.inf if r is None else float(r[part]) for r in self.reached]
        low, high = sorted(each)[(len(each) - 1) // 2], sorted(each)[len(each) // 2]
        return (low + high) / 2


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs of one task, at one step."""

    metric: str
    end: int
    unit: str
    success: float | None
    """The level of the metric that counts as success in `Group.reached`."""
    groups: tuple[Group, ...]
    differences: dict[str, list[str]]
    """{setting: its value in each group}, of settings that differ; "" in a group without it."""
    notes: tuple[str, ...] = ()

    @property
    def is_share(self) -> bool:
        return self.metric.endswith("success_rate")

    def score(self, value: float) -> str:
        """A value of the metric as text."""
        return f"{value:.1%}" if self.is_share else number(value)

    def level(self, value: float) -> str:
        """A value of the metric as short text."""
        return f"{value:.0%}" if self.is_share else number(value)

    def pairs(self) -> list[tuple[Group, Group, Improvement]]:
        """(a, b, probability that a run of a scores higher than one of b) of every two groups."""
        return [(a, b, improvement(a.final, b.final)) for a, b in combinations(self.groups, 2)]


def compare(
    records: Sequence[RunRecord],
    metric: str | None = None,
    at: int | None = None,
    success: float | None = None,
    any_task: bool = False,
    by_folder: bool = False,
) -> Comparison:
    """Compare runs in groups; raises if they cannot be compared.

    metric: a column of metrics.jsonl. at: the step to compare at, default the end. success: a level
    of the metric, default 0.9 of a success rate. any_task: allow different environments. by_folder:
    group runs by folder and not by recipe.
    """
    for record in records:
        if not record.rows:
            raise UsageError(
                f"{record.path} has no rows yet: leave it out, or `etude resume {record.path}`."
            )
    chosen = _metric(records, metric)
    _check_tasks(records, chosen, any_task)
    end = _end(records, at)
    if success is None and chosen.endswith("success_rate"):
        success = USUAL_SUCCESS
    parts: dict[str, list[RunRecord]] = {}
    for record in records:
        key = str(record.path.parent) if by_folder else key_of(record.compared)
        parts.setdefault(key, []).append(record)
    if len(parts) > _MOST_GROUPS:
        raise UsageError(
            f"These are {len(parts)} groups, and a comparison has at most {_MOST_GROUPS}: name "
            "fewer runs."
        )
    differences = _differences([*parts.values()])
    labels = _labels([*parts.values()], differences, by_folder)
    groups = []
    for index, (runs, label) in enumerate(zip(parts.values(), labels, strict=True)):
        runs.sort(key=lambda run: (str(run.seed).zfill(20), str(run.path)))
        groups.append(_group(chr(ord("A") + index), label, runs, chosen, end, success))
    return Comparison(
        chosen, end, records[0].unit, success, tuple(groups), differences, _notes(groups)
    )


def _metric(records: Sequence[RunRecord], asked: str | None) -> str:
    """The metric to compare; raises if a run does not have it."""
    known = [{name for row in record.rows for name in row} for record in records]
    common = set.intersection(*known)
    if asked is None:
        found = next((name for name in METRICS if name in common), None)
        if found is None:
            raise UsageError(
                "These runs have no evaluation or return in common: name a column of their "
                "metrics.jsonl with --metric."
            )
        return found
    for record, names in zip(records, known, strict=True):
        if asked not in names:
            other = ", ".join(name for name in METRICS if name in common) or "none of the usual"
            raise UsageError(f"{record.path} has no metric '{asked}'; all of them have {other}.")
    return asked


def _check_tasks(records: Sequence[RunRecord], metric: str, any_task: bool) -> None:
    """Raise if the scores of runs are not comparable.

    Success rates are comparable between different rewards, returns are not.
    """
    first = records[0]
    for record in records[1:]:
        if record.unit != first.unit:
            raise UsageError(
                f"{first.path} is counted in {first.unit} and {record.path} in {record.unit}: "
                "compare them apart."
            )
        both = [n for n in first.settings if n in record.settings and n.startswith("env.")]
        apart = [
            name
            for name in ("env", "env.kind", *both)  # versions may have different fields
            if first.settings.get(name, _MISSING) != record.settings.get(name, _MISSING)
            and not (metric.endswith("success_rate") and name.startswith("env.reward"))
        ]
        apart = [*dict.fromkeys(apart)]
        if apart and not any_task:
            name = next((n for n in apart if n in ("env.kind", "env.id", "env.task")), apart[0])
            here, there = (shown(r.settings.get(name)) for r in (first, record))
            more = f" and {len(apart) - 1} more fields" if len(apart) > 1 else ""
            raise UsageError(
                f"{first.path} and {record.path} have different tasks: {name} is {here} and "
                f"{there}{more}. Compare them apart, or with --any-task."
            )


def _end(records: Sequence[RunRecord], at: int | None) -> int:
    """The step to compare at; raises if a run has not reached it."""
    first, last = (pick(records, key=lambda r: r.last_step) for pick in (min, max))
    unit = records[0].unit
    if at is not None:
        if first.last_step < at * _SAME_END:
            raise UsageError(
                f"{first.path} ends at {first.last_step:,} {unit}, before --at {at:,}: leave it "
                "out, or compare at an earlier step."
            )
        return at
    if first.last_step < last.last_step * _SAME_END:
        raise UsageError(
            f"The runs have different budgets: {first.path} ends at {first.last_step:,} {unit} and "
            f"{last.path} at {last.last_step:,}. Compare all of them at one step with "
            f"--at {first.last_step}."
        )
    return last.last_step


def _differences(parts: Sequence[Sequence[RunRecord]]) -> dict[str, list[str]]:
    """{setting: value in each group} of settings that differ between groups."""
    names = dict.fromkeys(name for runs in parts for name in runs[0].compared)
    found = {}
    for name in names:
        values = [
            dict.fromkeys(shown(run.compared[name]) if name in run.compared else "" for run in runs)
            for runs in parts
        ]
        if len({tuple(each) for each in values}) > 1:
            found[name] = [" or ".join(each) for each in values]
    return found


def _labels(
    parts: Sequence[Sequence[RunRecord]], differences: dict[str, list[str]], by_folder: bool
) -> list[str]:
    """The label of each group: the settings that differ if they are short, else its folder."""
    labels = []
    for index, runs in enumerate(parts):
        own = [f"{name.rpartition('.')[2]} {v[index] or '-'}" for name, v in differences.items()]
        label = ", ".join(own) if 0 < len(own) <= 2 else ""
        if by_folder:
            label = runs[0].path.absolute().parent.name
        elif not label or len(label) > 48:
            names = [run.path.name for run in runs]
            common = names[0] if len(names) == 1 else _common(names)
            label = common or runs[0].path.absolute().parent.name
        labels.append(label if len(parts) > 1 or by_folder else runs[0].name or label)
    taken = Counter(labels)
    return [
        printable(f"{label} ({runs[0].path.parent})" if taken[label] > 1 else label)
        for label, runs in zip(labels, parts, strict=True)
    ]


def _common(names: Sequence[str]) -> str:
    """The common beginning of names, without the beginning of a seed's number."""
    size = next(
        (i for i, letters in enumerate(zip(*names, strict=False)) if len({*letters}) > 1),
        min(map(len, names)),
    )
    text = names[0][:size].rstrip("-_. ")
    for mark in ("-seed", "_seed", "-s", "_s"):
        text = text.removesuffix(mark)
    return text if len(text) > 1 else ""


def _group(
    letter: str,
    label: str,
    runs: Sequence[RunRecord],
    metric: str,
    end: int,
    success: float | None,
) -> Group:
    series = [[point for point in run.series(metric) if point[0] <= end] for run in runs]
    for run, points in zip(runs, series, strict=True):
        if not points:
            raise UsageError(f"{run.path} has no {metric} up to step {end:,}: compare later.")
    _refuse_copies(runs, series)
    start = max(points[0][0] for points in series)
    steps = sorted({step for points in series for step, *_ in points if step >= start})
    if len(steps) > _MOST_POINTS:
        kept = np.linspace(0, len(steps) - 1, _MOST_POINTS).round().astype(int)
        steps = [steps[k] for k in kept]
    values = np.empty((len(runs), len(steps)))
    for line, points in zip(values, series, strict=True):
        index = np.searchsorted([step for step, *_ in points], steps, side="right") - 1
        line[:] = [points[k][1] for k in index]
    reached = tuple(
        next(
            (Reached(step, s) for step, v, s in points if success is not None and v >= success),
            None,
        )
        for points in series
    )
    return Group(letter, label, tuple(runs), steps, values, reached)


def _refuse_copies(
    runs: Sequence[RunRecord], series: Sequence[list[tuple[int, float, float]]]
) -> None:
    """Raise if a run is there twice: a copy is not another sample."""
    seen: dict[Any, Path] = {}
    for run, points in zip(runs, series, strict=True):
        key = (str(run.seed), tuple((step, value) for step, value, _ in points))
        if key in seen:
            raise UsageError(
                f"{seen[key]} and {run.path} are the same run, of seed {run.seed}: leave one out."
            )
        seen[key] = run.path


def _notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """Notes on other differences that may explain scores or times."""
    notes = []
    every = [run for group in groups for run in group.runs]
    for title, path in (("CPUs", ("cpu", "model")), ("versions of Etude", ("versions", "etude"))):
        sections = [run.manifest.get(path[0]) for run in every]
        each = {shown(s[path[1]]) for s in sections if isinstance(s, dict) and path[1] in s}
        if len(each) > 1:
            notes.append(f"the runs were made with different {title}: {', '.join(sorted(each))}.")
    threads = {shown(run.settings.get("collector.threads")) for run in every}
    if len(threads) > 1:
        notes.append(
            f"collector.threads is {' and '.join(sorted(threads))}: compare times with care."
        )
    few = [group.letter for group in groups if len(group.runs) < 5]
    if few:
        notes.append(
            f"{', '.join(few)} {'has' if len(few) == 1 else 'have'} fewer than five runs, for "
            "which the interval of a bootstrap is too narrow: etude train RECIPE --seeds 5."
        )
    return tuple(notes)


Scores = npt.NDArray[np.float64]

DRAWS = 50_000
"""Bootstrap samples per interval."""
CONFIDENCE = 0.95
_BLOCK = 1 << 21
"""Numbers drawn at once, a bound on memory."""


class Estimate(NamedTuple):
    """A statistic and its confidence interval."""

    value: float
    low: float
    high: float


def iqm(scores: Scores) -> Any:
    """Interquartile mean over runs and tasks, [...]: cuts off a quarter of the scores, rounded
    down, at either end."""
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)


def mean(scores: Scores) -> Any:
    """The mean over runs and tasks, [...]."""
    return scores.mean(axis=(-2, -1))


def probability_of_improvement(x: Scores, y: Scores) -> Any:
    """Probability that a run of x scores higher than one of y on the same task, mean over tasks,
    [...]. Equal scores count half."""
    ours, theirs = x[..., :, None, :], y[..., None, :, :]
    return ((ours > theirs) + 0.5 * (ours == theirs)).mean(axis=(-3, -2, -1))


class Improvement(NamedTuple):
    """The probability that a run of one group scores higher than one of another, and a test."""

    value: float
    low: float
    high: float
    p_value: float
    """The p-value of the exact two-sided permutation test that both have the same scores."""
    smallest_p_value: float
    """The smallest one that groups of these sizes can give."""


def improvement(x: Scores, y: Scores) -> Improvement:
    """The probability of improvement of x [n, 1] over y [m, 1], with an interval for few runs.

    The interval is Wilson's for min(n, m) trials: no two distributions of scores give the
    probability a larger variance than that (van Dantzig, 1951).
    """
    value = float(probability_of_improvement(x, y))
    low, high = wilson_of(value, min(len(x), len(y)))
    smallest = min(1.0, 2.0 / math.comb(len(x) + len(y), len(x)))
    return Improvement(value, low, high, permutation_test(x[:, 0], y[:, 0]), smallest)


def permutation_test(x: Scores, y: Scores) -> float:
    """The two-sided p-value of the Mann-Whitney statistic of x [n] and y [m] over all permutations.

    Subsets of n scores are counted by the sum of their ranks; equal scores have their mean rank.
    """
    both = np.concatenate([x, y])
    # Twice the rank is an integer.
    ranks = (both[:, None] > both).sum(axis=1) + (both[:, None] >= both).sum(axis=1) + 1
    counts = np.zeros((len(x) + 1, int(ranks.sum()) + 1))
    counts[0, 0] = 1.0
    for rank in ranks:
        counts[1:, rank:] += counts[:-1, :-rank].copy()
    sums, middle = np.arange(counts.shape[1]), len(x) * (len(both) + 1)
    is_as_far = abs(sums - middle) >= abs(int(ranks[: len(x)].sum()) - middle)
    return float(counts[-1, is_as_far].sum() / counts[-1].sum())


def estimate(
    statistic: Callable[..., Any], *samples: Scores, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """A statistic of samples [num_runs, num_tasks] with its interval; samples are drawn
    independently. The same seed gives the same interval."""
    generator = np.random.default_rng(seed)
    pairs = float(np.prod([sample.shape[0] for sample in samples])) * samples[0].shape[1]
    block = max(int(_BLOCK / max(pairs, 1.0)), 1)
    found = []
    for start in range(0, draws, block):
        count = min(block, draws - start)
        drawn = [_drawn(generator, sample, count) for sample in samples]
        found.append(statistic(*drawn))
    low, high = percentiles(np.concatenate(found))
    return Estimate(float(statistic(*samples)), float(low), float(high))


def band(values: Scores, draws: int = 2000, seed: int = 0) -> tuple[Scores, Scores, Scores]:
    """(interquartile mean, low, high), each [num_points], of curves [num_runs, num_points]."""
    runs, points = values.shape
    index = np.random.default_rng(seed).integers(0, runs, (draws, runs))
    edges = np.array([percentiles(iqm(values[index, k][..., None])) for k in range(points)])
    return iqm(values.T[..., None]), edges[:, 0], edges[:, 1]


def percentiles(values: Scores) -> Scores:
    """Low and high end of the interval with `CONFIDENCE` of the values, [2]."""
    outside = 50.0 * (1.0 - CONFIDENCE)
    ends: Scores = np.percentile(values, [outside, 100.0 - outside])
    return ends


def _drawn(generator: np.random.Generator, sample: Scores, count: int) -> Scores:
    runs, tasks = sample.shape
    index = generator.integers(0, runs, (count, runs, tasks))
    return sample[index, np.arange(tasks)]
