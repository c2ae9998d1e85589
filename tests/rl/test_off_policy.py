"""The base of SAC and TD3: replay, warm-up, shards, exactness, and culprits by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, ArraySpec, BatchMetrics, EnvSpec, Fragment
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.trees import digest, without_arrays
from etude.data.store.episodes import EpisodeStore
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.iql import IQL, IQLConfig
from etude.rl.off_policy import OffPolicy, ReplayGeometry
from etude.rl.rewards.given import GIVEN, RewardSource
from etude.rl.sac import SAC, SACConfig
from etude.rl.sampling import Batch
from etude.rl.td3 import TD3, TD3Config
from etude.rl.xqc import XQC, XQCConfig
from etude.rollout.group import evaluate
from etude.rollout.local import CollectorConfig, LocalCollector, Workers
from etude.runs.files import Disk
from etude.tasks.seek import Seek
from etude.training.loop import gradient_steps
from toy_envs import PoisonedEnv, ToyEnv
from toys import fragment_bits, toy_buffer

CPU = torch.device("cpu")
ALGORITHMS: dict[str, tuple[Any, Any, Any]] = {
    "sac": (SAC, SACConfig, "squashed"),
    "td3": (TD3, TD3Config, "deterministic"),
    "iql": (IQL, IQLConfig, "deterministic"),
    "xqc": (XQC, XQCConfig, "squashed"),
}
KINDS = pytest.mark.parametrize("kind", ["sac", "td3", "xqc"])
INDEPENDENT = pytest.mark.parametrize("kind", ["sac", "td3"])
"""Kinds whose critics see each transition by itself, without batch normalisation."""
OBS, DIMS = 5, 3


def make_agent(
    kind: str,
    stores: list[Any],
    spec: EnvSpec,
    hidden: tuple[int, ...] = (16,),
    rewards: Any = None,
    device: torch.device = CPU,
    reads: tuple[str, ...] = ("state",),
    **fields: Any,
) -> Any:
    """An algorithm of either kind with weights that its seed decides."""
    algorithm, config, policy_kind = ALGORITHMS[kind]
    small = PolicyConfig(kind=policy_kind, hidden=hidden, activation="relu", critic_reads=reads)
    key = None if device.type == "meta" else Key(5, ("policy",))
    policy = make_policy(small, spec, key)
    rewards = rewards or GIVEN
    return algorithm(config(**fields), policy, stores, rewards, Key(5, ("critics",)), device)


def plain_agent(kind: str, shards: int = 1, **fields: Any) -> Any:
    """One without experience, to be handed batches."""
    spec = EnvSpec(
        {"state": ArraySpec((OBS,))}, ActionSpec("box", (-1.0,) * DIMS, (1.0,) * DIMS), 9
    )
    return make_agent(kind, [None] * shards, spec, **fields)


def random_batch(size: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return Batch(
        {"state": normal(size, OBS) * 3},
        normal(size, DIMS).tanh(),
        normal(size),
        torch.rand(size, generator=generator) < 0.3,
        {"state": normal(size, OBS) * 3},
    )


def random_noise(agent: OffPolicy, size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(agent.noise_draws, size, DIMS, generator=generator)


def part_of(batch: Batch, rows: slice) -> Batch:
    def cut(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x[rows] for name, x in obs.items()}

    actions, rewards, terminated = (x[rows] for x in batch[1:4])
    return Batch(cut(batch.obs), actions, rewards, terminated, cut(batch.next_obs))


def weights(agent: OffPolicy) -> dict[str, torch.Tensor]:
    """Everything a gradient step moves but the optimizers."""
    found = {
        "actor": agent.actor_optimizer.flat.data,
        "critics": agent.critic_optimizer.flat.data,
        "critic_target": agent.critic_target.data,
    }
    if isinstance(agent, SAC):
        found["log_alpha"] = agent.log_alpha
    if isinstance(agent, TD3):
        found["actor_target"] = agent.actor_target.data
    return {name: x.detach().clone() for name, x in found.items()}


@dataclass
class Learner:
    """An algorithm with its own collector, stepped by hand as the loop does it."""

    agent: Any
    collector: LocalCollector
    clock: Clock

    def collect(self) -> list[Fragment]:
        return self.collector.collect(self.agent.broadcast(self.clock), self.clock.now.iterations)

    def update(self) -> list[BatchMetrics]:
        key = Key(5).child("update", self.clock.now.iterations)
        return list(gradient_steps(self.agent, self.clock, key))

    def iterate(self) -> list[BatchMetrics]:
        self.agent.ingest(self.collect(), self.clock)
        batches = self.update()
        self.agent.end_iteration()
        self.clock.advance(len(batches), 0)
        return batches

    def bits(self) -> str:
        policy, _ = self.agent.policy_parts()
        return digest({"policy": policy, "agent": self.agent.state_dict()})


def make_learner(
    folder: Path, kind: str = "sac", shards: int = 1, envs: list[Any] | None = None, **fields: Any
) -> Learner:
    """8 rows in 4 groups of 2, 16 steps an iteration, of which the first is warm-up."""
    rows, steps = 8, 16
    fields = {"batch_size": 16, "train_batches": 5, "warmup_steps": 256, **fields}
    fields.setdefault("capacity", 1000)
    cut = ReplayGeometry(rows, steps, fields["batch_size"], shards, 2)
    envs = envs or [ToyEnv(2) for _ in range(cut.num_envs // 2)]
    spec = envs[0].spec
    stores = [
        EpisodeStore.create(folder / str(s), cut.store(spec, fields["capacity"]), Disk())
        for s in range(shards)
    ]
    agent = make_agent(kind, stores, spec, rollout_steps=steps, **fields)
    buffer = toy_buffer(spec, rows, steps)
    groups = CollectorConfig(num_envs=cut.num_envs, envs_per_group=cut.envs_per_group)
    views = [buffer.part(groups.part(g)) for g in range(groups.num_groups)]
    own = make_policy(agent.policy.config, spec, None)
    collector = LocalCollector(envs, own, Key(5, ("collect",)), Workers(1), [views])
    steps = cut.steps_per_iteration
    idle = agent.config.idle_iterations(steps)
    nest = Loops(20, 1, 1, steps, fields["train_batches"], idle)
    return Learner(agent, collector, Clock(nest))


@KINDS
def test_warm_up_acts_uniformly_and_makes_no_update(kind: str, tmp_path: Path) -> None:
    learner = make_learner(tmp_path, kind, warmup_steps=12 * 128)
    before, actions = weights(learner.agent), []
    for i in range(12):
        assert bool(learner.agent.broadcast(learner.clock).policy["explore"])
        fragments = learner.collect()
        actions += [fragment.actions.copy() for fragment in fragments]
        learner.agent.ingest(fragments, learner.clock)
        idle = learner.agent.config.idle_iterations(learner.clock.loops.steps_per_iteration)
        assert idle == 11
        # The last of the warm-up's steps are there: from here on it learns, and acts by itself.
        assert len(learner.update()) == (5 if i == 11 else 0)
        learner.clock.advance(0, 0)
        if i < 11:
            assert all(torch.equal(x, before[n]) for n, x in weights(learner.agent).items())
    assert not bool(learner.agent.broadcast(learner.clock).policy["explore"])
    drawn = np.sort(np.concatenate(actions).reshape(-1))
    assert -1.0 <= drawn[0] < -0.99
    assert 0.99 < drawn[-1] <= 1.0
    # Kolmogorov-Smirnov: 1.63 / sqrt(n) is exceeded once in a hundred by uniform numbers.
    expected = (drawn + 1.0) / 2.0
    distance = np.abs(expected - (np.arange(len(drawn)) + 0.5) / len(drawn)).max()
    assert distance < 1.63 / np.sqrt(len(drawn))
    assert abs(np.corrcoef(np.concatenate(actions).reshape(-1, 2).T)[0, 1]) < 0.1


@KINDS
def test_what_is_kept_of_the_policy_never_explores(kind: str, tmp_path: Path) -> None:
    learner = make_learner(tmp_path, kind)
    arrays, contract = learner.agent.policy_parts()
    assert contract["policy"]["kind"] == learner.agent.policy.config.kind
    assert not bool(arrays["explore"])


@KINDS
@pytest.mark.parametrize("shards", [1, 2])
def test_the_same_key_gives_the_same_bits(kind: str, shards: int, tmp_path: Path) -> None:
    bits = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        learner = make_learner(tmp_path / name, kind, shards)
        metrics = [batch.values for _ in range(4) for batch in learner.iterate()]
        bits.append((learner.bits(), metrics))
    assert bits[0] == bits[1]
    assert len(bits[0][1]) == 15  # the first of four iterations was warm-up


@KINDS
@pytest.mark.parametrize("normalise", [False, True])
def test_a_run_continues_from_its_state(kind: str, normalise: bool, tmp_path: Path) -> None:
    fields = {"shards": 2, "normalise_observations": normalise, "capacity": 300}
    fields["return_steps"] = 3 if normalise else 1
    learner = make_learner(tmp_path, kind, **fields)
    for _ in range(3):
        learner.iterate()
    policy = {name: x.clone() for name, x in learner.agent.policy_parts()[0].items()}
    saved = {"agent": learner.agent.state_dict(), "clock": learner.clock.state_dict()}
    saved = _copied({**saved, "collector": learner.collector.state_dict()})
    for _ in range(3):
        learner.iterate()
    expected = learner.bits()
    learner.agent.close()
    again = make_learner(tmp_path, kind, **fields)
    again.agent.load_policy(policy)
    again.agent.load_state_dict(saved["agent"])
    again.clock.load_state_dict(saved["clock"])
    again.collector.load_state_dict(saved["collector"])
    for _ in range(3):
        again.iterate()
    assert again.bits() == expected


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copied(value) for name, value in tree.items()}
    return tree.clone() if torch.is_tensor(tree) else tree.copy() if hasattr(tree, "copy") else tree


@KINDS
def test_retired_checkpoints_give_their_files_back(kind: str, tmp_path: Path) -> None:
    """With room for 300 observations in 8 blocks, 20 iterations of 128 steps fill many."""
    learner = make_learner(tmp_path, kind, shards=2, capacity=300, train_batches=1)
    states = []
    for _ in range(12):
        learner.iterate()
        states.append(_copied(learner.agent.state_dict()))
    first = len(list(tmp_path.glob("*/steps-*.bin")))
    learner.agent.retire(states[-8:])
    second = len(list(tmp_path.glob("*/steps-*.bin")))
    learner.agent.retire([without_arrays(states[-1])])
    third = len(list(tmp_path.glob("*/steps-*.bin")))
    assert first > second > third
    learner.agent.load_state_dict(states[-1])
    learner.iterate()


@INDEPENDENT
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_give_the_gradient_of_the_whole(kind: str, shards: int) -> None:
    size = 32
    whole, parts = plain_agent(kind), plain_agent(kind, shards)
    for i in range(2):
        batch, noise = random_batch(size, i), random_noise(whole, size, i)
        whole.learn([batch], [noise])
        cuts = [slice(s * size // shards, (s + 1) * size // shards) for s in range(shards)]
        parts.learn([part_of(batch, cut) for cut in cuts], [noise[:, cut] for cut in cuts])
        for trained in ("critic_optimizer", "actor_optimizer"):
            left, right = (getattr(agent, trained).flat.grad for agent in (whole, parts))
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)
            assert float(left.abs().max()) > 1e-3 or (i == 0 and kind == "td3")


@INDEPENDENT
def test_weights_scale_what_critics_learn_from_a_transition(kind: str) -> None:
    """A transition of weight 2 counts like one that was sampled twice, of weight 0 like none."""
    gradients = []
    for index, weights in (([0, 1, 2, 3], [2.0, 1.0, 1.0, 0.0]), ([0, 0, 1, 2], None)):
        agent, batch = plain_agent(kind), random_batch(4)
        noise = random_noise(agent, 4)[:, index]
        batch = Batch(
            {"state": batch.obs["state"][index]},
            *(x[index] for x in batch[1:4]),
            {"state": batch.next_obs["state"][index]},
            weights=None if weights is None else torch.tensor(weights),
        )
        agent.learn([batch], [noise])
        gradients.append(agent.critic_optimizer.flat.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    assert float(gradients[0].abs().max()) > 1e-3


@INDEPENDENT
def test_a_termination_ends_the_future_and_a_truncation_does_not(kind: str) -> None:
    agent = plain_agent(kind, gamma=0.9)
    batch, noise = random_batch(64), random_noise(agent, 64)
    batch = batch._replace(next_obs=agent.policy.prepare(batch.next_obs))
    extra = (torch.tensor([0.5]),) if kind == "sac" else ()

    def target(terminated: bool) -> torch.Tensor:
        ended = batch._replace(terminated=torch.full((64,), terminated))
        return agent.target(ended, noise[-1], *extra)

    assert torch.equal(target(True), batch.rewards)
    mixed, ended = agent.target(batch, noise[-1], *extra), batch.terminated
    assert torch.equal(mixed[ended], batch.rewards[ended])
    following = batch.next_obs
    if kind == "sac":
        actions, log_probs = agent.policy.sample(following, noise[-1])
    else:
        blur = (0.2 * noise[-1]).clamp(-0.5, 0.5)
        actions = (agent.policy.actions(following) + blur).clamp(-1, 1)
        log_probs = torch.zeros(64)
    first, second = agent.critics(following, actions)
    value = torch.minimum(first, second) - 0.5 * log_probs
    torch.testing.assert_close(target(False), batch.rewards + 0.9 * value)


@pytest.mark.parametrize("kind", ["sac", "td3", "iql"])
def test_the_value_after_several_steps_is_discounted_by_all_of_them(kind: str) -> None:
    agent = plain_agent(kind, gamma=0.9)
    batch, noise = random_batch(64), random_noise(agent, 64)
    batch = batch._replace(next_obs=agent.policy.prepare(batch.next_obs))
    more = {"sac": (noise[-1], torch.tensor([0.5])), "td3": (noise[-1],), "iql": ()}[kind]
    one = agent.target(batch, *more)
    powers = 0.9 ** torch.randint(1, 4, (64,), generator=torch.Generator().manual_seed(1)).float()
    several = agent.target(batch._replace(discounts=powers), *more)
    torch.testing.assert_close(several - batch.rewards, (one - batch.rewards) / 0.9 * powers)
    assert not torch.equal(one, several)


@pytest.mark.parametrize("kind", ["sac", "td3", "iql"])
def test_learns_from_returns_of_several_steps(kind: str, tmp_path: Path) -> None:
    """The rewards of a minibatch are sums of up to three of the replay's."""
    learner, seen = make_learner(tmp_path, kind, return_steps=3, gamma=0.5, shards=2), []
    learn = learner.agent.learn
    learner.agent.learn = lambda batches, noises: (seen.extend(batches), learn(batches, noises))[1]
    for _ in range(4):
        learner.iterate()
    assert {float(x) for batch in seen for x in batch.discounts} == {0.5, 0.25, 0.125}
    known = set()
    for store in learner.agent.stores:
        drawn = store.sample_multi_step(np.random.default_rng(0), 20_000, 3)
        sums = np.cumsum(drawn.rewards * np.array([1.0, 0.5, 0.25]), axis=1)
        known |= {*sums.astype(np.float32).ravel().tolist()}  # at the head, fewer steps at first
    assert {float(x) for batch in seen for x in batch.rewards} <= known


