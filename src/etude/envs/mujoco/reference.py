"""Reference motions of any robot with a floating base: its bodies along a motion, and the command
`ReferenceMotion`, from which terms compute errors (`terms/tracking.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import mujoco
import numpy as np
from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.motion import library
from etude.data.motion import rotations as rot
from etude.data.motion.files import installed
from etude.data.motion.library import Frames, MotionLibrary
from etude.data.motion.motions import Motion, cycle_frames
from etude.envs.mujoco.playing import MotionPlayer
from etude.envs.mujoco.robot import Robot, matching, names_of
from etude.envs.mujoco.simulation import load_spec
from etude.envs.mujoco.task import Draws, Part, derived

_GEOM = mujoco.mjtGeom
_SIZES = {int(mujoco.mjtJoint.mjJNT_BALL): 4}
_FREE = int(mujoco.mjtJoint.mjJNT_FREE)


def load_robot(name: str, folder: str | None = None, option: str = "--env.folder") -> mujoco.MjSpec:
    """A robot on a floor, if its model has none.

    name: an MJCF file, PACKAGE/PATH of one (`etude.data.motion.files.installed`), or a name in
    MuJoCo Menagerie.
    """
    spec = load_spec(installed(name, folder, option) if Path(name).suffix else name)
    if not any(geom.type in (_GEOM.mjGEOM_PLANE, _GEOM.mjGEOM_HFIELD) for geom in spec.geoms):
        floor = spec.worldbody.add_geom(name="floor", type=_GEOM.mjGEOM_PLANE)
        floor.size, floor.rgba = (0.0, 0.0, 0.05), (0.55, 0.6, 0.65, 1.0)
    return spec


class ModelKinematics:
    """The bodies of a model along a motion, by MuJoCo's kinematics."""

    def __init__(self, model: mujoco.MjModel, bodies: Sequence[int] | None = None) -> None:
        """bodies: ids of the bodies that `forward` returns; default all but the world."""
        if model.njnt == 0 or model.jnt_type[0] != _FREE or (model.jnt_type[1:] == _FREE).any():
            raise UsageError(
                "A motion moves a model whose first joint is its only free joint; this one has "
                f"{int((model.jnt_type == _FREE).sum())} free joints."
            )
        self._model, self._data = model, mujoco.MjData(model)
        self._bodies = np.arange(1, model.nbody) if bodies is None else np.asarray(bodies)
        self.body_names = tuple(model.body(int(i)).name for i in self._bodies)
        self.home: Array = model.qpos0
        names = names_of(model, "joint")[1:]
        kinds = model.jnt_type[1:].tolist()
        self.joints: Mapping[str, int] = {
            name: _SIZES.get(kind, 1) for name, kind in zip(names, kinds, strict=True)
        }
        collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        moves = model.body_rootid[model.geom_bodyid] == model.body_rootid[model.jnt_bodyid[0]]
        self._geoms = np.flatnonzero(collides & moves & (model.geom_bodyid > 0))

    def fit(self, motion: Motion, home: Array) -> Motion:
        """The motion with poses as the model's qpos [frames, nq]; other joints as in `home` [nq].

        Raises an error for joints that the model does not have.
        """
        for name, count in motion.joints.items():
            if self.joints.get(name) != count:
                known = ", ".join(self.joints)
                kind = "ball joint" if count == 4 else "joint"
                raise UsageError(
                    f"The motion {motion.name} has a {kind} {name}, and the model has none: its "
                    f"joints are {known}. Name the robot that the motion was made for."
                )
        poses = np.tile(home, (len(motion.poses), 1))
        poses[:, :7] = motion.poses[:, :7]
        fitted = Motion(motion.name, motion.times, poses, motion.loops, self.joints)
        for name, columns in motion.columns.items():
            poses[:, fitted.columns[name]] = motion.poses[:, columns]
        return fitted

    def forward(self, poses: Array) -> tuple[Array, Array]:
        position = np.empty((len(poses), len(self._bodies), 3))
        quaternion = np.empty((len(poses), len(self._bodies), 4))
        for i, pose in enumerate(poses):
            self.pose(pose)
            position[i] = self._data.xpos[self._bodies]
            quaternion[i] = self._data.xquat[self._bodies]
        return position, quaternion

    def pose(self, pose: Array) -> mujoco.MjData:
        """The model's data in a pose [nq], with kinematics computed."""
        self._data.qpos[:] = pose
        mujoco.mj_kinematics(self._model, self._data)
        return self._data

    def lowest(self, poses: Array) -> Array:
        heights = np.empty((len(poses), len(self._geoms)))
        for i, pose in enumerate(poses):
            heights[i] = self.lowest_points(self.pose(pose))
        least: Array = heights.min(axis=1, initial=np.inf)
        return least

    def lowest_points(self, data: mujoco.MjData) -> Array:
        """[geoms] m: lowest height of each geom of the robot that collides."""
        model, found = self._model, np.empty(len(self._geoms))
        for i, geom in enumerate(self._geoms.tolist()):
            down, size = data.geom_xmat[geom].reshape(3, 3)[2], model.geom_size[geom]
            found[i] = data.geom_xpos[geom, 2] - _depth(model, geom, down, size)
        return found

    @property
    def geom_names(self) -> list[str]:
        """Names of those geoms; of geoms without a name, their body's."""
        model = self._model
        return [
            model.geom(g).name or model.body(int(model.geom_bodyid[g])).name
            for g in self._geoms.tolist()
        ]


