"""The log rows of a run so far: on disk, and possibly millions.

Iterate over them for every row; charts and summaries use a bounded part of them, `thinned`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

Row = dict[str, Any]
KEPT = 1024
"""Fewest rows of a kind that are kept of a longer history; at most twice this number."""
RECENT = 64
"""Number of last rows that are kept in any case."""
KINDS = 6
"""Most kinds of rows that are thinned separately."""

T = TypeVar("T")
U = TypeVar("U")


class Thinned(Generic[T]):
    """All items of a short sequence; of a long one an evenly spaced part, and the last ones.

    Kinds are thinned separately, so that a rare kind (log rows with an evaluation) stays complete
    for longer. The choice depends on the sequence alone, not on interruptions.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of added items."""
        self._kinds: dict[int, _Kind[T]] = {}
        self._recent: deque[tuple[int, T]] = deque(maxlen=RECENT)

    def add(self, item: T, kind: int = 0) -> None:
        """Add the next item; `kind`: any number, for example the number of columns of a row."""
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = next(reversed(self._kinds))
        self._kinds.setdefault(kind, _Kind()).add((self.count, item))
        self._recent.append((self.count, item))
        self.count += 1

    def numbered(self) -> list[tuple[int, T]]:
        """(index in the whole sequence, item) of all kept items, in order."""
        kept = chain(self._recent, *(kind.items() for kind in self._kinds.values()))
        return sorted(dict(kept).items())

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self.numbered())

    def weighted(self) -> list[tuple[T, int]]:
        """(item, weight) of all kept items; the weight is the stride of the item's kind."""
        found: dict[int, tuple[T, int]] = {}
        for kind in self._kinds.values():
            found |= {place: (item, kind.stride) for place, item in kind.kept}
        return [found[place] for place in sorted(found)]

    def mapped(self, change: Callable[[T], U]) -> Thinned[U]:
        """Apply `change` to all kept items; later additions are thinned as here."""
        made = {place: change(item) for place, item in self.numbered()}
        other = Thinned[U]()
        other.count = self.count
        other._recent.extend((place, made[place]) for place, _ in self._recent)
        other._kinds = {name: kind.replaced(made) for name, kind in self._kinds.items()}
        return other


class _Kind(Generic[T]):
    """Every `stride`-th item of one kind."""

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
    """The log rows that a resumed run keeps, oldest first; this class: rows in memory."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        """All rows, read one by one."""
        return iter(self._rows)

    @property
    def last(self) -> Row:
        """The last row; {} without rows."""
        last: Row = {}
        for row in self:
            last = row
        return last

    def thinned(self) -> Thinned[Row]:
        """A bounded part of the rows, for charts and summaries."""
        kept = Thinned[Row]()
        for row in self:
            kept.add(row, num_values(row))
        return kept

    def after(self, step: int, step_of: Callable[[Row], int]) -> Iterator[Row]:
        """Rows after a step; `step_of` returns the step of a row and grows from row to row."""
        return (row for row in self if step_of(row) > step)


def history_of(rows: Iterable[Row]) -> History:
    """Convert rows to a `History`, unless they are one."""
    return rows if isinstance(rows, History) else History(rows)


def num_values(row: Row) -> int:
    """Number of columns with a value, which tells kinds of rows apart."""
    return sum(value is not None for value in row.values())
