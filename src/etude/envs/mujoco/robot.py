"""Robots: joints and base, feet, and actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import mujoco
import numpy as np

from etude.core.contracts import Array, Reflection
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.envs.mujoco import mirror
from etude.envs.mujoco.task import Action, Draws, Part, derived

_FREE, _BALL, _HINGE, _SLIDE = (
    int(mujoco.mjtJoint.mjJNT_FREE),
    int(mujoco.mjtJoint.mjJNT_BALL),
    int(mujoco.mjtJoint.mjJNT_HINGE),
    int(mujoco.mjtJoint.mjJNT_SLIDE),
)

_ON_JOINTS = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_SO3))
"""Transmissions of servos; the second is that of ball joints."""
_QUATERNION = int(mujoco.mjtCtrlChart.mjCHART_QUAT)
"""Controls of a ball joint's servo are a quaternion."""


def matching(names: Sequence[str], pattern: str, what: str) -> list[int]:
    """Indices of the names that match a regular expression in full; at least one must match."""
    found = [i for i, name in enumerate(names) if re.fullmatch(pattern, name)]
    if not found:
        known = ", ".join(name for name in names if name) or "no names"
        raise UsageError(f"No {what} of the model matches {pattern!r}; the model has {known}.")
    return found


def names_of(model: mujoco.MjModel, kind: str) -> list[str]:
    """Names of all bodies, joints, geoms or actuators; "" for those without a name."""
    # An actuator of a ball joint has several controls.
    actuators = len(model.actuator_trntype)
    count = {"body": model.nbody, "joint": model.njnt, "geom": model.ngeom, "actuator": actuators}
    return [getattr(model, kind)(i).name for i in range(count[kind])]


class Ground(Protocol):
    """The ground below a robot."""

    def height_at(self, points: Array) -> Array:
        """Height [...] m of the ground at points [..., 2]."""
        ...


class Level:
    """Level ground at z = 0."""

    def height_at(self, points: Array) -> Array:
        return np.zeros(points.shape[:-1])


LEVEL = Level()


