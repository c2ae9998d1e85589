"""What a policy of PPO makes of its networks' outputs: spreads, squashing, masks; layer norm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.actor_critic import ActorCritic
from etude.models.actors import Actor
from etude.models.networks import Mlp, SquashedGaussian, make_generator
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.base import AdaptiveRate

SPEC = EnvSpec({"state": ArraySpec((3,))}, ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0)), 10)


def make(**fields: Any) -> ActorCritic:
    policy = make_policy(PolicyConfig(hidden=(16,), **fields), SPEC, Key(2))
    assert isinstance(policy, ActorCritic)
    with torch.no_grad():  # far from the start, where outputs are about 0
        policy.actor.weight1.mul_(300.0)
    return policy


def states(num: int) -> dict[str, torch.Tensor]:
    return {"state": torch.from_numpy(np.random.default_rng(1).normal(size=(num, 3))).float()}


@pytest.mark.parametrize("kind", ["mlp", "lstm"])
@pytest.mark.parametrize(
    "fields",
    [
        {"std": "state"},
        {"squash": True},
        {"std": "state", "squash": True, "std_range": (0.1, 0.6)},
        {"std_range": (0.1, 0.5)},
    ],
)
def test_collected_densities_are_those_of_training(kind: str, fields: dict[str, Any]) -> None:
    """The ratio of the first gradient step is 1: a rollout's log-probabilities are evaluate's."""
    policy, obs = make(kind=kind, units=8, **fields) if kind == "mlp" else None, states(40)
    if policy is None:
        made = make_policy(PolicyConfig(kind="lstm", units=8, **fields), SPEC, Key(2))
        assert isinstance(made, ActorCritic)
        policy = made
    noise = torch.from_numpy(policy.noise(Key(5).generator(), 1, 40))[0]
    state = {n: torch.from_numpy(x) for n, x in policy.initial_state(40).items()}
    taken = policy.act(obs, state, noise)
    known = policy.log_probs(noise)
    collected = taken.log_probs if known is None else known
    features = {name: x.unsqueeze(1) for name, x in policy.prepare(obs).items()}
    memory = None
    if state:
        from etude.models.actor_critic import Memory

        memory = Memory(state, torch.zeros(40, 1, dtype=torch.bool))
    evaluated = policy.evaluate(features, taken.actions.unsqueeze(1), memory)
    torch.testing.assert_close(evaluated.log_probs[:, 0], collected, rtol=1e-3, atol=2e-3)
    if fields.get("squash"):
        assert float(taken.actions.abs().max()) < 1.0


def test_a_spread_of_the_state_is_learned_and_starts_at_init_std() -> None:
    policy = make_policy(PolicyConfig(std="state", init_std=0.4), SPEC, Key(0))
    assert isinstance(policy, ActorCritic)
    features = policy.prepare(states(50))
    assert policy.mean_std(features, None) == pytest.approx(0.4, rel=0.02)
    evaluated = policy.evaluate(features, torch.zeros(50, 2), None)
    assert evaluated.entropy.shape == (50,)
    assert policy.actor.weight2.shape[0] == 4


def test_a_bounded_spread_stays_within_its_bounds() -> None:
    policy = make(std="state", std_range=(0.2, 0.5))
    outputs = policy.actor(policy.prepare(states(200))["actor"])
    log_std = policy._distribution(outputs, {}).log_std.detach()
    assert float(log_std.exp().min()) == pytest.approx(0.2)
    assert float(log_std.exp().max()) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="smaller first"):
        PolicyConfig(std_range=(2.0, 1.0))


def test_the_squashed_density_integrates_to_one() -> None:
    edges = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    middle = ((edges[1:] + edges[:-1]) / 2)[:, None]
    mean, log_std = torch.tensor([0.3]).double(), torch.tensor([math.log(0.5)]).double()
    density = SquashedGaussian(mean.expand(len(middle), 1), log_std).log_prob(middle).exp()
    assert float(density.sum() * (edges[1] - edges[0])) == pytest.approx(1.0, abs=1e-4)


def test_a_masked_choice_is_never_taken_and_has_no_gradient() -> None:
    spec = EnvSpec(
        {"state": ArraySpec((3,)), "allowed": ArraySpec((6,), "uint8")},
        ActionSpec("multi_discrete", sizes=(2, 4)),
        10,
    )
    policy = make_policy(PolicyConfig(hidden=(8,), action_mask="allowed"), spec, Key(0))
    assert isinstance(policy, ActorCritic)
    assert set(policy.actor_observations) == {"state", "allowed"}
    mask = torch.tensor([[0, 1, 1, 0, 1, 0]] * 500, dtype=torch.uint8)
    obs = {**states(500), "allowed": mask}
    noise = torch.from_numpy(policy.noise(Key(1).generator(), 1, 500))[0]
    actions = policy.act(obs, {}, noise).actions
    assert set(actions[:, 0].tolist()) == {1}
    assert set(actions[:, 1].tolist()) == {0, 2}
    evaluated = policy.evaluate(policy.prepare(obs), actions, None)
    assert bool(evaluated.entropy.isfinite().all())
    assert float(evaluated.entropy.max().detach()) <= math.log(2) + 1e-6
    (evaluated.log_probs.sum() + evaluated.entropy.sum()).backward()
    last = policy.actor.bias1.grad
    assert last[[0, 3, 5]].tolist() == [0.0, 0.0, 0.0]
    assert bool((last[[2, 4]] != 0).all())
    with pytest.raises(UsageError, match=r"each of the 6 choices.*is not there"):
        make_policy(PolicyConfig(action_mask="mask"), spec, None)
    with pytest.raises(UsageError, match="discrete actions"):
        make_policy(PolicyConfig(action_mask="state"), SPEC, None)


def test_layer_norm_before_the_activation() -> None:
    network = Mlp((3, 8, 8, 2), "elu", 1.0, make_generator(Key(0)), layer_norm=True)
    x = states(6)["state"]
    for i in range(2):
        x = torch.nn.functional.linear(
            x, network.get_parameter(f"weight{i}"), network.get_parameter(f"bias{i}")
        )
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        x = torch.nn.functional.elu((x - mean) / (variance + 1e-5).sqrt())
    expected = torch.nn.functional.linear(
        x, network.get_parameter("weight2"), network.get_parameter("bias2")
    )
    torch.testing.assert_close(network(states(6)["state"]), expected)


@pytest.mark.parametrize("kind", ["mlp", "squashed"])
def test_the_critic_may_have_other_layers_and_a_norm_of_its_own(kind: str) -> None:
    config = PolicyConfig(kind=kind, hidden=(8,), critic_hidden=(16, 4), layer_norm="critic")
    policy = make_policy(config, SPEC, Key(0))
    is_actor = isinstance(policy, Actor)
    critic: Any = policy.make_critics(None) if is_actor else policy.critic
    # Critics have weights [networks, inputs, outputs], other networks [outputs, inputs].
    weights = [p for name, p in critic.named_parameters() if name.startswith("weight")]
    assert [w.shape[-1] if is_actor else len(w) for w in weights] == [16, 4, 1]
    norms = [name for name, _ in policy.actor.named_parameters() if "norm" in name]  # type: ignore[union-attr]
    assert not norms
    assert "norm_weight1" in dict(critic.named_parameters())
    layers = PolicyConfig(kind=kind, layer_norm="all")
    actor = make_policy(layers, SPEC, Key(0)).actor
    assert "norm_weight0" in dict(actor.named_parameters())  # type: ignore[union-attr]


def test_an_adaptive_learning_rate_by_hand() -> None:
    rate = AdaptiveRate(1e-3, 0.01)
    assert rate.after(0.015) == 1e-3
    assert rate.after(0.021) == pytest.approx(1e-3 / 1.5)
    assert rate.after(0.004) == pytest.approx(1e-3)
    assert [rate.after(0.0) for _ in range(20)][-1] == 1e-2
    assert [rate.after(1.0) for _ in range(40)][-1] == 1e-5
    again = AdaptiveRate(1e-3, 0.01)
    again.load_state_dict(rate.state_dict())
    assert again.rate == 1e-5
    assert AdaptiveRate(1e-3, None).state_dict() == {}
