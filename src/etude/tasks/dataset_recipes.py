"""Recipes that learn from a dataset."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.bc import BCConfig
from etude.rl.iql import IQLConfig
from etude.rl.reward_only import RewardOnlyConfig
from etude.rl.rewards.rrd import RRDConfig
from etude.rl.rlpd import RLPDConfig
from etude.rl.td3 import TD3Config
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.logs.outputs import LogsConfig
from etude.training.saving import CheckpointConfig


def offline() -> Recipe:
    """A policy from a dataset, its reward learned from returns: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="offline",
        policy=PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
        algorithm=TD3Config(
            train_batches=100, behaviour_coef=2.5, normalise_observations=True, gamma=0.98
        ),
        rewards=RRDConfig(normalise_targets=True),
        clock=ClockConfig(epochs=10, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def offline_pictures() -> Recipe:
    """offline from images and joint readings, at the sizes for images: `--algorithm.dataset D`."""
    return offline().replace(
        name="offline-pictures",
        policy__actor_reads=(),
        policy__critic_reads=(),
        algorithm__train_batches=50,
        algorithm__batch_size=32,
        rewards=RRDConfig.image(reads=()),
    )


def bc() -> Recipe:
    """A policy that imitates a dataset's actions: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="bc",
        policy=PolicyConfig(actor_reads=(), critic_reads=(), hidden=(256, 256), activation="relu"),
        algorithm=BCConfig(dataset=""),
        clock=ClockConfig(epochs=10, cycles=2, iterations=5),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def iql() -> Recipe:
    """A policy from a dataset with rewards, by implicit Q-learning: `--algorithm.dataset D`."""
    return Recipe(
        name="iql",
        policy=PolicyConfig(
            kind="deterministic",
            actor_reads=(),
            critic_reads=(),
            hidden=(256, 256),
            activation="relu",
        ),
        algorithm=IQLConfig(normalise_observations=True, gamma=0.98),
        clock=ClockConfig(epochs=10, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def rlpd() -> Recipe:
    """SAC that replays demonstrations beside its own experience: `--algorithm.dataset FOLDER`.

    1 gradient step per environment step, to save time; the paper takes 20, which is
    `--algorithm.train-batches 4000`.
    """
    return Recipe(
        name="rlpd",
        policy=PolicyConfig(
            kind="squashed", hidden=(256, 256), activation="relu", layer_norm="critic"
        ),
        collector=CollectorConfig(num_envs=8, envs_per_group=4, threads=2),
        algorithm=RLPDConfig(
            rollout_steps=25, train_batches=200, warmup_steps=1_000, initial_alpha=0.1
        ),
        clock=ClockConfig(total_timesteps=50_000, cycles=5, iterations=5),
        evaluation=EvaluationConfig(every="1 cycle", episodes=20, num_envs=20, envs_per_group=20),
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
