"""Gymnasium's MuJoCo walkers on the batch engine, with equal observations, rewards and
terminations.

HalfCheetah, Hopper, Walker2d, Ant and Humanoid, version 5, from the MJCF files that Gymnasium
installs. Derived fields lag the state by one physics step, as in Gymnasium. Only the contact forces
differ, which the ant and the humanoid observe and pay for: Gymnasium computes them after a step
from the last stage of the Runge-Kutta integrator, and here they are those of the state before the
last physics step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np

from etude.core.contracts import ActionSpec, Array
from etude.core.errors import UsageError
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import Camera
from etude.envs.mujoco.task import Action, Draws, Task, Term
from etude.envs.mujoco.terms.rewards import square_sum

# A warning about Gymnasium's half-cheetah, which users cannot change.
warnings.filterwarnings("ignore", "compiler attribute 'settotalmass' is deprecated")
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


@dataclass(frozen=True)
class Walker:
    """One of Gymnasium's walkers."""

    file: str
    substeps: int
    module: str
    """module:Class in Gymnasium; the defaults of its constructor are the weights."""
    first_position: int
    """Number of initial positions that the observation leaves out."""
    position: str = ""
    """Position that the speed is computed from: "" for qpos, "torso", or "mass" for its centre."""
    clip_velocity: bool = False
    normal_velocity: bool = False
    """Initial velocities are normal; otherwise uniform like the positions."""
    contacts: bool = False
    whole: bool = False
    """Observe inertias, velocities, actuator forces and contact forces of all bodies."""


WALKERS = {
    "HalfCheetah-v5": Walker(
        "half_cheetah.xml", 5, "half_cheetah_v5:HalfCheetahEnv", 1, normal_velocity=True
    ),
    "Hopper-v5": Walker("hopper.xml", 4, "hopper_v5:HopperEnv", 1, clip_velocity=True),
    "Walker2d-v5": Walker("walker2d_v5.xml", 4, "walker2d_v5:Walker2dEnv", 1, clip_velocity=True),
    "Ant-v5": Walker(
        "ant.xml", 5, "ant_v5:AntEnv", 2, "torso", normal_velocity=True, contacts=True
    ),
    "Humanoid-v5": Walker(
        "humanoid.xml", 5, "humanoid_v5:HumanoidEnv", 2, "mass", contacts=True, whole=True
    ),
}
_SETTINGS = {
    "forward_reward_weight",
    "ctrl_cost_weight",
    "contact_cost_weight",
    "healthy_reward",
    "terminate_when_unhealthy",
    "healthy_z_range",
    "healthy_angle_range",
    "healthy_state_range",
    "contact_force_range",
    "contact_cost_range",
    "reset_noise_scale",
}
"""Supported arguments of the constructors."""


def native_env(name: str, kwargs: dict[str, Any], num_envs: int, threads: int) -> MujocoEnv:
    """Make environments of a walker on the batch engine."""
    if name not in WALKERS:
        raise UsageError(
            f"env.engine batch supports {', '.join(WALKERS)}; '{name}' needs env.engine gymnasium."
        )
    unknown = sorted(set(kwargs) - _SETTINGS)
    if unknown:
        raise UsageError(f"env.kwargs {', '.join(unknown)} of '{name}' needs env.engine gymnasium.")
    return MujocoEnv(native_task(name, kwargs), num_envs, threads)


def native_task(name: str, kwargs: dict[str, Any] | None = None) -> Task:
    """The task of a walker, with changed arguments of its constructor."""
    walker = WALKERS[name]
    body = WalkerBody(walker, {**_defaults(walker), **(kwargs or {})})
    settings = body.settings
    rewards: dict[str, tuple[Term, float]] = {
        "forward": (lambda _: body.speed, settings["forward_reward_weight"])
    }
    terminations: dict[str, Term] = {}
    if "healthy_reward" in settings:
        rewards["survive"] = (lambda _: body.healthy(), settings["healthy_reward"])
        if settings["terminate_when_unhealthy"]:
            terminations["unhealthy"] = lambda _: ~body.healthy()
    rewards["ctrl"] = (lambda env: square_sum(env.action), -settings["ctrl_cost_weight"])
    if walker.contacts:
        rewards["contact"] = (lambda _: body.contact_cost(), -1.0)
    return Task(
        model=ASSETS / walker.file,
        action=body,
        observations={"state": {"state": lambda _: body.observe()}},
        rewards=rewards,
        terminations=terminations,
        success=None,
        statistics={"x_position": lambda _: body.qpos[:, 0]},
        substeps=walker.substeps,
        max_episode_steps=1000,
        lagged=True,
        camera=Camera(follow="torso", azimuth=110.0, elevation=-15.0),
    )


def _defaults(walker: Walker) -> dict[str, Any]:
    """Defaults of the walker's constructor in Gymnasium."""
    module, _, name = walker.module.partition(":")
    found = getattr(__import__(f"gymnasium.envs.mujoco.{module}", fromlist=[name]), name)
    parameters = inspect.signature(found.__init__).parameters
    return {key: parameters[key].default for key in _SETTINGS if key in parameters}


