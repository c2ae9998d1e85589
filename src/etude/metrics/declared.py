"""Metrics declare themselves: their names, where they are shown, and when they are a warning.

A config class of a kind (algorithm, rewards, environment) lists the metrics that its kind logs in
`metrics: ClassVar[tuple[Metric, ...]]`. Console, dashboard, health and the summary at a run's end
are handed these declarations and know no metric by name. This module also declares what every run
logs (`COUNTERS`) and what runs with an environment log (`EPISODES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from etude.metrics.rows import ELAPSED

if TYPE_CHECKING:
    from etude.metrics.health import Health

Row = Mapping[str, float]

RETURN = "rollout/ep_rew_mean"
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
    """What the scale does not go beyond; without any, the value is shown with a precision that fits
    its size."""
    title: str = ""
    """Its name, if that differs from the metric's label."""


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
    score: bool = False
    """Whether evaluations are compared by it, the higher the better; the first of several counts
    most."""
    check: Callable[[Health], Warning | None] | str | None = None
    """Gives a warning when the run looks wrong by this metric; "module:function" is imported where
    a run is watched."""
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
"""What every run logs."""

EPISODES: Metrics = (
    Metric(
        "rollout/success_rate",
        "success",
        ".0%",
        Column(6, 8, "online"),
        Curve(1, "green", (0, 1)),
        epoch=0,
        check="etude.metrics.health:success_stuck",
    ),
    Metric(
        RETURN,
        "return",
        ".2f",
        Column(4, 9, "online"),
        Curve(0, "green"),
        epoch=1,
        check="etude.metrics.health:no_progress",
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
        summary="{value:.1%} success, mean reward {row[eval/mean_reward]:.2f}; best {best[0]:.1%}",
        check="etude.metrics.health:needs_noise",
        score=True,
    ),
    Metric(
        "eval/mean_reward",
        "eval return",
        ".2f",
        Column(91, 12),
        Curve(3, "bright_green"),
        summary="mean reward {value:.2f}; best {best[1]:.2f}",
        check="etude.metrics.health:got_worse",
        score=True,
    ),
    Metric(
        "reward/",
        "reward terms",
        curve=Curve(100, "yellow"),
        check="etude.metrics.health:term_dominates",
    ),
)
"""What runs with an environment log of their episodes, in training and in evaluation."""
