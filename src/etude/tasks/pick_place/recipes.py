"""Recipes of pick-and-place by PPO."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.chunks import ChunkPolicyConfig
from etude.models.networks import EncoderConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.bc import BCConfig
from etude.rl.ppo import PPOConfig
from etude.rl.rlpd import RLPDConfig
from etude.rl.sac import SACConfig
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
    """Pick-and-place with the PPO settings of stable-baselines3: what tuning gains over them."""
    tuned = pick_place()
    return tuned.model_copy(
        update={
            "name": "pick-place-original",
            "env": PickPlaceConfig(max_episode_steps=50, discount=0.99),
            "policy": tuned.policy.model_copy(update={"init_std": 1.0}),
            "collector": CollectorConfig(num_envs=8, envs_per_group=4, threads=2),
            "algorithm": PPOConfig(
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
            "clock": ClockConfig(total_timesteps=200_000, cycles=4, iterations=2),
        }
    )


def pick_place_anywhere() -> Recipe:
    """The same with the cube anywhere on the table, turned any way, and the target elsewhere."""
    fixed = pick_place()
    return fixed.model_copy(
        update={
            "name": "pick-place-anywhere",
            "env": PickPlaceConfig.anywhere(max_episode_steps=60, discount=0.95),
            "policy": fixed.policy.model_copy(update={"hidden": (128, 128)}),
            "collector": CollectorConfig(
                num_envs=256, envs_per_group=128, threads=2, engine_threads=2
            ),
            "algorithm": fixed.algorithm.model_copy(
                update={
                    "minibatch_size": 1024,
                    "update_epochs": 6,
                    "final_learning_rate": 0.1,
                    "entropy_coef": 0.002,
                }
            ),
            "clock": ClockConfig(total_timesteps=819_200, cycles=5, iterations=10),
            "evaluation": EvaluationConfig(
                every="1 epoch", episodes=200, num_envs=200, envs_per_group=100
            ),
            "checkpoint": CheckpointConfig(every="5 cycles"),
        }
    )


def pick_place_sac() -> Recipe:
    """Pick-and-place by SAC: fewer steps than by PPO, and three times the gradients."""
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
    """The same without shaped rewards, with demonstrations to replay: `--algorithm.dataset D`.

    256 gradient steps for the 256 environment steps of an iteration, 1 per step, to save time: the
    paper takes 20, which is `--algorithm.train-batches 5120`, and learns 20 times as long.
    """
    by_sac = pick_place_sac()
    settings = by_sac.algorithm.model_dump(exclude={"kind"})
    replay = {"train_batches": 256, "warmup_steps": 1_280, "target_entropy": -2.0}
    return by_sac.replace(
        name="pick-place-rlpd",
        env__shaping=0.0,
        policy__layer_norm="critic",
        algorithm=RLPDConfig(**{**settings, **replay}),
        clock__total_timesteps=25_600,
        clock__iterations=5,
    )


_AREA = {
    "cube_center": (0.0, 0.0),
    "cube_area": (0.2, 0.2),
    "target_center": (0.0, 0.0),
    "target_area": (0.2, 0.2),
    "max_episode_steps": 60,
    "discount": 0.95,
}


def pick_place_bc() -> Recipe:
    """Pick-and-place cloned from states, by action chunks: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="pick-place-bc",
        env=PickPlaceConfig(**_AREA),
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
    states = pick_place_bc()
    return states.model_copy(
        update={
            "name": "pick-place-pictures",
            "env": PickPlaceConfig(**_AREA, pictures=84),
            "policy": states.policy.replace(
                actor_reads=("image", "proprio"),
                encoder=EncoderConfig(kind="keypoints", channels=(16, 32, 32), features=128),
            ),
            "algorithm": states.algorithm.replace(train_batches=100),
            "clock": ClockConfig(epochs=10, cycles=5, iterations=4),
            "evaluation": EvaluationConfig(
                every="1 epoch", episodes=50, num_envs=50, envs_per_group=50, final_episodes=200
            ),
        }
    )
