"""Pick-and-place: its scene (arm with collisions, table, free cube) and its options."""

from __future__ import annotations

from typing import Any, Literal, Self

import mujoco
import numpy as np
from pydantic import Field, model_validator

from etude.core.config import Config
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.randomize import Vary
from etude.envs.mujoco.task import Part
from etude.envs.robots.kuka import FINGERS, OBJECT_COLLISION, kuka_spec

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


_SERVOS = "joint.*"
"""Regular expression of the arm's joints and servos."""


class PickPlaceReward(Config):
    """Weights of the reward terms.

    A stage pays for each new maximum of its value in an episode. It is also a potential phi that
    pays gamma phi(s') - phi(s) (potential-based shaping), which does not change the optimal policy.
    Staying at one value pays nothing.
    """

    reach: float = Field(1.0, description="Fingers around the cube, from above.")
    align: float = Field(0.0, description="Hand turned along the cube.")
    grasp: float = Field(1.0, description="Fingers closed on the cube.")
    carry: float = Field(4.0, description="Cube carried over the table to the target.")
    place: float = Field(1.0, description="Cube set down gently near the middle of the target.")
    release: float = Field(1.0, description="Fingers opened at the target.")
    clear: float = Field(4.0, description="Hand moved away from the cube.")
    action_cost: float = Field(-0.01, description="Mean squared action.")
    success: float = Field(
        8.0, description="Once, when the released cube rests in the target; half if dropped 2 cm."
    )
    fallen: float = Field(-2.0, description="Once, when the cube falls off the table.")


class PickPlaceRandom(Config):
    """Domain randomisation of the cube, the servos and the observations; 0 turns each off."""

    cube_mass: float = Field(0.0, ge=0, lt=1, description="Relative change of the cube's mass.")
    friction: float = Field(0.0, ge=0, lt=1, description="Relative change of the cube's friction.")
    servo_gain: float = Field(
        0.0, ge=0, lt=1, description="Relative change of each arm joint's stiffness and damping."
    )
    observation_noise: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of the noise of the cube's and the target's position, m.",
    )
    observation_delay: int = Field(
        0, ge=0, le=10, description="Largest delay of observations, in control steps."
    )

    def parts(self) -> list[Part]:
        """The parts that change the model."""
        parts: list[Part] = []
        if self.cube_mass:
            parts.append(Vary("body", ("body_mass", "body_inertia"), self.cube_mass, CUBE))
        if self.friction:
            parts.append(Vary("geom", ("geom_friction",), self.friction, CUBE, column=0))
        if self.servo_gain:
            # Scaled together: a joint keeps its time constant, and yields more under load.
            gains = ("actuator_gainprm", "actuator_biasprm")
            for kind, fields in (("actuator", gains), ("joint", ("dof_damping",))):
                parts.append(Vary(kind, fields, self.servo_gain, _SERVOS, stream="servo"))
        return parts


class PickPlaceOptions(TaskConfig):
    """Options of pick-and-place; `PickPlaceConfig` defines the task."""

    kind: Literal["pick-place"] = "pick-place"
    cube_center: tuple[float, float] = Field(
        (0.0, -0.12), description="Middle of the cube's area, m from the middle of the table."
    )
    cube_area: tuple[float, float] = Field((0.02, 0.02), description="Sides of the cube's area, m.")
    cube_turn: float = Field(0.2, ge=0, description="Range of the cube's initial yaw, rad.")
    target_center: tuple[float, float] = Field(
        (0.0, 0.12), description="Middle of the target's area, m from the middle of the table."
    )
    target_area: tuple[float, float] = Field(
        (0.02, 0.02), description="Sides of the target's area, m."
    )
    min_distance: float = Field(
        0.06, ge=0.05, description="Minimum distance from cube to target, m."
    )
    start_jitter: float = Field(
        0.02, ge=0, le=0.5, description="Largest random offset of each joint at the start, rad."
    )
    radius: float = Field(
        0.03,
        gt=0,
        le=0.03,
        description="Largest distance from the target that counts as placed, m.",
    )
    control: Literal["hand", "hand-turn", "joint"] = Field(
        "hand", description="Actions move the hand, move and turn it, or move the joints."
    )
    reach_step: float = Field(
        0.05, gt=0, description="Displacement of the hand's target by a unit action, m."
    )
    turn_step: float = Field(
        0.4, gt=0, description="Turn of the hand's target by a unit action, rad."
    )
    joint_speed: float = Field(
        0.5, gt=0, le=1, description="Largest joint speed, as a fraction of the limit."
    )
    substeps: int = Field(8, ge=4, le=1000, description="Physics steps per control step of 0.1 s.")
    cone: Cone = Field("pyramidal", description="Friction cones of the physics.")
    integrator: Integrator = Field("discrete", description="implicitfast needs 200 substeps.")
    max_episode_steps: int = Field(
        200, ge=1, le=200, description="Control steps until an episode is truncated."
    )
    reward: PickPlaceReward = Field(PickPlaceReward(), description="Weights of the terms.")
    shaping: float = Field(
        0.3,
        ge=0,
        description="Weight of potential-based shaping, gamma phi(s') - phi(s), relative to the "
        "stages' weights; 0: no shaping.",
    )
    discount: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Discount of the shaping; must equal algorithm.gamma. Rewards "
        "with env.episodic are not shaped.",
    )
    random: PickPlaceRandom = Field(PickPlaceRandom(), description="Domain randomisation.")

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.widest() < 1.2 * self.min_distance:
            raise ValueError(
                f"env.min_distance {self.min_distance:g} leaves no room for cube and target, which "
                f"are {self.widest():.3g} m apart at most: use {self.widest() / 1.2:.3g} or less, "
                "or wider env.cube_area and env.target_area"
            )
        return self

    def widest(self, level: float = 1.0) -> float:
        """Largest possible distance of cube and target at a level of the curriculum, m."""
        sides = np.add(self.cube_area, self.target_area) / 2 * level
        apart = np.abs(np.subtract(self.cube_center, self.target_center)) + sides
        return float(np.linalg.norm(apart))

    def shaping_discount(self) -> float | None:
        return None if self.episodic or not self.shaping else self.discount

    @classmethod
    def anywhere(cls, **changes: Any) -> Self:
        """The task with cube and target anywhere in 30 x 40 cm, and any yaw of the cube."""
        area = {"cube_center": (0.0, 0.0), "cube_area": (0.3, 0.4), "cube_turn": 3.1416}
        area |= {"target_center": (0.0, 0.0), "target_area": (0.3, 0.4)}
        values = {**area, "control": "hand-turn", "reward": {"align": 0.5}, **changes}
        return cls.model_validate(values)
