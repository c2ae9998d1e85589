"""Groups in a worker process, independent of how it is started and reached.

A task names groups and snapshots to roll out from; answers, errors among them, are plain data.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from etude.core.contracts import BatchEnv, Broadcast, Fragment, Policy, Snapshot
from etude.core.errors import EtudeError, NonFinite, describe_error
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays, digest, map_arrays
from etude.core.user_code import compute_hashes
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.rollout.group import Group
from etude.rollout.local import Workers
from etude.runs import manifest
from etude.runs.manifest import cpu_name

PROBE_STEPS = 8


@dataclass(frozen=True)
class Blueprint:
    """Everything that a worker process needs to roll out groups of a run."""

    make_env: Callable[[], BatchEnv]
    """Makes one group's environments. Functions are pickled by name: no lambda."""
    make_policy: Callable[[], Policy]
    part: BufferSpec
    """The arrays of one group's fragment."""
    key: Key
    """The collector's key; group g has `key.child("group", g)`."""
    threads: int
    code: tuple[str, ...] = ()
    """Where the run's own code begins, see `etude.core.user_code.compute_hashes`."""

    def new_part(self) -> Fragment:
        """Allocate the fragment of one group."""
        return SegmentBuffer(self.part).part(slice(0, self.part.num_envs))


@dataclass(frozen=True)
class Task:
    """Groups to roll out, with everything needed except the broadcast."""

    serial: int
    """Number of the broadcast."""
    iteration: int
    groups: tuple[int, ...]
    snapshots: dict[int, Snapshot]
    """Snapshots of groups whose environments are not in this process."""
    release: frozenset[int] = frozenset()
    """Groups whose environments are spare now."""
    begin: bool = False
    """Whether it is the run's first rollout: all episodes begin, there are no snapshots."""


@dataclass(frozen=True)
class Failure:
    """An error in a rollout, as data."""

    text: str
    trace: str
    where: str | None = None
    """The non-finite value that a `NonFinite` names; None for other errors."""
    arrays: Tree = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Failure:
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, NonFinite):
            return cls(str(error), trace, error.where, error.arrays)
        return cls(str(error) if isinstance(error, EtudeError) else describe_error(error), trace)

    def error(self, group: int, worker: str) -> EtudeError:
        """The exception to raise in the learner."""
        if self.where is not None:
            made: EtudeError = NonFinite(self.where, self.arrays)
        else:
            made = EtudeError(f"The rollout of group {group} failed on {worker}: {self.text}.")
        made.add_note(f"On {worker}:\n{self.trace}")
        return made


Outcome = tuple[Fragment, Snapshot] | Failure


@dataclass(frozen=True)
class Answer:
    """The results of a task."""

    iteration: int
    outcomes: dict[int, Outcome]
    """By group."""
    seconds: float
    """Seconds that the process worked on the task."""


@dataclass(frozen=True)
class Hello:
    """A worker's description of itself after its start."""

    pid: int
    host: str
    cpu: str
    probe: str
    """SHA-256 of the standard computation and a short rollout; equal if all bits are."""
    code: dict[str, str] = field(default_factory=dict)
    """Hashes of its code."""


def packed(broadcast: Broadcast) -> Broadcast:
    """Convert tensors to numpy arrays, which Ray sends without a copy."""

    def pack(leaf: object) -> object:
        return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf

    return replace(broadcast, policy=map_arrays(pack, broadcast.policy))


