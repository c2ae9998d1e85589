"""Metrics declare themselves: their names, where they are shown, and when they are a warning.

A config class of a kind (algorithm, rewards, environment) lists the metrics that its kind logs in
`metrics: ClassVar[tuple[Metric, ...]]`. Console, dashboard, health and the summary at a run's end
are handed these declarations and know no metric by name. This module also declares what every run
logs (`COUNTERS`) and what runs with an environment log (`EPISODES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from etude.metrics.rows import ITERATIONS

Row = Mapping[str, float]

RECENT = 3
"""Consecutive log rows that must agree before a check gives a warning."""


class Warning(NamedTuple):
    """Something that looks wrong, and what to try."""

    name: str
    text: str


class Column(NamedTuple):
    """How a metric is shown in the table."""

    place: int
    """Columns are sorted by it: 0-9 progress and episodes, 10-89 learning, 90-99 evaluation."""
    width: int = 9
    """In characters; a longer label makes the column wider."""
    runs: Literal["all", "online", "offline"] = "all"
    """The runs whose table has the column; an offline run learns from a dataset."""


class Curve(NamedTuple):
    """How a metric is shown on the dashboard."""

    place: int
    """Curves are sorted by it; small terminals show the first ones only."""
    style: str = "cyan"
    """Its color, as `rich` names it."""
    bounds: tuple[float | None, float | None] = (None, None)
    """Ends of the scale; without any, the value is shown with a precision that fits its size."""
    title: str = ""
    """Its name, if that differs from the metric's label."""
    unless: str = ""
    """It is left out in runs that log the metric of this name."""


@dataclass(frozen=True)
class Metric:
    """One column of metrics.jsonl and how it is shown; checks read declared metrics only."""

    name: str
    """Such as "train/approx_kl"; a name that ends in "/" stands for all metrics that begin so."""
    label: str
    """Its heading in tables."""
    format: str = ".3g"
    """Of its values, as for Python's `format`."""
    column: Column | None = None
    curve: Curve | None = None
    about: str = ""
    """What it measures, for reports of evaluations."""
    epoch: int | None = None
    """Its place in the line that ends an epoch."""
    losses: bool = False
    """Whether `logs.losses` asks for lines of its mean in iterations and batches."""
    summary: str = ""
    """What a run's end says of the last evaluation, a format of `value`, of the whole `row`, and
    of `best`, the pair of numbers that the evaluator compares policies by."""
    phase: Callable[[Sequence[float]], str] | None = None
    """The phase of training that the metric's values, oldest first, show."""
    check: Callable[[Health], Warning | None] | None = None
    """Gives a warning when the run looks wrong by this metric."""
    reduce: Literal["mean", "last", "sum", "max"] = "mean"
    """How its values in a cycle, and in an epoch, become one."""
    explored_by: str = ""
    """The fields of the recipe that set how much the policy explores, for hints in warnings."""


Metrics = tuple[Metric, ...]


def declares(metrics: Metrics) -> Callable[[str], bool]:
    """Whether a column of metrics.jsonl is declared, as a function of its name."""
    names = {metric.name for metric in metrics}
    prefixes = tuple(name for name in names if name.endswith("/"))
    return lambda name: name in names or name.startswith(prefixes)


class Health:
    """Follows the log rows of a run: the phase it is in, and what looks wrong.

    It keeps nothing that the rows do not hold, so a resumed run, given the rows that were kept,
    says the same as one that never stopped.
    """

    def __init__(self, metrics: Metrics, total_iterations: int) -> None:
        self.metrics, self._total = metrics, max(total_iterations, 1)
        self.rows: list[Row] = []
        """Of every log row the metrics that are declared."""
        self.progress = 0.0
        """The share of the run's iterations that is done, 0 to 1."""
        self.explored_by = next((m.explored_by for m in metrics if m.explored_by), "")
        self._declares = declares(metrics)

    def add(self, row: Row) -> None:
        """Take in a log row."""
        self.progress = row.get(ITERATIONS, 0.0) / self._total
        self.rows.append({name: value for name, value in row.items() if self._declares(name)})

    def series(self, name: str, rows: Sequence[Row] | None = None) -> list[float]:
        """All values of a metric, oldest first; of some rows only, if they are given."""
        return [row[name] for row in (self.rows if rows is None else rows) if name in row]

    def recent(self, name: str) -> list[float]:
        """A metric's values in the last `RECENT` rows; [] if one of these rows has none."""
        values = self.series(name, self.rows[-RECENT:])
        return values if len(values) == RECENT else []

    @property
    def phase(self) -> str:
        """Where learning stands, by the first metric that says so and has been logged."""
        for metric in self.metrics:
            if metric.phase and (values := self.series(metric.name)):
                return metric.phase(values)
        return PHASES[0]

    @property
    def warnings(self) -> list[Warning]:
        """What the checks of the run's metrics give, in the order of declaration."""
        checks = [metric.check for metric in self.metrics if metric.check and self.rows]
        return [warning for check in checks if (warning := check(self)) is not None]


