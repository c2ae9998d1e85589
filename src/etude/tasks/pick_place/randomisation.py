"""Domain randomisation of pick-and-place: what differs from episode to episode."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import Array
from etude.envs.mujoco.batch import Simulation
from etude.tasks.pick_place.scene import CONTROL_SECONDS, CUBE
from etude.tasks.pick_place.terms import SLICES, lies_at

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


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

    @property
    def disturbs(self) -> bool:
        """Whether observations differ from what is the case."""
        return self.observation_noise > 0 or self.observation_delay > 0


class ModelRandomiser:
    """Writes per-row model values; those are part of the simulation's snapshot."""

    def __init__(self, config: PickPlaceRandom, simulation: Simulation) -> None:
        self._config, self._simulation = config, simulation
        model: mujoco.MjModel = simulation.model
        self._body, self._geom = model.body(CUBE).id, model.geom(CUBE).id
        self._servos = np.array(
            [a for a in range(model.nu) if model.actuator(a).name.startswith("joint")]
        )
        self._mass = float(model.body_mass[self._body])
        self._inertia = model.body_inertia[self._body].copy()
        self._friction = float(model.geom_friction[self._geom, 0])
        self._gain = model.actuator_gainprm[self._servos].copy()
        self._bias = model.actuator_biasprm[self._servos].copy()
        self._dofs = model.jnt_dofadr[model.actuator_trnid[self._servos, 0]]
        self._damping = model.dof_damping[self._dofs].copy()

    def draw(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        """New values for rows [k]."""
        config, simulation = self._config, self._simulation
        count = 2 + self._servos.size
        draws = np.array([generator.random(count) for generator in generators]) * 2.0 - 1.0
        if config.cube_mass:
            share = 1.0 + config.cube_mass * draws[:, 0]
            simulation.expand("body_mass")[rows, self._body] = self._mass * share
            inertia = self._inertia * share[:, None]
            simulation.expand("body_inertia")[rows, self._body] = inertia
            simulation.update_constants(rows)
        if config.friction:
            share = 1.0 + config.friction * draws[:, 1]
            simulation.expand("geom_friction")[rows, self._geom, 0] = self._friction * share
        if config.servo_gain:
            # Both alike: the joint keeps its time constant and bends more under load.
            shares = 1.0 + config.servo_gain * draws[:, 2:]
            where = np.ix_(rows, self._servos)
            simulation.expand("actuator_gainprm")[where] = self._gain * shares[:, :, None]
            simulation.expand("actuator_biasprm")[where] = self._bias * shares[:, :, None]
            damping = self._damping * shares
            simulation.expand("dof_damping")[np.ix_(rows, self._dofs)] = damping


class Disturbance:
    """Late and noisy observations. Noise is a hash of an episode's seed and the time.

    So nothing but the seed must be kept, and it does not matter how often one looks.

    Two positions are measured, the cube's and the target's, and each measurement is disturbed once:
    all that an observation says of them is derived from the same disturbed numbers, and a
    measurement that is shown again is shown as it was. So no part of an observation can be used to
    average the noise of another away. The hand is exact, as joint encoders are.
    """

    def __init__(self, config: PickPlaceRandom, num_envs: int, width: int) -> None:
        self._config = config
        self._rows = np.arange(num_envs)
        self.seed = np.zeros(num_envs, np.uint64)
        self.delay = np.zeros(num_envs, np.int64)
        self.history = np.zeros((num_envs, config.observation_delay + 1, width), np.float32)
        """[rows, delay + 1, n]: the latest observation first."""

    def draw(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        """Noise and delay of the new episodes of rows [k]."""
        longest = self._config.observation_delay
        self.seed[rows] = [generator.integers(2**63) for generator in generators]
        self.delay[rows] = [generator.integers(longest + 1) for generator in generators]

    def begin(self, rows: Array, observed: Array) -> None:
        """Rows [k] have only ever seen `observed` [k, n]."""
        self.history[rows] = observed[:, None]

    def push(self, observed: Array) -> None:
        """A control step later: [rows, n] float32."""
        self.history[:, 1:] = self.history[:, :-1].copy()
        self.history[:, 0] = observed

    def observe(self, elapsed: Array) -> Array:
        """[rows, n] float32, after `elapsed` [rows] control steps of the episodes."""
        seen: Array = self.history[self._rows, self.delay]
        if self._config.observation_noise:
            self._disturb(seen, np.maximum(elapsed - self.delay, 0))
        return seen

    def _disturb(self, seen: Array, measured: Array) -> None:
        """Add the noise of measurements at [rows] control steps to observations [rows, n]."""
        size = self._config.observation_noise
        cube, target = np.split(hashed_normal(self.seed, measured, 6) * size, 2, axis=1)
        before = hashed_normal(self.seed, measured - 1, 6)[:, :3] * size
        # A cube that was never seen before is taken to be still.
        change = np.where(measured[:, None] > 0, cube - before, 0.0) / CONTROL_SECONDS
        seen[:, SLICES["cube_offset"]] += cube.astype(np.float32)
        seen[:, SLICES["cube_velocity"]] += change.astype(np.float32)
        seen[:, SLICES["target_offset"]] += (target - cube).astype(np.float32)
        seen[:, SLICES["hand_to_target"]] += target.astype(np.float32)
        seen[:, SLICES["at_target"]] = lies_at(seen[:, SLICES["target_offset"]])

    def memory(self) -> dict[str, Array]:
        return {"noise_seed": self.seed, "delay": self.delay, "history": self.history}


def hashed_normal(seed: Array, time: Array, count: int) -> Array:
    """[rows, count] standard normal numbers that seeds and times [rows] decide."""
    index = np.arange(2 * count, dtype=np.uint64)
    place = time.astype(np.uint64)[:, None] * np.uint64(2 * count) + index + np.uint64(1)
    bits = seed[:, None] + place * _GOLDEN
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:, :count]))
    normal: Array = radius * np.cos(2.0 * np.pi * uniform[:, count:])
    return normal
