"""Checks of a motion on a robot: what the body could not do.

They find self-penetration, joints beyond their ranges, fast joints and shapes below the ground.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.data.motion.library import measured
from etude.data.motion.motions import Motion, at_rate, frame_rate
from etude.envs.mujoco.reference import ModelKinematics

_FAR = 1.0
"""m: penetration is at most this deep."""


@dataclass(frozen=True)
class Worst:
    """The largest violation of one kind in a motion."""

    size: float
    """m, rad or rad/s; 0 without one."""
    where: str
    """Names of the joint or shapes; "" without a violation."""
    second: float
    """Time in the motion, s."""

    @classmethod
    def of(cls, sizes: Array, names: Callable[[int], str], times: Array) -> Worst:
        """The largest of sizes [frames, n] above 0."""
        if not sizes.size or sizes.max() <= 0.0:
            return cls(0.0, "", 0.0)
        frame, column = np.unravel_index(int(sizes.argmax()), sizes.shape)
        return cls(float(sizes.max()), names(int(column)), float(times[frame]))


def check_motion(model: mujoco.MjModel, motion: Motion, home: Array) -> dict[str, Worst]:
    """{"penetration" m, "limit" rad or m, "speed" per s, "below" m: the largest violation}.

    The speed is the largest one of any joint, which the model does not limit.
    """
    kinematics = ModelKinematics(model)
    fitted = kinematics.fit(at_rate(motion, frame_rate(motion)), home)
    frames = measured(fitted.poses, frame_rate(fitted), kinematics)
    joints, times = list(kinematics.joints), fitted.times
    speeds = np.abs(frames.speed[:, 6:])
    of_dof = [model.joint(int(j)).name for j in model.dof_jntid[6:]]
    pairs = _pairs(model)
    depths, heights = np.zeros((len(times), len(pairs))), []
    for i, pose in enumerate(fitted.poses):
        data = kinematics.pose(pose)
        heights.append(kinematics.lowest_points(data))
        depths[i] = _depths(model, data, pairs)
    return {
        "penetration": Worst.of(depths, lambda i: _pair_name(model, pairs[i]), times),
        "limit": Worst.of(_beyond(model, fitted), lambda i: joints[i], times),
        "speed": Worst.of(speeds, lambda i: of_dof[i], times),
        "below": Worst.of(-np.array(heights), lambda i: kinematics.geom_names[i], times),
    }


def _beyond(model: mujoco.MjModel, fitted: Motion) -> Array:
    """[frames, joints] rad or m: distance of each joint from its range; of balls, of the angle."""
    found = np.zeros((len(fitted.times), len(fitted.joints)))
    for i, columns in enumerate(fitted.columns.values()):
        if not model.jnt_limited[i + 1]:
            continue
        low, high = model.jnt_range[i + 1]
        value = fitted.poses[:, columns[0]]
        if len(columns) == 4:
            value = 2.0 * np.arccos(np.minimum(np.abs(value), 1.0))
        found[:, i] = np.maximum(np.maximum(low - value, value - high), 0.0)
    return found


def _pairs(model: mujoco.MjModel) -> list[tuple[int, int]]:
    """Pairs of the robot's geoms that can collide: those that the model lets collide, or all if it
    lets none; without those of one body or of a body and its parent."""
    body, excluded = model.geom_bodyid, set(model.exclude_signature.tolist())
    kind, affinity = model.geom_contype, model.geom_conaffinity
    solid = np.flatnonzero(((kind | affinity) != 0) & (body > 0)).tolist()
    apart, enabled = [], []
    for k, a in enumerate(solid):
        for b in solid[k + 1 :]:
            one, two = sorted((int(body[a]), int(body[b])))
            weld_one, weld_two = int(model.body_weldid[one]), int(model.body_weldid[two])
            above = {int(model.body_weldid[model.body_parentid[w]]) for w in (weld_one, weld_two)}
            if weld_one == weld_two or above & {weld_one, weld_two}:
                continue
            if (one << 16) + two in excluded:
                continue
            apart.append((a, b))
            if kind[a] & affinity[b] or kind[b] & affinity[a]:
                enabled.append((a, b))
    return enabled or apart


def _depths(model: mujoco.MjModel, data: mujoco.MjData, pairs: Sequence[tuple[int, int]]) -> Array:
    """[pairs] m: depth of penetration of each pair of geoms, 0 where they are apart."""
    found = np.zeros(len(pairs))
    if not pairs:
        return found
    one, two = np.array(pairs).T
    away = np.linalg.norm(data.geom_xpos[one] - data.geom_xpos[two], axis=1)
    near = away < model.geom_rbound[one] + model.geom_rbound[two]
    for i in np.flatnonzero(near).tolist():
        a, b = pairs[i]
        distance = mujoco.mj_geomDistance(model, data, a, b, _FAR, None)
        found[i] = max(0.0, -distance)
    return found


def _pair_name(model: mujoco.MjModel, pair: tuple[int, int]) -> str:
    """Names of both geoms, or of their bodies."""
    names = [model.geom(g).name or model.body(int(model.geom_bodyid[g])).name for g in pair]
    return " and ".join(names)
