"""The log rows that a run has behind it: they are on disk, and may be millions.

Whoever needs each of them iterates; whoever draws or summarises takes a bounded part, `thinned`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
KEPT = 1024
"""Rows of a kind that are kept at least, once there were so many; twice as many at most."""
RECENT = 64
"""The last rows, which are kept whatever their kind."""
KINDS = 6

T = TypeVar("T")
U = TypeVar("U")


class Thinned(Generic[T]):
    """All items of a short sequence; of a long one an evenly spaced part, and the last ones.

    Items are thinned by kind, so that a rare kind (log rows with an evaluation) stays whole for
    longer. What is kept follows from the sequence alone, not from when it was interrupted.
    """

    def __init__(self) -> None:
        self.count = 0
        """Items that were added."""
        self._kinds: dict[int, _Kind[T]] = {}
        self._recent: deque[tuple[int, T]] = deque(maxlen=RECENT)

    def add(self, item: T, kind: int = 0) -> None:
        """Take in the next item; `kind`: any number, such as that of a row's columns."""
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = next(reversed(self._kinds))
        self._kinds.setdefault(kind, _Kind()).add((self.count, item))
        self._recent.append((self.count, item))
        self.count += 1

    def numbered(self) -> list[tuple[int, T]]:
        """What is kept, in order, each with its place in the whole sequence, from 0 on."""
        kept = chain(self._recent, *(kind.items() for kind in self._kinds.values()))
        return sorted(dict(kept).items())

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self.numbered())

    def weighted(self) -> list[tuple[T, int]]:
        """What is kept, each with the number of items it stands for: of its kind, the stride."""
        found: dict[int, tuple[T, int]] = {}
        for kind in self._kinds.values():
            found |= {place: (item, kind.stride) for place, item in kind.kept}
        return [found[place] for place in sorted(found)]

    def mapped(self, change: Callable[[T], U]) -> Thinned[U]:
        """The same with other items; what is added later is kept as it would have been here."""
        made = {place: change(item) for place, item in self.numbered()}
        other = Thinned[U]()
        other.count = self.count
        other._recent.extend((place, made[place]) for place, _ in self._recent)
        other._kinds = {name: kind.replaced(made) for name, kind in self._kinds.items()}
        return other


class _Kind(Generic[T]):
    """Of the items of one kind, one in each `stride`."""

    def __init__(self) -> None:
        self.seen, self.stride = 0, 1
        self.kept: list[tuple[int, T]] = []
        self.last: tuple[int, T] | None = None

    def add(self, numbered: tuple[int, T]) -> None:
        self.last = numbered
        if self.seen % self.stride == 0:
            self.kept.append(numbered)
        self.seen += 1
        if len(self.kept) == 2 * KEPT:
            self.kept = self.kept[::2]
            self.stride *= 2

    def items(self) -> list[tuple[int, T]]:
        return self.kept if self.last is None else [*self.kept, self.last]

    def replaced(self, items: dict[int, U]) -> _Kind[U]:
        other = _Kind[U]()
        other.seen, other.stride = self.seen, self.stride
        other.kept = [(place, items[place]) for place, _ in self.kept]
        other.last = None if self.last is None else (self.last[0], items[self.last[0]])
        return other


class History:
    """The log rows that a resumed run keeps, the oldest first; here, rows in memory."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        """Every row, read one by one."""
        return iter(self._rows)

    @property
    def last(self) -> Row:
        """The last row; {} where there is none."""
        last: Row = {}
        for row in self:
            last = row
        return last

    def thinned(self) -> Thinned[Row]:
        """A bounded part of the rows, for whoever draws or summarises them."""
        kept = Thinned[Row]()
        for row in self:
            kept.add(row, num_values(row))
        return kept

    def after(self, step: int, step_of: Callable[[Row], int]) -> Iterator[Row]:
        """The rows after a step, by what `step_of` says of a row; it grows from row to row."""
        return (row for row in self if step_of(row) > step)


def history_of(rows: Iterable[Row]) -> History:
    """Rows as a history, which they may be already."""
    return rows if isinstance(rows, History) else History(rows)


def num_values(row: Row) -> int:
    """The columns of a row that hold a value: rows of a kind have as many."""
    return sum(value is not None for value in row.values())
