"""Recurrent policies: training reproduces the rollout it learns from."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest
import torch
from loops import jolt, loop, normal

from etude.core.contracts import Action, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.networks import ACTIVATIONS, Mlp
from etude.models.policies import Features, PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.models.recurrent import CORES, Core
from etude.rl.base import FlatParameters
from etude.rollout.group import moments
from toy_envs import ACTIONS, BOX

KINDS = tuple(CORES)
TWO = EnvSpec({"state": ArraySpec((3,)), "critic": ArraySpec((2,))}, BOX, 10)
PRIVILEGED = ("state", "critic")


def recurrent(kind: str, spec: EnvSpec = TWO, **options: object) -> ActorCritic:
    """A policy whose actions depend visibly on its memory, with a normaliser that has seen data."""
    config = PolicyConfig.model_validate({"kind": kind, "hidden": (8,), "units": 6, **options})
    policy = make_policy(config, spec, Key(3))
    jolt(policy)
    data = np.random.default_rng(0)
    seen = {n: moments(data.normal(2, 3, (4, 5, *s.shape))) for n, s in spec.observations.items()}
    policy.absorb(seen)
    return policy


class Rollout(NamedTuple):
    """Segments as a rollout leaves them."""

    features: Features
    actions: torch.Tensor
    log_probs: torch.Tensor
    memory: Memory


def _log_probs(policy: ActorCritic, noise: torch.Tensor, answers: list[Action]) -> torch.Tensor:
    """[rows, steps], from where the policy gives them."""
    with torch.inference_mode():
        known = policy.log_probs(noise)
    given = [answer.log_probs for answer in answers if answer.log_probs is not None]
    return torch.stack(given, dim=1) if known is None else known.T.clone()


def roll(policy: ActorCritic, rows: int, segments: int, horizon: int) -> Rollout:
    """Act step by step with episodes ending anywhere; cut [rows, steps] into segments."""
    dtype, steps = next(policy.parameters()).dtype, segments * horizon
    obs = {
        name: 3.0 * normal(rows, steps, *spec.shape, seed=i, dtype=dtype)
        for i, (name, spec) in enumerate(policy.observations.items())
    }
    starts = torch.from_numpy(np.random.default_rng(1).random((rows, steps)) < 0.1)
    starts[:, 0] = True
    starts[0] = torch.arange(steps) == 0  # One row's first episode lasts to the end.
    noise = torch.from_numpy(policy.noise(np.random.default_rng(2), steps, rows)).to(dtype)
    state = {
        name: torch.from_numpy(array).to(dtype)
        for name, array in policy.initial_state(rows).items()
    }
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in state}
    answers = []
    with torch.inference_mode():
        for t in range(steps):
            state = {n: s.masked_fill(starts[:, t : t + 1], 0.0) for n, s in state.items()}
            if t % horizon == 0:
                for name, value in state.items():
                    kept[name].append(value)
            answer = policy.act({n: array[:, t] for n, array in obs.items()}, state, noise[t])
            state = answer.state
            answers.append(answer)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, horizon, *x.shape[2:]).clone()

    memory = Memory(
        {name: torch.stack(values, dim=1).flatten(0, 1).clone() for name, values in kept.items()},
        cut(starts),
    )
    return Rollout(
        {name: cut(x) for name, x in policy.prepare(obs).items()},
        cut(torch.stack([a.actions for a in answers], dim=1)),
        cut(_log_probs(policy, noise, answers)),
        memory,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("double", "close"), [(True, 1e-9), (False, 1e-5)])
def test_training_reproduces_the_rollouts_log_probs(
    kind: str, action: str, double: bool, close: float
) -> None:
    policy = recurrent(kind, EnvSpec(TWO.observations, ACTIONS[action], 10))
    policy = policy.double() if double else policy
    did = roll(policy, rows=5, segments=3, horizon=11)
    judged = policy.evaluate(did.features, did.actions, did.memory)
    torch.testing.assert_close(judged.log_probs, did.log_probs, atol=close, rtol=0)
    assert judged.values.shape == (15, 11)
    values = policy.values(did.features, did.memory)
    torch.testing.assert_close(judged.values, values, atol=close, rtol=0)
    # The mistakes others made would be seen: starts ignored, states forgotten.
    state, starts = did.memory
    wrong = [
        Memory(state, torch.zeros_like(starts)),
        Memory({name: torch.zeros_like(s) for name, s in state.items()}, starts),
        Memory({name: s.roll(1, 0) for name, s in state.items()}, starts),
    ]
    for memory in wrong:
        other = policy.evaluate(did.features, did.actions, memory).log_probs.detach()
        assert float((other - did.log_probs).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_privileged_critic(kind: str) -> None:
    policy = recurrent(kind, critic_reads=PRIVILEGED)
    did = roll(policy, rows=4, segments=2, horizon=6)
    other = {**did.features, "critic": did.features["critic"] + 1.0}
    assert did.features["critic"].shape == (8, 6, 2)
    judged = policy.evaluate(did.features, did.actions, did.memory)
    changed = policy.evaluate(other, did.actions, did.memory)
    assert torch.equal(judged.log_probs, changed.log_probs)
    assert not bool(torch.isclose(judged.values, changed.values).any())
    plain = recurrent(kind).prepare({"state": normal(2, 3, 3)})
    assert plain["critic"] is plain["actor"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [(), (8, 5)])
def test_every_part_is_built_as_described(kind: str, hidden: tuple[int, ...]) -> None:
    policy = recurrent(kind, hidden=hidden, activation="elu").double()
    did = roll(policy, rows=3, segments=1, horizon=5)
    x, tensors = did.features["actor"], policy.state_dict()
    for i in range(len(hidden)):
        x = x @ tensors[f"encoder.weight{i}"].T + tensors[f"encoder.bias{i}"]
        x = ACTIVATIONS["elu"](x)
    core = policy.get_submodule("core")
    assert isinstance(core, Core)
    out = loop(core, x, *did.memory)
    values = out @ tensors["critic.weight0"].T + tensors["critic.bias0"]
    mean = out @ tensors["actor.weight0"].T + tensors["actor.bias0"]
    judged = policy.evaluate(did.features, did.actions, did.memory)
    torch.testing.assert_close(judged.values, values.squeeze(-1))
    normals = torch.distributions.Normal(mean, policy.log_std.exp())
    torch.testing.assert_close(judged.log_probs, normals.log_prob(did.actions).sum(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_term_moves_every_parameter_it_should(kind: str) -> None:
    policy = recurrent(kind, critic_reads=PRIVILEGED)
    did = roll(policy, rows=4, segments=2, horizon=6)
    judged = policy.evaluate(did.features, did.actions, did.memory)
    named = dict(policy.named_parameters())
    for term, apart in ((judged.log_probs, {"critic"}), (judged.values, {"actor", "log_std"})):
        grads = torch.autograd.grad(
            term.sum(), list(named.values()), retain_graph=True, allow_unused=True
        )
        for name, grad in zip(named, grads, strict=True):
            moved = grad is not None and float(grad.abs().sum()) > 0.0
            assert moved == (name.split(".")[0] not in apart), name


def test_memory_is_demanded() -> None:
    policy = recurrent("lstm")
    did = roll(policy, rows=2, segments=1, horizon=3)
    with pytest.raises(ValueError, match="memory"):
        policy.evaluate(did.features, did.actions, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_contract_and_its_arrays_rebuild_the_policy(kind: str) -> None:
    policy = recurrent(kind, critic_reads=PRIVILEGED)
    contract = json.loads(json.dumps(policy.contract()))
    arrays = {name: tensor.numpy().copy() for name, tensor in policy.state_dict().items()}
    again = policy_from_contract(contract, arrays)
    assert again.state_specs == policy.state_specs
    one, two = (roll(p, rows=3, segments=2, horizon=4) for p in (policy, again))
    assert torch.equal(one.actions, two.actions)
    assert torch.equal(again.values(*two[::3]), policy.values(*one[::3]))


@pytest.mark.parametrize(("kind", "names"), [("mlp", []), ("lstm", ["h", "c"]), ("gru", ["h"])])
def test_states_and_the_meta_device(kind: str, names: list[str]) -> None:
    config = PolicyConfig.model_validate({"kind": kind, "units": 6, "critic_reads": PRIVILEGED})
    with torch.device("meta"):
        policy = make_policy(config, TWO, None)
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    real = make_policy(config, TWO, Key(0)).state_dict()
    assert {n: t.shape for n, t in policy.state_dict().items()} == {
        n: t.shape for n, t in real.items()
    }
    assert policy.state_specs == {name: ArraySpec((6,)) for name in names}
    state = policy.initial_state(4)
    assert list(state) == names
    for array in state.values():
        assert array.dtype == np.float32
        assert array.shape == (4, 6)
        assert not array.any()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_become_views_of_one_vector(kind: str) -> None:
    policy, plain = recurrent(kind), recurrent(kind)
    did = roll(policy, rows=3, segments=2, horizon=5)
    policy.values(did.features, did.memory)  # Whatever could be cached now is.
    flat = FlatParameters(policy)
    flat.data.mul_(0.5)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(0.5)
    for one in (policy, plain):
        judged = one.evaluate(did.features, did.actions, did.memory)
        (judged.log_probs.sum() + judged.values.sum()).backward()
    grads = [p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None]
    torch.testing.assert_close(flat.grad, torch.cat(grads))
    one, two = (roll(p, rows=3, segments=2, horizon=5) for p in (policy, plain))
    torch.testing.assert_close(one.actions, two.actions)


def test_an_mlp_policy_is_two_networks_from_one_stream() -> None:
    """Checkpoints hold these names, and runs these bits."""
    config = PolicyConfig(hidden=(8,), critic_reads=PRIVILEGED)
    policy = make_policy(config, TWO, Key(4))
    generator = torch.Generator().manual_seed(Key(4).integer())
    actor = Mlp((3, 8, 2), "tanh", 0.01, generator)
    critic = Mlp((5, 8, 1), "tanh", 1.0, generator)
    layers = ["weight0", "bias0", "weight1", "bias1"]
    networks = [f"{part}.{layer}" for part in ("actor", "critic") for layer in layers]
    assert [name for name, _ in policy.named_parameters()] == ["log_std", *networks]
    statistics = [f"normalisers.{n}.{s}" for n in TWO.observations for s in ("count", "mean", "m2")]
    assert sorted(policy.state_dict()) == sorted(["log_std", *networks, *statistics])
    obs = {"state": normal(6, 3), "critic": normal(6, 2)}
    both = torch.cat([obs["state"], obs["critic"]], dim=-1)
    assert torch.equal(policy.act(obs, {}, None).actions, actor(obs["state"]))
    values = critic(both).squeeze(-1)
    features = policy.prepare(obs)
    assert torch.equal(policy.values(features, None), values)
    ignored = Memory({}, torch.zeros(6, 1, dtype=torch.bool))
    assert torch.equal(policy.values(features, ignored), values)
