"""Scores of imitation, averaged per motion first, so that no motion counts more than another."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array

ERRORS = ("mpjpe_g", "mpjpe_l", "mpjpe_pa", "vel_dist", "accel_dist")
"""Statistics of an episode that say how far it was from its motion, after `motion.metrics`."""


def by_motion(episodes: dict[str, Array]) -> dict[str, Array]:
    """Means over the episodes of each motion: {name: [episodes]} to {name: [motions]}.

    The motions are those in "motion" [episodes], by number, ascending.
    """
    numbers, place = np.unique(episodes["motion"], return_inverse=True)
    counts = np.bincount(place, minlength=len(numbers))
    return {
        name: np.bincount(place, weights=values, minlength=len(numbers)) / counts
        for name, values in episodes.items()
    }


def only_successes(episodes: dict[str, Array]) -> dict[str, Array]:
    """The episodes that succeeded, {name: [k]}."""
    won = episodes["is_success"] > 0
    return {name: values[won] for name, values in episodes.items()}
