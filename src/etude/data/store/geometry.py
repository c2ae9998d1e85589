"""Fields and sizes of an episode store, known before anything is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from etude.core.contracts import ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.trees import Tree

FORMAT, VERSION, ENCODED_VERSION = "etude-episodes", 1, 2
OBS = "obs/"
BLOCK_BYTES = 1 << 30
"""A block file is at most about this large: terabytes are then thousands of files."""
BLOCKS = 8
"""Blocks of a replay store at full capacity, about. Fewer are read faster, more free disk space
earlier."""
INDEX = np.dtype([("start", "<i8"), ("length", "<i8"), ("return", "<f8")])
"""One finished episode: the slot of its first step, its number of steps, its sum of rewards."""

_FIXED = {
    "rewards": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
}
_POINTER = ArraySpec((2,), "int64")
_KINDS = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
_NAME = re.compile(r"obs/[A-Za-z0-9_.-]{1,64}")
_PAGE = 4096
LANES = 1 << 20
_MAX = {"lanes": LANES, "max_episode_steps": 1 << 40, "capacity": 1 << 50}
_MAX_RECORD, _MAX_BLOCK, _MAX_DIMENSIONS = 1 << 30, 1 << 40, 8
"""Larger sizes are mistakes or attacks, and are refused before anything is allocated."""


def store_specs(env: EnvSpec) -> dict[str, ArraySpec]:
    """The fields that are stored for every step of an environment."""
    observations = {OBS + name: spec for name, spec in env.observations.items()}
    return {**observations, "actions": env.action.array, **_FIXED}


@dataclass(frozen=True)
class StoreGeometry:
    """Fields, lanes and sizes of a store; an impossible size is refused with one that works."""

    specs: Mapping[str, ArraySpec]
    """Per step: "obs/<name>", "actions", "rewards", "terminated", "truncated"."""
    lanes: int
    """Environments that advance together; 1 for a dataset."""
    max_episode_steps: int
    """Upper bound on the length of episodes, and so on the age of an open one."""
    capacity: int | None = None
    """Observations in the store before the oldest episodes are evicted: one per step, and the last
    of each episode. None never evicts."""
    block_steps: int = 0
    """Steps of every lane in one block file; 0 for a suitable number."""
    encoded: Mapping[str, str] = field(default_factory=dict)
    """{"obs/<name>": "png" or "jpeg"} of pictures that are stored compressed, see `Frames`."""

    def __post_init__(self) -> None:
        _check_specs(self.specs)
        for name in self.encoded:
            spec, kind = self.specs.get(name), self.encoded[name]
            if spec is None or not is_picture(spec) or kind not in ("png", "jpeg"):
                raise UsageError(f"{name!r} cannot be kept as {kind!r}: png and jpeg are pictures.")
        for name, most in _MAX.items():
            value = getattr(self, name)
            if not (name == "capacity" and value is None) and not 1 <= value <= most:
                raise UsageError(f"{name} {value:,} of an episode store is not in 1 to {most:,}.")
        if self.step_record.itemsize > _MAX_RECORD:
            raise UsageError(f"A step of {self.step_record.itemsize:,} bytes cannot be stored.")
        least = 2 * self.lanes * (self.max_episode_steps + 1)
        if self.capacity is not None and self.capacity < least:
            raise UsageError(
                f"A capacity of {self.capacity:,} is too small for {self.lanes:,} lanes of "
                f"episodes of up to {self.max_episode_steps:,} steps: the open ones alone could "
                f"fill half of it. Use {least:,} or more."
            )
        if not self.block_steps:
            chosen = max(1, BLOCK_BYTES // (self.lanes * self.step_record.itemsize))
            if self.capacity is not None:
                chosen = min(chosen, max(1, math.ceil(self.capacity / self.lanes / BLOCKS)))
            object.__setattr__(self, "block_steps", chosen)
        if self.block_steps < 1 or self.block_slots * self.step_record.itemsize > _MAX_BLOCK:
            raise UsageError(f"block_steps {self.block_steps:,} of an episode store is impossible.")

    @cached_property
    def observations(self) -> dict[str, ArraySpec]:
        """The specs of the observations alone, without the prefix."""
        return {n.removeprefix(OBS): s for n, s in self.specs.items() if n.startswith(OBS)}

    def specs_read(self, names: Collection[str] | None) -> dict[str, ArraySpec]:
        """The specs of a step with only these observations; None for all."""
        wanted = {OBS + name for name in self.observations if names is None or name in names}
        return {n: s for n, s in self.specs.items() if n in wanted or not n.startswith(OBS)}

    @cached_property
    def stored(self) -> dict[str, ArraySpec]:
        """The specs on disk, where a compressed picture is a position and a size."""
        return {n: _POINTER if n in self.encoded else s for n, s in self.specs.items()}

    @cached_property
    def step_record(self) -> np.dtype[Any]:
        """One step of one lane on disk."""
        return record_of(self.stored)

    @cached_property
    def final_record(self) -> np.dtype[Any]:
        """The last observation of one episode on disk."""
        return record_of({n: s for n, s in self.stored.items() if n.startswith(OBS)})

    @property
    def block_slots(self) -> int:
        """Step records in one block file."""
        return self.lanes * self.block_steps

    @property
    def block_episodes(self) -> int:
        """Episodes in one block file of the finals and of the index."""
        return max(16, self.block_slots // 4)

    @cached_property
    def num_bytes(self) -> int:
        """Upper bound on the bytes of live data on disk, with rounding to whole blocks.

        Checkpoints that are kept also hold back the blocks evicted since the oldest of them, see
        `bytes_of`. An open or late episode can reach `max_episode_steps` further back than others.
        """
        if self.capacity is None:
            raise UsageError("A store without a capacity has no size; see `disk_bytes`.")
        step, episode = self.step_record.itemsize, self.final_record.itemsize + INDEX.itemsize
        behind = self.lanes * (self.max_episode_steps + 1)
        rounding = 2 * self.block_slots * step + 2 * self.block_episodes * episode
        return self.capacity * max(step, episode) + behind * step + rounding

    def bytes_of(self, steps: int) -> int:
        """Upper bound on the bytes of `steps` steps of all lanes on disk: each may end an
        episode, and files are rounded up to pages."""
        record = self.step_record.itemsize + self.final_record.itemsize + INDEX.itemsize
        files = steps // self.block_slots + 2 * (steps // self.block_episodes) + 6
        return steps * record + files * _PAGE

    def describe(self) -> Tree:
        """As JSON; `parse` reads it."""
        specs = {n: {"shape": list(s.shape), "dtype": s.dtype} for n, s in self.specs.items()}
        sizes = {n: getattr(self, n) for n in ("lanes", "max_episode_steps", "capacity")}
        head = {"format": FORMAT, "version": VERSION, "block_steps": self.block_steps}
        if self.encoded:  # earlier versions cannot read it
            head |= {"version": ENCODED_VERSION, "encoded": dict(self.encoded)}
        return {**head, **sizes, "specs": specs}

    @classmethod
    def parse(cls, document: Any) -> StoreGeometry:
        """The geometry in an untrusted document; raises `UsageError` or `ValueError`."""
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("does not describe an episode store")
        encoded = document.get("encoded", {})
        if document.get("version") != (ENCODED_VERSION if encoded else VERSION):
            raise ValueError(f"has version {document.get('version')!r}, not {VERSION}")
        if not isinstance(encoded, dict):
            raise ValueError("does not describe which pictures are compressed")
        sizes = {n: document.get(n) for n in ("lanes", "max_episode_steps", "block_steps")}
        capacity, specs = document.get("capacity"), document.get("specs")
        if not all(type(v) is int for v in sizes.values()) or not isinstance(specs, dict):
            raise ValueError("has sizes that are not integers")
        if type(capacity) is not int and capacity is not None:
            raise ValueError("has a capacity that is not an integer")
        fields = {name: _parse_spec(name, spec) for name, spec in specs.items()}
        return cls(fields, capacity=capacity, encoded=encoded, **sizes)  # type: ignore[arg-type]


def _parse_spec(name: str, spec: Any) -> ArraySpec:
    if not isinstance(spec, dict) or set(spec) != {"shape", "dtype"}:
        raise ValueError(f"has an invalid field {name!r}")
    shape, dtype = spec["shape"], spec["dtype"]
    if not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise ValueError(f"has an invalid field {name!r}")
    return ArraySpec(tuple(shape), str(dtype))


def _check_specs(specs: Mapping[str, ArraySpec]) -> None:
    if missing := {"actions", *_FIXED} - specs.keys():
        raise UsageError(f"An episode store needs a field {min(missing)!r}.")
    names = specs.keys() - {"actions", *_FIXED}
    if not names:
        raise UsageError("An episode store needs at least one observation.")
    for name, spec in specs.items():
        if name in names and not _NAME.fullmatch(name):
            raise UsageError(f"An episode store cannot hold a field {name!r}.")
        if name in _FIXED and spec != _FIXED[name]:
            raise UsageError(f"{name} are stored as {_FIXED[name].dtype}, one per step.")
        if spec.dtype not in _KINDS:
            raise UsageError(f"An episode store cannot hold {name!r} of type {spec.dtype!r}.")
        size = math.prod(spec.shape)  # Python's integers: an absurd shape does not wrap around
        if len(spec.shape) > _MAX_DIMENSIONS or any(n < 1 for n in spec.shape):
            raise UsageError(f"An episode store cannot hold {name!r} of shape {spec.shape}.")
        if size > _MAX_RECORD:
            raise UsageError(f"An episode store cannot hold {name!r} of {size:,} numbers a step.")


def is_picture(spec: ArraySpec) -> bool:
    """Whether an observation is an image, grey or coloured: uint8 [height, width, 1 or 3]."""
    return spec.dtype == "uint8" and len(spec.shape) == 3 and spec.shape[2] in (1, 3)


def record_of(specs: Mapping[str, ArraySpec]) -> np.dtype[Any]:
    """A fixed-size record; the widest numbers first, so that all are aligned without gaps."""
    names = sorted(specs, key=lambda name: (-np.dtype(specs[name].dtype).itemsize, name))
    formats, offsets, end = [], [], 0
    for name in names:
        # As bytes: numpy must not see a damaged bool that is neither 0 nor 1.
        kind = "u1" if specs[name].dtype == "bool" else specs[name].dtype
        formats.append((np.dtype(kind).newbyteorder("<"), specs[name].shape))
        offsets.append(end)
        end += specs[name].num_bytes
    widest = max((np.dtype(specs[name].dtype).itemsize for name in names), default=1)
    size = -(-end // widest) * widest
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
