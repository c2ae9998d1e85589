"""Errors of imitation, on cases worked out by hand and against an independent alignment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.core.contracts import Array
from etude.data.motion.metrics import (
    acceleration_error,
    global_error,
    local_error,
    procrustes_error,
    velocity_error,
)

# A root, two points a metre from it and one two metres from it.
FIGURE = np.array([[0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 3.0]])


def about_z(angle: float) -> Array:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])


def test_a_constant_offset_is_only_a_global_error() -> None:
    moved = FIGURE + np.array([0.3, 0.0, 0.4])
    assert global_error(moved, FIGURE) == pytest.approx(500.0)
    assert local_error(moved, FIGURE) == pytest.approx(0.0, abs=1e-9)
    assert procrustes_error(moved, FIGURE) == pytest.approx(0.0, abs=1e-9)


def test_a_turn_about_the_root_moves_each_body_by_its_chord() -> None:
    """A quarter turn: the two bodies a metre off the axis move sqrt(2) m, the others stay."""
    root = FIGURE[0]
    turned = (FIGURE - root) @ about_z(np.pi / 2).T + root
    assert local_error(turned, FIGURE) == pytest.approx(2 * np.sqrt(2.0) / 4 * 1000.0)
    assert global_error(turned, FIGURE) == pytest.approx(2 * np.sqrt(2.0) / 4 * 1000.0)
    assert procrustes_error(turned, FIGURE) == pytest.approx(0.0, abs=1e-9)


def test_a_scale_moves_each_body_by_its_distance_from_the_root() -> None:
    """Twice the size about the root: distances 0, 1, 1 and 2 m, so 1 m on average."""
    grown = 2.0 * (FIGURE - FIGURE[0]) + FIGURE[0]
    assert local_error(grown, FIGURE) == pytest.approx(1000.0)
    assert procrustes_error(grown, FIGURE) == pytest.approx(0.0, abs=1e-9)


def test_a_mirrored_figure_is_not_the_same_figure() -> None:
    """Also where a reflection would fit perfectly; a flat figure has no mirror image of its own."""
    mirror = np.array([-1.0, 1.0, 1.0])
    bent = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    assert procrustes_error(bent * mirror, bent) > 100.0
    flat = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    assert procrustes_error(flat * mirror, flat) == pytest.approx(0.0, abs=1e-9)


def test_a_time_shift_of_an_accelerated_motion_is_an_error_of_velocity_only() -> None:
    """x = a t^2 / 2, shifted by s frames: steps differ by a s, second differences not at all."""
    a, shift = 0.02, 3

    def at(t: int) -> Array:
        return FIGURE + np.array([a * t * t / 2, 0.0, 0.0])

    p, q = [at(t + shift) for t in range(3)], [at(t) for t in range(3)]
    assert velocity_error(p[0], p[1], q[0], q[1]) == pytest.approx(1000.0 * a * shift)
    assert acceleration_error(*p, *q) == pytest.approx(0.0, abs=1e-9)
    assert global_error(p[1], q[1]) == pytest.approx(1000.0 * a * ((1 + shift) ** 2 - 1) / 2)


def test_standing_still_misses_the_whole_acceleration() -> None:
    q = [FIGURE + np.array([0.0, 0.0, 0.01 * t * t / 2]) for t in range(3)]
    assert acceleration_error(FIGURE, FIGURE, FIGURE, *q) == pytest.approx(10.0)


def test_only_some_bodies_off_count_by_the_mean() -> None:
    p = FIGURE.copy()
    p[3] += np.array([0.0, 0.0, 0.1])
    assert global_error(p, FIGURE) == pytest.approx(25.0)
    p = FIGURE.copy()
    p[0] += np.array([0.0, 0.1, 0.0])  # The root alone: seen from it all the others are off.
    assert local_error(p, FIGURE) == pytest.approx(75.0)


@pytest.mark.parametrize("error", [global_error, local_error, procrustes_error])
def test_any_number_of_axes_in_front(error: Callable[[Array, Array], Array]) -> None:
    p, q = np.random.default_rng(0).normal(size=(2, 5, 7, 4, 3))
    together = error(p, q)
    assert together.shape == (5, 7)
    one = error(p[3, 2], q[3, 2])
    assert together[3, 2] == pytest.approx(float(one))


@pytest.mark.parametrize("scale", [0.0, 1e-200])
def test_figures_without_size_or_on_a_line_give_numbers(scale: float) -> None:
    point = np.zeros_like(FIGURE) + np.array([1.0, 2.0, 3.0])
    line = np.arange(4.0)[:, None] * np.array([1.0, 2.0, 2.0]) * scale
    straight = np.arange(4.0)[:, None] * np.array([3.0, 0.0, 0.0])
    for p in (point, line):
        for q in (point, line, FIGURE):
            assert np.isfinite(procrustes_error(p, q))
    spread = np.linalg.norm(FIGURE - FIGURE.mean(axis=0), axis=-1).mean() * 1000.0
    assert procrustes_error(point, FIGURE) == pytest.approx(spread)
    long = np.arange(4.0)[:, None] * np.array([0.0, 2.0, 0.0])
    assert procrustes_error(long, straight) == pytest.approx(0.0, abs=1e-6)


def horn(p: Array, q: Array) -> Array:
    """The best proper rotation by the largest eigenvector of Horn's quaternion matrix."""
    s = p.T @ q
    matrix = np.empty((4, 4))
    matrix[0, 0] = np.trace(s)
    matrix[0, 1:] = matrix[1:, 0] = s[1, 2] - s[2, 1], s[2, 0] - s[0, 2], s[0, 1] - s[1, 0]
    matrix[1:, 1:] = s + s.T - np.trace(s) * np.eye(3)
    w, x, y, z = np.linalg.eigh(matrix)[1][:, -1]
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def squares(p: Array, q: Array, rotation: Array) -> float:
    """Summed squares left by a rotation with the scale that suits it best, never a mirror's."""
    turned = p @ rotation.T
    scale = max((turned * q).sum() / max((p * p).sum(), 1e-300), 0.0)
    return float(np.square(scale * turned - q).sum())


points = hnp.arrays(np.float64, (6, 3), elements=st.integers(-8, 8).map(lambda n: n / 4.0))


@settings(max_examples=100, deadline=None)
@given(points, points, st.integers(0, 2**31))
def test_the_alignment_is_the_best_there_is(p: Array, q: Array, seed: int) -> None:
    """As good as Horn's quaternion solution, and no random rotation is better."""
    a, b = p - p.mean(axis=0), q - q.mean(axis=0)
    rotation = horn(a, b)
    best = squares(a, b, rotation)
    mine = procrustes_error(p, q)
    # The mean of norms is at most the root of the mean square, for the same alignment.
    assert mine <= np.sqrt(best / 6) * 1000.0 + 1e-6
    values = np.linalg.svd(a.T @ b)[1]
    if values[1] > 1e-3 and values[1] - values[2] > 1e-3:  # One best rotation only.
        scale = (a @ rotation.T * b).sum() / (a * a).sum()
        left = np.linalg.norm(scale * a @ rotation.T - b, axis=-1).mean() * 1000.0
        assert mine == pytest.approx(float(left), abs=1e-6)
    quaternions = np.random.default_rng(seed).normal(size=(200, 4))
    for w, x, y, z in quaternions / np.linalg.norm(quaternions, axis=-1, keepdims=True):
        skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
        assert squares(a, b, np.eye(3) + 2 * w * skew + 2 * skew @ skew) >= best - 1e-9
