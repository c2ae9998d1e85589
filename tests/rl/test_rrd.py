"""Return decomposition: the loss by enumeration and by chance, the learner, and reward-only."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.keys import Key
from etude.core.trees import copy_arrays, digest
from etude.data.store.episodes import EpisodeStore, StoreGeometry, Subsets, Transitions
from etude.data.store.geometry import store_specs
from etude.data.store.views import EpisodesOf
from etude.models.reward_networks import (
    RewardNetworkConfig,
    compute_rewards,
    make_reward_network,
    reward_network_from_contract,
)
from etude.rl.offline import split
from etude.rl.reward_only import RewardOnly, RewardOnlyConfig, make_reward_only
from etude.rl.rewards.rrd import RRD, RRDConfig, num_bytes, squared_errors, variance_terms
from etude.rl.rewards.scores import spearman
from etude.runs.files import Disk
from toys import replayed

KEY, CPU = Key(11), torch.device("cpu")
OBSERVATIONS = {"state": ArraySpec((4,)), "progress": ArraySpec((1,))}
ACTION = ActionSpec("box", (-1.0,) * 2, (1.0,) * 2)
WEIGHTS = np.array([1.0, -0.5, 0.25, 0.0])
SMALL = RewardNetworkConfig(hidden=(16,))
Array = np.ndarray[Any, Any]


def new_store(path: Path, lanes: int = 1) -> EpisodeStore:
    specs = store_specs(EnvSpec(OBSERVATIONS, ACTION, max_episode_steps=None))
    return EpisodeStore.create(path, StoreGeometry(specs, lanes, 100), Disk())


def put(store: EpisodeStore, state: Array, rewards: Array, seed: int = 0) -> None:
    """An episode with states [T + 1, 4]; its progress is the sum of rewards before a step."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (len(rewards), 2)).astype(np.float32)
    progress = np.concatenate(([0.0], rewards.cumsum()))[:, None].astype(np.float32)
    obs = {"state": state.astype(np.float32), "progress": progress}
    store.append_episode(obs, actions, rewards.astype(np.float32), True)


def wander(store: EpisodeStore, num: int, scale: float = 1.0, seed: int = 0) -> EpisodeStore:
    """Random walks of 20 to 60 steps, the reward linear in the state."""
    rng = np.random.default_rng(seed)
    for episode in range(num):
        length = int(rng.integers(20, 60))
        state = rng.normal(size=(length + 1, 4)).cumsum(0) * 0.15 + rng.normal(size=4)
        put(store, state, scale * (state[:-1] @ WEIGHTS), episode)
    return store


def rrd(config: RRDConfig, shards: int = 1, key: Key = KEY) -> RRD:
    network = make_reward_network(config.network, OBSERVATIONS, ACTION, key)
    return RRD(config, network, shards, CPU)


def losses(drawn: Array, target: float, length: int, unbiased: bool) -> Array:
    """Of predictions [subsets, K], in float64."""
    predictions = torch.from_numpy(drawn)
    errors = squared_errors(predictions, torch.full((len(drawn),), target, dtype=torch.float64))
    lengths = torch.full((len(drawn),), float(length), dtype=torch.float64)
    return (errors - variance_terms(predictions, lengths) if unbiased else errors).numpy()


def bias(r: Array, num: int) -> float:
    """Var[m] of a subset's mean, in closed form."""
    if num > len(r):
        return float(r.var()) / num
    return 0.0 if len(r) == 1 else float(r.var(ddof=1)) / num * (1 - num / len(r))


SIZES = [(6, 2), (6, 5), (6, 6), (5, 3), (3, 5), (2, 6), (1, 2), (1, 4), (4, 4)]


@pytest.mark.parametrize(("length", "num"), SIZES)
def test_the_unbiased_loss_is_unbiased_over_all_subsets(length: int, num: int) -> None:
    """Every subset once: K <= T without replacement, K > T every sequence with it."""
    r, target = np.random.default_rng(length).normal(1.0, 2.0, length), 0.7
    every: Any = combinations(r, num) if num <= length else product(r, repeat=num)
    drawn, truth = np.array(list(every)), (r.mean() - target) ** 2
    assert losses(drawn, target, length, True).mean() == pytest.approx(truth, abs=1e-12)
    excess = losses(drawn, target, length, False).mean() - truth
    assert excess == pytest.approx(bias(r, num), abs=1e-12)


