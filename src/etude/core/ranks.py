"""Learner processes that share a run's shards: what each may ask of the others.

Of R ranks, rank r has shards r * S / R up to (r + 1) * S / R and the groups that fill them. What
goes over all shards is sent to every rank in shard order and added up there in that order, so that
the result does not depend on R. The first rank alone writes, tests and decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch

from etude.core.errors import EtudeError, NonFinite

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process that it starts."""


def world_size() -> int:
    """The number of processes that torchrun started together."""
    there = all(os.environ.get(name) for name in VARIABLES)
    return int(os.environ["WORLD_SIZE"]) if there else 1


def is_first_process() -> bool:
    """Whether this process is the one that writes and speaks."""
    return world_size() == 1 or int(os.environ["RANK"]) == 0


def was_restarted() -> bool:
    """Whether torchrun has started these processes again, after one was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class LostRank(EtudeError):
    """Another rank has gone: killed, failed, or its machine with it."""


class ReportedElsewhere(EtudeError):
    """Something that the first rank says; the others only leave."""

    def __init__(self, exit_code: int = EtudeError.exit_code) -> None:
        super().__init__("")
        self.exit_code = exit_code


class Ranks(Protocol):
    """All ranks call the same methods in the same order, or wait for each other in vain."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this one writes, tests and decides."""

    def part(self, count: int) -> range:
        """This rank's of `count` shards or groups, which the ranks divide."""

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` gives on the first rank, the only one to call it.

        Plain data: dicts, lists, numbers, strings, arrays; tuples arrive as lists.
        """

    def gather(self, parts: list[T]) -> list[T]:
        """The parts of all ranks, in their order; plain data."""

    def ordered_sum(self, totals: Sequence[torch.Tensor], shards: Sequence[T]) -> Iterator[T]:
        """Yields each of this rank's `shards`; the caller adds its part to `totals`.

        `totals` are zeroed before. Once the caller has asked for all shards, `totals` are the sums
        over those of all ranks, in shard order.
        """

    def differing(self, make: Callable[[], str]) -> list[int]:
        """The ranks on which `make` gives something else than on the first."""

    def owner(self, index: int, count: int) -> str:
        """Who has one of `count` shards, as the end of a sentence: ", on rank 1"."""

    def adding(self, exactly: bool, patience: Callable[[], float]) -> Ranks:
        """The same ranks, whose sums are taken in shard order, or in whichever is fastest.

        `patience`: the seconds for which they wait for one that gives no sign of life.
        """


@runtime_checkable
class Shared(Protocol):
    """State that ranks have in parts."""

    def gather(self) -> None:
        """Brings the other ranks' parts here, for `state_dict`; all ranks call it together."""


class Alone:
    """One process with all shards."""

    rank = 0
    size = 1
    is_first = True

    def part(self, count: int) -> range:
        return range(count)

    def from_first(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, parts: list[T]) -> list[T]:
        return parts

    def ordered_sum(self, totals: Sequence[torch.Tensor], shards: Sequence[T]) -> Iterator[T]:
        for total in totals:
            total.zero_()
        yield from shards

    def differing(self, make: Callable[[], str]) -> list[int]:
        return []

    def owner(self, index: int, count: int) -> str:
        return ""

    def adding(self, exactly: bool, patience: Callable[[], float]) -> Ranks:
        return self


ALONE = Alone()


def raise_first(ranks: Ranks, faults: Sequence[NonFinite | None]) -> None:
    """Raise the first shard's fault, on every rank; `faults` are those of this rank's shards."""
    gathered = ranks.gather([None if f is None else (f.where, f.arrays) for f in faults])
    for index, fault in enumerate(gathered):
        if fault is not None:
            where, arrays = fault
            raise NonFinite(f"{where}{ranks.owner(index, len(gathered))}", arrays)


def named(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
