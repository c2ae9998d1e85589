"""Declarations of metrics with their columns, curves and checks, and the health of a run.

Each kind declares its metrics in its module; metrics of all runs are here. `Health` follows the log
rows and calls the checks of all metrics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from etude.core.history import Row as LogRow
from etude.core.history import Thinned, history_of
from etude.core.intervals import Interval, difference_of_means, difference_of_rates

ITERATIONS, ELAPSED = "iterations", "time/time_elapsed"


def step_of(row: Mapping[str, Any]) -> int:
    """The x axis: environment steps, or gradient updates in offline learning."""
    return int((not is_offline(row) and row.get("timesteps")) or row.get("updates") or 0)


def is_offline(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a run that learns offline, from a dataset.

    Its columns `episodes` and `timesteps` are those of the dataset, and constant.
    """
    return "dataset/passes" in row


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The columns that are finite numbers."""
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    }


EPISODES_CHART, TIMESTEPS = "time/episodes", "time/total_timesteps"
_COUNTERS = (
    *("epoch", "cycle", "iterations", "timesteps", "updates", "episodes"),
    *(TIMESTEPS, "time/iterations", "train/n_updates", "eval/episodes"),
)
"""Counters, whose curves are nearly straight lines. Only episodes and steps of online runs are
drawn, with the names of stable-baselines3."""


def chart_values(row: Mapping[str, Any]) -> dict[str, float]:
    """{name of a chart: value} of the columns that are drawn as curves: all but counters.

    Means over an epoch stand with the others of the update: dashboards group charts by the first
    part of their names.
    """
    known = numbers(row)
    chosen = {name: value for name, value in known.items() if name not in _COUNTERS}
    if not is_offline(row):
        counted = ((EPISODES_CHART, "episodes"), (TIMESTEPS, TIMESTEPS))
        chosen |= {chart: known[name] for chart, name in counted if name in known}
    return {
        f"train/per_{name}" if name.startswith("epoch/") else name: value
        for name, value in chosen.items()
    }


Row = Mapping[str, float]

RETURN = "rollout/ep_rew_mean"
RECENT = 3
"""Consecutive log rows that a check needs for a warning."""


class Warning(NamedTuple):
    """A problem of a run, and a remedy."""

    name: str
    text: str


class Column(NamedTuple):
    """Column of a metric in the table."""

    place: int
    """Sorting key: 0-9 progress and episodes, 10-89 learning, 90-99 evaluation."""
    width: int = 9
    """Width in characters; a longer label makes the column wider."""
    runs: Literal["all", "online", "offline"] = "all"
    """Runs whose table has the column."""


class Curve(NamedTuple):
    """Curve of a metric on the dashboard."""

    place: int
    """Sorting key; small terminals show the first curves only."""
    style: str = "cyan"
    """Color, as in `rich`."""
    bounds: tuple[float | None, float | None] = (None, None)
    """Limits of the scale; without them, values are shown with a precision that fits their size."""
    title: str = ""
    """Title; by default the metric's label."""


@dataclass(frozen=True)
class Metric:
    """One column of metrics.jsonl and how it is shown. Checks read declared metrics only."""

    name: str
    """For example "train/approx_kl"; a name that ends in "/" is a prefix of several metrics."""
    label: str
    """Heading in tables."""
    format: str = ".3g"
    """Format of its values, for Python's `format`."""
    column: Column | None = None
    curve: Curve | None = None
    about: str = ""
    """Description for reports of evaluations."""
    epoch: int | None = None
    """Position in the line at the end of an epoch."""
    losses: bool = False
    """Whether `logs.losses` adds lines of its mean per iteration and batch."""
    summary: str = ""
    """Format of the last evaluation in the summary of a run, of `value`, the whole `row`, and
    `best`, the `Best` of the run."""
    score: bool = False
    """Whether evaluations are compared by it, higher is better; the first of several counts
    most."""
    check: Callable[[Health], Warning | None] | None = None
    """Returns a warning if this metric shows a problem of the run."""
    reduce: Literal["mean", "last", "sum", "max"] = "mean"
    """Reducer of its values in a cycle, and in an epoch."""
    explored_by: str = ""
    """Fields of the recipe that set the exploration, for hints in warnings."""


