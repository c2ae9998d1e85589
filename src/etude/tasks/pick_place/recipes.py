"""Recipes of pick-and-place: PPO, SAC, RLPD, and behaviour cloning of demonstrations."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.networks import EncoderConfig
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


def pick_place_sac() -> Recipe:
    """Pick-and-place by SAC, with three-step returns and a fifth of PPO's environment steps."""
    from etude.rl.sac import SACConfig

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
            warmup_steps=2_560,
            gamma=0.95,
            return_steps=3,
            learning_rate=1e-3,
            polyak=0.99,
            capacity=200_000,
            initial_alpha=0.02,
            target_entropy=-2.0,
            normalise_observations=True,
        ),
        clock=ClockConfig(total_timesteps=40_960, cycles=4, iterations=20),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, num_envs=10, envs_per_group=10),
    )


def pick_place_rlpd() -> Recipe:
    """Pick-and-place by RLPD without shaping, from demonstrations: `--algorithm.dataset D`.

    One gradient step per environment step (256 per iteration) to save time. The paper takes 20,
    which is `--algorithm.train-batches 5120` and takes 20 times as long.
    """
    from etude.rl.rlpd import RLPDConfig

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
    from etude.models.chunks import ChunkPolicyConfig
    from etude.rl.bc import BCConfig

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
    from etude.models.chunks import ChunkPolicyConfig
    from etude.rl.bc import BCConfig

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
