"""The options of pick-and-place: areas, control, rewards and domain randomisation."""

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
"""Names of the arm's joints, and of their servos."""


class PickPlaceReward(Config):
    """Weights of the reward terms.

    A stage pays each new height once, when it is first reached in an episode; and as a potential
    phi it pays gamma phi(s') - phi(s) (potential-based shaping), which says at once what a step
    gained or lost and does not change which policy is best. So lingering earns nothing.
    """

    reach: float = Field(1.0, description="For bringing the fingers around the cube, from above.")
    align: float = Field(0.0, description="For turning the hand along the cube.")
    grasp: float = Field(1.0, description="For closing them on it.")
    carry: float = Field(4.0, description="For carrying it over the table to the target.")
    place: float = Field(1.0, description="For setting it down gently near the target's middle.")
    release: float = Field(1.0, description="For opening the fingers there.")
    clear: float = Field(4.0, description="For taking the hand away.")
    action_cost: float = Field(-0.01, description="Per unit of mean squared action.")
    success: float = Field(
        8.0, description="Once, when the cube rests there alone; half if let go of 2 cm above."
    )
    fallen: float = Field(-2.0, description="Once, when the cube leaves the table.")


class PickPlaceRandom(Config):
    """How far each episode may differ from the model: 0 is not at all."""

    cube_mass: float = Field(0.0, ge=0, lt=1, description="Largest change of it, as a share.")
    friction: float = Field(0.0, ge=0, lt=1, description="Of the cube: likewise.")
    servo_gain: float = Field(
        0.0, ge=0, lt=1, description="Stiffness and damping of each arm joint: likewise."
    )
    observation_noise: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of the measured positions of cube and target, m.",
    )
    observation_delay: int = Field(
        0, ge=0, le=10, description="Observations are up to so many control steps old."
    )

    def parts(self) -> list[Part]:
        """What changes the model."""
        parts: list[Part] = []
        if self.cube_mass:
            parts.append(Vary("body", ("body_mass", "body_inertia"), self.cube_mass, CUBE))
        if self.friction:
            parts.append(Vary("geom", ("geom_friction",), self.friction, CUBE, column=0))
        if self.servo_gain:
            # Both alike: the joint keeps its time constant and bends more under load.
            gains = ("actuator_gainprm", "actuator_biasprm")
            for kind, fields in (("actuator", gains), ("joint", ("dof_damping",))):
                parts.append(Vary(kind, fields, self.servo_gain, _SERVOS, stream="servo"))
        return parts


class PickPlaceOptions(TaskConfig):
    """The options of pick-and-place; `PickPlaceConfig` makes the task of them."""

    kind: Literal["pick-place"] = "pick-place"
    cube_center: tuple[float, float] = Field(
        (0.0, -0.12), description="Middle of the area cubes start in, m from the table's."
    )
    cube_area: tuple[float, float] = Field((0.02, 0.02), description="Sides of it, m.")
    cube_turn: float = Field(0.2, ge=0, description="Largest turn of the cube at the start, rad.")
    target_center: tuple[float, float] = Field(
        (0.0, 0.12), description="Middle of the area targets lie in, m from the table's."
    )
    target_area: tuple[float, float] = Field((0.02, 0.02), description="Sides of it, m.")
    min_distance: float = Field(0.06, ge=0.05, description="From cube to target at least, m.")
    start_jitter: float = Field(0.02, ge=0, le=0.5, description="Of each joint at the start, rad.")
    radius: float = Field(0.03, gt=0, le=0.03, description="How close to the target counts, m.")
    control: Literal["hand", "hand-turn", "joint"] = Field(
        "hand", description="Actions move the hand, move and turn it, or move the joints."
    )
    reach_step: float = Field(
        0.05, gt=0, description="How far ahead of itself a unit action sends the hand, m."
    )
    turn_step: float = Field(0.4, gt=0, description="Likewise for its turn, rad.")
    joint_speed: float = Field(0.5, gt=0, le=1, description="Joint control: share of the limit.")
    substeps: int = Field(8, ge=4, le=1000, description="Physics steps per control step of 0.1 s.")
    cone: Cone = Field("pyramidal", description="Friction cones of the physics.")
    integrator: Integrator = Field("discrete", description="implicitfast needs 200 substeps.")
    max_episode_steps: int = Field(200, ge=1, le=200, description="Control steps at most.")
    reward: PickPlaceReward = Field(PickPlaceReward(), description="Weights of the terms.")
    shaping: float = Field(
        0.3,
        ge=0,
        description="Weight of potential-based shaping, gamma phi(s') - phi(s), relative to the "
        "stages' weights; 0 is none.",
    )
    discount: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Discount of the shaping; must equal algorithm.gamma. A sum of rewards "
        "(env.episodic) is not shaped.",
    )
    random: PickPlaceRandom = Field(
        PickPlaceRandom(), description="How much physics and senses differ between episodes."
    )

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
        """How far apart cube and target can be at a level of the curriculum, m."""
        sides = np.add(self.cube_area, self.target_area) / 2 * level
        apart = np.abs(np.subtract(self.cube_center, self.target_center)) + sides
        return float(np.linalg.norm(apart))

    def shaping_discount(self) -> float | None:
        return None if self.episodic or not self.shaping else self.discount

    @classmethod
    def anywhere(cls, **changes: Any) -> Self:
        """Cube anywhere in 30 x 40 cm with any yaw, target anywhere else in it."""
        area = {"cube_center": (0.0, 0.0), "cube_area": (0.3, 0.4), "cube_turn": 3.1416}
        area |= {"target_center": (0.0, 0.0), "target_area": (0.3, 0.4)}
        values = {**area, "control": "hand-turn", "reward": {"align": 0.5}, **changes}
        return cls.model_validate(values)