class Robot(Part):
    """Joints of one degree of freedom, and a base, which floats if the model has a free joint.

    `base`: name of the base body; default the body with a free joint, or the first. `joints`:
    regular expression of the joints' names. `home`: name of a keyframe, or joint positions in the
    model's order; default the model's `qpos0`. `ground`: heights are measured from it. `balls`:
    whether ball joints of these names belong to the robot too. Joint arrays are in the model's
    order.
    """

    def __init__(
        self,
        base: str | None = None,
        joints: str = ".*",
        home: str | Sequence[float] | None = None,
        ground: Ground = LEVEL,
        balls: bool = False,
    ) -> None:
        self._base, self._joints, self._home, self._ground = base, joints, home, ground
        self._balls = balls

    def bind(self) -> None:
        simulation = self.env.simulation
        model = simulation.model
        free = [j for j in range(model.njnt) if model.jnt_type[j] == _FREE]
        single = [j for j in range(model.njnt) if model.jnt_type[j] in (_HINGE, _SLIDE)]
        names = names_of(model, "joint")
        if single:
            among = matching([names[j] for j in single], self._joints, "joint")
            single = [single[i] for i in among]
        balls = [
            j
            for j in range(model.njnt * self._balls)
            if model.jnt_type[j] == _BALL and re.fullmatch(self._joints, names[j])
        ]
        self.ball_ids = np.array(balls, np.int64)
        self.ball_names = tuple(names[j] for j in balls)
        self.ball_qpos_ids: Array = model.jnt_qposadr[balls][:, None] + np.arange(4)
        self.ball_dof_ids: Array = model.jnt_dofadr[balls][:, None] + np.arange(3)
        self.joint_ids = np.array(single, np.int64)
        self.joint_names = tuple(names[j] for j in single)
        self.body = self._first_body(model, free)
        if self._base:
            self.body = matching(names_of(model, "body"), re.escape(self._base), "body")[0]
        self.floats = any(model.jnt_bodyid[j] == self.body for j in free)
        self._qpos, self._qvel = simulation.bind("qpos"), simulation.bind("qvel")
        self.qpos_ids, self.dof_ids = model.jnt_qposadr[single], model.jnt_dofadr[single]
        self.root = int(model.jnt_qposadr[free[0]]) if self.floats else -1
        self.root_dof = int(model.jnt_dofadr[free[0]]) if self.floats else -1
        self.home: Array = self._find_home(model)
        """[nq]: the initial pose of episodes, before noise."""
        self.default_joints: Array = self.home[self.qpos_ids]
        """[joints] rad or m."""
        limited = model.jnt_limited[single].astype(bool)
        self.joint_range: Array = np.where(
            limited[:, None], model.jnt_range[single], [-np.inf, np.inf]
        )
        self.joint_offset: Array = np.zeros((self.env.num_envs, len(single)))
        """[num_envs, joints]: errors of the encoders; see `randomize.JointOffset`."""
        self._xpos = simulation.bind("xpos")[:, self.body]
        self._xmat = simulation.bind("xmat")[:, self.body].reshape(-1, 3, 3)
        self._cvel = simulation.bind("cvel")[:, self.body]
        self._subtree = simulation.bind("subtree_com")[:, model.body_rootid[self.body]]

    @staticmethod
    def _first_body(model: mujoco.MjModel, free: list[int]) -> int:
        return int(model.jnt_bodyid[free[0]]) if free else min(1, model.nbody - 1)

    def _find_home(self, model: mujoco.MjModel) -> Array:
        home: Array = model.qpos0.copy()
        if isinstance(self._home, str):
            keys = [model.key(i).name for i in range(model.nkey)]
            home = model.key_qpos[matching(keys, re.escape(self._home), "keyframe")[0]].copy()
        elif self._home is not None:
            home[self.qpos_ids] = self._home
        return home

    def reset(self, env_ids: Array, draws: Draws) -> None:
        self._qpos[env_ids] = self.home

    def mirror(self) -> Reflection:
        """The reflection of the joints left for right; raises if they are not symmetric."""
        model = self.env.simulation.model
        return mirror.joints(model, self.home, self.body, self.joint_ids)

    def describe(self) -> Tree:
        angles = self.default_joints.tolist()
        return {"default_pose": dict(zip(self.joint_names, angles, strict=True))}

    @derived
    def joint_positions(self) -> Array:
        """[num_envs, joints] rad or m: positions from the home pose, with the encoders' errors."""
        return self._qpos[:, self.qpos_ids] - self.default_joints + self.joint_offset

    @derived
    def joint_velocities(self) -> Array:
        """[num_envs, joints] rad/s or m/s."""
        return self._qvel[:, self.dof_ids]

    @derived
    def ball_quaternions(self) -> Array:
        """[num_envs, balls, 4]."""
        return self._qpos[:, self.ball_qpos_ids]

    @derived
    def ball_velocities(self) -> Array:
        """[num_envs, balls, 3] rad/s, in the frame of the joint's body."""
        return self._qvel[:, self.ball_dof_ids]

    @derived
    def position(self) -> Array:
        """[num_envs, 3] m: position of the base in the world."""
        return self._xpos.copy()

    @derived
    def height(self) -> Array:
        """[num_envs] m: height of the base above the ground."""
        return self._xpos[:, 2] - self._ground.height_at(self._xpos[:, :2])

    @derived
    def rotation(self) -> Array:
        """[num_envs, 3, 3]: the base's axes in the world, as columns."""
        return self._xmat.copy()

    @derived
    def world_velocity(self) -> Array:
        """[num_envs, 3] m/s: velocity of the base's origin in the world frame."""
        if self.floats:
            return self._qvel[:, self.root_dof : self.root_dof + 3].copy()
        return self._cvel[:, 3:] + np.cross(self._cvel[:, :3], self._xpos - self._subtree)

    @derived
    def velocity(self) -> Array:
        """[num_envs, 3] m/s: velocity of the base's origin in the base frame."""
        found: Array = np.einsum("nji,nj->ni", self._xmat, self.world_velocity)
        return found

    @derived
    def heading_velocity(self) -> Array:
        """[num_envs, 3] m/s: velocity of the base's origin in the frame of its heading, which is
        level."""
        x, y = self.heading[:, 0], self.heading[:, 1]
        v = self.world_velocity
        return np.stack([x * v[:, 0] + y * v[:, 1], x * v[:, 1] - y * v[:, 0], v[:, 2]], axis=1)

    @derived
    def heading(self) -> Array:
        """[num_envs, 2]: unit vector of the base's x axis on the ground."""
        forward = self._xmat[:, :2, 0]
        found: Array = forward / np.maximum(np.linalg.norm(forward, axis=1, keepdims=True), 1e-9)
        return found

    @derived
    def angular_velocity(self) -> Array:
        """[num_envs, 3] rad/s: angular velocity in the base frame, as a gyroscope measures it."""
        if self.floats:
            return self._qvel[:, self.root_dof + 3 : self.root_dof + 6].copy()
        found: Array = np.einsum("nji,nj->ni", self._xmat, self._cvel[:, :3])
        return found

    @derived
    def yaw_rate(self) -> Array:
        """[num_envs] rad/s: angular velocity about the world's vertical."""
        found: Array = np.einsum("ni,ni->n", self._xmat[:, 2], self.angular_velocity)
        return found

    @derived
    def gravity(self) -> Array:
        """[num_envs, 3]: direction of gravity in the base frame; (0, 0, -1) is upright."""
        return -self._xmat[:, 2]


