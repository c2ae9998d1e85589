"""Motion imitation: a simulated humanoid tracks recorded clips of people."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from etude.core.contracts import Array
from etude.data.motion import metrics
from etude.data.motion.skeleton import NUM_BODIES
from etude.envs.mujoco.task import Draws, Part, Task, Term
from etude.envs.robots.humanoid import CAMERA, humanoid_spec, substeps
from etude.tasks.imitation.imitator import NUM_ACTIONS, Imitator, single
from etude.tasks.imitation.options import ImitationOptions

ERRORS = ("mpjpe_g", "mpjpe_l", "mpjpe_pa", "vel_dist", "accel_dist")
STRICT = 0.25
"""Stricter bound on the mean distance in an episode, m."""


def _near(error: Callable[[Imitator], Array], rate: float) -> Term:
    """exp(-rate * error)."""
    return lambda figure: np.exp(-rate * error(figure))


def effort(figure: Imitator) -> Array:
    """Mean squared action."""
    action = single(figure.env.action)
    found: Array = (np.einsum("ij,ij->i", action, action) / NUM_ACTIONS).astype(np.float64)
    return found


def rewards(sharpness: float) -> dict[str, Term]:
    """Reward terms; with sharpness 1 they fall to 0.37 at errors of 10 cm and 18 degrees."""
    return {
        "position": _near(lambda figure: figure.position_error, 100.0 * sharpness),
        "turn": _near(lambda figure: figure.turn_error, 10.0 * sharpness),
        "velocity": _near(lambda figure: figure.velocity_error, 0.1),
        "spin": _near(lambda figure: figure.spin_error, 0.1),
        "effort": effort,
    }


class ErrorMeter(Part):
    """Means of `ERRORS` over each open episode. It must come after its `Imitator` in the parts."""

    def __init__(self, figure: Imitator) -> None:
        self._figure = figure

    def bind(self) -> None:
        env = self.env
        self._sums = env.state("error_sums", len(ERRORS))
        self._last = env.state("last_bodies", 2, 2, NUM_BODIES, 3)
        """[num_envs, frames ago - 1, (figure, reference), bodies, 3]."""
        self.errors: Array = np.zeros((len(ERRORS), env.num_envs))
        """[5, num_envs] mm: means of `ERRORS` over the open episode."""
        self.worst, self.first_worst = env.state("worst"), env.state("first_worst")
        """[num_envs] m: largest mean distance in the open episode, and in its first pass through
        the clip."""
        self.once: Array = np.zeros(env.num_envs, np.bool_)
        """[num_envs] bool: the clip was played to its end at least once."""
        self.travelled: Array = np.zeros(env.num_envs)
        """[num_envs] m: horizontal distance of the root from its initial position."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        figure = self._figure
        self._sums[env_ids] = 0.0
        self.errors[:, env_ids] = 0.0
        self.worst[env_ids] = self.first_worst[env_ids] = 0.0
        position = figure.library.frames.position[figure.first_frame[env_ids]]
        self._last[env_ids] = position[:, None, None]

    def update(self) -> None:
        figure, known, steps = self._figure, self._figure.library, self.env.elapsed
        own, reference = figure.position, known.frames.position[figure.frames_at(0)]
        one, two = self._last[:, 0], self._last[:, 1]
        found = (
            metrics.global_error(own, reference),
            metrics.local_error(own, reference),
            metrics.procrustes_error(own, reference),
            metrics.velocity_error(one[:, 0], own, one[:, 1], reference),
            metrics.acceleration_error(two[:, 0], one[:, 0], own, two[:, 1], one[:, 1], reference)
            * (steps >= 2),
        )
        self._sums += np.stack(found, axis=1)
        counts = np.maximum(steps, 1)
        self.errors[:4] = self._sums[:, :4].T / counts
        self.errors[4] = self._sums[:, 4] / np.maximum(counts - 1, 1)
        # Steps of one pass through the clip.
        cycles = np.where(
            known.loops[figure.motion], known.cycles[figure.motion], figure.episode_steps
        )
        np.maximum(self.worst, figure.mean_distance, out=self.worst)
        np.copyto(self.first_worst, self.worst, where=steps <= cycles)
        np.copyto(self.once, (steps > cycles) | ((steps == cycles) & ~figure.ended))
        self._last[:, 1] = self._last[:, 0]
        self._last[:, 0, 0], self._last[:, 0, 1] = own, reference
        away = figure.pose[:, :2] - known.frames.pose[figure.first_frame, :2]
        self.travelled[:] = np.linalg.norm(away, axis=1)

    def statistics(self) -> dict[str, Term]:
        """Statistics {name: [num_envs]} of the open episode."""

        def error(index: int) -> Term:
            return lambda figure: self.errors[index]

        return {
            **{name: error(index) for index, name in enumerate(ERRORS)},
            "travelled": lambda figure: self.travelled,
            "success_25": lambda figure: ~figure.ended & (self.worst <= STRICT),
            "once": lambda figure: self.once,
            "once_25": lambda figure: self.once & (self.first_worst <= STRICT),
        }


class ImitationConfig(ImitationOptions):
    """A humanoid tracks clips of recorded motion; actions are joint rotations for its servos."""

    def define(self) -> Task:
        figure, weights = Imitator(self), self.reward.model_dump()
        names, parts = figure.library.names, list[Part]()
        observations: dict[str, Mapping[str, Term]] = {"state": {"seen": lambda f: f.observation}}
        if self.style_window:
            observations["style"] = {"style": lambda f: f.style}
            if len(names) > 1:
                observations["motion"] = {"motion": lambda f: f.motion[:, None]}
        statistics: dict[str, Term] = {
            "motion": lambda f: f.motion,
            "progress": lambda f: f.progress,
        }
        if self.measure:
            meter = ErrorMeter(figure)
            parts += [figure, meter]
            statistics |= meter.statistics()
        return Task(
            model=humanoid_spec(self.physics),
            action=figure,
            view=figure,
            parts=parts,
            observations=observations,
            rewards={name: (f, weights[name]) for name, f in rewards(self.sharpness).items()},
            terminations={"off the motion": lambda f: f.ended},
            statistics=statistics,
            substeps=substeps(self.physics),
            max_episode_steps=figure.longest(),
            time_limit=lambda f: f.episode_steps,
            motions=names,
            camera=CAMERA,
            forward_after_reset=False,
        )
