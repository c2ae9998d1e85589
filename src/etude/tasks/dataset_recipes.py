"""Recipes that learn from a dataset."""

from __future__ import annotations

from etude.algorithms.reward_only import RewardOnlyConfig
from etude.algorithms.rrd import RRDConfig
from etude.algorithms.td3 import TD3Config
from etude.core.clock import ClockConfig
from etude.logs.outputs import LogsConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def offline() -> Recipe:
    """A policy from a dataset, its reward learned from returns: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="offline",
        policy=PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
        algorithm=TD3Config(
            train_batches=100, behaviour_coef=0.4, normalise_observations=True, gamma=0.98
        ),
        rewards=RRDConfig(normalise_targets=True),
        clock=ClockConfig(epochs=10, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reward_only() -> Recipe:
    """A reward learned from a dataset's returns: `--algorithm.dataset FOLDER`, no environment."""
    return Recipe(
        name="reward-only",
        algorithm=RewardOnlyConfig(dataset="", train_batches=50, rrd=RRDConfig.image(reads=())),
        clock=ClockConfig(epochs=10, cycles=100, iterations=100),
        evaluation=EvaluationConfig(every="10 cycles", final_episodes=0),
        checkpoint=CheckpointConfig(every="1 cycle"),
        logs=LogsConfig(losses="iteration"),
    )
