"""The board: reducers, levels and the window of the last episodes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core import board as module
from etude.core.board import FEWEST, Aggregator, Board, EpisodeWindow, reducer_of
from etude.core.trees import copy_arrays


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_a_mean_is_a_mean(values: list[float]) -> None:
    aggregator = Aggregator()
    for value in values:
        aggregator.add("train/value_loss", value)
    assert aggregator.read()["train/value_loss"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize(
    ("kind", "expected"), [("mean", 2.0), ("last", 2.0), ("sum", 8.0), ("max", 4.0)]
)
def test_every_reducer(kind: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.REDUCERS, "test/", kind)
    aggregator = Aggregator()
    for value in (1.0, 4.0, 1.0, 2.0):
        aggregator.add("test/value", value)
    assert aggregator.read() == {"test/value": expected}


def test_names_have_reducers() -> None:
    assert reducer_of("train/learning_rate") == "last"
    assert reducer_of("eval/mean_reward") == "last"
    assert reducer_of("train/approx_kl") == "mean"


def test_a_cycle_starts_again_and_an_epoch_goes_on() -> None:
    board = Board()
    board.record({"train/x": 1.0})
    assert board.read_cycle() == {"train/x": 1.0}
    assert board.read_cycle() == {}
    board.record({"train/x": 4.0})
    assert board.read_cycle() == {"train/x": 4.0}
    assert board.read_epoch() == {"train/x": 2.5}
    assert board.read_epoch() == {}


def episodes(values: list[float]) -> dict[str, np.ndarray]:
    array = np.array(values)
    return {"return": array, "length": array * 2, "is_success": array % 2}


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=130), max_size=6), st.integers(0, 6))
def test_the_window_is_all_since_the_last_reading_and_at_least_a_hundred(
    parts: list[list[float]], cut: int
) -> None:
    """A reading comes after every second part."""
    window = EpisodeWindow(("is_success",))
    for i, part in enumerate(parts):
        if i == cut:
            state = copy_arrays(window.state_dict())
            window = EpisodeWindow(("is_success",))
            window.load_state_dict(state)
        window.add(episodes(part))
        if i % 2 and i < len(parts) - 1:
            window.reset()
    since = len([x for part in parts[(len(parts) - 1) // 2 * 2 :] for x in part])
    everything = [value for part in parts for value in part][-max(FEWEST, since) :]
    if not everything:
        assert window.read() == {}
        return
    found = window.read()
    assert found["rollout/ep_rew_mean"] == pytest.approx(np.mean(everything))
    assert found["rollout/ep_len_mean"] == pytest.approx(2 * np.mean(everything))
    assert found["rollout/success_rate"] == pytest.approx(np.mean(np.mod(everything, 2)))
    values = [value for part in parts for value in part]
    assert found["rollout/ep_rew_mean_100"] == pytest.approx(np.mean(values[-FEWEST:]))
    new = values[len(values) - since :]
    assert found["rollout/success_count"] == pytest.approx(np.sum(np.mod(new, 2)))


def test_every_group_counts_in_a_row() -> None:
    """Of 8,192 environments the last 100 episodes would be a sliver of the last group."""
    board = Board(("is_success",))
    for group in range(16):
        board.record_episodes(episodes([float(group)] * 512))
    assert board.read_cycle()["rollout/ep_rew_mean"] == 7.5
    board.record_episodes(episodes([100.0]))
    assert board.read_cycle()["rollout/ep_rew_mean"] == pytest.approx((99 * 15 + 100) / 100)
    # An epoch goes on over its cycles.
    expected = (7.5 * 16 * 512 + 100) / (16 * 512 + 1)
    assert board.read_epoch()["rollout/ep_rew_mean"] == pytest.approx(expected)


def test_a_checkpoint_of_the_window_has_one_size() -> None:
    window = EpisodeWindow(("is_success",))
    before = window.state_dict()["last"].nbytes
    window.add(episodes(list(range(250))))
    assert window.state_dict()["last"].nbytes == before == 3 * FEWEST * 8


def test_open_metrics_survive_a_state_round_trip() -> None:
    def fill(board: Board, first: int, last: int) -> None:
        for i in range(first, last):
            board.record({"train/x": 0.1 * i, "eval/mean_reward": float(i)})
            board.record_episodes(episodes([0.3 * i]))
            if i % 3 == 2:
                board.read_cycle()

    one, two = Board(("is_success",)), Board(("is_success",))
    fill(one, 0, 8)
    state = copy_arrays(one.state_dict())
    for level in ("cycle", "epoch"):
        state[level]["metrics"] = json.loads(json.dumps(state[level]["metrics"]))
    two.load_state_dict(state)
    fill(one, 8, 10)
    fill(two, 8, 10)
    assert one.read_epoch() == two.read_epoch()
    assert one.read_cycle() == two.read_cycle()
