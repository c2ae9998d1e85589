"""Base, home pose, floor, hand and servos of a robot's model, for `etude new-task`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.decor import GROUND, bounds, poses
from etude.envs.mujoco.targets import SHARE

_FREE, _HINGE, _SLIDE = (
    int(mujoco.mjtJoint.mjJNT_FREE),
    int(mujoco.mjtJoint.mjJNT_HINGE),
    int(mujoco.mjtJoint.mjJNT_SLIDE),
)
SAG = 0.35
"""Largest deflection of a servo under its load, rad."""
LOADS, SWING = 2.0, 0.5
"""A derived torque limit holds this multiple of the load, and accelerates for this error, rad."""
_STRIDE = 0.4
"""Legs carry their load in poses of up to this angle around the home pose, rad."""
_LEG_SCALE = 0.5
"""Largest change of a leg's joint target by an action, rad."""
_POSES = 256
"""Number of those poses."""
_FEET = 0.03
"""Geoms this near the lowest point, as a share of the height, are feet."""
_MARGIN = 0.05
"""Margin of the home pose to the joints' ranges, as a share of them."""


@dataclass(frozen=True)
class Servo:
    """A position servo for a joint, in rad and N m, or m and N."""

    home: float
    scale: float
    stiffness: float
    damping: float
    torque: float
    derived: bool
    """Whether the model gives no torque limit for the joint."""


