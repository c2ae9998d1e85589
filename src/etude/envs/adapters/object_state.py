"""What a foreign environment remembers, as text: found, saved and put back into its own objects.

The walk starts at the environment and follows attributes, lists and dicts wherever they lead, so
wrappers, worlds and agents are all met; an object met twice is one object again after a restore.
Nothing here can hold code: numbers, strings, arrays, containers of these and random generators are
saved; an object's attributes are written into an object of that class that is already there, none
is ever made. Whatever else is met is left alone, and the probe tells if that mattered.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
from gymnasium import spaces

from etude.core.contracts import Array

_PLAIN = (type(None), bool, int, float, str)
_ARRAY_KINDS = "biufcSU"
_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    generator.__name__: generator
    for generator in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
_CONSTANT = {"metadata", "fullpath"}
"""Attributes that are no state; a file's path differs from machine to machine."""
_LEFT_ALONE = sys.stdlib_module_names | {"numpy", "torch", "mujoco", "pygame"}
"""Packages whose objects are not looked into: they keep state outside Python, or belong to all."""
_KEPT = ["kept"]
_MISSING = object()


class StateError(RuntimeError):
    """A saved state that does not fit the objects it is to be written into."""


def save(root: object) -> str:
    """All that can be saved of an object and of what it leads to, as one line of JSON."""
    return json.dumps(encode(root), separators=(",", ":"))


def load(root: object, text: str) -> None:
    """Put back what `save` gave, into any instance of the same class."""
    _Reader(root).value(json.loads(text), root)


def encode(value: object) -> Any:
    """A value as JSON: plain ones as they are, the rest as [tag, ...]."""
    return _Writer().code(value)


def decode(code: Any) -> Any:
    """The value that `encode` was given, unless objects were in it."""
    return _Reader(None).value(code, _MISSING)


def _bytes(array: Array | np.generic[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _is_key(value: Any) -> bool:
    """Whether a dict's key is a value and no object with a life of its own."""
    if type(value) is tuple:
        return all(map(_is_key, value))
    return type(value) in _PLAIN or isinstance(value, np.generic | Enum)


def _is_walked(value: object) -> bool:
    """Whether an object's attributes are state: not those of classes, spaces or libraries."""
    module = str(type(value).__module__)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | spaces.Space)
        and module.partition(".")[0] not in _LEFT_ALONE
        and module != "gymnasium.envs.registration"
    )