@pytest.mark.parametrize(("length", "num"), [(50, 8), (50, 50), (9, 16), (1, 4)])
def test_the_same_by_chance_as_the_store_draws(tmp_path: Path, length: int, num: int) -> None:
    r, target, many = np.random.default_rng(2).normal(1.0, 2.0, length), 0.7, 20_000
    store = new_store(tmp_path / "store")
    put(store, np.tile(np.append(r, 0.0)[:, None], 4), np.zeros(length))
    found = store.sample_subsets(KEY.generator(), many, num)
    drawn = found.steps.obs["state"][..., 0].astype(np.float64)
    r = r.astype(np.float32).astype(np.float64)
    truth = (r.mean() - target) ** 2
    for unbiased, expected in ((True, truth), (False, truth + bias(r, num))):
        values = losses(drawn, target, length, unbiased)
        error = values.std(ddof=1) / many**0.5 + 1e-9
        assert abs(values.mean() - expected) < 4 * error
    if 1 < length != num:  # and the test can tell them apart
        assert bias(r, num) > 8 * error


def test_a_mixed_batch_corrects_each_subset_by_its_own_length() -> None:
    drawn = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 5)))
    corrected = variance_terms(drawn, torch.tensor([1.0, 4.0, 5.0, 20.0]))
    share = torch.tensor([0.0, 1.0, 0.0, 0.75])
    torch.testing.assert_close(corrected, share * drawn.var(1) / 5)


@pytest.mark.parametrize("unbiased", [True, False])
def test_gradients_are_those_of_finite_differences(unbiased: bool) -> None:
    drawn = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets, lengths = torch.rand(4, dtype=torch.float64), torch.tensor([1.0, 4.0, 5.0, 20.0])

    def loss(predictions: torch.Tensor) -> torch.Tensor:
        errors = squared_errors(predictions, targets).sum()
        return errors - unbiased * variance_terms(predictions, lengths).sum()

    assert torch.autograd.gradcheck(loss, [drawn.requires_grad_()])


def test_the_target_is_the_return_per_step(tmp_path: Path) -> None:
    """A network of a constant: its loss is (constant - R / T)^2, in the environment's units."""
    store = new_store(tmp_path / "store")
    put(store, np.zeros((9, 4)), np.full(8, 0.5))
    for normalise in (False, True):
        config = RRDConfig(rrd_batch_size=4, rrd_sample_size=4, network=SMALL)
        learner = rrd(config.model_copy(update={"normalise_targets": normalise}))
        learner.flat.data.zero_()
        metrics = learner.update([store], KEY)
        assert metrics["train/R_loss"] == pytest.approx(0.25)
        assert metrics["train/R_mean"] == metrics["train/R_std"] == 0.0


@pytest.mark.parametrize("loss", ["biased", "unbiased"])
def test_the_squared_error_and_the_variance_are_two_metrics(tmp_path: Path, loss: Any) -> None:
    """Against the subsets themselves. Predictions that spread widely around their target have a
    squared error far below the variance: their difference, the unbiased loss, is negative."""
    store = new_store(tmp_path / "store")
    states = np.random.default_rng(3).normal(size=(61, 4))
    put(store, states, np.zeros(60))
    config = RRDConfig(loss=loss, rrd_batch_size=32, rrd_sample_size=8, network=SMALL)
    learner = rrd(config)
    learner.flat.data.mul_(30.0)
    for i in range(20):
        drawn = store.sample_subsets(KEY.child(i).generator(), 4, 8)
        with torch.no_grad():
            y = learner._outputs(drawn).double().numpy()
        found = learner.learn([drawn])
        assert found["train/R_loss"] == pytest.approx(float((y.mean(1) ** 2).mean()), rel=1e-4)
        variance = y.var(1, ddof=1).mean() / 8 * (1 - 8 / 60)
        assert found["train/R_var"] == pytest.approx(float(variance), rel=1e-4)
        if found["train/R_loss"] < found["train/R_var"]:
            break
    else:
        raise AssertionError("no batch would have had a negative loss")
    one = rrd(config.model_copy(update={"loss": "biased", "rrd_sample_size": 1}))
    assert "train/R_var" not in one.update([store], KEY)


