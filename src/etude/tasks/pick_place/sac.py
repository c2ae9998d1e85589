"""Recipes of pick-and-place by SAC and RLPD."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.rlpd import RLPDConfig
from etude.rl.sac import SACConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.training.evaluation import EvaluationConfig


def pick_place_sac() -> Recipe:
    """Pick-and-place by SAC, with fewer steps than PPO and three times the gradient steps."""
    return Recipe(
        name="pick-place-sac",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.95),
        collector=CollectorConfig(num_envs=32, envs_per_group=16, threads=2),
        policy=PolicyConfig(
            kind="squashed",
            hidden=(128, 128),
            activation="relu",
            critic_reads=("state", "critic"),
        ),
        algorithm=SACConfig(
            rollout_steps=8,
            train_batches=64,
            warmup_steps=5_120,
            gamma=0.95,
            capacity=200_000,
            initial_alpha=0.02,
            target_entropy=-2.0,
            normalise_observations=True,
        ),
        clock=ClockConfig(total_timesteps=76_800, cycles=5, iterations=20),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, num_envs=10, envs_per_group=10),
    )


def pick_place_rlpd() -> Recipe:
    """Pick-and-place by RLPD without shaping, from demonstrations: `--algorithm.dataset D`.

    One gradient step per environment step (256 per iteration) to save time. The paper takes 20,
    which is `--algorithm.train-batches 5120` and takes 20 times as long.
    """
    return Recipe(
        name="pick-place-rlpd",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.95, shaping=0.0),
        collector=CollectorConfig(num_envs=32, envs_per_group=16, threads=2),
        policy=PolicyConfig(
            kind="squashed",
            hidden=(128, 128),
            activation="relu",
            layer_norm="critic",
            critic_reads=("state", "critic"),
        ),
        algorithm=RLPDConfig(
            rollout_steps=8,
            train_batches=256,
            warmup_steps=1_280,
            gamma=0.95,
            capacity=200_000,
            initial_alpha=0.02,
            target_entropy=-2.0,
            normalise_observations=True,
        ),
        clock=ClockConfig(total_timesteps=25_600, cycles=5, iterations=5),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, num_envs=10, envs_per_group=10),
    )
