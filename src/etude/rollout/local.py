"""Collection in this process: threads over groups, results in group order.

It has the collector's config, the threads, the local collector, and a collector one iteration ahead
of the learner.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch.nn import functional

from etude.core.config import SECONDS, Config
from etude.core.contracts import BatchEnv, Broadcast, Collector, Fragment, Policy, Snapshot
from etude.core.errors import EtudeError, ProcessLost, refuse_exits
from etude.core.guard import DEADLINE, TICK, Supervisor
from etude.core.keys import Key
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.data.segments import SegmentBuffer
from etude.rollout import MOST_FAILURES
from etude.rollout.group import Group

T = TypeVar("T")
GROUP, GROUPS, THREADS = 1 << 16, 1 << 16, 1024
"""The maximum of environments in a group, groups in a run, and threads in a process."""


class CollectorConfig(Config):
    """Where rollouts run. Only num_envs, envs_per_group and lag change results."""

    renamed = {"rows": "num_envs", "group_rows": "envs_per_group"}  # noqa: RUF012
    aliases = {"num_envs": "n_envs", "threads": "num_workers n_jobs"}  # noqa: RUF012

    kind: Literal["local", "ray"] = Field(
        "local", description="Threads of this process, or actors on a Ray cluster."
    )
    num_envs: int = Field(
        256,
        ge=1,
        le=1 << 24,
        description="Parallel environments; each agent of several counts as one.",
    )
    envs_per_group: int = Field(
        64,
        ge=1,
        le=GROUP,
        description="Environments that are stepped together; divides num_envs.",
    )
    threads: int = Field(
        2,
        ge=1,
        le=THREADS,
        description="Threads that groups are spread over; with ray, in each actor.",
    )
    engine_threads: int = Field(
        1,
        ge=1,
        le=THREADS,
        description="Threads of the physics engine in each group; for Gymnasium environments, "
        "worker processes.",
    )
    lag: Literal[0, 1] = Field(
        0, description="1 collects the next iteration while this one trains, with older weights."
    )

    actors: int | None = Field(
        None,
        ge=1,
        le=GROUPS,
        description="Ray actors that groups are spread over; default one per machine.",
    )
    address: str = Field(
        "local", description="The Ray cluster: host:port, auto, or local to start one for the run."
    )
    deadline: float | None = Field(
        None,
        gt=0,
        le=SECONDS,
        description="Seconds that one reset or step of an environment may take before it counts as "
        f"hung; default {DEADLINE:g}. With ray, seconds of a rollout before its actor is replaced; "
        "default 10 times the slowest so far, at least 30.",
    )
    allow_inexact: bool = Field(
        False,
        description="Use Ray actors whose CPU computes different bits, and mark the run not exact.",
    )

    @model_validator(mode="after")
    def _few_groups(self) -> Self:
        if self.num_groups > GROUPS:
            least = -(-self.num_envs // GROUPS)
            raise ValueError(
                f"collector.num_envs {self.num_envs:,} in groups of collector.envs_per_group "
                f"{self.envs_per_group:,} are {self.num_groups:,} groups, more than {GROUPS:,}: "
                f"use --collector.envs-per-group {least:,} or more"
            )
        return self

    @property
    def num_groups(self) -> int:
        return self.num_envs // self.envs_per_group

    def part(self, group: int) -> slice:
        """The environments of one group."""
        return slice(group * self.envs_per_group, (group + 1) * self.envs_per_group)

    def check(self) -> None:
        """Raise an error if this collector cannot be used, before anything is written."""

    def plan_text(self) -> str:
        """The plan's line about where rollouts run; "" for this process."""
        return ""

    def build(
        self,
        make_env: Callable[[], BatchEnv],
        make_policy: Callable[[], Policy],
        buffers: Sequence[SegmentBuffer],
        key: Key,
        workers: Workers,
        local: range,
        exact: bool,
        code: tuple[str, ...] = (),
    ) -> Collector:
        """Construct the collector of the groups `local` of this rank; it closes the workers.

        buffers: filled in turn. exact: whether a run of these environments resumes bit for bit.
        code: where the run's own code begins, see `etude.core.user_code.compute_hashes`.
        """
        views = [[b.part(self.part(g)) for g in local] for b in buffers]
        envs = [make_env() for _ in local]
        return LocalCollector(envs, make_policy(), key, workers, views, local.start)


COLLECTORS: Registry[CollectorConfig] = Registry(
    "collector", "etude.rollout.local:CollectorConfig", default="local"
)

_FIRST_USE = Lock()


def _first_product() -> None:
    """Compute one matrix product, alone: two threads at once in the maths library's first product
    can get different kernels, whose results differ in the last bit."""
    with _FIRST_USE, torch.inference_mode():
        functional.linear(torch.ones(64, 32), torch.ones(64, 32), torch.ones(64)).tanh()


def _prepare_thread() -> None:
    torch.set_num_threads(1)  # of the calling thread
    _first_product()


class Closed(Exception):
    """The workers were closed before their tasks were finished."""


class Workers(Supervisor):
    """Threads for rollouts with one torch thread each, so that inference gives the same bits.

    They are daemons: one with a hanging environment must not keep the process alive.
    """

    def __init__(self, threads: int, deadline: float | None = None) -> None:
        """deadline: seconds that one call of an environment may take."""
        super().__init__(deadline)
        self._closed = False
        self.say: Callable[[str], None] = lambda text: None
        _first_product()
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._work, name=f"rollout_{i}", daemon=True) for i in range(threads)
        ]
        self._lock = Lock()

    def _work(self) -> None:
        """Run the tasks of the queue."""
        process = os.getpid()
        _prepare_thread()
        refuse_exits()
        while (ordered := self._queue.get()) is not None:
            future, task = ordered
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
            if os.getpid() != process:  # An environment has forked, and this is the child.
                os._exit(0)
            del ordered, future, task

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run tasks; returns their results in the same order, or raises the first error of it."""
        futures: list[Future[T]] = [Future() for _ in tasks]
        with self._lock:
            if self._closed:
                raise Closed
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()
            for ordered in zip(futures, tasks, strict=True):
                self._queue.put(ordered)
        return self.wait(futures)

    def share(self, tasks: Sequence[Iterator[None]]) -> None:
        """Run generators to their ends; a free thread takes the next step of the next one in turn.

        Threads finish within one step of each other, even if they are scheduled unevenly. The first
        error, in the order of the tasks, is raised once all threads have stopped.
        """
        waiting = deque(enumerate(tasks))
        errors: dict[int, BaseException] = {}

        process = os.getpid()

        def work() -> None:
            while not self._closed and os.getpid() == process:  # not in a forked child
                try:
                    index, task = waiting.popleft()
                except IndexError:
                    return
                try:
                    next(task)
                except StopIteration:
                    continue
                except BaseException as error:
                    errors[index] = error
                    continue
                waiting.append((index, task))

        self.run([work] * min(len(self._threads), len(tasks)))
        if errors:
            raise errors[min(errors)]
        if waiting:
            raise Closed

    def close(self) -> None:
        """End the threads after their present step; hanging ones are abandoned."""
        with self._lock:
            self._closed = True
            with suppress(Empty):
                while (ordered := self._queue.get_nowait()) is not None:
                    ordered[0].cancel()
                    ordered[0].set_running_or_notify_cancel()
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            while thread.is_alive() and self.late is None:
                thread.join(TICK)


class Tries:
    """Retries of a rollout whose environments may be lost with their process."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say, self._failed = name, say, 0

    def call(self, task: Callable[[], T]) -> T:
        """Call a task, again if its environments are lost."""
        while True:
            try:
                return task()
            except ProcessLost as error:
                self.again(error)

    def again(self, error: ProcessLost) -> None:
        """Report another try; raise an error after `MOST_FAILURES`."""
        self._failed += 1
        text = str(error).rstrip(".")
        if self._failed == MOST_FAILURES:
            raise EtudeError(f"{text}: {MOST_FAILURES} times in {self._name}.") from error
        self._say(f"{text}. It is started again, and {self._name} computed again.")