Metrics = tuple[Metric, ...]


def outline(metrics: Metrics) -> list[str]:
    """Names of the metrics that outline a run: those of an epoch's line, and of evaluations."""
    return [metric.name for metric in metrics if metric.epoch is not None or metric.score]


def declares(metrics: Metrics) -> Callable[[str], bool]:
    """A predicate: whether a column of metrics.jsonl is declared."""
    names = {metric.name for metric in metrics}
    prefixes = tuple(name for name in names if name.endswith("/"))
    return lambda name: name in names or name.startswith(prefixes)


class Best(NamedTuple):
    """The evaluation of the policy that a run keeps as its best.

    Checkpoints have it: `etude.training.evaluation` compares, and everything that names a best
    shows this one.
    """

    success: float
    """Success rate; on held-out episodes of a dataset, their score."""
    reward: float
    """Mean reward; on held-out episodes of a dataset, the negative loss."""
    step: int
    """Environment steps, or updates in offline learning; also the name of the checkpoint."""

    def value(self, metric: str) -> float:
        """The value of a metric that evaluations are compared by."""
        return self.success if metric.endswith("success_rate") else self.reward


class Evaluated(NamedTuple):
    """The last evaluation of a run, beside the best."""

    metric: Metric
    """The metric that evaluations are compared by; higher is better."""
    last: Row
    best: Best | None

    def words(self) -> str:
        """Both in words, for example "eval return 12.00 (best 340.10 at 40,960)"."""
        name, shown = self.metric.name, self.metric.format
        text = f"{self.metric.label} {self.last[name]:{shown}}"
        if self.best is None:
            return text
        return f"{text} (best {self.best.value(name):{shown}} at {self.best.step:,})"


class Health:
    """Follows the log rows of a run: its trend, last evaluation and warnings.

    All its state follows from the rows and `best`, which is that of the checkpoint, so that a
    resumed run gives the same as one that never stopped.
    """

    def __init__(self, metrics: Metrics, total_iterations: int) -> None:
        self.metrics, self._total = metrics, max(total_iterations, 1)
        self._kept = Thinned[Row]()
        self._rows: list[Row] | None = None
        self._last: dict[str, Row] = {}
        self.best: Best | None = None
        """The best evaluation, which the loop or the reader of a run's folder sets."""
        self.progress = 0.0
        """Fraction of the run's iterations that is done."""
        self.explored_by = next((m.explored_by for m in metrics if m.explored_by), "")
        self._declares = declares(metrics)
        self._scores = [m for m in metrics if m.score]

    def begin(self, history: Iterable[LogRow]) -> None:
        """Add the rows from before a resume."""
        self.follow(history_of(history).thinned())

    def follow(self, history: Thinned[LogRow]) -> None:
        """Add rows that are thinned already."""
        self._kept, self._rows = history.mapped(self._declared), None
        self._last = {}
        for row in self.rows:
            self._remember(row)
        for row in [*history][-1:]:
            self.progress = (row.get(ITERATIONS) or 0.0) / self._total

    def add(self, row: Row) -> None:
        """Add a log row."""
        self.progress = row.get(ITERATIONS, 0.0) / self._total
        declared = self._declared(row)
        self._kept.add(declared, len(row))
        self._rows = None
        self._remember(declared)

    def _declared(self, row: Mapping[str, Any]) -> Row:
        return {name: value for name, value in numbers(row).items() if self._declares(name)}

    def _remember(self, row: Row) -> None:
        """Remember a row with an evaluation as the last one."""
        self._last |= {metric.name: row for metric in self._scores if metric.name in row}

    @property
    def rows(self) -> list[Row]:
        """Counters and declared metrics of all log rows; of a long run, of an evenly spaced part
        and of the last rows."""
        if self._rows is None:
            self._rows = [*self._kept]
        return self._rows

    def series(self, name: str, rows: Sequence[Row] | None = None) -> list[float]:
        """All values of a metric in `rows` or in all rows, oldest first."""
        return [row[name] for row in (self.rows if rows is None else rows) if name in row]

    def recent(self, name: str) -> list[float]:
        """Values of a metric in the last `RECENT` rows; [] if one of these rows has no value."""
        values = self.series(name, self.rows[-RECENT:])
        return values if len(values) == RECENT else []

    @property
    def trend(self) -> str:
        """Trend of training episodes: "rising", "level", "falling"; "" for the first rows."""
        return trend_of(self.series(episode_metric(self)))

    @property
    def evaluated(self) -> Evaluated | None:
        """The last evaluation, and the best."""
        metric = next((m for m in self._scores if m.name in self._last), None)
        return None if metric is None else Evaluated(metric, self._last[metric.name], self.best)

    @property
    def warnings(self) -> list[Warning]:
        """Warnings of the checks of all metrics, in the order of declaration."""
        checks = [metric.check for metric in self.metrics if metric.check and self.rows]
        return [warning for check in checks if (warning := check(self)) is not None]


