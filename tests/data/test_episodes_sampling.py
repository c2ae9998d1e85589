"""What is drawn from the episode store, how often, and in how much memory."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from test_episodes import World, geometry

from etude.core.contracts import ArraySpec
from etude.core.keys import Key
from etude.core.trees import digest
from etude.data.store import log as episodes_log
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.sampling import choose
from etude.runs.files import Disk

KEY = Key(7)


def chi_square_is_fine(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Below the 1 - 1e-6 quantile, by Wilson and Hilferty's approximation; the seed is fixed."""
    assert counts.sum() == pytest.approx(expected.sum())
    freedom = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return bool(statistic < freedom * (1 - spread + 4.8 * spread**0.5) ** 3)


def filled(path: Path, lanes: int = 3, steps: int = 41) -> EpisodeStore:
    store = EpisodeStore.create(path, geometry(lanes, 9), Disk())
    store.append([World(3, lanes, 9).steps(steps)])
    return store


def lengths_store(path: Path, lengths: list[int]) -> EpisodeStore:
    """Episodes of these lengths in one lane; state = (episode, step, 0), reward = step."""
    store = EpisodeStore.create(path, geometry(1, max(lengths), block_steps=8), Disk())
    for number, length in enumerate(lengths):
        state = np.zeros((length + 1, 3), np.float32)
        state[:, 0], state[:, 1] = number, np.arange(length + 1)
        image = np.zeros((length + 1, 2, 2), np.uint8)
        rewards = np.arange(length, dtype=np.float32)
        actions = np.zeros((length, 2), np.float32)
        store.append_episode({"state": state, "image": image}, actions, rewards, True)
    return store


def test_transitions_are_uniform(tmp_path: Path) -> None:
    """Open episodes too: every reward is another number, so it names its transition."""
    store, num = filled(tmp_path / "store"), 40_000
    assert int(store.lengths.sum()) < store.num_transitions == 3 * 41
    batch = store.sample_transitions(KEY.generator(), num)
    _, counts = np.unique(batch.rewards, return_counts=True)
    assert len(counts) == store.num_transitions
    assert chi_square_is_fine(counts, np.full(len(counts), num / len(counts)))


def test_an_episode_is_drawn_in_proportion_to_its_length(tmp_path: Path) -> None:
    lengths = [1, 2, 3, 5, 8, 13, 21]
    store, num = lengths_store(tmp_path / "store", lengths), 20_000
    drawn = store.sample_subsets(KEY.generator(), num, 1)
    episodes = drawn.steps.obs["state"][:, 0, 0].astype(int)
    np.testing.assert_array_equal(drawn.lengths, np.array(lengths)[episodes])
    expected = np.array(lengths) / sum(lengths) * num
    assert chi_square_is_fine(np.bincount(episodes), expected)
    each = [episode.tolist() for episode in np.split(drawn.steps.obs["state"][:, 0, 1], [num])]
    long = np.array(each[0])[episodes == 6].astype(int)
    assert chi_square_is_fine(np.bincount(long), np.full(21, len(long) / 21))


@pytest.mark.parametrize("num_steps", [1, 4, 5, 6, 30])
def test_subsets_have_no_step_twice_unless_they_must(tmp_path: Path, num_steps: int) -> None:
    lengths = [1, 5, 29, 30, 200]
    store = lengths_store(tmp_path / "store", lengths)
    drawn = store.sample_subsets(KEY.generator(), 300, num_steps)
    state, following = drawn.steps.obs["state"], drawn.steps.next_obs["state"]
    assert state.shape == (300, num_steps, 3)
    assert drawn.steps.actions.shape == (300, num_steps, 2)
    assert drawn.returns.shape == drawn.lengths.shape == (300,)
    seen = set()
    for i in range(300):
        length = int(drawn.lengths[i])
        seen.add(length)
        assert lengths[int(state[i, 0, 0])] == length
        assert drawn.returns[i] == length * (length - 1) / 2
        assert len(set(state[i, :, 0])) == 1  # one episode
        steps = state[i, :, 1]
        assert steps.min() >= 0
        assert steps.max() < length
        assert num_steps > length or len(set(steps)) == num_steps
        np.testing.assert_array_equal(following[i, :, 0], state[i, :, 0])
        np.testing.assert_array_equal(following[i, :, 1], steps + 1)
        np.testing.assert_array_equal(drawn.steps.terminated[i], steps == length - 1)
        np.testing.assert_array_equal(drawn.steps.rewards[i], steps)
    assert seen == set(lengths)


def test_every_subset_is_as_likely_as_any_other() -> None:
    for length, num in ((5, 2), (5, 3), (4, 4), (6, 5), (7, 1)):
        drawn = np.sort(choose(KEY.generator(), np.full(20_000, length), num), axis=1)
        found, counts = np.unique(drawn, axis=0, return_counts=True)
        assert found.tolist() == sorted(map(list, combinations(range(length), num)))
        if len(counts) > 1:
            assert chi_square_is_fine(counts, np.full(len(counts), 20_000 / len(counts)))


def test_a_long_episode_costs_no_more_to_choose_from() -> None:
    """A partition of random keys would need terabytes here."""
    drawn = choose(KEY.generator(), np.array([2**40, 64, 3]), 64)
    assert len(set(drawn[0])) == len(set(drawn[1])) == 64
    assert drawn[0].max() > 2**36
    assert set(drawn[2]) == {0, 1, 2}


