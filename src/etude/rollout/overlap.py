"""Collection of the next iteration while this one trains.

Iteration i is collected with the weights that were current when iteration i - 1 began to train,
and iteration 0 with the first ones. The lag is a number and not a race: which weights collect what
never depends on who is faster, so a run remains exact. Its state is what the collection under way
started from, and a resumed run starts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from etude.core.contracts import Broadcast, Collector, Fragment
from etude.core.trees import Tree
from etude.rollout.local import CollectorWrapper


class OverlappedCollector(CollectorWrapper):
    """A collector one iteration ahead of the learner."""

    def __init__(self, inner: Collector, is_wanted: Callable[[int], bool]) -> None:
        """`is_wanted(iteration)`: the run goes on to that iteration; after its last one nothing
        is collected ahead."""
        super().__init__(inner)
        self._is_wanted = is_wanted
        self._thread = ThreadPoolExecutor(1, "ahead")
        self._flight: Future[list[Fragment]] | None = None
        # What the next collection starts from: the groups' state, and what they act with. None
        # before the run's first iteration, which has no broadcast of an earlier one.
        self._start: tuple[Tree, Broadcast] | None = None

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """What was collected ahead for this iteration; `broadcast` goes to the next one."""
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
        """Give up what is under way: it would be collected again, with the same result."""
        self._inner.close()
        if self._flight is not None:
            with suppress(Exception):
                self._flight.result()
        self._thread.shutdown()
