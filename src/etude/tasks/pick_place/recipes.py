"""Recipes of pick-and-place by PPO."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def pick_place() -> Recipe:
    """A Kuka arm learns to pick up a cube by friction and put it down at a target."""
    return Recipe(
        name="pick-place",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.95),
        policy=PolicyConfig(init_std=0.6, critic_reads=("state", "critic")),
        collector=CollectorConfig(num_envs=64, envs_per_group=32, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=256,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            entropy_coef=0.004,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=200_000, cycles=3, iterations=5),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, num_envs=10, envs_per_group=10),
    )


def pick_place_original() -> Recipe:
    """Pick-and-place with the PPO settings of stable-baselines3, to compare the tuned ones with."""
    return Recipe(
        name="pick-place-original",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.99),
        policy=PolicyConfig(init_std=1.0, critic_reads=("state", "critic")),
        collector=CollectorConfig(num_envs=8, envs_per_group=4, threads=2),
        algorithm=PPOConfig(
            rollout_steps=256,
            minibatch_size=64,
            update_epochs=10,
            learning_rate=3e-4,
            gamma=0.99,
            gae_lambda=0.95,
            clip=0.2,
            value_coef=1.0,
            entropy_coef=0.01,
            max_grad_norm=0.5,
        ),
        clock=ClockConfig(total_timesteps=200_000, cycles=4, iterations=2),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, num_envs=10, envs_per_group=10),
    )


def pick_place_anywhere() -> Recipe:
    """Pick-and-place with cube and target anywhere on the table, and any yaw of the cube."""
    return Recipe(
        name="pick-place-anywhere",
        env=PickPlaceConfig.anywhere(max_episode_steps=60, discount=0.95),
        policy=PolicyConfig(hidden=(128, 128), init_std=0.6, critic_reads=("state", "critic")),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=1024,
            update_epochs=6,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.95,
            entropy_coef=0.002,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=819_200, cycles=5, iterations=10),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=200, num_envs=200, envs_per_group=100
        ),
        checkpoint=CheckpointConfig(every="5 cycles"),
    )
