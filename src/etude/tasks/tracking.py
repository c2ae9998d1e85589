"""Motion tracking: any robot with a floating base tracks recorded motions; and recipes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import mujoco
from pydantic import AfterValidator, Field

from etude.core.clock import ClockConfig
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.metrics import Curve, Metric, Metrics
from etude.data.motion import files
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.playing import ErrorMeter
from etude.envs.mujoco.randomize import Late, Randomization
from etude.envs.mujoco.reference import ReferenceMotion, SelfContacts, StartNoise, load_robot
from etude.envs.mujoco.robot import JointTargets, Robot
from etude.envs.mujoco.simulation import Camera
from etude.envs.mujoco.strain import StrainMeter
from etude.envs.mujoco.style import StyleWindow
from etude.envs.mujoco.task import Observation, Part, Task, Term
from etude.envs.mujoco.terms import observations as obs
from etude.envs.mujoco.terms import rewards, terminations, tracking
from etude.envs.robots import g1
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig

Place = Annotated[
    str, AfterValidator(lambda path: str(Path(path).absolute()) if Path(path).is_file() else path)
]
"""A file, or its name in a package: a run must find it from any working directory."""
PerJoint = dict[str, float]


class TrackReward(Config):
    """Weights of the reward terms, per second; `std` of each is in `TrackConfig`."""

    anchor_position: float = Field(0.5, description="Position of the anchor, 0 to 1.")
    anchor_orientation: float = Field(0.5, description="Orientation of the anchor, 0 to 1.")
    positions: float = Field(1.0, description="Positions of the bodies, 0 to 1.")
    orientations: float = Field(1.0, description="Orientations of the bodies, 0 to 1.")
    velocities: float = Field(1.0, description="Velocities of the bodies, 0 to 1.")
    spins: float = Field(1.0, description="Angular velocities of the bodies, 0 to 1.")
    action_rate: float = Field(-0.1, description="Squared change of the action.")
    joint_limits: float = Field(-10.0, description="Distance beyond 90 % of joint ranges, rad.")
    self_contacts: float = Field(0.0, description="Number of contacts of the robot with itself.")


class TrackStd(Config):
    """Error at which each reward term has fallen to 0.37."""

    anchor_position: float = Field(0.3, gt=0, description="Position of the anchor, m.")
    anchor_orientation: float = Field(0.4, gt=0, description="Orientation of the anchor, rad.")
    positions: float = Field(0.3, gt=0, description="Positions of the bodies, m.")
    orientations: float = Field(0.4, gt=0, description="Orientations of the bodies, rad.")
    velocities: float = Field(1.0, gt=0, description="Velocities of the bodies, m/s.")
    spins: float = Field(3.14, gt=0, description="Angular velocities of the bodies, rad/s.")


class TrackNoise(obs.SensorNoise):
    """Half-widths of the uniform noise of the policy's observations."""

    anchor_position: float = Field(0.0, ge=0, description="Position of the anchor, m.")
    anchor_orientation: float = Field(0.0, ge=0, description="Axes of the anchor.")


