"""The episode store against a list of dictionaries, under any interleaving of episodes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import EtudeError, UsageError
from etude.data.store.episodes import EpisodeStore, StoreGeometry, Transitions
from etude.data.store.geometry import store_specs
from etude.data.store.log import RecordLog
from etude.data.store.sampling import EpisodeSearch
from etude.runs.files import Disk

OBSERVATIONS = {"state": ArraySpec((3,)), "image": ArraySpec((2, 2), "uint8")}
ENV = EnvSpec(OBSERVATIONS, ActionSpec("box", (-1.0,) * 2, (1.0,) * 2), max_episode_steps=None)
SPECS = store_specs(ENV)


def geometry(
    lanes: int = 3, longest: int = 6, capacity: int | None = None, block_steps: int = 4
) -> StoreGeometry:
    return StoreGeometry(SPECS, lanes, longest, capacity, block_steps)


class World:
    """Random lanes: the same seed and the same cuts give the same fragments."""

    def __init__(self, seed: int, lanes: int, longest: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.lanes, self.longest = lanes, longest
        self._ages = np.zeros(lanes, np.int64)
        self._last = self._observe(lanes)

    def _observe(self, *lead: int) -> dict[str, Any]:
        image = self._rng.integers(0, 256, (*lead, 2, 2), np.uint8)
        return {"state": self._rng.random((*lead, 3), np.float32), "image": image}

    def restart(self, rows: slice) -> None:
        """New episodes in some rows, whatever is open there."""
        for name, array in self._observe(self.lanes).items():
            self._last[name] = self._last[name].copy()
            self._last[name][rows] = array[rows]
        self._ages[rows] = 0

    def steps(self, num: int) -> SimpleNamespace:
        """The next fragment; the parts of one that a store reads."""
        shape = (self.lanes, num)
        obs, begin = self._observe(*shape), self._last
        for name in obs:
            obs[name][:, 0] = begin[name]
        self._last = self._observe(self.lanes)
        terminated, truncated = self._rng.random((2, *shape)) < 0.15
        for step in range(num):
            self._ages += 1
            truncated[:, step] |= self._ages >= self.longest
            self._ages[terminated[:, step] | truncated[:, step]] = 0
        steps, rows = (terminated | truncated).T.nonzero()
        return SimpleNamespace(
            obs=obs,
            actions=self._rng.random((*shape, 2), np.float32),
            rewards=self._rng.random(shape, np.float32),
            terminated=terminated,
            truncated=truncated,
            present=np.ones(shape, bool),
            last_obs=self._last,
            finals=SimpleNamespace(envs=rows, steps=steps, obs=self._observe(len(rows))),
            restarted=np.zeros(self.lanes, bool),
        )


def split(fragment: SimpleNamespace, at: int) -> list[SimpleNamespace]:
    """The same steps as the fragments of two groups."""
    parts = []
    for rows in (slice(0, at), slice(at, None)):
        low, high, _ = rows.indices(len(fragment.rewards))
        mine = (fragment.finals.envs >= low) & (fragment.finals.envs < high)
        cut = {n: getattr(fragment, n)[rows] for n in ("actions", "rewards", "present")}
        cut |= {n: getattr(fragment, n)[rows] for n in ("terminated", "truncated")}
        finals = SimpleNamespace(
            envs=fragment.finals.envs[mine] - low,
            steps=fragment.finals.steps[mine],
            obs={n: a[mine] for n, a in fragment.finals.obs.items()},
        )
        obs = {n: a[rows] for n, a in fragment.obs.items()}
        last = {n: a[rows] for n, a in fragment.last_obs.items()}
        cut |= {"restarted": fragment.restarted[rows]}
        parts.append(SimpleNamespace(obs=obs, last_obs=last, finals=finals, **cut))
    return parts


@dataclass
class Reference:
    """What the store should hold: lists, searched and cut the slow way."""

    lanes: int
    capacity: int | None
    episodes: list[list[dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open: list[list[dict[str, Any]]] = [[] for _ in range(self.lanes)]

    def append(self, fragment: SimpleNamespace, restarted: range = range(0)) -> None:
        """Episodes open in the lanes `restarted` end first, truncated where they stand."""
        finals = fragment.finals
        for lane in restarted:
            if self.open[lane]:
                self.open[lane][-1]["truncated"] = True
                self.episodes.append(self.open[lane])
                self.open[lane] = []
        for step in range(fragment.rewards.shape[1]):
            for lane in range(self.lanes):
                row = {n: a[lane, step] for n, a in fragment.obs.items()}
                if self.open[lane]:
                    self.open[lane][-1]["next"] = row
                fields = ("actions", "rewards", "terminated", "truncated")
                taken = {n: getattr(fragment, n)[lane, step] for n in fields}
                self.open[lane].append({"obs": row, **taken})
                if taken["terminated"] or taken["truncated"]:
                    (k,) = ((finals.envs == lane) & (finals.steps == step)).nonzero()[0]
                    self.open[lane][-1]["next"] = {n: a[k] for n, a in finals.obs.items()}
                    self.episodes.append(self.open[lane])
                    self.open[lane] = []
        for lane in range(self.lanes):
            if self.open[lane]:
                self.open[lane][-1]["next"] = {n: a[lane] for n, a in fragment.last_obs.items()}
        while self.capacity is not None and self.held() > self.capacity:
            self.episodes.pop(0)

    def held(self) -> int:
        return len(self.transitions()) + len(self.episodes)

    def transitions(self) -> list[dict[str, Any]]:
        return [step for steps in (*self.episodes, *self.open) for step in steps]


class Every:
    """A generator that draws every number once, in order."""

    def integers(self, low: int, high: int, num: int) -> Any:
        assert num == high - low
        return np.arange(low, high)


def everything(store: EpisodeStore) -> Transitions:
    """All transitions that can be sampled, each once."""
    return store.sample_transitions(Every(), store.num_transitions)  # type: ignore[arg-type]


def assert_same(found: Transitions, expected: list[dict[str, Any]]) -> None:
    assert len(found.rewards) == len(expected)
    for name in OBSERVATIONS:
        assert found.obs[name].dtype == np.dtype(OBSERVATIONS[name].dtype)
        np.testing.assert_array_equal(found.obs[name], [s["obs"][name] for s in expected])
        np.testing.assert_array_equal(found.next_obs[name], [s["next"][name] for s in expected])
    for name in ("actions", "rewards", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(found, name), [s[name] for s in expected])


def assert_holds(store: EpisodeStore, reference: Reference) -> None:
    assert store.num_episodes == len(reference.episodes)
    assert store.num_transitions == len(reference.transitions())
    assert store.lengths.tolist() == [len(steps) for steps in reference.episodes]
    sums = [sum(float(s["rewards"]) for s in steps) for steps in reference.episodes]
    assert store.returns.tolist() == sums
    assert_same(everything(store), reference.transitions())
    assert_multi_step(store, reference, 3)


def assert_multi_step(store: EpisodeStore, reference: Reference, num_steps: int) -> None:
    """Each transition with the steps after it: of its own episode, and as far as there are any."""
    found = store.sample_multi_step(Every(), store.num_transitions, num_steps)  # type: ignore[arg-type]
    windows = [
        steps[first : first + num_steps]
        for steps in (*reference.episodes, *reference.open)
        for first in range(len(steps))
    ]
    whole = [{**window[-1], **{n: window[0][n] for n in ("obs", "actions")}} for window in windows]
    assert_same(found.steps, whole)
    assert found.counts.tolist() == [len(window) for window in windows]
    padded = [[s["rewards"] for s in w] + [0.0] * (num_steps - len(w)) for w in windows]
    np.testing.assert_array_equal(found.rewards, padded)


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.bin"))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    lanes=st.integers(1, 4),
    longest=st.integers(1, 7),
    extra=st.none() | st.integers(0, 60),
    block_steps=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=14),
    restarts=st.sets(st.integers(1, 13)),
)
def test_holds_what_a_list_holds(
    seed: int,
    lanes: int,
    longest: int,
    extra: int | None,
    block_steps: int,
    cuts: list[int],
    restarts: set[int],
) -> None:
    """At each of `restarts` the first group's rows begin new episodes, and the store is loaded
    from its state: as in a run whose environments cannot be restored."""
    capacity = None if extra is None else 2 * lanes * (longest + 1) + extra
    shape = geometry(lanes, longest, capacity, block_steps)
    world, reference = World(seed, lanes, longest), Reference(lanes, capacity)
    with TemporaryDirectory() as folder:
        store = EpisodeStore.create(Path(folder) / "store", shape, Disk())
        for i, cut in enumerate(cuts):
            anew = range((i % lanes or lanes) if i in restarts else 0)
            if anew:
                world.restart(slice(anew.start, anew.stop))
                store.load_state_dict(store.state_dict())
            fragment = world.steps(cut)
            reference.append(fragment, anew)
            parts = split(fragment, i % lanes) if i % lanes else [fragment]
            parts[0].restarted[:] = bool(anew)
            store.append(parts)
            assert_holds(store, reference)
            store.delete_garbage([])
            if capacity is not None:
                assert bytes_on_disk(store.path) <= shape.num_bytes
        assert_holds(store, reference)
        for num_steps in (1, 2, longest, longest + 1):
            assert_multi_step(store, reference, num_steps)
        for number, steps in enumerate(reference.episodes):
            assert_same(store.episode(number)[0], steps)
        store.close()


def test_the_cuts_do_not_matter(tmp_path: Path) -> None:
    """The same steps in other pieces are the same bytes and the same returns."""
    states = []
    for name, cuts in (("a", [1] * 24), ("b", [24]), ("c", [7, 1, 16])):
        whole = World(5, 3, 6).steps(24)
        store, start = EpisodeStore.create(tmp_path / name, geometry(), Disk()), 0
        for cut in cuts:
            part = slice(start, start + cut)
            now = (whole.finals.steps >= part.start) & (whole.finals.steps < part.stop)
            fields = ("actions", "rewards", "terminated", "truncated", "present")
            ahead = {
                n: a[:, part.stop] if part.stop < 24 else whole.last_obs[n]
                for n, a in whole.obs.items()
            }
            fragment = SimpleNamespace(
                obs={n: a[:, part] for n, a in whole.obs.items()},
                last_obs=ahead,
                finals=SimpleNamespace(
                    envs=whole.finals.envs[now],
                    steps=whole.finals.steps[now] - start,
                    obs={n: a[now] for n, a in whole.finals.obs.items()},
                ),
                restarted=whole.restarted,
                **{n: getattr(whole, n)[:, part] for n in fields},
            )
            store.append([fragment])
            start += cut
        states.append(json.dumps(store.state_dict(), default=np.ndarray.tolist))
    assert len(set(states)) == 1


def test_open_episodes_are_never_evicted(tmp_path: Path) -> None:
    lanes, longest = 2, 10
    shape = geometry(lanes, longest, 2 * lanes * (longest + 1))
    store = EpisodeStore.create(tmp_path / "store", shape, Disk())
    world = World(1, lanes, longest)
    for _ in range(60):
        store.append([world.steps(3)])
        assert store.num_transitions + store.num_episodes <= shape.capacity
        assert store.num_episodes > 0
        assert store.num_transitions - int(store.lengths.sum()) <= lanes * longest


def test_whole_episodes_make_a_dataset(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = EpisodeStore.create(tmp_path / "data", geometry(1, 50, block_steps=16), Disk())
    kept = []
    for length in (1, 50, 16, 7, 33, 5):  # 7 whole blocks: no slot after the last
        obs = {
            "state": rng.random((length + 1, 3), np.float32),
            "image": rng.integers(0, 256, (length + 1, 2, 2), np.uint8),
        }
        actions, rewards = rng.random((length, 2), np.float32), rng.random(length, np.float32)
        store.append_episode(obs, actions, rewards, terminated=length % 2 == 0)
        kept.append((obs, actions, rewards, length % 2 == 0))
    data = store.seal()
    assert data.num_transitions == 112
    assert bytes_on_disk(data.path) == data.disk_bytes
    for number, (obs, actions, rewards, terminated) in enumerate(kept):
        steps, total = data.episode(number)
        np.testing.assert_array_equal(steps.obs["image"], obs["image"][:-1])
        np.testing.assert_array_equal(steps.next_obs["state"], obs["state"][1:])
        np.testing.assert_array_equal(steps.actions, actions)
        assert total == sum(rewards.tolist())
        ends = [False] * (len(rewards) - 1) + [True]
        assert steps.terminated.tolist() == [end and terminated for end in ends]
        assert steps.truncated.tolist() == [end and not terminated for end in ends]
    data.check_blocks()
    with pytest.raises(EtudeError, match="sealed"):
        data.append_episode(*kept[0])
    with pytest.raises(UsageError, match="finished dataset"):
        EpisodeStore.create(tmp_path / "data", data.geometry, Disk())


def test_batches_are_aligned(tmp_path: Path) -> None:
    store = EpisodeStore.create(tmp_path / "store", geometry(), Disk())
    store.append([World(0, 3, 6).steps(20)])
    batch = store.sample_transitions(np.random.default_rng(0), 7)
    for array in (*batch.obs.values(), *batch.next_obs.values(), batch.actions, batch.rewards):
        assert array.flags.c_contiguous
        assert array.ctypes.data % 64 == 0


def test_a_capacity_that_is_too_small_names_one_that_works() -> None:
    with pytest.raises(UsageError, match=r"Use 1,010 or more\."):
        geometry(5, 100, 1009)
    assert geometry(5, 100, 1010).num_bytes > 0


def test_the_size_is_close_to_what_is_held(tmp_path: Path) -> None:
    """The bound is no exaggeration: a full store of long runs is within a third of it."""
    shape = StoreGeometry(SPECS, 4, 50, 8000)
    store, world = EpisodeStore.create(tmp_path / "store", shape, Disk()), World(0, 4, 50)
    for _ in range(60):
        store.append([world.steps(50)])
        store.delete_garbage([])
    assert store.num_transitions + store.num_episodes > 7900
    assert shape.num_bytes * 2 / 3 < bytes_on_disk(store.path) <= shape.num_bytes


def test_what_does_not_belong_is_refused(tmp_path: Path) -> None:
    store = EpisodeStore.create(tmp_path / "store", geometry(), Disk())
    with pytest.raises(UsageError, match="no transition"):
        store.sample_transitions(np.random.default_rng(0), 1)
    with pytest.raises(UsageError, match="no finished episode"):
        store.sample_subsets(np.random.default_rng(0), 1, 1)
    world = World(0, 3, 6)
    good = world.steps(9)
    for change, message in (
        ({"rewards": good.rewards.astype(np.float64)}, "'rewards' is float64"),
        ({"actions": good.actions[..., :1]}, "'actions' is float32"),
        ({"obs": {"state": good.obs["state"]}}, "fields"),
        ({"terminated": np.ones_like(good.terminated)}, "final observations"),
    ):
        with pytest.raises(ValueError, match=message):
            store.append([SimpleNamespace(**{**vars(good), **change})])
    with pytest.raises(UsageError, match="without an agent"):
        store.append([SimpleNamespace(**{**vars(good), "present": ~good.present})])
    assert store.num_transitions == 0
    store.append([good])
    with pytest.raises(ValueError, match="does not continue"):
        store.append([World(9, 3, 6).steps(2)])


def test_an_episode_that_is_too_long_is_refused(tmp_path: Path) -> None:
    store, world = EpisodeStore.create(tmp_path / "store", geometry(), Disk()), World(0, 3, 40)
    with pytest.raises(UsageError, match=r"An episode has 7 steps, but .* takes up to 6"):
        _append_one_by_one(store, world, 40)
    assert store.time >= 6  # what came before is still there
    assert len(everything(store).rewards) == store.num_transitions


def _append_one_by_one(store: EpisodeStore, world: World, num: int) -> None:
    for _ in range(num):
        store.append([world.steps(1)])


def test_another_geometry_is_refused(tmp_path: Path) -> None:
    EpisodeStore.create(tmp_path / "store", geometry(), Disk())
    EpisodeStore.create(tmp_path / "store", geometry(), Disk())
    with pytest.raises(UsageError, match="another geometry"):
        EpisodeStore.create(tmp_path / "store", geometry(lanes=4), Disk())
    with pytest.raises(UsageError, match="never finished"):
        EpisodeStore.open(tmp_path / "store")
    with pytest.raises(UsageError, match="no episode store"):
        EpisodeStore.open(tmp_path / "nowhere")


@given(st.lists(st.integers(1, 400), min_size=1, max_size=80), st.integers(0, 1 << 32))
def test_the_guide_finds_what_a_search_finds(lengths: list[int], seed: int) -> None:
    ends = np.cumsum(lengths)
    steps = np.random.default_rng(seed).integers(0, ends[-1], 200)
    found = EpisodeSearch(ends).find(steps)
    np.testing.assert_array_equal(found, ends.searchsorted(steps, "right"))


def test_pictures_of_a_dataset_are_asked_for_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk answers many requests at once far sooner than one after the other."""
    specs = {"obs/image": ArraySpec((96, 96, 3), "uint8"), "actions": ArraySpec((2,), "float32")}
    flags = {"terminated": ArraySpec((), "bool"), "truncated": ArraySpec((), "bool")}
    specs |= flags | {"rewards": ArraySpec((), "float32")}
    store = EpisodeStore.create(tmp_path / "data", StoreGeometry(specs, 1, 10), Disk())
    image = np.random.default_rng(0).integers(0, 256, (11, 96, 96, 3), np.uint8)
    store.append_episode(
        {"image": image}, np.zeros((10, 2), np.float32), np.zeros(10, np.float32), True
    )
    data, asked = store.seal(), []
    before = RecordLog._expect

    def expect(log: RecordLog, positions: np.ndarray, offset: int, size: int) -> None:
        asked.extend(positions.tolist())
        before(log, positions, offset, size)

    monkeypatch.setattr(RecordLog, "_expect", expect)
    places, offsets = np.zeros(3, np.int64), np.array([7, 0, 3])
    np.testing.assert_array_equal(data.column("obs/image", places, offsets), image[offsets])
    assert asked == [0, 3, 7]
