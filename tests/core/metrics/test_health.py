"""Warnings are given when they are due, and in the words of the algorithm in use."""

from __future__ import annotations

import math
from typing import Any

import pytest

from etude.core.metrics import COUNTERS, EPISODES, RECENT, Best, Health, Metrics
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.amp import AMPConfig
from etude.rl.sac import SACConfig
from etude.rl.td3 import TD3Config
from etude.tasks.tracking import TrackConfig
from etude.training.curriculum import CurriculumConfig, MotionCurriculumConfig

METRICS = (*PPOConfig.metrics, *COUNTERS, *EPISODES, *AMPConfig.metrics)


def warned(rows: int, **metrics: float) -> list[str]:
    health = Health(METRICS, 100)
    for i in range(rows):
        health.add({"iterations": i, **{f"amp/{name}": value for name, value in metrics.items()}})
    return [warning.name for warning in health.warnings]


@pytest.mark.parametrize(
    ("rows", "agent", "demo", "style", "expected"),
    [
        (RECENT, 0.99, 0.98, 0.03, ["discriminator saturated"]),
        (RECENT - 1, 0.99, 0.98, 0.03, []),  # not for long
        (RECENT, 0.99, 0.98, 0.4, []),  # there still is a slope
        (RECENT, 0.80, 0.98, 0.03, []),
        (RECENT, 0.99, 0.60, 0.03, []),
    ],
)
def test_a_saturated_discriminator_is_named(
    rows: int, agent: float, demo: float, style: float, expected: list[str]
) -> None:
    found = warned(rows, agent_accuracy=agent, demo_accuracy=demo, style_reward=style)
    assert found == expected


def test_the_warning_says_what_to_change() -> None:
    health = Health(METRICS, 100)
    for _ in range(RECENT):
        health.add({"amp/agent_accuracy": 1.0, "amp/demo_accuracy": 1.0, "amp/style_reward": 0.001})
    (warning,) = health.warnings
    assert "rewards.gradient_penalty" in warning.text
    assert "100%" in warning.text


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [
        (PPOConfig.metrics, "(policy.init_std, algorithm.entropy_coef)"),
        (SACConfig.metrics, "algorithm.target_entropy"),
        (TD3Config.metrics, "(algorithm.exploration, algorithm.warmup_steps)"),
        ((), "more exploration, "),
    ],
)
def test_a_hint_names_fields_the_algorithm_has(algorithm: Metrics, fields: str) -> None:
    health = Health((*algorithm, *EPISODES), 30)
    for i in range(1, 31):
        health.add({"iterations": i, "rollout/success_rate": 0.3})
    (warning,) = health.warnings
    assert warning.name == "success stuck"
    assert fields in warning.text


@pytest.mark.parametrize(
    ("returns", "success", "told"),
    [
        ([1, 2, 3, 4, 5, 6], 0.1, False),  # large steps that go up
        ([1, 2, 9, 4, 5, 6], 0.1, True),  # it was better before
        ([6, 5, 4, 3, 2, 1], 0.1, True),
        ([6, 5, 4, 3, 2, 1], 0.9, False),
    ],
)
def test_large_steps_are_wrong_only_where_they_lead_nowhere(
    returns: list[float], success: float, told: bool
) -> None:
    health = Health(METRICS, 100)
    for value in returns:
        health.add(
            {
                "train/approx_kl": 0.2,
                "rollout/ep_rew_mean": value,
                "rollout/success_rate": success,
            }
        )
    assert ("KL too high" in [warning.name for warning in health.warnings]) == told


