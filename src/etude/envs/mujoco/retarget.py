"""Retarget a motion to another robot: keypoints of both bodies, solved by damped least squares.

Each keypoint is a pair of bodies. The base and the feet follow the source's, scaled by the ratio of
leg lengths, so that feet that stand keep standing; hips and shoulders are where the target's base
and chest have them; knees, elbows and hands are at the target's distance in the source's
direction. Both robots are in the same posture at home, as far as base, chest and feet are
concerned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.motion import motions as motion_poses
from etude.data.motion import rotations as rot
from etude.data.motion.library import grounded
from etude.data.motion.motions import Motion, at_rate, frame_rate
from etude.envs.mujoco.reference import ModelKinematics
from etude.envs.mujoco.robot import names_of

_BALL, _HINGES = int(mujoco.mjtJoint.mjJNT_BALL), (2, 3)
_RIGID = ("hip", "shoulder", "chest")
"""Roles whose place is fixed in the frame of their parent keypoint."""
_NAMES = {
    "chest": ("torso", "chest", "spine"),
    "head": ("head", "neck"),
    "hip": ("hip", "thigh|upper_?leg"),
    "knee": ("knee", "shin|calf|lower_?leg"),
    "foot": ("ankle", "foot"),
    "shoulder": ("shoulder", "upper_?arm"),
    "elbow": ("elbow", "fore_?arm|lower_?arm"),
    "hand": ("wrist", "hand|palm"),
}
"""{role: regular expressions of body names, the first that matches}."""
_SIDES = {"left": r"left|(?:^|[^a-z])l(?:[^a-z]|$)", "right": r"right|(?:^|[^a-z])r(?:[^a-z]|$)"}
_POSITION = {"base": 1.0, "foot": 3.0, "knee": 0.3, "head": 0.2, **dict.fromkeys(_RIGID, 0.0)}
"""{role: weight of its position}, 1 of others."""
_ROTATION = {"base": 0.3, "chest": 0.15, "foot": 0.15}
"""{role: weight of its rotation, m/rad}, 0 of others."""
_SAME = 0.1
"""m/rad: weight of the rotations of bodies that have the same name in both robots."""
_DAMPING, _LARGEST = 1e-3, 0.5
_FIRST, _NEXT = 300, 40
"""Largest numbers of iterations in the first frame and in others."""


@dataclass(frozen=True)
class Keypoint:
    """A body of the target and the source's body that it follows."""

    role: str
    target: str
    source: str


class Body:
    """A robot at home: its bodies by name, and which of them has which role."""

    def __init__(self, model: mujoco.MjModel, home: Array | None = None) -> None:
        """home: qpos [nq] of the standing posture; default that of the model."""
        self.model = model
        self.home: Array = model.qpos0.copy() if home is None else home.copy()
        self.kinematics = ModelKinematics(model)
        self.base = int(model.jnt_bodyid[0])
        names = names_of(model, "body")
        self.ids = {names[i]: i for i in range(1, model.nbody) if model.body_rootid[i] == self.base}
        self.lowest = float(self.kinematics.lowest(self.home[None])[0])
        position, quaternion = self.kinematics.forward(self.home[None])
        self.position, self.quaternion = position[0], quaternion[0]
        """Bodies [bodies - 1, ...] at home."""
        if not np.isfinite(self.lowest):
            self.lowest = float(self.position[:, 2].min())

    @property
    def roles(self) -> dict[str, str]:
        """{role or role of a side: name of its body}; hips and shoulders are the first of their
        bodies along the limb, others the last."""
        found = {"base": next(name for name, i in self.ids.items() if i == self.base)}
        free = [name for name in self.ids if name != found["base"]]
        for role, patterns in _NAMES.items():
            for side, mark in {"": "", **_SIDES}.items():
                central = role in ("chest", "head")
                if central != (side == ""):
                    continue
                for pattern in patterns:
                    named = [
                        name
                        for name in free
                        if re.search(pattern, name.lower()) and re.search(mark, name.lower())
                    ]
                    if named:
                        chosen = named[0 if role in _RIGID else -1]
                        found[f"{side} {role}".strip()] = chosen
                        break
        return found

    def at(self, name: str) -> int:
        """Index of a body in arrays without the world."""
        return self.ids[name] - 1

    def height(self, name: str) -> float:
        """m: height of a body above the lowest point, at home."""
        return float(self.position[self.at(name), 2]) - self.lowest