class Feet(Part):
    """Contact, air time, height and velocity of the feet.

    `geoms`: regular expression of the feet's geom names. `ground`: heights are measured from it.
    """

    def __init__(self, geoms: str, ground: Ground = LEVEL) -> None:
        self._pattern, self._ground = geoms, ground

    def edit(self, spec: mujoco.MjSpec) -> None:
        geoms = [geom.name for geom in spec.geoms]
        for i in matching(geoms, self._pattern, "geom"):
            sensor = spec.add_sensor(name=f"contact/{geoms[i]}")
            sensor.type = mujoco.mjtSensor.mjSENS_CONTACT
            sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_GEOM, geoms[i]
            sensor.intprm[:3] = (1, 0, 1)  # field "found", unreduced, at most one contact

    def bind(self) -> None:
        simulation = self.env.simulation
        model = simulation.model
        geoms = names_of(model, "geom")
        self.geom_ids = np.array(matching(geoms, self._pattern, "geom"))
        self.names = tuple(geoms[i] for i in self.geom_ids)
        sensors = [int(model.sensor(f"contact/{name}").adr[0]) for name in self.names]
        self._found = simulation.bind("sensordata")
        self._sensors = np.array(sensors)
        self._xpos = simulation.bind("geom_xpos")
        self._radius = model.geom_rbound[self.geom_ids]
        count = len(self.names)
        self.air_time = self.env.state("feet/air_time", count)
        """[num_envs, feet] s: time since each foot was last on the ground."""
        self._last = self.env.state("feet/position", count, 3)
        self.contact: Array = np.zeros((self.env.num_envs, count), np.bool_)
        """[num_envs, feet]: whether the foot is in contact."""
        self.landed: Array = np.zeros_like(self.contact)
        """[num_envs, feet]: whether the foot landed in this step; `air_time` still has its
        flight."""
        self.velocity: Array = np.zeros_like(self._last)
        """[num_envs, feet, 3] m/s: mean velocity over the last control step."""

    def mirror(self) -> Reflection:
        """The reflection of one number per foot; raises if the feet are not symmetric."""
        model = self.env.simulation.model
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        return mirror.swapped(data.geom_xpos[self.geom_ids], self.names)

    @derived
    def position(self) -> Array:
        """[num_envs, feet, 3] m: positions of the geoms' centres in the world."""
        return self._xpos[:, self.geom_ids]

    @derived
    def height(self) -> Array:
        """[num_envs, feet] m: height of each foot's lowest point above the ground."""
        place = self.position
        ground = self._ground.height_at(place[:, :, :2])
        found: Array = place[:, :, 2] - self._radius - ground
        return found

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self.contact[env_ids] = self._found[np.ix_(env_ids, self._sensors)] > 0
        self.landed[env_ids] = False
        self.air_time[env_ids] = 0.0
        self.velocity[env_ids] = 0.0
        self._last[env_ids] = self.position[env_ids]

    def update(self) -> None:
        dt = self.env.dt
        # The flight of a foot that landed in the last step is over.
        self.air_time[self.contact] = 0.0
        self.contact[:] = self._found[:, self._sensors] > 0
        self.air_time += dt
        np.logical_and(self.contact, self.air_time > 1.5 * dt, out=self.landed)
        np.divide(self.position - self._last, dt, out=self.velocity)
        self._last[:] = self.position

    def restored(self) -> None:
        self.contact[:] = self._found[:, self._sensors] > 0