class NoCollector:
    """Collects nothing, for runs that learn from a dataset."""

    def __init__(self, episodes: int, timesteps: int, workers: Workers | None = None) -> None:
        """episodes, timesteps: of the dataset, for the columns of these names in log rows.

        workers: threads of the evaluator, closed at the end of the run.
        """
        self._counts = {"episodes": episodes, "timesteps": timesteps}
        self._workers = workers

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        return []

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        pass

    def status(self) -> dict[str, float]:
        return {**self._counts}

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None:
        pass

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class CollectorWrapper:
    """Base of collectors around another one; a subclass changes collection and state."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        self._inner.report_to(say, not_exact)

    def status(self) -> dict[str, float]:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def group_state(snapshots: Sequence[Snapshot] | None) -> Tree:
    """{"groups": {"000000": snapshot, ...}}; empty before the first iteration."""
    return {"groups": {f"{g:06d}": snapshot for g, snapshot in enumerate(snapshots or [])}}


def group_snapshots(state: Tree) -> list[Snapshot] | None:
    """The snapshots in group order, the inverse of `group_state`."""
    return [snapshot for _, snapshot in sorted(state["groups"].items())] or None


class LocalCollector:
    """Steps the groups of a run, or of one rank, and keeps their snapshots between iterations."""

    def __init__(
        self,
        envs: Sequence[BatchEnv],
        policy: Policy,
        key: Key,
        workers: Workers,
        parts: Sequence[Sequence[Fragment]],
        first_group: int = 0,
    ) -> None:
        """policy: overwritten in each iteration. parts[b][g]: the g-th group's part of buffer b;
        buffers are used in turn. first_group: the number of the first of these groups in the run.
        """
        self._names = [f"group {first_group + g}" for g in range(len(envs))]
        guarded = map(workers.guard, envs, self._names)
        self._groups = [Group(env) for env in guarded]
        self._keys = [key.child("group", first_group + g) for g in range(len(envs))]
        self._policy = policy
        self._workers = workers
        self._parts = parts
        self._snapshots: list[Snapshot] | None = None

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        self._policy.load_state_dict(broadcast.policy)
        for group in self._groups:
            group.follow(broadcast.curriculum)
        snapshots = self._begin() if self._snapshots is None else self._snapshots
        parts = self._parts[iteration % len(self._parts)]
        self._workers.share(
            [
                self._steps(g, snapshot, iteration, part)
                for g, (snapshot, part) in enumerate(zip(snapshots, parts, strict=True))
            ]
        )
        self._snapshots = [group.snapshot for group in self._groups]
        return list(parts)

    def _steps(self, g: int, snapshot: Snapshot, iteration: int, part: Fragment) -> Iterator[None]:
        """A group's rollout, repeated from its snapshot if its environments are lost."""
        tries = Tries(self._names[g], self._workers.say)
        while True:
            try:
                yield from self._groups[g].steps(
                    self._policy, snapshot, self._keys[g], iteration, part
                )
                return
            except ProcessLost as error:
                tries.again(error)

    def _begin(self) -> list[Snapshot]:
        firsts = [
            partial(group.begin, self._policy, key)
            for group, key in zip(self._groups, self._keys, strict=True)
        ]
        tries = [Tries(name, self._workers.say) for name in self._names]
        return self._workers.run([partial(t.call, f) for t, f in zip(tries, firsts, strict=True)])

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        self._workers.say = say

    def status(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tree:
        return group_state(self._snapshots)

    def load_state_dict(self, state: Tree) -> None:
        self._snapshots = group_snapshots(state)

    def close(self) -> None:
        self._workers.close()
        for group in self._groups:
            group.env.close()


class OverlappedCollector(CollectorWrapper):
    """Collects the next iteration while this one trains.

    Iteration i is collected with the weights that were current when iteration i - 1 began to
    train, iteration 0 with the first ones. Which weights collect what does not depend on who is
    faster, so a run stays exact. The state is that from which the collection in progress started:
    a resumed run starts it again.
    """

    def __init__(self, inner: Collector, is_wanted: Callable[[int], bool]) -> None:
        """is_wanted: whether the run has the given iteration; nothing is collected beyond."""
        super().__init__(inner)
        self._is_wanted = is_wanted
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._flight: Future[list[Fragment]] | None = None
        # State of the groups and broadcast that the next collection starts from; None before the
        # first iteration.
        self._start: tuple[Tree, Broadcast] | None = None

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The fragments that were collected ahead for this iteration; `broadcast` is for the next
        one."""
        if self._start is None:
            self._prepare(broadcast)
        if self._flight is None:
            self._launch(iteration)
        assert self._flight is not None
        fragments = self._flight.result()
        self._flight = None
        self._prepare(broadcast)
        if self._is_wanted(iteration + 1):
            self._launch(iteration + 1)
        return fragments

    def _prepare(self, broadcast: Broadcast) -> None:
        self._start = (self._inner.state_dict(), broadcast)

    def _launch(self, iteration: int) -> None:
        assert self._start is not None
        self._flight = self._thread.submit(self._inner.collect, self._start[1], iteration)

    def state_dict(self) -> Tree:
        """{"groups": ..., "broadcast": {"version", "policy", "curriculum"}, or {} at the start}."""
        if self._start is None:
            return {**self._inner.state_dict(), "broadcast": {}}
        inner, broadcast = self._start
        return {**inner, "broadcast": vars(broadcast).copy()}

    def load_state_dict(self, state: Tree) -> None:
        inner = {name: part for name, part in state.items() if name != "broadcast"}
        self._inner.load_state_dict(inner)
        self._start = (inner, Broadcast(**state["broadcast"])) if state["broadcast"] else None

    def close(self) -> None:
        """Abandon the collection in progress: a resumed run repeats it with the same result."""
        self._inner.close()
        if self._flight is not None:
            with suppress(Exception):
                self._flight.result()
        self._thread.shutdown()
