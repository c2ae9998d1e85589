"""A collector over workers that may die, freeze, join and leave without changing the result.

A `Fleet` communicates with the workers, a `Schedule` assigns groups to them. The collector connects
the two, keeps snapshots and fragments, and reports events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from etude.core.contracts import Broadcast, Fragment, Snapshot
from etude.core.errors import EtudeError
from etude.core.trees import Tree, copy_arrays, num_bytes
from etude.core.user_code import differing
from etude.data.segments import fill
from etude.rollout.host import Answer, Failure, Hello, Task, packed
from etude.rollout.local import Closed, group_snapshots, group_state
from etude.rollout.schedule import Order, Schedule
from etude.runs.manifest import cpu_name

TICK = 0.2
"""Seconds after which a wait for events ends, to check deadlines."""
PULSE = 5.0
"""Seconds between two pings of a busy worker."""
QUIET = 10.0
"""Seconds of silence after which a message is printed."""
GATHER = 15.0
"""Seconds that a run waits for further workers once it has one."""
NO_WORKERS = 300.0
"""Seconds without any worker after which a run gives up."""
HEADLESS = 40.0
"""Seconds without an answer from a server of the cluster after which a run gives up."""
MOST_FAILED = 5
"""Consecutive workers that fail to start after which a run without workers gives up."""


@dataclass(frozen=True)
class Joined:
    """A worker has started."""

    worker: int
    hello: Hello


@dataclass(frozen=True)
class Answered:
    """A worker has finished its task."""

    worker: int
    answer: Answer


@dataclass(frozen=True)
class Heard:
    """A worker has answered a ping."""

    worker: int


@dataclass(frozen=True)
class Lost:
    """A worker was lost, or could not start."""

    worker: int
    why: str


Event = Joined | Answered | Heard | Lost


class Fleet(Protocol):
    """The workers, by number; a number is never reused."""

    @property
    def joining(self) -> int:
        """The number of workers that were requested and have not started yet."""
        ...

    def silent(self, seconds: float) -> tuple[str, float] | None:
        """The server of the cluster that does not answer, and for how many seconds; None if all do.

        Raise `HeadLost` if one has ended. Takes at most `seconds`; only `close` may be called
        until all servers answer again.
        """
        ...

    def broadcast(self, serial: int, broadcast: Broadcast) -> None:
        """Set the broadcast for tasks of this serial number; the first is also for probes."""
        ...

    def recruit(self) -> None:
        """Request the missing workers."""
        ...

    def send(self, worker: int, task: Task) -> None: ...

    def ask(self, worker: int) -> None:
        """Ping a worker."""
        ...

    def events(self, seconds: float) -> list[Event]:
        """Wait for events, at most `seconds` for the first of them."""
        ...

    def drop(self, worker: int, replace: bool = True) -> None:
        """End a worker; with `replace` False no other is requested for it."""
        ...

    def close(self) -> None: ...


class NoWorkers(EtudeError):
    """No workers are left, and none can be started."""


class HeadLost(EtudeError):
    """A server that the cluster depends on has ended or does not answer any more."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(
            f"{who} {what}. The last checkpoint is untouched: `etude resume` continues from it, "
            "with --collector.address on another cluster or with --collector local."
        )


@dataclass
class _Known:
    """A worker that has joined."""

    name: str
    host: str
    heard: float
    asked: float = 0.0
    reported: float = -1.0
    """Start of the order that was last reported as slow."""
    seconds: float = 0.0
    """Seconds of work in this iteration."""


