"""The KUKA iiwa 14 with a parallel-jaw gripper, as a MuJoCo spec.

A task takes `kuka_spec(...)`, adds tables and cubes to its `worldbody` and compiles it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.simulation import Simulation


class Clearance:
    """Distances of points to the surfaces of palm and links, without the fingers."""

    def __init__(self, simulation: Simulation) -> None:
        model: mujoco.MjModel = simulation.model
        names = arm_table().names
        palm, first = model.geom(PALM).id, model.geom(names[0]).id
        position, frame = simulation.bind("geom_xpos"), simulation.bind("geom_xmat")
        frame = frame.reshape(simulation.num_envs, -1, 3, 3)
        # The links' geoms are consecutive in the model, so that a slice is a view.
        capsules = slice(first, first + len(names))
        self._palm, self._palm_frame = position[:, palm], frame[:, palm]
        self._palm_half = model.geom_size[palm].copy()
        self._links, self._axes = position[:, capsules], frame[:, capsules, :, 2]
        self._radius, self._half = model.geom_size[capsules, :2].copy().T

    def of(self, points: Array) -> Array:
        """Distance [rows] m from points [rows, 3] to the nearest surface, negative inside a
        link."""
        away = points[:, None] - self._links
        along = np.einsum("ijk,ijk->ij", away, self._axes)
        along = np.minimum(np.maximum(along, -self._half), self._half)
        away -= along[:, :, None] * self._axes
        links = np.sqrt(np.einsum("ijk,ijk->ij", away, away)) - self._radius
        inside = np.einsum("ijk,ij->ik", self._palm_frame, points - self._palm)
        outside = np.maximum(np.abs(inside) - self._palm_half, 0.0)
        palm = np.sqrt(np.einsum("ij,ij->i", outside, outside))
        nearest: Array = np.minimum(palm, links.min(axis=1))
        return nearest


RESPONSE = 0.1
"""Time constant with which a joint follows a new target, s.

A servo's stiffness is its torque limit divided by the angle that the joint turns by at its speed
limit in this time, and the joint's damping is stiffness times this time. So at full torque a joint
settles at its speed limit, as a motor does under its back-EMF. The joint has the damping, not the
servo: MuJoCo integrates the damping of joints implicitly even when the servo is saturated, whereas
that of a saturated servo is lost, and the light wrist then diverges with steps of 10 ms."""

STROKE = 0.085
"""Largest opening between the fingers, m."""
FINGERS = ("left_finger", "right_finger")
"""Joints and servos of the fingers. A task sets each to half of the opening. A coupling by an
equality constraint would let fingers this light move centimetres apart with steps of 10 ms."""
FINGER_STIFFNESS = 1000.0
FINGER_DAMPING = 40.0
"""Gains of a finger's servo, N/m and N s/m: it pushes with 40 N when blocked 4 cm from its
target."""

ARM_COLLISION = {"contype": 1, "conaffinity": 0}
"""Geoms of the arm collide with objects but not with each other: capsules overlap at the joints."""
OBJECT_COLLISION = {"contype": 2, "conaffinity": 3}
"""For a task's tables and objects: they collide with the arm and with each other."""
NO_COLLISION = {"contype": 0, "conaffinity": 0}

HAND_SITE = "hand"
PALM = "palm"
"""Body and geom of the hand."""
Fingers = Literal["sliding", "locked"]

_PALM_MASS, _FINGER_MASS = 0.7, 0.1
_PALM_DEPTH, _FINGER_LENGTH, _FINGER_THICKNESS = 0.09, 0.06, 0.012
_HAND_HEIGHT = _PALM_DEPTH + _FINGER_LENGTH - 0.012
_LINK_RADIUS = (0.07, 0.07, 0.06, 0.06, 0.055, 0.055, 0.04)


@dataclass(frozen=True)
class ArmTable:
    """Parameters of the arm, one row per joint, base first."""

    names: tuple[str, ...]
    position: Array
    """[7, 3] m: position of each link in the frame of its parent."""
    rotation: Array
    """[7, 4] unit quaternions (w, x, y, z) of each link in the frame of its parent."""
    mass: Array
    """[7] kg."""
    center: Array
    """[7, 3] m: centre of mass in the frame of the link."""
    inertia: Array
    """[7, 3] kg m^2: principal moments of inertia, in the frame of `inertia_rotation`."""
    inertia_rotation: Array
    """[7, 4] unit quaternions."""
    range: Array
    """[7, 2] rad."""
    speed: Array
    """[7] rad/s: the manufacturer's speed limits."""
    torque: Array
    """[7] N m: the manufacturer's torque limits."""
    flange: Array
    """[3] m: position of the tool flange in the frame of the last link."""

    @property
    def stiffness(self) -> Array:
        """[7] N m/rad: stiffness of the position servos; see `RESPONSE`."""
        stiffness: Array = self.torque / (self.speed * RESPONSE)
        return stiffness


def _unit(quaternions: list[list[float]]) -> Array:
    array = np.array(quaternions, np.float64)
    unit: Array = array / np.linalg.norm(array, axis=1, keepdims=True)
    return unit


