"""Minibatches of an episode store: transitions, subsets, the index of episodes, pictures."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from etude.core.contracts import Array, ArraySpec, Observations
from etude.data.store.geometry import OBS
from etude.data.store.log import DamagedStore, RecordLog

_ALIGNED = 64


class Transitions(NamedTuple):
    """Steps with next observations; leading axes [num], or [subsets, steps] in `Subsets`."""

    obs: Observations
    actions: Array
    rewards: Array
    """float32, of the environment; a reward source may relabel them later."""
    terminated: Array
    """bool: the value of the future is 0."""
    truncated: Array
    """bool: time ran out; the value of the future is V(next_obs)."""
    next_obs: Observations
    """Next observations; at the end of an episode its last observation, not that of the reset."""

    def folded(self, shape: tuple[int, ...]) -> Transitions:
        """Reshape the leading axis [m] to `shape`."""
        return Transitions(*(_folded(arrays, shape) for arrays in self))

    def flat(self) -> Transitions:
        """Flatten the leading axes [subsets, steps]."""
        return Transitions(*(_folded(arrays, (-1,), 2) for arrays in self))


class MultiStep(NamedTuple):
    """Transitions over several steps of their episodes, for n-step returns."""

    steps: Transitions
    """[n]: observations and actions of the first steps, rewards and flags of the last ones, and the
    observations after these."""
    rewards: Array
    """[n, num_steps] float32: of each step; 0 after the last."""
    counts: Array
    """[n] int64: steps; fewer than num_steps where the episode ends, or has no further step yet."""


class MultiStepReader(Protocol):
    """A store or a dataset."""

    def transitions(
        self, places: Array, offsets: Array, counts: Array | None = None
    ) -> Transitions: ...

    def column(self, name: str, places: Array, offsets: Array) -> Array: ...


def read_multi_step(
    store: MultiStepReader, places: Array, offsets: Array, lengths: Array, num_steps: int
) -> MultiStep:
    """Read up to `num_steps` steps from `offsets` [n] on of the episodes at `places` [n].

    lengths: [n] int64, steps of these episodes.
    """
    counts = np.minimum(num_steps, lengths - offsets)
    ahead = np.arange(num_steps)
    steps = offsets[:, None] + np.minimum(ahead, counts[:, None] - 1)
    rewards = store.column("rewards", places.repeat(num_steps), steps.reshape(-1))
    rewards = np.where(ahead < counts[:, None], rewards.reshape(steps.shape), np.float32(0.0))
    return MultiStep(store.transitions(places, offsets, counts), rewards, counts)


class Subsets(NamedTuple):
    """Steps drawn from finished episodes."""

    steps: Transitions
    """Leading axes [subsets, steps]."""
    returns: Array
    """[subsets] float64: sums of the rewards of the whole episodes."""
    lengths: Array
    """[subsets] int64: steps of the whole episodes."""


def choose(generator: np.random.Generator, lengths: Array, num: int) -> Array:
    """Draw `num` indices below each of `lengths` [subsets], without replacement if possible.

    Floyd's method: an exact uniform subset from `num` draws, for every length. Random keys and a
    partition would cost O(length), and rejection gets slow as `num` approaches the length. The
    loop in Python takes .1 us per index. The order within a subset has no meaning.

    Returns [subsets, num] int64.
    """
    enough = lengths >= num
    bounds = np.where(
        enough[:, None], lengths[:, None] - num + 1 + np.arange(num), lengths[:, None]
    )
    drawn = generator.integers(0, bounds)
    chosen = drawn.tolist()
    for row in enough.nonzero()[0].tolist():
        taken: set[int] = set()
        low = int(lengths[row]) - num
        picks = chosen[row]
        for i, pick in enumerate(picks):
            if pick in taken:
                # The i-th draw is from low + i + 1 numbers, the last of which is new: it replaces
                # a number that is taken.
                picks[i] = pick = low + i
            taken.add(pick)
    return np.array(chosen, np.int64).reshape(drawn.shape)


class EpisodeSearch:
    """Finds the episode of a step, in about the same time for a million episodes as for few.

    A binary search reads twenty distant entries of a large table. Here the steps are divided into
    as many equal parts as there are episodes, and the first episode of each part is stored.
    """

    _HOPS = 4
    """Episodes that are tried from there on, before the rest is left to a binary search."""

    def __init__(self, ends: Array) -> None:
        """ends: [episodes] int64, ascending: the steps up to the end of each episode."""
        self._ends = ends
        total = int(ends[-1]) if len(ends) else 0
        self._width = max(1, total // max(1, len(ends)))
        first = ends.searchsorted(np.arange(0, total, self._width), "right")
        self._first: Array = first.astype(np.int32)  # half the memory

    def find(self, steps: Array) -> Array:
        """[n] int64: the episodes of `steps` [n], equal to `ends.searchsorted(steps, "right")`."""
        found: Array = self._first[steps // self._width].astype(np.int64)
        for _ in range(self._HOPS):
            short = self._ends[found] <= steps
            if not short.any():
                return found
            found += short
        (left,) = (self._ends[found] <= steps).nonzero()
        found[left] = self._ends.searchsorted(steps[left], "right")
        return found


class Columns:
    """Allocates the arrays of a minibatch, {name: [m, ...]}, in one block of memory.

    Each is at an address of 64 bytes: matrix kernels may round differently at other alignments,
    and a minibatch has to have the same bits when it is drawn again. A small minibatch would spend
    most of its time on several allocations.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], frames: Frames | None = None) -> None:
        """frames: the compressed pictures, if there are any."""
        self._frames = frames
        self._encoded = frames.encoded if frames is not None else {}
        self._fields = [(n, s.shape, np.dtype(s.dtype), s.num_bytes) for n, s in specs.items()]

    def fill(self, records: Array) -> dict[str, Array]:
        """Copy each field of `records` [m] into an array."""
        num, end, offsets = len(records), 0, []
        for *_, size in self._fields:
            offsets.append(end)
            end += -(-size * num // _ALIGNED) * _ALIGNED
        memory = aligned_bytes(end)
        filled = {}
        for offset, (name, shape, dtype, _) in zip(offsets, self._fields, strict=True):
            out = filled[name] = np.ndarray((num, *shape), dtype, memory, offset)
            if name in self._encoded and self._frames is not None:
                self._frames.fetch(records[name], out)
            elif dtype.kind == "b":
                np.not_equal(records[name], 0, out=out)
            else:
                out[...] = records[name]
        return filled


def aligned_bytes(size: int) -> Array:
    """[size] uint8 at an address of 64 bytes, as torch allocates it; torch is not imported."""
    memory: Array = np.empty(size + _ALIGNED - 1, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size]


def _folded(arrays: Any, shape: tuple[int, ...], axes: int = 1) -> Any:
    """The first `axes` axes of every array as `shape`."""
    if isinstance(arrays, dict):
        return {name: _folded(array, shape, axes) for name, array in arrays.items()}
    return arrays.reshape(shape + arrays.shape[axes:])


class EpisodeIndex:
    """A queue of finished episodes, then the open one of each lane; 24 bytes each.

    Finished episodes are in the order in which they ended, so those in the store are always a range
    of numbers. An entry's place counts from the oldest.
    """

    def __init__(self, lanes: int, first: int = 0) -> None:
        self.first = first
        """The number of the oldest episode, counted from the first of the store."""
        self._lanes, self._low, self._high = lanes, 0, 0
        size = 64 + lanes
        self._starts: Array = np.zeros(size, np.int64)
        self._returns: Array = np.zeros(size, np.float64)
        self._before: Array = np.zeros(size + 1, np.int64)
        """Steps of all entries before each one, with one more number at the end."""

    def __len__(self) -> int:
        return self._high - self._low

    @property
    def num_finished_steps(self) -> int:
        return int(self._before[self._high] - self._before[self._low])

    @property
    def num_steps(self) -> int:
        """Steps of finished and open episodes."""
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
        """Append ended episodes, `INDEX` records in the order of their ends, and set the open ones.

        open_starts: [lanes] slots; open_lengths: [lanes] steps so far, possibly 0.
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
        """Evict the oldest episodes, until at least `excess` observations are evicted."""
        while excess > 0 and self._low < self._high:
            excess -= int(self._before[self._low + 1] - self._before[self._low]) + 1
            self._low += 1
            self.first += 1

    def locate(self, steps: Array) -> tuple[Array, Array]:
        """Places [n] and offsets [n] of the `steps`-th of all steps; O(log episodes) each.

        Finished episodes come first: numbers below `num_finished_steps` are steps of these.
        """
        before = self._before[self._low : self._high + self._lanes]
        wanted = steps + before[0]
        places = before.searchsorted(wanted, "right") - 1
        return places, wanted - before[places]

    def look_up(self, places: Array) -> tuple[Array, Array]:
        """Slots of the first steps [n] and lengths [n] of entries."""
        entries = places + self._low
        lengths: Array = self._before[entries + 1] - self._before[entries]
        return self._starts[entries], lengths

    def _make_room(self, more: int) -> None:
        """Move entries to the front and double the capacity: amortised O(1) per episode."""
        if self._high + more <= len(self._starts):
            return
        held, size = len(self), 2 * (len(self) + more)
        starts, returns, before = self.starts, self.returns, self._before
        self._starts, self._returns = np.zeros(size, np.int64), np.zeros(size, np.float64)
        self._before = np.zeros(size + 1, np.int64)
        self._starts[:held], self._returns[:held] = starts, returns
        self._before[: held + 1] = before[self._low : self._high + 1] - before[self._low]
        self._low, self._high = 0, held


BYTE = np.dtype("u1")
_QUALITY = 95
_MAX = 1 << 28
"""Bytes of one picture; a larger number is damage."""


class Frames:
    """The compressed pictures of a store."""

    def __init__(
        self, log: RecordLog, encoded: Mapping[str, str], specs: Mapping[str, ArraySpec]
    ) -> None:
        """encoded: {"obs/<name>": "png" or "jpeg"}."""
        from PIL import Image

        self._image, self._log, self.encoded, self._specs = Image, log, encoded, specs

    def store(self, obs: Observations) -> Observations:
        """Append pictures of obs {name: [T + 1, ...]}; pointers [T + 1, 2] int64 replace them."""
        kept = dict(obs)
        for field, kind in self.encoded.items():
            name, shape = field.removeprefix(OBS), self._specs[field].shape
            pictures = obs[name]
            if pictures.shape[1:] != shape or pictures.dtype != np.uint8:
                raise ValueError(f"{name!r} is {pictures.dtype} {pictures.shape}, not {shape}")
            pointers: Array = np.empty((len(pictures), 2), np.int64)
            for i, picture in enumerate(pictures):
                data = self._encode(picture, kind)
                pointers[i] = self._log.count, len(data)
                self._log.append(np.frombuffer(data, BYTE))
            kept[name] = pointers
        return kept

    def _encode(self, picture: Array, kind: str) -> bytes:
        stream = io.BytesIO()
        image = self._image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
        options = {"quality": _QUALITY, "subsampling": 0} if kind == "jpeg" else {}
        image.save(stream, kind.upper(), **options)
        return stream.getvalue()

    def fetch(self, pointers: Array, out: Array) -> None:
        """Decode the pictures at `pointers` [n, 2] into `out` [n, height, width, channels]."""
        height, width, channels = out.shape[1:]
        for i, (start, size) in enumerate(pointers.tolist()):
            if not (start >= 0 and 0 < size <= _MAX and start + size <= self._log.count):
                raise self._wrong(f"has no picture at {start:,}, to which a step points")
            data = self._log.read(start, start + size).tobytes()
            try:
                with self._image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                    if image.size != (width, height):
                        raise self._wrong(f"has a picture of {image.size} pixels")
                    found = np.asarray(image.convert("L" if channels == 1 else "RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise self._wrong(f"has a picture at {start:,} that cannot be read") from error
            out[i] = found.reshape(out.shape[1:])

    def _wrong(self, what: str) -> DamagedStore:
        return DamagedStore(self._log.folder, what)