def test_learned_rewards_have_no_returns_of_several_steps() -> None:
    recipe = etude.recipes.find("episodic").replace(algorithm__return_steps=3)
    with pytest.raises(UsageError, match=r"rewards.kind rrd .*return_steps 3 .*return-steps 1\."):
        etude.plan(recipe)
    lines = " ".join(etude.plan(recipe.replace("rewards.kind", "given")).lines)
    assert "3-step returns" in lines


@KINDS
@pytest.mark.parametrize("interval", [1, 3])
def test_targets_move_when_they_are_due(kind: str, interval: int) -> None:
    agent = plain_agent(kind, target_interval=interval, polyak=0.9)
    for i in range(1, 8):
        before = weights(agent)
        agent.learn([random_batch(16, i)], [random_noise(agent, 16, i)])
        after = weights(agent)
        expected = before["critic_target"]
        if i % interval == 0:
            expected = 0.9 * expected + 0.1 * after["critics"]
        torch.testing.assert_close(after["critic_target"], expected)
        if kind == "td3" and i % interval:
            assert torch.equal(after["actor_target"], before["actor_target"])


@KINDS
def test_critics_read_what_they_are_told_and_normalised(kind: str, tmp_path: Path) -> None:
    box = ActionSpec("box", (-1.0,), (1.0,))
    spec = EnvSpec({"state": ArraySpec((3,)), "secret": ArraySpec((2,))}, box, 9)
    agent = make_agent(kind, [None], spec, reads=("state", "secret"))
    obs = {"state": torch.randn(4, 3) * 50, "secret": torch.randn(4, 2) * 50}
    features = agent.policy.prepare(obs)
    assert torch.equal(features["actor"], obs["state"])  # as it is, beyond 10 too
    assert torch.equal(features["critic"], torch.cat([obs["state"], obs["secret"]], -1))
    if kind == "xqc":  # Whose first estimates are all 0.
        agent.critics.get_parameter("weight1").data.normal_()
    moments = {"count": np.asarray(9.0), "mean": np.full(2, 5.0), "m2": np.full(2, 36.0)}
    agent.policy.absorb({"secret": moments})
    changed = agent.policy.prepare(obs)
    torch.testing.assert_close(changed["critic"][:, 3:], ((obs["secret"] - 5) / 2).clamp(-10, 10))
    actions = torch.zeros(4, 1)
    values = [agent.critics(x, actions)[0] for x in (features, changed)]
    assert not torch.equal(*values)


