"""Domain randomisation and disturbances.

Values are drawn at the start of each episode from the environment's random stream and written into
per-environment fields of the model. They are part of the snapshot, and constants that MuJoCo
derives from them are recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import Array
from etude.envs.mujoco.robot import Robot, matching, names_of
from etude.envs.mujoco.task import Draws, Part

Range = tuple[float, float]
Late = Annotated[int, Field(ge=0, le=1000)]
"""A delay in control steps; the buffer keeps every step up to it."""
_CONSTANTS = {"body_mass", "body_inertia", "dof_armature"}
"""Model fields from which MuJoCo derives constants."""


class Vary(Part):
    """Scale model fields of elements by a random factor in [1 - share, 1 + share] per episode.

    `kind`: body, joint, geom or actuator. `fields`: model fields, scaled by the same factor.
    `only`: regular expression of the elements' names. `each`: draw one factor per element instead
    of one for all. `column`: the column of the field to scale; None scales all. `stream`: name of
    the random stream; parts with the same stream draw the same factors.
    """

    def __init__(
        self,
        kind: str,
        fields: Sequence[str],
        share: float,
        only: str = ".*",
        each: bool = True,
        column: int | None = None,
        stream: str | None = None,
    ) -> None:
        self._kind, self._fields, self._share = kind, fields, share
        self._only, self._each, self._column = only, each, column
        self._stream = f"randomize/{stream or fields[0]}"

    def bind(self) -> None:
        simulation = self.env.simulation
        model = simulation.model
        found = matching(names_of(model, self._kind), self._only, self._kind)
        self._ids = np.array(found)
        if self._kind == "joint":  # the fields have one row per degree of freedom
            self._ids = np.flatnonzero(np.isin(model.dof_jntid, found))
        self._values = [getattr(model, field)[self._ids].copy() for field in self._fields]
        self._arrays = [simulation.expand(field) for field in self._fields]
        self._derives = not _CONSTANTS.isdisjoint(self._fields)

    def reset(self, env_ids: Array, draws: Draws) -> None:
        factor = self._factors(draws)
        for array, value in zip(self._arrays, self._values, strict=True):
            new = value * factor.reshape(*factor.shape, *(1,) * (value.ndim - 1))
            which, things = np.ix_(env_ids, self._ids)
            if self._column is None:
                array[which, things] = new
            else:
                array[which, things, self._column] = new[..., self._column]
        if self._derives:
            self.env.simulation.update_constants(env_ids)

    def _factors(self, draws: Draws) -> Array:
        """Factors [k, elements], or [k, 1] shared by all elements."""
        count = self._ids.size if self._each else 1
        low, high = 1.0 - self._share, 1.0 + self._share
        return draws.uniform(self._stream, count, low=low, high=high)


class Mass(Vary):
    """Scale mass and inertia of each body, and add kilograms to the robot's base."""

    def __init__(self, robot: Robot, share: float, added: Range, only: str) -> None:
        super().__init__("body", ("body_mass", "body_inertia"), share, only)
        self._robot, self._added = robot, added

    def _factors(self, draws: Draws) -> Array:
        factors = super()._factors(draws)
        at, (low, high) = self._ids == self._robot.body, self._added
        kilograms = draws.uniform("randomize/added_mass", 1, low=low, high=high)
        factors[:, at] += kilograms / self._values[0][at]
        return factors


class Gravity(Part):
    """Scale gravity by a random factor."""

    def __init__(self, factor: Range) -> None:
        self._factor = factor

    def bind(self) -> None:
        simulation = self.env.simulation
        self._value = simulation.model.opt.gravity.copy()
        self._array = simulation.expand("opt.gravity")

    def reset(self, env_ids: Array, draws: Draws) -> None:
        low, high = self._factor
        factor = draws.uniform("randomize/gravity", 1, low=low, high=high)
        self._array[env_ids] = self._value * factor


