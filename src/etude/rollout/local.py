"""The local collector: threads over groups, results in group order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch.nn import functional

from etude.core.config import SECONDS, Config
from etude.core.contracts import BatchEnv, Broadcast, Collector, Fragment, Policy, Snapshot
from etude.core.keys import Key
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.experience.segments import SegmentBuffer
from etude.rollout.group import Group

T = TypeVar("T")
GROUP, GROUPS, THREADS = 1 << 16, 1 << 16, 1024
"""Most environments of a group, groups of a run, and threads of a process."""


class CollectorConfig(Config):
    """Where rollouts run. Only num_envs, envs_per_group and lag change a result."""

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
        description="Threads of the physics engine in each group; of Gymnasium's environments, "
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
        description="Seconds a rollout may take until its Ray actor is replaced; default 10 "
        "times the slowest so far, at least 30.",
    )
    allow_inexact: bool = Field(
        False,
        description="Use Ray actors whose CPU computes other bits, and mark the run not exact.",
    )

    @model_validator(mode="after")
    def _few_groups(self) -> Self:
        if self.num_groups > GROUPS:
            least = -(-self.num_envs // GROUPS)
            raise ValueError(
                f"collector.num_envs {self.num_envs:,} in groups of collector.envs_per_group "
                f"{self.envs_per_group:,} are {self.num_groups:,} groups, and at most {GROUPS:,} "
                f"fit: use --collector.envs-per-group {least:,} or more"
            )
        return self

    @property
    def num_groups(self) -> int:
        return self.num_envs // self.envs_per_group

    def part(self, group: int) -> slice:
        """The environments of one group."""
        return slice(group * self.envs_per_group, (group + 1) * self.envs_per_group)

    def check(self) -> None:
        """Refuse what cannot be collected with, before anything is written."""

    def plan_text(self) -> str:
        """Where rollouts run, for the plan; "" for this process."""
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
    ) -> Collector:
        """The collector of the groups `local`, which are this rank's; it closes the workers.

        `buffers` are filled in turn. `exact`: a run of these environments resumes bit for bit.
        """
        views = [[b.part(self.part(g)) for g in local] for b in buffers]
        envs = [make_env() for _ in local]
        return LocalCollector(envs, make_policy(), key, workers, views, local.start)


class Placement(Config):
    """Where a resumed run does its rollouts; fields that are None stay as they were."""

    kind: Literal["local", "ray"] | None = Field(
        None, description="Threads of this process, or actors on a Ray cluster."
    )
    threads: int | None = Field(
        None, ge=1, le=THREADS, description="Threads; with ray, in each actor."
    )
    actors: int | None = Field(
        None, ge=1, le=GROUPS, description="Ray actors; default one per machine."
    )
    address: str | None = Field(None, description="The Ray cluster: host:port, auto or local.")
    deadline: float | None = Field(
        None, gt=0, le=SECONDS, description="Seconds a group's rollout may take."
    )
    allow_inexact: bool | None = Field(
        None,
        description="Use Ray actors whose CPU computes other bits, and mark the run not exact.",
    )

    def applied(self, config: CollectorConfig) -> CollectorConfig:
        """The config of a recipe's collector with these fields."""
        return COLLECTORS.validate(config.model_dump() | self.model_dump(exclude_none=True))


COLLECTORS: Registry[CollectorConfig] = Registry(
    "collector", "etude.rollout.local:CollectorConfig", default="local"
)

_FIRST_USE = Lock()


def _first_product() -> None:
    """One matrix product, alone: the maths library sets itself up in its first product, where two
    threads at once can get different kernels, whose results differ in the last bit."""
    with _FIRST_USE, torch.inference_mode():
        functional.linear(torch.ones(64, 32), torch.ones(64, 32), torch.ones(64)).tanh()


def _prepare_thread() -> None:
    torch.set_num_threads(1)  # of the calling thread
    _first_product()


class Closed(Exception):
    """The workers were closed before their tasks were done."""


class Workers:
    """Threads for rollouts, one torch thread each, so that inference is the same everywhere."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._closed = False
        _first_product()
        self._pool = ThreadPoolExecutor(threads, "rollout", _prepare_thread)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Every task's result in the order given; the first error in that order is raised."""
        futures: list[Future[T]] = [self._pool.submit(task) for task in tasks]
        return [future.result() for future in futures]

    def share(self, tasks: Sequence[Iterator[None]]) -> None:
        """Run iterators to their ends, a step of each in turn by whichever thread is free.

        Threads finish together to within one step, however unevenly they are scheduled. The
        first error, in the order of the tasks, is raised once all threads have stopped.
        """
        waiting = deque(enumerate(tasks))
        errors: dict[int, BaseException] = {}

        def work() -> None:
            while not self._closed:
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

        self.run([work] * min(self._threads, len(tasks)))
        if errors:
            raise errors[min(errors)]
        if waiting:
            raise Closed

    def close(self) -> None:
        """End what still runs, after the step it is in."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)


class NoCollector:
    """For runs that learn from a dataset."""

    def __init__(self, episodes: int, timesteps: int, workers: Workers | None = None) -> None:
        """episodes, timesteps: what is learned from, for the log rows' columns of these names.

        workers: threads that only the tests use; they end with the run.
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
    """Another collector inside; a subclass changes how it collects, and its state."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        self._inner.report_to(say, not_exact)

    def status(self) -> dict[str, float]:
        return self._inner.status()

    def close(self) -> None:
        self._inner.close()


def group_state(snapshots: Sequence[Snapshot] | None) -> Tree:
    """{"groups": {"000000": snapshot, ...}}, none of them before the first iteration."""
    return {"groups": {f"{g:06d}": snapshot for g, snapshot in enumerate(snapshots or [])}}


def group_snapshots(state: Tree) -> list[Snapshot] | None:
    """The snapshots, in group order, of what `group_state` gave."""
    return [snapshot for _, snapshot in sorted(state["groups"].items())] or None


class LocalCollector:
    """Steps the groups of a run, or of one rank; holds their snapshots between iterations."""

    def __init__(
        self,
        envs: Sequence[BatchEnv],
        policy: Policy,
        key: Key,
        workers: Workers,
        parts: Sequence[Sequence[Fragment]],
        first_group: int = 0,
    ) -> None:
        """`policy` is overwritten in each iteration. `parts[b][g]`: the g-th group's part of buffer
        b; the buffers take turns. `first_group`: the number in the run of the first group here."""
        self._groups = [Group(env) for env in envs]
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
        work = zip(self._groups, snapshots, self._keys, parts, strict=True)
        self._workers.share(
            [
                group.steps(self._policy, snapshot, key, iteration, part)
                for group, snapshot, key, part in work
            ]
        )
        self._snapshots = [group.snapshot for group in self._groups]
        return list(parts)

    def _begin(self) -> list[Snapshot]:
        return self._workers.run(
            [
                lambda group=group, key=key: group.begin(self._policy, key)  # type: ignore[misc]
                for group, key in zip(self._groups, self._keys, strict=True)
            ]
        )

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        """Nothing is reported: what goes wrong in here is an error."""

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
