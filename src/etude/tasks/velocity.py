"""Velocity tracking: a quadruped walks at commanded velocities; and recipes of it."""

from __future__ import annotations

from typing import Literal, Self

import mujoco
import numpy as np
from pydantic import Field

from etude.core.clock import ClockConfig
from etude.core.config import Config
from etude.core.contracts import Array, Reflection
from etude.core.trees import Tree
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.randomize import Late, Randomization
from etude.envs.mujoco.robot import LEVEL, Feet, JointTargets, Robot
from etude.envs.mujoco.simulation import Camera, load_spec
from etude.envs.mujoco.task import Observation, Part, Task, Term, measured
from etude.envs.mujoco.terms import observations as obs
from etude.envs.mujoco.terms import resets, rewards, terminations
from etude.envs.mujoco.terrain import Terrain
from etude.envs.robots.go1 import MODEL
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.training.curriculum import CurriculumConfig
from etude.training.evaluation import EvaluationConfig

TIMESTEP, SUBSTEPS = 0.004, 5
Range = tuple[float, float]
SCAN = np.stack(np.meshgrid(np.linspace(-0.5, 0.8, 9), np.linspace(-0.3, 0.3, 5)), 2).reshape(-1, 2)
"""[45, 2] m: points of the height scan, in the frame of the trunk's heading."""


LEG = 0.213
"""Length of thigh and of calf, m."""
BEND = 0.9
"""Angle of the thigh in the standing pose, rad; the calf bends back by twice as much."""
HIPS = np.array([[0.188, -0.127], [0.188, 0.127], [-0.188, -0.127], [-0.188, 0.127]])
"""[4, 2] m: positions of the hips front right, front left, rear right and rear left."""
OFFSETS = np.array([0.0, np.pi, np.pi, 0.0])
"""[4] rad: phase offsets of the legs; diagonal legs move together."""


HALF_STRIDE = Reflection((0, 1), (-1.0, -1.0))
"""Reflection of the gait's phase: in the mirror, the legs move half a stride later."""


class Trot(Part):
    """A trot by the clock: diagonal feet swing in the first half of their period, and then stand.

    No foot swings while the command is to stand still.
    """

    def __init__(
        self, feet: Feet, command: VelocityCommand, frequency: float, height: float
    ) -> None:
        """frequency: strides per second; height: of swinging feet, m."""
        self._feet, self._command = feet, command
        self._frequency, self._height = frequency, height
        # Angle by which the leg bends to lift the foot to that height.
        self._fold = np.arccos(np.cos(BEND) - height / (2.0 * LEG)) - BEND
        # rad per m/s: amplitude of the legs' swing about the hip.
        self._swing = 0.25 / frequency / (2.0 * LEG * np.cos(BEND))

    def describe(self) -> Tree:
        return {
            "trot": {
                "about": "angles added to the default pose: see docs/export.md for the formula",
                "frequency": self._frequency,
                "fold": float(self._fold),
                "swing": float(self._swing),
                "hips": HIPS.tolist(),
                "offsets": OFFSETS.tolist(),
            }
        }

    def _phase_angle(self, ahead: int = 0) -> Array:
        """Phase [num_envs, 1] of the gait, rad, `ahead` control steps from now."""
        steps = self.env.elapsed[:, None] + ahead
        angle: Array = steps * (2.0 * np.pi * self._frequency * self.env.dt)
        return angle

    def _moves(self) -> Array:
        """[num_envs, 1] bool: whether the command is not to stand still."""
        found: Array = np.asarray(self._command.command.any(axis=1))[:, None]
        return found

    def reference(self) -> Array:
        """[num_envs, 12] rad from the standing pose: an open-loop trot at the commanded velocity.

        A standing foot moves opposite to the commanded motion of its hip, a swinging foot to the
        start of its next stance. Without actions the robot falls, and is too slow because the
        servos yield: the policy must correct both.
        """
        phase = (self._phase_angle(ahead=1) + OFFSETS) % (2.0 * np.pi)
        swings, part = phase < np.pi, phase % np.pi / np.pi
        along = np.where(swings, -np.cos(np.pi * part), 1.0 - 2.0 * part) * self._swing
        x, y, turn = self._command.command.T[:, :, None]
        pitch = np.arctan((x - turn * HIPS[:, 1]) * along)
        roll = np.arctan((y + turn * HIPS[:, 0]) * along)
        fold = np.where(swings & self._moves(), np.sin(phase), 0.0) * self._fold
        return np.stack([roll, fold - pitch, -2.0 * fold], axis=2).reshape(-1, 12)

    @measured("1")
    def phase(self, env: MujocoEnv) -> Array:
        """[num_envs, 2]: sine and cosine of the gait's phase, both 0 if the command is to stand
        still."""
        angle = self._phase_angle()
        return np.concatenate([np.sin(angle), np.cos(angle)], axis=1) * self._moves()

    def reward(self, env: MujocoEnv) -> Array:
        """[num_envs] from 0 to 1: swinging feet at their height, standing feet on the ground and
        still."""
        swing = np.sin(self._phase_angle() + OFFSETS) * self._moves()
        target = np.maximum(swing, 0.0) * self._height
        lifted = np.exp(-(((self._feet.height - target) / 0.03) ** 2))
        planar = self._feet.velocity[:, :, :2]
        still = np.exp(-np.einsum("nfi,nfi->nf", planar, planar) / 0.1)
        mean: Array = np.where(swing > 0.0, lifted, 0.5 * lifted + 0.5 * still).mean(axis=1)
        return mean