class TrackConfig(TaskConfig):
    """A robot from an MJCF file tracks motions; actions are joint rotations from the reference."""

    metrics: ClassVar[Metrics] = (
        Metric("eval/mpjpe_l", "mpjpe_l, mm", ".1f", curve=Curve(4, "bright_green", (0, None))),
    )
    kind: Literal["track"] = "track"
    robot: Place = Field(
        "",
        description="MJCF file of the robot, PACKAGE/PATH of one in an installed package, or a name"
        " in MuJoCo Menagerie.",
    )
    motion: tuple[Place, ...] = Field(
        (),
        description="Files of motions (.npz, .csv, DeepMimic's .txt) or folders of them, "
        "PACKAGE/PATH in an installed package, or names of DeepMimic's clips (all: all of them).",
    )
    folder: str | None = Field(
        None,
        description="Folder of extracted packages in which PACKAGE/PATH is looked up, or of clips "
        "(default: those of pybullet).",
    )
    base: str = Field("", description="Body with the free joint; default the first with one.")
    home: str = Field("", description="Keyframe that joints without a motion keep.")
    anchor: str = Field("", description="Body that others are compared from; default the base.")
    bodies: str = Field(".*", description="Regular expression of the bodies to track.")
    ends: str = Field("", description="Regular expression of bodies whose height ends an episode.")
    joints: str = Field(".*", description="Regular expression of the joints with a servo.")
    crossing: tuple[str, ...] = Field(
        (), description="Pairs of bodies that do not collide: 'left_hand right_hand'."
    )
    stiffness: PerJoint = Field(
        {},
        description="Stiffness of position servos by pattern of joint names, N m/rad; default the "
        "actuators of the model.",
    )
    damping: PerJoint = Field({}, description="Damping of the joints, N m s/rad.")
    torque: PerJoint = Field({}, description="Largest torque of the servos, N m.")
    armature: PerJoint = Field({}, description="Rotor inertia of the joints, kg m^2.")
    action_scale: PerJoint = Field(
        {".*": 0.3}, description="Joint motion by a unit action, by pattern of joint names, rad."
    )
    control: Literal["residual", "absolute"] = Field(
        "residual",
        description="Actions are joint motions from the motion's pose, or from the home pose.",
    )
    lead: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Time by which targets of the servos lead the motion, s: damping / stiffness "
        "of a servo offsets its lag.",
    )
    timestep: float = Field(0.005, gt=0, le=0.1, description="Length of a physics step, s.")
    substeps: int = Field(4, ge=1, le=1000, description="Physics steps per control step.")
    iterations: int = Field(10, ge=1, le=1000, description="Largest number of solver iterations.")
    start: Literal["random", "first"] = Field(
        "random", description="Initial frame of an episode in its motion."
    )
    order: Literal["drawn", "in turn"] = Field(
        "drawn", description="Sample a motion for each episode, or play motion i in environment i."
    )
    future: tuple[Annotated[int, Field(ge=0, le=1000)], ...] = Field(
        (1, 5),
        max_length=100,
        description="Offsets of the observed frames of the motion from the current one; () for "
        "none, and no phase.",
    )
    style_window: int = Field(
        0,
        ge=0,
        le=1000,
        description='Number of frames in the observation "style" of a discriminator; 0: none.',
    )
    max_episode_steps: int = Field(
        500, ge=1, le=100_000, description="Largest length of an episode in control steps."
    )
    anchor_height: float | None = Field(
        0.25, gt=0, description="Error of the anchor's height that ends an episode, m."
    )
    anchor_tilt: float | None = Field(
        0.8, gt=0, description="Difference of the cosine of the anchor's tilt that ends an episode."
    )
    ends_height: float | None = Field(
        0.25, gt=0, description="Error of the height of any of `ends` that ends an episode, m."
    )
    mean_distance: float | None = Field(
        0.5, gt=0, description="Mean distance of the bodies that ends an episode, m."
    )
    lowest: float | None = Field(
        None, description="Height of the base below which an episode ends, m."
    )
    aligned: bool = Field(
        True,
        description="Rewards of bodies' positions and orientations leave out the errors of the "
        "anchor's horizontal position and heading.",
    )
    measure: bool = Field(False, description="Report the errors of each episode in mm.")
    observation_delay: tuple[Late, Late] = Field(
        (0, 0), description="Delay of each sensor in control steps: minimum and maximum."
    )
    start_noise: StartNoise = Field(StartNoise(), description="Differences of starts.")
    noise: TrackNoise = Field(TrackNoise(), description="Noise of the policy's observations.")
    random: Randomization = Field(Randomization(), description="Domain randomisation and pushes.")
    std: TrackStd = Field(TrackStd(), description="Widths of the reward terms.")
    reward: TrackReward = Field(TrackReward(), description="Weights of the reward terms.")

    def for_evaluation(self) -> Self:
        """Play motion i in environment i from its first frame to its end, with looser termination
        and measured errors; noise and pushes stay.

        If training does not end episodes by distance, motions are not tracked: evaluation then has
        no such end either, and keeps the initial frames of training.
        """
        bounds = (self.anchor_height, self.anchor_tilt, self.ends_height, self.mean_distance)
        tracks = any(bound is not None for bound in bounds)
        return self.replace(
            start="first" if tracks else self.start,
            order="in turn",
            anchor_height=None,
            anchor_tilt=None,
            ends_height=None,
            mean_distance=0.5 if tracks else None,
            measure=True,
        )

    def define(self) -> Task:
        for option, value, what in (
            ("robot", self.robot, "the MJCF file of the robot"),
            ("motion", self.motion, "files of motions, for example walk.npz"),
        ):
            if not value:
                raise UsageError(f"Tracking needs {what}: --env.{option} FILE.")
        model = self._model()
        balls = any(joint.type == mujoco.mjtJoint.mjJNT_BALL for joint in model.joints)
        robot = Robot(self.base or None, joints=self.joints, home=self.home or None, balls=balls)
        motion = ReferenceMotion(
            robot,
            files.load(self.motion, self.folder),
            self.anchor or None,
            self.bodies,
            self.ends,
            self.max_episode_steps,
            self.start,
            self.order,
            self.start_noise,
            self.lead,
        )
        contacts, meter = SelfContacts(robot), ErrorMeter(motion)
        strain = StrainMeter(robot, contacts)
        parts: list[Part] = [robot, motion, *self.random.parts(robot)]
        if self.reward.self_contacts or self.measure:
            parts.append(contacts)
        if self.measure:
            parts += [meter, strain]
        observations = self._observations(robot, motion, balls)
        if self.style_window:
            style = StyleWindow(motion, self.style_window)
            parts.append(style)
            observations["style"] = {"style": lambda _: style.frames}
            if len(motion.names) > 1:
                observations["motion"] = {"motion": lambda _: motion.motion[:, None]}
        dt = self.timestep * self.substeps
        return Task(
            model=model,
            parts=parts,
            action=JointTargets(
                robot,
                self.action_scale,
                stiffness=self.stiffness or None,
                joint_damping=self.damping or None,
                torque=self.torque or None,
                armature=self.armature or None,
                delay=self.random.latency,
                reference=motion.joint_targets if self.control == "residual" else None,
            ),
            observations=observations,
            rewards=self._rewards(robot, motion, contacts, dt),
            terminations=self._terminations(robot, motion),
            statistics={
                "motion": lambda _: motion.motion,
                "progress": lambda env: env.elapsed / motion.episode_steps,
                **(
                    meter.statistics() | strain.statistics()
                    if self.measure
                    else motion.statistics()
                ),
            },
            substeps=self.substeps,
            max_episode_steps=motion.limit(1.0 / dt),
            time_limit=lambda _: motion.episode_steps,
            motions=motion.names,
            camera=Camera(
                follow=self.anchor or None, look_at=None, distance=3.0, azimuth=120, elevation=-12
            ),
        )

    def _model(self) -> mujoco.MjSpec:
        """The robot with the options of the physics."""
        spec = load_robot(self.robot, self.folder)
        spec.option.timestep, spec.option.iterations = self.timestep, self.iterations
        spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
        for pair in self.crossing:
            names = pair.split()
            if len(names) != 2 or any(spec.body(name) is None for name in names):
                raise UsageError(f"env.crossing '{pair}' must name two bodies of the robot.")
            spec.add_exclude(bodyname1=names[0], bodyname2=names[1])
        return spec

    def _observations(
        self, robot: Robot, motion: ReferenceMotion, balls: bool
    ) -> dict[str, Mapping[str, Term | Observation]]:
        """Sensors and the reference in "state", more for the value function in "critic"."""
        noise, late = self.noise, self.observation_delay
        state: dict[str, Term | Observation] = {
            **obs.sensors(robot, noise, late),
            "action": obs.last_action(),
        }
        if self.future:
            state["phase"] = tracking.phase(motion)
        if balls:
            state["balls"] = obs.ball_joints(robot, noise=noise.joint_position, delay=late)
            state["ball speeds"] = obs.ball_velocities(
                robot, noise=noise.joint_velocity, scale=0.05, delay=late
            )
        for n in self.future:
            state[f"anchor position {n}"] = tracking.anchor_position(
                motion, n, noise=noise.anchor_position, delay=late
            )
            state[f"anchor orientation {n}"] = tracking.anchor_orientation(
                motion, n, noise=noise.anchor_orientation, delay=late
            )
            state[f"joint errors {n}"] = tracking.joint_errors(
                motion, n, noise=noise.joint_position, delay=late
            )
            state[f"reference speeds {n}"] = tracking.joint_velocities(motion, n, scale=0.05)
        critic: dict[str, Term | Observation] = {
            "height": obs.height(robot),
            "bodies": tracking.body_positions(motion),
            "orientations": tracking.body_orientations(motion),
            "errors": tracking.body_errors(motion),
        }
        return {"state": state, "critic": critic}

    def _rewards(
        self, robot: Robot, motion: ReferenceMotion, contacts: SelfContacts, dt: float
    ) -> dict[str, tuple[Term, float]]:
        """Reward terms, with their weights per control step."""
        std = self.std
        terms: dict[str, Term] = {
            "anchor_position": tracking.track_anchor_position(motion, std.anchor_position),
            "anchor_orientation": tracking.track_anchor_orientation(motion, std.anchor_orientation),
            "positions": tracking.track_positions(motion, std.positions, self.aligned),
            "orientations": tracking.track_orientations(motion, std.orientations, self.aligned),
            "velocities": tracking.track_velocities(motion, std.velocities),
            "spins": tracking.track_spins(motion, std.spins),
            "action_rate": rewards.action_rate,
            "joint_limits": tracking.joint_limits(robot),
            "self_contacts": tracking.self_contacts(contacts),
        }
        weights = self.reward.model_dump()
        return {name: (term, weights[name] * dt) for name, term in terms.items()}

    def _terminations(self, robot: Robot, motion: ReferenceMotion) -> dict[str, Term]:
        bounds = {
            "height": (tracking.anchor_height_off, self.anchor_height),
            "tilt": (tracking.anchor_tilt_off, self.anchor_tilt),
            "hands or feet": (tracking.ends_height_off, self.ends_height if self.ends else None),
            "distance": (tracking.bodies_off, self.mean_distance),
        }
        ends = {
            name: term(motion, bound) for name, (term, bound) in bounds.items() if bound is not None
        }
        if self.lowest is not None:
            ends["fall"] = terminations.lower_than(robot, self.lowest)
        return ends


