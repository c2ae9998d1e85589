"""Which worker computes which group, while workers join, die, freeze and are late.

No threads, no clock and no network in here: callers report what happened and when, and get orders.
A fragment is a pure function of (broadcast, snapshot, key), so that it does not matter who computes
it or how often: the first result of an (iteration, group) counts, and any other is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from etude.core.errors import EtudeError

FIRST_PATIENCE = 600.0
"""Seconds for a fragment while none has come back yet: machines may still load and compile."""
LEAST_PATIENCE = 30.0
SLOWER = 10.0
"""How many times slower than the slowest so far a fragment may be, where no deadline is given."""
MOST_DOUBLINGS = 3
"""How often patience doubles, while all workers are late."""
FADES = 0.9
"""Factor of the slowest time so far, per iteration: a slow spell is forgotten in time."""
COPY_AFTER = 3.0
"""How many times the median a fragment may take before an idle worker computes it as well."""
LEAST_COPY_AFTER = 1.0
RECENT = 256
"""Answers that the median is taken over."""
MOST_LOSSES = 10
"""Workers that may be lost with one group in an iteration before the group is the cause."""
MOST_FAILURES = 3
"""Errors of one group in an iteration before the group is the cause."""


class Patience:
    """Seconds that a fragment may take: a fixed deadline, or by what fragments took so far."""

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
        """Seconds after which a fragment is given to another worker too."""
        usual = median(self._recent) if self._recent else float("inf")
        return max(LEAST_COPY_AFTER, COPY_AFTER * usual)

    def fade(self) -> None:
        """An iteration begins: the slowest time so far counts a little less."""
        if self._slowest is not None:
            self._slowest *= FADES

    def learn(self, seconds: float) -> None:
        """A fragment came back after so long."""
        self._slowest = max(seconds, self._slowest or 0.0)
        self._recent.append(seconds)
        self._doublings = 0

    def lose(self) -> None:
        """A worker was dropped for being late. If all are, the machines have become slow."""
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)


@dataclass(frozen=True)
class Order:
    """Work for one worker in one iteration."""

    worker: int
    iteration: int
    groups: tuple[int, ...]
    """Ascending."""
    send: frozenset[int]
    """Groups whose snapshot the worker does not hold."""
    release: frozenset[int]
    """Groups that went to other workers since its last order: their environments can go."""
    due: float
    """When the worker is dropped."""


@dataclass
class _Worker:
    groups: set[int] = field(default_factory=set)
    """Ordered and not answered."""
    iteration: int = -1
    """Of the order."""
    issued: float = 0.0
    due: float = 0.0
    size: int = 1
    """Fragments of the order per thread."""
    copied: bool = False
    """Whether its groups were given to other workers as well."""
    held: set[int] = field(default_factory=set)
    """Groups whose newest snapshot stands in its environments."""
    release: set[int] = field(default_factory=set)


class LostTooOften(EtudeError):
    """A group with which every worker is lost."""


class Schedule:
    """Groups over workers, one iteration at a time.

    A worker keeps the groups it has, so that a snapshot travels only where something happened; an
    idle worker gets at most its share of what is open, so that nobody is left with all of it.
    """

    def __init__(self, num_groups: int, threads: int = 1, patience: Patience | None = None) -> None:
        """`threads`: fragments that a worker computes side by side."""
        self.num_groups = num_groups
        self.patience = patience or Patience()
        self._threads = threads
        self._workers: dict[int, _Worker] = {}
        self._holder: dict[int, int] = {}
        self._iteration = -1
        self._open: set[int] = set()
        # Open groups that no worker has, and workers without groups, the longest waiting first.
        self._free: dict[int, None] = {}
        self._idle: dict[int, None] = {}
        self._losses: dict[int, int] = {}
        self._failed: dict[int, list[int]] = {}  # workers, by the group they failed at

    @property
    def done(self) -> bool:
        """Every group of the iteration has its fragment."""
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
        """Remove a worker, which died, left or was `late`; returns its open groups, now free."""
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
                f"Group {worst} of iteration {self._iteration} was given to {MOST_LOSSES} workers "
                "and none of them came back: its environments may crash the process they run in. "
                "The last checkpoint is untouched; try --collector.kind local to see the crash."
            )
        return tuple(back)

    def forget(self) -> None:
        """Snapshots were loaded: those that workers hold are of no use any more."""
        for group in list(self._holder):
            self._let_go(group)

    def begin(self, iteration: int) -> None:
        """Start an iteration, for which all groups are wanted; older orders are not any more."""
        if not self.done:  # Some workers are further than the snapshots that this begins with.
            self.forget()
        self._iteration = iteration
        self._open = set(range(self.num_groups))
        self._free = dict.fromkeys(range(self.num_groups))
        self._losses, self._failed = {}, {}
        self.patience.fade()

    def orders(self, now: float) -> list[Order]:
        """Orders for the idle workers; [] where no worker is idle or nothing is open."""
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
        """An idle worker that has not failed at a group; any, where there is no other."""
        failed = {worker for worker in self._failed[group] if worker in self._workers}
        barred = failed if len(failed) < len(self._workers) else set()
        free = (w for w in self._idle if w not in barred and len(chosen.get(w, ())) < share)
        return next(free, None)

    def _spread(self, moving: list[int], chosen: dict[int, list[int]], share: int) -> None:
        """Give groups that are left to the idle workers with the fewest."""
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
        """Take a result; False where it is a second one, or of another iteration.

        A worker that was dropped as late may still be the first: its result is as good as any.
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
        """A group failed on a worker; whether another worker is to try it.

        False where the group is not wanted any more or has failed too often: then `take` is next.
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
        """Workers on which a group failed in this iteration."""
        return self._failed.get(group, [])

    def _answered(self, worker: int, iteration: int, group: int, now: float) -> _Worker | None:
        """One group less to wait for from a worker; after its last one the worker is idle."""
        state = self._workers.get(worker)
        if state is not None and iteration == state.iteration and group in state.groups:
            state.groups.discard(group)
            if not state.groups:
                self.patience.learn((now - state.issued) / state.size)
                self._idle[worker] = None
        return state

    def _let_go(self, group: int) -> None:
        """No worker holds the group's newest snapshot any more."""
        holder = self._holder.pop(group, None)
        if holder is not None:
            self._workers[holder].held.discard(group)
            self._workers[holder].release.add(group)

    def busy(self) -> Iterable[tuple[int, tuple[int, ...], float, float]]:
        """(worker, its open groups, since when, until when) of all that have orders."""
        for worker, state in self._workers.items():
            if worker not in self._idle:
                yield worker, tuple(sorted(state.groups)), state.issued, state.due

    def overdue(self, now: float) -> list[int]:
        """Workers to drop, with `lose(worker, late=True)`."""
        return [worker for worker, _, _, due in self.busy() if due <= now]

    def stragglers(self, now: float) -> list[tuple[int, tuple[int, ...]]]:
        """(worker, its open groups) of those that take long while other workers are idle.

        From now on these groups are free for the others too, once per order; the first result
        counts.
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
