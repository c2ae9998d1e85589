"""Callbacks with state are found again whatever the screen shows."""

from __future__ import annotations

from pathlib import Path

import etude
import short_recipes
from etude.api import create
from etude.planning.resolve import resolve
from etude.training.saving import renumbered


def test_callbacks_of_earlier_versions_are_numbered_from_0() -> None:
    earlier = {"clock": 1, "callback-10-StopAtSuccess": 2, "callback-2-Kept": 3}
    now = {"clock": 1, "callback-1-StopAtSuccess": 2, "callback-0-Kept": 3}
    assert renumbered(earlier) == now
    assert renumbered(now) == now
    foreign = {"callback-": 1, "callback-x-Kept": 2, "callback-3": 3}
    assert renumbered(foreign) == foreign


def test_a_run_that_showed_a_table_goes_on_without_a_screen(tmp_path: Path) -> None:
    recipe = short_recipes.find("reach-short").replace(
        clock__total_timesteps=8_192, evaluation__stop_at_success=1.0, evaluation__final_episodes=0
    )
    run = create(resolve(recipe), tmp_path / "run")
    etude.resume(run.path, console=True, pause_after=2)
    etude.resume(run.path, console=False)
    assert run.summary()["counts"]["timesteps"] == 8_192
