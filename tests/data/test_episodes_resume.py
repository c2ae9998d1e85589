"""Cut back, replayed, killed, damaged: the episode store gives the same bits or says why not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_episodes import World, everything, geometry

from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.core.trees import Tree, digest
from etude.data.editing import select, write
from etude.data.store import log as log_module
from etude.data.store.episodes import DamagedStore, EpisodeStore
from etude.runs import checkpoint
from etude.runs.documents import encode_sealed
from etude.runs.files import Disk, DiskFault
from faults.changed_data import WAYS, Mapped

LANES, LONGEST, STEPS = 3, 6, 5
CAPACITY = 2 * LANES * (LONGEST + 1) + 20
SHAPE = geometry(LANES, LONGEST, CAPACITY, 7)


def make(path: Path, disk: Disk | None = None) -> EpisodeStore:
    return EpisodeStore.create(path, SHAPE, disk or Disk())


def world(skip: int = 0, seed: int = 11) -> World:
    """The lanes after `skip` appends."""
    made = World(seed, LANES, LONGEST)
    for _ in range(skip):
        made.steps(STEPS)
    return made


def run(store: EpisodeStore, lanes: World, appends: int) -> None:
    for _ in range(appends):
        store.append([lanes.steps(STEPS)])


def contents(store: EpisodeStore) -> str:
    """A hash over all that can be sampled, and over what a key draws."""
    generator = Key(3).generator()
    batches = everything(store), store.sample_transitions(generator, 50)
    subsets = store.sample_subsets(generator, 4, 5)
    trees = [batch._asdict() for batch in (*batches, subsets.steps)]
    sums = {"returns": subsets.returns, "lengths": subsets.lengths}
    return digest({str(i): tree for i, tree in enumerate((*trees, sums))})


def through_json(state: Tree) -> Tree:
    """As a checkpoint gives it back."""
    arrays = {n: v for n, v in state.items() if isinstance(v, np.ndarray) or n == "ahead"}
    plain = {n: v for n, v in state.items() if n not in arrays}
    return {**json.loads(json.dumps(plain)), **arrays}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What an untouched run holds after each append."""
    store, lanes, found = make(tmp_path_factory.mktemp("truth") / "store"), world(), {}
    for done in range(1, 41):
        run(store, lanes, 1)
        found[done] = contents(store)
    return found


@settings(max_examples=25)
@given(saved=st.integers(2, 20), later=st.integers(0, 12), verify=st.booleans())
def test_cut_back_and_replayed(
    tmp_path_factory: pytest.TempPathFactory,
    truth: dict[int, str],
    saved: int,
    later: int,
    verify: bool,
) -> None:
    """Whatever was appended after the state was saved, even other data, leaves no trace."""
    path = tmp_path_factory.mktemp("cut") / "store"
    store = make(path)
    run(store, world(), saved)
    state = through_json(store.state_dict())
    strange = world(saved)
    strange._rng = np.random.default_rng(99)
    run(store, strange, later)
    assert later < 2 or contents(store) != truth[saved + later]
    store.close()

    resumed = make(path)
    resumed.verify = verify
    resumed.load_state_dict(state)
    assert contents(resumed) == truth[saved]
    assert digest(resumed.state_dict()) == digest(state)
    run(resumed, world(saved), 15)
    assert contents(resumed) == truth[saved + 15]


@pytest.mark.parametrize("kept", [None, *range(LANES)])
@pytest.mark.parametrize("saved", range(3, 10))
def test_a_file_that_was_cut_after_the_last_step(
    tmp_path: Path, truth: dict[int, str], saved: int, kept: int | None
) -> None:
    """What follows the newest steps is in the state too. None: the rest of the block is gone."""
    store = make(tmp_path / "store")
    run(store, world(), saved)
    state, log = through_json(store.state_dict()), store._steps
    store.close()
    block, inside = divmod(log.count, log.block_records)
    if inside + (kept or 0) >= log.block_records:
        pytest.skip("there is nothing to cut in this block")
    if kept is None and not inside:
        log.path(block).unlink()
    else:
        os.truncate(log.path(block), (inside + (kept or 0)) * log.dtype.itemsize)
    resumed = make(tmp_path / "store")
    resumed.load_state_dict(state)
    assert contents(resumed) == truth[saved]
    run(resumed, world(saved), 15)
    assert contents(resumed) == truth[saved + 15]


