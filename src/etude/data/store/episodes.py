"""The episode store: experience on disk, for replay and for datasets larger than memory.

    steps-<n>.bin      one record per step and lane: observation, action, reward, flags
    finals-<n>.bin     one record per finished episode: the observation it ended on
    episodes-<n>.bin   one record per finished episode: first step, length, return
    store.json         fields and sizes; sealed.json: positions and hashes of a finished dataset
    frames-<n>.bin     where pictures are kept compressed: their bytes
    labels.json        of a finished dataset: what is known of each episode, see `Labels`

Environments advance in lockstep, so a step's place is known from its time and its lane:
`slot = time * lanes + lane`. Hence

- a step's next observation is the record `lanes` further on, and no observation is stored twice.
  Only what an episode ended on has no successor; it goes to `finals`, whose records are numbered
  like the episodes. Overhead: one observation per episode, and nothing drifts apart.
- an append of all lanes is one run of bytes at the end of the newest block (`[steps, lanes]`, not
  `[lanes, steps]`, for this reason), so writing, hashing, cutting back and throwing away work on
  whole prefixes and whole files. A dataset has one lane: its episodes are contiguous.
- episodes are numbered in the order they end, `end` slots increase with the number, and the
  finished episodes held are a range of numbers. A uniform step of them is found by one search in
  the running sum of lengths; its episode, offset and next observation follow without another.

The observation after the newest step is written to its successor's slot in advance: a transition
can be sampled as soon as it is appended. The next append must begin with it, and is refused if
not; unless it says that its environments began anew (`restarted`), as those that cannot be
restored do after a resume. What was open there is closed as truncated, on that observation.

Evicting only moves the front of that range. Files are never reused, and deleted only by
`delete_garbage`, which is told what resumable checkpoints still need.

One store per learner shard. Learned rewards are never written back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from etude.core.contracts import Array, Fragment, Observations
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.data.store.files import (
    DESCRIPTION,
    SEAL,
    Described,
    check_table,
    create_folder,
    fsync_folder,
    read_geometry,
    read_json,
    write_json,
)
from etude.data.store.geometry import INDEX, OBS, StoreGeometry
from etude.data.store.intake import Intake
from etude.data.store.labels import LABELS, Labels
from etude.data.store.log import DamagedStore, Disk
from etude.data.store.reading import EpisodeReader
from etude.data.store.sampling import EpisodeIndex, Subsets, Transitions

__all__ = ["DamagedStore", "EpisodeStore", "StoreGeometry", "Subsets", "Transitions"]


class EpisodeStore(EpisodeReader):
    """Steps and episodes of some lanes; see the module's text for how they are kept."""

    @classmethod
    def create(cls, path: Path, geometry: StoreGeometry, disk: Disk) -> EpisodeStore:
        """An empty store to write to, in a folder whose parent exists.

        Blocks that a killed run left there are overwritten, or taken up by `load_state_dict`; a
        sealed dataset and a store of another geometry are refused. A damaged description is
        written anew: what the blocks hold is told by the hashes in a checkpoint.
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
        """A sealed dataset, to read; sizes and index are checked now, each block when it is read.

        reads: the observations that steps come with, None for all. Others stay on the disk.
        """
        path = Path(path)
        store = cls(path, read_geometry(path), None, reads)
        if not os.path.lexists(path / SEAL):
            raise UsageError(
                f"{path} was never finished, or has lost its {SEAL}: put that back, or import or "
                "record it again."
            )
        document = read_json(path / SEAL)
        if document.keys() == store._logs.keys():
            raise UsageError(
                f"{path} was made by an older version, without the table that keeps clips with "
                f"their source ({LABELS}); import or record it again."
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
        store._described = Described(path, (SEAL, DESCRIPTION, LABELS), store._seal)
        return store

    @property
    def seal_sha256(self) -> str:
        """The hash that a sealed dataset is known by: of all that it holds."""
        return self._seal

    def append(self, fragments: Sequence[Fragment]) -> None:
        """The next steps of all lanes: the environments of the fragments, in order.

        They can be sampled at once. Then the oldest episodes go, if there are too many. Where a
        fragment has restarted, the open episodes of its environments are closed as truncated first.
        """
        self._take_in(Intake.of_fragments(self.geometry, fragments))

    def append_episode(
        self, obs: Observations, actions: Array, rewards: Array, terminated: bool
    ) -> None:
        """One whole episode of T steps into a store of one lane.

        obs: {name: [T + 1, ...]}; actions: [T, n]; rewards: [T]. It was truncated if it was not
        terminated.
        """
        if self.lanes != 1 or self._pending:
            raise ValueError("whole episodes go into a store of one lane where none is open")
        if self._frames is not None:
            failed, self._failed = self._failed, True  # until all pictures are written
            obs, self._failed = self._frames.store(obs), failed
        self._take_in(Intake.of_episode(self.geometry, obs, actions, rewards, terminated))

    def _take_in(self, intake: Intake) -> None:
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
        self._failed = True  # until all of it is written: half an append must not be named
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
        what is open then. Nothing is written yet.
        """
        (gone,) = (lanes & (self._open_starts < self.time)).nonzero()
        table = np.empty(len(gone), INDEX)
        table["start"] = self._open_starts[gone] * self.lanes + gone
        table["length"] = self.time - self._open_starts[gone]
        table["return"] = self._open_returns[gone]
        finals = np.zeros(len(gone), self.geometry.final_record)
        if len(gone):
            for name, array in self._ahead().items():
                finals[OBS + name] = array[gone]
        starts, returns = self._open_starts.copy(), self._open_returns.copy()
        starts[gone], returns[gone] = self.time, 0.0
        return table, finals, starts, returns

    def _settle(self, ended: Array) -> None:
        """Index what ended and what is open, and let the oldest episodes go."""
        slots = self._open_starts * self.lanes + np.arange(self.lanes)
        self._index.append(ended, slots, self.time - self._open_starts)
        if self.geometry.capacity is not None:
            held = self.num_transitions + self.num_episodes
            self._index.evict(held - self.geometry.capacity)
        for name, first in self._firsts().items():
            self._logs[name].forget(first)

    def _firsts(self) -> dict[str, int]:
        """The first record of each log that is still needed.

        The oldest episode held ended before all others and none is longer than
        `max_episode_steps`, so no step held is older than that: a bound without a search.
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
        """What was stored as an open step's next observation must be the next observation."""
        if not self._pending:
            return
        ahead, goes_on = self._ahead(), ~intake.restarted
        for name in self.geometry.observations:
            stored, given = ahead[name][goes_on], intake.first(OBS + name)[goes_on]
            if stored.tobytes() != given.tobytes():
                raise ValueError(f"observation {name!r} does not continue from the last append")

    def _ahead(self) -> Observations:
        """{name: [lanes, ...]}: what follows the newest step, from the slots after it."""
        records = self._steps.read(self._steps.count, self._steps.count + self.lanes)
        return {name: records[OBS + name].copy() for name in self.geometry.observations}

    def _put_ahead(self, ahead: Observations) -> None:
        """Give those slots these observations again, where lanes that began anew changed them."""
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
        """Make all that was appended durable; without news it does nothing."""
        news = [log.sync() for log in self._logs.values()]
        if self._disk is not None and any(news):
            fsync_folder(self.path, self._disk)

    def check_unchanged(self) -> None:
        """Raise where a file that is in use was changed by anyone else; see `RecordLog`."""
        for log in self._logs.values():
            log.check_unchanged()
        if self._described is not None:
            self._described.check_unchanged(lambda: EpisodeStore.open(self.path, ()).seal_sha256)

    def state_dict(self) -> Tree:
        """Positions, block files by hash, and the observations after the newest step.

        Synced first, so that it can be named at once. Its size depends on lanes and blocks, not on
        what is held. A sealed dataset has no state but its own hash.
        """
        if self._seal:
            return {"sealed_sha256": self._seal}
        if self._failed:
            raise EtudeError(f"{self.path} has no state to save: it failed.")
        self.sync()
        ahead = self._ahead() if self._pending else {}
        logs = {name: self._logs[name].state(first) for name, first in self._firsts().items()}
        opened = {
            "open_starts": self._open_starts.copy(),
            "open_returns": self._open_returns.copy(),
        }
        return {**logs, **opened, "ahead": ahead}

    def load_state_dict(self, state: Tree) -> None:
        """Cut back to what `state` names; what was appended later is void.

        A named block that is missing, short or altered raises `DamagedStore`.
        """
        if "sealed_sha256" in state or self._seal:
            if state.get("sealed_sha256") != self._seal:
                raise EtudeError(f"{self.path} is not the data this run was started with.")
            return
        self._failed = True  # until all of it is found whole
        table = self._load_logs({name: state[name] for name in self._logs}, self.verify)
        self._open_starts = np.array(state["open_starts"], np.int64)
        self._open_returns = np.array(state["open_returns"], np.float64)
        self._pending = bool(state["ahead"])
        if self._pending and self._disk is not None:  # who only examines writes nothing
            self._put_ahead(state["ahead"])
        self._settle(table)
        self._failed = False

    def _load_logs(self, state: Tree, verify: bool) -> Array:
        """Cut the logs back; returns the finished episodes, which are still to be indexed."""
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
        for name, first in {} if self._seal else self._firsts().items():
            log = self._logs[name]
            oldest = min([first, *(state[name]["first"] for state in needed_by)])
            gone = log.files(range(oldest // log.block_records).__contains__)
            log.delete(gone)
            found += gone
        return found

    def seal(self, labels: Labels | None = None) -> EpisodeStore:
        """End a dataset: cut its files to what they hold, record their hashes, reopen to read.

        labels: what is known of each episode, in the order they were appended; None for nothing.
        """
        if self._pending or self._failed or self._disk is None:
            raise UsageError(f"{self.path} cannot be sealed: it is open, failed or sealed already.")
        labels = Labels.unknown(self.num_episodes) if labels is None else labels
        if len(labels) != self.num_episodes:
            raise ValueError(f"{len(labels):,} labels for {self.num_episodes:,} episodes")
        state: Tree = {name: log.state(self._firsts()[name]) for name, log in self._logs.items()}
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
    def examine(cls, path: Path, state: Tree | None = None) -> dict[Path, str]:
        """What is wrong with each file of a dataset, or of a store that `state` names the files
        of; "" for one that is whole."""
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
