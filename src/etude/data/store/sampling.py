"""What is drawn from an episode store, and the index of its episodes that draws go by."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from etude.core.contracts import Array, ArraySpec, Observations
from etude.data.store.geometry import OBS
from etude.data.store.log import DamagedStore, RecordLog

_ALIGNED = 64


class Transitions(NamedTuple):
    """Steps and what followed them; leading axes [num], or [subsets, steps] in `Subsets`."""

    obs: Observations
    actions: Array
    rewards: Array
    """float32, as the environment gave them: a reward source may relabel them later."""
    terminated: Array
    """bool: the value of the future is 0."""
    truncated: Array
    """bool: time ran out; the value of the future is V(next_obs)."""
    next_obs: Observations
    """What the step led to; where an episode ended, what it ended on and not the reset."""

    def folded(self, shape: tuple[int, ...]) -> Transitions:
        """The same with the leading axis [m] as `shape`."""
        return Transitions(*(_folded(arrays, shape) for arrays in self))

    def flat(self) -> Transitions:
        """The same with the leading axes [subsets, steps] as one."""
        return Transitions(*(_folded(arrays, (-1,), 2) for arrays in self))


class Subsets(NamedTuple):
    """Steps drawn from finished episodes."""

    steps: Transitions
    """Leading axes [subsets, steps]."""
    returns: Array
    """[subsets] float64: sums of the rewards of the whole episodes."""
    lengths: Array
    """[subsets] int64: steps of the whole episodes."""


def choose(generator: np.random.Generator, lengths: Array, num: int) -> Array:
    """`num` indices below each of `lengths` [subsets], without replacement where they suffice.

    Floyd's method: an exact uniform subset from `num` draws, whatever the length. Random keys and
    a partition would cost O(length), and draws with rejection get slow as `num` nears it. The
    loop in Python takes .1 us an index. The order within a subset means nothing.

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
                # The i-th draw is from low + i + 1 numbers, of which the last was not on offer
                # before: it stands in for one that is taken.
                picks[i] = pick = low + i
            taken.add(pick)
    return np.array(chosen, np.int64).reshape(drawn.shape)


class Guide:
    """Finds which episode a step belongs to, in about as long for a million episodes as for few.

    A search by halves looks at twenty far places of a large table; here the steps are cut into as
    many equal parts as there are episodes, and the first episode of each part is known.
    """

    _HOPS = 4
    """Episodes looked at from there on, before the rest is left to a search by halves."""

    def __init__(self, ends: Array) -> None:
        """ends: [episodes] int64, ascending: the steps up to the end of each episode."""
        self._ends = ends
        total = int(ends[-1]) if len(ends) else 0
        self._width = max(1, total // max(1, len(ends)))
        first = ends.searchsorted(np.arange(0, total, self._width), "right")
        self._first: Array = first.astype(np.int32)  # half as much memory to look into

    def find(self, steps: Array) -> Array:
        """[n] int64: the episodes of `steps` [n], as `ends.searchsorted(steps, "right")`."""
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
    """Makes the arrays of a batch, {name: [m, ...]}, in one piece of memory.

    Each is at an address of 64 bytes: matrix kernels may round differently at others, and a batch
    drawn again has to give the same bits. One allocation, since a small batch would otherwise
    spend most of its time on them.
    """

    def __init__(self, specs: Mapping[str, ArraySpec], frames: Frames | None = None) -> None:
        """frames: where compressed pictures are fetched from."""
        self._frames = frames
        self._encoded = frames.encoded if frames is not None else {}
        self._fields = [(n, s.shape, np.dtype(s.dtype), s.num_bytes) for n, s in specs.items()]

    def fill(self, records: Array) -> dict[str, Array]:
        """The fields of `records` [m], each in an array of its own."""
        num, end, offsets = len(records), 0, []
        for *_, size in self._fields:
            offsets.append(end)
            end += -(-size * num // _ALIGNED) * _ALIGNED
        memory = torch.empty(end, dtype=torch.uint8).numpy()
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


def _folded(arrays: Any, shape: tuple[int, ...], axes: int = 1) -> Any:
    """The first `axes` axes of every array as `shape`."""
    if isinstance(arrays, dict):
        return {name: _folded(array, shape, axes) for name, array in arrays.items()}
    return arrays.reshape(shape + arrays.shape[axes:])


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


BYTE = np.dtype("u1")
_QUALITY = 95
_MOST = 1 << 28
"""Bytes of one picture: more is a damaged pointer."""


class Frames:
    """The compressed pictures of a store."""

    def __init__(
        self, log: RecordLog, encoded: Mapping[str, str], specs: Mapping[str, ArraySpec]
    ) -> None:
        """encoded: {"obs/<name>": "png" or "jpeg"}."""
        from PIL import Image

        self._image, self._log, self.encoded, self._specs = Image, log, encoded, specs

    def store(self, obs: Observations) -> Observations:
        """obs {name: [T + 1, ...]} with pointers [T + 1, 2] int64 in place of pictures."""
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
        """Put the pictures at `pointers` [n, 2] into `out` [n, height, width, channels]."""
        height, width, channels = out.shape[1:]
        for i, (start, size) in enumerate(pointers.tolist()):
            if not (start >= 0 and 0 < size <= _MOST and start + size <= self._log.count):
                raise self._wrong(f"names a picture at {start:,} that is not there")
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