def _depth(model: mujoco.MjModel, geom: int, down: Array, size: Array) -> float:
    """m: how far a geom reaches below its centre; down: [3] the vertical in its frame."""
    kind = int(model.geom_type[geom])
    slope = np.abs(down)
    if kind == _GEOM.mjGEOM_SPHERE:
        return float(size[0])
    if kind == _GEOM.mjGEOM_CAPSULE:
        return float(size[0] + size[1] * slope[2])
    if kind == _GEOM.mjGEOM_BOX:
        return float(size @ slope)
    if kind == _GEOM.mjGEOM_ELLIPSOID:
        return float(np.linalg.norm(size * down))
    if kind == _GEOM.mjGEOM_CYLINDER:
        return float(size[1] * slope[2] + size[0] * np.hypot(down[0], down[1]))
    if kind == _GEOM.mjGEOM_MESH:
        mesh = int(model.geom_dataid[geom])
        first, count = int(model.mesh_vertadr[mesh]), int(model.mesh_vertnum[mesh])
        return float(-(model.mesh_vert[first : first + count] @ down).min())
    return float(model.geom_rbound[geom])


class SelfContacts(Part):
    """The contacts of a robot's bodies with each other.

    `most`: largest number that is counted, the deepest first.
    """

    def __init__(self, robot: Robot, most: int = 8) -> None:
        self._robot, self._most = robot, most

    def edit(self, spec: mujoco.MjSpec) -> None:
        base = self._robot._base or next(j.parent.name for j in spec.joints if int(j.type) == _FREE)
        sensor = spec.add_sensor(name="self_contacts", type=mujoco.mjtSensor.mjSENS_CONTACT)
        sensor.objtype = sensor.reftype = mujoco.mjtObj.mjOBJ_XBODY  # with all bodies below it
        sensor.objname = sensor.refname = base
        found, distance, deepest = 1, 8, 1  # fields, and the order of contacts
        sensor.intprm[:3] = (found | distance, deepest, self._most)

    def bind(self) -> None:
        model = self.env.simulation.model
        sensor = model.sensor("self_contacts")
        self._data = self.env.simulation.bind("sensordata")
        self._at = slice(int(sensor.adr[0]), int(sensor.adr[0] + sensor.dim[0]))

    @derived
    def count(self) -> Array:
        """[num_envs]: number of contacts in the last substep."""
        found: Array = (self._data[:, self._at][:, ::2] > 0).sum(axis=1)
        return found

    @derived
    def depth(self) -> Array:
        """[num_envs] m: depth of the deepest contact, 0 without one."""
        found: Array = np.maximum(-self._data[:, self._at][:, 1::2].min(axis=1), 0.0)
        return found


