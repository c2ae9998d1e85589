"""Accidents that happen to files: for tests, and for the gate that tries thousands of them."""

from __future__ import annotations

import random

WAYS = ("cut", "flip", "zero", "overwrite")


def damage(data: bytes, way: str, chance: random.Random) -> bytes:
    """A file's bytes after an accident: cut, bits flipped, blocks of zeros, a stretch overwritten.

    "shuffle" overwrites the beginning, where the structure is.
    """
    changed = bytearray(data)
    if way == "cut":
        return data[: chance.randrange(len(data))]
    if way == "flip":
        for _ in range(chance.choice((1, 8, 64))):
            changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif way == "zero":
        start = chance.randrange(0, len(data), 512)
        length = 512 * chance.choice((1, 8))
        changed[start : start + length] = bytes(len(changed[start : start + length]))
    else:
        begin = 0 if way == "shuffle" else chance.randrange(len(data))
        for _ in range(16):
            changed[min(len(data) - 1, begin + chance.randrange(2048))] = chance.randrange(256)
    return bytes(changed)