def test_the_defaults_are_those_of_the_reference() -> None:
    vector, image = RRDConfig.vector(), RRDConfig.image()
    assert (vector.rrd_batch_size, vector.rrd_sample_size) == (256, 64)
    assert (image.rrd_batch_size, image.rrd_sample_size) == (32, 32)
    assert {RRDConfig().loss, vector.loss, image.loss} == {"biased"}


@pytest.mark.parametrize("change", [1e-2, 1e-5, 3e-6])
def test_a_small_change_reaches_the_network_in_units_of_its_spread(
    tmp_path: Path, change: float
) -> None:
    """However little the state moves in a step. A column that only trembles in its last bit is not
    blown up to a signal, and one that never moves stays 0."""
    rng = np.random.default_rng(0)
    store = new_store(tmp_path / "store")
    for episode in range(20):
        state = np.empty((41, 4), np.float32)
        state[:, :2] = (rng.normal(size=(41, 2)) * change).cumsum(0) + rng.uniform(-0.5, 0.5, 2)
        state[:, 2] = np.nextafter(np.float32(1.5), np.float32(rng.choice([1, 2])))
        state[::2, 2] = 1.5
        state[:, 3] = 0.25
        put(store, state, rng.normal(size=40), episode)
    learner = rrd(RRDConfig(network=SMALL))
    learner.update([store], KEY)
    steps = [store.episode(i)[0] for i in range(20)]
    here, after = (
        {"state": torch.from_numpy(np.concatenate([getattr(s, name)["state"] for s in steps]))}
        for name in ("obs", "next_obs")
    )
    actions = torch.from_numpy(np.concatenate([s.actions for s in steps]))
    seen = learner.network.normaliser(learner.network.vectors(here, actions, after))
    spread = seen.double().std(0)
    np.testing.assert_allclose(spread[4:6], 1.0, rtol=0.25)
    assert float(spread[6]) < 1e-6
    assert seen[:, 7].abs().max() == seen[:, 3].abs().max() == 0.0


def test_targets_in_their_own_units_change_nothing_else(tmp_path: Path) -> None:
    """A reward a thousandth as large is learned the same, to rounding."""
    found = []
    for scale in (1.0, 1e-3):
        store = wander(new_store(tmp_path / str(scale)), 20, scale)
        learner = rrd(RRDConfig(normalise_targets=True, network=SMALL))
        metrics = [learner.update([store], KEY.child(i)) for i in range(20)]
        loss, mean, spread = (metrics[-1][f"train/R_{n}"] for n in ("loss", "mean", "std"))
        found.append((loss / scale**2, mean / scale, spread / scale))
        per_step = store.returns / store.lengths
        mean = np.average(per_step, weights=store.lengths)
        variance = np.average((per_step - mean) ** 2, weights=store.lengths)
        assert float(learner.network.shift) == pytest.approx(mean)
        assert float(learner.network.scale) == pytest.approx(variance**0.5)
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_a_linear_reward_is_found_from_returns_alone(tmp_path: Path) -> None:
    store = wander(new_store(tmp_path / "store"), 100)
    learner = rrd(RRDConfig())
    for i in range(300):
        learner.update([store], KEY.child(i))
    unseen = wander(new_store(tmp_path / "unseen"), 10, seed=1)
    found, truth = [], []
    for number in range(10):
        steps, _ = unseen.episode(number)
        found.append(compute_rewards(learner.network, steps.obs, steps.actions, steps.next_obs))
        truth.append(steps.rewards)
    assert spearman(np.concatenate(found), np.concatenate(truth)) > 0.95
    drawn = replayed(learner, unseen, KEY.generator(), 200)
    same = unseen.sample_transitions(KEY.generator(), 200)
    assert not drawn.rewards.requires_grad
    assert spearman(drawn.rewards.numpy(), same.rewards) > 0.95
    np.testing.assert_array_equal(drawn.obs["state"], same.obs["state"])
    np.testing.assert_array_equal(drawn.next_obs["state"], same.next_obs["state"])


def rows_of(subsets: Subsets, rows: slice) -> Subsets:
    def cut(arrays: Any) -> Any:
        if isinstance(arrays, dict):
            return {name: array[rows] for name, array in arrays.items()}
        return arrays[rows]

    steps = Transitions(*(cut(arrays) for arrays in subsets.steps))
    return Subsets(steps, subsets.returns[rows], subsets.lengths[rows])