@KINDS
def test_a_normaliser_absorbs_only_where_it_is_wanted(kind: str, tmp_path: Path) -> None:
    for wanted in (False, True):
        (tmp_path / str(wanted)).mkdir()
        learner = make_learner(tmp_path / str(wanted), kind, normalise_observations=wanted)
        learner.iterate()
        learner.iterate()
        seen = float(learner.agent.policy_parts()[0]["normalisers.state.count"])
        assert seen == (256 if wanted else 0)


@KINDS
def test_metrics_have_the_names_people_know(kind: str, tmp_path: Path) -> None:
    learner = make_learner(tmp_path, kind)
    assert learner.iterate() == []
    names = {name for batch in learner.iterate() for name in batch.values}
    expected = {"critic_loss", "actor_loss", "q_mean", "learning_rate"}
    expected |= set() if kind == "td3" else {"ent_coef", "ent_coef_loss"}
    assert names == {f"train/{name}" for name in expected}


class Rewards(RewardSource):
    """Given rewards, of which one may be spoilt."""

    spoilt = False

    def relabel(self, batch: Batch) -> Batch:
        if self.spoilt:
            batch.rewards[3] = float("nan")
        return batch

    def update(self, stores: Any, key: Key) -> dict[str, float]:
        return {"train/R_loss": key.generator().random()}


