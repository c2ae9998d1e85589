"""The random streams of a batch's episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etude.core.errors import UsageError
from etude.core.keys import Key


class Streams:
    """The generators `key.episode(row, episode)`, one per row, wound back instead of rebuilt.

    Building one takes as long as everything else a reset draws and writes.
    """

    def __init__(self, num_rows: int) -> None:
        self._generators = [np.random.Generator(np.random.Philox(0)) for _ in range(num_rows)]
        self._state: dict[str, Any] | None = None

    def use(self, key: Key) -> None:
        """Draw from this key's episodes from now on."""
        self._state = dict(key.episode(0, 0).bit_generator.state)

    def begin(self, rows: Sequence[int], episodes: Sequence[int]) -> list[np.random.Generator]:
        """The streams of these rows' episodes, each at its start."""
        state = self._state
        if state is None:
            raise UsageError("reset or restore an environment before stepping it.")
        counter = state["state"]["counter"]
        generators = [self._generators[row] for row in rows]
        for generator, row, episode in zip(generators, rows, episodes, strict=True):
            counter[2], counter[3] = row, episode
            generator.bit_generator.state = state
        return generators