def test_through_a_checkpoint(tmp_path: Path, truth: dict[int, str]) -> None:
    store = make(tmp_path / "store")
    run(store, world(), 9)
    policy = {"w": np.zeros(1)}, {"name": "none"}
    saved = checkpoint.save(tmp_path / "saved", 9, policy, {"store": store.state_dict()})
    resumed = make(tmp_path / "store")
    resumed.load_state_dict(checkpoint.load_training(saved)[2]["store"])
    assert contents(resumed) == truth[9]


def test_what_a_checkpoint_needs_survives_eviction(tmp_path: Path, truth: dict[int, str]) -> None:
    """Long after its episodes were evicted a state loads, as long as garbage is told of it."""
    store, lanes, saved = make(tmp_path / "store"), world(), []
    for done in range(2, 40, 2):
        run(store, lanes, 2)
        saved = [*saved[-2:], (done, store.state_dict())]
        store.delete_garbage([state for _, state in saved])
    assert not (tmp_path / "store" / "steps-000000000000.bin").exists()
    for done, state in saved:
        again = make(tmp_path / "store")
        again.load_state_dict(state)
        assert contents(again) == truth[done]
    assert store.delete_garbage([state for _, state in saved]) == []
    assert store.delete_garbage([]) != []
    assert contents(store) == truth[38]
    with pytest.raises(DamagedStore, match=r"steps-\d+\.bin is missing"):
        make(tmp_path / "store").load_state_dict(saved[0][1])


def test_a_state_does_not_grow_with_the_store(tmp_path: Path) -> None:
    sizes = []
    for capacity in (1_000, 20_000):
        shape = geometry(LANES, LONGEST, capacity, block_steps=0)
        store, lanes = EpisodeStore.create(tmp_path / str(capacity), shape, Disk()), world()
        for _ in range(30):
            store.append([lanes.steps(300)])
        state = store.state_dict()
        sizes.append(len(json.dumps(through_json(state), default=np.ndarray.tolist)))
    assert store.num_transitions > 15_000
    assert max(sizes) < 4_000