def refused(learner: Learner, action: Callable[[], Any]) -> NonFinite:
    """The error of an action that must change no weight."""
    before = digest(weights(learner.agent))
    with pytest.raises(NonFinite) as caught:
        action()
    assert digest(weights(learner.agent)) == before
    return caught.value


@KINDS
def test_a_learned_reward_that_is_not_finite_is_named(kind: str, tmp_path: Path) -> None:
    rewards = Rewards()
    learner = make_learner(tmp_path, kind, rewards=rewards)
    learner.iterate()
    assert "train/R_loss" in learner.iterate()[0].values
    rewards.spoilt = True
    error = refused(learner, learner.update)
    assert error.where == "the reward of replayed step 3 of a batch (shard 0)"
    assert bool(error.arrays["shard0_reward"].isnan().any())


@KINDS
@pytest.mark.parametrize("where", ["reward", "observation", "final"])
def test_collected_numbers_are_checked_before_they_are_stored(
    kind: str, where: str, tmp_path: Path
) -> None:
    envs: list[Any] = [ToyEnv(2), ToyEnv(2), PoisonedEnv(2, where, float("inf")), ToyEnv(2)]
    learner = make_learner(tmp_path, kind, envs=envs)
    error = refused(learner, learner.iterate)
    # An actor that clips nothing turns a bad observation into a bad action at once.
    assert "environment 5" in error.where or "row 1 of its group" in error.where or where == "final"
    assert where in error.where
    assert learner.agent.stores[0].num_transitions == 0


