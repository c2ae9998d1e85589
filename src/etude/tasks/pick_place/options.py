"""Options of pick-and-place: areas, control, rewards and domain randomisation."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from etude.core.config import Config
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.randomize import Vary
from etude.envs.mujoco.task import Part
from etude.tasks.pick_place.scene import CUBE, Cone, Integrator

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
