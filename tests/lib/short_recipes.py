"""Recipes that take seconds, save and evaluate often: tests and gates kill and resume them.

On the command line: `etude train tests/lib/short_recipes.py:pick_place_short`.
"""

from __future__ import annotations

from collections.abc import Callable

from etude.core.clock import ClockConfig
from etude.envs.mujoco.randomize import Randomization
from etude.models.policies import PolicyConfig
from etude.planning import recipes
from etude.planning.recipe import LearnerConfig, Recipe
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.amp import AMPConfig
from etude.rl.rewards.rrd import RRDConfig
from etude.rl.sac import SACConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.humanoid import CLOSELY
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.tasks.reach import ReachConfig
from etude.tasks.velocity import WalkConfig, WalkNoise
from etude.training.curriculum import CurriculumConfig, MotionCurriculumConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def reach_at_scale_short() -> Recipe:
    """reach-at-scale in seconds: LSTM, prioritised sampling, V-trace, two shards, lag 1."""
    full = recipes.find("reach-at-scale")
    return full.replace(
        name="reach-at-scale-short",
        policy=PolicyConfig(kind="lstm", hidden=(32,), units=32, init_std=0.3),
        collector=CollectorConfig(num_envs=64, envs_per_group=16, threads=2, lag=1),
        algorithm__rollout_steps=32,
        algorithm__horizon=16,
        algorithm__minibatch_size=512,
        clock=ClockConfig(total_timesteps=32_768, cycles=1, iterations=2),
        evaluation=EvaluationConfig(every="3 cycles", episodes=32, num_envs=32, envs_per_group=16),
    )


def pick_place_short() -> Recipe:
    """pick-place-anywhere in seconds, with randomised physics and a curriculum."""
    full = recipes.find("pick-place-anywhere")
    shaky = {"cube_mass": 0.3, "friction": 0.3, "servo_gain": 0.1}
    return full.replace(
        name="pick-place-short",
        env=PickPlaceConfig.anywhere(
            max_episode_steps=20,
            discount=0.95,
            random={**shaky, "observation_noise": 0.001, "observation_delay": 1},
        ),
        collector=CollectorConfig(num_envs=32, envs_per_group=8, threads=2),
        algorithm__minibatch_size=128,
        algorithm__update_epochs=2,
        clock=ClockConfig(total_timesteps=6_144, cycles=1, iterations=2),
        curriculum=CurriculumConfig(enabled=True, step=0.1, raise_at=0.0, episodes=16),
        evaluation=EvaluationConfig(every="2 cycles", episodes=16, num_envs=16, envs_per_group=8),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def imitate_walk_short() -> Recipe:
    """imitate-walk in seconds, of two clips."""
    full = recipes.find("imitate-walk")
    return full.replace(
        name="imitate-walk-short",
        env=CLOSELY.replace(motion=("walk", "run"), max_episode_steps=30),
        policy__hidden=(32, 32),
        collector=CollectorConfig(num_envs=32, envs_per_group=8, threads=2),
        algorithm__minibatch_size=128,
        algorithm__update_epochs=2,
        clock=ClockConfig(total_timesteps=8_192, cycles=1, iterations=2),
        evaluation=EvaluationConfig(
            every="2 cycles", episodes=2, num_envs=2, envs_per_group=2, final_episodes=2
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def walk_go1_short() -> Recipe:
    """walk-go1-rough in seconds: randomised, noisy, late, pushed, with a curriculum over levels."""
    full = recipes.find("walk-go1-rough")
    random = Randomization(
        mass=0.3,
        friction=0.3,
        gains=0.2,
        armature=0.2,
        gravity=0.05,
        joint_offset=0.02,
        latency=(0, 2),
        push=0.5,
        push_every=(0.1, 0.5),
    )
    env = WalkConfig(
        ground="rough",
        levels=4,
        command_every=(0.2, 0.6),
        max_episode_steps=40,
        success_error=2.0,
        observation_delay=(0, 2),
        noise=WalkNoise(gyro=0.2, joint_velocity=1.0),
        random=random,
    )
    return full.replace(
        name="walk-go1-short",
        env=env,
        policy__hidden=(32, 32),
        collector=CollectorConfig(num_envs=32, envs_per_group=8, threads=2),
        algorithm__rollout_steps=16,
        algorithm__minibatch_size=128,
        algorithm__update_epochs=2,
        clock=ClockConfig(total_timesteps=6_144, cycles=1, iterations=2),
        curriculum=CurriculumConfig(enabled=True, raise_at=0.3, episodes=10),
        evaluation=EvaluationConfig(
            every="3 cycles", episodes=8, num_envs=8, envs_per_group=4, final_episodes=8
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def amp_walk_short() -> Recipe:
    """amp-walk in seconds, of two clips: LSTM, motion curriculum, two shards, lag 1."""
    full = recipes.find("amp-walk")
    return full.replace(
        name="amp-walk-short",
        env__motion=("walk", "run"),
        motions=MotionCurriculumConfig(enabled=True),
        policy=PolicyConfig(kind="lstm", hidden=(32,), units=32, init_std=0.06),
        collector=CollectorConfig(num_envs=32, envs_per_group=8, threads=2, lag=1),
        algorithm=PPOConfig(
            rollout_steps=16,
            horizon=8,
            minibatch_size=256,
            update_epochs=2,
            advantages="vtrace",
        ),
        rewards=AMPConfig(
            task_weight=0.0,
            hidden=(32,),
            updates=2,
            batch_size=64,
            replay_capacity=512,
            replay_per_iteration=128,
        ),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=6_144, cycles=2, iterations=1),
        evaluation=EvaluationConfig(every="1 epoch", episodes=8, num_envs=8, envs_per_group=8),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def episodic_short() -> Recipe:
    """episodic in seconds: SAC, its replay and RRD, on two shards."""
    full = recipes.find("episodic")
    return full.replace(
        name="episodic-short",
        env=ReachConfig(episodic=True, max_episode_steps=12),
        collector=CollectorConfig(num_envs=16, envs_per_group=4, threads=2),
        policy=PolicyConfig(kind="squashed", hidden=(32, 32), activation="relu"),
        algorithm=SACConfig(
            rollout_steps=8,
            train_batches=8,
            batch_size=64,
            warmup_steps=300,
            capacity=1_024,
            normalise_observations=True,
        ),
        rewards=RRDConfig(rrd_batch_size=64, rrd_sample_size=8),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=3_072, cycles=1, iterations=2),
        evaluation=EvaluationConfig(every="3 cycles", episodes=16, num_envs=16, envs_per_group=8),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reward_only_debug() -> Recipe:
    """reward-only with one of everything: one epoch, cycle, iteration and batch."""
    full = recipes.find("reward-only")
    return full.replace(
        name="reward-only-debug",
        algorithm__train_batches=1,
        clock=ClockConfig(epochs=1, cycles=1, iterations=1),
    )


SHORT: dict[str, Callable[[], Recipe]] = {
    "reach-at-scale-short": reach_at_scale_short,
    "pick-place-short": pick_place_short,
    "imitate-walk-short": imitate_walk_short,
    "walk-go1-short": walk_go1_short,
    "amp-walk-short": amp_walk_short,
    "episodic-short": episodic_short,
    "reward-only-debug": reward_only_debug,
}


def find(name: str) -> Recipe:
    """One of these recipes, or one of the catalogue."""
    return SHORT[name]() if name in SHORT else recipes.find(name)


def names() -> list[str]:
    """The catalogue's names, and these."""
    return [*recipes.names(), *SHORT]
