"""Motion imitation: a simulated humanoid tracks recorded clips of people."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.playing import ErrorMeter
from etude.envs.mujoco.task import Part, Task, Term
from etude.envs.robots.humanoid import CAMERA, humanoid_spec, substeps
from etude.tasks.imitation.imitator import NUM_ACTIONS, Imitator, single
from etude.tasks.imitation.options import ImitationOptions


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