class JointOffset(Part):
    """Add a constant error of up to `size` (rad or m) to each joint encoder, drawn per episode."""

    def __init__(self, robot: Robot, size: float) -> None:
        self._robot, self._size = robot, size

    def bind(self) -> None:
        count = len(self._robot.joint_names)
        self._robot.joint_offset = self.env.state("joint_offset", count)

    def reset(self, env_ids: Array, draws: Draws) -> None:
        offset = self._robot.joint_offset
        offset[env_ids] = draws.uniform(
            "randomize/joint-offset", offset.shape[1], low=-self._size, high=self._size
        )


class Push(Part):
    """Push the base at random times: change its horizontal velocity by `speed` (m/s) in a random
    direction.

    `every`: range of seconds between pushes, and from the start of an episode to the first push.
    """

    def __init__(self, robot: Robot, speed: float, every: Range = (5.0, 10.0)) -> None:
        self._robot, self._speed, self._every = robot, speed, every

    def bind(self) -> None:
        self._left = self.env.state("push/left", dtype="int64")
        self._qvel = self.env.simulation.bind("qvel")

    def reset(self, env_ids: Array, draws: Draws) -> None:
        self._wait(env_ids, draws)

    def _wait(self, env_ids: Array, draws: Draws) -> None:
        low, high = self._every
        self._left[env_ids] = draws.uniform("push/wait", low=low, high=high) / self.env.dt

    def act(self) -> None:
        self._left -= 1
        due = (self._left < 0).nonzero()[0]
        if due.size:
            draws = Draws(self.env, due)
            angle = draws.uniform("push/direction", high=2.0 * np.pi)
            first = self._robot.root_dof
            self._qvel[due, first] += self._speed * np.cos(angle)
            self._qvel[due, first + 1] += self._speed * np.sin(angle)
            self._wait(due, draws)


class Randomization(Config):
    """Domain randomisation; a relative change of 0.3 draws factors from 0.7 to 1.3."""

    mass: float = Field(
        0.0, ge=0, lt=1, description="Relative change of each body's mass and inertia."
    )
    added_mass: tuple[float, float] = Field(
        (0.0, 0.0), description="Mass added to the robot's base, kg: minimum and maximum."
    )
    friction: float = Field(
        0.0, ge=0, lt=1, description="Relative change of the friction of all geoms."
    )
    gains: float = Field(
        0.0, ge=0, lt=1, description="Relative change of each actuator's stiffness and damping."
    )
    armature: float = Field(
        0.0, ge=0, lt=1, description="Relative change of each joint's armature."
    )
    damping: float = Field(0.0, ge=0, lt=1, description="Relative change of each joint's damping.")
    gravity: float = Field(0.0, ge=0, lt=1, description="Relative change of gravity.")
    joint_offset: float = Field(
        0.0, ge=0, description="Largest constant error of each joint encoder, rad or m."
    )
    latency: tuple[Late, Late] = Field(
        (0, 0), description="Delay of actions in control steps: minimum and maximum."
    )
    push: float = Field(0.0, ge=0, description="Change of the base's velocity by a push, m/s.")
    push_every: tuple[float, float] = Field(
        (5.0, 10.0), description="Seconds between pushes: minimum and maximum."
    )

    def parts(self, robot: Robot, bodies: str = ".*", geoms: str = ".*") -> list[Part]:
        """The parts that change the model and push the robot.

        `bodies`, `geoms`: regular expressions of the names whose mass and friction change.
        `latency` is not among them: give it to the action, `delay=latency`.
        """
        parts: list[Part] = []
        if self.mass or any(self.added_mass):
            parts.append(Mass(robot, self.mass, self.added_mass, bodies))
        if self.friction:
            friction = Vary("geom", ("geom_friction",), self.friction, geoms, each=False, column=0)
            parts.append(friction)
        if self.gains:
            parts.append(Vary("actuator", ("actuator_gainprm", "actuator_biasprm"), self.gains))
        if self.armature:
            parts.append(Vary("joint", ("dof_armature",), self.armature))
        if self.damping:
            parts.append(Vary("joint", ("dof_damping",), self.damping))
        if self.gravity:
            parts.append(Gravity((1.0 - self.gravity, 1.0 + self.gravity)))
        if self.joint_offset:
            parts.append(JointOffset(robot, self.joint_offset))
        if self.push:
            parts.append(Push(robot, self.push, self.push_every))
        return parts
