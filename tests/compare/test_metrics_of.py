"""A kind that declares a metric has it shown, and nothing in the package names it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

import etude
import short_recipes
from etude.core.metrics import Column, Curve, Health, Metric, Metrics, Warning
from etude.planning import recipes
from etude.planning.recipe import Recipe, metrics_of
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.given import GivenConfig
from etude.training.logs.console import ConsoleTable
from etude.training.logs.dashboard import Dashboard


def stale(health: Health) -> Warning | None:
    values = health.recent("train/novelty")
    return Warning("novelty gone", "explore more") if values and max(values) < 0.1 else None


class Novel(PPOConfig):
    """As a package of somebody else would declare its algorithm."""

    metrics: ClassVar[Metrics] = (
        Metric(
            "train/novelty",
            "long novelty",
            ".1f",
            Column(50),
            Curve(1, bounds=(0.0, 1.0), title="novelty of states"),
            epoch=5,
            check=stale,
        ),
    )


class Curious(GivenConfig):
    """A reward source that is not of this package either."""

    metrics: ClassVar[Metrics] = (Metric("curiosity/", "bonuses", curve=Curve(70)),)


@pytest.fixture
def recipe() -> Recipe:
    kinds = {"algorithm": Novel(), "rewards": Curious()}
    return recipes.find("reach-short").model_copy(update=kinds)


ROWS = [
    {
        "timesteps": 512 * i,
        "iterations": i,
        "rollout/success_rate": 0.3,
        "train/novelty": 0.04,
        "train/approx_kl": 0.5,
        "curiosity/seen": 2.0,
    }
    for i in range(1, 4)
]


def test_a_column_an_epoch_and_a_warning(recipe: Recipe) -> None:
    stream = io.StringIO()
    table = ConsoleTable(Health(metrics_of(recipe), 3), stream)
    for row in ROWS:
        table.write(row)
    table.epoch(1, {})
    heading, *_, last, epoch = stream.getvalue().splitlines()
    assert " success long novelty eval success" in heading
    assert "kl" not in heading.split()  # this algorithm does not declare it
    assert last.index("0.0") + 3 == heading.index("long novelty") + len("long novelty")
    assert "long novelty 0.0" in epoch
    assert "WARNING novelty gone (explore more)" in epoch
    assert "KL" not in epoch


def test_a_curve_and_one_for_each_metric_of_a_prefix(recipe: Recipe) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    dashboard = Dashboard("reach", "runs", Health(metrics_of(recipe), 3), console)
    for row in ROWS:
        dashboard.write(row)
    curves = {curve.label: curve.value for curve in dashboard._view().curves}
    assert curves == {"novelty of states": "0.0", "success": "30%", "· seen": "2.00"}


def test_every_kind_of_the_catalogue_declares_each_place_once() -> None:
    """Columns with the same place would be sorted by chance."""
    for name in short_recipes.names():
        metrics = metrics_of(short_recipes.find(name))
        for runs in ("online", "offline"):
            columns = [m.column for m in metrics if m.column and m.column.runs in ("all", runs)]
            assert len({column.place for column in columns}) == len(columns), name
        curves = [metric.curve.place for metric in metrics if metric.curve]
        assert len(set(curves)) == len(curves), name


@pytest.mark.parametrize("name", ["ppo", "reach-short"])
def test_the_table_has_success_where_the_task_has(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = recipes.find(name)
    steps = chosen.collector.num_envs * chosen.algorithm.rollout_steps
    chosen = chosen.replace(
        clock__total_timesteps=steps, clock__cycles=1, clock__iterations=1, logs__console="table"
    )
    etude.train(chosen, tmp_path / "run", console=True)
    heading = next(line for line in capsys.readouterr().out.splitlines() if " return " in line)
    assert ("eval success" in heading) == (name == "reach-short")
