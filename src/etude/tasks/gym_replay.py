"""Recipes for environments of Gymnasium, by SAC and TD3."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.envs.adapters.gym import GymConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.sac import SACConfig
from etude.rl.td3 import TD3Config
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig


def sac() -> Recipe:
    """SAC on any Gymnasium environment with a box of actions: `--env.id HalfCheetah-v5`."""
    return Recipe(
        name="sac",
        env=GymConfig(id="Pendulum-v1"),
        collector=CollectorConfig(num_envs=1, envs_per_group=1, threads=1),
        policy=PolicyConfig(kind="squashed", hidden=(256, 256), activation="relu"),
        algorithm=SACConfig(rollout_steps=100, train_batches=100, warmup_steps=1_000),
        clock=ClockConfig(total_timesteps=20_000, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=10, num_envs=10, envs_per_group=10),
    )


def td3() -> Recipe:
    """TD3 on any Gymnasium environment with a box of actions: `--env.id HalfCheetah-v5`."""
    return Recipe(
        name="td3",
        env=GymConfig(id="Pendulum-v1"),
        collector=CollectorConfig(num_envs=1, envs_per_group=1, threads=1),
        policy=PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
        algorithm=TD3Config(rollout_steps=100, train_batches=100, warmup_steps=1_000),
        clock=ClockConfig(total_timesteps=20_000, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=10, num_envs=10, envs_per_group=10),
    )
