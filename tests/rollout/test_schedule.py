"""The scheduling core: simulated workers that die, freeze, dawdle, repeat themselves and go."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.rollout import MOST_FAILURES
from etude.rollout.schedule import (
    COPY_AFTER,
    FADES,
    FIRST_PATIENCE,
    LEAST_COPY_AFTER,
    LEAST_PATIENCE,
    MOST_LOSSES,
    SLOWER,
    LostTooOften,
    Order,
    Patience,
    Schedule,
)

MASK = (1 << 61) - 1


def rollout(iteration: int, group: int, snapshot: int) -> int:
    """A pure function whose result shows every wrong turn on the way to it."""
    return (snapshot * 6364136223846793005 + iteration * 1442695040888963407 + group * 97) & MASK


def expected(groups: int, iterations: int) -> list[int]:
    snapshots = list(range(groups))
    for iteration in range(iterations):
        snapshots = [rollout(iteration, group, s) for group, s in enumerate(snapshots)]
    return snapshots


@dataclass
class Rates:
    """What happens to an order, as shares of all orders."""

    dies: float = 0.0
    freezes: float = 0.0
    dawdles: float = 0.0
    repeats: float = 0.0
    comes_and_goes: float = 0.0
    fails: float = 0.0


@dataclass
class Simulation:
    """Workers that hold what a real one holds, in a time of its own."""

    schedule: Schedule
    rates: Rates
    chance: random.Random
    now: float = 0.0
    events: list[tuple[float, int, str, int, Order | None]] = field(default_factory=list)
    held: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """{worker: {group: (iteration, snapshot)}}: where its environments stand."""
    snapshots: list[int] = field(default_factory=list)
    merged: list[list[int]] = field(default_factory=list)
    slow: dict[int, float] = field(default_factory=dict)
    """How many times slower than others a worker is."""
    sent: int = 0
    copied: int = 0
    looking: bool = False
    retried: int = 0
    accepted: int = 0
    ignored: int = 0
    lost: int = 0
    serial: count = field(default_factory=count)
    names: count = field(default_factory=count)

    def join(self) -> None:
        worker = next(self.names)
        self.held[worker] = {}
        self.schedule.join(worker)

    def push(self, delay: float, kind: str, worker: int, order: Order | None = None) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.serial), kind, worker, order))

    def issue(self) -> None:
        for order in self.schedule.orders(self.now):
            own, fate = self.held[order.worker], self.chance.random()
            assert order.send.isdisjoint(order.release)
            for group in order.release:
                own.pop(group, None)
            for group in order.groups:
                if group in order.send:
                    self.sent += 1
                    own[group] = (order.iteration - 1, self.snapshots[group])
                assert own[group][0] == order.iteration - 1, "it holds another iteration's"
            usual = self.chance.uniform(0.5, 1.5) * self.slow.get(order.worker, 1.0)
            rates = self.rates
            for share, kind, delay in (
                (rates.dies, "die", self.chance.uniform(0.0, usual)),
                (rates.freezes, "freeze", 0.0),
                (rates.dawdles, "answer", 100.0 * usual),
                (rates.fails, "fail", usual),
                (1.0, "answer", usual),
            ):
                if fate < share:
                    self.push(delay, kind, order.worker, order)
                    break
                fate -= share

    def answer(self, worker: int, order: Order) -> None:
        """All of an order's results, perhaps twice; from a worker that may be given up by now."""
        own = self.held[worker]
        results = {}
        for group in order.groups:
            iteration, snapshot = own[group]
            assert iteration == order.iteration - 1
            results[group] = rollout(order.iteration, group, snapshot)
            own[group] = (order.iteration, results[group])
        times = 2 if self.chance.random() < self.rates.repeats else 1
        for group, result in [*results.items()] * times:
            if self.schedule.take(worker, order.iteration, group, self.now):
                self.accepted += 1
                assert group not in self.fresh
                self.fresh[group] = result
            else:
                self.ignored += 1

    def happen(self) -> None:
        self.now, _, kind, worker, order = heapq.heappop(self.events)
        if kind == "answer":
            assert order is not None
            self.answer(worker, order)
        elif kind == "fail":
            assert order is not None
            worst = max(len(self.schedule.failed_at(group)) for group in order.groups)
            if worst + 1 >= MOST_FAILURES:  # It would be called the group's own fault.
                return self.answer(worker, order)
            for group in order.groups:
                self.held[worker].pop(group)
                came = (worker, order.iteration, group, self.now)
                retried = self.schedule.retry(*came)
                self.retried += retried
                assert retried or not self.schedule.take(*came)
        elif kind == "die" and worker in self.schedule.workers:
            self.lost += 1
            self.schedule.lose(worker)
            self.join()
        elif kind == "look":
            self.looking = False
            self.copied += sum(len(g) for _, g in self.schedule.stragglers(self.now))
            for late in self.schedule.overdue(self.now):
                self.lost += 1
                self.schedule.lose(late, late=True)
                self.join()

    def iterate(self, iteration: int) -> None:
        self.fresh: dict[int, int] = {}
        self.schedule.begin(iteration)
        if not iteration:
            self.schedule.forget()
        while not self.schedule.done:
            if self.chance.random() < self.rates.comes_and_goes:
                workers = self.schedule.workers
                if len(workers) > 1 and self.chance.random() < 0.5:
                    self.schedule.lose(self.chance.choice(workers))
                else:
                    self.join()
            self.issue()
            if not self.looking:
                self.push(1.0, "look", -1)
                self.looking = True
            if len(self.events) == 1:
                self.join()
            self.happen()
        self.snapshots = [self.fresh[group] for group in range(self.schedule.num_groups)]
        self.merged.append(list(self.snapshots))


