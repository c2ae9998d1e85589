"""Recipes for environments of Gymnasium and PettingZoo, and tasks in numpy."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.envs.adapters.gym import GymConfig
from etude.envs.adapters.pettingzoo import PettingZooConfig
from etude.envs.named_task import TaskConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig


def ppo() -> Recipe:
    """PPO on any Gymnasium environment: `etude train ppo --env.id HalfCheetah-v5`."""
    return Recipe(
        name="ppo",
        env=GymConfig(id="CartPole-v1"),
        collector=CollectorConfig(num_envs=16, envs_per_group=8, threads=2),
        algorithm=PPOConfig(
            rollout_steps=64,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.99,
            normalise_rewards=True,
        ),
        clock=ClockConfig(total_timesteps=100_000, cycles=5, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=20, num_envs=20, envs_per_group=20),
    )


def hopper() -> Recipe:
    """Gymnasium's Hopper-v5 learns to hop ahead.

    PPO's settings for MuJoCo tasks in its paper, with 8 environments of 256 steps for one of 2,048.
    """
    return Recipe(
        name="hopper",
        env=GymConfig(id="Hopper-v5", engine="batch"),
        collector=CollectorConfig(num_envs=8, envs_per_group=4, threads=2),
        algorithm=PPOConfig(
            rollout_steps=256,
            minibatch_size=64,
            update_epochs=10,
            learning_rate=3e-4,
            final_learning_rate=0.1,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=1_000_000, cycles=10, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=16, num_envs=16, envs_per_group=8),
    )


def walker2d() -> Recipe:
    """Gymnasium's Walker2d-v5 learns to walk."""
    return hopper().replace(name="walker2d", env__id="Walker2d-v5")


def ant() -> Recipe:
    """Gymnasium's Ant-v5 learns to run.

    Nearly rl_zoo3's settings for HalfCheetah, with 8 environments of 64 steps for one of 512.
    """
    return Recipe(
        name="ant",
        env=GymConfig(id="Ant-v5", engine="batch"),
        policy=PolicyConfig(hidden=(256, 256), activation="relu", init_std=0.135),
        collector=CollectorConfig(num_envs=8, envs_per_group=4, threads=2),
        algorithm=PPOConfig(
            rollout_steps=64,
            minibatch_size=64,
            update_epochs=20,
            learning_rate=2e-5,
            gamma=0.98,
            gae_lambda=0.92,
            clip=0.1,
            bound_coef=0.0,
            max_grad_norm=0.8,
        ),
        clock=ClockConfig(total_timesteps=1_000_000, cycles=10, iterations=16),
        evaluation=EvaluationConfig(every="1 epoch", episodes=16, num_envs=16, envs_per_group=8),
    )


def halfcheetah() -> Recipe:
    """Gymnasium's HalfCheetah-v5 learns to run.

    Nearly rl_zoo3's settings; its `vf_coef` is half of `value_coef`.
    """
    return ant().replace(
        name="halfcheetah",
        env__id="HalfCheetah-v5",
        algorithm__entropy_coef=0.0004,
        algorithm__value_coef=1.16,
    )


def cartpole() -> Recipe:
    """Gymnasium's CartPole-v1 learns to keep its pole upright.

    Nearly rl_zoo3's settings.
    """
    return Recipe(
        name="cartpole",
        env=GymConfig(id="CartPole-v1"),
        collector=CollectorConfig(num_envs=8, envs_per_group=8, threads=1),
        algorithm=PPOConfig(
            rollout_steps=32,
            minibatch_size=256,
            update_epochs=20,
            learning_rate=1e-3,
            final_learning_rate=0.05,
            gamma=0.98,
            gae_lambda=0.8,
        ),
        clock=ClockConfig(total_timesteps=100_000, cycles=5, iterations=13),
        evaluation=EvaluationConfig(every="1 epoch", episodes=20, num_envs=20, envs_per_group=20),
    )


def pendulum() -> Recipe:
    """Gymnasium's Pendulum-v1 learns to swing up its pendulum.

    SAC with rl_zoo3's learning rate.
    """
    return sac().replace(
        name="pendulum",
        policy__hidden=(64, 64),
        algorithm__learning_rate=1e-3,
        clock__total_timesteps=10_000,
        clock__iterations=5,
        evaluation__episodes=20,
    )


def reacher() -> Recipe:
    """Gymnasium's Reacher-v5 learns to move its fingertip to a target."""
    return Recipe(
        name="reacher",
        env=GymConfig(id="Reacher-v5"),
        collector=CollectorConfig(num_envs=16, envs_per_group=16, threads=1),
        algorithm=PPOConfig(
            rollout_steps=128,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=1e-3,
            final_learning_rate=0.05,
            gamma=0.9,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=300_000, cycles=6, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=50, num_envs=50, envs_per_group=50),
    )


