"""Actors in a box: densities, exploration, and that a contract rebuilds them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.actors import SQUASH_EPSILON, Critics, init_by_fan_in
from etude.models.networks import Mlp
from etude.models.policies import PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.rl.base import FlatParameters
from etude.rollout.group import moments
from toy_envs import DISCRETE, MULTI

DIMS = 2
SPEC = EnvSpec({"state": ArraySpec((3,))}, ActionSpec("box", (-2.0, 0.0), (2.0, 1.0)), 10)
KINDS = pytest.mark.parametrize("kind", ["squashed", "deterministic"])


def make(kind: str, seed: int = 0, spec: EnvSpec = SPEC, **fields: Any) -> Any:
    fields = {"hidden": (16,), "activation": "relu", **fields}
    return make_policy(PolicyConfig(kind=kind, **fields), spec, Key(seed))


def states(rows: int = 6, spread: float = 2.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"state": torch.randn(rows, 3, generator=generator) * spread}


def normal(policy: Any, rows: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(policy.noise(Key(seed).generator(), 1, rows))[0]


def exact_log_prob(mean: torch.Tensor, log_std: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Of tanh(mean + std z): the density of z through the Jacobian of z -> action, by autograd."""

    def squash(z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mean + log_std.exp() * z)

    jacobian = torch.autograd.functional.jacobian(squash, z)
    density = -0.5 * (z.square() + math.log(2 * math.pi)).sum()
    return density - torch.linalg.slogdet(jacobian).logabsdet


def test_the_squashed_density_against_the_jacobian() -> None:
    """Exact but for the epsilon that keeps it finite, whose share of 1 - a^2 bounds the error."""
    policy = make("squashed", hidden=(8,)).double()
    obs = states(40, spread=6.0)["state"].double()
    noise = normal(policy, 40).double()
    actions, log_probs = policy.sample({"actor": obs}, noise)
    mean, log_std = policy.actor({"actor": obs}).detach().chunk(2, -1)
    for i in range(40):
        expected = exact_log_prob(mean[i], log_std[i].clamp(-20, 2), noise[i])
        bound = (SQUASH_EPSILON / (1 - actions[i].detach().square())).sum() + 1e-9
        assert abs(float(log_probs[i].detach() - expected)) <= float(bound)


def test_the_squashed_density_integrates_to_one() -> None:
    """Over the box, on a grid of points whose noise is worked out backwards.

    Narrow enough that the density does not pile up at the edges, where a grid is too coarse.
    """
    policy = make("squashed").double()
    with torch.no_grad():
        policy.actor.bias1[DIMS:] -= 1.5
    obs = states(1)["state"].double()
    mean, log_std = policy.actor({"actor": obs}).detach().chunk(2, -1)
    edges = torch.linspace(-1, 1, 601, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    grid = torch.cartesian_prod(middle, middle)
    noise = (torch.atanh(grid) - mean) / log_std.exp()
    with torch.no_grad():
        actions, log_probs = policy.sample({"actor": obs.expand(len(grid), -1)}, noise)
    torch.testing.assert_close(actions, grid)
    area = float(edges[1] - edges[0]) ** 2
    assert float(log_probs.exp().sum() * area) == pytest.approx(1.0, abs=1e-4)


def test_the_spread_is_kept_within_its_range() -> None:
    policy = make("squashed")
    with torch.no_grad():
        policy.actor.bias1[DIMS:] = torch.tensor([50.0, -50.0])
        mean = policy.actor({"actor": states()["state"]})[:, :DIMS]
        raw = torch.atanh(
            policy.sample({"actor": states()["state"]}, torch.full((6, DIMS), 0.01))[0]
        )
    spread = (raw - mean)[:, 0] / 0.01
    torch.testing.assert_close(spread, torch.full((6,), math.exp(2.0)), rtol=1e-2, atol=0)
    assert float((raw - mean)[:, 1].abs().max()) < 1e-6


def test_saturated_actions_have_finite_gradients() -> None:
    policy = make("squashed")
    with torch.no_grad():
        policy.actor.bias1[:DIMS] = 1e4
    actions, log_probs = policy.sample({"actor": states()["state"]}, torch.randn(6, DIMS))
    assert bool((actions == 1.0).all())
    log_probs.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in policy.parameters())


@KINDS
def test_without_noise_the_most_likely_action_even_while_exploring(kind: str) -> None:
    policy, obs = make(kind), states()
    expected = policy.actor({"actor": obs["state"]})[:, :DIMS].tanh()
    answer = policy.act(obs, {}, None)
    assert torch.equal(answer.actions, expected)
    assert answer.log_probs.shape == (6,)
    policy.explore.fill_(True)
    assert torch.equal(policy.act(obs, {}, None).actions, expected)


