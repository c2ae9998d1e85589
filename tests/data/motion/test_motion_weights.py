"""No motion ever has probability zero, whatever happened; averages are per motion first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.motion.metrics import by_motion, only_successes
from etude.training.curriculum import floor, motion_weights, remember


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[float]]]]:
    """A number of motions, and evaluations: which motions were played, and which succeeded."""
    num = draw(st.integers(1, 40))
    evaluations = []
    for _ in range(draw(st.integers(0, 6))):
        played = draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=60))
        success = draw(
            st.lists(st.sampled_from([0.0, 1.0]), min_size=len(played), max_size=len(played))
        )
        evaluations.append((played, success))
    return num, evaluations


@settings(max_examples=300, deadline=None)
@given(histories(), st.floats(0.0, 0.999), st.floats(0.0, 0.999), st.integers(0, 2000))
def test_every_motion_keeps_its_floor(
    history: tuple[int, list[tuple[list[int], list[float]]]], mix: float, decay: float, later: int
) -> None:
    num, evaluations = history
    failures = np.zeros(num)
    for played, success in evaluations:
        failures = remember(failures, np.array(played, float), np.array(success), decay)
        failures = failures * decay**later  # After many evaluations without a failure.
        assert ((failures >= 0) & (failures <= 1)).all()
        weights = motion_weights(failures, mix)
        assert weights.shape == (num,)
        assert (weights >= floor(num, mix)).all()
        assert floor(num, mix) > 0
        assert weights.sum() == pytest.approx(1.0, abs=1e-12)


def test_a_history_by_hand() -> None:
    """Played twice, once and not at all; half of the past stays."""
    failures = remember(
        np.array([0.0, 1.0, 0.4]), np.array([0.0, 1.0, 0.0]), np.array([0.0, 1.0, 1.0]), 0.5
    )
    assert failures.tolist() == [0.25, 0.5, 0.4]


def test_weights_by_hand() -> None:
    always = motion_weights(np.array([1.0, 0.0, 1.0, 0.0]), 0.5)
    assert always.tolist() == [0.375, 0.125, 0.375, 0.125]
    one = motion_weights(np.array([1.0, 0.0, 0.0, 0.0]), 0.5)
    assert one.tolist() == [0.625, 0.125, 0.125, 0.125]
    assert motion_weights(np.zeros(4), 0.5).tolist() == [0.25] * 4
    assert motion_weights(np.ones(4), 0.5).tolist() == [0.25] * 4


def test_what_failed_once_long_ago_does_not_take_everything() -> None:
    weights = motion_weights(np.array([1e-6, 0.0, 0.0, 0.0]), 0.9)
    assert weights == pytest.approx([0.25] * 4, abs=1e-6)


def test_averages_are_per_motion_first() -> None:
    episodes = {
        "motion": np.array([4.0, 1.0, 1.0, 1.0]),
        "is_success": np.array([1.0, 0.0, 1.0, 0.0]),
        "mpjpe_l": np.array([10.0, 40.0, 20.0, 90.0]),
    }
    means = by_motion(episodes)
    assert means["motion"].tolist() == [1.0, 4.0]
    assert means["mpjpe_l"].tolist() == [50.0, 10.0]
    assert means["is_success"] == pytest.approx([1 / 3, 1.0])
    assert by_motion(only_successes(episodes))["mpjpe_l"].tolist() == [20.0, 10.0]