def test_two_shards_have_the_gradient_of_one_with_the_same_subsets(tmp_path: Path) -> None:
    store = wander(new_store(tmp_path / "store"), 10)
    config = RRDConfig(rrd_batch_size=32, rrd_sample_size=8, network=SMALL)
    drawn = store.sample_subsets(KEY.generator(), 4, 8)
    one, two = rrd(config, 1), rrd(config, 2)
    assert (one.subsets, two.subsets) == (4, 2)
    first = one.learn([drawn])
    second = two.learn([rows_of(drawn, slice(0, 2)), rows_of(drawn, slice(2, 4))])
    torch.testing.assert_close(one.flat.grad, two.flat.grad, rtol=1e-5, atol=1e-7)
    assert first == pytest.approx(second, rel=1e-4)


def test_each_shard_draws_from_its_own_store(tmp_path: Path) -> None:
    stores = [wander(new_store(tmp_path / str(s)), 5, seed=s) for s in range(2)]
    config = RRDConfig(rrd_batch_size=32, rrd_sample_size=8, network=SMALL)
    whole, parts = rrd(config, 2), rrd(config, 2)
    whole.update(stores, KEY)
    parts.network.load_state_dict(rrd(config, 2).network.state_dict())
    parts._update_normaliser(stores, KEY.child("moments"))
    parts.learn(
        [
            st.sample_subsets(KEY.child("subsets", s).generator(), 2, 8)
            for s, st in enumerate(stores)
        ]
    )
    assert torch.equal(whole.flat.data, parts.flat.data)


def test_moments_are_taken_when_there_is_news_and_frozen_otherwise(tmp_path: Path) -> None:
    store = wander(new_store(tmp_path / "store"), 30)
    learner = rrd(RRDConfig(network=SMALL))
    learner.update([store], KEY.child(0))
    steps = [store.episode(i)[0] for i in range(30)]
    state = np.concatenate([s.obs["state"] for s in steps])
    change = np.concatenate([s.obs["state"] - s.next_obs["state"] for s in steps])
    actions = np.concatenate([s.actions for s in steps])
    every = np.concatenate([state, change, actions], axis=1).astype(np.float64)
    moments = learner.network.normaliser
    num = int(store.lengths.sum())
    assert float(moments.count) == num
    error = every.std(0) / num**0.5
    assert (np.abs(moments.mean.numpy() - every.mean(0)) < 5 * error).all()
    np.testing.assert_allclose((moments.m2 / moments.count).sqrt(), every.std(0), rtol=0.2)
    before = {n: b.clone() for n, b in moments.state_dict().items()}
    learner.update([store], KEY.child(1))
    assert all(torch.equal(before[n], b) for n, b in moments.state_dict().items())
    wander(store, 1, seed=9)
    learner.update([store], KEY.child(2))
    assert float(moments.count) == store.lengths.sum()


def test_without_a_finished_episode_nothing_happens(tmp_path: Path) -> None:
    stores = [wander(new_store(tmp_path / "a"), 3), new_store(tmp_path / "b")]
    learner = rrd(RRDConfig(network=SMALL), 2)
    before = digest(learner.state_dict())
    assert learner.update(stores, KEY) == {}
    assert digest(learner.state_dict()) == before


def test_a_run_goes_on_from_its_state_bit_for_bit(tmp_path: Path) -> None:
    store = wander(new_store(tmp_path / "store"), 20)
    config = RRDConfig(normalise_targets=True, network=SMALL)
    whole, again = rrd(config), rrd(config, key=Key(99))
    for i in range(5):
        whole.update([store], KEY.child(i))
    again.load_state_dict(copy_arrays(whole.state_dict()))
    for i in range(5, 10):
        assert whole.update([store], KEY.child(i)) == again.update([store], KEY.child(i))
    assert digest(whole.state_dict()) == digest(again.state_dict())
    batches = [replayed(learner, store, KEY.generator(), 8) for learner in (whole, again)]
    assert torch.equal(batches[0].rewards, batches[1].rewards)


def spoil_weights(learner: RRD, drawn: Subsets) -> None:
    learner.flat.data[5] = float("nan")


def spoil_return(learner: RRD, drawn: Subsets) -> None:
    drawn.returns[1] = float("inf")