class Controls(Action):
    """Actions in [-1, 1], scaled to each actuator's control range ([-1, 1] without a range)."""

    def bind(self) -> None:
        model = self.env.simulation.model
        self._control = self.env.simulation.bind("ctrl")
        self.size = model.nu
        bounded = model.actuator_ctrllimited.astype(bool)
        low = np.where(bounded, model.actuator_ctrlrange[:, 0], -1.0)
        high = np.where(bounded, model.actuator_ctrlrange[:, 1], 1.0)
        self._middle, self._half = (low + high) / 2, (high - low) / 2

    def describe(self) -> Tree:
        return {
            "action": {
                "kind": "controls",
                "about": "controls of the actuators, in their order: offset + scale x action",
                "offset": self._middle.tolist(),
                "scale": self._half.tolist(),
            }
        }

    def apply(self, actions: Array) -> None:
        self._control[:] = self._middle + actions * self._half


PerJoint: TypeAlias = float | Mapping[str, float]
"""A number for all joints, or {pattern of joint names: number}, of which the first match counts."""


def per_joint(values: PerJoint, joints: Sequence[str]) -> list[float | None]:
    """The value of every joint, [joints]; None where no pattern matches."""
    if not isinstance(values, Mapping):
        return [values] * len(joints)
    for pattern in values:
        matching(joints, pattern, "joint")
    return [
        next((value for pattern, value in values.items() if re.fullmatch(pattern, name)), None)
        for name in joints
    ]


