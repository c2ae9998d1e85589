"""The episode store: experience on disk, for replay and for datasets larger than memory.

    steps-<n>.bin      one record per step and lane: observation, action, reward, flags
    finals-<n>.bin     one record per finished episode: its last observation
    episodes-<n>.bin   one record per finished episode: first step, length, return
    store.json         fields and sizes; sealed.json: positions and hashes of a finished dataset
    frames-<n>.bin     bytes of compressed pictures, if there are any
    labels.json        of a finished dataset: names, tasks and success of its episodes, see `Labels`

Environments advance in lockstep, so a step's place is known from its time and its lane:
`slot = time * lanes + lane`. Hence

- a step's next observation is the record `lanes` further on, and no observation is stored twice.
  Only the last observation of an episode has no successor; it goes to `finals`, whose records are
  numbered like the episodes. The overhead is one observation per episode.
- an append of all lanes is one run of bytes at the end of the newest block (this is why blocks are
  `[steps, lanes]` and not `[lanes, steps]`), so writing, hashing, truncating and deleting work on
  whole prefixes and whole files. A dataset has one lane: its episodes are contiguous.
- episodes are numbered in the order in which they end, `end` slots increase with the number, and
  the finished episodes in the store are a range of numbers. A uniform step of them is found by one
  search in the running sum of lengths, which also gives its episode, offset and next observation.

The observation after the newest step is written to its successor's slot in advance: a transition
can be sampled as soon as it is appended. The next append must begin with that observation,
otherwise it is refused. The exception are environments that restarted (`restarted`), which those do
after a resume that cannot be restored: their open episodes are closed as truncated, with that
observation as the last.

Evicting only moves the front of that range. Files are never reused. Only `delete_garbage` deletes
them; it gets the states of all resumable checkpoints, which still need some files.

There is one store per learner shard. Learned rewards are never written back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from etude.core.contracts import Array, Fragment, Observations
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.data.store.files import (
    DESCRIPTION,
    SEAL,
    WatchedFiles,
    check_table,
    create_folder,
    fsync_folder,
    other_data,
    read_geometry,
    read_json,
    write_json,
)
from etude.data.store.geometry import BLOCK_BYTES, INDEX, OBS, Intake, StoreGeometry, record_of
from etude.data.store.labels import LABELS, Labels
from etude.data.store.log import DamagedStore, RecordLog
from etude.data.store.sampling import (
    BYTE,
    Columns,
    EpisodeIndex,
    Frames,
    MultiStep,
    Subsets,
    Transitions,
    choose,
    read_multi_step,
)
from etude.runs.files import BLOCK, Disk, explain_os_errors, open_regular

__all__ = ["DamagedStore", "EpisodeStore", "StoreGeometry", "Subsets", "Transitions"]
_LOGS = ("steps", "finals", "episodes")


class EpisodeStore:
    """Steps and episodes of parallel lanes on disk; the module's docstring has the layout."""

    def __init__(
        self,
        path: Path,
        geometry: StoreGeometry,
        disk: Disk | None,
        reads: Collection[str] | None = None,
    ) -> None:
        self.path, self.geometry = path, geometry
        self.release: Callable[[], None] = lambda: None
        """Called by `close`: another process may edit the dataset from then on."""
        self.verify = True
        """Whether `load_state_dict` reads every block; sizes are always checked."""
        episodes = geometry.block_episodes
        self._steps = RecordLog(path, "steps", geometry.step_record, geometry.block_slots, disk)
        self._finals = RecordLog(path, "finals", geometry.final_record, episodes, disk)
        self._episodes = RecordLog(path, "episodes", INDEX, episodes, disk)
        self._logs = dict(zip(_LOGS, (self._steps, self._finals, self._episodes), strict=True))
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
        outcome = ("rewards", "terminated", "truncated")
        self._outcomes = Columns({name: fields[name] for name in outcome})
        self._outcome = record_of({name: geometry.stored[name] for name in outcome})
        whole = len(fields) == len(geometry.specs)
        parts = [{name: geometry.stored[name] for name in specs} for specs in (fields, observed)]
        self._parts = (None, None) if whole else (record_of(parts[0]), record_of(parts[1]))
        self._disk, self._seal, self._failed = disk, "", False
        self._described: WatchedFiles | None = None
        """Small files of a sealed dataset, which are compared besides its logs."""
        self.labels = Labels()
        """Labels of a sealed dataset; empty until it is sealed."""
        self._index = EpisodeIndex(geometry.lanes)
        self._open_starts: Array = np.zeros(geometry.lanes, np.int64)
        self._open_returns: Array = np.zeros(geometry.lanes, np.float64)
        self._pending = False
        """Whether the slots after the newest step hold its next observations."""

    @classmethod
    def create(cls, path: Path, geometry: StoreGeometry, disk: Disk) -> EpisodeStore:
        """Create an empty store in a folder whose parent exists.

        Blocks that a killed run left there are overwritten, or continued by `load_state_dict`. A
        sealed dataset and a store of another geometry are refused. A damaged description is
        written again: the hashes in a checkpoint state the content of blocks.
        """
        path = Path(path)
        if os.path.lexists(path / SEAL):
            raise UsageError(f"{path} is a finished dataset; choose another folder.")
        create_folder(path, disk)
        try:
            there = read_geometry(path)
        except DamagedStore:
            write_json(path / DESCRIPTION, geometry.describe(), disk)
        else:
            if there != geometry:
                raise UsageError(f"{path} holds a store of another geometry; choose another.")
        return cls(path, geometry, disk)

    @classmethod
    def open(cls, path: Path, reads: Collection[str] | None = None) -> EpisodeStore:
        """Open a sealed dataset to read; sizes and index are checked now, blocks when first read.

        reads: the observations of each step to read, None for all. Others stay on the disk.
        """
        path = Path(path)
        store = cls(path, read_geometry(path), None, reads)
        if not os.path.lexists(path / SEAL):
            raise UsageError(
                f"{path} was never finished, or its {SEAL} is missing: put that back, or import or "
                "record it again."
            )
        document = read_json(path / SEAL)
        if document.keys() == store._logs.keys():
            raise UsageError(
                f"{path} was made by an older version, without the table of episodes ({LABELS}); "
                "import or record it again."
            )
        if document.keys() != {*store._logs, "labels"} or not isinstance(document["labels"], str):
            raise DamagedStore(path / SEAL, "does not describe a dataset")
        table = store._load_logs(document, verify=False)
        labels = read_json(path / LABELS, document["labels"])
        store.labels = Labels.parse(labels, len(table), path / LABELS)
        store._open_starts[:] = store.time
        store._settle(table)
        text = json.dumps([store.geometry.describe(), document], sort_keys=True)
        store._seal = hashlib.sha256(text.encode()).hexdigest()
        store._described = WatchedFiles(path, (SEAL, DESCRIPTION, LABELS), store._seal)
        return store

    @property
    def lanes(self) -> int:
        return self.geometry.lanes

    @property
    def time(self) -> int:
        """Steps of each lane since the store was created."""
        return self._steps.count // self.lanes

    @property
    def num_transitions(self) -> int:
        """Transitions that `sample_transitions` draws from, of finished and of open episodes."""
        return self._index.num_steps

    @property
    def num_episodes(self) -> int:
        """Finished episodes in the store, which `sample_subsets` draws from."""
        return len(self._index)

    @property
    def num_evicted(self) -> int:
        """Finished episodes that were evicted."""
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
        """Names of the logs in the state of a store."""
        return [*self._logs]

    @property
    def disk_bytes(self) -> int:
        """Bytes of a sealed dataset on disk."""
        return sum(log.count * log.dtype.itemsize for log in self._logs.values())

    def sample_transitions(self, generator: np.random.Generator, num: int) -> Transitions:
        """Draw `num` transitions of finished and open episodes, uniformly and with replacement."""
        return self.transitions(*self._draw(generator, num))

    def sample_multi_step(
        self, generator: np.random.Generator, num: int, num_steps: int
    ) -> MultiStep:
        """Draw like `sample_transitions`, each with the up to `num_steps` - 1 steps after it."""
        places, offsets = self._draw(generator, num)
        _, lengths = self._index.look_up(places)
        return read_multi_step(self, places, offsets, lengths, num_steps)

    def _draw(self, generator: np.random.Generator, num: int) -> tuple[Array, Array]:
        """Draw places [num] and offsets [num] of steps of finished and open episodes."""
        if not self.num_transitions:
            raise UsageError(f"{self.path} holds no transition yet.")
        return self._index.locate(generator.integers(0, self.num_transitions, num))

    def sample_subsets(
        self, generator: np.random.Generator, num_subsets: int, num_steps: int
    ) -> Subsets:
        """Draw `num_steps` steps each of `num_subsets` episodes, for return decomposition.

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
        """Draw subsets from given finished episodes [subsets], counted from the oldest."""
        _, lengths = self._index.look_up(episodes)
        offsets = choose(generator, lengths, num_steps)
        steps = self.transitions(episodes.repeat(num_steps), offsets.reshape(-1))
        return Subsets(steps.folded(offsets.shape), self._index.returns[episodes], lengths)

    def episode(self, number: int) -> tuple[Transitions, float]:
        """One finished episode, counted from the oldest: its T transitions and its return."""
        if not 0 <= number < self.num_episodes:
            raise UsageError(f"{self.path} holds {self.num_episodes:,} episodes, not {number:,}.")
        length = int(self._index.look_up(np.array([number]))[1][0])
        steps = self.transitions(np.full(length, number), np.arange(length))
        return steps, float(self._index.returns[number])

    def column(self, name: str, places: Array, offsets: Array) -> Array:
        """One field of steps `offsets` [n] of the episodes at `places` [n]."""
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

    def transitions(
        self, places: Array, offsets: Array, counts: Array | None = None
    ) -> Transitions:
        """Steps `offsets` [n] of the episodes at `places` [n], with next observations.

        counts: [n] int64, steps of each transition, see `MultiStep`; None for single ones.
        """
        starts, lengths = self._index.look_up(places)
        slots = starts + offsets * self.lanes
        newest = offsets if counts is None else offsets + counts - 1
        # The next observation of an open episode's newest step is in the slot ahead.
        (last,) = ((newest == lengths - 1) & (places < self.num_episodes)).nonzero()
        ends = starts + newest * self.lanes
        after = ends + self.lanes
        after[last] = ends[last]  # any slot that exists; replaced below
        step, final = self._parts
        records = self._steps.gather(np.concatenate((slots, after)), step)
        flat = self._columns.fill(records[: len(slots)])
        if counts is not None:
            flat |= self._outcomes.fill(self._steps.gather(ends, self._outcome))
        following = self._observed.fill(records[len(slots) :])
        if len(last):
            finals = self._finals.gather(places[last] + self._index.first, final)
            ended = finals if self._frames is None else self._observed.fill(finals)
            for name, array in following.items():
                array[last] = ended[name]
        # An episode that was closed by a restart had not ended when its last step was written.
        flat["truncated"][last] |= ~flat["terminated"][last]
        obs = {name: flat.pop(OBS + name) for name in self._names}
        next_obs = {name: following[OBS + name] for name in obs}
        return Transitions(obs=obs, next_obs=next_obs, **flat)

    def _episodes_of(self, start: int, stop: int) -> str:
        """Name finished episodes that have steps among the slots start to stop."""
        starts, lengths = self._index.starts, self._index.lengths
        (found,) = ((starts < stop) & (starts + lengths * self.lanes > start)).nonzero()
        found += self._index.first
        if not len(found):
            return f"steps {start // self.lanes:,} to {stop // self.lanes:,}"
        return f"episodes {found[0]:,} to {found[-1]:,}"

    def close(self) -> None:
        """Close the files that are written; what was appended stays."""
        self.release()
        for log in self._logs.values():
            log.close()

    @property
    def seal_sha256(self) -> str:
        """The hash of all content of a sealed dataset."""
        return self._seal

    def append(self, fragments: Sequence[Fragment]) -> None:
        """Append the next steps of all lanes: the environments of the fragments, in order.

        They can be sampled at once. The oldest episodes are evicted if there are too many. If a
        fragment has restarted, the open episodes of its environments are closed as truncated first.
        """
        self._append(Intake.of_fragments(self.geometry, fragments))

    def append_episode(
        self, obs: Observations, actions: Array, rewards: Array, terminated: bool
    ) -> None:
        """Append a whole episode of T steps to a store of one lane.

        obs: {name: [T + 1, ...]}; actions: [T, n]; rewards: [T]. An episode that is not terminated
        is truncated.
        """
        if self.lanes != 1 or self._pending:
            raise ValueError("whole episodes go into a store of one lane where none is open")
        if self._frames is not None:
            failed, self._failed = self._failed, True  # until all pictures are written
            obs, self._failed = self._frames.store(obs), failed
        self._append(Intake.of_episode(self.geometry, obs, actions, rewards, terminated))

    def _append(self, intake: Intake) -> None:
        if self._failed or self._seal:
            raise EtudeError(f"{self.path} cannot be appended to: it is sealed, or failed.")
        intake.check()
        self._check_continues(intake)
        closed, closed_finals, starts, returns = self._close(intake.restarted)
        ended, starts, returns = intake.finish_episodes(self.time, starts, returns)
        ended = np.concatenate((closed, ended))
        open_steps = self.time + intake.num_steps - int(starts.min())
        most = self.geometry.max_episode_steps
        longest = max(open_steps, int(ended["length"].max(initial=0)))
        if longest > most:
            raise UsageError(
                f"An episode has {longest:,} steps, but {self.path} takes up to {most:,}; "
                "raise max_episode_steps."
            )
        finals = intake.final_records()
        self._failed = True  # until all of it is written: no checkpoint may have half an append
        for records, ahead in intake.step_records():
            self._steps.append(records, ahead)
        for records in (closed_finals, finals):  # numpy would join them without their padding
            self._finals.append(records)
        self._episodes.append(ended)
        self._failed = False
        self._pending = intake.last is not None
        self._open_starts, self._open_returns = starts, returns
        self._settle(ended)

    def _close(self, lanes: Array) -> tuple[Array, Array, Array, Array]:
        """End the open episodes of some `lanes` [lanes] bool after their newest steps.

        Returns their `INDEX` records and final records, and starts [lanes] and returns [lanes] of
        the episodes that are open afterwards. Nothing is written yet.
        """
        (closing,) = (lanes & (self._open_starts < self.time)).nonzero()
        table = np.empty(len(closing), INDEX)
        table["start"] = self._open_starts[closing] * self.lanes + closing
        table["length"] = self.time - self._open_starts[closing]
        table["return"] = self._open_returns[closing]
        finals = np.zeros(len(closing), self.geometry.final_record)
        if len(closing):
            for name, array in self._ahead().items():
                finals[OBS + name] = array[closing]
        starts, returns = self._open_starts.copy(), self._open_returns.copy()
        starts[closing], returns[closing] = self.time, 0.0
        return table, finals, starts, returns

    def _settle(self, ended: Array) -> None:
        """Index ended and open episodes, and evict the oldest."""
        slots = self._open_starts * self.lanes + np.arange(self.lanes)
        self._index.append(ended, slots, self.time - self._open_starts)
        if self.geometry.capacity is not None:
            held = self.num_transitions + self.num_episodes
            self._index.evict(held - self.geometry.capacity)
        for name, first in self._first_needed().items():
            self._logs[name].forget(first)

    def _first_needed(self) -> dict[str, int]:
        """The first record of each log that is still needed.

        The oldest episode ended before all others, and none is longer than `max_episode_steps`,
        which bounds the age of all steps without a search.
        """
        oldest = int(self._open_starts.min())
        if self.num_episodes:
            start, length = self._index.look_up(np.zeros(1, np.int64))
            end = int(start[0]) // self.lanes + int(length[0])
            oldest = min(oldest, max(0, end - self.geometry.max_episode_steps))
        first = self._index.first
        firsts = {"steps": oldest * self.lanes, "finals": first, "episodes": first}
        return firsts if self._frames is None else {**firsts, "frames": 0}

    def _check_continues(self, intake: Intake) -> None:
        """Check that the stored next observation of open steps is the first of the intake."""
        if not self._pending:
            return
        ahead, goes_on = self._ahead(), ~intake.restarted
        for name in self.geometry.observations:
            stored, given = ahead[name][goes_on], intake.first(OBS + name)[goes_on]
            if stored.tobytes() != given.tobytes():
                raise ValueError(f"observation {name!r} does not continue from the last append")

    def _ahead(self) -> Observations:
        """{name: [lanes, ...]}: observations after the newest step, from the slots after it."""
        records = self._steps.read(self._steps.count, self._steps.count + self.lanes)
        return {name: records[OBS + name].copy() for name in self.geometry.observations}

    def _restore_ahead(self, ahead: Observations) -> None:
        """Write these observations to those slots again, where restarted lanes changed them."""
        try:
            records = self._steps.read(self._steps.count, self._steps.count + self.lanes)
        except DamagedStore:
            records = np.empty(0, self._steps.dtype)
        before = records.tobytes()
        if len(records) < self.lanes:  # their file is missing, or was cut after the last step
            records = np.zeros(self.lanes, self._steps.dtype)
        for name, array in ahead.items():
            records[OBS + name] = array
        if records.tobytes() != before:
            self._steps.append(records, tentative=self.lanes)

    def sync(self) -> None:
        """Flush everything that was appended to the disk."""
        news = [log.sync() for log in self._logs.values()]
        if self._disk is not None and any(news):
            fsync_folder(self.path, self._disk)

    def check_unchanged(self) -> None:
        """Raise if another program changed a file that is in use; see `RecordLog`."""
        for log in self._logs.values():
            log.check_unchanged()
        if self._described is not None:
            self._described.check_unchanged(lambda: EpisodeStore.open(self.path, ()).seal_sha256)

    def state_dict(self) -> Tree:
        """Positions, block files by hash, and the observations after the newest step.

        It is flushed first, so that a checkpoint can refer to it at once. Its size depends on lanes
        and blocks, not on the number of episodes. A sealed dataset has only its hash as state.
        """
        if self._seal:
            return {"sealed_sha256": self._seal}
        if self._failed:
            raise EtudeError(f"{self.path} has no state to save: it failed.")
        self.sync()
        ahead = self._ahead() if self._pending else {}
        logs = {name: self._logs[name].state(first) for name, first in self._first_needed().items()}
        opened = {
            "open_starts": self._open_starts.copy(),
            "open_returns": self._open_returns.copy(),
        }
        return {**logs, **opened, "ahead": ahead}

    def load_state_dict(self, state: Tree) -> None:
        """Truncate to `state`; what was appended later is dropped.

        A block of the state that is missing, short or altered raises `DamagedStore`.
        """
        if "sealed_sha256" in state or self._seal:
            if state.get("sealed_sha256") != self._seal:
                raise other_data(self.path)
            return
        self._failed = True  # until all of it is found intact
        table = self._load_logs({name: state[name] for name in self._logs}, self.verify)
        self._open_starts = np.array(state["open_starts"], np.int64)
        self._open_returns = np.array(state["open_returns"], np.float64)
        self._pending = bool(state["ahead"])
        if self._pending and self._disk is not None:  # a store that is only examined writes nothing
            self._restore_ahead(state["ahead"])
        self._settle(table)
        self._failed = False

    def _load_logs(self, state: Tree, verify: bool) -> Array:
        """Truncate the logs; returns the finished episodes, which are not indexed yet."""
        firsts = {name: log.load(state[name], verify) for name, log in self._logs.items()}
        table = self._episodes.read(firsts["episodes"], self._episodes.count)
        check_table(table, firsts["steps"], self._steps.count, self.geometry, self.path)
        if self._finals.count != self._episodes.count or firsts["finals"] != firsts["episodes"]:
            raise DamagedStore(self.path, "does not have a final observation for every episode")
        if self._steps.count % self.lanes:
            raise DamagedStore(self.path, "does not hold as many steps for every lane")
        self._index = EpisodeIndex(self.lanes, firsts["episodes"])
        return table

    def delete_garbage(self, needed_by: Sequence[Tree]) -> list[Path]:
        """Delete block files that neither this store nor any of these states (`state_dict`) needs.

        Pass the states of all resumable checkpoints, just after one was saved.
        """
        found: list[Path] = []
        for name, first in {} if self._seal else self._first_needed().items():
            log = self._logs[name]
            oldest = min([first, *(state[name]["first"] for state in needed_by)])
            unneeded = log.files(range(oldest // log.block_records).__contains__)
            log.delete(unneeded)
            found += unneeded
        return found

    def seal(self, labels: Labels | None = None) -> EpisodeStore:
        """Finish a dataset: truncate files to their content, record their hashes, reopen to read.

        labels: of the episodes in the order they were appended; None if nothing is known.
        """
        if self._pending or self._failed or self._disk is None:
            raise UsageError(f"{self.path} cannot be sealed: it is open, failed or sealed already.")
        labels = Labels.unknown(self.num_episodes) if labels is None else labels
        if len(labels) != self.num_episodes:
            raise ValueError(f"{len(labels):,} labels for {self.num_episodes:,} episodes")
        state: Tree = {
            name: log.state(self._first_needed()[name]) for name, log in self._logs.items()
        }
        for log in self._logs.values():
            log.finish()
        self.sync()
        state["labels"] = write_json(self.path / LABELS, labels.to_json(), self._disk)
        write_json(self.path / SEAL, state, self._disk)
        return EpisodeStore.open(self.path)

    def check_blocks(self) -> None:
        """Read every block of a sealed dataset; raises `DamagedStore` at the first bad one."""
        self._settle(self._load_logs(read_json(self.path / SEAL), verify=True))

    @classmethod
    def copy(cls, path: Path, state: Tree, to: Path) -> None:
        """Copy what belongs to a `state` of the store at `path` to a new folder, which
        `load_state_dict` then continues; the store may be in use by another process."""
        store = cls(path, read_geometry(path), None)
        to.mkdir(parents=True)
        shutil.copyfile(path / DESCRIPTION, to / DESCRIPTION)
        for name, log in store._logs.items():
            for file, size in log.written(state[name]).items():
                _copy_start(file, to / file.name, size, log.block_bytes)

    @classmethod
    def examine(cls, path: Path, state: Tree | None = None) -> dict[Path, str]:
        """The fault of each file of a dataset, or of a store with this `state`; "" for intact
        files."""
        found: dict[Path, str] = {}
        try:
            store = cls(path, read_geometry(path), None)
            found[path / DESCRIPTION] = ""
            named = read_json(path / SEAL) if state is None else state
            for name, log in store._logs.items():
                found |= log.examine(named.get(name))
            if state is None:
                found[path / SEAL] = ""
                cls.open(path)
                found[path / LABELS] = ""
            elif not any(found.values()):
                store.load_state_dict(state)
        except DamagedStore as error:
            found[error.path] = error.what
        return found


def _copy_start(path: Path, to: Path, size: int, whole: int) -> None:
    """Copy the first `size` bytes of a file into a sparse file of `whole` bytes, for scratch."""
    with explain_os_errors("read", path), open_regular(path) as source, to.open("wb") as target:
        left = size
        while left and (block := source.read(min(left, BLOCK))):
            target.write(block)
            left -= len(block)
        target.truncate(whole)
