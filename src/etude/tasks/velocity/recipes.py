"""Recipes of walking by PPO."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.envs.mujoco.randomize import Randomization
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.dagger import DAggerConfig
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.velocity.task import WalkConfig, WalkNoise
from etude.training.curriculum import CurriculumConfig
from etude.training.evaluation import EvaluationConfig


def walk_go1() -> Recipe:
    """A Unitree Go1 learns to walk at commanded velocities on flat ground."""
    return Recipe(
        name="walk-go1",
        env=WalkConfig(),
        policy=PolicyConfig(
            hidden=(128, 128), activation="elu", init_std=0.3, critic_reads=("state", "critic")
        ),
        collector=CollectorConfig(num_envs=512, envs_per_group=256, threads=2),
        algorithm=PPOConfig(
            rollout_steps=24,
            minibatch_size=3072,
            update_epochs=5,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.98,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=2_500_000, cycles=4, iterations=10),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=40, num_envs=40, envs_per_group=40, final_episodes=200
        ),
    )


def walk_go1_robust() -> Recipe:
    """A Unitree Go1 learns to walk with noise, delays, pushes and physics that differ."""
    random = Randomization(
        mass=0.3,
        added_mass=(-0.5, 1.0),
        friction=0.4,
        gains=0.2,
        joint_offset=0.02,
        latency=(0, 3),
        push=0.6,
        push_every=(2.0, 5.0),
    )
    noise = WalkNoise(gyro=0.2, gravity=0.05, joint_position=0.02, joint_velocity=1.0, velocity=0.1)
    return walk_go1().replace(
        name="walk-go1-robust",
        env=WalkConfig(random=random, noise=noise),
        clock__total_timesteps=6_000_000,
    )


ROUGH = WalkConfig(
    ground="rough",
    speed_x=(-1.0, 1.0),
    speed_y=(-0.5, 0.5),
    foot_height=0.1,
    success_error=0.4,
)
"""Slopes, blocks and stairs, at lower speeds than on flat ground."""
LEVELS = CurriculumConfig(enabled=True, start=0.125, step=0.125, episodes=400)


def walk_go1_rough() -> Recipe:
    """A Unitree Go1 learns to walk over slopes, blocks and stairs, level by level."""
    return Recipe(
        name="walk-go1-rough",
        env=ROUGH,
        policy=PolicyConfig(
            hidden=(128, 128),
            activation="elu",
            init_std=0.3,
            actor_reads=("state", "scan"),
            critic_reads=("state", "scan", "critic"),
        ),
        collector=CollectorConfig(num_envs=512, envs_per_group=256, threads=2),
        algorithm=PPOConfig(
            rollout_steps=24,
            minibatch_size=3072,
            update_epochs=5,
            # At 1e-3 the policy moved by 0.06 in KL per iteration, and success did not rise.
            learning_rate=5e-4,
            final_learning_rate=0.1,
            gamma=0.98,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=10_000_000, cycles=8, iterations=10),
        curriculum=LEVELS,
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=40, num_envs=40, envs_per_group=40, final_episodes=200
        ),
    )


def walk_go1_student() -> Recipe:
    """A Go1 without eyes learns rough ground from a teacher with: `--algorithm.teacher RUN`.

    The teacher: `etude train walk-go1-rough --env.no-observe-velocity --policy.actor-reads
    state,scan,critic`. The student has an LSTM, and reads its own sensors alone.
    """
    return Recipe(
        name="walk-go1-student",
        env=ROUGH.replace(observe_velocity=False),
        policy=PolicyConfig(
            kind="lstm",
            hidden=(128,),
            units=128,
            activation="elu",
            init_std=0.1,
            actor_reads=("state",),
            critic_reads=("state",),
        ),
        collector=CollectorConfig(num_envs=512, envs_per_group=256, threads=2),
        algorithm=DAggerConfig(
            rollout_steps=24, horizon=24, minibatch_size=3072, update_epochs=2, learning_rate=1e-3
        ),
        clock=ClockConfig(total_timesteps=3_000_000, cycles=4, iterations=10),
        curriculum=LEVELS,
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=40, num_envs=40, envs_per_group=40, final_episodes=200
        ),
    )