class _Writer:
    """One walk. What can be shared gets a number where it is first met."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.enums: dict[str, type[Enum]] = {}
        self._numbers: dict[int, int | None] = {}

    def code(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, np.generic):
            if value.dtype.kind not in _ARRAY_KINDS:
                return _KEPT
            return ["scalar", value.dtype.str, _bytes(value)]
        if isinstance(value, Enum):
            self.enums[kind.__qualname__] = kind
            return ["enum", kind.__qualname__, value.name]
        if kind is tuple:
            items = self._items(value)
            return _KEPT if items is None else ["tuple", items]
        if id(value) in self._numbers:
            number = self._numbers[id(value)]
            return _KEPT if number is None else ["same", number]
        number = len(self._numbers)
        self._numbers[id(value)] = number
        code = self._shared(value, number)
        if code is _KEPT:
            self._numbers[id(value)] = None
        return code

    def _shared(self, value: Any, number: int) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            if value.dtype.kind not in _ARRAY_KINDS:
                return _KEPT
            return ["array", number, value.dtype.str, list(value.shape), _bytes(value)]
        if kind in (list, set, deque):
            items = self._items(value)
            limit = value.maxlen if kind is deque else None
            return _KEPT if items is None else [kind.__name__, number, items, limit]
        if isinstance(value, dict):
            # Keys first: nothing may be numbered inside a dict that is then left alone.
            items = self._items(value.values()) if all(map(_is_key, value)) else None
            if items is None:
                return _KEPT
            name, keys = "dict" if kind is dict else "mapping", map(self.code, value)
            return [name, number, kind.__qualname__, list(zip(keys, items, strict=True))]
        if isinstance(value, np.random.Generator):
            name = type(value.bit_generator).__name__
            if name not in _BIT_GENERATORS:
                return _KEPT
            return ["generator", number, name, encode(value.bit_generator.state)]
        if kind is random.Random:
            return ["random", number, encode(value.getstate())]
        return self._object(value, number) if _is_walked(value) else _KEPT

    def _items(self, values: Iterable[Any]) -> list[Any] | None:
        """The codes of all values; None if there is no state in any of them."""
        codes = [self.code(value) for value in values]
        return None if codes and all(code is _KEPT for code in codes) else codes

    def _object(self, value: Any, number: int) -> Any:
        self.objects.append(value)
        # Sorted: the order in which attributes came to be differs from instance to instance.
        attributes = {
            name: _KEPT if name in _CONSTANT else self.code(item)
            for name, item in sorted(vars(value).items())
        }
        return ["object", number, type(value).__qualname__, attributes]


class _Reader:
    """Saved values again; for objects, those that the walk from `root` finds."""

    def __init__(self, root: object) -> None:
        found = _Writer()
        found.code(root)
        self._enums = found.enums
        self._spare: dict[str, list[Any]] = {}
        for value in reversed(found.objects):
            self._spare.setdefault(type(value).__qualname__, []).append(value)
        self._taken: set[int] = set()
        self._numbered: dict[int, Any] = {}
        self._makers: dict[str, Callable[..., Any]] = {
            "kept": self._kept,
            "scalar": lambda _, dtype, data: _flat(dtype, data)[0],
            "enum": self._enum,
            "tuple": lambda live, items: tuple(self._values(items, live, tuple)),
            "same": lambda _, number: self._numbered[number],
            "array": self._array,
            "list": self._list,
            "set": self._set,
            "deque": self._deque,
            "dict": self._dict,
            "mapping": self._mapping,
            "generator": self._generator,
            "random": self._random,
            "object": self._object,
        }

    def value(self, code: Any, live: Any) -> Any:
        """What a code stands for, where `live` stands now (`_MISSING` if nothing does)."""
        if type(code) in _PLAIN:
            return code
        return self._makers[code[0]](live, *code[1:])

    def _values(self, codes: list[Any], live: Any, kind: type[Iterable[Any]]) -> Iterable[Any]:
        now: list[Any] = list(live) if isinstance(live, kind) else []
        now += [_MISSING] * (len(codes) - len(now))
        return (self.value(code, item) for code, item in zip(codes, now, strict=False))

    def _kept(self, live: Any) -> Any:
        if live is _MISSING:
            raise StateError("something that cannot be saved is not where it was")
        return live

    def _enum(self, live: Any, name: str, member: str) -> Any:
        if name not in self._enums:
            raise StateError(f"there is no {name} to be found")
        return self._enums[name][member]

    def _array(self, live: Any, number: int, dtype: str, shape: list[int], data: str) -> Any:
        # A new one: the present array may be a constant that others hold.
        return self._number(number, _flat(dtype, data).reshape(shape).copy())

    def _number(self, number: int, value: Any) -> Any:
        self._numbered[number] = value
        return value

    def _list(self, live: Any, number: int, items: list[Any], _: None) -> Any:
        # Numbered before it is filled, because it may contain itself.
        made: list[Any] = self._number(number, [])
        made.extend(self._values(items, live, list))
        return made

    def _set(self, live: Any, number: int, items: list[Any], _: None) -> Any:
        return self._number(number, set(self._values(items, live, set)))

    def _deque(self, live: Any, number: int, items: list[Any], limit: int | None) -> Any:
        made: deque[Any] = self._number(number, deque(maxlen=limit))
        made.extend(self._values(items, live, deque))
        return made

    def _dict(self, live: Any, number: int, _: str, items: list[Any]) -> Any:
        return self._fill(self._number(number, {}), live, items)

    def _mapping(self, live: Any, number: int, kind: str, items: list[Any]) -> Any:
        """A dict of a class of its own, such as defaultdict, keeps what else it is."""
        if type(live).__qualname__ != kind or not self._take(live):
            raise StateError(f"there is no {kind} where one was")
        before = dict(live)
        live.clear()
        return self._fill(self._number(number, live), before, items)

    def _fill(self, made: Any, live: Any, items: list[Any]) -> Any:
        now = live if isinstance(live, dict) else {}
        for key_code, code in items:
            key = self.value(key_code, _MISSING)
            made[key] = self.value(code, now.get(key, _MISSING))
        return made

    def _generator(self, live: Any, number: int, name: str, state: Any) -> Any:
        # In place where possible: what is left alone may hold the same generator.
        if type(getattr(live, "bit_generator", None)).__name__ != name or not self._take(live):
            live = np.random.Generator(_BIT_GENERATORS[name]())
        live.bit_generator.state = decode(state)
        return self._number(number, live)

    def _random(self, live: Any, number: int, state: Any) -> Any:
        if type(live) is not random.Random or not self._take(live):
            live = random.Random()
        live.setstate(decode(state))
        return self._number(number, live)

    def _object(self, live: Any, number: int, kind: str, attributes: dict[str, Any]) -> Any:
        if type(live).__qualname__ != kind or not self._take(live):
            # Whose turn it is, say, differs here: any object of the class will do, because
            # everything in it is about to be written.
            live = self._next_spare(kind)
        self._numbered[number] = live
        current = vars(live)
        for name in [name for name in current if name not in attributes]:
            del current[name]
        for name, code in attributes.items():
            if code != _KEPT:
                current[name] = self.value(code, current.get(name, _MISSING))
        return live

    def _next_spare(self, kind: str) -> Any:
        spare = self._spare.get(kind, [])
        while spare:
            if self._take(value := spare.pop()):
                return value
        raise StateError(f"it has fewer objects of class {kind} than were saved")

    def _take(self, value: Any) -> bool:
        """Whether a present object is free to become one of the saved ones."""
        free = id(value) not in self._taken
        self._taken.add(id(value))
        return free


def _flat(dtype: str, data: str) -> Array:
    flat: Array = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
    return flat
