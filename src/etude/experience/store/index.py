"""The episodes that are held, in memory: which step belongs to which."""

from __future__ import annotations

import numpy as np

from etude.core.contracts import Array


class EpisodeIndex:
    """A queue of finished episodes, then the open one of each lane; 24 bytes each.

    Finished episodes are in the order they ended, so the ones held are always a range of
    numbers. An entry's place counts from the oldest held.
    """

    def __init__(self, lanes: int, first: int = 0) -> None:
        self.first = first
        """The number of the oldest episode held, counted from the store's very first."""
        self._lanes, self._low, self._high = lanes, 0, 0
        size = 64 + lanes
        self._starts: Array = np.zeros(size, np.int64)
        self._returns: Array = np.zeros(size, np.float64)
        self._before: Array = np.zeros(size + 1, np.int64)
        """Steps of all entries before each one; one more than there are entries."""

    def __len__(self) -> int:
        return self._high - self._low

    @property
    def num_finished_steps(self) -> int:
        return int(self._before[self._high] - self._before[self._low])

    @property
    def num_steps(self) -> int:
        """Of finished and open episodes."""
        return int(self._before[self._high + self._lanes] - self._before[self._low])

    @property
    def starts(self) -> Array:
        """[episodes] int64: slots of the first steps of finished episodes."""
        return self._starts[self._low : self._high]

    @property
    def lengths(self) -> Array:
        """[episodes] int64."""
        return np.diff(self._before[self._low : self._high + 1])

    @property
    def returns(self) -> Array:
        """[episodes] float64."""
        return self._returns[self._low : self._high]

    def append(self, table: Array, open_starts: Array, open_lengths: Array) -> None:
        """Episodes that ended, `INDEX` records in the order they did; and what is open now.

        open_starts: [lanes] slots; open_lengths: [lanes] steps so far, maybe 0.
        """
        more = len(table) + self._lanes
        self._make_room(more)
        low, high = self._high, self._high + more
        self._starts[low:high] = np.concatenate((table["start"], open_starts))
        self._returns[low : low + len(table)] = table["return"]
        lengths = np.concatenate((table["length"], open_lengths))
        self._before[low + 1 : high + 1] = self._before[low] + np.cumsum(lengths)
        self._high = low + len(table)

    def evict(self, excess: int) -> None:
        """Let the oldest episodes go until at least `excess` observations went with them."""
        while excess > 0 and self._low < self._high:
            excess -= int(self._before[self._low + 1] - self._before[self._low]) + 1
            self._low += 1
            self.first += 1

    def locate(self, steps: Array) -> tuple[Array, Array]:
        """Places [n] and offsets [n] of the `steps`-th of all steps held; O(log episodes) each.

        Finished episodes come first, so a number below `num_finished_steps` finds one of them.
        """
        before = self._before[self._low : self._high + self._lanes]
        wanted = steps + before[0]
        places = before.searchsorted(wanted, "right") - 1
        return places, wanted - before[places]

    def look_up(self, places: Array) -> tuple[Array, Array]:
        """Slots of first steps [n], and lengths [n], of entries."""
        entries = places + self._low
        lengths: Array = self._before[entries + 1] - self._before[entries]
        return self._starts[entries], lengths

    def _make_room(self, more: int) -> None:
        """Move to the front, with as much room again as is needed: amortised O(1) an episode."""
        if self._high + more <= len(self._starts):
            return
        held, size = len(self), 2 * (len(self) + more)
        starts, returns, before = self.starts, self.returns, self._before
        self._starts, self._returns = np.zeros(size, np.int64), np.zeros(size, np.float64)
        self._before = np.zeros(size + 1, np.int64)
        self._starts[:held], self._returns[:held] = starts, returns
        self._before[: held + 1] = before[self._low : self._high + 1] - before[self._low]
        self._low, self._high = 0, held