class WalkReward(Config):
    """Weights of the reward terms, per second."""

    alive: float = Field(1.0, description="Not falling.")
    velocity: float = Field(4.0, description="Tracking of the commanded velocity, 0 to 1.")
    turning: float = Field(2.0, description="Tracking of the commanded yaw rate, 0 to 1.")
    gait: float = Field(
        2.0, description="Feet that swing and stand in the rhythm of a trot, 0 to 1."
    )
    pose: float = Field(0.5, description="Joints near the standing pose, 0 to 1.")
    tilt: float = Field(-5.0, description="Squared sine of the trunk's tilt.")
    vertical: float = Field(-0.5, description="Squared vertical velocity, (m/s)^2.")
    wobble: float = Field(-0.05, description="Squared roll and pitch rate, (rad/s)^2.")
    action_rate: float = Field(-0.01, description="Squared change of the action.")
    fall: float = Field(-5.0, description="A fall, once.")


class WalkNoise(obs.SensorNoise):
    """Half-widths of the uniform noise of the policy's observations."""


class WalkConfig(TaskConfig):
    """A Unitree Go1 walks at commanded velocities, which change within an episode."""

    kind: Literal["walk-go1"] = "walk-go1"
    speed_x: Range = Field((-1.5, 1.5), description="Range of the commanded forward velocity, m/s.")
    speed_y: Range = Field(
        (-0.8, 0.8), description="Range of the commanded velocity to the left, m/s."
    )
    turning: Range = Field((-1.2, 1.2), description="Range of the commanded yaw rate, rad/s.")
    command_every: Range = Field((3.0, 8.0), description="Seconds between new commands.")
    acceleration: float | None = Field(
        4.0,
        gt=0,
        description="Rate at which the command moves to a new target, m/s^2 and rad/s^2; none: at "
        "once. Reported errors are measured from the target.",
    )
    stand: float = Field(0.05, ge=0, le=1, description="Probability of a command to stand still.")
    zero: float = Field(
        0.2, ge=0, le=1, description="Probability of 0 for each component of a command."
    )
    action_scale: float = Field(0.5, gt=0, description="Joint motion by a unit action, rad.")
    gait_frequency: float = Field(2.0, gt=0, description="Strides per second of the trot.")
    reference: Literal["trot", "stand"] = Field(
        "trot",
        description="Reference that actions are added to: an open-loop trot at the commanded "
        "velocity, which falls without actions, or the standing pose.",
    )
    observe_velocity: bool = Field(
        True, description="Whether the policy observes the trunk's velocity, as from an estimator."
    )
    foot_height: float = Field(0.06, gt=0, le=0.2, description="Height of swinging feet, m.")
    ground: Literal["flat", "rough"] = Field(
        "flat", description="rough: slopes, blocks and stairs, with the curriculum's level."
    )
    levels: int = Field(8, ge=1, le=256, description="Number of levels of rough ground.")
    in_turn: bool = Field(False, description="Start environment i on tile i of rough ground.")
    success_error: float = Field(
        0.25,
        gt=0,
        description="Largest mean velocity error of a success, which must not fall, m/s.",
    )
    max_episode_steps: int = Field(
        500, ge=1, description="Control steps of 20 ms until an episode is truncated."
    )
    observation_delay: tuple[Late, Late] = Field(
        (0, 0),
        description="Delay of each sensor in control steps: minimum and maximum.",
    )
    noise: WalkNoise = Field(WalkNoise(), description="Noise of the policy's observations.")
    random: Randomization = Field(Randomization(), description="Domain randomisation and pushes.")
    reward: WalkReward = Field(WalkReward(), description="Weights of the reward terms.")

    def for_evaluation(self) -> Self:
        """Assign the tiles of rough ground to the environments in order."""
        return self.replace(in_turn=True)

    def define(self) -> Task:
        terrain = Terrain(self.levels, in_turn=self.in_turn) if self.ground == "rough" else None
        ground = LEVEL if terrain is None else terrain
        robot = Robot("trunk", joints=".*_joint", home="stand", ground=ground)
        feet = Feet(".*_foot", ground=ground)
        twist = VelocityCommand(
            robot,
            self.speed_x,
            self.speed_y,
            self.turning,
            self.command_every,
            zero=self.zero,
            stand=self.stand,
            acceleration=self.acceleration,
        )
        gait = Trot(feet, twist, self.gait_frequency, self.foot_height)
        motion = gait.reference if self.reference == "trot" else None
        return Task(
            model=MODEL if terrain is not None else on_floor(),
            parts=[
                *([] if terrain is None else [terrain]),
                robot,
                resets.BasePose(robot, terrain=terrain),
                resets.JointNoise(robot, 0.1),
                feet,
                twist,
                gait,
                *self.random.parts(robot, geoms=".*_foot|floor"),
            ],
            action=JointTargets(
                robot, self.action_scale, delay=self.random.latency, reference=motion
            ),
            observations=self._observations(robot, feet, twist, gait, terrain),
            rewards=self._rewards(robot, twist, gait),
            terminations={
                "tilted": terminations.tilted(robot, 60.0),
                "down": terminations.lower_than(robot, 0.12),
            },
            success=lambda env: (
                ~env.terminated & (twist.mean_error(0, settled=False) <= self.success_error)
            ),
            statistics={
                "fell": lambda env: env.terminated,
                **({} if terrain is None else {"tile": lambda _: terrain.tile}),
                "velocity_error": lambda _: twist.mean_error(0, settled=False),
                "turning_error": lambda _: twist.mean_error(1, settled=False),
                "settled_velocity_error": lambda _: twist.mean_error(0, settled=True),
                "settled_turning_error": lambda _: twist.mean_error(1, settled=True),
            },
            substeps=SUBSTEPS,
            max_episode_steps=self.max_episode_steps,
            camera=CAMERA,
        )

    def _observations(
        self, robot: Robot, feet: Feet, twist: VelocityCommand, gait: Trot, terrain: Terrain | None
    ) -> dict[str, dict[str, Term | Observation]]:
        """Sensors and commands in "state", more for the value function in "critic", and the
        "scan"."""
        measured = obs.sensors(robot, self.noise, self.observation_delay, self.observe_velocity)
        known: dict[str, Term | Observation] = {
            "action": obs.last_action(),
            "command": obs.command(twist),
            "phase": Observation(gait.phase, mirror=HALF_STRIDE),
        }
        observations: dict[str, dict[str, Term | Observation]] = {
            "state": {**measured, **known},
            "critic": {
                "velocity": obs.velocity(robot),
                "height": obs.height(robot),
                "contact": obs.contact(feet),
                "feet": Observation(lambda _: feet.height * 10.0, mirror=lambda _: feet.mirror()),
            },
        }
        if terrain is not None:
            observations["scan"] = {
                "ground": obs.height_scan(robot, terrain, SCAN, clip=(-1.0, 1.0), scale=2.0)
            }
        return observations

    def _rewards(
        self, robot: Robot, twist: VelocityCommand, gait: Trot
    ) -> dict[str, tuple[Term, float]]:
        """Reward terms, with their weights per control step."""
        terms: dict[str, Term] = {
            "alive": rewards.alive,
            "velocity": rewards.track_velocity(twist, 0.25, 0.05),
            "turning": rewards.track_turning(twist, 0.25, 0.05),
            "gait": gait.reward,
            "pose": lambda _: np.exp(-rewards.square_sum(robot.joint_positions)),
            "tilt": rewards.tilt(robot),
            "vertical": rewards.vertical_velocity(robot),
            "wobble": rewards.roll_pitch_rate(robot),
            "action_rate": rewards.action_rate,
        }
        weights, dt = self.reward.model_dump(), TIMESTEP * SUBSTEPS
        weighted = {name: (term, weights[name] * dt) for name, term in terms.items()}
        return {**weighted, "fall": (lambda env: env.terminated, weights["fall"])}


CAMERA = Camera(follow="trunk", look_at=(0.0, 0.0, 0.25), distance=1.35, azimuth=130, elevation=-16)


def on_floor() -> mujoco.MjSpec:
    """The Go1 on a plane."""
    spec = load_spec(MODEL)
    floor = spec.worldbody.add_geom(name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE)
    floor.size, floor.contype, floor.conaffinity = (0.0, 0.0, 0.05), 0, 1
    floor.friction[0], floor.rgba = 0.8, (0.55, 0.6, 0.65, 1.0)
    return spec


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
    from etude.rl.dagger import DAggerConfig

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
