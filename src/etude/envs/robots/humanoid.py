"""The humanoid as a MuJoCo model: 15 bodies on a floor, a rotation servo in every joint."""

from __future__ import annotations

from typing import Literal, NamedTuple

import mujoco
import numpy as np

from etude.data.motion.skeleton import BODIES, HINGE_AXIS, Shape
from etude.envs.mujoco.simulation import Camera

CONTROL_RATE = 30
"""Control steps per second."""
CAMERA = Camera(
    look_at=(0.0, 0.0, 0.85), follow="root", distance=3.2, azimuth=120.0, elevation=-12.0
)
"""Camera of films."""
Physics = Literal["fast", "checked"]


class Servo(NamedTuple):
    """Servo of the joint of a body."""

    stiffness: float
    """N m/rad; the damping (N m s/rad) is a tenth of it."""
    torque: float
    """Torque limit with checked physics, N m."""


SERVOS = {
    "chest": Servo(1000.0, 200.0),
    "neck": Servo(100.0, 50.0),
    "shoulder": Servo(400.0, 100.0),
    "elbow": Servo(300.0, 60.0),
    "hip": Servo(500.0, 200.0),
    "knee": Servo(500.0, 150.0),
    "ankle": Servo(400.0, 90.0),
}

_SKIN, _CLOTH, _TROUSERS, _SHOE = (
    (0.93, 0.74, 0.62, 1.0),
    (0.24, 0.47, 0.75, 1.0),
    (0.25, 0.28, 0.36, 1.0),
    (0.86, 0.33, 0.24, 1.0),
)
_COLORS = {
    "root": _TROUSERS,
    "hip": _TROUSERS,
    "knee": _TROUSERS,
    "ankle": _SHOE,
    "chest": _CLOTH,
    "shoulder": _CLOTH,
    "elbow": _SKIN,
    "wrist": _SKIN,
    "neck": _SKIN,
}
_QUATERNION = int(mujoco.mjtCtrlChart.mjCHART_QUAT)
"""Controls of a ball joint's servo are a quaternion."""


def substeps(physics: Physics) -> int:
    """Physics steps per control step."""
    return 2 if physics == "fast" else 8


def humanoid(physics: Physics = "fast") -> mujoco.MjModel:
    """Compile `humanoid_spec`."""
    return humanoid_spec(physics).compile()


def humanoid_spec(physics: Physics = "fast") -> mujoco.MjSpec:
    """A humanoid of the size of a person, on a floor.

    "fast" has no torque limits, because a servo at its limit has no damping, and the simulation
    then diverges with steps of 1/60 s. "checked" has torque limits, smaller steps and another
    integrator. It is four times slower, and shows that a policy does not exploit flaws of the fast
    physics.
    """
    spec = mujoco.MjSpec()
    spec.modelname = "humanoid"
    spec.compiler.degree = False
    spec.option.timestep = 1.0 / (CONTROL_RATE * substeps(physics))
    fast = physics == "fast"
    kinds = mujoco.mjtIntegrator
    spec.option.integrator = kinds.mjINT_DISCRETE if fast else kinds.mjINT_IMPLICITFAST
    spec.option.iterations = 4 if fast else 20
    spec.worldbody.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[0, 0, 1],
        contype=0,
        conaffinity=1,
        friction=[1.0, 0.005, 0.0001],
        material=_paint_floor(spec),
    )
    made: dict[str | None, mujoco.MjsBody] = {None: spec.worldbody}
    for body in BODIES:
        part = made[body.parent].add_body(name=body.name, pos=body.offset)
        made[body.name] = part
        kind = body.name.split("_")[-1]
        for shape in body.shapes:
            _add_shape(part, shape, _COLORS[kind])
        if body.joint == "free":
            part.add_freejoint(name=body.name)
        elif body.joint != "none":
            _add_joint(spec, part, body.joint, SERVOS[kind], fast)
    return spec


def _paint_floor(spec: mujoco.MjSpec) -> str:
    """A material with tiles of half a metre, to show how far the humanoid travels."""
    spec.add_texture(
        name="tiles",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.80, 0.82, 0.84],
        rgb2=[0.75, 0.77, 0.79],
        width=64,
        height=64,
    )
    tiles = spec.add_material(name="tiles", texrepeat=[1, 1], texuniform=True, emission=0.6)
    tiles.textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = "tiles"
    return "tiles"


def _add_shape(part: mujoco.MjsBody, shape: Shape, color: tuple[float, ...]) -> None:
    # Bodies collide with the floor but not with each other.
    common = {"mass": shape.mass, "contype": 1, "conaffinity": 0, "rgba": color}
    if shape.kind == "capsule":
        part.add_geom(
            type=mujoco.mjtGeom.mjGEOM_CAPSULE,
            fromto=np.concatenate(shape.points),
            size=[shape.size[0], 0, 0],
            **common,
        )
        return
    box = shape.kind == "box"
    size = shape.size if box else (shape.size[0], 0.0, 0.0)
    kind = mujoco.mjtGeom.mjGEOM_BOX if box else mujoco.mjtGeom.mjGEOM_SPHERE
    part.add_geom(type=kind, pos=shape.points[0], size=size, **common)


def _add_joint(
    spec: mujoco.MjSpec, part: mujoco.MjsBody, kind: str, servo: Servo, fast: bool
) -> None:
    ball = kind == "ball"
    part.add_joint(
        name=part.name,
        type=mujoco.mjtJoint.mjJNT_BALL if ball else mujoco.mjtJoint.mjJNT_HINGE,
        axis=HINGE_AXIS,
        armature=0.01 if fast else 0.03,
    )
    actuator = spec.add_actuator(
        name=part.name, target=part.name, trntype=mujoco.mjtTrn.mjTRN_JOINT
    )
    gains = {"kp": servo.stiffness, "kv": servo.stiffness / 10}
    if ball:
        actuator.set_to_orientation(**gains, ctrlspec=_QUATERNION)
    else:
        actuator.set_to_position(**gains)
    if not fast:
        actuator.forcelimited = mujoco.mjtLimited.mjLIMITED_TRUE
        # The range of a ball joint limits the norm of its torque.
        actuator.forcerange = [0.0 if ball else -servo.torque, servo.torque]
