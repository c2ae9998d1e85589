"""The curriculum widens with success, and what it does is state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.core.keys import Key
from etude.tasks.pick_place.scene import TABLE_CENTER
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.training.curriculum import Curriculum, CurriculumConfig, SuccessCurriculum


def ended(*success: float) -> dict[str, Any]:
    """A group's finished episodes, as much of them as a curriculum looks at."""
    return {"is_success": np.array(success)}


def make(**fields: Any) -> SuccessCurriculum:
    return SuccessCurriculum(
        CurriculumConfig(**{"enabled": True, "episodes": 4, "raise_at": 0.75, **fields})
    )


def test_the_level_rises_only_with_enough_success() -> None:
    ladder = make(start=0.25, step=0.5)
    assert ladder.update([ended(1, 1), ended(1)]) == {"curriculum/level": 0.25}  # 3 of 3
    assert ladder.update([ended(0)]) == {"curriculum/level": 0.75}  # 3 of 4
    assert ladder.update([ended(1, 1, 0, 0)]) == {"curriculum/level": 0.75}  # 2 of 4
    assert ladder.update([ended(1, 1, 1, 1)]) == {"curriculum/level": 1.0}  # never beyond 1
    assert ladder.update([ended()]) == {"curriculum/level": 1.0}
    assert ladder.broadcast() == {"level": 1.0}


def test_a_judgement_in_progress_survives_a_round_trip() -> None:
    ladder, other = make(), make()
    ladder.update([ended(1, 1, 1)])
    other.load_state_dict(ladder.state_dict())
    for each in (ladder, other):
        each.update([ended(1)])
    assert ladder.level == other.level == 0.5


def test_without_a_curriculum_nothing_is_eased() -> None:
    nothing = Curriculum()
    assert nothing.broadcast() == {}
    assert nothing.update([]) == {}


@pytest.mark.parametrize("level", [0.25, 1.0])
def test_pick_place_starts_within_the_level(level: float) -> None:
    config = PickPlaceConfig.anywhere()
    env = config.build(64)
    env.view.follow({"level": level})
    env.reset(Key(0))
    away = np.abs((env.view.cube - TABLE_CENTER)[:, :2])
    half = np.array(config.cube_area) / 2 * level
    assert (away <= half + 1e-9).all()
    assert (away.max(axis=0) > 0.7 * half).all()


def test_a_broadcast_without_a_level_is_the_whole_task() -> None:
    eased, whole = (
        PickPlaceConfig.anywhere().build(4),
        PickPlaceConfig.anywhere().build(4),
    )
    eased.view.follow({"level": 0.3})
    eased.view.follow({})
    assert np.array_equal(eased.reset(Key(1))["state"], whole.reset(Key(1))["state"])
