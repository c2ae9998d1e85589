"""The clock against a simulation that counts one iteration at a time."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.core.clock import Clock, ClockConfig, Counters, Interval, Loops
from etude.core.errors import UsageError

UNITS = ("timesteps", "updates", "iterations", "cycles", "epochs")

nests = st.builds(
    Loops,
    iterations=st.integers(1, 60),
    iterations_per_cycle=st.integers(1, 7),
    cycles_per_epoch=st.integers(1, 5),
    steps_per_iteration=st.integers(0, 40),
    batches_per_iteration=st.integers(0, 9),
    idle_iterations=st.integers(0, 8),
)
intervals = st.builds(Interval, st.integers(0, 50), st.sampled_from(UNITS))


def counted_by_hand(nest: Loops) -> list[Counters]:
    """Counters after every iteration, from nested loops that close a level when it is full."""
    history, cycles, epochs, in_cycle, in_epoch = [Counters()], 0, 0, 0, 0
    for i in range(1, nest.iterations + 1):
        in_cycle += 1
        last = i == nest.iterations
        if in_cycle == nest.iterations_per_cycle or last:
            cycles, in_cycle, in_epoch = cycles + 1, 0, in_epoch + 1
            if in_epoch == nest.cycles_per_epoch or last:
                epochs, in_epoch = epochs + 1, 0
        steps = i * nest.steps_per_iteration
        updates = sum(_learned(nest, j) for j in range(i))
        history.append(Counters(i, cycles, epochs, steps, updates))
    return history


def _learned(nest: Loops, iteration: int) -> int:
    return nest.batches_per_iteration if iteration >= nest.idle_iterations else 0


def run(nest: Loops) -> list[tuple[Counters, Clock]]:
    clock, seen = Clock(nest), []
    while not clock.finished:
        clock.advance(_learned(nest, clock.now.iterations), 1)
        copy = Clock(nest)
        copy.load_state_dict(json.loads(json.dumps(clock.state_dict())))
        seen.append((clock.now, copy))
    return seen


@given(nests)
def test_counters_equal_nested_loops(nest: Loops) -> None:
    expected = counted_by_hand(nest)
    assert [nest.at(i) for i in range(nest.iterations + 1)] == expected
    assert [now for now, _ in run(nest)] == expected[1:]
    assert nest.total == expected[-1]


@given(nests, intervals, st.booleans())
def test_times_due_equals_a_simulation(nest: Loops, interval: Interval, also_last: bool) -> None:
    history = counted_by_hand(nest)
    times = 0
    for i in range(nest.iterations):
        before, after = (getattr(history[j], interval.unit) for j in (i, i + 1))
        due = any(interval.count and n % interval.count == 0 for n in range(before + 1, after + 1))
        assert history[i].is_due(interval, history[i + 1]) == due
        times += due or (also_last and i == nest.iterations - 1)
    assert nest.times_due(interval, also_last) == times


@given(nests, intervals)
def test_due_survives_a_state_round_trip(nest: Loops, interval: Interval) -> None:
    clock = Clock(nest)
    for _, copy in run(nest):
        clock.advance(_learned(nest, clock.now.iterations), 1)
        assert copy.is_due(interval) == clock.is_due(interval)
        assert (copy.cycle_ended, copy.epoch_ended) == (clock.cycle_ended, clock.epoch_ended)
        assert (copy.now, copy.before, copy.episodes) == (clock.now, clock.before, clock.episodes)
        assert copy.progress == clock.progress


def test_a_short_last_cycle_and_epoch_still_end() -> None:
    nest = Loops(7, 3, 2, 10, 4)
    ends = [(c.cycle_ended, c.epoch_ended) for _, c in run(nest)]
    assert [i for i, (cycle, _) in enumerate(ends, 1) if cycle] == [3, 6, 7]
    assert [i for i, (_, epoch) in enumerate(ends, 1) if epoch] == [6, 7]
    assert astuple(nest.total) == (7, 3, 2, 70, 28)


def test_updates_that_were_skipped_are_not_counted() -> None:
    clock = Clock(Loops(3, 1, 1, 10, 8))
    for updates in (8, 3, 8):
        clock.advance(updates, 0)
    assert clock.now.updates == 19


def test_progress_goes_from_zero_to_one() -> None:
    clock = Clock(Loops(4, 1, 1, 1, 1))
    seen = []
    while not clock.finished:
        seen.append(clock.progress)
        clock.advance(1, 0)
    assert seen == [0.0, 0.25, 0.5, 0.75]
    assert clock.progress == 1.0


def test_ten_thousand_million_steps() -> None:
    nest = Loops.of(ClockConfig(total_timesteps=10**10, cycles=10, iterations=4), 524_288, 32)
    assert nest.iterations == 19_073
    assert nest.total.timesteps == 19_073 * 524_288 == 9_999_745_024
    assert (nest.total.cycles, nest.total.epochs) == (4_769, 477)
    assert nest.times_due(Interval.parse("50,000,000 steps")) == 9_999_745_024 // 50_000_000


def test_counters_are_exact_far_beyond_32_bits() -> None:
    nest = Loops(10**13, 3, 7, 524_288, 320)
    clock = Clock(nest)
    clock.before, clock.now, clock.episodes = nest.at(10**13 - 3), nest.at(10**13 - 2), 10**13
    clock.advance(320, 2)
    clock = _again(clock)
    assert clock.now.timesteps == (10**13 - 1) * 524_288
    assert clock.now.updates == (10**13 - 1) * 320
    clock.advance(320, 1)
    assert clock.finished
    assert clock.epoch_ended
    assert clock.episodes == 10**13 + 3
    assert nest.times_due(Interval(1, "timesteps")) == 10**13
    assert nest.times_due(Interval(10**9, "timesteps")) == 10**13 * 524_288 // 10**9


def _again(clock: Clock) -> Clock:
    copy = Clock(clock.loops)
    copy.load_state_dict(json.loads(json.dumps(clock.state_dict())))
    return copy


@given(nests, st.integers(1, 60))
def test_a_run_that_is_extended_counts_as_one_of_that_length(nest: Loops, more: int) -> None:
    longer = replace(nest, iterations=nest.iterations + more)
    clock = Clock(nest)
    while not clock.finished:
        clock.advance(_learned(nest, clock.now.iterations), 1)
    clock.continue_to(longer)
    assert clock.now == counted_by_hand(longer)[nest.iterations]
    while not clock.finished:
        clock.advance(_learned(nest, clock.now.iterations), 1)
    assert clock.now == longer.total


@given(nests, st.integers(1, 60))
def test_a_run_that_is_ended_early_counts_as_one_of_that_length(nest: Loops, done: int) -> None:
    shorter = replace(nest, iterations=min(done, nest.iterations))
    clock = Clock(nest)
    for _ in range(shorter.iterations):
        clock.advance(_learned(nest, clock.now.iterations), 1)
    clock.end_here()
    assert clock.finished
    assert clock.cycle_ended
    assert clock.epoch_ended
    assert clock.now == shorter.total
    assert _again(clock).finished  # and a resume agrees


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("50000 steps", 50_000, "timesteps"),
        ("1_000_000 steps", 1_000_000, "timesteps"),
        ("50,000 steps", 50_000, "timesteps"),
        ("1 step", 1, "timesteps"),
        ("10 updates", 10, "updates"),
        ("3iterations", 3, "iterations"),
        ("1 cycle", 1, "cycles"),
        ("2  epochs", 2, "epochs"),
        ("never", 0, "timesteps"),
    ],
)
def test_intervals_are_read(text: str, count: int, unit: str) -> None:
    assert Interval.parse(text) == Interval(count, unit)


@pytest.mark.parametrize(
    "text", ["", "steps", "5", "-5 steps", "1.5 epochs", "5 calls", "0 steps", "5 stepss", "always"]
)
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="interval"):
        Interval.parse(text)


def test_never_is_never_due() -> None:
    never = Interval.parse("never")
    assert not any(copy.is_due(never) for _, copy in run(Loops(9, 2, 2, 5, 5)))
    assert Loops(9, 2, 2, 5, 5).times_due(never, also_last=True) == 1


@pytest.mark.parametrize("lengths", [{}, {"total_timesteps": 10, "epochs": 1}])
def test_exactly_one_length_is_given(lengths: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="either"):
        ClockConfig(**lengths)


def test_a_budget_is_rounded_down_to_whole_iterations() -> None:
    assert Loops.of(ClockConfig(total_timesteps=99), 10, 1).iterations == 9
    assert Loops.of(ClockConfig(epochs=2, cycles=3, iterations=4), 10, 1).iterations == 24
    with pytest.raises(UsageError, match="at least"):
        Loops.of(ClockConfig(total_timesteps=9), 10, 1)


def test_a_budget_of_offline_learning_is_in_updates() -> None:
    assert Loops.of(ClockConfig(total_timesteps=9), 0, 2).iterations == 4
    with pytest.raises(UsageError, match="one iteration of 10 gradient updates"):
        Loops.of(ClockConfig(total_timesteps=9), 0, 10)
