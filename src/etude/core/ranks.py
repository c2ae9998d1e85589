"""Learner processes (ranks) that share the shards of a run, and their communication.

Of R ranks, rank r has shards r * S / R up to (r + 1) * S / R and the groups that fill them. Sums
over all shards are computed on every rank in shard order, so that the result does not depend on R.
Only the first rank writes, evaluates and decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import torch

from etude.core.errors import EtudeError, NonFinite

T = TypeVar("T")
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each process."""


def world_size() -> int:
    """Number of processes that torchrun started together."""
    there = all(os.environ.get(name) for name in VARIABLES)
    return int(os.environ["WORLD_SIZE"]) if there else 1


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints."""
    return world_size() == 1 or int(os.environ["RANK"]) == 0


def was_restarted() -> bool:
    """Whether torchrun has restarted these processes after a loss."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class LostRank(EtudeError):
    """Another rank was lost: killed, failed, or its machine went down."""


class ReportedElsewhere(EtudeError):
    """An error that the first rank reports; the others exit silently."""

    def __init__(self, exit_code: int = EtudeError.exit_code) -> None:
        super().__init__("")
        self.exit_code = exit_code


class Ranks(Protocol):
    """Collective operations: all ranks must call the same methods in the same order."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which writes, evaluates and decides."""

    def part(self, count: int) -> range:
        """Indices of this rank's shards or groups of `count`."""

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank only, and return its result on all ranks.

        Plain data: dicts, lists, numbers, strings, arrays; tuples arrive as lists.
        """

    def gather(self, parts: list[T]) -> list[T]:
        """Concatenate the lists of all ranks, in their order; plain data."""

    def ordered_sum(self, totals: Sequence[torch.Tensor], shards: Sequence[T]) -> Iterator[T]:
        """Yield each of this rank's `shards`; the caller adds its part to `totals`.

        `totals` are zeroed first. After the last shard, `totals` are the sums over the shards of
        all ranks, in shard order.
        """

    def differing(self, make: Callable[[], str]) -> list[int]:
        """The ranks on which `make` returns another value than on the first."""

    def owner(self, index: int, count: int) -> str:
        """The rank of one of `count` shards, as the end of a sentence: ", on rank 1"."""

    def adding(self, exactly: bool, patience: Callable[[], float]) -> Ranks:
        """The same ranks with sums in shard order if `exactly`, else in the fastest order.

        `patience`: seconds to wait for a rank that does not respond.
        """


@runtime_checkable
class Shared(Protocol):
    """An object whose state is distributed over the ranks."""

    def gather(self) -> None:
        """Collect the parts of all ranks for `state_dict`; all ranks call it together."""


class Alone:
    """A single process with all shards."""

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
    """Raise the fault of the first shard that has one, on every rank.

    faults: one entry per shard of this rank.
    """
    gathered = ranks.gather([None if f is None else (f.where, f.arrays) for f in faults])
    for index, fault in enumerate(gathered):
        if fault is not None:
            where, arrays = fault
            raise NonFinite(f"{where}{ranks.owner(index, len(gathered))}", arrays)


def named(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
