"""No motion ever has probability zero, whatever happened; averages are per motion first."""

from __future__ import annotations

import numpy as np
import pytest

from etude.data.motion.metrics import by_motion, only_successes
from etude.training.practice import practice_weights


def test_weights_by_hand() -> None:
    always = practice_weights(np.array([1.0, 0.0, 1.0, 0.0]), 0.5)
    assert always.tolist() == [0.375, 0.125, 0.375, 0.125]
    one = practice_weights(np.array([1.0, 0.0, 0.0, 0.0]), 0.5)
    assert one.tolist() == [0.625, 0.125, 0.125, 0.125]
    assert practice_weights(np.zeros(4), 0.5).tolist() == [0.25] * 4
    assert practice_weights(np.ones(4), 0.5).tolist() == [0.25] * 4


def test_what_failed_once_long_ago_does_not_take_everything() -> None:
    weights = practice_weights(np.array([1e-6, 0.0, 0.0, 0.0]), 0.9)
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