@pytest.mark.parametrize(
    ("drawn", "certain", "evaluations", "expected"),
    [
        (0.95, 0.0, RECENT, ["success needs the noise"]),
        (0.95, 0.0, RECENT - 1, []),  # not for long
        (0.95, 0.6, RECENT, []),
        (0.1, 0.0, RECENT, []),  # there is no success yet to speak of
    ],
)
def test_success_that_only_noise_brings_is_named(
    drawn: float, certain: float, evaluations: int, expected: list[str]
) -> None:
    """Also where only every other row holds an evaluation."""
    health = Health(METRICS, 100)
    for i in range(evaluations):
        health.add({"iterations": 2 * i, "rollout/success_rate": drawn})
        row = {"iterations": 2 * i + 1, "rollout/success_rate": drawn}
        health.add({**row, "eval/success_rate": certain})
    assert [warning.name for warning in health.warnings] == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (CurriculumConfig, "curriculum/level"),
        (MotionCurriculumConfig, "curriculum/failing"),
        (TrackConfig, "eval/mpjpe_l"),
    ],
)
def test_noise_is_not_blamed_where_rollouts_have_another_task(config: Any, name: str) -> None:
    health = Health((*METRICS, *config.metrics), 100)
    for i in range(RECENT):
        row = {"iterations": i, "rollout/success_rate": 0.95, "eval/success_rate": 0.0}
        health.add({**row, name: 1.0})
    assert health.warnings == []


@pytest.mark.parametrize(
    ("success", "expected"), [(0.3, ["one reward term dominates"]), (1.0, [])], ids=["no", "yes"]
)
def test_a_term_may_dominate_where_episodes_succeed(success: float, expected: list[str]) -> None:
    """Running ahead is nearly all of a cheetah's reward, and should be."""
    health = Health(METRICS, 100)
    for i in range(2 * RECENT):
        row = {"iterations": i, "rollout/ep_rew_mean": 5.0, "rollout/success_rate": success}
        health.add({**row, "reward/forward": 99.0, "reward/control": -1.0})
    assert [warning.name for warning in health.warnings] == expected


def fallen(
    first: float, best: float, last: float, spread: float, episodes: int, **more: float
) -> list[tuple[str, str]]:
    """The warnings of three evaluations, of which the second is the best."""
    health = Health(METRICS, 100)
    for i, value in enumerate((first, best, last), start=1):
        row = {"eval/mean_reward": value, "eval/std_reward": spread, "eval/episodes": episodes}
        health.add({"iterations": i, "timesteps": 100 * i, **row, **more})
    health.best = Best(0.0, best, 200)
    return [*health.warnings]


@pytest.mark.parametrize(
    ("spread", "episodes", "warns"),
    [
        (100.0, 20, False),  # a difference of 20 with a standard error of 31.6
        (100.0, 160, False),  # of 11.2: the interval is -1.9 to 41.9
        (100.0, 200, True),  # of 10: the interval is .4 to 39.6
        (10.0, 20, True),  # of 3.2
    ],
)
def test_a_fall_that_sampling_explains_is_none(spread: float, episodes: int, warns: bool) -> None:
    found = fallen(-190.0, -164.0, -184.0, spread, episodes)
    assert [name for name, _ in found] == ["eval return fell"] * warns


def test_a_fall_is_said_with_its_interval() -> None:
    ((_, text),) = fallen(-190.0, -164.0, -184.0, 10.0, 20)
    half = 1.959964 * math.hypot(10.0, 10.0) / math.sqrt(20)
    words = f"from -164.00 to -184.00, with 95 % confidence by {20 - half:.2f} to {20 + half:.2f}: "
    assert text.startswith(words)
    assert text.startswith("from -164.00 to -184.00, with 95 % confidence by 13.80 to 26.20: ")


@pytest.mark.parametrize(("episodes", "warns"), [(10, False), (100, True)])
def test_a_fall_of_the_success_rate_knows_its_noise_too(episodes: int, warns: bool) -> None:
    """From 40 % to 15 %: Newcombe's interval is -13 % to 55 % of 10 episodes."""
    health = Health(METRICS, 100)
    for i, rate in enumerate((0.0, 0.4, 0.15), start=1):
        row = {"eval/success_rate": rate, "eval/mean_reward": rate, "eval/episodes": episodes}
        health.add({"iterations": i, "timesteps": 100 * i, **row})
    health.best = Best(0.4, 0.4, 200)
    assert [w.name for w in health.warnings] == ["eval success fell"] * warns
