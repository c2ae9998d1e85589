"""PPO with a memory: what trains is what acted, along every row and across every reset.

Everything expected here comes from a policy written again, one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from etude.core.contracts import Array, Fragment
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.policies import PolicyConfig
from etude.models.recurrent import CORES
from toy_envs import ACTIONS
from toys import Trainer, make_trainer

KINDS = tuple(CORES)
State = dict[str, torch.Tensor]


def recurrent(kind: str, **options: object) -> Trainer:
    """A rollout of four segments of 4 steps a row; episodes last 1 to 6 steps."""
    policy = PolicyConfig.model_validate({"kind": kind, "hidden": (8,), "units": 6})
    trainer = make_trainer(policy=policy, **{"horizon": 4, "learning_rate": 0.01, **options})
    with torch.no_grad():  # Away from special values: the memory must show in actions and values.
        for i, p in enumerate(trainer.ppo.policy.parameters()):
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return trainer


def cell(policy: ActorCritic, x: torch.Tensor, state: State) -> State:
    """One step of LSTM or GRU from its equations."""
    p = dict(policy.named_parameters())
    x = torch.tanh(x @ p["encoder.weight0"].T + p["encoder.bias0"])
    given = x @ p["core.weight_ih"].T + p["core.bias_ih"]
    own = state["h"] @ p["core.weight_hh"].T + p["core.bias_hh"]
    if "c" in state:
        i, f, g, o = (given + own).chunk(4, dim=1)
        c = f.sigmoid() * state["c"] + i.sigmoid() * g.tanh()
        return {"h": o.sigmoid() * c.tanh(), "c": c}
    (r, z, new), (r_own, z_own, new_own) = given.chunk(3, dim=1), own.chunk(3, dim=1)
    z = (z + z_own).sigmoid()
    return {"h": (1 - z) * (new + (r + r_own).sigmoid() * new_own).tanh() + z * state["h"]}


def head(policy: ActorCritic, name: str, state: State) -> torch.Tensor:
    p = dict(policy.named_parameters())
    return state["h"] @ p[f"{name}.weight0"].T + p[f"{name}.bias0"]


def worst_log_ratio(trainer: Trainer) -> float:
    """Of the first minibatch, as the loss sees it: from the segments' own memory."""
    worst, ppo = 0.0, trainer.ppo
    for shard, chosen in zip(ppo.shards, trainer.first_order(), strict=True):
        order = chosen.segments
        assert shard.memory is not None
        features = {name: x[order] for name, x in shard.features.items()}
        judged = ppo.policy.evaluate(features, shard.actions[order], shard.memory.at(order))
        worst = max(worst, float((judged.log_probs - shard.log_probs[order]).abs().max().detach()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("action", "shards", "horizon"),
    [("box", 1, 4), ("box", 2, 4), ("box", 2, 16), ("discrete", 1, 16), ("multi_discrete", 2, 8)],
)
def test_the_ratio_is_one_on_the_first_minibatch(
    kind: str, action: str, shards: int, horizon: int
) -> None:
    trainer = recurrent(kind, shards=shards, action=ACTIONS[action], horizon=horizon, minibatch=128)
    ppo = trainer.ppo
    for _ in range(3):  # From the second iteration on a row's first state is not zero.
        trainer.ingest()
        assert all(shard.memory is not None for shard in ppo.shards)
        starts = torch.cat([s.memory.starts for s in ppo.shards if s.memory is not None])
        assert int(starts.sum()) > 10
        assert worst_log_ratio(trainer) <= 1e-5
        batches = trainer.update()
        assert batches[0].values["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
        assert batches[0].values["train/clip_fraction"] == 0.0
        assert worst_log_ratio(trainer) > 1e-4
        ppo.end_iteration()
        trainer.clock.advance(1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_starts_both_matter(kind: str) -> None:
    """The mistakes others made are far outside the tolerance above."""
    trainer = recurrent(kind, minibatch=128)
    trainer.iterate()
    trainer.ingest()
    shard = trainer.ppo.shards[0]
    assert shard.memory is not None
    state, starts = shard.memory
    wrong = [
        Memory(state, torch.zeros_like(starts)),
        Memory({name: torch.zeros_like(x) for name, x in state.items()}, starts),
        Memory({name: x.roll(1, 0) for name, x in state.items()}, starts),
    ]
    assert worst_log_ratio(trainer) <= 1e-5
    for memory in wrong:
        shard.memory = memory
        assert worst_log_ratio(trainer) > 1e-2


def finals_of(fragments: list[Fragment]) -> dict[tuple[int, int], Array]:
    """{(row, step): observation} that episodes ended on."""
    return {
        (g * len(f.rewards) + int(row), int(step)): f.finals.obs["state"][k]
        for g, f in enumerate(fragments)
        for k, (row, step) in enumerate(zip(f.finals.envs, f.finals.steps, strict=True))
    }


class Walk:
    """The policy followed along all rows of the buffer, step by step."""

    def __init__(self, trainer: Trainer) -> None:
        self.arrays: dict[str, Array] = trainer.ppo.buffers[0].arrays
        self.policy = trainer.ppo.policy
        self.rows, self.steps = self.arrays["rewards"].shape
        self.done = self.arrays["terminated"] | self.arrays["truncated"]

    def _cell(self, obs: Array, state: State) -> State:
        features = self.policy.prepare({"state": torch.from_numpy(obs)})["actor"]
        return cell(self.policy, features, state)

    def __call__(self, finals: dict[tuple[int, int], Array]) -> Iterator[tuple[Array, Array]]:
        """Per step (values [rows], values of what it led to [rows])."""
        state = {
            name.removeprefix("state/"): torch.from_numpy(array[:, 0])
            for name, array in self.arrays.items()
            if name.startswith("state/")
        }
        for t in range(self.steps):
            state = self._cell(self.arrays["obs/state"][:, t], state)
            values = head(self.policy, "critic", state)[:, 0].numpy()
            ending = {name: x.clone() for name, x in state.items()}
            over = torch.from_numpy(self.done[:, t])[:, None]
            state = {name: x.masked_fill(over, 0.0) for name, x in state.items()}
            last = t == self.steps - 1
            seen = self.arrays["last_obs/state"] if last else self.arrays["obs/state"][:, t + 1]
            after = head(self.policy, "critic", self._cell(seen, state))[:, 0].numpy().copy()
            for row in np.flatnonzero(self.done[:, t]):
                own = {name: x[row : row + 1] for name, x in ending.items()}
                met = self._cell(finals[int(row), t][None], own)
                after[row] = float(head(self.policy, "critic", met))
            yield values, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 2])
def test_values_at_every_end_are_met_with_the_state_of_the_row(kind: str, shards: int) -> None:
    """Advantages by an O(T^2) sum over values that were worked out along each row."""
    trainer = recurrent(kind, shards=shards, normalise_rewards=False)
    trainer.iterate()
    fragments = trainer.collect()
    ppo, walk = trainer.ppo, Walk(trainer)
    ppo.ingest(fragments, trainer.clock)
    assert walk.arrays["truncated"].sum() > 5
    assert not walk.done[:, -1].all()
    with torch.no_grad():
        values, after = (np.stack(x, 1) for x in zip(*walk(finals_of(fragments)), strict=True))
    after = np.where(walk.arrays["terminated"], 0.0, after)
    deltas = walk.arrays["rewards"] + ppo.config.gamma * after - values
    decay, expected = ppo.config.gamma * ppo.config.gae_lambda, np.zeros_like(deltas)
    for row in range(walk.rows):
        for t in range(walk.steps):
            ends = np.flatnonzero(walk.done[row, t:])
            stop = t + int(ends[0]) + 1 if len(ends) else walk.steps
            expected[row, t] = sum(decay ** (k - t) * deltas[row, k] for k in range(t, stop))
    found = torch.cat([shard.values for shard in ppo.shards]).reshape(walk.rows, walk.steps)
    np.testing.assert_allclose(found, values, atol=1e-5)
    returns = torch.cat([shard.returns for shard in ppo.shards]).reshape(walk.rows, walk.steps)
    np.testing.assert_allclose(returns - found, expected, rtol=1e-4, atol=1e-4)


def loss_by_hand(trainer: Trainer, s: int, order: torch.Tensor) -> torch.Tensor:
    """PPO's loss on some segments, each followed from its own state through its own resets."""
    ppo, shard = trainer.ppo, trainer.ppo.shards[s]
    config, policy = ppo.config, ppo.policy
    assert shard.memory is not None
    state = {name: x[order] for name, x in shard.memory.state.items()}
    x, starts = shard.features["actor"][order], shard.memory.starts[order]
    outputs, values = [], []
    for t in range(x.shape[1]):
        keep = (~starts[:, t : t + 1]).float()
        state = cell(policy, x[:, t], {name: s * keep for name, s in state.items()})
        outputs.append(head(policy, "actor", state))
        values.append(head(policy, "critic", state)[:, 0])
    mean, value = torch.stack(outputs, 1), torch.stack(values, 1)
    normal = torch.distributions.Normal(mean, policy.log_std.exp())
    ratio = (normal.log_prob(shard.actions[order]).sum(-1) - shard.log_probs[order]).exp()
    a, low, high = shard.advantages[order], 1 - config.clip, 1 + config.clip
    gain = torch.where(a >= 0, ratio.clamp(max=high), ratio.clamp(min=low)) * a
    value_loss = (value - shard.returns[order]).square().mean() / 2
    entropy = normal.entropy().sum(-1).mean()
    return -gain.mean() + config.value_coef * value_loss - config.entropy_coef * entropy


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 2])
def test_the_gradient_by_hand(kind: str, shards: int) -> None:
    trainer = recurrent(kind, shards=shards, minibatch=64, entropy_coef=0.1)
    ppo = trainer.ppo
    trainer.iterate()
    trainer.ingest()
    trainer.update()  # Ratios have moved, some beyond the clip.
    chosen = trainer.first_order()
    loss, metrics = ppo._gradient(chosen)
    assert metrics["train/clip_fraction"] > 0.02
    found = ppo.flat.grad.clone()
    parts = [loss_by_hand(trainer, s, some.segments) for s, some in enumerate(chosen)]
    expected = torch.stack(parts).mean()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4, abs=1e-6)
    ppo.flat.grad.zero_()
    expected.backward()
    assert float(found.norm()) > 0.01
    torch.testing.assert_close(found, ppo.flat.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_vtrace_of_what_was_just_collected_is_gae(kind: str) -> None:
    """Ratios of a memory's actions are 1 too, if it is the memory they were taken with."""
    advantages = []
    for way in ("gae", "vtrace"):
        trainer = recurrent(kind, advantages=way)
        trainer.iterate()
        trainer.ppo.load_policy(recurrent(kind).ppo.policy_parts()[0])
        trainer.ppo.is_stale = way == "vtrace"
        trainer.ingest()
        advantages.append(trainer.ppo.shards[0].advantages)
    torch.testing.assert_close(advantages[0], advantages[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_vtrace_weighs_what_an_older_policy_did(kind: str) -> None:
    """Weights move between rollout and ingest, as with a lag.

    With lambda 0 a value target is off by its step's weight times its delta, and a rollout of one
    segment is followed here as it is there: but for episodes' ends and the last step, whose
    observations were met with the older policy's state.
    """
    trainer = recurrent(
        kind, advantages="vtrace", gae_lambda=0.0, normalise_rewards=False, horizon=16
    )
    trainer.ppo.is_stale = True
    fragments = trainer.collect()
    collected = np.concatenate([f.log_probs for f in fragments])
    with torch.no_grad():
        trainer.ppo.flat.data.mul_(0.8)
    trainer.ppo.ingest(fragments, trainer.clock)
    shard, walk = trainer.ppo.shards[0], Walk(trainer)
    with torch.no_grad():
        values, after = (np.stack(x, 1) for x in zip(*walk(finals_of(fragments)), strict=True))
        judged = trainer.ppo.policy.evaluate(shard.features, shard.actions, shard.memory)
        ratios = np.exp(judged.log_probs.numpy() - collected)
    assert ratios.min() < 0.9
    assert ratios.max() > 1.1
    deltas = walk.arrays["rewards"] + trainer.ppo.config.gamma * after - values
    found, inside = (shard.returns - shard.values).numpy(), ~walk.done
    inside[:, -1] = False
    expected = np.minimum(ratios, 1.0) * deltas
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-3, atol=1e-4)
