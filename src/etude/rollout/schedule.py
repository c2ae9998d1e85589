"""Assignment of groups to workers, while workers join, die, freeze and are late.

It has no threads, clock or network: the caller reports events with their times, and gets orders. A
fragment is a pure function of (broadcast, snapshot, key), so any worker may compute it, several
times: the first result of an (iteration, group) counts, others are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from etude.core.errors import EtudeError
from etude.rollout import MOST_FAILURES

FIRST_PATIENCE = 600.0
"""Deadline in seconds until the first fragment: machines may still load and compile."""
LEAST_PATIENCE = 30.0
SLOWER = 10.0
"""Without a fixed deadline, it is this factor times the slowest fragment so far."""
MOST_DOUBLINGS = 3
"""The maximum number of doublings of the deadline while all workers are late."""
FADES = 0.9
"""Decay of the slowest time so far per iteration, so that a slow period is forgotten."""
COPY_AFTER = 3.0
"""After this factor times the median time, an idle worker computes a fragment as well."""
LEAST_COPY_AFTER = 1.0
RECENT = 256
"""The number of last answers in the median."""
MOST_LOSSES = 10
"""After losing this number of workers with one group in an iteration, the group is the cause."""


class Patience:
    """The deadline of a fragment in seconds: fixed, or adapted to the fragments so far."""

    def __init__(self, deadline: float | None = None) -> None:
        self._fixed = deadline
        self._slowest: float | None = None
        self._doublings = 0
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def seconds(self) -> float:
        if self._fixed is not None:
            return self._fixed
        known = self._slowest is not None
        usual = max(LEAST_PATIENCE, SLOWER * (self._slowest or 0.0)) if known else FIRST_PATIENCE
        return usual * float(2**self._doublings)

    @property
    def copy_after(self) -> float:
        """Seconds after which another worker gets a fragment as well."""
        usual = median(self._recent) if self._recent else float("inf")
        return max(LEAST_COPY_AFTER, COPY_AFTER * usual)

    def fade(self) -> None:
        """Decay the slowest time, at the start of an iteration."""
        if self._slowest is not None:
            self._slowest *= FADES

    def learn(self, seconds: float) -> None:
        """Record the time of a fragment."""
        self._slowest = max(seconds, self._slowest or 0.0)
        self._recent.append(seconds)
        self._doublings = 0

    def lose(self) -> None:
        """Double the deadline after a worker was late: the machines may have become slow."""
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)


@dataclass(frozen=True)
class Order:
    """Work for one worker in one iteration."""

    worker: int
    iteration: int
    groups: tuple[int, ...]
    """Ascending."""
    send: frozenset[int]
    """Groups whose snapshot has to be sent to the worker."""
    release: frozenset[int]
    """Groups that other workers have got since its last order: their environments are spare."""
    due: float
    """The time after which the worker counts as lost."""


@dataclass
class _Worker:
    groups: set[int] = field(default_factory=set)
    """Groups of its order that are not answered."""
    iteration: int = -1
    """The iteration of its order."""
    issued: float = 0.0
    due: float = 0.0
    size: int = 1
    """Fragments of the order per thread."""
    copied: bool = False
    """Whether other workers have got its groups as well."""
    held: set[int] = field(default_factory=set)
    """Groups whose newest snapshot is the state of its environments."""
    release: set[int] = field(default_factory=set)


class LostTooOften(EtudeError):
    """Every worker is lost with the same group."""


class Schedule:
    """Assigns groups to workers, one iteration at a time.

    A worker keeps its groups, so that snapshots are sent only after losses; an idle worker gets at
    most its share of the open groups, so that no worker gets all of them.
    """

    def __init__(self, num_groups: int, threads: int = 1, patience: Patience | None = None) -> None:
        """threads: fragments that a worker computes in parallel."""
        self.num_groups = num_groups
        self.patience = patience or Patience()
        self._threads = threads
        self._workers: dict[int, _Worker] = {}
        self._holder: dict[int, int] = {}
        self._iteration = -1
        self._open: set[int] = set()
        # Open groups without a worker, and workers without groups, both in order of waiting.
        self._free: dict[int, None] = {}
        self._idle: dict[int, None] = {}
        self._losses: dict[int, int] = {}
        self._failed: dict[int, list[int]] = {}  # workers, by the group they failed at

    @property
    def done(self) -> bool:
        """Whether every group of the iteration has its fragment."""
        return not self._open

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self._workers)

    @property
    def iteration(self) -> int:
        return self._iteration

    def join(self, worker: int) -> None:
        """Add a worker without any snapshots."""
        self._workers[worker] = _Worker()
        self._idle[worker] = None

    def lose(self, worker: int, late: bool = False) -> tuple[int, ...]:
        """Remove a worker that died, left or was `late`; returns its open groups, which are free
        again."""
        if worker not in self._workers:
            return ()
        gone = self._workers.pop(worker)
        self._idle.pop(worker, None)
        for group in gone.held:
            del self._holder[group]
        if late:
            self.patience.lose()
        back = sorted(gone.groups & self._open)
        for group in back:
            self._free[group] = None
            self._losses[group] = self._losses.get(group, 0) + 1
        worst = max(back, key=lambda group: self._losses[group], default=None)
        if worst is not None and self._losses[worst] >= MOST_LOSSES:
            raise LostTooOften(
                f"Group {worst} of iteration {self._iteration} was lost with {MOST_LOSSES} "
                "workers: its environments may crash the process they run in. The last checkpoint "
                "is untouched; try --collector.kind local to see the crash."
            )
        return tuple(back)

    def forget(self) -> None:
        """Discard the snapshots of workers, after others were loaded."""
        for group in list(self._holder):
            self._let_go(group)

    def begin(self, iteration: int) -> None:
        """Start an iteration: all groups are open, and results of older orders are ignored."""
        if not self.done:  # Some workers are ahead of the snapshots that this starts from.
            self.forget()
        self._iteration = iteration
        self._open = set(range(self.num_groups))
        self._free = dict.fromkeys(range(self.num_groups))
        self._losses, self._failed = {}, {}
        self.patience.fade()

    def orders(self, now: float) -> list[Order]:
        """Orders for the idle workers; [] if no worker is idle or no group is free."""
        if not self._free or not self._idle:
            return []
        share = -(-len(self._free) // len(self._workers))
        chosen: dict[int, list[int]] = {}
        moving: list[int] = []
        for group in self._free:
            holder = self._holder.get(group)
            if group in self._failed:
                other = self._other(group, chosen, share)
                if other is not None:
                    chosen.setdefault(other, []).append(group)
            elif holder in self._idle and len(chosen.get(holder, ())) < share:
                chosen.setdefault(holder, []).append(group)
            else:
                moving.append(group)
        self._spread(moving, chosen, share)
        return [self._issue(worker, groups, now) for worker, groups in chosen.items()]

    def _other(self, group: int, chosen: dict[int, list[int]], share: int) -> int | None:
        """An idle worker that has not failed at a group; any idle one if all have failed."""
        failed = {worker for worker in self._failed[group] if worker in self._workers}
        barred = failed if len(failed) < len(self._workers) else set()
        free = (w for w in self._idle if w not in barred and len(chosen.get(w, ())) < share)
        return next(free, None)

    def _spread(self, moving: list[int], chosen: dict[int, list[int]], share: int) -> None:
        """Assign the remaining groups to the idle workers with the fewest groups."""
        wait = iter(moving)
        group = next(wait, None)
        sizes: dict[int, list[int]] = {}
        for worker in self._idle if moving else ():
            sizes.setdefault(len(chosen.get(worker, ())), []).append(worker)
        for size in range(share):
            level = sizes.pop(size, [])
            for worker in level:
                if group is None:
                    return
                chosen.setdefault(worker, []).append(group)
                sizes.setdefault(size + 1, []).append(worker)
                group = next(wait, None)

    def _issue(self, worker: int, groups: list[int], now: float) -> Order:
        state = self._workers[worker]
        for group in groups:
            del self._free[group]
        del self._idle[worker]
        state.groups, state.iteration, state.issued = set(groups), self._iteration, now
        state.copied = False
        state.size = -(-len(groups) // self._threads)
        state.due = now + self.patience.seconds * state.size
        release, state.release = frozenset(state.release.difference(groups)), set()
        send = frozenset(groups) - state.held
        return Order(worker, self._iteration, tuple(sorted(groups)), send, release, state.due)

    def take(self, worker: int, iteration: int, group: int, now: float) -> bool:
        """Accept a result; False for a second one, or one of another iteration.

        The first result counts, even from a worker that was dropped as late.
        """
        state = self._answered(worker, iteration, group, now)
        if iteration != self._iteration or group not in self._open:
            if state is not None and group not in state.held:
                state.release.add(group)
            return False
        self._open.discard(group)
        self._free.pop(group, None)
        self._let_go(group)
        if state is not None:
            self._holder[group] = worker
            state.held.add(group)
            state.release.discard(group)
        return True

    def retry(self, worker: int, iteration: int, group: int, now: float) -> bool:
        """Record an error of a group on a worker; returns whether another worker tries it again.

        False if the group is not open or has failed too often: then `take` is next.
        """
        failed = self._failed.get(group, [])
        wanted = iteration == self._iteration and group in self._open
        if not wanted or len(failed) + 1 >= MOST_FAILURES:
            return False
        self._answered(worker, iteration, group, now)
        if self._holder.get(group) == worker:
            self._let_go(group)
        self._failed[group] = [*failed, worker]
        self._free[group] = None
        return True

    def failed_at(self, group: int) -> list[int]:
        """The workers on which a group failed in this iteration."""
        return self._failed.get(group, [])

    def _answered(self, worker: int, iteration: int, group: int, now: float) -> _Worker | None:
        """Remove a group from a worker's order; after its last group the worker is idle."""
        state = self._workers.get(worker)
        if state is not None and iteration == state.iteration and group in state.groups:
            state.groups.discard(group)
            if not state.groups:
                self.patience.learn((now - state.issued) / state.size)
                self._idle[worker] = None
        return state

    def _let_go(self, group: int) -> None:
        """Record that no worker has the group's newest snapshot any more."""
        holder = self._holder.pop(group, None)
        if holder is not None:
            self._workers[holder].held.discard(group)
            self._workers[holder].release.add(group)

    def busy(self) -> Iterable[tuple[int, tuple[int, ...], float, float]]:
        """(worker, its open groups, start, deadline) for all workers with orders."""
        for worker, state in self._workers.items():
            if worker not in self._idle:
                yield worker, tuple(sorted(state.groups)), state.issued, state.due

    def overdue(self, now: float) -> list[int]:
        """Workers past their deadlines, to be removed with `lose(worker, late=True)`."""
        return [worker for worker, _, _, due in self.busy() if due <= now]

    def stragglers(self, now: float) -> list[tuple[int, tuple[int, ...]]]:
        """(worker, its open groups) for workers that are slow while others are idle.

        These groups become free for other workers as well, once per order; the first result counts.
        """
        if self._free or not self._idle:
            return []
        after, found = self.patience.copy_after, []
        for worker, groups, since, _ in self.busy():
            state = self._workers[worker]
            wanted = [group for group in groups if group in self._open]
            if state.copied or state.iteration != self._iteration or not wanted:
                continue
            if now - since > after * state.size:
                state.copied = True
                found.append((worker, tuple(wanted)))
        self._free.update(dict.fromkeys(group for _, groups in found for group in groups))
        return found