class StartNoise(Config):
    """Largest differences of an episode's start from the reference, uniform in both directions."""

    position: float = Field(0.0, ge=0, description="Position of the root along x and y, m.")
    height: float = Field(0.0, ge=0, description="Height of the root, m.")
    tilt: float = Field(0.0, ge=0, description="Rotation about the world's x and y axes, rad.")
    yaw: float = Field(0.0, ge=0, description="Rotation about the vertical, rad.")
    joints: float = Field(0.0, ge=0, description="Joint positions, rad or m.")
    velocity: float = Field(0.0, ge=0, description="Velocity of the root along x and y, m/s.")
    vertical: float = Field(0.0, ge=0, description="Vertical velocity of the root, m/s.")
    spin: float = Field(0.0, ge=0, description="Angular velocity of the root, rad/s.")


class ReferenceMotion(MotionPlayer):
    """A motion to track: episodes start on it, and terms compare the robot with it.

    `motions`: see `etude.data.motion.files.load`; resampled to the control rate, loops closed,
    lifted out of the floor, bodies recomputed by the model's kinematics. `anchor`: name of the body
    whose horizontal position and heading errors are left out of the errors of the other bodies;
    default the base. `bodies`: regular expression of the bodies to compare. `ends`: of those whose
    height is checked. `longest`, `start`, `order`: see `MotionPlayer`. `lead`: time by which the
    targets of servos lead the motion, s; damping / stiffness of a servo offsets its lag. The part
    comes after the robot. Arrays of bodies are in the model's order, float64.
    """

    def __init__(
        self,
        robot: Robot,
        motions: Sequence[Motion],
        anchor: str | None = None,
        bodies: str = ".*",
        ends: str = "",
        longest: int = 500,
        start: Literal["random", "first"] = "random",
        order: Literal["drawn", "in turn"] = "drawn",
        noise: StartNoise | None = None,
        lead: float = 0.0,
    ) -> None:
        super().__init__(longest, start, order)
        self.robot, self._motions = robot, tuple(motions)
        self._anchor, self._bodies, self._ends = anchor, bodies, ends
        self._noise = StartNoise() if noise is None else noise
        self._lead = lead

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the motions, for `Task.motions`."""
        return tuple(motion.name for motion in self._motions)

    def limit(self, rate: float) -> int:
        """Length of the longest episode in control steps, at a control rate per second."""
        whole = [m.loops or cycle_frames(m, rate) - 1 for m in self._motions]
        lengths = [self._longest if n is True else int(n) for n in whole]
        cut = self._longest if self._order == "drawn" else max(lengths)
        return max(min(n, cut) for n in lengths)

    def bind(self) -> None:
        simulation, robot = self.env.simulation, self.robot
        model = simulation.model
        if not robot.floats:
            raise UsageError("ReferenceMotion is for robots whose base has a free joint.")
        names = names_of(model, "body")
        root = int(model.body_rootid[robot.body])
        own = [i for i in range(1, model.nbody) if model.body_rootid[i] == root]
        ids = [own[i] for i in matching([names[i] for i in own], self._bodies, "body")]
        anchor = robot.body
        if self._anchor is not None:
            anchor = own[matching([names[i] for i in own], re.escape(self._anchor), "body")[0]]
        if anchor not in ids:
            ids = sorted([anchor, *ids])
        self.body_names = tuple(names[i] for i in ids)
        self.anchor = ids.index(anchor)
        """Index of the anchor among the bodies."""
        self.ends = np.array(
            matching(self.body_names, self._ends, "tracked body") if self._ends else [], np.int64
        )
        """Indices of the bodies whose height is checked."""
        self._kinematics = ModelKinematics(model, ids)
        self.library = self.library_at(1, self._longest + 100)
        self.follow({})
        self._ids = np.array(ids)
        self.pose: Array = simulation.bind("qpos")
        """[num_envs, nq]: positions of the simulation."""
        self.speed: Array = simulation.bind("qvel")
        """[num_envs, nv]: velocities of the simulation."""
        self._xpos, self._xquat = simulation.bind("xpos"), simulation.bind("xquat")
        self._cvel, self._center = simulation.bind("cvel"), simulation.bind("subtree_com")
        self._root = root
        self._phases = self._find_phases()
        self._targets = self._find_targets()
        self.bind_motions()

    def library_at(self, finer: int, continue_for: int) -> MotionLibrary:
        """The motions at `finer` times the control rate; loops have `continue_for` more frames."""
        fitted = [self._kinematics.fit(motion, self.robot.home) for motion in self._motions]
        return library.build(fitted, finer / self.env.dt, continue_for, self._kinematics)

    def _find_targets(self) -> Array:
        """[total, nq]: poses that lead the motion."""
        robot, frames = self.robot, self.library.frames
        poses = frames.pose.copy()
        poses[:, robot.qpos_ids] += self._lead * frames.speed[:, robot.dof_ids]
        if robot.ball_ids.size:
            turns = rot.exp(self._lead * frames.speed[:, robot.ball_dof_ids])
            balls = poses[:, robot.ball_qpos_ids]
            poses[:, robot.ball_qpos_ids] = rot.multiply(balls, turns)
        return poses

    def _find_phases(self) -> Array:
        """[total, 2]: sine and cosine of the phase of each frame, a full circle in loops and half a
        circle in others, so that their end differs from their start."""
        known = self.library
        angles = [
            np.arange(count) * ((2 if loops else 1) * np.pi / cycle)
            for count, cycle, loops in zip(known.counts, known.cycles, known.loops, strict=True)
        ]
        angle = np.concatenate(angles)
        return np.stack([np.sin(angle), np.cos(angle)], axis=1)

    def describe(self) -> Tree:
        known, robot = self.library, self.robot
        frames = known.frames
        arrays: dict[str, Array] = {
            "root": frames.pose[:, :7],
            "root_speed": frames.speed[:, :6],
            "joints": frames.pose[:, robot.qpos_ids],
            "joint_speeds": frames.speed[:, robot.dof_ids],
            "targets": self._targets[:, robot.qpos_ids],
            "phase": self._phases,
            "bodies": frames.position,
            "body_quaternions": frames.quaternion,
        }
        if robot.ball_ids.size:
            arrays["balls"] = frames.pose[:, robot.ball_qpos_ids]
        return {
            "motion": {
                "about": "the motions that the policy tracks, at the control rate; their frames "
                "are in motion.safetensors, one motion after the other",
                "names": list(self.names),
                "starts": known.starts.tolist(),
                "counts": known.counts.tolist(),
                "loops": known.loops.tolist(),
                "joints": list(robot.joint_names),
                "balls": list(robot.ball_names),
                "bodies": list(self.body_names),
                "anchor": self.body_names[self.anchor],
            },
            "arrays": {name: array.astype(np.float32) for name, array in arrays.items()},
        }

    def reset(self, env_ids: Array, draws: Draws) -> None:
        self.choose(env_ids, draws.uniform("motion", 2))
        frames = self.library.frames.at(self.first_frame[env_ids])
        pose, speed = frames.pose.copy(), frames.speed.copy()
        noise, robot = self._noise, self.robot
        if noise.joints:
            off = draws.uniform("motion/joints", len(robot.qpos_ids), low=-1.0) * noise.joints
            joints = pose[:, robot.qpos_ids] + off
            pose[:, robot.qpos_ids] = np.clip(joints, *robot.joint_range.T)
            if robot.ball_ids.size:
                size = (len(robot.ball_ids), 3)
                turns = draws.uniform("motion/balls", *size, low=-1.0) * noise.joints
                balls = pose[:, robot.ball_qpos_ids]
                pose[:, robot.ball_qpos_ids] = rot.multiply(balls, rot.exp(turns))
        x, y, z, *turn = draws.uniform("motion/pose", 6, low=-1.0).T
        pose[:, :3] += np.stack([x, y, z], 1) * [noise.position, noise.position, noise.height]
        turned = rot.exp(np.stack(turn, 1) * [noise.tilt, noise.tilt, noise.yaw])
        pose[:, 3:7] = rot.multiply(turned, pose[:, 3:7])
        sizes = np.repeat([noise.velocity, noise.vertical, noise.spin], [2, 1, 3])
        speed[:, :6] += draws.uniform("motion/velocity", 6, low=-1.0) * sizes
        self.pose[env_ids], self.speed[env_ids] = pose, speed

    def ahead(self, steps: int) -> Frames:
        """The reference `steps` control steps from now, [num_envs, ...] each."""
        return self.library.frames.at(self.frames_at(steps))

    @derived
    def position(self) -> Array:
        """[num_envs, bodies, 3] m: positions of the robot's bodies."""
        return self._xpos[:, self._ids]

    @derived
    def quaternion(self) -> Array:
        """[num_envs, bodies, 4]: rotations of the robot's bodies."""
        return self._xquat[:, self._ids]

    @derived
    def spin(self) -> Array:
        """[num_envs, bodies, 3] rad/s: angular velocities of the robot's bodies in the world."""
        return self._cvel[:, self._ids, :3]

    @derived
    def velocity(self) -> Array:
        """[num_envs, bodies, 3] m/s: velocities of the origins of the robot's bodies."""
        # MuJoCo's velocity of a body is that at the robot's centre of mass.
        lever = self.position - self._center[:, self._root, None]
        found: Array = self._cvel[:, self._ids, 3:] + rot.cross(self.spin, lever)
        return found

    @derived
    def wanted(self) -> Frames:
        """The reference of this step."""
        return self.ahead(0)

    @derived
    def aligned(self) -> tuple[Array, Array]:
        """Positions [num_envs, bodies, 3] and quaternions [num_envs, bodies, 4] of the reference,
        moved horizontally and turned about the vertical so that the anchors coincide."""
        wanted, at = self.wanted, self.anchor
        own, anchor = self.position[:, at], wanted.position[:, at]
        inverse = rot.conjugate(wanted.quaternion[:, at])
        turn = rot.about_z(rot.heading(rot.multiply(self.quaternion[:, at], inverse)))[:, None]
        place = np.concatenate([own[:, :2], anchor[:, 2:]], axis=1)[:, None]
        position = place + rot.rotate(turn, wanted.position - anchor[:, None])
        return position, rot.multiply(turn, wanted.quaternion)

    @derived
    def mean_distance(self) -> Array:
        """[num_envs] m: mean distance of the bodies from the reference, in the world."""
        away = self.position - self.wanted.position
        found: Array = np.sqrt(np.einsum("nbi,nbi->nb", away, away)).mean(axis=1)
        return found

    @derived
    def phase(self) -> Array:
        """[num_envs, 2]: sine and cosine of the motion's phase."""
        found: Array = self._phases[self.frames_at(0)]
        return found

    def joint_targets(self) -> Array:
        """[num_envs, joints] rad or m: the reference of the next step from the home pose, of ball
        joints as rotation vectors; for `JointTargets(reference=...)`."""
        robot = self.robot
        pose: Array = self._targets[self.frames_at(1)]
        single = pose[:, robot.qpos_ids] - robot.default_joints
        return self._with_balls(single, pose, robot.home[robot.ball_qpos_ids])

    def joint_errors(self, ahead: int) -> Array:
        """[num_envs, joints] rad or m: the reference `ahead` steps from now less the position, of
        ball joints as rotation vectors."""
        robot = self.robot
        pose: Array = self.library.frames.pose[self.frames_at(ahead)]
        single = pose[:, robot.qpos_ids] - robot.default_joints - robot.joint_positions
        return self._with_balls(single, pose, robot.ball_quaternions)

    def _with_balls(self, single: Array, pose: Array, own: Array) -> Array:
        """Append rotation vectors from quaternions `own` [..., balls, 4] to those in poses."""
        if not own.size:
            return single
        wanted = pose[:, self.robot.ball_qpos_ids]
        turns = rot.log(rot.multiply(rot.conjugate(own), wanted))
        return np.concatenate([single, turns.reshape(len(single), -1)], axis=1)

    @property
    def dof_ids(self) -> Array:
        """[dofs]: of the robot's joints, then its ball joints."""
        return np.concatenate([self.robot.dof_ids, self.robot.ball_dof_ids.ravel()])