PHASES = ("initialisation", "discovery", "skill development", "optimisation", "convergence")


def _phase_by_success(success: Sequence[float]) -> str:
    now = fmean(success[-RECENT:])
    if now < 0.02:
        return PHASES[0]
    if now < 0.2:
        return PHASES[1]
    if now < 0.8:
        return PHASES[2]
    settled = len(success) >= 2 * RECENT and now - fmean(success[-2 * RECENT : -RECENT]) < 0.01
    return PHASES[4] if settled and now >= 0.95 else PHASES[3]


def _phase_by_return(returns: Sequence[float]) -> str:
    """By the share of all improvement that is recent: large while a skill forms, then small."""
    if len(returns) < 2 * RECENT:
        return PHASES[0]
    first, before = fmean(returns[:RECENT]), fmean(returns[-2 * RECENT : -RECENT])
    now, best = fmean(returns[-RECENT:]), max(returns)
    gain = best - first
    if gain <= 0.1 * (abs(first) + 1e-8):
        return PHASES[0]
    recent = (now - before) / gain
    if len(returns) < 4 * RECENT:
        return PHASES[1]
    return PHASES[2] if recent > 0.1 else PHASES[3] if recent > 0.02 else PHASES[4]


def _success_stuck(health: Health) -> Warning | None:
    success = health.series("rollout/success_rate")
    third = len(success) // 3
    if health.progress < 0.5 or third < RECENT:
        return None
    now, before = fmean(success[-third:]), fmean(success[-2 * third : -third])
    if now > 0.8 or now - before > 0.02:
        return None
    return Warning(
        "success stuck",
        f"success stays at {now:.0%}: more exploration{_fields(health)}, a denser reward, or an "
        "easier start",
    )


def _needs_noise(health: Health) -> Warning | None:
    """Compares evaluations, which take the most likely actions, with rollouts, which sample them.

    The comparison says nothing about noise where rollouts also have an easier task, as with a
    curriculum, or start from other states, as clips of motion do.
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


def _term_dominates(health: Health) -> Warning | None:
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
    if min(value for _, value in shares) < 0.95:
        return None
    return Warning(
        "one reward term dominates",
        f"{name} is {share:.0%} of the reward, the others hardly count: lower its weight",
    )


COUNTERS: Metrics = (
    Metric("timesteps", "steps", ",.0f", Column(0, 11, "online")),
    Metric("updates", "updates", ",.0f", Column(0, 11, "offline")),
    Metric("cycle", "cycle", ".0f", Column(1, 6)),
    Metric("updates", "updates", ",.0f", Column(2, 9, "online")),
    Metric("dataset/passes", "passes", ",.1f", Column(2, 9, "offline"), reduce="last"),
    Metric(
        "time/fps", "fps", ",.0f", Column(3, 8, "online"), Curve(60, "blue", (0, None), "steps/s")
    ),
    Metric("train/n_updates", "updates", ",.0f", reduce="last"),
    Metric("train/learning_rate", "learning rate", reduce="last"),
    Metric("eval/", "evaluation", reduce="last"),
    Metric("curriculum/", "curriculum", reduce="last"),
)
"""What every run logs."""

EPISODES: Metrics = (
    Metric(
        "rollout/success_rate",
        "success",
        ".0%",
        Column(6, 8, "online"),
        Curve(1, "green", (0, 1)),
        epoch=0,
        phase=_phase_by_success,
        check=_success_stuck,
    ),
    Metric(
        "rollout/ep_rew_mean",
        "return",
        ".2f",
        Column(4, 9, "online"),
        Curve(0, "green"),
        epoch=1,
        phase=_phase_by_return,
    ),
    Metric("rollout/ep_len_mean", "length", ".1f", Column(5, 8, "online")),
    Metric(
        "eval/success_rate",
        "eval success",
        ".1%",
        Column(90, 13),
        Curve(2, "bright_green", (0, 1)),
        summary="{value:.1%} success, mean reward {row[eval/mean_reward]:.2f}; best {best[0]:.1%}",
        check=_needs_noise,
    ),
    Metric(
        "eval/mean_reward",
        "eval return",
        ".2f",
        Column(91, 12),
        Curve(3, "bright_green", unless="eval/success_rate"),
        summary="mean reward {value:.2f}; best {best[1]:.2f}",
    ),
    Metric("reward/", "reward terms", curve=Curve(100, "yellow"), check=_term_dominates),
)
"""What runs with an environment log of their episodes, in training and in evaluation."""