class Survey:
    """A robot's model in its home pose: the tree of bodies with the most joints."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        trees = model.body_rootid[model.jnt_bodyid[np.flatnonzero(model.jnt_type != _FREE)]]
        self.root = int(np.bincount(trees).argmax()) if len(trees) else 0
        free = model.jnt_type[model.jnt_bodyid == self.root] == _FREE
        self.floats = bool(free.any())
        """Whether the robot's base has a free joint."""
        self._within = self._trees()
        """[nbody]: whether a body belongs to the robot."""
        self.planar = self._slides()
        """Whether the base slides without an actuator, as that of a planar walker."""
        self.joints = self._moved()
        """Ids of the joints that servos move: not those of the base, nor ones that follow or
        close a loop."""
        ground = np.flatnonzero(np.isin(model.geom_type, GROUND) & (model.geom_bodyid == 0))
        self.has_floor = bool(ground.size)
        self._data = mujoco.MjData(model)
        self._place(self._in_range())
        self.floor = float(self._data.geom_xpos[ground, 2].max()) if ground.size else 0.0
        """Height of the floor, m."""
        if self.floats and not model.nkey:
            self._place(self._balanced())

    @property
    def name(self) -> str:
        """Name of the base."""
        return str(self.model.body(self.root).name)

    @property
    def walks(self) -> bool:
        """Whether the robot has legs: its base floats or slides."""
        return self.floats or self.planar

    def _trees(self) -> Array:
        """[nbody]: bodies of the robot's tree, and for a fixed base of all trees with actuators,
        such as a second arm."""
        model = self.model
        roots = {self.root}
        on_joint = int(mujoco.mjtTrn.mjTRN_JOINT)
        if not self.floats:
            driven = model.actuator_trnid[model.actuator_trntype == on_joint, 0]
            roots |= {int(root) for root in model.body_rootid[model.jnt_bodyid[driven]]}
        found: Array = np.isin(model.body_rootid, list(roots))
        return found

    def _slides(self) -> bool:
        model = self.model
        root = np.flatnonzero(model.jnt_bodyid == self.root)
        kinds = model.jnt_type[root]
        if self.floats or (kinds == _SLIDE).sum() == 0 or model.nu == 0:
            return False
        return set(model.actuator_trnid[:, 0].tolist()).isdisjoint(root.tolist())

    def _moved(self) -> list[int]:
        model = self.model
        joint = int(mujoco.mjtEq.mjEQ_JOINT)
        follows = {
            int(model.eq_obj1id[e])
            for e in range(model.neq)
            if model.eq_type[e] == joint and model.eq_obj2id[e] >= 0
        }
        loops = self._passive_in_loops()
        return [
            j
            for j in range(model.njnt)
            if self.is_single(j)
            and self._within[model.jnt_bodyid[j]]
            and j not in follows
            and j not in loops
            and not (self.planar and model.jnt_bodyid[j] == self.root)
        ]

    def _passive_in_loops(self) -> set[int]:
        """Joints of closed chains, such as a gripper's linkage, that no actuator drives. A chain
        without any actuator has none: which of its joints are passive is not known."""
        model, driven = self.model, self._driven()
        kinds = [int(mujoco.mjtEq.mjEQ_CONNECT), int(mujoco.mjtEq.mjEQ_WELD)]
        passive: set[int] = set()
        for e in np.flatnonzero(np.isin(model.eq_type, kinds)):
            ends = [int(model.eq_obj1id[e]), int(model.eq_obj2id[e])]
            if model.eq_objtype[e] == int(mujoco.mjtObj.mjOBJ_SITE):
                ends = [int(model.site_bodyid[site]) for site in ends]
            if (model.body_mocapid[ends] >= 0).any() or 0 in ends:
                continue  # the target of a hand, or a base that is held, closes no chain
            one, other = (self._ancestors(end) for end in ends)
            chain = np.flatnonzero(np.isin(model.jnt_bodyid, [*(one ^ other)]))
            if driven.intersection(chain.tolist()):
                passive |= set(chain.tolist()) - driven
        return passive

    def _driven(self) -> set[int]:
        """Joints that actuators move, directly or by a tendon."""
        model, tendon = self.model, int(mujoco.mjtTrn.mjTRN_TENDON)
        on_joint = int(mujoco.mjtTrn.mjTRN_JOINT)
        found = set(model.actuator_trnid[model.actuator_trntype == on_joint, 0].tolist())
        for t in model.actuator_trnid[model.actuator_trntype == tendon, 0]:
            first = int(model.tendon_adr[t])
            wraps = np.arange(first, first + int(model.tendon_num[t]))
            joints = wraps[model.wrap_type[wraps] == int(mujoco.mjtWrap.mjWRAP_JOINT)]
            found |= set(model.wrap_objid[joints].tolist())
        return found

    def _ancestors(self, body: int) -> set[int]:
        """A body and those above it, without the world."""
        found: set[int] = set()
        while body:
            found.add(body)
            body = int(self.model.body_parentid[body])
        return found

    def is_single(self, joint: int) -> bool:
        """Whether a joint has one degree of freedom."""
        return int(self.model.jnt_type[joint]) in (_HINGE, _SLIDE)

    def _place(self, qpos: Array) -> None:
        self._data.qpos[:] = qpos
        mujoco.mj_forward(self.model, self._data)

    def _in_range(self) -> Array:
        """[nq]: joints of the first keyframe, or of the initial pose, within their ranges."""
        model = self.model
        pose = np.array(model.qpos0)
        if model.nkey:
            places = model.jnt_qposadr[[j for j in range(model.njnt) if self.is_single(j)]]
            pose[places] = model.key_qpos[0][places]
        pose[model.jnt_qposadr] = self._clipped(pose[model.jnt_qposadr])
        return pose

    def _clipped(self, values: Array) -> Array:
        """Values [njnt] with those of limited joints within their ranges."""
        model = self.model
        single = np.isin(model.jnt_type, (_HINGE, _SLIDE)) & (model.jnt_limited > 0)
        low, high = model.jnt_range.T
        margin = np.where((values < low) | (values > high), _MARGIN * (high - low), 0.0)
        return np.where(single, np.clip(values, low + margin, high - margin), values)

    def _balanced(self) -> Array:
        """[nq]: the pose with the centre of mass above the middle of the feet."""
        model, data = self.model, self._data
        dofs = model.jnt_dofadr[self.joints]
        places = model.jnt_qposadr[self.joints]
        for _ in range(30):
            feet = self.feet
            off = (data.subtree_com[self.root] - data.geom_xpos[feet].mean(axis=0))[:2]
            if not len(dofs) or np.linalg.norm(off) < 0.005:
                break
            jacobian = np.zeros((3, model.nv))
            mujoco.mj_jacSubtreeCom(model, data, jacobian, self.root)
            away = -jacobian
            for foot in feet:
                mujoco.mj_jacGeom(model, data, jacobian, None, foot)
                away += jacobian / len(feet)
            slope = away[:2, dofs]
            step = slope.T @ np.linalg.solve(slope @ slope.T + 0.01 * np.eye(2), off)
            data.qpos[places] += np.clip(step, -0.1, 0.1)
            data.qpos[model.jnt_qposadr] = self._clipped(data.qpos[model.jnt_qposadr])
            mujoco.mj_forward(model, data)
        return np.array(data.qpos)

    @property
    def home(self) -> Array:
        """[nq]"""
        return np.array(self._data.qpos)

    @property
    def home_changes(self) -> bool:
        """Whether the home pose of the joints is not the model's initial one."""
        places = self.model.jnt_qposadr[self.joints]
        return bool(np.abs(self.home - self.model.qpos0)[places].max(initial=0.0) > 1e-6)

    def _heights(self, geoms: Array) -> Array:
        """Heights of the lowest points of geoms [n], m."""
        return bounds(self.model, self._data, geoms)[0][:, 2]

    def view(self) -> tuple[Array, float]:
        """(middle [3], radius) m of the robot in the poses from which targets are drawn."""
        model = self.model
        shown = self._within[model.geom_bodyid] & ~np.isin(model.geom_type, GROUND)
        corners = [bounds(model, data, shown) for data in poses(model, 64, self.home, SHARE)]
        low = np.min([low.min(axis=0) for low, _ in corners], axis=0)
        high = np.max([high.max(axis=0) for _, high in corners], axis=0)
        return (low + high) / 2, float(np.linalg.norm(high - low)) / 2

    @cached_property
    def _solid(self) -> Array:
        """Ids [n] of the robot's geoms that collide, or of all if none does."""
        model = self.model
        solid = self._within[model.geom_bodyid] & ~np.isin(model.geom_type, GROUND)
        collides = solid & ((model.geom_contype > 0) | (model.geom_conaffinity > 0))
        return np.flatnonzero(collides if collides.any() else solid)

    @property
    def lowest(self) -> float:
        """Height of the lowest point of a floating robot or of a fixed robot's scene, m."""
        everything = np.flatnonzero(~np.isin(self.model.geom_type, GROUND))
        geoms = self._solid if self.floats else everything
        return float(self._heights(geoms).min(initial=np.inf))

    @property
    def feet(self) -> Array:
        """Ids [n] of the geoms that stand on the floor."""
        heights = self._heights(self._solid)
        found: Array = self._solid[heights < heights.min() + _FEET * self.size]
        return found

    @cached_property
    def size(self) -> float:
        """Largest extent of the robot in its home pose, m."""
        model = self.model
        shown = self._within[model.geom_bodyid] & ~np.isin(model.geom_type, GROUND)
        low, high = bounds(model, self._data, shown)
        return float((high.max(axis=0) - low.min(axis=0)).max()) if shown.any() else 1.0

    @property
    def base_height(self) -> float:
        """Height of the base in the home pose, m."""
        return float(self._data.xpos[self.root, 2])

    @property
    def mass_height(self) -> float:
        """Height of the centre of mass above the lowest point, m."""
        return float(self._data.subtree_com[self.root, 2]) - self.lowest

    @cached_property
    def hand(self) -> str:
        """Name of the site, or else of the body, that the most joints move; of several the one
        that is furthest from the base."""
        model = self.model
        joints = np.zeros(model.nbody, np.int64)
        for body in range(1, model.nbody):
            own = np.isin(np.flatnonzero(model.jnt_bodyid == body), self.joints).sum()
            joints[body] = joints[model.body_parentid[body]] + own
        sites = [i for i in range(model.nsite) if model.site(i).name]
        bearers = [int(model.site_bodyid[i]) for i in sites]
        found = [
            (joints[bearer], len(self._ancestors(bearer)), model.site(i).name)
            for i, bearer in zip(sites, bearers, strict=True)
        ]
        named = [b for b in range(1, model.nbody) if self._within[b] and model.body(b).name]
        bodies = [(joints[b], 0, model.body(b).name) for b in named]
        longest = max((count for count, *_ in bodies), default=0)
        # A site in the palm is better than a finger's body.
        good = [each for each in found if each[0] >= max(longest - 1, 1)] or bodies
        return max(good, key=lambda each: each[:2], default=(0, 0, ""))[2]

    def servos(self, frequency: float, damping_ratio: float) -> dict[str, Servo]:
        """{joint: servo} with gains from inertia, kp = I w^2 and kd = 2 z I w.

        I is the joint's inertia in the home pose with its armature, w = 2 pi frequency (Hz) and z
        the damping ratio. A joint whose load would deflect that servo by more than `SAG` gets more
        stiffness. A torque limit that the model does not give is derived from load and inertia.
        """
        model = self.model
        mass = np.zeros((model.nv, model.nv))
        mujoco.mj_fullM(model, self._data, mass)
        pull = mass.diagonal() * (2.0 * np.pi * frequency) ** 2
        loads, found = self._loads(), {}
        for j in self.joints:
            dof, turns = model.jnt_dofadr[j], model.jnt_type[j] == _HINGE
            stiffness = max(pull[dof], loads[dof] / SAG) if turns else pull[dof]
            damping = 2.0 * damping_ratio * np.sqrt(stiffness * mass[dof, dof])
            given = self._given_torque(j)
            home = self._data.qpos[model.jnt_qposadr[j]]
            found[model.joint(j).name] = Servo(
                home=float(home),
                scale=self._scale(j, home),
                stiffness=float(stiffness),
                damping=float(max(damping, np.ravel(model.dof_damping[dof])[0])),
                torque=given or float(LOADS * loads[dof] + SWING * pull[dof]),
                derived=given is None,
            )
        return found

    def _scale(self, joint: int, home: float) -> float:
        """Largest change of a joint's target by an action, rad or m: for a fixed base as far as
        `ReachTarget` draws its poses, for legs at most `_LEG_SCALE`."""
        low, high = self.model.jnt_range[joint]
        limited = bool(self.model.jnt_limited[joint])
        furthest = float(max(high - home, home - low)) if limited else np.pi
        return min(_LEG_SCALE, furthest) if self.walks else SHARE * furthest

    def _given_torque(self, joint: int) -> float | None:
        """The torque limit that the model gives for a joint or for its actuator, N m or N."""
        model = self.model
        if model.jnt_actfrclimited[joint]:
            return float(np.abs(model.jnt_actfrcrange[joint]).max())
        on_joint = int(mujoco.mjtTrn.mjTRN_JOINT)
        for a in range(len(model.actuator_trntype)):
            if model.actuator_trntype[a] != on_joint or model.actuator_trnid[a, 0] != joint:
                continue
            gear = abs(float(np.ravel(model.actuator_gear[a])[0]))
            if model.actuator_forcelimited[a]:
                return float(np.abs(model.actuator_forcerange[a]).max()) * gear
            if self.is_motor(a) and model.actuator_ctrllimited[a]:
                gain = abs(float(model.actuator_gainprm[a, 0]))
                return float(np.abs(model.actuator_ctrlrange[a]).max()) * gear * gain
        return None

    def is_motor(self, actuator: int) -> bool:
        """Whether the control of an actuator is a torque."""
        model = self.model
        fixed = model.actuator_gaintype[actuator] == int(mujoco.mjtGain.mjGAIN_FIXED)
        plain = model.actuator_biastype[actuator] == int(mujoco.mjtBias.mjBIAS_NONE)
        return bool(fixed and plain)

    def _loads(self) -> Array:
        """[nv] N m: the largest torques that gravity asks for; a leg carries half of its pair's
        share of the robot's weight."""
        model = self.model
        gravity = model.opt.gravity.copy()
        try:
            model.opt.gravity[:] = (0.0, 0.0, -9.81)
            found = np.zeros(model.nv)
            for data in self._nearby():
                np.maximum(found, np.abs(data.qfrc_bias), out=found)
                if self.walks:
                    np.maximum(found, self._carried(data), out=found)
            return found
        finally:
            model.opt.gravity[:] = gravity

    def _nearby(self) -> Iterator[mujoco.MjData]:
        """Poses in which joints carry their loads."""
        if not self.walks:
            yield from poses(self.model, 64, self.home)
            return
        generator, data = np.random.default_rng(0), mujoco.MjData(self.model)
        places = self.model.jnt_qposadr[self.joints]
        for number in range(_POSES):
            data.qpos[:] = self.home
            stride = generator.uniform(-_STRIDE, _STRIDE, len(places))
            data.qpos[places] += stride if number else 0.0
            data.qpos[self.model.jnt_qposadr] = self._clipped(data.qpos[self.model.jnt_qposadr])
            mujoco.mj_forward(self.model, data)
            yield data

    def _carried(self, data: mujoco.MjData) -> Array:
        """[nv] N m: torques of the legs that carry the robot, half of its feet at a time."""
        model, feet = self.model, self.feet
        count = len(np.unique(model.geom_bodyid[feet]))
        weight = model.body_subtreemass[self.root] * 9.81 / max(count / 2, 1.0)
        found, jacobian = np.zeros(model.nv), np.zeros((3, model.nv))
        for foot in feet:
            mujoco.mj_jacGeom(model, data, jacobian, None, foot)
            np.maximum(found, np.abs(jacobian[2]) * weight, out=found)
        return found
