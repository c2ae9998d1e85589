"""Domain randomisation of pick-and-place: what differs from episode to episode."""

from __future__ import annotations

from functools import wraps

from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import Array
from etude.envs.mujoco.env import Draws, Part, Term
from etude.envs.mujoco.randomize import Vary
from etude.tasks.pick_place import terms
from etude.tasks.pick_place.arm import PickPlaceArm
from etude.tasks.pick_place.scene import CONTROL_SECONDS, CUBE

_SERVOS = "joint.*"
"""Names of the arm's joints, and of their servos."""


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


class PositionNoise(Part):
    """Measured positions of cube and target are off by normal noise of a standard deviation, m.

    Each measurement is disturbed once: all that an observation says of the two positions is derived
    from the same disturbed numbers. So no part of an observation can be used to average the noise
    of another away. The hand is exact, as joint encoders are.
    """

    def __init__(self, size: float) -> None:
        self._size = size

    def bind(self) -> None:
        self._noise = self.env.state("noise", 2, 6)
        """[num_envs, (now, a step ago), (cube, target)] m."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        # A cube that was never seen before is taken to be still.
        self._noise[env_ids] = self._size * draws.normal("noise", 6)[:, None]

    def update(self) -> None:
        self._noise[:, 1] = self._noise[:, 0]
        self._noise[:, 0] = self._size * self.env.draws.normal("noise", 6)

    def observations(self) -> dict[str, Term]:
        """The terms of "state" that tell of the two positions, as measured."""

        def cube() -> Array:
            return self._noise[:, 0, :3]

        def target() -> Array:
            return self._noise[:, 0, 3:]

        def target_offset(arm: PickPlaceArm) -> Array:
            offset: Array = terms.target_offset(arm) + (target() - cube())
            return offset

        noisy: dict[str, Term] = {
            "cube_offset": lambda arm: terms.cube_offset(arm) + cube(),
            "cube_velocity": lambda arm: (
                terms.cube_velocity(arm) + (cube() - self._noise[:, 1, :3]) / CONTROL_SECONDS
            ),
            "target_offset": target_offset,
            "hand_to_target": lambda arm: terms.hand_to_target(arm) + target(),
            "at_target": lambda arm: terms.lies_at(target_offset(arm)),
        }
        return {name: wraps(terms.STATE[name])(term) for name, term in noisy.items()}
