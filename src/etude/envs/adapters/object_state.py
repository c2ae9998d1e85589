"""The state of a third-party environment as text: collected, saved and restored into its objects.

A walk from the environment follows attributes, lists and dicts, and so reaches wrappers, worlds and
agents; references to one object are references to one object after a restore. The text cannot hold
code: it has numbers, strings, arrays, containers of these and random generators. The attributes of
an object are written to an existing object of the same class; no object is created. Other values
are left unchanged, and the probe finds out whether they matter.
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

# Nothing of Etude is imported: other interpreters load this file alone.
Array = np.ndarray[Any, Any]
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
"""Attributes that are not state; a file's path differs between machines."""
_LEFT_ALONE = sys.stdlib_module_names | {"numpy", "torch", "mujoco", "pygame"}
"""Packages whose objects are not walked: their state is outside of Python, or shared."""
_KEPT = ["kept"]
_MISSING = object()


class StateError(RuntimeError):
    """Raised when a saved state does not fit the objects to restore it into."""


def save(root: object) -> str:
    """Save the state of an object and of all that it refers to, as one line of JSON."""
    return json.dumps(encode(root), separators=(",", ":"))


def load(root: object, text: str) -> None:
    """Restore a text of `save` into any instance of the same class."""
    _Reader(root).value(json.loads(text), root)


def encode(value: object) -> Any:
    """Encode a value as JSON: plain values unchanged, others as [tag, ...]."""
    return _Writer().code(value)


def decode(code: Any) -> Any:
    """Decode a result of `encode` without objects."""
    return _Reader(None).value(code, _MISSING)


def _bytes(array: Array | np.generic[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _is_key(value: Any) -> bool:
    """Whether a dict's key is an immutable value."""
    if type(value) is tuple:
        return all(map(_is_key, value))
    return type(value) in _PLAIN or isinstance(value, np.generic | Enum)


def _is_walked(value: object) -> bool:
    """Whether an object's attributes are state, unlike those of classes, spaces and libraries."""
    module = str(type(value).__module__)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | spaces.Space)
        and module.partition(".")[0] not in _LEFT_ALONE
        and module != "gymnasium.envs.registration"
    )


class _Writer:
    """One walk. Objects that can be shared get a number when they are first reached."""

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
            # Check keys first: a dict that is left unchanged must not number its values.
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
        """The codes of all values; None if none of them has state."""
        codes = [self.code(value) for value in values]
        return None if codes and all(code is _KEPT for code in codes) else codes

    def _object(self, value: Any, number: int) -> Any:
        self.objects.append(value)
        # Sorted, because the order of attributes differs between instances.
        attributes = {
            name: _KEPT if name in _CONSTANT else self.code(item)
            for name, item in sorted(vars(value).items())
        }
        return ["object", number, type(value).__qualname__, attributes]


class _Reader:
    """Decodes values; objects are those that a walk from `root` reaches."""

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
        """Decode a code to replace the value `live` (`_MISSING` if there is none)."""
        if type(code) in _PLAIN:
            return code
        return self._makers[code[0]](live, *code[1:])

    def _values(self, codes: list[Any], live: Any, kind: type[Iterable[Any]]) -> Iterable[Any]:
        now: list[Any] = list(live) if isinstance(live, kind) else []
        now += [_MISSING] * (len(codes) - len(now))
        return (self.value(code, item) for code, item in zip(codes, now, strict=False))

    def _kept(self, live: Any) -> Any:
        if live is _MISSING:
            raise StateError("a value that cannot be saved is missing")
        return live

    def _enum(self, live: Any, name: str, member: str) -> Any:
        if name not in self._enums:
            raise StateError(f"the enum {name} is missing")
        return self._enums[name][member]

    def _array(self, live: Any, number: int, dtype: str, shape: list[int], data: str) -> Any:
        # A new array, because the current one may be a shared constant.
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
        """Refill a dict subclass such as defaultdict, which keeps its other state."""
        if type(live).__qualname__ != kind or not self._take(live):
            raise StateError(f"a {kind} is missing")
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
        # In place if possible, because unsaved objects may refer to the same generator.
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
            # References may differ here. Any object of the class can be used, because all of its
            # attributes are written.
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
        """Claim an existing object for a saved one; returns whether it was free."""
        free = id(value) not in self._taken
        self._taken.add(id(value))
        return free


def _flat(dtype: str, data: str) -> Array:
    flat: Array = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
    return flat
