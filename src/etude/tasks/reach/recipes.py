"""Recipes of the arm that reaches, by PPO."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import LearnerConfig, Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.reach.task import ReachConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def reach() -> Recipe:
    """A Kuka arm learns to hold its hand at a random point, by joint control."""
    return Recipe(
        name="reach",
        env=ReachConfig(),
        policy=PolicyConfig(init_std=0.3),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=512,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=131_072, cycles=4, iterations=2),
        evaluation=EvaluationConfig(every="1 epoch", episodes=200, num_envs=200, envs_per_group=50),
    )


def reach_short() -> Recipe:
    """Reach in a few seconds, with frequent saves and evaluations: a run to kill and resume."""
    return Recipe(
        name="reach-short",
        env=ReachConfig(),
        policy=PolicyConfig(init_std=0.3),
        collector=CollectorConfig(num_envs=64, envs_per_group=16, threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=256,
            update_epochs=4,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=24_576, cycles=1, iterations=2),
        evaluation=EvaluationConfig(every="3 cycles", episodes=32, num_envs=32, envs_per_group=16),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reach_memory() -> Recipe:
    """Reach with the target observed in the first 5 steps only, by an LSTM policy."""
    return Recipe(
        name="reach-memory",
        env=ReachConfig(shown_steps=5),
        policy=PolicyConfig(
            kind="lstm", hidden=(64,), units=64, init_std=0.3, critic_reads=("state", "critic")
        ),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=64,
            horizon=64,
            minibatch_size=4096,
            update_epochs=4,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=200, num_envs=200, envs_per_group=50),
    )


def reach_at_scale() -> Recipe:
    """Reach with half a million steps per buffer, 10^10 in all: LSTM, priorities, collection
    ahead."""
    return Recipe(
        name="reach-at-scale",
        env=ReachConfig(),
        policy=PolicyConfig(kind="lstm", units=128, init_std=0.3),
        collector=CollectorConfig(num_envs=8192, envs_per_group=512, threads=2, lag=1),
        algorithm=PPOConfig(
            rollout_steps=64,
            horizon=64,
            minibatch_size=16_384,
            update_epochs=1,
            sampling="prioritised",
            learning_rate=4.57e-4,
            gamma=0.977,
            gae_lambda=0.916,
            advantages="vtrace",
            clip=0.1,
            value_clip=0.1,
            value_coef=0.44,
            entropy_coef=0.0021,
            bound_coef=0.1,
            max_grad_norm=0.5,
        ),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=10_000_000_000, cycles=10, iterations=10),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=512, num_envs=512, envs_per_group=256
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )
