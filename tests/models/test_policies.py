"""Policies: what they read, what they answer, and that a contract rebuilds them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.actor_critic import ActorCritic
from etude.models.networks import DiagonalGaussian
from etude.models.policies import PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.rl.base import Adam, FlatParameters
from etude.rollout.group import moments
from toy_envs import ACTIONS, BOX, ToyEnv

TWO = EnvSpec({"state": ArraySpec((3,)), "critic": ArraySpec((2,))}, BOX, 10)


def batch(policy: ActorCritic, rows: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(rows, *spec.shape, generator=generator) * 5
        for name, spec in policy.observations.items()
    }


def values(policy: ActorCritic, obs: dict[str, torch.Tensor]) -> torch.Tensor:
    return policy.values(policy.prepare(obs), None)


@pytest.mark.parametrize("kind", ACTIONS)
def test_act_and_evaluate_agree(kind: str) -> None:
    policy = make_policy(PolicyConfig(hidden=(16,)), ToyEnv(2, ACTIONS[kind]).spec, Key(0))
    obs = batch(policy)
    policy.absorb({"state": moments(np.random.default_rng(0).normal(2, 3, (4, 5, 4)))})
    noise = torch.from_numpy(policy.noise(Key(1).generator(), 3, 6))
    answer = policy.act(obs, {}, noise[1])
    judged = policy.evaluate(policy.prepare(obs), answer.actions, None)
    known = policy.log_probs(noise)
    assert (known is None) == (answer.log_probs is not None), "they are given once"
    given = answer.log_probs if known is None else known[1]
    torch.testing.assert_close(judged.log_probs, given)
    torch.testing.assert_close(judged.values, values(policy, obs))
    spec = policy.action.array
    assert answer.actions.shape == (6, *spec.shape)
    assert str(answer.actions.dtype) == f"torch.{spec.dtype}"
    assert judged.log_probs.shape == judged.values.shape == (6,)


def test_log_probs_of_a_rollout_are_those_of_its_steps_to_the_bit() -> None:
    policy = make_policy(PolicyConfig(init_std=0.3), ToyEnv(2, BOX).spec, Key(0))
    noise = torch.from_numpy(policy.noise(Key(1).generator(), 16, 6))
    with torch.inference_mode():
        together = policy.log_probs(noise)
        steps = [DiagonalGaussian(torch.ones(6, 1), policy.log_std).sample(z)[1] for z in noise]
    assert together is not None
    assert torch.equal(together, torch.stack(steps))


def test_a_std_that_is_not_learned_stays_where_it_is() -> None:
    for learned in (True, False):
        config = PolicyConfig(hidden=(8,), init_std=0.3, learn_std=learned)
        policy = make_policy(config, ToyEnv(2, BOX).spec, Key(0))
        flat = FlatParameters(policy)
        optimizer, obs = Adam(flat.data, flat.grad, 1e-5), batch(policy)
        judged = policy.evaluate(policy.prepare(obs), torch.ones(6, *BOX.array.shape), None)
        (-judged.log_probs.mean()).backward()
        optimizer.step(0.1)
        kept = policy.log_std == torch.full_like(policy.log_std, np.log(0.3))
        assert bool(kept.all()) != learned
        assert flat.grad.abs().sum() > 0
        assert "log_std" in policy.state_dict()


def test_without_noise_the_most_likely_action() -> None:
    policy = make_policy(PolicyConfig(), ToyEnv(2, ACTIONS["discrete"]).spec, Key(0))
    obs = batch(policy)
    best = policy.act(obs, {}, None).log_probs
    for choice in range(3):
        judged = policy.evaluate(policy.prepare(obs), torch.full((6, 1), choice), None)
        assert (best >= judged.log_probs - 1e-6).all()


def test_actor_and_critic_read_what_they_are_told() -> None:
    config = PolicyConfig(actor_reads=("state",), critic_reads=("state", "critic"))
    policy = make_policy(config, TWO, Key(0))
    obs = batch(policy)
    other = {**obs, "critic": obs["critic"] + 1.0}
    assert torch.equal(policy.act(obs, {}, None).actions, policy.act(other, {}, None).actions)
    assert not torch.equal(values(policy, obs), values(policy, other))
    features = policy.prepare(obs)
    assert features["actor"].shape[-1] == 3
    assert features["critic"].shape[-1] == 5


def test_normalisers_change_what_is_read() -> None:
    policy = make_policy(PolicyConfig(), TWO, Key(0))
    obs = batch(policy)
    before = values(policy, obs)
    policy.absorb({"state": moments(np.random.default_rng(0).normal(5, 2, (4, 5, 3)))})
    assert not torch.equal(values(policy, obs), before)


@pytest.mark.parametrize("kind", ACTIONS)
def test_a_contract_and_its_arrays_rebuild_the_policy(kind: str) -> None:
    policy = make_policy(PolicyConfig(hidden=(8, 8)), ToyEnv(2, ACTIONS[kind]).spec, Key(3))
    policy.absorb({"state": moments(np.random.default_rng(1).normal(2, 3, (4, 5, 4)))})
    contract = json.loads(json.dumps(policy.contract()))
    arrays = {name: tensor.numpy().copy() for name, tensor in policy.state_dict().items()}
    again = policy_from_contract(contract, arrays)
    obs = batch(policy)
    assert torch.equal(again.act(obs, {}, None).actions, policy.act(obs, {}, None).actions)
    assert torch.equal(values(again, obs), values(policy, obs))
    with pytest.raises(UsageError, match="format"):
        policy_from_contract({**contract, "format": 99}, arrays)


def test_initial_weights_depend_on_the_key_alone() -> None:
    states = [make_policy(PolicyConfig(), TWO, Key(seed)).state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    std = make_policy(PolicyConfig(init_std=0.3), TWO, Key(0)).log_std.detach().exp()
    torch.testing.assert_close(std, torch.full((2,), 0.3))


def test_an_observation_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'camera'.*critic, state"):
        make_policy(PolicyConfig(actor_reads=("camera",)), TWO, None)


def test_box_actions_are_clipped_and_scaled() -> None:
    spec = ActionSpec("box", low=(-2.0, 0.0), high=(2.0, 1.0))
    given = np.array([[-1, -1], [1, 1], [0, 0], [9, -9]], np.float32)
    assert spec.to_env(given).tolist() == [[-2, 0], [2, 1], [0, 0.5], [2, 0]]
    assert spec.to_env(given).dtype == np.float32
    chosen = np.array([[2], [0]])
    assert ACTIONS["discrete"].to_env(chosen).tolist() == [2, 0]
    assert ACTIONS["multi_discrete"].to_env(np.array([[1, 3]])).tolist() == [[1, 3]]


@given(
    st.floats(-1e3, 1e3, width=32),
    st.floats(2**-6, 1e3, width=32),
    st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=5),
)
def test_scaled_actions_stay_in_their_box(low: float, width: float, actions: list[float]) -> None:
    """Gymnasium's spaces refuse what is outside by one rounding."""
    high = float(np.float32(low) + np.float32(width))
    spec = ActionSpec("box", low=(low,), high=(high,))
    out = spec.to_env(np.array([*actions, -1.0, 1.0], np.float32)[:, None])
    assert (out >= np.float32(low)).all()
    assert (out <= np.float32(high)).all()