class WalkerBody(Action):
    """Actions [num_envs, n] are the walker's controls, in the actuators' ranges."""

    def __init__(self, walker: Walker, settings: dict[str, Any]) -> None:
        super().__init__()
        self._walker, self.settings = walker, settings

    def edit(self, spec: mujoco.MjSpec) -> None:
        if self._walker.contacts:
            # MuJoCo computes contact forces of bodies only if a sensor needs them.
            spec.bodies[1].add_site(name="etude")
            sensor = spec.add_sensor(name="etude", type=mujoco.mjtSensor.mjSENS_ACCELEROMETER)
            sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_SITE, "etude"

    def bind(self) -> None:
        walker, simulation = self._walker, self.env.simulation
        model = simulation.model
        self.size = model.nu
        self._range = model.actuator_ctrlrange.astype(np.float32)
        self._control = simulation.bind("ctrl")
        self.qpos, self.qvel = simulation.bind("qpos"), simulation.bind("qvel")
        self._place = self._position_along_x()
        self._last = self.env.state("x")
        self.speed: Array = np.zeros(self.env.num_envs)
        """[num_envs] m/s: mean velocity along x over the last control step."""
        names = ("cinert", "cvel", "qfrc_actuator") if walker.whole else ()
        self._fields = [simulation.bind(name) for name in names]
        self._contact = simulation.bind("cfrc_ext") if walker.contacts else None

    @property
    def spec(self) -> ActionSpec:
        low, high = self._range.T.tolist()
        return ActionSpec("box", low=tuple(low), high=tuple(high))

    def _position_along_x(self) -> Callable[[], Array]:
        """Function that returns the position along x, [num_envs] m, that the speed is computed
        from."""
        simulation, kind = self.env.simulation, self._walker.position
        model = simulation.model
        if kind == "torso":
            place = simulation.bind("xpos")[:, 1, 0]
            return lambda: place
        if kind == "mass":
            centres, mass = simulation.bind("xipos"), model.body_mass
            return lambda: np.einsum("b,nb->n", mass, centres[:, :, 0]) / mass.sum()
        return lambda: self.qpos[:, 0]

    def apply(self, actions: Array) -> None:
        self._control[:] = actions

    def update(self) -> None:
        place = self._place()
        np.divide(place - self._last, self.env.dt, out=self.speed)
        self._last[:] = place

    def reset(self, env_ids: Array, draws: Draws) -> None:
        size, model = self.settings["reset_noise_scale"], self.env.simulation.model
        self.qpos[env_ids] = model.qpos0 + draws.uniform("qpos", model.nq, low=-size, high=size)
        if self._walker.normal_velocity:
            self.qvel[env_ids] = size * draws.normal("qvel", model.nv)
        else:
            self.qvel[env_ids] = draws.uniform("qvel", model.nv, low=-size, high=size)

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self._last[env_ids] = self._place()[env_ids]

    def healthy(self) -> Array:
        """[num_envs] bool: whether the state is in the healthy ranges of the constructor."""
        settings, floats = self.settings, self._walker.first_position == 2
        low, high = settings["healthy_z_range"]
        z = self.qpos[:, 2 if floats else 1]
        found: Array = (low <= z) & (z <= high) if self._includes else (low < z) & (z < high)
        if "healthy_angle_range" in settings:
            low, high = settings["healthy_angle_range"]
            found &= (low < self.qpos[:, 2]) & (self.qpos[:, 2] < high)
        if "healthy_state_range" in settings:
            low, high = settings["healthy_state_range"]
            state = np.concatenate([self.qpos, self.qvel], axis=1)[:, 2:]
            found &= ((low < state) & (state < high)).all(axis=1)
        return found

    @property
    def _includes(self) -> bool:
        """Whether the bounds of the height count as healthy, which only the ant's do."""
        return self._walker.position == "torso"

    def contact_cost(self) -> Array:
        """[num_envs]: contact cost with the weights and ranges of the constructor."""
        assert self._contact is not None
        forces = self._contact
        if "contact_force_range" in self.settings:
            forces = np.clip(forces, *self.settings["contact_force_range"])
        weight = self.settings["contact_cost_weight"]
        cost: Array = weight * np.einsum("nbi,nbi->n", forces, forces)
        if "contact_cost_range" in self.settings:
            cost = np.clip(cost, *self.settings["contact_cost_range"])
        return cost

    def observe(self) -> Array:
        """[num_envs, n]: the observation of Gymnasium."""
        walker, count = self._walker, self.env.num_envs
        velocity = np.clip(self.qvel, -10.0, 10.0) if walker.clip_velocity else self.qvel
        parts = [self.qpos[:, walker.first_position :], velocity]
        if walker.whole:
            inertia, twist, actuator = self._fields
            parts += [inertia[:, 1:], twist[:, 1:], actuator[:, 6:]]
        if self._contact is not None:
            # Gymnasium computes them in a step: they are 0 at the start of an episode.
            forces = self._contact[:, 1:] * (self.env.elapsed > 0)[:, None, None]
            if "contact_force_range" in self.settings:
                forces = np.clip(forces, *self.settings["contact_force_range"])
            parts.append(forces)
        return np.concatenate([part.reshape(count, -1) for part in parts], axis=1)
