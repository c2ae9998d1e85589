"""Recipes of pick-and-place by behaviour cloning of demonstrations."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.chunks import ChunkPolicyConfig
from etude.models.networks import EncoderConfig
from etude.planning.recipe import Recipe
from etude.rl.bc import BCConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig

AREA = PickPlaceConfig(
    cube_center=(0.0, 0.0),
    cube_area=(0.2, 0.2),
    target_center=(0.0, 0.0),
    target_area=(0.2, 0.2),
    max_episode_steps=60,
    discount=0.95,
)
"""Cube and target anywhere in 20 x 20 cm."""


def pick_place_bc() -> Recipe:
    """Pick-and-place cloned from states, by action chunks: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="pick-place-bc",
        env=AREA,
        policy=ChunkPolicyConfig(kind="act", chunk=10, width=64, layers=2, heads=2),
        collector=CollectorConfig(num_envs=100, envs_per_group=100, threads=2),
        algorithm=BCConfig(dataset="", train_batches=200, batch_size=64, average=0.999),
        clock=ClockConfig(epochs=3, cycles=2, iterations=5),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=100, num_envs=100, envs_per_group=50, final_episodes=200
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def pick_place_pictures() -> Recipe:
    """Pick-and-place cloned from 84-pixel pictures and the hand's own state, by action chunks."""
    return Recipe(
        name="pick-place-pictures",
        env=AREA.replace(pictures=84),
        policy=ChunkPolicyConfig(
            kind="act",
            chunk=10,
            width=64,
            layers=2,
            heads=2,
            actor_reads=("image", "proprio"),
            encoder=EncoderConfig(kind="keypoints", channels=(16, 32, 32), features=128),
        ),
        collector=CollectorConfig(num_envs=100, envs_per_group=100, threads=2),
        algorithm=BCConfig(dataset="", train_batches=100, batch_size=64, average=0.999),
        clock=ClockConfig(epochs=10, cycles=5, iterations=4),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=50, num_envs=50, envs_per_group=50, final_episodes=200
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )
