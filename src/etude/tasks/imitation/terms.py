"""What the imitation task measures: how far the figure is from the one it imitates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from etude.core.contracts import Array
from etude.envs.mujoco.batch import Terms
from etude.motion import metrics

ERRORS = ("mpjpe_g", "mpjpe_l", "mpjpe_pa", "vel_dist", "accel_dist")
STRICT = 0.25
"""m: the stricter bound that a whole episode may be held against."""


@dataclass(frozen=True)
class ImitationView:
    """What the terms see: [rows] float64 each, live."""

    position_error: Array
    """m^2: mean over bodies of the squared distance to the reference."""
    turn_error: Array
    """rad^2: likewise of the angle."""
    velocity_error: Array
    """(m/s)^2."""
    spin_error: Array
    """(rad/s)^2."""
    mean_distance: Array
    """m: mean over bodies."""
    largest_distance: Array
    """m: of the farthest body."""
    height: Array
    """m: of the root."""
    travelled: Array
    """m: from where the episode began to the root, along the floor."""
    effort: Array
    """Mean square of the action."""
    motion: Array
    """Which clip is imitated."""
    progress: Array
    """Share of the episode that has passed."""
    ended: Array
    """bool: a termination has struck."""
    errors: Array
    """[5, rows] mm: means over the episode so far of `ERRORS`."""
    worst: Array
    """m: the largest mean distance so far in the episode."""
    first_worst: Array
    """m: likewise, up to when the clip first came to its end."""
    once: Array
    """bool: it has come to its end once."""


def empty_view(rows: int) -> ImitationView:
    """A view of so many rows, all zero."""

    def numbers() -> Array:
        return np.zeros(rows)

    return ImitationView(
        position_error=numbers(),
        turn_error=numbers(),
        velocity_error=numbers(),
        spin_error=numbers(),
        mean_distance=numbers(),
        largest_distance=numbers(),
        height=numbers(),
        travelled=numbers(),
        effort=numbers(),
        motion=np.zeros(rows, np.int64),
        progress=numbers(),
        ended=np.zeros(rows, np.bool_),
        errors=np.zeros((len(ERRORS), rows)),
        worst=numbers(),
        first_worst=numbers(),
        once=np.zeros(rows, np.bool_),
    )


def _near(error: Callable[[ImitationView], Array], rate: float) -> Callable[[ImitationView], Array]:
    """1 without an error, 0.37 where it is 1 / rate."""
    return lambda view: np.exp(-rate * error(view))


def effort(view: ImitationView) -> Array:
    return view.effort


def _far(bound: float) -> Callable[[ImitationView], Array]:
    return lambda view: view.largest_distance > bound


def _astray(bound: float) -> Callable[[ImitationView], Array]:
    return lambda view: view.mean_distance > bound


def _fallen(bound: float) -> Callable[[ImitationView], Array]:
    return lambda view: view.height < bound


def _error(index: int) -> Callable[[ImitationView], Array]:
    return lambda view: view.errors[index]


def imitation_terms(
    far: float | None, astray: float | None, low: float | None, sharpness: float, measure: bool
) -> Terms[ImitationView]:
    """Terms with the terminations that have a bound, and the errors where they are measured.

    At sharpness 1 a reward has fallen to 0.37 where bodies are 10 cm off, or turned by 18 degrees.
    """
    bounds = {"far": (_far, far), "astray": (_astray, astray), "fallen": (_fallen, low)}
    statistics: dict[str, Callable[[ImitationView], Array]] = {
        "motion": lambda view: view.motion,
        "progress": lambda view: view.progress,
    }
    if measure:
        statistics |= {name: _error(index) for index, name in enumerate(ERRORS)}
        statistics["travelled"] = lambda view: view.travelled
        statistics["success_25"] = lambda view: ~view.ended & (view.worst <= STRICT)
        statistics["once"] = lambda view: view.once
        statistics["once_25"] = lambda view: view.once & (view.first_worst <= STRICT)
    return Terms(
        observations={},
        rewards={
            "position": _near(lambda view: view.position_error, 100.0 * sharpness),
            "turn": _near(lambda view: view.turn_error, 10.0 * sharpness),
            "velocity": _near(lambda view: view.velocity_error, 0.1),
            "spin": _near(lambda view: view.spin_error, 0.1),
            "effort": effort,
        },
        terminations={
            name: make(bound) for name, (make, bound) in bounds.items() if bound is not None
        },
        success=lambda view: ~view.ended,
        statistics=statistics,
    )


class ErrorMeter:
    """Means of `ERRORS` over each row's open episode."""

    def __init__(self, view: ImitationView, rows: int, bodies: int) -> None:
        self._view = view
        self._sums = np.zeros((rows, len(ERRORS)))
        self._last = np.zeros((rows, 2, 2, bodies, 3))
        """[rows, frames ago - 1, (figure, reference), bodies, 3]."""

    def begin(self, rows: Array, figure: Array, reference: Array) -> None:
        """Rows [k] start with bodies [k, bodies, 3]."""
        self._sums[rows] = 0.0
        self._view.errors[:, rows] = 0.0
        self._view.worst[rows] = self._view.first_worst[rows] = 0.0
        self._last[rows, :, 0] = figure[:, None]
        self._last[rows, :, 1] = reference[:, None]

    def add(self, figure: Array, reference: Array, steps: Array, cycles: Array) -> None:
        """One more frame of all rows, [rows, bodies, 3] each, steps [rows] after the start.

        cycles: [rows] the steps after which a clip has come to its end.
        """
        view = self._view
        one, two = self._last[:, 0], self._last[:, 1]
        accelerates = steps >= 2
        found = (
            metrics.global_error(figure, reference),
            metrics.local_error(figure, reference),
            metrics.procrustes_error(figure, reference),
            metrics.velocity_error(one[:, 0], figure, one[:, 1], reference),
            metrics.acceleration_error(
                two[:, 0], one[:, 0], figure, two[:, 1], one[:, 1], reference
            )
            * accelerates,
        )
        self._sums += np.stack(found, axis=1)
        counts = np.maximum(steps, 1)
        view.errors[:4] = self._sums[:, :4].T / counts
        view.errors[4] = self._sums[:, 4] / np.maximum(counts - 1, 1)
        np.maximum(view.worst, view.mean_distance, out=view.worst)
        np.copyto(view.first_worst, view.worst, where=steps <= cycles)
        np.copyto(view.once, (steps > cycles) | ((steps == cycles) & ~view.ended))
        self._last[:, 1] = self._last[:, 0]
        self._last[:, 0, 0], self._last[:, 0, 1] = figure, reference

    def memory(self) -> dict[str, Array]:
        """What decides the figures to come; live."""
        return {
            "error_sums": self._sums,
            "last_bodies": self._last,
            "worst": self._view.worst,
            "first_worst": self._view.first_worst,
        }