class JointTargets(Action):
    """Actions are joint position targets: home pose + scale x action, clipped to the joint ranges.

    Of a ball joint of the robot an action is a rotation vector, after those of the other joints.
    `scale`: rad or m. `reference`: function that returns [num_envs, n] rad to add, such as a gait;
    for ball joints, rotation vectors from the home pose, to which actions are added.
    `stiffness`: replace the robot's actuators by position servos with `stiffness` (N m/rad),
    `damping` (N m s/rad) and a limit of `torque` (N m) on both together. `joint_damping` (N m
    s/rad): damping of the joints in place of the model's; it acts beside the servo and is not
    limited. `armature` (kg m^2): rotor inertia of the joints in place of the model's. Each is a
    number or {pattern of joint names: number}.
    """

    def __init__(
        self,
        robot: Robot,
        scale: PerJoint = 0.5,
        stiffness: PerJoint | None = None,
        damping: PerJoint = 0.0,
        torque: PerJoint | None = None,
        delay: tuple[int, int] = (0, 0),
        reference: Callable[[], Array] | None = None,
        joint_damping: PerJoint | None = None,
        armature: PerJoint | None = None,
    ) -> None:
        super().__init__(delay)
        self._robot, self._scale_of, self._reference = robot, scale, reference
        self._stiffness, self._damping, self._torque = stiffness, damping, torque
        self._joint_damping, self._armature = joint_damping, armature

    def edit(self, spec: mujoco.MjSpec) -> None:
        if self._stiffness is None and self._joint_damping is None and self._armature is None:
            return
        kinds = (_HINGE, _SLIDE, _BALL) if self._robot._balls else (_HINGE, _SLIDE)
        joints = [j for j in spec.joints if int(j.type) in kinds]
        joints = [
            joints[i] for i in matching([j.name for j in joints], self._robot._joints, "joint")
        ]
        names = [joint.name for joint in joints]
        for field, wanted in (("damping", self._joint_damping), ("armature", self._armature)):
            values = [None] * len(names) if wanted is None else per_joint(wanted, names)
            for joint, value in zip(joints, values, strict=True):
                if value is not None:
                    setattr(joint, field, (value, 0.0, 0.0) if field == "damping" else value)
        if self._stiffness is not None:
            balls = {joint.name for joint in joints if int(joint.type) == _BALL}
            self._add_servos(spec, names, self._stiffness, balls)

    def _add_servos(
        self, spec: mujoco.MjSpec, joints: list[str], stiffness: PerJoint, balls: set[str]
    ) -> None:
        """Replace all actuators by a position servo for every joint."""
        for actuator in list(spec.actuators):
            spec.delete(actuator)
        gains = per_joint(stiffness, joints)
        damping = per_joint(self._damping, joints)
        limits: list[float | None] = [None] * len(joints)
        if self._torque is not None:
            limits = per_joint(self._torque, joints)
        for name, kp, kv, limit in zip(joints, gains, damping, limits, strict=True):
            if not name:
                raise UsageError("A joint without a name cannot get a servo: name it in the model.")
            if kp is None:
                raise UsageError(f"JointTargets has no stiffness for the joint {name}: add it.")
            servo = spec.add_actuator(name=name, target=name)
            servo.trntype = mujoco.mjtTrn.mjTRN_JOINT
            if name in balls:
                servo.set_to_orientation(kp=kp, kv=kv or 0.0, ctrlspec=_QUATERNION)
            else:
                servo.set_to_position(kp=kp, kv=kv or 0.0)
            if limit is not None:  # of a ball joint: of the norm of the torque
                servo.forcelimited = True
                servo.forcerange = (0.0 if name in balls else -limit, limit)

    def bind(self) -> None:
        model, robot = self.env.simulation.model, self._robot
        control_of = {
            int(model.actuator_trnid[a, 0]): int(model.actuator_ctrladr[a])
            for a in range(len(model.actuator_trntype))
            if model.actuator_trntype[a] in _ON_JOINTS
        }
        names = (*robot.joint_names, *robot.ball_names)
        ids = [*robot.joint_ids.tolist(), *robot.ball_ids.tolist()]
        missing = [name for name, j in zip(names, ids, strict=True) if j not in control_of]
        if missing:
            raise UsageError(
                f"JointTargets needs an actuator for every joint, and {', '.join(missing)} has "
                "none: give JointTargets a stiffness, or the robot fewer joints."
            )
        self._num_single, num_balls = len(robot.joint_names), len(robot.ball_names)
        self.size = self._num_single + 3 * num_balls
        numbers = np.repeat([1, 3], [self._num_single, num_balls])
        scales = per_joint(self._scale_of, names)
        self._scale: float | Array = (
            np.repeat([scale or 0.0 for scale in scales], numbers)
            if isinstance(self._scale_of, Mapping)
            else self._scale_of
        )
        self.actuators = np.array([control_of[int(j)] for j in robot.joint_ids], np.int64)
        first = np.array([control_of[int(j)] for j in robot.ball_ids], np.int64)
        self._ball_controls: Array = first[:, None] + np.arange(4)
        self._ball_home: Array = robot.home[robot.ball_qpos_ids]
        self._control = self.env.simulation.bind("ctrl")
        self.target: Array = np.zeros((self.env.num_envs, self.size))

    def reset(self, env_ids: Array, draws: Draws) -> None:
        self._control[np.ix_(env_ids, self.actuators)] = self._robot.default_joints
        if self._ball_home.size:
            self._control[env_ids[:, None, None], self._ball_controls] = self._ball_home

    def describe(self) -> Tree:
        source = getattr(self._reference, "__self__", self._reference)
        return {
            "action": {
                "kind": "joint_targets",
                "about": "position targets of the joints: default pose + reference + scale x "
                "action, kept in the joints' ranges",
                "joints": [*self._robot.joint_names, *self._robot.ball_names],
                "scale": np.asarray(self._scale).tolist(),
                "reference": None if source is None else type(source).__name__.lower(),
            }
        }

    def mirror(self) -> Reflection:
        return self._robot.mirror()

    def apply(self, actions: Array) -> None:
        robot = self._robot
        np.multiply(actions, self._scale, out=self.target)
        reference = None if self._reference is None else self._reference()
        if self._ball_home.size:
            self._turn_balls(self.target, reference)
        if reference is not None:
            self.target += reference
        single = self.target[:, : self._num_single]
        # The error of an encoder shifts the target of its servo.
        single += robot.default_joints - robot.joint_offset
        low, high = robot.joint_range.T
        self._control[:, self.actuators] = np.clip(single, low, high)

    def _turn_balls(self, turns: Array, reference: Array | None) -> None:
        """Write the targets of ball joints: home pose, then reference, then turns [num_envs, n]."""
        # Only robots with ball joints load rotations.
        from etude.data.motion import rotations as rot

        shape = (len(turns), -1, 3)
        target = self._ball_home
        if reference is not None:
            target = rot.multiply(target, rot.exp(reference[:, self._num_single :].reshape(shape)))
        target = rot.multiply(target, rot.exp(turns[:, self._num_single :].reshape(shape)))
        self._control[:, self._ball_controls] = target
