"""IRCR against a brute-force account of episodes, rewards and draws."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_off_policy import _copied, make_learner

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.core.trees import digest
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.rl.rewards.ircr import IRCR, IRCRConfig, best_episodes
from etude.runs import checkpoint
from etude.runs.files import Disk
from toys import replayed

KEY, CPU = Key(4), torch.device("cpu")
SPECS = store_specs(
    EnvSpec({"state": ArraySpec((2,))}, ActionSpec("box", (-1.0,), (1.0,)), max_episode_steps=None)
)


def filled(path: Path, returns: list[float], lengths: list[int]) -> EpisodeStore:
    store = EpisodeStore.create(path, StoreGeometry(SPECS, 1, 100), Disk())
    put(store, returns, lengths)
    return store


def put(store: EpisodeStore, returns: list[float], lengths: list[int], first: int = 0) -> None:
    """state = (episode, step); the whole return comes with the last step."""
    for number, (value, length) in enumerate(zip(returns, lengths, strict=True), first):
        state = np.stack([np.full(length + 1, number), np.arange(length + 1)], 1)
        rewards = np.zeros(length, np.float32)
        rewards[-1] = value
        actions = np.zeros((length, 1), np.float32)
        store.append_episode({"state": state.astype(np.float32)}, actions, rewards, True)


def test_rewards_are_scaled_returns_and_half_comes_from_the_best(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    returns, lengths = rng.normal(5.0, 3.0, 25).tolist(), rng.integers(1, 30, 25).tolist()
    store = filled(tmp_path / "store", returns, lengths)
    source, size = IRCR(IRCRConfig(), 1, CPU), 20_000
    assert source.update([store], KEY)["train/return_high"] == store.returns.max()
    batch = replayed(source, store, KEY.generator(), size)
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


def test_shards_share_the_range_and_the_best(tmp_path: Path) -> None:
    """Of two shards' returns 0, 1, 1, 4 the best two are 4 and the later 1."""
    stores = [
        filled(tmp_path / "a", [0.0, 1.0], [3, 3]),
        filled(tmp_path / "b", [1.0, 4.0], [3, 3]),
    ]
    source = IRCR(IRCRConfig(best=2), 2, CPU)
    source.update(stores, KEY)
    for store, own in zip(stores, ({0.0, 0.25}, {0.25, 1.0}), strict=True):
        rewards = replayed(source, store, KEY.generator(), 64).rewards
        assert set(rewards[:32].tolist()) == {0.25, 1.0}
        assert set(rewards[32:].tolist()) == own


def test_the_best_outlive_their_eviction_and_a_checkpoint(tmp_path: Path) -> None:
    """Against a list of all episodes there ever were. The early ones are the best, and the store
    holds only the latest."""
    rng = np.random.default_rng(1)
    returns = (rng.normal(0.0, 1.0, 60) - np.arange(60) / 10).tolist()
    lengths = rng.integers(2, 10, 60).tolist()
    store = EpisodeStore.create(tmp_path / "store", StoreGeometry(SPECS, 1, 10, 60), Disk())
    source = IRCR(IRCRConfig(), 1, CPU)
    for first in range(0, 60, 3):
        put(store, returns[first : first + 3], lengths[first : first + 3], first)
        metrics = source.update([store], KEY)
        so_far = np.array(returns[: first + 3], np.float32).astype(np.float64)
        best = so_far.argsort()[::-1][:10]
        known = np.concatenate((store.returns, so_far[best]))
        assert metrics == {"train/return_low": known.min(), "train/return_high": known.max()}
    assert store.num_evicted == 60 - store.num_episodes > max(best)  # None of the best is held.
    policy, contract = {"x": np.zeros(1)}, {"kind": "none"}
    path = checkpoint.save(tmp_path, 1, (policy, contract), {"rewards": source.state_dict()})
    again = IRCR(IRCRConfig(), 1, CPU)
    again.load_state_dict(checkpoint.load_training(path)[2]["rewards"])
    batches = [replayed(each, store, KEY.generator(), 8_000) for each in (source, again)]
    assert digest(batches[0]._asdict()) == digest(batches[1]._asdict())
    half = batches[0].obs["state"][:4_000].long().numpy()
    for e in best:
        steps = half[half[:, 0] == e, 1]
        assert set(steps) == set(range(lengths[e]))
        share = lengths[e] / sum(lengths[i] for i in best)
        error = (share * (1 - share) / len(half)) ** 0.5
        assert abs(len(steps) / len(half) - share) < 5 * error
    after = batches[0].next_obs["state"][:4_000].long().numpy()
    np.testing.assert_array_equal(after, half + np.array([0, 1]))
    ends = np.array(lengths)[half[:, 0]] - 1
    np.testing.assert_array_equal(batches[0].terminated[:4_000], half[:, 1] == ends)
    low, high = known.min(), known.max()
    expected = (np.array(returns)[half[:, 0]] - low) / (high - low)
    np.testing.assert_allclose(batches[0].rewards[:4_000], expected, atol=1e-6)
    put(store, [100.0], [5], 60)
    for each in (source, again):
        each.update([store], KEY)
    assert digest(source.state_dict()) == digest(again.state_dict())
    assert set(replayed(source, store, KEY.generator(), 500).obs["state"][:, 0].tolist()) >= {60.0}