def spoil_obs(learner: RRD, drawn: Subsets) -> None:
    drawn.steps.next_obs["state"][0, 1, 2] = float("nan")


SPOILS = [
    (spoil_weights, "the predicted reward of a step"),
    (spoil_return, "the return of an episode"),
    (spoil_obs, "next observation 'state' of a stored step"),
]


@pytest.mark.parametrize(("spoil", "where"), SPOILS)
def test_what_is_not_finite_is_named_and_not_applied(
    tmp_path: Path, spoil: Callable[[RRD, Subsets], None], where: str
) -> None:
    store = wander(new_store(tmp_path / "store"), 5)
    learner = rrd(RRDConfig(network=SMALL))
    drawn = store.sample_subsets(KEY.generator(), 4, 64)
    spoil(learner, drawn)
    before = digest(learner.state_dict())
    with pytest.raises(NonFinite, match=where):
        learner.learn([drawn])
    assert digest(learner.state_dict()) == before


def test_a_bad_observation_does_not_reach_the_moments(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    put(store, np.full((3, 4), np.nan), np.ones(2))
    learner = rrd(RRDConfig(network=SMALL))
    before = digest(learner.state_dict())
    with pytest.raises(NonFinite, match="observation 'state'"):
        learner.update([store], KEY)
    assert digest(learner.state_dict()) == before


def test_sizes_that_do_not_divide_are_refused_with_ones_that_do() -> None:
    assert RRDConfig.vector().subsets_per_shard(1) == 4
    assert RRDConfig.image().subsets_per_shard(1) == 1
    cases = [(256, 60, 1), (256, 64, 3), (32, 32, 2), (8, 64, 1), (7, 5, 2), (2, 3, 1)]
    for size, sample, shards in cases:
        config = RRDConfig(rrd_batch_size=size, rrd_sample_size=sample)
        with pytest.raises(UsageError) as refusal:
            config.subsets_per_shard(shards)
        batches, _, samples = str(refusal.value).partition("use ")[2].partition(", or ")
        for text, field in ((batches, "rrd_batch_size"), (samples, "rrd_sample_size")):
            numbers = text.removeprefix(field).rstrip(".").replace(",", "").split(" or ")
            for number in filter(None, numbers):
                fixed = config.model_copy(update={field: int(number)})
                assert fixed.subsets_per_shard(shards) >= 1
    with pytest.raises(UsageError, match="2 or more, or the biased"):
        RRDConfig(rrd_sample_size=1, loss="unbiased").subsets_per_shard(1)
    assert RRDConfig(rrd_sample_size=1).subsets_per_shard(1) == 256


def test_the_size_is_known_from_the_meta_device() -> None:
    config = RRDConfig.image(("image",))
    specs = {"image": ArraySpec((64, 64, 3), "uint8")}
    with torch.device("meta"):
        network = make_reward_network(config.network, specs, ACTION, None)
    parameters = sum(p.numel() for p in network.parameters())
    assert num_bytes(config, network) == 16 * parameters + 32 * 64 * 64 * 3 * (2 + 2 + 8)


def model(path: Path, **changes: Any) -> RewardOnly:
    """Reward-only on a sealed dataset, made if it is not there."""
    if not path.exists():
        wander(new_store(path), 30).seal()
    config = RewardOnlyConfig(dataset=str(path), rrd=RRDConfig(network=SMALL), train_batches=7)
    config = config.model_copy(update=changes)
    return make_reward_only(config, EpisodeStore.open(path), CPU, KEY)


def iterate(algorithm: RewardOnly, iterations: range) -> list[dict[str, float]]:
    clock = Clock(Loops(100, 1, 1, 0, 7))
    rows = []
    for i in iterations:
        assert algorithm.broadcast(clock).policy == {}
        drawn = 7 * algorithm.config.rrd.rrd_batch_size
        passes = drawn / algorithm.training.num_transitions
        assert algorithm.ingest([], clock) == {"dataset/passes": pytest.approx(passes)}
        rows += [metrics.values for metrics in algorithm.batches(clock, KEY.child("update", i))]
        assert algorithm.end_iteration() == {}
    return rows


def test_reward_only_learns_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, again = model(tmp_path / "data"), model(tmp_path / "data")
    rows = iterate(whole, range(3))
    assert len(rows) == 21
    assert all("train/R_loss" in row for row in rows)
    arrays, contract = whole.policy_parts()
    again.load_policy(copy_arrays(arrays))
    again.load_state_dict(copy_arrays(whole.state_dict()))
    assert iterate(whole, range(3, 5)) == iterate(again, range(3, 5))
    parts = [digest(m.policy_parts()[0]) + digest(m.state_dict()) for m in (whole, again)]
    assert parts[0] == parts[1]
    network = reward_network_from_contract(contract, whole.policy_parts()[0])
    steps, _ = whole.store.episode(0)
    obs, after = ({n: torch.from_numpy(o[n]) for n in o} for o in (steps.obs, steps.next_obs))
    rewards = network(obs, torch.from_numpy(steps.actions), after).detach().double().numpy()
    found = compute_rewards(whole.policy, steps.obs, steps.actions, steps.next_obs)
    np.testing.assert_array_equal(rewards, found)


def test_a_start_from_other_weights_keeps_their_units(tmp_path: Path) -> None:
    units = RRDConfig(normalise_targets=True, network=SMALL)
    first = model(tmp_path / "data", rrd=units)
    iterate(first, range(1))
    wander(new_store(tmp_path / "other"), 30, scale=9.0, seed=4).seal()
    second = model(tmp_path / "other", rrd=units)
    second.start_from(copy_arrays(first.policy_parts()[0]), None)
    iterate(second, range(1))
    assert torch.equal(second.rrd.network.scale, first.rrd.network.scale)
    assert float(first.rrd.network.scale) != 1.0
    second.retire([first.state_dict()])
    second.close()
    assert EpisodeStore.open(tmp_path / "other").num_episodes == 30


def test_other_data_and_another_split_are_refused(tmp_path: Path) -> None:
    first = model(tmp_path / "data")
    wander(new_store(tmp_path / "other"), 30, seed=4).seal()
    with pytest.raises(EtudeError, match="not the data this run was started with"):
        model(tmp_path / "other").load_state_dict(first.state_dict())
    with pytest.raises(EtudeError, match="held out other episodes"):
        model(tmp_path / "data", held_out=0.2).load_state_dict(first.state_dict())


def test_equal_returns_are_refused_unless_told_otherwise(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    for length in (5, 7, 9, 30):
        put(store, np.random.default_rng(length).normal(size=(length + 1, 4)), np.eye(length)[-1])
    store.seal()
    with pytest.raises(UsageError, match=r"all 3 returns are 1, so a constant.*Add episodes"):
        model(tmp_path / "data", add_truncated=0)
    assert iterate(model(tmp_path / "data", allow_equal_returns=True), range(1))
    # By itself each episode is also seen cut short, which earns nothing.
    learner = model(tmp_path / "data")
    assert sorted(learner.training.returns.tolist()) == [0.0] * 3 + [1.0] * 3
    assert sorted(learner.held_out.returns.tolist()) == [0.0, 1.0]
    assert iterate(learner, range(1))


def test_contrast_is_asked_of_what_is_learned_from(tmp_path: Path) -> None:
    store = new_store(tmp_path / "data")
    for number in range(10):
        rewards = np.eye(6)[-1] * (number == 9)  # one success, the last by return
        put(store, np.random.default_rng(number).normal(size=(7, 4)), rewards)
    store.seal()
    assert split(store.returns, 0.5)[1].tolist() == [1, 3, 5, 7, 9]
    with pytest.raises(UsageError, match="all 5 returns are 0"):
        model(tmp_path / "data", held_out=0.5)


def test_the_split_holds_out_good_and_bad_and_training_never_sees_it(tmp_path: Path) -> None:
    returns = np.array([0.0] * 30 + [1.0] * 20)
    kept, held = split(returns, 0.1)
    assert sorted([*kept, *held]) == list(range(50))
    assert len(held) == 5
    assert returns[held].sum() == 2
    assert [len(part) for part in split(returns, 0.0)] == [50, 0]
    store = wander(new_store(tmp_path / "store"), 10)
    some = EpisodesOf(store, np.array([2, 7]))
    drawn = some.sample_subsets(KEY.generator(), 2000, 3)
    counts = [int((drawn.returns == store.returns[i]).sum()) for i in (2, 7)]
    assert sum(counts) == 2000
    share = store.lengths[2] / (store.lengths[2] + store.lengths[7])
    assert abs(counts[0] / 2000 - share) < 0.05
