"""Collection ahead: which weights collect what is a number, whoever is faster."""

from __future__ import annotations

import time
from threading import Event
from typing import Any

import numpy as np
import pytest

from etude.core.contracts import Array, Broadcast, Fragment, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays, digest
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.models.policies import PolicyConfig, make_policy
from etude.rollout.local import LocalCollector, OverlappedCollector, Workers
from toy_envs import ToyEnv
from toys import fragment_bits

GROUPS, ROWS, STEPS, HORIZON = 3, 2, 8, 4
SMALL = PolicyConfig(kind="lstm", hidden=(4,), units=3)


class Recorder:
    """A collector that gives nothing but its iteration, and notes what it was asked.

    It waits with the iteration `hold` until `go` is set, and fails in the iteration `fails`.
    """

    def __init__(self, hold: int | None = None, fails: int | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.count = 0
        self.hold, self.fails, self.go = hold, fails, Event()
        self.holding = Event()

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        self.asked.append((iteration, broadcast.version))
        if iteration == self.hold:
            self.holding.set()
            assert self.go.wait(60)
        if iteration == self.fails:
            raise ValueError("the simulator is gone")
        self.count += 1
        return [iteration]  # type: ignore[list-item]

    def state_dict(self) -> Tree:
        return {"groups": {"count": self.count}}

    def load_state_dict(self, state: Tree) -> None:
        self.count = state["groups"]["count"]

    def close(self) -> None:
        self.go.set()


def sent(version: int) -> Broadcast:
    """As the learner at the start of that iteration would."""
    policy = make_policy(SMALL, ToyEnv(1).spec, Key(version, ("weights",)))
    return Broadcast(version, dict(policy.state_dict()), {"level": version})


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_each_iteration_is_collected_with_the_weights_of_the_one_before(iterations: int) -> None:
    inner = Recorder()
    ahead = OverlappedCollector(inner, lambda i: i < iterations)
    for i in range(iterations):
        assert ahead.collect(Broadcast(i, {}), i) == [i]
    ahead.close()
    assert inner.asked == [(i, max(i - 1, 0)) for i in range(iterations)]


def test_the_next_is_under_way_while_this_one_trains() -> None:
    inner = Recorder(hold=1)
    ahead = OverlappedCollector(inner, lambda i: i < 2)
    assert ahead.collect(Broadcast(0, {}), 0) == [0]
    assert inner.holding.wait(60)  # It began by itself, and this thread did not wait for it.
    during = ahead.state_dict()
    assert during["groups"] == {"count": 1}
    assert during["broadcast"] == {"version": 0, "policy": {}, "curriculum": {}}
    inner.go.set()
    assert ahead.collect(Broadcast(1, {}), 1) == [1]
    assert inner.asked == [(0, 0), (1, 0)]
    assert ahead.state_dict()["groups"] == {"count": 2}
    assert ahead.state_dict()["broadcast"]["version"] == 1
    ahead.close()


def test_the_state_is_what_the_flight_started_from_though_it_has_landed() -> None:
    inner = Recorder()
    ahead = OverlappedCollector(inner, lambda i: True)
    assert ahead.state_dict() == {"groups": {"count": 0}, "broadcast": {}}
    ahead.collect(Broadcast(0, {}), 0)
    assert ahead._flight is not None
    ahead._flight.result()
    state = ahead.state_dict()
    assert inner.state_dict() == {"groups": {"count": 2}}
    assert state["groups"] == {"count": 1}
    again = Recorder()
    resumed = OverlappedCollector(again, lambda i: i < 2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert resumed.collect(Broadcast(1, {}), 1) == [1]
    assert again.asked == [(1, 0)]
    ahead.close()
    resumed.close()


def make(
    iterations: int, threads: int = 2, envs: list[Any] | None = None
) -> tuple[OverlappedCollector, LocalCollector]:
    """Real groups of toys with two buffers taking turns, for a run of so many iterations."""
    envs = envs or [ToyEnv(ROWS) for _ in range(GROUPS)]
    policy = make_policy(SMALL, envs[0].spec, None)
    contents = BufferSpec(envs[0].spec, policy.state_specs, GROUPS * ROWS, STEPS, HORIZON)
    buffers = [SegmentBuffer(contents) for _ in range(2)]
    parts = [[b.part(slice(g * ROWS, (g + 1) * ROWS)) for g in range(len(envs))] for b in buffers]
    inner = LocalCollector(envs, policy, Key(3), Workers(threads), parts)
    return OverlappedCollector(inner, lambda i: i < iterations), inner


def bits(fragments: list[Fragment]) -> list[str]:
    return [fragment_bits(fragment) for fragment in fragments]


def play(collector: OverlappedCollector, first: int, last: int) -> list[list[str]]:
    return [bits(collector.collect(sent(i), i)) for i in range(first, last)]


@pytest.fixture(scope="module")
def untouched() -> list[list[str]]:
    """A run of five iterations, written without the collector that is tested: a plain one is
    given the older weights."""
    _, plain = make(5, threads=1)
    found = [bits(plain.collect(sent(max(i - 1, 0)), i)) for i in range(5)]
    plain.close()
    assert len({digest for part in found for digest in part}) == 5 * GROUPS
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_a_run_is_a_plain_one_with_older_weights(threads: int, untouched: list[list[str]]) -> None:
    collector, _ = make(5, threads)
    assert play(collector, 0, 5) == untouched
    collector.close()


@pytest.mark.parametrize("boundary", range(6))
def test_loading_at_a_boundary_goes_on_the_same(boundary: int, untouched: list[list[str]]) -> None:
    one, _ = make(5)
    assert play(one, 0, boundary) == untouched[:boundary]
    state = one.state_dict()  # While a flight is under way, unless none is wanted any more.
    saved, marked = copy_arrays(state), digest(state)
    two, _ = make(5)
    two.load_state_dict(saved)
    assert digest(two.state_dict()) == marked
    assert play(two, boundary, 5) == untouched[boundary:]
    # The first goes on as well, and what it gave away has not moved under the flight.
    assert play(one, boundary, 5) == untouched[boundary:]
    assert digest(state) == marked
    assert digest(one.state_dict()) == digest(two.state_dict())
    one.close()
    two.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_longer_run_goes_on_where_a_shorter_one_ended(
    resumed: bool, untouched: list[list[str]]
) -> None:
    length = [3]
    collector = OverlappedCollector(make(0)[1], lambda i: i < length[0])
    assert play(collector, 0, 3) == untouched[:3]
    assert collector._flight is None
    length[0] = 5
    if resumed:
        other, _ = make(5)
        other.load_state_dict(copy_arrays(collector.state_dict()))
        collector.close()
        collector = other
    assert play(collector, 3, 5) == untouched[3:]
    collector.close()


def test_what_trains_is_not_written_over_by_what_is_collected() -> None:
    collector, _ = make(3)
    fragments = collector.collect(sent(0), 0)
    before = bits(fragments)
    assert collector._flight is not None
    collector._flight.result()
    assert bits(fragments) == before
    following = collector.collect(sent(1), 1)
    assert bits(following) != before
    assert not np.shares_memory(following[0].rewards, fragments[0].rewards)
    collector.close()


def test_a_failure_under_way_comes_up_at_the_next_collect() -> None:
    inner = Recorder(fails=1)
    collector = OverlappedCollector(inner, lambda i: True)
    assert collector.collect(Broadcast(0, {}), 0) == [0]
    state = collector.state_dict()  # A failure ahead does not spoil a save.
    assert state["groups"] == {"count": 1}
    with pytest.raises(ValueError, match="the simulator is gone"):
        collector.collect(Broadcast(1, {}), 1)
    assert len(inner.asked) == 2
    collector.close()


class Slow(ToyEnv):
    """A toy that takes `seconds` a step, and notes steps after its end."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.seconds, self.closed, self.late = 0.0, False, False
        self.started = Event()

    def step(self, actions: Array) -> StepResult:
        self.started.set()
        time.sleep(self.seconds)
        self.late |= self.closed
        return super().step(actions)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("threads", [1, 2])
def test_closing_does_not_wait_for_a_flight(threads: int) -> None:
    envs = [Slow() for _ in range(GROUPS)]
    collector, _ = make(9, threads, envs)
    collector.collect(sent(0), 0)
    assert collector._flight is not None
    collector._flight.result()
    for env in envs:
        env.seconds = 0.5
        env.started.clear()
    collector.collect(sent(1), 1)  # What it launches would take 24 steps of half a second.
    assert envs[0].started.wait(60)
    begin = time.monotonic()
    collector.close()
    assert time.monotonic() - begin < 3.0
    assert all(env.closed and not env.late for env in envs)


def test_closing_right_after_a_launch_or_before_the_first() -> None:
    for collections in (0, 1):
        collector, _ = make(5)
        play(collector, 0, collections)
        collector.close()