class ElasticCollector:
    """Collects on a fleet of workers; has the newest snapshot of every group at iteration ends."""

    def __init__(
        self,
        fleet: Fleet,
        schedule: Schedule,
        parts: Sequence[Sequence[Fragment]],
        probe: Callable[[Broadcast], str] | None,
        allow_inexact: bool = False,
        close: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
        code: dict[str, str] | None = None,
    ) -> None:
        """parts[b][g]: group g's part of buffer b; buffers are used in turn. probe: computes this
        process's result of the probe that new workers answer; None if bits need not match.
        close: called when the collector closes. code: hashes of this process's code."""
        self._code = code or {}
        self._fleet, self._schedule, self._parts = fleet, schedule, parts
        self._probe, self._allow_inexact = probe, allow_inexact
        self._close, self._now = close, now
        self._expected: str | None = None
        self._snapshots: list[Snapshot] | None = None
        self._known: dict[int, _Known] = {}
        self._say: Callable[[str], None] = lambda text: None
        self._not_exact: Callable[[str], None] = lambda reason: None
        self._serial = 0
        self._gathered = False
        self._present = self._recruited = 0.0
        self._failed, self._why = 0, ""
        self._refused = False  # the worker that joined last
        self._restarts, self._bytes, self._read = 0, 0, now()
        self._closed, self._running = False, Lock()

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        self._say, self._not_exact = say, not_exact

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        with self._running:
            return self._collect(packed(broadcast), iteration)

    def _collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        self._serial += 1
        self._await_head()
        self._fleet.broadcast(self._serial, broadcast)
        if self._expected is None and self._probe is not None:
            self._expected = self._probe(broadcast)
        self._gather()
        start, parts = self._now(), self._parts[iteration % len(self._parts)]
        self._schedule.begin(iteration)
        for known in self._known.values():
            known.seconds = 0.0
        ends: dict[int, Snapshot] = {}
        failures: dict[int, EtudeError] = {}
        busiest = 0.0
        while not self._schedule.done:
            for order in self._schedule.orders(self._now()):
                self._send(order, broadcast)
            for answered in self._news():
                busiest = max(busiest, self._work(answered))
                self._take(answered, parts, ends, failures)
        if failures:
            raise failures[min(failures)]
        self._snapshots = [ends[group] for group in range(self._schedule.num_groups)]
        _account(parts, busiest, self._now() - start)
        return list(parts)

    def _gather(self) -> None:
        """Before the first rollout, wait for a worker, and for a while for others."""
        first: float | None = None
        self._present = self._now()
        while not self._gathered:
            self._news()
            if not self._schedule.workers:
                continue
            first = self._now() if first is None else first
            if not self._fleet.joining or self._now() - first > GATHER:
                self._gathered = True
                machines = len({known.host for known in self._known.values()})
                self._say(
                    f"Collecting {_count(self._schedule.num_groups, 'group')} on "
                    f"{_count(len(self._known), 'worker')} on {_count(machines, 'machine')}."
                )

    def _send(self, order: Order, broadcast: Broadcast) -> None:
        held = self._snapshots
        snapshots = {} if held is None else {group: held[group] for group in order.send}
        task = Task(
            self._serial, order.iteration, order.groups, snapshots, order.release, held is None
        )
        self._bytes += num_bytes(broadcast.policy) + sum(num_bytes(s) for s in snapshots.values())
        self._fleet.send(order.worker, task)

    def _await_head(self) -> None:
        """Wait while a server of the cluster does not answer, at most `HEADLESS` seconds."""
        reported = False
        while (found := self._fleet.silent(TICK)) is not None:
            if self._closed:
                raise Closed
            who, seconds = found
            if seconds > HEADLESS:
                silence = f"has not answered for {seconds:.0f} s"
                raise HeadLost(who, f"{silence}: it was ended, froze or cannot be reached")
            if seconds > QUIET and not reported:
                reported = True
                self._say(f"{who} has not answered for {seconds:.0f} s; the run waits for it.")

    def _news(self) -> list[Answered]:
        """Wait for events and handle them; returns the answers."""
        self._await_head()
        if self._closed:
            raise Closed
        now = self._now()
        if now >= self._recruited:
            # If workers fail to start, requests become rarer.
            self._recruited = now + min(2.0**self._failed, 60.0) - 1.0
            self._fleet.recruit()
        answers = []
        for event in self._fleet.events(TICK):
            if isinstance(event, Joined):
                self._join(event.worker, event.hello)
            elif isinstance(event, Lost):
                self._lose(event.worker, event.why)
            elif event.worker in self._known:
                self._known[event.worker].heard = self._now()
            if isinstance(event, Answered):
                answers.append(event)
        if not answers:  # After a pause of this process, answers come before deadlines.
            self._watch()
        return answers

    def _join(self, worker: int, hello: Hello) -> None:
        name = f"worker {worker} (pid {hello.pid} on {hello.host})"
        self._failed, self._refused = 0, False
        if differs := self._differs(name, hello):
            if not self._allow_inexact:
                self._refused = True
                self._fleet.drop(worker, replace=False)
                self._why = (
                    f"{differs}. Use machines of one CPU type with the same code and versions, or "
                    "--collector.allow-inexact, which marks the run not exact"
                )
                self._say(f"Refused: {self._why}.")
                return
            self._not_exact(differs)
            self._say(f"The run is not exact any more: {differs}.")
        self._known[worker] = _Known(name, hello.host, self._now())
        self._schedule.join(worker)
        if self._gathered:
            self._say(f"{name} joined.")

    def _differs(self, name: str, hello: Hello) -> str:
        """Why a worker's results may differ from this process's; "" if they do not."""
        if self._expected is None:
            return ""
        if names := differing(self._code, hello.code):
            return f"{name} has different code than this process: {', '.join(names)}"
        if hello.probe != self._expected:
            return (
                f"{name} computes different bits than this process: its CPU is {hello.cpu}, here "
                f"it is {cpu_name()}"
            )
        return ""

    def _lose(self, worker: int, why: str, late: bool = False) -> None:
        known = self._known.pop(worker, None)
        if known is None:  # It has never joined.
            self._failed, self._why = self._failed + 1, why
            return
        self._restarts, self._refused = self._restarts + 1, False
        self._why = f"{known.name} was lost: {why}"
        groups = self._schedule.lose(worker, late)
        others = f"; {_named(groups)} to others" if groups else ""
        self._say(f"{self._why}{others}.")

    def _watch(self) -> None:
        """Drop overdue workers, ping silent ones, and end a run that has none."""
        now = self._now()
        for worker in self._schedule.overdue(now):
            self._fleet.drop(worker)
            self._lose(worker, "it did not answer in time", late=True)
        for worker, groups in self._schedule.stragglers(now):
            self._say(f"{self._known[worker].name} is slow; {_named(groups)} to others as well.")
        for worker, groups, since, due in self._schedule.busy():
            known = self._known[worker]
            if now - max(since, known.asked) > PULSE:
                known.asked = now
                self._fleet.ask(worker)
            silent = now - max(since, known.heard)
            if silent > QUIET and known.reported != since:
                known.reported = since
                self._say(
                    f"{known.name} has not answered for {silent:.0f} s; {_named(groups)} to "
                    f"others at {due - since:.0f} s."
                )
        if self._schedule.workers:
            self._present = now
        elif (
            self._failed >= MOST_FAILED
            or now - self._present > NO_WORKERS
            or (self._refused and not self._fleet.joining)
        ):
            raise NoWorkers(
                "No workers are left and none can be started: "
                f"{self._why or 'the cluster has no room'}. The last checkpoint is untouched: "
                "`etude resume` continues from it."
            )

    def _work(self, answered: Answered) -> float:
        """Add the seconds of an answer; returns the worker's seconds in this iteration."""
        known = self._known.get(answered.worker)
        if known is None or answered.answer.iteration != self._schedule.iteration:
            return 0.0
        known.seconds += answered.answer.seconds
        return known.seconds

    def _take(
        self,
        answered: Answered,
        parts: Sequence[Fragment],
        ends: dict[int, Snapshot],
        failures: dict[int, EtudeError],
    ) -> None:
        """Copy the fragments of an answer into the buffer, if the schedule accepts them."""
        answer, retried = answered.answer, list[int]()
        for group, outcome in answer.outcomes.items():
            came = (answered.worker, answer.iteration, group, self._now())
            if isinstance(outcome, Failure) and self._schedule.retry(*came):
                retried.append(group)
                continue
            if not self._schedule.take(*came):
                continue
            if isinstance(outcome, Failure):
                failures[group] = outcome.error(group, self._name(answered.worker))
                continue
            self._blame(self._schedule.failed_at(group), group, answered.worker)
            fragment, end = outcome
            # Copy: the answer may be in shared memory that has to be released.
            ends[group] = copy_arrays(end)
            self._bytes += fill(parts[group], fragment) + num_bytes(ends[group])
        if retried:
            first = answer.outcomes[retried[0]]
            assert isinstance(first, Failure)
            error = first.error(retried[0], self._name(answered.worker))
            self._say(f"{str(error).rstrip('.')}; {_named(retried)} to others.")

    def _blame(self, failed: Sequence[int], group: int, worker: int) -> None:
        """Replace workers that failed at a group which another worker has computed."""
        for other in failed:
            if other != worker and other in self._known:
                self._fleet.drop(other)
                self._lose(other, f"it failed at group {group}, which {self._name(worker)} did")

    def _name(self, worker: int) -> str:
        return self._known[worker].name if worker in self._known else f"worker {worker}"

    def status(self) -> dict[str, float]:
        now = self._now()
        rate = self._bytes / max(now - self._read, 1e-9)
        self._read, self._bytes = now, 0
        return {
            "system/workers": float(len(self._known)),
            "system/groups": float(self._schedule.num_groups),
            "system/restarts": float(self._restarts),
            "system/bytes_per_second": rate,
        }

    def state_dict(self) -> Tree:
        return group_state(self._snapshots)

    def load_state_dict(self, state: Tree) -> None:
        self._snapshots = group_snapshots(state)
        self._schedule.forget()

    def close(self) -> None:
        self._closed = True
        with self._running:
            self._fleet.close()
        self._close()


def _account(parts: Sequence[Fragment], busiest: float, wall: float) -> None:
    """Add "transport" to the fragments' seconds: wall time beyond the busiest worker's."""
    spent = sum(sum(part.seconds.values()) for part in parts)
    lost = max(wall - busiest, 0.0)
    for part in parts:
        part.seconds["transport"] = spent * lost / max(busiest, 1e-9) / len(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _named(groups: Sequence[int]) -> str:
    """ "its group 4 goes", or "its groups 4-7 and 9 go"."""
    spans: list[list[int]] = []
    for group in sorted(groups):
        if spans and group == spans[-1][1] + 1:
            spans[-1][1] = group
        else:
            spans.append([group, group])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    listed = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) if texts else "none"
    return f"its group {listed} goes" if len(groups) == 1 else f"its groups {listed} go"