def keypoints(
    target: Body, source: Body, chosen: Mapping[str, str] | None = None
) -> tuple[Keypoint, ...]:
    """Keypoints in the order of the target's bodies: `chosen` {target's body: source's body}, then
    bodies of the same name, then bodies whose names have the same role."""
    ours, theirs = target.roles, source.roles
    pairs = {ours["base"]: theirs["base"]}
    for one, two in (chosen or {}).items():
        for body, name, robot in ((target, one, "--to"), (source, two, "--source")):
            if name not in body.ids:
                raise UsageError(
                    f"The robot of {robot} has no body {name}: its bodies are "
                    f"{', '.join(body.ids)}."
                )
        pairs[one] = two
    for name in target.ids:
        if name in source.ids and name not in pairs and name not in pairs.values():
            pairs[name] = name
    for role, name in ours.items():
        if role in theirs and name not in pairs and theirs[role] not in pairs.values():
            pairs[name] = theirs[role]
    named = {name: role.split()[-1] for role, name in {**theirs}.items()}
    named = {one: named.get(two, "") for one, two in pairs.items()}
    named |= {name: role.split()[-1] for role, name in ours.items() if name in pairs}
    if len(pairs) < 3:
        raise UsageError(
            "The robots' bodies have no names in common, such as left_foot, hand or torso: name "
            f"pairs, --map TARGET SOURCE. Bodies of the target are {', '.join(target.ids)}; of "
            f"the source {', '.join(source.ids)}."
        )
    order = sorted(pairs, key=target.ids.__getitem__)
    return tuple(Keypoint(named[name], name, pairs[name]) for name in order)


@dataclass(frozen=True)
class Retargeted:
    """A motion of the target, and its distance from the keypoints."""

    motion: Motion
    keypoints: tuple[Keypoint, ...]
    errors: Array
    """[frames, keypoints] m."""
    scale: float
    """Ratio of the leg lengths."""


def retarget(
    motion: Motion,
    source: Body,
    target: Body,
    chosen: Mapping[str, str] | None = None,
    smoothness: float = 0.02,
) -> Retargeted:
    """Move a motion of the source to the target.

    smoothness: weight of the change of a joint between frames, m/rad, beside the weights of
    positions, which are about 1.
    """
    rate = frame_rate(motion)
    even = at_rate(motion_poses.close(motion), rate)
    fitted = source.kinematics.fit(even, source.home)
    poses = grounded(fitted.poses, rate, source.kinematics)
    points = keypoints(target, source, chosen)
    scale, position, quaternion = _wanted(points, source, target, poses)
    solver = _Solver(target, points, smoothness)
    found = np.array([solver.solve(*frame) for frame in zip(position, quaternion, strict=True)])
    # The lowest point is as far above the ground as the source's, scaled.
    ground = np.maximum(source.kinematics.lowest(poses), 0.0) * scale
    lowest = target.kinematics.lowest(found)
    if np.isfinite(lowest).all() and np.isfinite(ground).all():
        found[:, 2] += ground - lowest
    bodies = [target.at(point.target) for point in points]
    away = target.kinematics.forward(found)[0][:, bodies] - position
    moved = Motion(motion.name, even.times, found, motion.loops, target.kinematics.joints)
    return Retargeted(moved, points, np.linalg.norm(away, axis=-1), scale)


def _wanted(
    points: Sequence[Keypoint], source: Body, target: Body, poses: Array
) -> tuple[float, Array, Array]:
    """The ratio of leg lengths; positions [frames, keypoints, 3] and quaternions [frames,
    keypoints, 4] for the target's bodies."""
    theirs = [source.at(point.source) for point in points]
    ours = [target.at(point.target) for point in points]
    at, turned = (array[:, theirs] for array in source.kinematics.forward(poses))
    home_s, home_t = source.position[theirs], target.position[ours]
    own_s, own_t = source.quaternion[theirs], target.quaternion[ours]
    quaternion = rot.multiply(turned, rot.multiply(rot.conjugate(own_s), own_t))
    base = next(i for i, point in enumerate(points) if point.role == "base")
    hips = [i for i, point in enumerate(points) if point.role == "hip"] or [base]
    center_s, center_t = home_s[hips].mean(axis=0), home_t[hips].mean(axis=0)
    scale = float((center_t[2] - target.lowest) / (center_s[2] - source.lowest))

    def inside(offset: Array, quaternion: Array) -> Array:
        found: Array = rot.rotate(rot.conjugate(quaternion), offset)
        return found

    position = np.empty_like(at)
    off_s = inside(center_s - home_s[base], own_s[base])
    off_t = inside(center_t - home_t[base], own_t[base])
    center = at[:, base] + rot.rotate(turned[:, base], np.broadcast_to(off_s, at[:, base].shape))
    turned_t = rot.rotate(quaternion[:, base], np.broadcast_to(off_t, center.shape))
    position[:, base] = scale * center - turned_t
    parents = _parents(points, target, base)
    for i, point in enumerate(points):
        if i == base:
            continue
        if point.role == "foot":
            position[:, i] = scale * at[:, i]
            low_s, low_t = source.height(point.source), target.height(point.target)
            position[:, i, 2] += low_t - scale * low_s
            continue
        parent = parents[i]
        if point.role in _RIGID:
            offset = inside(home_t[i] - home_t[parent], own_t[parent])
            away = rot.rotate(quaternion[:, parent], np.broadcast_to(offset, center.shape))
        else:
            length = np.linalg.norm(home_s[i] - home_s[parent])
            ratio = np.linalg.norm(home_t[i] - home_t[parent]) / length if length > 1e-6 else scale
            away = ratio * (at[:, i] - at[:, parent])
        position[:, i] = position[:, parent] + away
    return scale, position, quaternion