@KINDS
@pytest.mark.parametrize("trained", ["critics", "actor"])
def test_a_gradient_that_is_not_finite_names_its_parameter(kind: str, trained: str) -> None:
    agent = plain_agent(kind, **({"delay": 1} if kind == "td3" else {}))
    module = agent.critics if trained == "critics" else agent.policy
    name, parameter = list(module.named_parameters())[1]
    parameter.register_hook(lambda grad: grad * float("nan"))
    before = weights(agent)
    with pytest.raises(NonFinite) as caught:
        agent.learn([random_batch(8)], [random_noise(agent, 8)])
    assert caught.value.where == f"the gradient of '{name}' of the {trained}"
    assert torch.equal(weights(agent)["actor"], before["actor"])
    assert torch.equal(weights(agent)["critics"], before["critics"])
    assert agent.num_updates == 0


@KINDS
def test_a_loss_that_is_not_finite_names_its_shard(kind: str) -> None:
    agent = plain_agent(kind, shards=2)
    good, bad = random_batch(8), random_batch(8)
    bad.rewards[0] = float("nan") if kind == "xqc" else 3e38
    noise = random_noise(agent, 8)
    before = digest(weights(agent))
    with pytest.raises(NonFinite, match=r"the loss of the critics \(shard 1\)"):
        agent.learn([good, bad], [noise, noise])
    assert digest(weights(agent)) == before


