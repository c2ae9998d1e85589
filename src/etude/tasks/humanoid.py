"""Recipes of motion tracking with our humanoid, whose motions are DeepMimic's clips."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.envs.robots import humanoid
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.amp import AMPConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.tracking import TrackConfig, TrackReward, TrackStd
from etude.training.curriculum import MotionCurriculumConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig

NUM_CLIPS = 15
"""Number of clips that come with pybullet."""
AMP_CLIPS = ("walk", "run", "jump", "kick", "punch")


def _crossing(*clips: str) -> tuple[str, ...]:
    """Pairs of bodies that do not collide, because they are inside each other in these clips."""
    return tuple(dict.fromkeys(p for clip in clips for p in humanoid.CROSSINGS.get(clip, ())))


CLOSELY = TrackConfig(
    robot=humanoid.MODEL,
    motion=("walk",),
    ends=humanoid.ENDS,
    timestep=1 / 120,
    substeps=4,
    lead=humanoid.LEAD,
    action_scale={".*": 0.4},
    future=(1,),
    max_episode_steps=300,
    anchor_height=None,
    anchor_tilt=None,
    ends_height=None,
    mean_distance=0.5,
    std=TrackStd(
        anchor_position=0.2,
        anchor_orientation=0.3,
        positions=0.1,
        orientations=0.3,
        velocities=2.0,
        spins=6.0,
    ),
    reward=TrackReward(action_rate=0.0, joint_limits=0.0),
)
"""Close tracking, 30 times a second."""
FREELY = CLOSELY.replace(
    future=(1, 4),
    action_scale={".*": 1.0},
    std=TrackStd(
        anchor_position=0.3,
        anchor_orientation=0.5,
        positions=0.2,
        orientations=0.5,
        velocities=3.0,
        spins=6.0,
    ),
)
"""For clips that cannot be tracked closely: in the air a recorded flip gains and loses spin, so a
simulated figure must leave the ground differently to land. Actions may turn joints further from the
clip, an episode goes on while the mean distance of all bodies is small, and the reward falls more
slowly with distance."""


def imitate_walk() -> Recipe:
    """A humanoid walks like the person in a recorded clip, by servos in its joints."""
    return Recipe(
        name="imitate-walk",
        env=CLOSELY,
        policy=PolicyConfig(
            hidden=(256, 256),
            activation="silu",
            init_std=0.2,
            learn_std=False,
            critic_reads=("state", "critic"),
        ),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=1024,
            update_epochs=4,
            learning_rate=3e-4,
            final_learning_rate=0.1,
            gamma=0.97,
            bound_coef=0.1,
            max_grad_norm=1.0,
        ),
        clock=ClockConfig(total_timesteps=1_048_576, cycles=4, iterations=8),
        evaluation=_once_each(1),
        checkpoint=CheckpointConfig(every="1 epoch"),
    )


def amp_walk() -> Recipe:
    """A humanoid walks in the style of a clip, rewarded by a discriminator alone (AMP)."""
    return Recipe(
        name="amp-walk",
        env=CLOSELY.replace(
            control="absolute",
            action_scale={".*": 2.0},
            mean_distance=None,
            lowest=0.6,
            future=(),
            style_window=10,
        ),
        policy=PolicyConfig(hidden=(256, 256), activation="silu", init_std=0.06),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=1),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=1024,
            update_epochs=4,
            learning_rate=5e-4,
            final_learning_rate=0.1,
            gamma=0.97,
            gae_lambda=0.95,
            bound_coef=0.1,
            max_grad_norm=1.0,
        ),
        rewards=AMPConfig(task_weight=0.0),
        clock=ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=16),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=8, num_envs=8, envs_per_group=8, final_episodes=8
        ),
        checkpoint=CheckpointConfig(every="1 epoch"),
    )


def amp_clips() -> Recipe:
    """An LSTM policy for five clips, rewarded for tracking and style, with a motion curriculum."""
    return Recipe(
        name="amp-clips",
        env=CLOSELY.replace(
            motion=AMP_CLIPS, crossing=_crossing(*AMP_CLIPS), future=(1, 4), style_window=10
        ),
        policy=PolicyConfig(
            kind="lstm",
            hidden=(256,),
            units=128,
            activation="silu",
            init_std=0.1,
            learn_std=False,
        ),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            horizon=16,
            minibatch_size=1024,
            update_epochs=4,
            learning_rate=3e-4,
            final_learning_rate=0.1,
            gamma=0.97,
            bound_coef=0.1,
            max_grad_norm=1.0,
        ),
        rewards=AMPConfig(task_weight=3.0, style_weight=1.0),
        motions=MotionCurriculumConfig(enabled=True),
        clock=ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=16),
        evaluation=_once_each(len(AMP_CLIPS)),
        checkpoint=CheckpointConfig(every="1 epoch"),
    )


def imitate_backflip() -> Recipe:
    """A humanoid does backflips like the person in a recorded clip."""
    return imitate_walk().replace(
        name="imitate-backflip",
        env=FREELY.replace(motion=("backflip",), crossing=_crossing("backflip")),
        policy__init_std=0.1,
        algorithm__learning_rate=2e-4,
        clock=ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=16),
    )


def imitate_all() -> Recipe:
    """One policy for all 15 clips: walks, runs, jumps, flips, dances, rolls and gets up."""
    return imitate_walk().replace(
        name="imitate-all",
        env=FREELY.replace(
            motion=("all",), crossing=_crossing(*humanoid.CROSSINGS), future=(1, 4, 10)
        ),
        policy__hidden=(512, 256),
        policy__init_std=0.1,
        collector=CollectorConfig(num_envs=512, envs_per_group=256, threads=2),
        algorithm__minibatch_size=2048,
        algorithm__learning_rate=2e-4,
        motions=MotionCurriculumConfig(enabled=True),
        clock=ClockConfig(total_timesteps=16_777_216, cycles=8, iterations=16),
        evaluation=_once_each(NUM_CLIPS),
    )


def _once_each(clips: int) -> EvaluationConfig:
    """Evaluation that plays each clip once, because evaluation episodes are deterministic."""
    return EvaluationConfig(
        every="1 epoch",
        episodes=clips,
        num_envs=clips,
        envs_per_group=clips,
        final_episodes=clips,
    )