class Host:
    """The groups in this process, each in its own seat."""

    def __init__(self, blueprint: Blueprint, workers: Workers | None = None) -> None:
        """workers: threads to use; by default new ones."""
        self._blueprint = blueprint
        # Without a deadline: the schedule replaces a process that is late.
        self._workers = workers or Workers(blueprint.threads, math.inf)
        self._policy = blueprint.make_policy()
        self._serial = -1
        self._curriculum: Tree = {}
        self._seats: dict[int, _Seat] = {}
        self._spare: list[_Seat] = []

    def hello(self, broadcast: Broadcast | None, host: str) -> Hello:
        """broadcast: for the policy of the probe; None if bits need not match."""
        probe = "" if broadcast is None else self.probe(broadcast)
        return Hello(os.getpid(), host, cpu_name(), probe, self.code() if probe else {})

    def code(self) -> dict[str, str]:
        """Hashes of the code in this process."""
        return compute_hashes(self._blueprint.code)

    def probe(self, broadcast: Broadcast) -> str:
        """SHA-256 of the standard computation and of a few steps of one group of the run: processes
        with equal results compute the same bits."""
        (found,) = self._workers.run([lambda: self._probe(broadcast)])
        return found

    def _probe(self, broadcast: Broadcast) -> str:
        made, key = self._blueprint, Key(0, ("probe",))
        policy, group = made.make_policy(), Group(self._workers.guard(made.make_env()))
        policy.load_state_dict(_unpacked(broadcast.policy))
        group.follow(broadcast.curriculum)
        short = replace(made.part, steps=PROBE_STEPS, horizon=PROBE_STEPS)
        part = SegmentBuffer(short).part(slice(0, short.num_envs))
        try:
            fragment, end = group.rollout(policy, group.begin(policy, key), key, 0, part)
        finally:
            group.env.close()
        named = {**vars(fragment), "finals": fragment.finals._asdict(), "end": end}
        named["standard"] = manifest.standard_digest()
        named["episodes"] = {n.replace("/", "."): a for n, a in fragment.episodes.items()}
        del named["seconds"]
        return digest(named)

    def knows(self, serial: int) -> bool:
        """Whether this broadcast is loaded."""
        return serial == self._serial

    def follow(self, serial: int, broadcast: Broadcast) -> None:
        """Load a broadcast."""
        self._policy.load_state_dict(_unpacked(broadcast.policy))
        self._serial, self._curriculum = serial, broadcast.curriculum

    def run(self, task: Task) -> Answer:
        """Roll out the groups of a task in parallel."""
        if not self.knows(task.serial):
            raise RuntimeError("the broadcast of this task was not followed")
        start = time.perf_counter()
        for group in task.release:
            if group in self._seats:
                self._spare.append(self._seats.pop(group))
        outcomes: dict[int, Outcome] = {}
        for group in task.groups:
            try:
                self._sit(group)
            except Exception as error:
                outcomes[group] = Failure.of(error)
        seated = [group for group in task.groups if group not in outcomes]
        self._workers.share([self._steps(task, group, outcomes) for group in seated])
        return Answer(task.iteration, outcomes, time.perf_counter() - start)

    def _steps(self, task: Task, group: int, outcomes: dict[int, Outcome]) -> Iterator[None]:
        """One group's rollout; its result or error becomes its outcome."""
        try:
            seat = self._seats[group]
            seat.group.follow(self._curriculum)
            key = self._blueprint.key.child("group", group)
            snapshot = self._start(task, group, seat, key)
            yield from seat.group.steps(self._policy, snapshot, key, task.iteration, seat.part)
            seat.last = task.iteration
            outcomes[group] = (seat.part, seat.group.snapshot)
        except Exception as error:
            outcomes[group] = Failure.of(error)
            # The environment's state is unknown now: the next try has a new environment.
            with suppress(Exception):
                self._seats.pop(group).group.env.close()

    def _start(self, task: Task, group: int, seat: _Seat, key: Key) -> Snapshot:
        if task.begin:
            return seat.group.begin(self._policy, key)
        if group in task.snapshots:
            # Shared memory is read-only, and an environment may write to its state.
            return copy_arrays(task.snapshots[group])
        if seat.last != task.iteration - 1:
            raise RuntimeError(
                f"group {group} is after iteration {seat.last} here, and iteration "
                f"{task.iteration} was requested"
            )
        return seat.group.snapshot

    def _sit(self, group: int) -> None:
        if group not in self._seats:
            made, spare = self._blueprint, self._spare.pop() if self._spare else None
            self._seats[group] = spare or _Seat(
                Group(self._workers.guard(made.make_env())), made.new_part()
            )

    def close(self) -> None:
        self._workers.close()
        for seat in (*self._seats.values(), *self._spare):
            seat.group.env.close()


@dataclass
class _Seat:
    """One group's environments and fragment, and its last iteration."""

    group: Group
    part: Fragment
    last: int = -1


def _unpacked(policy: Tree) -> Tree:
    """Convert arrays to tensors with memory of their own: shared memory is read-only."""
    return map_arrays(lambda a: a if torch.is_tensor(a) else torch.from_numpy(a.copy()), policy)
