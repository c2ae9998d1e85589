"""Advantages along each row of a fragment, and how well values explain returns."""

from __future__ import annotations

import torch

from etude.core.trees import Tree


def generalised_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    lam: float,
    ratios: torch.Tensor | None = None,
) -> torch.Tensor:
    """Advantages [rows, steps], every row on its own: GAE, or with `ratios` V-trace.

    `next_values` [rows, steps] is V of the observation each step led to, *before* any reset:
    on a truncated step V(final observation), elsewhere V of the next step's observation. A
    termination makes the future worth nothing; either end cuts the lambda trace.

    `ratios` [rows, steps] are the probabilities of the actions now over those they were taken
    with. Cut off at 1, they weigh what experience of an older policy says about this one; where
    they are 1 the result is GAE.
    """
    # In place: at half a million steps every array more is felt.
    alive, going = _numbers(~terminated, values), _numbers(~(terminated | truncated), values)
    deltas = (gamma * next_values).mul_(alive).add_(rewards).sub_(values)
    decay = going.mul_(gamma * lam)
    if ratios is not None:
        weight = ratios.clamp(max=1.0)
        deltas.mul_(weight)
        decay.mul_(weight)
    running = torch.zeros_like(deltas[:, 0])
    # Backwards, each delta becoming its advantage.
    for delta, kept in zip(reversed(deltas.unbind(1)), reversed(decay.unbind(1)), strict=True):
        running = delta.addcmul_(kept, running)
    return deltas


def _numbers(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """1 where the mask is true, else 0; by way of bytes, which convert far faster than bools."""
    return mask.view(torch.uint8).to(like.dtype)


def next_values(
    values: torch.Tensor,
    last_values: torch.Tensor,
    final_values: torch.Tensor,
    final_rows: torch.Tensor,
    final_steps: torch.Tensor,
) -> torch.Tensor:
    """[rows, steps]: V of what each step led to.

    values [rows, steps] of the observations acted on, last_values [rows] of the observation
    after the last step, final_values [k] of the observations episodes ended on, which stand at
    (final_rows [k], final_steps [k]).
    """
    following = torch.cat([values[:, 1:], last_values.unsqueeze(1)], dim=1)
    following[final_rows, final_steps] = final_values
    return following


def moments_of(x: torch.Tensor) -> Tree:
    """{"count", "mean", "m2"} of all numbers in x, as such moments are merged: sums in float64."""
    x = x.double()
    mean = float(x.sum()) / max(x.numel(), 1)
    return {"count": float(x.numel()), "mean": mean, "m2": float((x - mean).square_().sum())}


def explained_variance(errors: Tree, returns: Tree) -> float:
    """1 - Var(returns - values) / Var(returns), of their moments; 0 where returns are equal."""
    total = float(returns["m2"])
    return 1.0 - float(errors["m2"]) / total if total > 0 else 0.0
