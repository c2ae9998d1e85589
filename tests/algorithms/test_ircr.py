"""IRCR against a brute-force account of episodes, rewards and draws."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from etude.algorithms.ircr import IRCR, IRCRConfig, best_episodes
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.core.trees import digest
from etude.experience.episodes import EpisodeStore, StoreGeometry
from etude.experience.episodes_geometry import store_specs
from etude.runs.files import Disk

KEY, CPU = Key(4), torch.device("cpu")
SPECS = store_specs(
    EnvSpec({"state": ArraySpec((2,))}, ActionSpec("box", (-1.0,), (1.0,)), max_episode_steps=None)
)


def filled(path: Path, returns: list[float], lengths: list[int]) -> EpisodeStore:
    """state = (episode, step); the whole return comes with the last step."""
    store = EpisodeStore.create(path, StoreGeometry(SPECS, 1, 100), Disk())
    for number, (value, length) in enumerate(zip(returns, lengths, strict=True)):
        state = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1)
        rewards = np.zeros(length, np.float32)
        rewards[-1] = value
        actions = np.zeros((length, 1), np.float32)
        store.append_episode({"state": state.astype(np.float32)}, actions, rewards, True)
    return store


def test_rewards_are_scaled_returns_and_half_comes_from_the_best(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    returns, lengths = rng.normal(5.0, 3.0, 25).tolist(), rng.integers(1, 30, 25).tolist()
    store = filled(tmp_path / "store", returns, lengths)
    source, size = IRCR(IRCRConfig(), CPU), 20_000
    assert source.update([store], KEY)["train/return_high"] == store.returns.max()
    batch = source.batch(store, KEY.generator(), size)
    episodes = batch.obs["state"][:, 0].long().numpy()
    low, high = min(store.returns), max(store.returns)
    expected = [(store.returns[e] - low) / (high - low) for e in episodes]
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-6, atol=1e-7)
    assert batch.rewards.dtype == torch.float32
    best = sorted(range(25), key=lambda e: -returns[e])[:10]
    assert set(episodes[: size // 2]) == set(best)
    for part, among in ((episodes[: size // 2], best), (episodes[size // 2 :], range(25))):
        total = sum(lengths[e] for e in among)
        for e in among:
            share = lengths[e] / total
            error = (share * (1 - share) / len(part)) ** 0.5
            assert abs((part == e).mean() - share) < 5 * error
    steps = batch.obs["state"][:, 1].numpy()
    assert all(set(steps[episodes == e]) == set(range(lengths[e])) for e in best)
    np.testing.assert_array_equal(batch.next_obs["state"][:, 1], steps + 1)
    np.testing.assert_array_equal(batch.terminated, steps == np.array(lengths)[episodes] - 1)


def test_the_range_is_that_of_all_shards(tmp_path: Path) -> None:
    stores = [
        filled(tmp_path / "a", [0.0, 1.0], [3, 3]),
        filled(tmp_path / "b", [1.0, 4.0], [3, 3]),
    ]
    source = IRCR(IRCRConfig(), CPU)
    source.update(stores, KEY)
    first, second = (set(source.batch(s, KEY.generator(), 64).rewards.tolist()) for s in stores)
    assert first == {0.0, 0.25}
    assert second == {0.25, 1.0}


def test_the_newer_of_equals_is_better() -> None:
    returns = np.array([1.0, 3.0, 1.0, 3.0, 2.0, 1.0])
    assert best_episodes(returns, 4).tolist() == [3, 1, 4, 5]
    assert best_episodes(returns, 10).tolist() == [3, 1, 4, 5, 2, 0]


def test_equal_returns_and_odd_sizes(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [2.0, 2.0], [1, 5])
    source = IRCR(IRCRConfig(), CPU)
    source.update([store], KEY)
    for size in (1, 2, 7):
        assert source.batch(store, KEY.generator(), size).rewards.tolist() == [0.0] * size


def test_open_episodes_are_drawn_only_while_there_is_nothing_else(tmp_path: Path) -> None:
    store = EpisodeStore.create(tmp_path / "store", StoreGeometry(SPECS, 2, 100), Disk())
    source, ended = IRCR(IRCRConfig(), CPU), np.zeros((2, 4), bool)
    shape = (2, 4)

    def append(begin: int, ends: list[int]) -> None:
        state = np.zeros((2, 5, 2), np.float32)
        state[..., 0], state[..., 1] = np.arange(2)[:, None], begin + np.arange(5)
        ended[:] = False
        ended[ends, -1] = True
        finals = SimpleNamespace(
            rows=np.array(ends, np.int64),
            steps=np.full(len(ends), 3),
            obs={"state": state[ends, -1]},
        )
        fragment = SimpleNamespace(
            obs={"state": state[:, :4]},
            actions=np.zeros((*shape, 1), np.float32),
            rewards=np.ones(shape, np.float32),
            terminated=ended.copy(),
            truncated=np.zeros(shape, bool),
            present=np.ones(shape, bool),
            last_obs={"state": state[:, 4]},
            finals=finals,
        )
        store.append([fragment])

    append(0, [])
    assert source.update([store], KEY) == {}
    batch = source.batch(store, KEY.generator(), 50)
    assert set(batch.obs["state"][:, 0].tolist()) == {0.0, 1.0}
    assert batch.rewards.tolist() == [0.0] * 50
    append(4, [1])
    source.update([store], KEY)
    batch = source.batch(store, KEY.generator(), 50)
    assert set(batch.obs["state"][:, 0].tolist()) == {1.0}


def test_its_state_goes_round(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [0.0, 1.0, 5.0], [3, 4, 5])
    one, two = IRCR(IRCRConfig(best=1), CPU), IRCR(IRCRConfig(best=1), CPU)
    one.update([store], KEY)
    two.load_state_dict(one.state_dict())
    assert digest(one.state_dict()) == digest(two.state_dict())
    batches = [source.batch(store, KEY.generator(), 9) for source in (one, two)]
    assert torch.equal(batches[0].rewards, batches[1].rewards)
    assert batches[0].rewards[:4].tolist() == [1.0] * 4
