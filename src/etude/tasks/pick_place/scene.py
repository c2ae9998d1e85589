"""Scene of pick-and-place: the arm with collisions, a table and a free cube."""

from __future__ import annotations

from typing import Literal

import mujoco
import numpy as np

from etude.envs.robots.kuka.scene import FINGERS, OBJECT_COLLISION, kuka_spec

Cone = Literal["pyramidal", "elliptic"]
Integrator = Literal["discrete", "implicitfast"]

CONTROL_SECONDS = 0.1
"""Length of a control step, s."""
TABLE_CENTER = np.array([0.58, 0.0, 0.1])
"""Middle of the table's top, m."""
TABLE_HALF = (0.25, 0.3, 0.05)
CUBE_HALF = 0.02
CUBE_MASS = 0.1
REST_HEIGHT = float(TABLE_CENTER[2]) + CUBE_HALF
"""Height of the centre of a cube on the table, m."""
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
    """Arm, table and cube, with a sensor of the net force of each finger on the cube, [3] N.

    implicitfast solves for contact forces with the plain inertia and adds the damping of joints and
    servos afterwards. A wrist joint of 0.01 kg m^2 with 17 N m s/rad is then 17 times heavier in
    the step than in the contact, and with steps of 10 ms a closing grasp shoots the cube away. The
    discrete integrator uses the same inertia for both, and the grasp holds. With steps of 12.5 ms
    closing fingers penetrate the cube by 1 mm, and by 3 mm under random actions; with 20 ms, which
    is 1.5 times as fast and has the same success rate, by 3 and 9 mm.
    """
    spec = kuka_spec(fingers="sliding", collisions=True, timestep=timestep)
    spec.option.integrator = _INTEGRATORS[integrator]
    spec.option.cone = _CONES[cone]
    # With the exact inertia at each contact a light cube between heavy fingers does not oscillate,
    # which halves the penetration.
    spec.option.enableflags |= int(mujoco.mjtEnableBit.mjENBL_DIAGEXACT)
    # Elliptic cones slip under load unless friction is stiffer than the normal force.
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
        # The cube's contact parameters apply to all its contacts: rubber on wood or plastic, and
        # hard, so that the fingers do not penetrate so light a body.
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
    """Add a sensor of the net force between a finger and the cube, without other contacts."""
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
