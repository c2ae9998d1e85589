"""Recipes of the humanoid that imitates recorded motion."""

from __future__ import annotations

from etude.algorithms.ppo import PPOConfig
from etude.app.recipe import Recipe
from etude.core.clock import ClockConfig
from etude.envs.imitation import ImitationConfig
from etude.models.policies import PolicyConfig
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def imitate_walk() -> Recipe:
    """A humanoid walks like the person in a recorded clip, by joint servos under real physics."""
    return Recipe(
        name="imitate-walk",
        env=ImitationConfig(clips=("walk",)),
        policy=PolicyConfig(hidden=(256, 256), activation="silu", init_std=0.135, learn_std=False),
        collector=CollectorConfig(rows=256, group_rows=128, threads=2, engine_threads=1),
        algorithm=PPOConfig(
            rollout_steps=32,
            minibatch_size=2048,
            update_epochs=4,
            learning_rate=3e-4,
            gamma=0.97,
            gae_lambda=0.95,
            bound_coef=0.1,
            max_grad_norm=1.0,
        ),
        clock=ClockConfig(total_timesteps=1_048_576, cycles=4, iterations=4),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=1, rows=1, group_rows=1, final_episodes=1
        ),
        checkpoint=CheckpointConfig(every="1 epoch"),
    )
