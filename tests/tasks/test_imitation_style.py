"""What a judge of style is shown of the humanoid, and how motion that is not tracked is tested."""

from __future__ import annotations

import numpy as np
import pytest

from etude.core.keys import Key
from etude.envs.mujoco.playing import ErrorMeter
from etude.tasks.imitation.recipes import amp_walk, imitate_walk
from etude.tasks.imitation.task import ImitationConfig


@pytest.fixture(scope="module")
def config() -> ImitationConfig:
    env = amp_walk().env
    assert isinstance(env, ImitationConfig)
    return env


def test_windows_of_the_humanoid_never_span_a_reset(config: ImitationConfig) -> None:
    env, stream = config.build(8), np.random.default_rng(0)
    reference = {window.tobytes() for window in env.view.style_windows()}
    before = env.reset(Key(1))["style"]
    assert all(window.tobytes() in reference for window in before)
    ended = 0
    for _ in range(60):
        result = env.step(stream.uniform(-0.3, 0.3, (8, 28)).astype(np.float32))
        led_to = result.obs["style"].copy()
        led_to[result.final_envs] = result.final_obs["style"]
        np.testing.assert_array_equal(led_to[:, :-1], before[:, 1:])
        assert all(window.tobytes() not in reference for window in led_to)
        begun = result.obs["style"][result.final_envs]
        assert all(window.tobytes() in reference for window in begun)
        ended += len(begun)
        before = result.obs["style"]
    assert ended >= 8
    env.close()


def test_motion_that_is_not_tracked_ends_in_a_fall_alone(config: ImitationConfig) -> None:
    tested = config.for_evaluation()
    assert (tested.terminate_at, tested.terminate_mean, tested.terminate_below) == (None, None, 0.6)
    assert (tested.start, tested.measure) == ("random", True)
    tracking = imitate_walk().env
    assert isinstance(tracking, ImitationConfig)
    assert tracking.for_evaluation().terminate_mean == 0.5
    assert tracking.for_evaluation().start == "first"


def test_how_far_it_came_is_told(config: ImitationConfig) -> None:
    env = config.for_evaluation().build(3)
    env.reset(Key(2))
    meter = env.ability(ErrorMeter)
    assert meter is not None
    origin = env.view.pose[:, :2].copy()
    told: dict[int, float] = {}
    for _ in range(60):
        result = env.step(np.zeros((3, 28), np.float32))
        going = np.setdiff1d(np.arange(3), result.final_envs)
        away = np.linalg.norm(env.view.pose[:, :2] - origin, axis=1)
        np.testing.assert_allclose(meter.travelled[going], away[going], atol=1e-12)
        for row, distance in zip(
            result.final_envs.tolist(), result.episodes.get("travelled", []), strict=True
        ):
            told[row] = float(distance)
            origin[row] = env.view.pose[row, :2]
    assert len(told) == 3
    assert all(0.05 < distance < 3.0 for distance in told.values())
    env.close()