def test_the_newer_of_equals_is_better() -> None:
    returns = np.array([1.0, 3.0, 1.0, 3.0, 2.0, 1.0])
    assert best_episodes(returns, 4).tolist() == [3, 1, 4, 5]
    assert best_episodes(returns, 10).tolist() == [3, 1, 4, 5, 2, 0]


def test_equal_returns_and_odd_sizes(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [2.0, 2.0], [1, 5])
    source = IRCR(IRCRConfig(), 1, CPU)
    source.update([store], KEY)
    for size in (1, 2, 7):
        assert replayed(source, store, KEY.generator(), size).rewards.tolist() == [0.0] * size


def test_open_episodes_are_drawn_only_while_there_is_nothing_else(tmp_path: Path) -> None:
    store = EpisodeStore.create(tmp_path / "store", StoreGeometry(SPECS, 2, 100), Disk())
    source, ended = IRCR(IRCRConfig(), 1, CPU), np.zeros((2, 4), bool)
    shape = (2, 4)

    def append(begin: int, ends: list[int]) -> None:
        state = np.zeros((2, 5, 2), np.float32)
        state[..., 0], state[..., 1] = np.arange(2)[:, None], begin + np.arange(5)
        ended[:] = False
        ended[ends, -1] = True
        finals = SimpleNamespace(
            envs=np.array(ends, np.int64),
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
            restarted=np.zeros(shape[0], bool),
        )
        store.append([fragment])

    append(0, [])
    assert source.update([store], KEY) == {}
    batch = replayed(source, store, KEY.generator(), 50)
    assert set(batch.obs["state"][:, 0].tolist()) == {0.0, 1.0}
    assert batch.rewards.tolist() == [0.0] * 50
    append(4, [1])
    source.update([store], KEY)
    batch = replayed(source, store, KEY.generator(), 50)
    assert set(batch.obs["state"][:, 0].tolist()) == {1.0}


def test_its_state_goes_round(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", [0.0, 1.0, 5.0], [3, 4, 5])
    one, two = IRCR(IRCRConfig(best=1), 1, CPU), IRCR(IRCRConfig(best=1), 1, CPU)
    one.update([store], KEY)
    two.load_state_dict(one.state_dict())
    assert digest(one.state_dict()) == digest(two.state_dict())
    batches = [replayed(source, store, KEY.generator(), 9) for source in (one, two)]
    assert torch.equal(batches[0].rewards, batches[1].rewards)
    assert batches[0].rewards[:4].tolist() == [1.0] * 4


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_that_evicts_goes_on_bit_for_bit(shards: int, tmp_path: Path) -> None:
    def learner() -> Any:
        source = IRCR(IRCRConfig(best=3), shards, CPU)
        return make_learner(tmp_path, "sac", shards, rewards=source, capacity=300)

    whole = learner()
    for _ in range(5):
        whole.iterate()
    assert all(store.num_evicted for store in whole.agent.stores)
    policy = {name: x.clone() for name, x in whole.agent.policy_parts()[0].items()}
    parts = {"agent": whole.agent, "clock": whole.clock, "collector": whole.collector}
    saved = {name: _copied(part.state_dict()) for name, part in parts.items()}
    for _ in range(3):
        whole.iterate()
    expected = whole.bits()
    whole.agent.close()
    again = learner()
    again.agent.load_policy(policy)
    for name, part in {"agent": again.agent, "clock": again.clock}.items():
        part.load_state_dict(saved[name])
    again.collector.load_state_dict(saved["collector"])
    for _ in range(3):
        again.iterate()
    assert again.bits() == expected