def simulate(
    workers: int, groups: int, iterations: int, rates: Rates, seed: int, threads: int = 1
) -> Simulation:
    schedule = Schedule(groups, threads, Patience(20.0))
    simulation = Simulation(schedule, rates, random.Random(seed))
    simulation.snapshots = list(range(groups))
    for _ in range(workers):
        simulation.join()
    for iteration in range(iterations):
        simulation.iterate(iteration)
    return simulation


def test_ten_thousand_workers_of_which_some_die_in_every_iteration() -> None:
    workers, groups, iterations = 10_000, 20_000, 6
    rates = Rates(0.01, 0.001, dawdles=0.002, repeats=0.01, comes_and_goes=0.001, fails=0.002)
    start = time.process_time()
    one = simulate(workers, groups, iterations, rates, seed=1)
    seconds = time.process_time() - start
    assert one.snapshots == expected(groups, iterations)  # nothing lost, merged in group order
    assert one.accepted == groups * iterations  # nothing taken twice
    assert one.lost > 0.01 * workers * iterations * 0.8
    assert one.ignored > 0
    assert min(one.copied, one.retried) > 0.001 * workers * iterations
    assert one.sent < 0.05 * groups * iterations + groups  # snapshots stay where they are
    assert seconds < 30.0
    other = simulate(100, groups, iterations, Rates(), seed=2)
    assert other.merged == one.merged