def _parents(points: Sequence[Keypoint], target: Body, base: int) -> list[int]:
    """For each keypoint the nearest one above it in the target's tree of bodies."""
    known = {target.ids[point.target]: i for i, point in enumerate(points)}
    found = []
    for point in points:
        above = int(target.model.body_parentid[target.ids[point.target]])
        while above and above not in known:
            above = int(target.model.body_parentid[above])
        found.append(known.get(above, base))
    return found


class _Solver:
    """Inverse kinematics from frame to frame, within the ranges of the joints."""

    def __init__(self, target: Body, points: Sequence[Keypoint], smoothness: float) -> None:
        self._model, self._data = target.model, mujoco.MjData(target.model)
        self._home, self._smoothness = target.home, smoothness
        self._bodies = [target.ids[point.target] for point in points]
        self._position = [_POSITION.get(point.role, 1.0) for point in points]
        same = [point.target == point.source for point in points]
        self._rotation = [
            max(_ROTATION.get(point.role, 0.0), _SAME if equal else 0.0)
            for point, equal in zip(points, same, strict=True)
        ]
        self._base = next(i for i, point in enumerate(points) if point.role == "base")
        self._last: Array | None = None
        model = self._model
        hinges = np.isin(model.jnt_type, _HINGES) & (model.jnt_limited != 0)
        self._joints = np.flatnonzero(hinges)
        self._balls = np.flatnonzero((model.jnt_type == _BALL) & (model.jnt_limited != 0))

    def solve(self, position: Array, quaternion: Array) -> Array:
        """The pose [nq] near the last one, for positions [n, 3] and quaternions [n, 4]."""
        first = self._last is None
        pose = self._home.copy() if self._last is None else self._last.copy()
        if first:
            pose[:3], pose[3:7] = position[self._base], quaternion[self._base]
        self._limit(pose)
        last = pose.copy()
        for _ in range(_FIRST if first else _NEXT):
            change = self._step(pose, None if first else last, position, quaternion)
            change *= min(1.0, _LARGEST / max(np.abs(change).max(), 1e-12))
            mujoco.mj_integratePos(self._model, pose, change, 1.0)
            self._limit(pose)
            if np.abs(change).max() < 1e-7:
                break
        self._last = pose
        return pose.copy()

    def _step(self, pose: Array, last: Array | None, position: Array, quaternion: Array) -> Array:
        """The change [nv] of a damped least-squares step; joints at a limit stay there."""
        model, data = self._model, self._data
        data.qpos[:] = pose
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        rows, errors = [], []
        move, turn = np.empty((3, model.nv)), np.empty((3, model.nv))
        for i, body in enumerate(self._bodies):
            mujoco.mj_jacBody(model, data, move, turn, body)
            if weight := self._position[i]:
                rows.append(weight * move)
                errors.append(weight * (position[i] - data.xpos[body]))
            if weight := self._rotation[i]:
                own = data.xquat[body]
                off = rot.log(rot.multiply(rot.conjugate(own), quaternion[i]))
                rows.append(weight * turn)
                errors.append(weight * rot.rotate(own, off))
        jacobian, error = np.concatenate(rows), np.concatenate(errors)
        matrix, gradient = jacobian.T @ jacobian, jacobian.T @ error
        matrix += _DAMPING**2 * np.eye(model.nv)
        if last is not None and self._smoothness:
            away = np.empty(model.nv)
            mujoco.mj_differentiatePos(model, away, 1.0, last, pose)
            matrix[range(6, model.nv), range(6, model.nv)] += self._smoothness**2
            gradient[6:] -= self._smoothness**2 * away[6:]
        free = np.ones(model.nv, np.bool_)
        change = np.zeros(model.nv)
        for _ in range(4):
            change[:] = 0.0
            change[free] = np.linalg.solve(matrix[np.ix_(free, free)], gradient[free])
            blocked = self._blocked(pose, change) & free
            if not blocked.any():
                break
            free &= ~blocked
        return change

    def _blocked(self, pose: Array, change: Array) -> Array:
        """[nv] bool: joints at a limit that the change would pass."""
        model, found = self._model, np.zeros(self._model.nv, np.bool_)
        dofs = model.jnt_dofadr[self._joints]
        low, high = model.jnt_range[self._joints].T
        value = pose[model.jnt_qposadr[self._joints]]
        step = change[dofs]
        found[dofs] = ((value <= low) & (step < 0)) | ((value >= high) & (step > 0))
        return found

    def _limit(self, pose: Array) -> None:
        """Move joints into their ranges."""
        model = self._model
        at = model.jnt_qposadr[self._joints]
        pose[at] = np.clip(pose[at], *model.jnt_range[self._joints].T)
        for joint in self._balls.tolist():
            columns = slice(model.jnt_qposadr[joint], model.jnt_qposadr[joint] + 4)
            vector = rot.log(pose[columns])
            angle, most = float(np.linalg.norm(vector)), float(model.jnt_range[joint, 1])
            if angle > most:
                pose[columns] = rot.exp(vector * (most / angle))
