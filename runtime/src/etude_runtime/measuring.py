"""From measurements to what a policy reads: clip, scale, history; noise and delay for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude_runtime.contract import Array, Observation, Term


class Reader:
    """One observation: its terms as in training, with the history that belongs to them."""

    def __init__(self, observation: Observation) -> None:
        self.observation = observation
        self.rng: np.random.Generator | None = None
        """Draws noise and delays of training; None: there are none."""
        self._late: list[_Past] = []
        self._whole: _Past | None = None

    def reset(self) -> None:
        """Nothing was measured yet; delays are drawn anew."""
        each = self.observation
        self._late = [_Past(term.history, self._delay(term.delay)) for term in each.terms]
        self._whole = _Past(each.history, self._delay(each.delay))

    def read(self, measurements: Sequence[Array]) -> Array:
        """[size] float32 of the measurements [term.size] float64 of all terms."""
        parts = [
            past.add(self._measured(term, value))
            for term, past, value in zip(
                self.observation.terms, self._late, measurements, strict=True
            )
        ]
        assert self._whole is not None
        return self._whole.add(np.concatenate(parts))

    def _measured(self, term: Term, value: Array) -> Array:
        if self.rng is not None and term.noise.any():
            value = value + self.rng.uniform(-1.0, 1.0, value.shape) * term.noise
        if term.clip is not None:
            value = np.clip(value, *term.clip)
        return (value * term.scale).astype(np.float32)

    def _delay(self, steps: tuple[int, int]) -> int:
        return 0 if self.rng is None else int(self.rng.integers(steps[0], steps[1] + 1))


class _Past:
    """The last vectors, newest first; before the first there was nothing but the first."""

    def __init__(self, history: int, delay: int) -> None:
        self._history, self._delay = history, delay
        self._kept: list[Array] = []

    def add(self, vector: Array) -> Array:
        """[history * n]: those that are read now."""
        if not self._kept:
            self._kept = [vector] * (self._delay + self._history)
        else:
            self._kept = [vector, *self._kept[:-1]]
        return np.concatenate(self._kept[self._delay :])