@given(
    workers=st.integers(1, 9),
    groups=st.integers(1, 25),
    threads=st.integers(1, 3),
    shares=st.lists(st.floats(0.0, 0.2), min_size=6, max_size=6),
    seed=st.integers(0, 10_000),
)
def test_any_mixture_of_faults_gives_the_same_result(
    workers: int, groups: int, threads: int, shares: list[float], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # So many faults may well hit one group ten times, which is no fault of the group's here.
        patch.setattr("etude.rollout.schedule.MOST_LOSSES", 1_000)
        found = simulate(workers, groups, 4, Rates(*shares), seed, threads)
    assert found.snapshots == expected(groups, 4)
    assert found.accepted == groups * 4


def test_a_worker_ten_times_slower_holds_nobody_up() -> None:
    seconds = {}
    for factor in (1.0, 10.0):
        schedule = Schedule(8, 1, Patience())
        one = Simulation(schedule, Rates(), random.Random(0), slow={0: factor})
        one.snapshots = list(range(8))
        for _ in range(4):
            one.join()
        for iteration in range(20):
            one.iterate(iteration)
        assert one.snapshots == expected(8, 20)
        assert one.lost == 0
        seconds[factor] = one.now
        assert (one.copied > 0) == (factor > 1.0)
    # Three times the median and the copies on top, and only while it does not sit out.
    assert seconds[10.0] < 3.0 * seconds[1.0]


def answer(schedule: Schedule, order: Order, now: float = 1.0) -> list[bool]:
    return [schedule.take(order.worker, order.iteration, group, now) for group in order.groups]


def ready(groups: int, workers: int, threads: int = 1) -> Schedule:
    schedule = Schedule(groups, threads)
    for worker in range(workers):
        schedule.join(worker)
    schedule.begin(0)
    return schedule


def test_shares_are_even_and_groups_stay_where_they_are() -> None:
    schedule = ready(groups=10, workers=3)
    first = schedule.orders(0.0)
    assert sorted(len(order.groups) for order in first) == [3, 3, 4]
    assert all(order.send == set(order.groups) for order in first)
    assert schedule.orders(0.0) == []
    for order in first:
        assert all(answer(schedule, order))
    assert schedule.done
    schedule.begin(1)
    second = schedule.orders(2.0)
    assert {o.worker: o.groups for o in second} == {o.worker: o.groups for o in first}
    assert all(not order.send for order in second)


def test_a_newcomer_takes_its_share_and_nothing_else_moves() -> None:
    schedule = ready(groups=6, workers=2)
    for order in schedule.orders(0.0):
        answer(schedule, order)
    schedule.join(2)
    schedule.begin(1)
    orders = {order.worker: order for order in schedule.orders(1.0)}
    assert [len(orders[worker].groups) for worker in (0, 1, 2)] == [2, 2, 2]
    assert [len(orders[worker].send) for worker in (0, 1, 2)] == [0, 0, 2]
    for order in orders.values():
        answer(schedule, order)
    schedule.begin(2)
    released = {o.worker: o.release for o in schedule.orders(2.0)}
    assert released[0] | released[1] == set(orders[2].groups)


def test_the_groups_of_a_lost_worker_are_shared_out() -> None:
    schedule = ready(groups=6, workers=3)
    lost, *others = schedule.orders(0.0)
    assert schedule.lose(lost.worker) == lost.groups
    assert schedule.orders(0.1) == []  # the others are busy
    answer(schedule, others[0])
    (again,) = schedule.orders(1.0)
    assert (again.worker, len(again.groups)) == (others[0].worker, 1)  # not both: another is left
    answer(schedule, others[1])
    (rest,) = schedule.orders(1.0)
    assert set(again.groups + rest.groups) == set(lost.groups)
    assert rest.send == set(rest.groups)


def test_a_result_that_comes_late_or_twice_changes_nothing() -> None:
    schedule = ready(groups=2, workers=2)
    slow, quick = schedule.orders(0.0)
    answer(schedule, quick)
    schedule.lose(slow.worker, late=True)
    (again,) = schedule.orders(1.0)
    assert answer(schedule, slow) == [True]  # given up, but the first all the same
    assert schedule.done
    assert answer(schedule, again) == [False]
    assert answer(schedule, quick) == [False]
    schedule.begin(1)
    assert answer(schedule, quick) == [False]  # of the last iteration
    (order,) = schedule.orders(2.0)
    assert order.groups == (0, 1)
    assert order.send == set(slow.groups)  # what came from elsewhere is not in its environments


def test_a_worker_busy_with_what_is_not_wanted_any_more_comes_back() -> None:
    schedule = ready(groups=2, workers=2)
    slow, quick = schedule.orders(0.0)
    answer(schedule, quick)
    schedule.lose(slow.worker, late=True)
    (again,) = schedule.orders(1.0)
    answer(schedule, slow)  # the iteration is over while `again` is under way
    schedule.begin(1)
    assert schedule.orders(1.0) == []
    assert answer(schedule, again) == [False]
    (order,) = schedule.orders(2.0)
    assert order.groups == (0, 1)


def test_orders_are_due_by_their_size() -> None:
    schedule = ready(groups=5, workers=1, threads=2)
    (order,) = schedule.orders(10.0)
    assert order.due == 10.0 + 3 * FIRST_PATIENCE
    assert schedule.overdue(order.due - 1.0) == []
    assert schedule.overdue(order.due) == [0]
    assert list(schedule.busy()) == [(0, (0, 1, 2, 3, 4), 10.0, order.due)]


def test_patience_follows_what_fragments_take() -> None:
    patience = Patience()
    assert patience.seconds == FIRST_PATIENCE
    patience.learn(0.5)
    assert patience.seconds == LEAST_PATIENCE
    patience.learn(60.0)
    assert patience.seconds == SLOWER * 60.0
    patience.lose()
    assert patience.seconds == 2 * SLOWER * 60.0
    patience.learn(1.0)
    assert patience.seconds == SLOWER * 60.0
    fixed = Patience(7.0)
    fixed.learn(60.0)
    fixed.lose()
    assert fixed.seconds == 7.0


def test_patience_decays() -> None:
    patience = Patience()
    patience.learn(600.0)
    for _ in range(30):
        patience.fade()
        patience.learn(1.0)
    assert patience.seconds == pytest.approx(max(LEAST_PATIENCE, SLOWER * 600.0 * FADES**30))
    for _ in range(60):
        patience.fade()
        patience.learn(1.0)
    assert patience.seconds == LEAST_PATIENCE


def test_groups_are_copied_after_a_multiple_of_the_median_and_once() -> None:
    schedule = ready(groups=3, workers=3)
    assert schedule.patience.copy_after == float("inf")
    slow, *quick = schedule.orders(0.0)
    for order in quick:
        answer(schedule, order, now=2.0)
    assert schedule.patience.copy_after == COPY_AFTER * 2.0
    assert schedule.stragglers(6.0) == []
    assert schedule.stragglers(6.1) == [(slow.worker, slow.groups)]
    (copy,) = schedule.orders(6.1)
    assert (copy.groups, copy.send) == (slow.groups, set(slow.groups))
    assert schedule.stragglers(9.0) == []
    assert answer(schedule, copy, now=9.0) == [True]
    assert schedule.done
    schedule.begin(1)
    orders = schedule.orders(9.0)
    assert slow.worker not in {order.worker for order in orders}
    assert answer(schedule, slow, now=9.5) == [False]
    for order in orders:
        answer(schedule, order, now=10.0)
    schedule.begin(2)
    (back,) = [order for order in schedule.orders(10.0) if order.worker == slow.worker]
    assert back.send == set(back.groups)  # What it holds is of iteration 0.
    quick_ones = Patience()
    quick_ones.learn(0.001)
    assert quick_ones.copy_after == LEAST_COPY_AFTER


def test_nothing_is_copied_while_everybody_works() -> None:
    schedule = ready(groups=4, workers=2)
    first, second = schedule.orders(0.0)
    schedule.take(first.worker, 0, first.groups[0], 1.0)
    assert schedule.stragglers(1e6) == []
    schedule.lose(second.worker)
    schedule.take(first.worker, 0, first.groups[1], 1.0)
    assert schedule.stragglers(1e6) == []  # There are others that nobody has.


def test_a_group_that_failed_goes_to_another_worker_and_not_for_ever() -> None:
    schedule = ready(groups=2, workers=2)
    orders = schedule.orders(0.0)
    group, tried = orders[0].groups[0], [orders[0].worker]
    assert schedule.retry(orders[0].worker, 0, group, 1.0)
    assert schedule.orders(1.0) == []  # The other is busy, and this one has failed at it.
    answer(schedule, orders[1], now=1.0)
    (again,) = schedule.orders(1.0)
    assert (again.groups, again.send) == ((group,), {group})
    assert again.worker != orders[0].worker
    for now in range(2, MOST_FAILURES):
        assert schedule.retry(again.worker, 0, group, float(now))
        tried.append(again.worker)
        assert schedule.failed_at(group) == tried
        (again,) = schedule.orders(float(now))  # All have failed at it: any may try.
    assert not schedule.retry(again.worker, 0, group, 9.0)
    assert answer(schedule, again, now=9.0) == [True]
    assert schedule.done
    assert not schedule.retry(again.worker, 0, group, 9.0)
    schedule.begin(1)
    assert schedule.failed_at(group) == []


def test_an_iteration_that_is_begun_again_starts_from_the_snapshots() -> None:
    schedule = ready(groups=2, workers=1)
    for iteration in (0, 1):
        schedule.begin(iteration)
        (order,) = schedule.orders(0.0)
        if iteration == 0:
            answer(schedule, order)
    assert order.send == set()
    schedule.take(0, 1, 0, 1.0)  # one of two, and then it fails
    schedule.take(0, 1, 1, 1.0)
    schedule.begin(2)
    schedule.orders(1.0)
    schedule.take(0, 2, 0, 2.0)
    schedule.begin(2)
    schedule.take(0, 2, 1, 2.0)
    (order,) = schedule.orders(2.0)
    assert 0 in order.send


def test_a_group_that_ends_every_worker_is_named() -> None:
    schedule = ready(groups=1, workers=0)
    for worker in range(MOST_LOSSES - 1):
        schedule.join(worker)
        schedule.orders(0.0)
        schedule.lose(worker)
    schedule.join(99)
    schedule.orders(0.0)
    with pytest.raises(LostTooOften, match=f"Group 0 of iteration 0 was lost with {MOST_LOSSES}"):
        schedule.lose(99)