def track() -> Recipe:
    """A robot of your own tracks a motion: `--env.robot robot.xml --env.motion walk.npz`."""
    return Recipe(
        name="track",
        env=TrackConfig(
            start_noise=StartNoise(
                position=0.05,
                height=0.01,
                tilt=0.1,
                yaw=0.2,
                joints=0.1,
                velocity=0.5,
                vertical=0.2,
                spin=0.5,
            )
        ),
        policy=PolicyConfig(
            hidden=(256, 256), activation="elu", init_std=0.3, critic_reads=("state", "critic")
        ),
        collector=CollectorConfig(num_envs=512, envs_per_group=256, threads=2),
        algorithm=PPOConfig(
            rollout_steps=24,
            minibatch_size=3072,
            update_epochs=5,
            learning_rate=5e-4,
            final_learning_rate=0.1,
            gamma=0.99,
            gae_lambda=0.95,
            bound_coef=0.1,
            max_grad_norm=1.0,
        ),
        clock=ClockConfig(total_timesteps=5_000_000, cycles=8, iterations=10),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=20, num_envs=20, envs_per_group=20, final_episodes=50
        ),
        checkpoint=CheckpointConfig(every="1 epoch"),
    )


def track_g1() -> Recipe:
    """A Unitree G1 tracks a person who lifts a box, from files of mjlab and holosoma."""
    return track().replace(
        name="track-g1",
        env__robot=g1.MODEL,
        env__motion=(g1.MOTION,),
        env__anchor="torso_link",
        env__bodies=g1.BODIES,
        env__ends=g1.ENDS,
        env__stiffness=g1.STIFFNESS,
        env__damping=g1.DAMPING,
        env__torque=g1.TORQUE,
        env__armature=g1.ARMATURE,
        env__timestep=0.01,
        env__substeps=2,
        clock__total_timesteps=20_000_000,
    )