def swimmer() -> Recipe:
    """Gymnasium's Swimmer-v5 learns to swim ahead.

    rl_zoo3's discount factor: below it, a stroke does not pay.
    """
    return Recipe(
        name="swimmer",
        env=GymConfig(id="Swimmer-v5"),
        collector=CollectorConfig(num_envs=8, envs_per_group=8, threads=1),
        algorithm=PPOConfig(
            rollout_steps=512,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=6e-4,
            final_learning_rate=0.1,
            gamma=0.9999,
            gae_lambda=0.98,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=300_000, cycles=6, iterations=2),
        evaluation=EvaluationConfig(every="1 epoch", episodes=4, num_envs=4, envs_per_group=4),
    )


def lunarlander() -> Recipe:
    """Gymnasium's LunarLander-v3 learns to land.

    rl_zoo3's settings, with larger minibatches and a higher learning rate that falls.
    """
    return Recipe(
        name="lunarlander",
        env=GymConfig(id="LunarLander-v3"),
        collector=CollectorConfig(num_envs=32, envs_per_group=32, threads=1),
        algorithm=PPOConfig(
            rollout_steps=512,
            minibatch_size=256,
            update_epochs=4,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.999,
            gae_lambda=0.98,
            entropy_coef=0.01,
        ),
        clock=ClockConfig(total_timesteps=800_000, cycles=6, iterations=1),
        evaluation=EvaluationConfig(every="1 epoch", episodes=20, num_envs=20, envs_per_group=20),
    )


def bipedalwalker() -> Recipe:
    """Gymnasium's BipedalWalker-v3 learns to walk over slightly uneven ground.

    rl_zoo3's discount factor, lambda and clip range, with larger minibatches and a higher learning
    rate that falls.
    """
    return Recipe(
        name="bipedalwalker",
        env=GymConfig(id="BipedalWalker-v3"),
        collector=CollectorConfig(num_envs=32, envs_per_group=32, threads=1),
        algorithm=PPOConfig(
            rollout_steps=256,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=6e-4,
            final_learning_rate=0.1,
            gamma=0.999,
            clip=0.18,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=1_000_000, cycles=6, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=20, num_envs=20, envs_per_group=20),
    )


def humanoid() -> Recipe:
    """Gymnasium's Humanoid-v5 begins to walk.

    rl_games' form of PPO: short rollouts of many environments, a learning rate that follows the KL.
    """
    return Recipe(
        name="humanoid",
        env=GymConfig(id="Humanoid-v5", engine="batch"),
        policy=PolicyConfig(hidden=(256, 128), activation="elu"),
        collector=CollectorConfig(num_envs=64, envs_per_group=32, threads=1),
        algorithm=PPOConfig(
            rollout_steps=64,
            minibatch_size=1024,
            update_epochs=5,
            learning_rate=3e-4,
            desired_kl=0.01,
            max_grad_norm=1.0,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=1_000_000, cycles=4, iterations=6),
        evaluation=EvaluationConfig(every="1 epoch", episodes=16, num_envs=16, envs_per_group=8),
    )


def spread() -> Recipe:
    """PettingZoo's simple_spread: three agents, one policy, learn to cover three landmarks."""
    return Recipe(
        name="spread",
        env=PettingZooConfig(parallel="mpe2.simple_spread_v3"),
        collector=CollectorConfig(num_envs=96, envs_per_group=48, threads=1),
        algorithm=PPOConfig(
            rollout_steps=25,
            minibatch_size=600,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.95,
            entropy_coef=0.01,
        ),
        clock=ClockConfig(total_timesteps=600_000, cycles=5, iterations=5),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=300, num_envs=300, envs_per_group=150, final_episodes=600
        ),
    )


def seek_pictures() -> Recipe:
    """A point is steered to a target by pictures of 64 x 64 pixels alone: PPO with convolutions."""
    return Recipe(
        name="seek-pictures",
        env=TaskConfig(task="etude.tasks.seek:SeekPictures"),
        collector=CollectorConfig(num_envs=64, envs_per_group=32, threads=2),
        policy=PolicyConfig(actor_reads=("image",), critic_reads=("image",), hidden=(64,)),
        algorithm=PPOConfig(
            rollout_steps=32,
            minibatch_size=256,
            update_epochs=4,
            learning_rate=5e-4,
            final_learning_rate=0.1,
            gamma=0.95,
            bound_coef=0.0,
        ),
        clock=ClockConfig(total_timesteps=100_000, cycles=4, iterations=3),
        evaluation=EvaluationConfig(every="1 epoch", episodes=64, num_envs=64, envs_per_group=32),
    )


def sac() -> Recipe:
    """SAC on any Gymnasium environment with a box of actions: `--env.id HalfCheetah-v5`."""
    from etude.rl.sac import SACConfig

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
    from etude.rl.td3 import TD3Config

    return Recipe(
        name="td3",
        env=GymConfig(id="Pendulum-v1"),
        collector=CollectorConfig(num_envs=1, envs_per_group=1, threads=1),
        policy=PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
        algorithm=TD3Config(rollout_steps=100, train_batches=100, warmup_steps=1_000),
        clock=ClockConfig(total_timesteps=20_000, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=10, num_envs=10, envs_per_group=10),
    )