@KINDS
def test_every_tensor_is_made_where_it_is_used(kind: str) -> None:
    """On the meta device an operation with a tensor from elsewhere is refused."""
    meta = torch.device("meta")
    box = ActionSpec("box", (-1.0,) * DIMS, (1.0,) * DIMS)
    with meta:
        agent = make_agent(kind, [None], EnvSpec({"state": ArraySpec((OBS,))}, box, 9), device=meta)
        batch = random_batch_on_meta(8)
        prepared = agent.policy.prepare(batch.obs)
        batch = batch._replace(obs=prepared, next_obs=prepared)
    noise = agent._noise(Key(0).generator(), 8)
    agent.num_updates = 2  # Also the actor of TD3 is due.
    taken = agent.step([batch], [noise])
    tensors = [noise, *taken.values(), *weights(agent).values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def random_batch_on_meta(size: int) -> Batch:
    obs = {"state": torch.empty(size, OBS)}
    ended = torch.empty(size, dtype=torch.bool)
    return Batch(obs, torch.empty(size, DIMS), torch.empty(size), ended, obs)


def test_sizes_that_do_not_divide_are_refused_with_some_that_do() -> None:
    assert ReplayGeometry(8, 4, 256, 4, 2).steps_per_iteration == 32
    fix = r"batch_size 255 or 258; or learner.shards 2 or 4"
    with pytest.raises(UsageError, match=rf"shards 3 .*algorithm.batch_size 256.*{fix}"):
        ReplayGeometry(24, 4, 256, 3, 2)
    with pytest.raises(UsageError, match=r"number of groups.*Sizes that work: .*shards 2 or 4"):
        ReplayGeometry(8, 4, 24, 3, 2)
    with pytest.raises(UsageError, match=r"envs_per_group 3 does not divide collector.num_envs 8"):
        ReplayGeometry(8, 4, 24, 1, 3)
    with pytest.raises(UsageError, match=r"algorithm.capacity 50 .* use 112 or more"):
        ReplayGeometry(8, 4, 24, 1, 2).store(ToyEnv(2).spec, 50)


def test_a_store_for_episodes_without_a_limit_takes_any_that_fit() -> None:
    endless = EnvSpec(ToyEnv(2).spec.observations, ToyEnv(2).spec.action, None)
    store = ReplayGeometry(8, 4, 24, 2, 2).store(endless, 1000)
    assert (store.lanes, store.capacity, store.max_episode_steps) == (4, 500, 61)


@KINDS
def test_the_same_weights_collect_the_same(kind: str, tmp_path: Path) -> None:
    bits = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        learner = make_learner(tmp_path / name, kind)
        learner.iterate()
        learner.iterate()
        bits.append([fragment_bits(fragment) for fragment in learner.collect()])
    assert bits[0] == bits[1]


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_a_point_learns_to_seek_its_target(kind: str, tmp_path: Path) -> None:
    """From never to nearly always, in 4,000 steps and as many seconds."""
    sizes = {"capacity": 10_000, "warmup_steps": 512, "train_batches": 64, "batch_size": 64}
    own = {
        "sac": {"alpha": 0.02},
        "td3": {},
        "iql": {"temperature": 30.0, "expectile": 0.9, "exploration": 0.3},
        "xqc": {"alpha": 0.02},
    }
    learner = make_learner(
        tmp_path,
        kind,
        envs=[Seek(2) for _ in range(4)],
        hidden=(64, 64),
        learning_rate=1e-3,
        gamma=0.95,
        **sizes,
        **own[kind],
    )

    def success() -> float:
        return float(evaluate(Seek(32), learner.agent.policy, 1, Key(9))["is_success"].mean())

    assert success() < 0.2
    for _ in range(32):
        learner.iterate()
    assert success() > 0.8
