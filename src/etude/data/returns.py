"""Advantages along each environment's steps, and how well values explain returns."""

from __future__ import annotations

from collections.abc import Callable

import torch

from etude.core.contracts import Array, Fragment, Observations
from etude.core.ranks import Ranks
from etude.core.trees import Tree

ValueOf = Callable[[Observations, Observations], torch.Tensor]
"""Maps observations {name: [k, ...]} and recurrent states to values [k]."""


def rollout_advantages(
    rollout: Fragment,
    rewards: Array,
    values: torch.Tensor,
    value_of: ValueOf,
    gamma: float,
    lam: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and value targets of a rollout, see `advantages_and_targets`.

    rewards: [num_envs, steps] to learn from; values: [num_envs, steps] of `rollout.obs`.
    """
    device = values.device
    return advantages_and_targets(
        torch.from_numpy(rewards).to(device),
        values,
        values_after(rollout, values, value_of),
        torch.from_numpy(rollout.terminated).to(device),
        torch.from_numpy(rollout.truncated).to(device),
        gamma,
        lam,
        weights,
    )


def values_after(rollout: Fragment, values: torch.Tensor, value_of: ValueOf) -> torch.Tensor:
    """[num_envs, steps]: the values of next observations of a rollout."""
    finals = rollout.finals
    at = (torch.from_numpy(x).to(values.device) for x in (finals.envs, finals.steps))
    last = value_of(rollout.last_obs, rollout.last_state)
    return next_values(values, last, value_of(finals.obs, finals.state), *at)


def advantages_and_targets(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    lam: float,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and value targets, [num_envs, steps] each: GAE, or with `weights` V-trace.

    `next_values` [num_envs, steps] is V of the next observation, *before* any reset: V(final
    observation) at truncated steps, V of the next step's observation elsewhere. A termination makes
    the value of the future 0; both ends of episodes stop the lambda trace.

    `weights` [num_envs, steps] are importance weights, at most 1, of the actions (see
    `importance_weights`). They enter the value targets and the terms of an advantage from later
    steps, but not the step's own term: the policy loss multiplies the advantage by its weight.
    If all weights are 1, the result is GAE.
    """
    # In place, since each further array takes time at half a million steps.
    alive, going = _numbers(~terminated, values), _numbers(~(terminated | truncated), values)
    deltas = (gamma * next_values).mul_(alive).add_(rewards).sub_(values)
    decay = going.mul_(gamma * lam)
    corrected = torch.zeros_like(deltas[:, 0])
    # Backwards; each TD error is replaced by its advantage.
    for step in reversed(range(deltas.shape[1])):
        advantage = deltas[:, step].addcmul_(decay[:, step], corrected)
        corrected = advantage if weights is None else advantage * weights[:, step]
    advantages = deltas
    return advantages, values + (advantages if weights is None else advantages * weights)


def importance_weights(log_probs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Probability ratios of actions under two policies, truncated at 1, [...].

    log_probs: [...] under the policy that learns; behaviour: [...] under the one that acted.
    """
    return (log_probs - behaviour).exp_().clamp_(max=1.0)


def _numbers(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """1 where the mask is true, else 0; converted from bytes, which is faster than from bools."""
    return mask.view(torch.uint8).to(like.dtype)


def next_values(
    values: torch.Tensor,
    last_values: torch.Tensor,
    final_values: torch.Tensor,
    final_envs: torch.Tensor,
    final_steps: torch.Tensor,
) -> torch.Tensor:
    """[num_envs, steps]: values of the next observations.

    values [num_envs, steps] of the observations, last_values [num_envs] of the observation
    after the last step, final_values [k] of the last observations of episodes, at
    (final_envs [k], final_steps [k]).
    """
    following = torch.cat([values[:, 1:], last_values.unsqueeze(1)], dim=1)
    following[final_envs, final_steps] = final_values
    return following


def td_targets(
    rewards: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    discount: float | torch.Tensor,
) -> torch.Tensor:
    """TD targets [n] of Q: reward + discount * next value, without the latter after a termination.

    A truncated step has a next value. discount: gamma, or [n]: gamma^k for sums of rewards over k
    steps.
    """
    return rewards + discount * next_values * ~terminated


def mean_and_spread(parts: list[torch.Tensor], ranks: Ranks) -> tuple[int, float, float]:
    """Count (at least 1), mean and standard deviation of all numbers in the shards' x [k] of all
    ranks; sums in float64, in shard order."""
    parts = [x.double() for x in parts]
    sums = ranks.gather([(len(x), float(x.sum())) for x in parts])
    count = max(sum(number for number, _ in sums), 1)
    mean = sum(total for _, total in sums) / count
    squares = ranks.gather([float(x.sub_(mean).square_().sum()) for x in parts])
    return count, mean, float((sum(squares) / count) ** 0.5)


def moments_of(x: torch.Tensor) -> Tree:
    """Moments {"count", "mean", "m2"} of all numbers in x, with sums in float64."""
    x = x.double()
    mean = float(x.sum()) / max(x.numel(), 1)
    return {"count": float(x.numel()), "mean": mean, "m2": float((x - mean).square_().sum())}


def explained_variance(errors: Tree, returns: Tree) -> float:
    """1 - Var(returns - values) / Var(returns), from moments; 0 if all returns are equal."""
    total = float(returns["m2"])
    return 1.0 - float(errors["m2"]) / total if total > 0 else 0.0