@KINDS
def test_exploring_is_uniform_whatever_is_seen(kind: str) -> None:
    policy, rows = make(kind), 20_000
    policy.explore.fill_(True)
    answer = policy.act(states(rows), {}, normal(policy, rows))
    drawn = answer.actions.flatten().sort().values
    assert float(answer.actions.abs().max()) <= 1.0
    expected = (torch.arange(len(drawn)) + 0.5) / len(drawn) * 2.0 - 1.0
    # Kolmogorov-Smirnov's distance is half of this; 1.63 / sqrt(n) is exceeded once in a hundred.
    assert float((drawn - expected).abs().max()) / 2.0 < 1.63 / math.sqrt(len(drawn))
    torch.testing.assert_close(answer.log_probs, torch.full((rows,), -DIMS * math.log(2.0)))


def test_a_deterministic_policy_explores_as_far_as_it_is_told() -> None:
    policy, obs = make("deterministic"), states()
    noise = normal(policy, 6)
    calm = policy.act(obs, {}, noise).actions
    assert torch.equal(calm, policy.act(obs, {}, None).actions)
    policy.exploration.fill_(0.5)
    expected = (calm + 0.5 * noise).clamp(-1.0, 1.0)
    torch.testing.assert_close(policy.act(obs, {}, noise).actions, expected)
    policy.exploration.fill_(100.0)
    assert float(policy.act(obs, {}, noise).actions.detach().abs().max()) == 1.0


@KINDS
def test_a_contract_and_its_arrays_rebuild_the_policy(kind: str) -> None:
    policy = make(kind, seed=3, hidden=(8, 8))
    policy.absorb({"state": moments(np.random.default_rng(1).normal(2, 3, (4, 5, 3)))})
    contract = json.loads(json.dumps(policy.contract()))
    arrays = {name: tensor.numpy().copy() for name, tensor in policy.state_dict().items()}
    again = policy_from_contract(contract, arrays)
    obs, noise = states(), normal(policy, 6)
    assert type(again) is type(policy)
    for given in (None, noise):
        ours, theirs = policy.act(obs, {}, given), again.act(obs, {}, given)
        assert torch.equal(ours.actions, theirs.actions)
        assert torch.equal(ours.log_probs, theirs.log_probs)


@KINDS
def test_observations_are_left_alone_until_some_were_absorbed(kind: str) -> None:
    policy, obs = make(kind), states(spread=100.0)
    assert policy.prepare(obs)["actor"] is obs["state"]
    policy.absorb({"state": moments(np.random.default_rng(1).normal(2, 3, (40, 50, 3)))})
    read = policy.prepare(obs)["actor"]
    assert float(read.abs().max()) == 10.0
    again = make(kind, seed=1)
    again.load_state_dict(policy.state_dict())
    assert torch.equal(again.prepare(obs)["actor"], read)


@KINDS
def test_it_has_no_memory(kind: str) -> None:
    policy = make(kind)
    assert policy.state_specs == {}
    assert policy.initial_state(3) == {}
    assert policy.act(states(), {}, None).state == {}


@KINDS
@pytest.mark.parametrize("action", [DISCRETE, MULTI])
def test_choices_are_refused(kind: str, action: ActionSpec) -> None:
    with pytest.raises(UsageError, match=rf"{kind} policy acts in a box.*{action.kind}.*ppo"):
        make(kind, spec=EnvSpec(SPEC.observations, action, 10))


@KINDS
def test_initial_weights_depend_on_the_key_alone(kind: str) -> None:
    first, same, other = (make(kind, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    weight = first["actor.weight1"]
    assert 0.8 / 4 < float(weight.abs().max()) <= 1 / 4  # uniform up to 1/sqrt(16 inputs)


@KINDS
def test_critics_are_two(kind: str) -> None:
    policy = make(kind)
    critics = policy.make_critics(torch.Generator().manual_seed(0))
    features, actions = {"critic": states()["state"]}, torch.rand(6, DIMS)
    first, second = critics(features, actions)
    assert first.shape == second.shape == (6,)
    assert not torch.equal(first, second)
    assert torch.equal(critics.first_q(features, actions), first)
    assert torch.equal(critics.min_q(features, actions), torch.minimum(first, second))
    assert not torch.equal(critics(features, actions + 0.1)[0], first)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_checkpoint_has_critics_one_after_the_other(layer_norm: bool) -> None:
    """As in version 0.1, whose critics were separate networks with weights [outputs, inputs]."""
    sizes, generator = (7, 16, 8, 1), torch.Generator().manual_seed(0)
    separate = [Mlp(sizes, "relu", 1.0, None, layer_norm) for _ in range(3)]
    for network in separate:
        init_by_fan_in(network, sizes, generator)
    generator.manual_seed(0)
    critics = Critics(3, sizes, "relu", generator, layer_norm, ("state",), None)
    flat = FlatParameters(critics).data
    expected = torch.cat([p.detach().reshape(-1) for n in separate for p in n.parameters()])
    assert torch.equal(flat[critics.saved_order()], expected)
    obs, actions = torch.randn(6, 4), torch.rand(6, 3)
    x = torch.cat([obs, actions], -1)
    outputs = torch.stack([network(x).squeeze(-1) for network in separate])
    torch.testing.assert_close(critics({"critic": obs}, actions), outputs)
    among = torch.tensor([2, 0])
    torch.testing.assert_close(critics({"critic": obs}, actions, among), outputs[among])
