from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.contracts import Array
from etude.data.motion import rotations as rot


def quaternions(seed: int, *shape: int) -> Array:
    return rot.normalise(np.random.default_rng(seed).normal(size=(*shape, 4)))


def matrix(quaternion: Array) -> Array:
    """[3, 3] by the textbook formula."""
    w, x, y, z = quaternion
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def test_products_and_turned_vectors_are_those_of_matrices() -> None:
    one, two = quaternions(0, 20), quaternions(1, 20)
    vectors = np.random.default_rng(2).normal(size=(20, 3))
    for a, b, v, product, turned, axes in zip(
        one, two, vectors, rot.multiply(one, two), rot.rotate(one, vectors), rot.two_axes(one),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(matrix(product), matrix(a) @ matrix(b), atol=1e-12)
        np.testing.assert_allclose(turned, matrix(a) @ v, atol=1e-12)
        np.testing.assert_allclose(axes, matrix(a)[:, [0, 2]].T.ravel(), atol=1e-12)
    np.testing.assert_allclose(rot.cross(vectors, vectors[::-1]), np.cross(vectors, vectors[::-1]))


@given(seed=st.integers(0, 2**32), angle=st.floats(0, np.pi - 1e-6))
def test_log_and_exp_undo_each_other(seed: int, angle: float) -> None:
    axis = np.random.default_rng(seed).normal(size=3)
    vector = axis / np.linalg.norm(axis) * angle
    back = rot.log(rot.exp(vector))
    np.testing.assert_allclose(back, vector, atol=1e-9)
    np.testing.assert_allclose(rot.log(-rot.exp(vector)), vector, atol=1e-9)


def test_the_smallest_rotations_are_kept() -> None:
    for size in (0.0, 1e-300, 1e-13, 1e-8):
        np.testing.assert_allclose(rot.log(rot.exp(np.array([size, 0, 0])))[0], size, rtol=1e-6)


def test_slerp_goes_the_shorter_way_at_an_even_rate() -> None:
    one, two = quaternions(3, 50), quaternions(4, 50)
    whole = rot.angle_between(one, two)
    for share in (0.0, 0.3, 1.0):
        between = rot.slerp(one, two, np.full(50, share))
        np.testing.assert_allclose(rot.angle_between(one, between), share * whole, atol=1e-6)
    assert whole.max() <= np.pi


@pytest.mark.parametrize("angle", [-3.0, -1.0, 0.0, 0.5, 3.1])
def test_a_heading_is_the_turn_before_a_tilt(angle: float) -> None:
    axis = np.random.default_rng(5).normal(size=(30, 3))
    axis[:, 2] = 0.0
    tilt = rot.exp(
        axis / np.linalg.norm(axis, axis=1, keepdims=True) * np.linspace(0, 3, 30)[:, None]
    )
    turned = rot.multiply(rot.about_z(np.full(30, angle)), tilt)
    off = (rot.heading(turned) - angle + np.pi) % (2 * np.pi) - np.pi
    np.testing.assert_allclose(off, 0, atol=1e-9)
    cosine, sine = rot.heading_free(turned)
    np.testing.assert_allclose(cosine, np.cos(angle), atol=1e-9)
    np.testing.assert_allclose(sine, -np.sin(angle), atol=1e-9)
    vector = np.broadcast_to([1.0, 2.0, 3.0], (30, 3))
    there = rot.rotate(rot.about_z(np.full(30, angle)), vector)
    np.testing.assert_allclose(rot.turn(there, cosine, sine), vector, atol=1e-9)


def test_upside_down_has_no_heading_and_no_nan() -> None:
    cosine, sine = rot.heading_free(np.array([[0.0, 1.0, 0.0, 0.0]]))
    assert (cosine[0], sine[0]) == (1.0, 0.0)
