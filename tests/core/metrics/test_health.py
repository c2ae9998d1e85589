"""Warnings are given when they are due, and in the words of the algorithm in use."""

from __future__ import annotations

from typing import Any

import pytest

from etude.core.metrics import COUNTERS, EPISODES, RECENT, Health, Metrics
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.amp import AMPConfig
from etude.rl.sac import SACConfig
from etude.rl.td3 import TD3Config
from etude.tasks.imitation.task import ImitationConfig
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
        (ImitationConfig, "eval/mpjpe_l"),
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
