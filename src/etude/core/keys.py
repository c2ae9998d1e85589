"""Random streams derived from a path of names, without generators that are carried along."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from etude.core.errors import UsageError


@dataclass(frozen=True)
class Key:
    """Name of a random stream, for example (seed, "act", group 3, iteration 17).

    Different paths give independent streams; the same path gives the same stream on any thread and
    machine.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def child(self, *names: str | int) -> Key:
        """A key one or more levels below this one."""
        return Key(self.seed, self.path + names)

    @cached_property
    def _bits(self) -> int:
        # JSON distinguishes (1, "23"), (12, "3") and ("1", 23).
        parts = [p if isinstance(p, str) else operator.index(p) for p in (self.seed, *self.path)]
        text = json.dumps(parts)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")

    def generator(self) -> np.random.Generator:
        """A new generator at the start of this key's stream."""
        return np.random.Generator(np.random.Philox(key=self._bits))

    def episode(self, env: int, episode: int) -> np.random.Generator:
        """A generator for one episode of one environment.

        Environment and episode are the high words of Philox's counter, so that a stream needs no
        hash and streams cannot overlap; the word below distinguishes them from `generator`.
        """
        return np.random.Generator(np.random.Philox(key=self._bits, counter=[0, 1, env, episode]))

    def integer(self) -> int:
        """A 63-bit seed for the generators of other libraries."""
        return self._bits & (2**63 - 1)


class Streams:
    """The generators `key.episode(env, episode)`, reset instead of constructed.

    Constructing one takes as long as the rest of an environment's reset.
    """

    def __init__(self, num_envs: int) -> None:
        self._generators = [np.random.Generator(np.random.Philox(0)) for _ in range(num_envs)]
        self._state: dict[str, Any] | None = None

    def use(self, key: Key) -> None:
        """Set the key of the streams."""
        self._state = dict(key.episode(0, 0).bit_generator.state)

    def begin(self, envs: Sequence[int], episodes: Sequence[int]) -> list[np.random.Generator]:
        """Generators at the start of these environments' episodes."""
        state = self._state
        if state is None:
            raise UsageError("reset or restore an environment before stepping it.")
        counter = state["state"]["counter"]
        generators = [self._generators[env] for env in envs]
        for generator, env, episode in zip(generators, envs, episodes, strict=True):
            counter[2], counter[3] = env, episode
            generator.bit_generator.state = state
        return generators


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""Increment between the inputs of `mix` (splitmix64)."""
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def mix(bits: Any) -> Any:
    """Hash uint64 [...] to pseudorandom bits (splitmix64)."""
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits
