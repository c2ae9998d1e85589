"""A recipe is worked out once, and everything after it is handed the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.api import resume, train
from etude.data.segments import SegmentGeometry
from etude.envs.config import EnvConfig
from etude.planning.resolve import resolve
from etude.rollout.local import COLLECTORS
from toys import tiny_reach


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often sizes were divided, and environments made."""
    counts = {"geometries": 0, "environments": 0}
    check, make = SegmentGeometry.__post_init__, EnvConfig.make

    def checked(self: SegmentGeometry) -> None:
        counts["geometries"] += 1
        check(self)

    def made(self: EnvConfig, *arguments: Any) -> Any:
        counts["environments"] += 1
        return make(self, *arguments)

    monkeypatch.setattr(SegmentGeometry, "__post_init__", checked)
    monkeypatch.setattr(EnvConfig, "make", made)
    return counts


def test_a_run_works_its_recipe_out_once(counted: dict[str, int], tmp_path: Path) -> None:
    recipe = tiny_reach(2)
    evaluation = recipe.evaluation.num_envs // recipe.evaluation.envs_per_group
    made = 1 + recipe.collector.num_groups + evaluation  # one to look at
    run = train(recipe, tmp_path / "run")
    assert counted == {"geometries": 1, "environments": made}
    resume(run.path)
    assert counted == {"geometries": 2, "environments": 2 * made}


def test_a_copy_with_another_kind_is_of_that_kind() -> None:
    """A copy keeps its class: without a second look, rollouts would silently stay here."""
    recipe = tiny_reach(2)
    placed = recipe.collector.model_copy(update={"kind": "ray", "actors": 2})
    run = resolve(recipe.model_copy(update={"collector": placed}))
    assert type(run.recipe.collector) is COLLECTORS.load("ray")
    assert run.recipe.collector.model_dump() == placed.model_dump()
    assert resolve(recipe).recipe is recipe