def test_given_episodes(tmp_path: Path) -> None:
    store = lengths_store(tmp_path / "store", [4, 9, 2])
    drawn = store.subsets_of(KEY.generator(), np.array([2, 0]), 2)
    assert drawn.lengths.tolist() == [2, 4]
    assert drawn.steps.obs["state"][..., 0].tolist() == [[2, 2], [0, 0]]


def test_the_same_key_draws_the_same(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    one, two = (store.sample_subsets(KEY.generator(), 5, 3) for _ in range(2))
    np.testing.assert_array_equal(one.steps.obs["image"], two.steps.obs["image"])
    other = store.sample_subsets(Key(8).generator(), 5, 3)
    assert not np.array_equal(one.steps.obs["state"], other.steps.obs["state"])


def test_large_records_are_gathered_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, batches = filled(tmp_path / "store"), []
    for large in (1, 1 << 40):
        monkeypatch.setattr(episodes_log, "_LARGE", large)
        batches.append(digest(store.sample_transitions(KEY.generator(), 200)._asdict()))
    assert batches[0] == batches[1]


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        pytest.skip("this system does not tell anonymous memory from mapped")
    return int(found[1]) * 1024


def assert_stays_on_disk(path: Path, num_bytes: int) -> None:
    """Write and draw from an image dataset of this size; memory stays small."""
    specs = {"obs/image": ArraySpec((64, 64, 3), "uint8"), "actions": ArraySpec((4,))}
    specs |= {"rewards": ArraySpec(())}
    specs |= {name: ArraySpec((), "bool") for name in ("terminated", "truncated")}
    shape = StoreGeometry(specs, 1, 1000)
    num_steps = num_bytes // shape.step_record.itemsize
    image = np.random.default_rng(0).integers(0, 256, (201, 64, 64, 3), np.uint8)
    actions, rewards = np.zeros((200, 4), np.float32), np.zeros(200, np.float32)
    store = EpisodeStore.create(path, shape, Disk())
    before = anonymous_bytes()
    for number in range(num_steps // 200):
        image[:, 0, 0, 0] = number % 256
        store.append_episode({"image": image}, actions, rewards, False)
    store = store.seal()
    generator = KEY.generator()
    for _ in range(500):
        batch = store.sample_transitions(generator, 32)
        subsets = store.sample_subsets(generator, 1, 32)
    assert batch.obs["image"].shape == (32, 64, 64, 3)
    assert subsets.steps.next_obs["image"].dtype == np.uint8
    assert store.num_transitions * image[0].nbytes > 0.95 * num_bytes
    assert anonymous_bytes() - before < 50e6


def test_a_dataset_is_not_loaded(tmp_path: Path) -> None:
    assert_stays_on_disk(tmp_path / "data", 200 << 20)


@pytest.mark.rotated
def test_a_large_dataset_is_not_loaded(tmp_path: Path) -> None:
    assert_stays_on_disk(tmp_path / "data", 1 << 30)


@pytest.mark.parametrize("pixels", [4, 64])
def test_what_is_not_read_is_left_out_and_the_rest_is_the_same(pixels: int, tmp_path: Path) -> None:
    """Small records come whole and large ones in parts; several blocks, and ends of episodes."""
    specs = {
        "obs/image": ArraySpec((pixels, pixels, 3), "uint8"),
        "obs/state": ArraySpec((3,)),
        "obs/count": ArraySpec((1,), "int64"),
        "actions": ArraySpec((2,)),
        "rewards": ArraySpec(()),
        "terminated": ArraySpec((), "bool"),
        "truncated": ArraySpec((), "bool"),
    }
    path, stream = tmp_path / "store", np.random.default_rng(0)
    store = EpisodeStore.create(path, StoreGeometry(specs, 1, 6, block_steps=16), Disk())
    for steps in (3, 6, 1, 5) * 4:
        obs = {
            "image": stream.integers(0, 256, (steps + 1, pixels, pixels, 3), np.uint8),
            "state": stream.normal(size=(steps + 1, 3)).astype(np.float32),
            "count": stream.integers(0, 9, (steps + 1, 1)),
        }
        actions = stream.normal(size=(steps, 2)).astype(np.float32)
        store.append_episode(obs, actions, np.ones(steps, np.float32), bool(steps % 2))
    store.seal().close()
    whole, part = EpisodeStore.open(path), EpisodeStore.open(path, ["state", "count"])
    for draw in ("sample_transitions", "sample_subsets"):
        sizes = (200,) if draw == "sample_transitions" else (50, 4)
        one, two = (getattr(s, draw)(KEY.generator(), *sizes) for s in (whole, part))
        one, two = (x if draw == "sample_transitions" else x.steps for x in (one, two))
        assert set(two.obs) == set(two.next_obs) == {"state", "count"}
        for name in ("state", "count"):
            np.testing.assert_array_equal(one.obs[name], two.obs[name])
            np.testing.assert_array_equal(one.next_obs[name], two.next_obs[name])
        for name in ("actions", "rewards", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert part.state_dict() == whole.state_dict()