def episode_metric(health: Health, prefix: str = "rollout") -> str:
    """The metric for the quality of episodes: the success rate from .1 on, else the return."""
    success, returns = f"{prefix}/success_rate", ("ep_rew_mean", "mean_reward")[prefix == "eval"]
    return success if max(health.series(success), default=0.0) >= 0.1 else f"{prefix}/{returns}"


def smooth(values: Sequence[float]) -> list[float]:
    """Moving average over `RECENT` values, [n - RECENT + 1]."""
    return [fmean(values[i : i + RECENT]) for i in range(len(values) - RECENT + 1)]


def trend_of(values: Sequence[float]) -> str:
    """Trend of a series: the mean of its last eighth compared with the eighth before.

    "level" if they differ by less than a twentieth of the range or 1.5 times the noise, or if the
    range is less than a tenth of the values' size. "" for short series.
    """
    level = smooth(values)
    size = max(len(level) // 8, RECENT)
    if len(level) < 2 * size:
        return ""
    moved = fmean(level[-size:]) - fmean(level[-2 * size : -size])
    extent = max(level) - min(level)
    if abs(moved) <= max(0.05 * extent, 1.5 * noise_of(values)):
        return "level"
    if extent <= 0.1 * max(map(abs, level)):
        return "level"
    return "rising" if moved > 0 else "falling"


def noise_of(values: Sequence[float]) -> float:
    """Median difference of neighbouring values."""
    return median(abs(b - a) for a, b in pairwise(values))


def _lost(best: float, before: Sequence[float], last: float) -> bool:
    """Whether more than half of the gain up to the best value is lost at the end.

    before: earlier values. If none is lower, half of the size of the best counts as the gain.
    """
    gained = best - min([*before, best]) or 0.5 * abs(best)
    return gained > 0.1 * abs(best) and best - last > 0.5 * gained


class Regression(NamedTuple):
    """A policy that has become much worse."""

    name: str
    """The metric that shows it."""
    best: float
    last: float
    interval: Interval | None = None
    """The 95 % interval of the fall, best - last, between two evaluations."""


def find_regression(health: Health) -> Regression | None:
    """The fall from the best policy to the present one, if it has lost most of what it gained.

    Measured by evaluations or, if the last one is not recent, by training episodes, unless a
    curriculum makes these harder. A difference between two evaluations that their sampling error
    explains is not a fall.
    """
    name, in_training = episode_metric(health, "eval"), episode_metric(health)
    begun, evaluations = health.series(in_training)[:1], [r for r in health.rows if name in r]
    if evaluations and health.best is not None:
        fall = _fall(health.best, name, evaluations, begun * _same_kind(name, in_training))
        if fall is not None:
            return fall
    hard = any(name.startswith("curriculum/") for name in health.rows[-1])
    if hard or health.series(name, health.rows[-2 * RECENT :]):
        return None
    values = smooth(health.series(in_training))
    highest = max(values, default=0.0)
    if not values or not _lost(highest, values[: values.index(highest)], values[-1]):
        return None
    return Regression(in_training, highest, values[-1])


def _fall(
    best: Best, name: str, evaluations: Sequence[Row], begun: Sequence[float]
) -> Regression | None:
    """The fall from the best evaluation to the last; begun: the first of training episodes.

    The row of the best is the first one at or after its step: a row has the last evaluation of its
    cycle only.
    """
    last, value = evaluations[-1], best.value(name)
    before = [row[name] for row in evaluations if step_of(row) <= best.step]
    if not _lost(value, [*begun, *before], last[name]):
        return None
    kept = next((row for row in evaluations if step_of(row) >= best.step), last)
    interval = _difference(name, value, kept, last)
    is_noise = interval is not None and interval[0] <= 0.0
    return None if is_noise else Regression(name, value, last[name], interval)


def _difference(name: str, best: float, kept: Row, last: Row) -> Interval | None:
    """The interval of best - last from the number and the spread of the episodes of each; None if
    the rows do not have them.

    For motion imitation it is too wide, since differences between motions count as well.
    """
    counts = [row.get("eval/episodes", 0.0) for row in (kept, last)]
    if min(counts) < 1.0:
        return None
    if name.endswith("success_rate"):
        return difference_of_rates(best, counts[0], last[name], counts[1])
    spreads = [row.get("eval/std_reward", math.nan) for row in (kept, last)]
    if any(map(math.isnan, spreads)):
        return None
    errors = [spread / math.sqrt(count) for spread, count in zip(spreads, counts, strict=True)]
    return difference_of_means(best, errors[0], last[name], errors[1])


def _same_kind(name: str, other: str) -> bool:
    return name.endswith("success_rate") == other.endswith("success_rate")


def got_worse(health: Health) -> Warning | None:
    found = find_regression(health)
    if found is None:
        return None
    metric = next(metric for metric in health.metrics if metric.name == found.name)
    best, last = (format(value, metric.format) for value in found[1:3])
    spread = ""
    if found.interval is not None:
        low, high = (format(end, metric.format) for end in found.interval)
        spread = f", with 95 % confidence by {low} to {high}"
    return Warning(
        f"{metric.label} fell",
        f"from {best} to {last}{spread}: the best policy is kept; to go further, train with "
        "smaller steps (algorithm.learning_rate). `etude replay RUN --at "
        f"{step_of(health.rows[-1])}` shows an episode of this step",
    )


def no_progress(health: Health) -> Warning | None:
    """Warn if the return has not improved, unless all episodes have the same return."""
    returns = health.series(RETURN)
    if health.progress < 0.5 or len(returns) < 3 * RECENT or is_doing_well(health):
        return None
    first, best = fmean(returns[:RECENT]), max(smooth(returns))
    small = max(0.01 * abs(first), min(0.15 * abs(first), 4 * noise_of(returns)))
    spread = health.series("eval/std_reward")
    if best - first > small or (spread and not any(spread)):
        return None
    return Warning(
        "no progress",
        f"the return began at {first:.2f} and is {returns[-1]:.2f}: larger steps "
        f"(algorithm.learning_rate), more exploration{_fields(health)}, or a denser reward",
    )


def is_doing_well(health: Health) -> bool:
    """Whether nearly all episodes succeed, or the return is the highest so far."""
    success, returns = (health.recent(f"rollout/{n}") for n in ("success_rate", "ep_rew_mean"))
    before = health.series(RETURN, health.rows[:-RECENT])
    rises = bool(returns and before) and fmean(returns) > max(before)
    return rises or (bool(success) and fmean(success) > 0.8)


def success_stuck(health: Health) -> Warning | None:
    success = health.series("rollout/success_rate")
    trends = {trend_of(success), trend_of(health.series(RETURN))}
    if health.progress < 0.5 or not trend_of(success) or "rising" in trends:
        return None
    now = fmean(success[-RECENT:])
    if now > 0.8:
        return None
    return Warning(
        "success stuck",
        f"success stays at {now:.0%}: more exploration{_fields(health)}, a denser reward, or an "
        "easier start",
    )


def needs_noise(health: Health) -> Warning | None:
    """Compare evaluations, which take the most likely actions, with rollouts, which sample them.

    Skipped where rollouts have an easier task (curriculum) or other initial states (motion clips).
    """
    if any(name.startswith(("curriculum/", "eval/mpjpe")) for name in health.rows[-1]):
        return None
    evaluated = [row for row in health.rows if "eval/success_rate" in row][-RECENT:]
    sampled = health.series("rollout/success_rate", evaluated)
    likely = health.series("eval/success_rate", evaluated)
    if len(sampled) < RECENT or fmean(likely) > 0.5 * fmean(sampled) or min(sampled) < 0.2:
        return None
    return Warning(
        "success needs the noise",
        f"{fmean(sampled):.0%} of episodes succeed with exploration noise and {fmean(likely):.0%} "
        f"with the most likely actions: train on, or explore less{_fields(health)}",
    )


def _fields(health: Health) -> str:
    return f" ({health.explored_by})" if health.explored_by else ""


def term_dominates(health: Health) -> Warning | None:
    shares = []
    for row in health.rows[-RECENT:]:
        terms = {name: abs(value) for name, value in row.items() if name.startswith("reward/")}
        total = sum(terms.values())
        if len(terms) < 2 or total == 0.0:
            return None
        largest = max(terms, key=lambda name: terms[name])
        shares.append((largest, terms[largest] / total))
    if len(shares) < RECENT or len({name for name, _ in shares}) > 1:
        return None
    name, share = shares[-1]
    if min(value for _, value in shares) < 0.95 or is_doing_well(health):
        return None
    return Warning(
        "one reward term dominates",
        f"{name} is {share:.0%} of the reward, the others hardly count: lower its weight",
    )


COUNTERS: Metrics = (
    Metric("timesteps", "steps", ",.0f", Column(0, 11, "online")),
    Metric("updates", "updates", ",.0f", Column(0, 11, "offline")),
    Metric("episodes", "episodes", ",.0f", Column(1, 9, "online")),
    Metric("cycle", "cycle", ".0f", Column(1, 6, "offline")),
    Metric(ELAPSED, "seconds", ",.0f", Column(2, 8)),
    Metric("dataset/passes", "passes", ",.1f", Column(3, 9, "offline"), reduce="last"),
    Metric(
        "time/fps", "fps", ",.0f", Column(3, 8, "online"), Curve(60, "blue", (0, None), "steps/s")
    ),
    Metric("train/n_updates", "updates", ",.0f", reduce="last"),
    Metric("train/learning_rate", "learning rate", curve=Curve(65, "white"), reduce="last"),
    Metric("eval/", "evaluation", reduce="last"),
    Metric("curriculum/", "curriculum", reduce="last"),
)
"""Metrics of all runs."""
EPISODES: Metrics = (
    Metric(
        "rollout/success_rate",
        "success",
        ".0%",
        Column(6, 8, "online"),
        Curve(1, "green", (0, 1)),
        epoch=0,
        check=success_stuck,
    ),
    Metric(
        RETURN,
        "return",
        ".2f",
        Column(4, 9, "online"),
        Curve(0, "green"),
        epoch=1,
        check=no_progress,
    ),
    Metric(
        "rollout/ep_len_mean",
        "length",
        ".1f",
        Column(5, 8, "online"),
        Curve(10, "blue", (0, None), "episode length"),
    ),
    Metric(
        "eval/success_rate",
        "eval success",
        ".1%",
        Column(90, 13),
        Curve(2, "bright_green", (0, 1)),
        summary="{value:.1%} success, mean reward {row[eval/mean_reward]:.2f}; best "
        "{best.success:.1%} at {best.step:,}",
        check=needs_noise,
        score=True,
    ),
    Metric(
        "eval/mean_reward",
        "eval return",
        ".2f",
        Column(91, 12),
        Curve(3, "bright_green"),
        summary="mean reward {value:.2f}; best {best.reward:.2f} at {best.step:,}",
        check=got_worse,
        score=True,
    ),
    Metric(
        "reward/",
        "reward terms",
        curve=Curve(100, "yellow"),
        check=term_dominates,
    ),
)
"""Metrics of episodes in training and evaluation, of runs with an environment."""
