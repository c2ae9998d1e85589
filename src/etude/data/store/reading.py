"""What is read of an episode store: its steps and episodes, alone, whole or drawn at random."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.store.files import Described
from etude.data.store.geometry import BLOCK_BYTES, INDEX, OBS, StoreGeometry, record_of
from etude.data.store.labels import Labels
from etude.data.store.log import Disk, RecordLog
from etude.data.store.sampling import (
    BYTE,
    Columns,
    EpisodeIndex,
    Frames,
    Subsets,
    Transitions,
    choose,
)

LOGS = ("steps", "finals", "episodes")


class EpisodeReader:
    """The files of a store and the index of its episodes, and what is drawn from them."""

    def __init__(
        self,
        path: Path,
        geometry: StoreGeometry,
        disk: Disk | None,
        reads: Collection[str] | None = None,
    ) -> None:
        self.path, self.geometry = path, geometry
        self.verify = True
        """Whether `load_state_dict` reads every named block; sizes are checked in any case."""
        episodes = geometry.block_episodes
        self._steps = RecordLog(path, "steps", geometry.step_record, geometry.block_slots, disk)
        self._finals = RecordLog(path, "finals", geometry.final_record, episodes, disk)
        self._episodes = RecordLog(path, "episodes", INDEX, episodes, disk)
        self._logs = dict(zip(LOGS, (self._steps, self._finals, self._episodes), strict=True))
        self._frames: Frames | None = None
        if geometry.encoded:
            log = self._logs["frames"] = RecordLog(path, "frames", BYTE, BLOCK_BYTES, disk)
            self._frames = Frames(log, geometry.encoded, geometry.specs)
        self._steps.holds = self._episodes_of
        fields = geometry.specs_read(reads)
        observed = {name: spec for name, spec in fields.items() if name.startswith(OBS)}
        self._columns = Columns(fields, self._frames)
        self._observed = Columns(observed, self._frames)
        self._names = [name.removeprefix(OBS) for name in observed]
        whole = len(fields) == len(geometry.specs)
        parts = [{name: geometry.stored[name] for name in specs} for specs in (fields, observed)]
        self._parts = (None, None) if whole else (record_of(parts[0]), record_of(parts[1]))
        self._disk, self._seal, self._failed = disk, "", False
        self._described: Described | None = None
        """What is compared of a sealed dataset besides its logs."""
        self.labels = Labels()
        """What a sealed dataset says of its episodes; empty until it is sealed."""
        self._index = EpisodeIndex(geometry.lanes)
        self._open_starts: Array = np.zeros(geometry.lanes, np.int64)
        self._open_returns: Array = np.zeros(geometry.lanes, np.float64)
        self._pending = False
        """Whether the slots after the newest step hold its next observations."""

    @property
    def lanes(self) -> int:
        return self.geometry.lanes

    @property
    def time(self) -> int:
        """Steps every lane has been given since the store began."""
        return self._steps.count // self.lanes

    @property
    def num_transitions(self) -> int:
        """Transitions that `sample_transitions` draws from: of finished and of open episodes."""
        return self._index.num_steps

    @property
    def num_episodes(self) -> int:
        """Finished episodes held: what `sample_subsets` draws from."""
        return len(self._index)

    @property
    def num_evicted(self) -> int:
        """Finished episodes that are no longer held."""
        return self._index.first

    @property
    def returns(self) -> Array:
        """[episodes] float64, in the order the episodes ended."""
        return self._index.returns.copy()

    @property
    def lengths(self) -> Array:
        """[episodes] int64, in the order the episodes ended."""
        return self._index.lengths

    @property
    def log_names(self) -> list[str]:
        """The logs that the state of a store has."""
        return [*self._logs]

    @property
    def disk_bytes(self) -> int:
        """What the blocks of a sealed dataset take on disk."""
        return sum(log.count * log.dtype.itemsize for log in self._logs.values())

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions:
        """`num` transitions of finished and open episodes, uniform and with replacement."""
        if not self.num_transitions:
            raise UsageError(f"{self.path} holds no transition yet.")
        drawn = generator.integers(0, self.num_transitions, num)
        return self.transitions(*self._index.locate(drawn))

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        """What return decomposition learns from: `num_steps` steps each of `num_subsets` episodes.

        An episode is drawn in proportion to its length; its steps without replacement, unless it
        has fewer than `num_steps`.
        """
        if not self.num_episodes:
            raise UsageError(f"{self.path} holds no finished episode yet.")
        drawn = generator.integers(0, self._index.num_finished_steps, num_subsets)
        return self.subsets_of(generator, self._index.locate(drawn)[0], num_steps)

    def subsets_of(
        self, generator: np.random.Generator, episodes: Array, num_steps: int
    ) -> Subsets:
        """The same from given finished episodes [subsets], counted from the oldest held."""
        _, lengths = self._index.look_up(episodes)
        offsets = choose(generator, lengths, num_steps)
        steps = self.transitions(episodes.repeat(num_steps), offsets.reshape(-1))
        return Subsets(steps.folded(offsets.shape), self._index.returns[episodes], lengths)

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One finished episode, counted from the oldest held: its T transitions, its return."""
        if not 0 <= number < self.num_episodes:
            raise UsageError(f"{self.path} holds {self.num_episodes:,} episodes, not {number:,}.")
        length = int(self._index.look_up(np.array([number]))[1][0])
        steps = self.transitions(np.full(length, number), np.arange(length))
        return steps, float(self._index.returns[number])

    def column(self, name: str, places: Array, offsets: Array) -> Array:
        """One field of steps `offsets` [n] of the episodes at `places` [n], read alone."""
        return self.columns((name,), places, offsets)[name]

    def columns(self, names: Collection[str], places: Array, offsets: Array) -> dict[str, Array]:
        """Some fields of steps `offsets` [n] of the episodes at `places` [n], {name: [n, ...]}."""
        starts, _ = self._index.look_up(places)
        specs = {name: self.geometry.specs[name] for name in names}
        part = record_of({name: self.geometry.stored[name] for name in names})
        records = self._steps.gather(starts + offsets * self.lanes, part)
        if self.geometry.encoded.keys() & specs:
            return Columns(specs, self._frames).fill(records)
        return {name: records[name] for name in names}

    def transitions(self, places: Array, offsets: Array) -> Transitions:
        """Steps `offsets` [n] of the episodes at `places` [n] of the index, and what followed."""
        starts, lengths = self._index.look_up(places)
        slots = starts + offsets * self.lanes
        # An open episode goes on: what followed its newest step is in the slot ahead.
        (last,) = ((offsets == lengths - 1) & (places < self.num_episodes)).nonzero()
        after = slots + self.lanes
        after[last] = slots[last]  # any slot that exists; replaced below
        step, final = self._parts
        records = self._steps.gather(np.concatenate((slots, after)), step)
        flat = self._columns.fill(records[: len(slots)])
        following = self._observed.fill(records[len(slots) :])
        if len(last):
            finals = self._finals.gather(places[last] + self._index.first, final)
            ended = finals if self._frames is None else self._observed.fill(finals)
            for name, array in following.items():
                array[last] = ended[name]
        # One that was closed when its lane began anew was not yet over when this step was written.
        flat["truncated"][last] |= ~flat["terminated"][last]
        obs = {name: flat.pop(OBS + name) for name in self._names}
        next_obs = {name: following[OBS + name] for name in obs}
        return Transitions(obs=obs, next_obs=next_obs, **flat)

    def _episodes_of(self, start: int, stop: int) -> str:
        """Which finished episodes have steps among the slots start to stop."""
        starts, lengths = self._index.starts, self._index.lengths
        (found,) = ((starts < stop) & (starts + lengths * self.lanes > start)).nonzero()
        found += self._index.first
        if not len(found):
            return f"steps {start // self.lanes:,} to {stop // self.lanes:,}"
        return f"episodes {found[0]:,} to {found[-1]:,}"

    def close(self) -> None:
        """Let go of the files being written; what was appended stays."""
        for log in self._logs.values():
            log.close()
