"""The scene of pick-and-place: the arm with a colliding hand, a table, and a free cube."""

from __future__ import annotations

from typing import Literal

import mujoco
import numpy as np

from etude.envs.robots.kuka.scene import FINGERS, OBJECT_COLLISION, kuka_spec

Cone = Literal["pyramidal", "elliptic"]
Integrator = Literal["discrete", "implicitfast"]

CONTROL_SECONDS = 0.1
"""Length of a control step: 10 Hz."""
TABLE_CENTER = np.array([0.58, 0.0, 0.1])
"""The middle of the table's top, m."""
TABLE_HALF = (0.25, 0.3, 0.05)
CUBE_HALF = 0.02
CUBE_MASS = 0.1
REST_HEIGHT = float(TABLE_CENTER[2]) + CUBE_HALF
"""Of the centre of a cube that lies on the table, m."""
CUBE = "cube"

_CONES = {
    "pyramidal": mujoco.mjtCone.mjCONE_PYRAMIDAL,
    "elliptic": mujoco.mjtCone.mjCONE_ELLIPTIC,
}
_INTEGRATORS = {
    "discrete": mujoco.mjtIntegrator.mjINT_DISCRETE,
    "implicitfast": mujoco.mjtIntegrator.mjINT_IMPLICITFAST,
}


def scene_spec(
    timestep: float, cone: Cone = "pyramidal", integrator: Integrator = "discrete"
) -> mujoco.MjSpec:
    """Arm, table and cube; the two sensors are the net forces of each finger on the cube, [3] N.

    implicitfast solves for contact forces with the bare inertia and adds the damping of joints and
    servos afterwards. A wrist joint of 0.01 kg m^2 with 17 N m s / rad is then 17 times heavier in
    the step than in the contact: at 10 ms a closing grasp shoots the cube away. The discrete
    integrator solves both in the same inertia, and the same grasp holds. With steps of 12.5 ms
    closing fingers sink a millimetre into the cube, and three under random actions; with 20 ms,
    which is half as fast again and succeeds as often, three and nine.
    """
    spec = kuka_spec(fingers="sliding", collisions=True, timestep=timestep)
    spec.option.integrator = _INTEGRATORS[integrator]
    spec.option.cone = _CONES[cone]
    # By the exact inertia at each contact, a light cube between heavy fingers is not pushed to
    # and fro: half the penetration for nothing.
    spec.option.enableflags |= int(mujoco.mjtEnableBit.mjENBL_DIAGEXACT)
    # Elliptic cones creep under load unless friction is made stiffer than the normal force.
    spec.option.impratio = 10.0 if cone == "elliptic" else 1.0
    box = mujoco.mjtGeom.mjGEOM_BOX
    spec.worldbody.add_geom(
        name="table",
        type=box,
        size=TABLE_HALF,
        pos=TABLE_CENTER - np.array([0.0, 0.0, TABLE_HALF[2]]),
        rgba=[0.55, 0.5, 0.45, 1],
        **OBJECT_COLLISION,
    )
    cube = spec.worldbody.add_body(name=CUBE, pos=[*TABLE_CENTER[:2], REST_HEIGHT])
    cube.add_freejoint(name=CUBE)
    cube.add_geom(
        name=CUBE,
        type=box,
        size=[CUBE_HALF] * 3,
        mass=CUBE_MASS,
        rgba=[0.85, 0.25, 0.2, 1],
        # Its own contact parameters rule, whatever it touches: rubber on wood or plastic, and
        # hard, or the fingers sink into so light a body.
        priority=1,
        friction=[1.0, 0.005, 0.0001],
        solref=[0.01, 1.0],
        solimp=[0.98, 0.995, 0.001, 0.5, 2.0],
        **OBJECT_COLLISION,
    )
    for finger in FINGERS:
        _add_force_sensor(spec, finger)
    return spec


def _add_force_sensor(spec: mujoco.MjSpec, finger: str) -> None:
    """The net force between a finger and the cube alone: pressing on the table does not count."""
    net_force = 3
    spec.add_sensor(
        name=finger,
        type=mujoco.mjtSensor.mjSENS_CONTACT,
        objtype=mujoco.mjtObj.mjOBJ_GEOM,
        objname=finger,
        reftype=mujoco.mjtObj.mjOBJ_GEOM,
        refname=CUBE,
        intprm=[1 << int(mujoco.mjtConDataField.mjCONDATA_FORCE), net_force, 1],
    )