def arm_table() -> ArmTable:
    """Read the published parameters of the arm; `assets/iiwa14.json` names the source."""
    text = (resources.files(__package__) / "assets/iiwa14.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    links: list[dict[str, Any]] = data["links"]

    def column(name: str) -> Array:
        return np.array([link[name] for link in links], np.float64)

    return ArmTable(
        names=tuple(link["name"] for link in links),
        position=column("pos"),
        rotation=_unit([link["quat"] for link in links]),
        mass=column("mass"),
        center=column("com"),
        inertia=column("diaginertia"),
        inertia_rotation=_unit([link["inertia_quat"] for link in links]),
        range=column("range_rad"),
        speed=np.deg2rad(column("speed_deg_s")),
        torque=column("torque_nm"),
        flange=np.array(data["flange_site_on_link7"], np.float64),
    )


def joint_names(table: ArmTable) -> tuple[str, ...]:
    """Names of the seven joints and of their servos, base first."""
    return tuple(f"joint{index + 1}" for index in range(len(table.names)))


def kuka_spec(
    *, fingers: Fingers = "sliding", collisions: bool = False, timestep: float = 0.01
) -> mujoco.MjSpec:
    """The arm on its base at the origin, as a spec to add a scene to.

    fingers: "sliding" adds two degrees of freedom with the servos `FINGERS`, each controlled by
        half of the opening in metres; "locked" fixes them open, which is faster to simulate.
    collisions: whether hand and links collide with objects (with `OBJECT_COLLISION`) that a task
        adds. False disables all contacts.
    """
    table = arm_table()
    spec = mujoco.MjSpec()
    spec.modelname = "iiwa14"
    spec.compiler.degree = False
    spec.option.timestep = timestep
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    if not collisions:
        spec.option.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_CONTACT)
        # All bodies are gravity compensated: without objects gravity has no effect.
        spec.option.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_GRAVITY)
    # Merge palm and locked fingers into the last link: four bodies fewer to simulate.
    spec.compiler.fusestatic = fingers == "locked" and not collisions
    bits = ARM_COLLISION if collisions else NO_COLLISION
    base = spec.worldbody.add_body(name="base", mass=5.0, explicitinertial=True)
    base.inertia = [0.05, 0.06, 0.03]
    base.add_geom(
        name="base",
        type=mujoco.mjtGeom.mjGEOM_CYLINDER,
        size=[0.1, 0.07, 0],
        pos=[0, 0, 0.07],
        mass=0,
        **NO_COLLISION,
    )
    last = _add_links(spec, base, table, bits)
    _add_gripper(spec, last, table, fingers, bits)
    return spec


def _add_links(
    spec: mujoco.MjSpec, base: mujoco.MjsBody, table: ArmTable, bits: dict[str, int]
) -> mujoco.MjsBody:
    """Add the seven links with a joint, a servo and a capsule each; returns the last link."""
    parent = base
    ends = [*table.position[1:], table.flange]
    for index, (name, joint) in enumerate(zip(table.names, joint_names(table), strict=True)):
        link = parent.add_body(
            name=name,
            pos=table.position[index],
            quat=table.rotation[index],
            mass=table.mass[index],
            ipos=table.center[index],
            iquat=table.inertia_rotation[index],
            inertia=table.inertia[index],
            explicitinertial=True,
            gravcomp=1.0,
        )
        limits, stiffness = table.range[index], float(table.stiffness[index])
        link.add_joint(
            name=joint,
            type=mujoco.mjtJoint.mjJNT_HINGE,
            axis=[0, 0, 1],
            range=limits,
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            damping=[stiffness * RESPONSE, 0.0, 0.0],
        )
        link.add_geom(
            name=name,
            type=mujoco.mjtGeom.mjGEOM_CAPSULE,
            fromto=np.concatenate([np.zeros(3), ends[index]]),
            size=[_LINK_RADIUS[index], 0, 0],
            mass=0,
            **bits,
        )
        servo = spec.add_actuator(
            name=joint,
            target=joint,
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            ctrlrange=limits,
            ctrllimited=mujoco.mjtLimited.mjLIMITED_TRUE,
            forcerange=np.array([-1.0, 1.0]) * table.torque[index],
            forcelimited=mujoco.mjtLimited.mjLIMITED_TRUE,
        )
        servo.set_to_position(kp=stiffness)
        parent = link
    return parent


def _add_gripper(
    spec: mujoco.MjSpec,
    link: mujoco.MjsBody,
    table: ArmTable,
    fingers: Fingers,
    bits: dict[str, int],
) -> None:
    """Add the palm, two fingers that close along y, and the site "hand" between their tips."""
    box = mujoco.mjtGeom.mjGEOM_BOX
    palm = link.add_body(name=PALM, pos=table.flange, gravcomp=1.0)
    half = _PALM_DEPTH / 2
    palm.add_geom(
        name=PALM, type=box, size=[0.035, 0.06, half], pos=[0, 0, half], mass=_PALM_MASS, **bits
    )
    palm.add_site(name=HAND_SITE, pos=[0, 0, _HAND_HEIGHT], size=[0.005, 0, 0])
    locked = fingers == "locked"
    for name, sign in zip(FINGERS, (1.0, -1.0), strict=True):
        # A finger's origin is the face of its pad when closed; positive positions open it.
        finger = palm.add_body(
            name=name,
            pos=[0, sign * STROKE / 2 if locked else 0, _PALM_DEPTH],
            gravcomp=1.0,
        )
        finger.add_geom(
            name=name,
            type=box,
            size=[0.011, _FINGER_THICKNESS / 2, _FINGER_LENGTH / 2],
            pos=[0, sign * _FINGER_THICKNESS / 2, _FINGER_LENGTH / 2],
            mass=_FINGER_MASS,
            **bits,
        )
        if not locked:
            finger.add_joint(
                name=name,
                type=mujoco.mjtJoint.mjJNT_SLIDE,
                axis=[0, sign, 0],
                range=[0, STROKE / 2],
                limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            )
            servo = spec.add_actuator(
                name=name,
                target=name,
                trntype=mujoco.mjtTrn.mjTRN_JOINT,
                ctrlrange=[0, STROKE / 2],
                ctrllimited=mujoco.mjtLimited.mjLIMITED_TRUE,
            )
            servo.set_to_position(kp=FINGER_STIFFNESS, kv=FINGER_DAMPING)
