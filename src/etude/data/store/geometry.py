"""Records of an episode store: their fields and sizes, and how new steps are converted to them.

Fields and sizes are known before anything is allocated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from etude.core.contracts import Array, ArraySpec, EnvSpec, Finals, Fragment, Observations
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


_FIELDS = ("actions", "rewards", "terminated", "truncated")
_STAGING = 4 << 20
"""Bytes of records that are built at a time; images of many steps are much larger."""


@dataclass(frozen=True)
class Intake:
    """The next steps of all lanes, [lanes, steps], in parts of consecutive lanes."""

    geometry: StoreGeometry
    parts: list[Observations]
    """Every field of the geometry: {"obs/<name>": [num_envs, steps, ...], "actions": ...}."""
    ends: Finals
    """With observations {"obs/<name>": [k, ...]}; `envs` are lanes."""
    last: list[Observations] | None
    """{"obs/<name>": [num_envs, ...]} after the last step; None if no episode is open then."""
    restarted: Array
    """[lanes] bool: the first step begins a new episode, even if one was open before."""

    @classmethod
    def of_fragments(cls, geometry: StoreGeometry, fragments: Sequence[Fragment]) -> Intake:
        """An intake whose lanes are the environments of the fragments, in order."""
        if not all(f.present.all() for f in fragments):
            raise UsageError("An episode store takes no steps without an agent: use algorithm ppo.")
        parts = [_prefixed(f.obs) | {n: getattr(f, n) for n in _FIELDS} for f in fragments]
        offsets = np.cumsum([0] + [len(f.rewards) for f in fragments])
        ended = [_prefixed(f.finals.obs) for f in fragments if len(f.finals.envs)]
        ends = Finals(
            np.concatenate([f.finals.envs + o for f, o in zip(fragments, offsets, strict=False)]),
            np.concatenate([f.finals.steps for f in fragments]),
            {name: np.concatenate([obs[name] for obs in ended]) for name in (*ended, {})[0]},
            {},
        )
        restarted = np.concatenate([f.restarted for f in fragments])
        return cls(geometry, parts, ends, [_prefixed(f.last_obs) for f in fragments], restarted)

    @classmethod
    def of_episode(
        cls,
        geometry: StoreGeometry,
        obs: Observations,
        actions: Array,
        rewards: Array,
        terminated: bool,
    ) -> Intake:
        """An intake of one whole episode, obs [T + 1, ...] and the rest [T, ...], for one lane."""
        steps = len(rewards)
        last: Array = np.zeros((1, steps), bool)
        last[:, -1:] = True
        part = _prefixed({name: array[None, :-1] for name, array in obs.items()})
        part |= {"actions": actions[None], "rewards": rewards[None]}
        part |= {"terminated": last & terminated, "truncated": last & (not terminated)}
        end = _prefixed({name: array[-1:] for name, array in obs.items()})
        ends = Finals(np.array([0]), np.array([steps - 1]), end, {})
        return cls(geometry, [part], ends, None, np.zeros(1, bool))

    @property
    def num_steps(self) -> int:
        return int(self.parts[0]["rewards"].shape[1])

    def check(self) -> None:
        """Refuse arrays that do not match the store's geometry."""
        sizes = [len(part["rewards"]) for part in self.parts]
        steps, lanes, specs = self.num_steps, self.geometry.lanes, self.geometry.stored
        if sum(sizes) != lanes or steps < 1:
            raise ValueError(
                f"{sum(sizes)} environments of {steps} steps for a store of {lanes} lanes"
            )
        observed = {name: spec for name, spec in specs.items() if name.startswith(OBS)}
        for num, part in zip(sizes, self.parts, strict=True):
            _check_arrays(part, dict(specs), (num, steps))
        for num, obs in zip(sizes, self.last or [], strict=self.last is not None):
            _check_arrays(obs, observed, (num,))
        if len(self.ends.envs):
            _check_arrays(self.ends.obs, observed, (len(self.ends.envs),))

    def first(self, name: str) -> Array:
        """A field at the first step, [lanes, ...]."""
        return np.concatenate([part[name][:, 0] for part in self.parts])

    def done(self) -> Array:
        """[lanes, steps] bool: the last steps of episodes."""
        return np.concatenate([part["terminated"] | part["truncated"] for part in self.parts])

    def finish_episodes(
        self, time: int, starts: Array, returns: Array
    ) -> tuple[Array, Array, Array]:
        """`INDEX` records of the episodes that end here, in that order; new starts and returns.

        time: of the first step; starts [lanes] int64 and returns [lanes] float64: of the open
        episodes. Rewards are added step by step, so that a return does not depend on how the steps
        were divided into fragments.
        """
        rewards, done = np.concatenate([part["rewards"] for part in self.parts]), self.done()
        starts, returns, tables = starts.copy(), returns.copy(), [np.empty(0, INDEX)]
        for step in range(self.num_steps):
            returns += rewards[:, step]
            (lanes,) = done[:, step].nonzero()
            if not len(lanes):
                continue
            after = time + step + 1
            table = np.empty(len(lanes), INDEX)
            table["start"] = starts[lanes] * self.geometry.lanes + lanes
            table["length"], table["return"] = after - starts[lanes], returns[lanes]
            tables.append(table)
            starts[lanes], returns[lanes] = after, 0.0
        return np.concatenate(tables), starts, returns

    def final_records(self) -> Array:
        """The last observations of the episodes that end here, in that order."""
        envs, steps, obs, _ = self.ends
        order = np.lexsort((envs, steps))
        expected = np.stack(self.done().T.nonzero())
        if not np.array_equal(np.stack((steps[order], envs[order])), expected):
            raise ValueError("final observations do not belong to the steps that ended an episode")
        records = np.zeros(len(order), self.geometry.final_record)
        for name, array in obs.items():
            records[name] = array[order]
        return records

    def step_records(self) -> Iterator[tuple[Array, int]]:
        """Step records in time order, a few at a time: (records [m], number that are ahead).

        Records ahead have only the observations after the last step.
        """
        lanes, record = self.geometry.lanes, self.geometry.step_record
        piece = max(1, _STAGING // (lanes * record.itemsize))
        for start in range(0, self.num_steps, piece):
            stop = min(start + piece, self.num_steps)
            ahead = int(self.last is not None and stop == self.num_steps)
            # Zeros, since unused bytes are hashed too.
            staged = np.zeros((stop - start + ahead, lanes), record)
            first = 0
            for i, part in enumerate(self.parts):
                lane = slice(first, first + len(part["rewards"]))
                for name, array in part.items():
                    staged[name][: stop - start, lane] = array[:, start:stop].swapaxes(0, 1)
                for name, array in self.last[i].items() if self.last and ahead else ():
                    staged[name][-1, lane] = array
                first = lane.stop
            yield staged.reshape(-1), ahead * lanes


def _prefixed(obs: Observations) -> Observations:
    return {OBS + name: array for name, array in obs.items()}


def _check_arrays(arrays: Observations, specs: dict[str, ArraySpec], lead: tuple[int, ...]) -> None:
    if arrays.keys() != specs.keys():
        raise ValueError(f"fields {sorted(arrays)} for a store of {sorted(specs)}")
    for name, spec in specs.items():
        array, shape = arrays[name], lead + spec.shape
        if array.shape != shape or array.dtype != np.dtype(spec.dtype):
            raise ValueError(
                f"{name!r} is {array.dtype} {array.shape}; the store holds {spec.dtype} {shape}"
            )