class WatchedDisk(Disk):
    """Knows what a power cut would take: writes and names that were not flushed."""

    def __init__(self) -> None:
        self.files: dict[int, Path] = {}
        self.unflushed: set[Path] = set()

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not path.exists():
            self.unflushed.add(path.parent)
        fd = super().open(path, flags)
        self.files[fd] = path
        return fd

    def write(self, fd: int, data: Any) -> int:
        self.unflushed.add(self.files[fd])
        return super().write(fd, data[: max(1, len(data) // 2)])  # a disk may take a part

    def truncate(self, fd: int, size: int) -> None:
        self.unflushed.add(self.files[fd])
        super().truncate(fd, size)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.unflushed.discard(self.files[fd])


def test_a_state_names_only_what_is_durable(tmp_path: Path, truth: dict[int, str]) -> None:
    disk = WatchedDisk()
    store, lanes = make(tmp_path / "store", disk), world()
    for done in range(1, 20):
        run(store, lanes, 1)
        assert disk.unflushed
        store.state_dict()
        assert not disk.unflushed
        assert contents(store) == truth[done]
    data = EpisodeStore.create(tmp_path / "data", geometry(1, 9), disk)
    obs = {"state": np.zeros((10, 3), np.float32), "image": np.zeros((10, 2, 2), np.uint8)}
    data.append_episode(obs, np.zeros((9, 2), np.float32), np.zeros(9, np.float32), True)
    data.seal()
    assert not disk.unflushed


class FullDisk(Disk):
    left = 1 << 40

    def write(self, fd: int, data: Any) -> int:
        if self.left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = super().write(fd, data[: self.left])
        self.left -= done
        return done


def test_a_full_disk_is_one_clear_error(tmp_path: Path, truth: dict[int, str]) -> None:
    for space in (0, 100, 700, 1500):
        disk = FullDisk()
        store, lanes = make(tmp_path / f"{space}", disk), world()
        run(store, lanes, 8)
        state = store.state_dict()
        disk.left = space
        with pytest.raises(DiskFault, match=r"write .*\.bin: the disk is full"):
            run(store, lanes, 9)
        with pytest.raises(EtudeError, match="no state to save"):
            store.state_dict()
        with pytest.raises(EtudeError, match="cannot be appended to"):
            run(store, lanes, 1)
        disk.left = 1 << 40
        store.load_state_dict(state)
        assert contents(store) == truth[8]
        run(store, world(8), 5)
        assert contents(store) == truth[13]


def named_blocks(store: EpisodeStore, state: Tree) -> dict[Path, int]:
    """Every file a state names, and how many of its bytes."""
    found = {}
    for name, log in store._logs.items():
        first, count, size = state[name]["first"], state[name]["count"], log.block_records
        for block in range(first // size, -(-count // size)):
            records = min(count - block * size, size)
            found[log.path(block)] = records * log.dtype.itemsize
    return found


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    run(store, world(), 13)
    state, rng = store.state_dict(), random.Random(0)
    blocks = named_blocks(store, state)
    assert len(blocks) >= 6
    for path, size in blocks.items():
        good = path.read_bytes()
        places = {0, size - 1, *(rng.randrange(size) for _ in range(12))}
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(DamagedStore, match=rf"{path.name} is damaged"):
                make(tmp_path / "store").load_state_dict(state)
        for cut in (0, size // 2, size - 1):
            path.write_bytes(good[:cut])
            with pytest.raises(DamagedStore, match=rf"{path.name} is short"):
                make(tmp_path / "store").load_state_dict(state)
        path.unlink()
        with pytest.raises(DamagedStore, match=rf"{path.name} is missing"):
            make(tmp_path / "store").load_state_dict(state)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_bytes(good)
        path.symlink_to(elsewhere)
        with pytest.raises(DamagedStore, match=rf"{path.name} is not a plain file"):
            make(tmp_path / "store").load_state_dict(state)
        path.unlink()
        path.write_bytes(good)
    make(tmp_path / "store").load_state_dict(state)


def test_damage_to_the_newest_observations_is_put_right(tmp_path: Path) -> None:
    """They are after the last step, in no block's hash; at a block's end even in the next file."""
    for appends in (13, 14):
        path = tmp_path / f"{appends}"
        store = make(path)
        run(store, world(), appends)
        state, before = store.state_dict(), contents(store)
        log = store._steps
        block, inside = divmod(log.count, log.block_records)
        assert (inside == 0) == (appends == 14)
        damaged = bytearray(log.path(block).read_bytes())
        offset = log.dtype.fields["obs/state"][1]
        damaged[inside * log.dtype.itemsize + offset] ^= 1
        log.path(block).write_bytes(damaged)
        again = make(path)
        again.load_state_dict(state)
        assert contents(again) == before


def a_dataset(path: Path) -> EpisodeStore:
    store = EpisodeStore.create(path, geometry(1, 9, block_steps=16), Disk())
    rng = np.random.default_rng(0)
    for length in (9, 3, 8, 9, 5, 9):
        image = rng.integers(0, 256, (length + 1, 2, 2), np.uint8)
        obs = {"state": rng.random((length + 1, 3), np.float32), "image": image}
        actions, rewards = rng.random((length, 2), np.float32), rng.random(length, np.float32)
        store.append_episode(obs, actions, rewards, True)
    return store.seal()


def reseal(path: Path, document: Tree) -> None:
    """Change a file as one would who knows how it is sealed."""
    unsealed = {name: value for name, value in document.items() if name != "seal"}
    path.write_bytes(encode_sealed(unsealed))


def test_every_byte_of_a_dataset_is_checked_before_it_is_used(tmp_path: Path) -> None:
    """One flipped bit anywhere: noticed by whoever reads it, with the file named."""
    data = a_dataset(tmp_path / "data")
    whole = contents(data)
    for path in sorted(data.path.iterdir()):
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            with pytest.raises(DamagedStore, match=path.name):
                contents(EpisodeStore.open(data.path))
        path.write_bytes(good)
    assert contents(EpisodeStore.open(data.path)) == whole


def test_the_episodes_in_a_damaged_block_are_named_and_others_can_be_read(tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "data")
    path = data.path / "steps-000000000001.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    again = EpisodeStore.open(data.path)
    again.episode(0)
    for _ in range(2):  # it stays damaged
        with pytest.raises(DamagedStore, match=rf"{path.name} .* \(it has episodes 2 to 4\)"):
            again.episode(3)


CUT = """
import sys
from pathlib import Path
from etude.data.store.episodes import EpisodeStore
store = EpisodeStore.open(Path(sys.argv[1]))
store.episode(0)
print("mapped", flush=True)
sys.stdin.readline()
try:
    store.episode(0)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_file_that_is_cut_while_it_is_mapped_is_named(tmp_path: Path) -> None:
    """Reading the map of it would be SIGBUS."""
    data = a_dataset(tmp_path / "data")
    path = data.path / "steps-000000000000.bin"
    process = subprocess.Popen(
        [sys.executable, "-c", CUT, str(data.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    os.truncate(path, 0)
    out, _ = process.communicate("\n")
    assert process.returncode == 0
    assert out.startswith(
        f"DamagedStore {path} was truncated while it was in use (it has episodes 0 "
    )


def test_a_damaged_dataset_is_found(tmp_path: Path) -> None:
    data = a_dataset(tmp_path / "data")
    state = data.state_dict()
    for path in sorted(data.path.glob("*.bin")):
        good = path.read_bytes()
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 4]))
        with pytest.raises(DamagedStore, match=path.name):
            EpisodeStore.open(data.path).check_blocks()
        path.write_bytes(good[:-1])
        with pytest.raises(DamagedStore, match=rf"{path.name} is short"):
            EpisodeStore.open(data.path)
        path.write_bytes(good)
    again = EpisodeStore.open(data.path)
    again.check_blocks()
    again.load_state_dict(state)
    assert contents(again) == contents(data)
    other = tmp_path / "other"
    shutil.copytree(data.path, other)
    seal = json.loads((other / "sealed.json").read_text())
    seal["steps"]["sha256"][0] = "0" * 64
    reseal(other / "sealed.json", seal)
    with pytest.raises(EtudeError, match="not the data this run was started with"):
        EpisodeStore.open(other).load_state_dict(state)


def put(document: Tree, path: str, value: Any) -> Tree:
    *parents, last = path.split(".")
    node = document
    for parent in parents:
        node = node[parent]
    node[last] = value
    return document


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("store.json", "lanes", 2**70),
        ("store.json", "lanes", 0),
        ("store.json", "lanes", "3"),
        ("store.json", "lanes", True),
        ("store.json", "lanes", 7),
        ("store.json", "capacity", 2**80),
        ("store.json", "capacity", 1.5),
        ("store.json", "block_steps", 2**62),
        ("store.json", "block_steps", -1),
        ("store.json", "max_episode_steps", -3),
        ("store.json", "max_episode_steps", 2**63),
        ("store.json", "version", 2),
        ("store.json", "format", "pickle"),
        ("store.json", "specs", []),
        ("store.json", "specs.obs/state.shape", [2**40, 2**40]),
        ("store.json", "specs.obs/state.shape", [-3]),
        ("store.json", "specs.obs/state.shape", [1] * 40),
        ("store.json", "specs.obs/state.shape", [3.0]),
        ("store.json", "specs.obs/state.dtype", "object"),
        ("store.json", "specs.obs/state.dtype", "O"),
        ("store.json", "specs.obs/state.dtype", ["f4"]),
        ("store.json", "specs.rewards.dtype", "float64"),
        ("store.json", "specs.../../x", {"shape": [1], "dtype": "uint8"}),
        ("sealed.json", "steps.count", 2**59),
        ("sealed.json", "steps.count", 2**70),
        ("sealed.json", "steps.count", -1),
        ("sealed.json", "steps.first", 40),
        ("sealed.json", "steps.sha256", "abc"),
        ("sealed.json", "steps.sha256", []),
        ("sealed.json", "episodes.count", 5),
        ("sealed.json", "finals.first", 1),
        ("sealed.json", "finals", 3),
        ("sealed.json", "more", 3),
    ],
)
def test_a_hostile_description_is_refused(tmp_path: Path, file: str, path: str, value: Any) -> None:
    data = a_dataset(tmp_path / "data")
    document = json.loads((data.path / file).read_text())
    if path.startswith("specs..."):
        document["specs"]["obs/../../x"] = value
    else:
        put(document, path, value)
    reseal(data.path / file, document)
    with pytest.raises(EtudeError, match=r"data"):
        EpisodeStore.open(data.path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": ' * 5000, "\xff"])
def test_files_that_are_not_json_are_refused(tmp_path: Path, text: str) -> None:
    for file in ("store.json", "sealed.json"):
        data = a_dataset(tmp_path / f"data-{file}")
        (data.path / file).write_bytes(text.encode("latin-1"))
        with pytest.raises(DamagedStore, match=file):
            EpisodeStore.open(data.path)


@pytest.mark.parametrize("start", [-1, 2**62, 43])
@pytest.mark.parametrize("length", [0, -5, 2**62, 9])
def test_a_hostile_index_is_refused(tmp_path: Path, start: int, length: int) -> None:
    """Its hashes are right, what it points to is not there."""
    data = a_dataset(tmp_path / "data")
    path = data.path / "episodes-000000000000.bin"
    table = np.frombuffer(path.read_bytes(), data._episodes.dtype).copy()
    table[3]["start"], table[3]["length"] = start, length
    path.write_bytes(table.tobytes())
    seal = json.loads((data.path / "sealed.json").read_text())
    seal["episodes"]["sha256"] = [hashlib.sha256(table.tobytes()).hexdigest()]
    reseal(data.path / "sealed.json", seal)
    with pytest.raises(DamagedStore, match="invalid at episode 3"):
        EpisodeStore.open(data.path)


def write_state(folder: Path, done: int, state: Tree) -> None:
    """A stand-in for a checkpoint: whole or not there."""
    text = json.dumps({"done": done, **state}, default=np.ndarray.tolist)
    (folder / ".tmp").write_text(text)
    os.rename(folder / ".tmp", folder / f"state-{done:04d}.json")


def read_state(path: Path) -> tuple[int, Tree]:
    state = json.loads(path.read_text())
    for name in ("open_starts", "open_returns"):
        state[name] = np.array(state[name])
    return state.pop("done"), state


APPENDS = 39


def drive(folder: Path, appends: int) -> None:
    """Append until done, saving now and then; takes up where it was killed."""
    store = make(folder / "store")
    saved, done = sorted(folder.glob("state-*.json")), 0
    if saved:
        done, state = read_state(saved[-1])
        store.load_state_dict(state)
    lanes = world(done)
    while done < appends:
        run(store, lanes, 1)
        done += 1
        time.sleep(0.005)
        if done % 3 == 0:
            write_state(folder, done, store.state_dict())
            saved = sorted(folder.glob("state-*.json"))
            for old in saved[:-2]:
                old.unlink()
            store.delete_garbage([read_state(path)[1] for path in saved[-2:]])


def start(folder: Path) -> int:
    """The driver in a process of its own; a fork, since importing takes longer than the run."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        drive(folder, APPENDS)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_time(tmp_path: Path, truth: dict[int, str], seed: int) -> None:
    """Every state that was saved loads and holds what it should; so does the end."""
    rng, killed, finished = random.Random(seed), 0, False
    while not finished:
        child = start(tmp_path)
        if killed < 12:
            time.sleep(rng.uniform(0.0, 0.1))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        finished = os.WIFEXITED(status)
        assert not finished or os.WEXITSTATUS(status) == 0
        killed += not finished
        for path in sorted(tmp_path.glob("state-*.json")):
            done, state = read_state(path)
            store = make(tmp_path / "store")
            store.load_state_dict(state)
            assert contents(store) == truth[done]
            store.close()
    assert done == APPENDS
    assert killed >= 3


def test_lanes_that_began_anew_and_were_killed_can_be_cut_back_again(tmp_path: Path) -> None:
    """They write over the observations that were ahead, which the state has to bring back."""
    lanes = world()
    with_open = make(tmp_path / "store")
    run(with_open, lanes, 3)
    state, before = with_open.state_dict(), contents(with_open)
    with_open.close()
    for _ in range(3):
        store = make(tmp_path / "store")
        store.load_state_dict(state)
        assert contents(store) == before
        lanes.restart(slice(0, LANES))
        fragment = lanes.steps(STEPS)
        fragment.restarted[:] = True
        store.append([fragment])
        store.close()
        assert set(EpisodeStore.examine(tmp_path / "store", state).values()) == {""}


def used(store: EpisodeStore) -> dict[Path, int]:
    """Every file that was read or written, and how many of its bytes hold records."""
    logs = store._logs.values()
    return {log.path(b): log._recorded(b)[0] for log in logs for b in log._stamps}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["dataset", "replay"])
def test_a_file_changed_in_use_is_named(
    tmp_path: Path, kind: str, way: Callable[[Path, int, bytes], None]
) -> None:
    """Each file at a random place; of a replay also those that are still written to."""
    store = a_dataset(tmp_path / "data") if kind == "dataset" else make(tmp_path / "data")
    if kind == "replay":
        run(store, world(), 13)
    contents(store)
    store.check_unchanged()
    chance, tried = random.Random(5), 0
    for path, size in used(store).items():
        data, before = path.read_bytes(), path.stat()
        place = chance.randrange(size) if way.__name__ != "_punched" else 0
        if not any(data[:size]):
            continue  # a hole in zeros changes nothing
        way(path, place, data)
        with pytest.raises(EtudeError, match=path.name):
            store.check_unchanged()
        path.write_bytes(data)
        for log in store._logs.values():  # as if it had never happened
            log._stamps.update(dict.fromkeys(b for b in log._stamps if log.path(b) == path))
        store.check_unchanged()
        assert path.stat().st_size == before.st_size
        tried += 1
    assert tried >= 5


def test_a_write_to_a_page_that_was_dirty_before(tmp_path: Path) -> None:
    """The second write to a page through a memory map changes no time until it is flushed."""
    store = a_dataset(tmp_path / "data")
    path = tmp_path / "data" / "steps-000000000000.bin"
    data, other = path.read_bytes(), Mapped(path)
    other.put(7, data[7])
    contents(store)  # only now is it read
    other.put(7, data[7] ^ 1)
    other.close()
    with pytest.raises(DamagedStore, match=path.name):
        store.check_unchanged()


def test_the_observations_ahead_of_a_replay_count_too(tmp_path: Path) -> None:
    """They are after the last step, at a block's end even in the next file."""
    for appends in (13, 14):
        store = make(tmp_path / f"{appends}")
        run(store, world(), appends)
        log = store._steps
        block, inside = divmod(log.count, log.block_records)
        assert (inside == 0) == (appends == 14)
        store.check_unchanged()
        data = log.path(block).read_bytes()
        place = inside * log.dtype.itemsize
        WAYS[0](log.path(block), place, data)
        with pytest.raises(DamagedStore, match=log.path(block).name):
            store.check_unchanged()
        log.path(block).write_bytes(data)
        run(store, world(appends), 3)
        store.check_unchanged()


def test_what_datasets_do_to_each_other_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links made and removed, rights, a copy in place; a file that nobody touched is not read."""
    store = a_dataset(tmp_path / "data")
    before = contents(store)
    store.check_unchanged()
    merged = write(select([tmp_path / "data"]), tmp_path / "merged", "merged")
    merged.transitions(np.array([0]), np.array([0]))
    merged.check_unchanged()
    store.check_unchanged()
    shutil.rmtree(tmp_path / "merged")
    store.check_unchanged()
    path = tmp_path / "data" / "steps-000000000000.bin"
    path.chmod(0o444)
    store.check_unchanged()
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").rename(path)
    store.check_unchanged()
    assert contents(store) == before
    (tmp_path / "data" / "labels.json").touch()
    store.check_unchanged()
    time.sleep(0.05)  # a file that has only just changed is read once more
    store.check_unchanged()
    monkeypatch.setattr(log_module, "_hash_file", None)
    monkeypatch.setattr(log_module, "_maps_leave_traces", lambda folder: True)
    store.check_unchanged()


@pytest.mark.parametrize("name", ["labels.json", "sealed.json", "store.json", "episodes.bin"])
def test_tables_changed_in_use_are_noticed(tmp_path: Path, name: str) -> None:
    a_dataset(tmp_path / "data")
    data = write(select([tmp_path / "data"]), tmp_path / "merged", "merged")
    data.check_unchanged()
    at = data.path if (data.path / name).exists() else data.shards[0].path
    content = bytearray((at / name).read_bytes())
    content[len(content) // 2] ^= 1
    (at / name).write_bytes(content)
    with pytest.raises(DamagedStore, match=str(at)):
        data.check_unchanged()


def refused_thread(work: object, arguments: object) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [None, lambda work, arguments: 0, refused_thread])
def test_blocks_are_compared_whether_threads_begin_or_not(
    start: Callable[..., int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that cannot start, or that memory is refused to at once, is not waited for."""
    if start is not None:
        monkeypatch.setattr(log_module._thread, "start_new_thread", start)
    monkeypatch.setattr(log_module.os, "cpu_count", lambda: 4)
    seen: list[int] = []
    log_module.side_by_side(seen.append, range(100))
    assert sorted(seen) == list(range(100))

    def refuse(item: int) -> None:
        if item == 7:
            raise MemoryError

    with pytest.raises(MemoryError):
        log_module.side_by_side(refuse, range(100))
