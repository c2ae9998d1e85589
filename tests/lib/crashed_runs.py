"""States that a crash may leave of a recorded run, and what every one of them must still be."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import crash_driver
from crash_driver import RUN, content_hash
from crash_model import DRAWN, FIXED, Folders, Model, State
from etude.api import Run, resume, train
from etude.core.errors import EtudeError, UsageError
from etude.data.store.episodes import EpisodeStore
from etude.data.store.files import read_geometry
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.runs import checkpoint, files
from etude.runs.folder import RunFolder
from recording_fs import Entry, entries, recorded
from toys import changed, tiny_reach

LIVES = {
    "ppo": ("iteration=5", "end"),
    "sac": ("iteration=9", "end"),
}
"""Where a run is killed before it is resumed and ends: after a save and before the next."""


class NoFlush(files.Disk):
    """What is judged is a copy: flushing it would test the disk, not the code."""

    def fsync(self, fd: int) -> None:
        """Nothing."""


def ppo() -> Recipe:
    """Four checkpoints: marked, demoted to policies and deleted on the way."""
    keep = {"keep_last": 2, "keep_every": 1536}
    return tiny_reach(8, policy={"hidden": (8, 8)}, checkpoint=keep)


def sac() -> Recipe:
    """Small blocks of replay, of which the first are evicted and deleted."""
    return changed(
        recipes.find("sac"),
        policy={"hidden": (8, 8)},
        collector={"num_envs": 8, "envs_per_group": 4},
        env={"kwargs": {"max_episode_steps": 12}},
        algorithm={
            "rollout_steps": 8,
            "batch_size": 16,
            "capacity": 320,
            "warmup_steps": 64,
            "train_batches": 2,
        },
        clock={"total_timesteps": 64 * 16, "iterations": 2, "cycles": 1},
        evaluation={"every": "never", "episodes": 4, "num_envs": 4, "envs_per_group": 4},
        checkpoint={"every": "2 cycles", "keep_last": 2},
    )


RECIPES = {"ppo": ppo, "sac": sac}


def recipe_of(name: str) -> Recipe:
    """A recording is called after its recipe, and whatever else tells it apart."""
    return RECIPES[name.split()[0]]()


@dataclass
class Recording:
    """A run that was recorded."""

    name: str
    entries: list[Entry]
    saved: dict[int, set[str]] = field(default_factory=dict)
    """Hashes of what was saved as each step; lives differ in the time that rows took."""

    def __post_init__(self) -> None:
        self.recipe = recipe_of(self.name)
        for entry in self.entries:
            if entry.kind == "mark" and entry.path.startswith("saving"):
                _, step, content = entry.path.split()
                self.saved.setdefault(int(step), set()).add(content)


@dataclass(frozen=True)
class Crash:
    """A state, and what had been promised by then."""

    label: str
    state: State
    created: bool
    step: int | None
    """Of the last checkpoint whose save had returned."""


def record(folder: Path, lives: dict[str, tuple[str, ...]]) -> list[Recording]:
    """Train each of these recipes in a file system that records."""
    disks = {name: folder / name.replace(" ", "-") for name in lives}
    with ExitStack() as stack:
        told = []
        for name, disk in disks.items():
            mount = stack.enter_context(recorded(disk))
            file = disk / "recipe.yaml"
            file.write_text(recipes.dump(recipe_of(name)))
            told.append([str(file), str(mount), lives[name]])
        command = [sys.executable, crash_driver.__file__, json.dumps(told)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"the runs could not be recorded: {done.stdout}{done.stderr}")
    return [Recording(name, list(entries(disk))) for name, disk in disks.items()]


def crashes(recording: Recording, draws: int) -> Iterator[Crash]:
    """All prefixes of a recording in all variants, those that are chosen at random in many draws.

    A state that was met just before is not told again.
    """
    model, created, step = Model(), False, None
    before: set[int] = set()
    for number, entry in enumerate([*recording.entries, Entry("mark", "the end")]):
        now: set[int] = set()
        for variant in (*FIXED, *DRAWN):
            for draw in range(draws if variant in DRAWN else 1):
                state = model.crash(variant, seed=number * 1000 + draw)
                known = hash((tuple(state.items()), created, step))
                if known not in before and known not in now:
                    label = f"{recording.name}, {number} entries, {variant} {draw}"
                    yield Crash(label, state, created, step)
                now.add(known)
        before = now
        model.take(entry)
        created = created or entry.path == "created"
        if entry.kind == "mark" and entry.path.startswith("saved"):
            step = int(entry.path.split()[1])


def judge(crash: Crash, recording: Recording, where: Path, folders: Folders) -> str | None:
    """What is wrong with a state, in a sentence; None if it can be resumed as it must."""
    folders.write(crash.state, where)
    said: list[str] = []
    try:
        with files.using(NoFlush()):
            wrong = _judge(crash, recording, where / RUN, said)
    except EtudeError as error:
        wrong = str(error)
    finally:
        shutil.rmtree(where)
    return wrong or ("; ".join(said) if said else None)


def _judge(crash: Crash, recording: Recording, run: Path, said: list[str]) -> str | None:
    if not run.exists():
        try:
            RunFolder.open(run)
        except UsageError:
            return "the run is gone" if crash.created else None
    with RunFolder.open(run) as folder:
        folder.manifest()
        if folder.recipe.read_text() != recipes.dump(recording.recipe):
            return "the recipe is not what was written"
        path = checkpoint.newest_verified(folder.checkpoints, said.append)
        if crash.step is not None and (path is None or checkpoint.step_of(path) < crash.step):
            return f"step {crash.step} had been saved, and {path} was found"
        left = [p.name for p in folder.checkpoints.iterdir() if not p.exists() or p.name[0] == "."]
        if left:
            return f"{', '.join(left)} in checkpoints/"
        log = folder.metrics_log()
        try:
            if path is None:
                log.cut_back({"bytes": 0, "sha256": hashlib.sha256().hexdigest()})
                return None
            loaded = checkpoint.load_training(path)
            if content_hash(*loaded) not in recording.saved[checkpoint.step_of(path)]:
                return f"{path} is not what was saved"
            training = loaded[2]
            log.cut_back(training["metrics"])
        finally:
            log.close()
        rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        if any("timesteps" not in row for row in rows):
            return "rows of metrics.jsonl are lost"
        if rows[-1]["timesteps"] != checkpoint.step_of(path):
            return f"the last row is of step {rows[-1]['timesteps']}"
        for shard, state in enumerate(training["algorithm"].get("stores", {}).values()):
            where = run / "replay" / f"shard-{shard}"
            store = EpisodeStore.create(where, read_geometry(where), NoFlush())
            store.load_state_dict(state)
            store.close()
    return None


def ends_equal(crash: Crash, where: Path, folders: Folders, untouched: Run) -> bool:
    """Go on from a state to the run's end, or begin where there is no run: the bits are equal."""
    folders.write(crash.state, where)
    run = where / RUN
    try:
        with files.using(NoFlush()):
            done = resume(run) if run.exists() else train(untouched.recipe, run)
        return done.fingerprint() == untouched.fingerprint()
    except EtudeError:
        return False
    finally:
        shutil.rmtree(where)
