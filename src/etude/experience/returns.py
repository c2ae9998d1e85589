"""Advantages and returns along each row of a fragment."""

from __future__ import annotations

import torch


def generalised_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """GAE, [rows, steps], every row on its own.

    `next_values` [rows, steps] is V of the observation each step led to, *before* any reset:
    on a truncated step V(final observation), elsewhere V of the next step's observation. A
    termination makes the future worth nothing; either end cuts the lambda trace.
    """
    alive = (~terminated).to(rewards.dtype)
    going = (~(terminated | truncated)).to(rewards.dtype)
    deltas = rewards + gamma * next_values * alive - values
    decay = gamma * lam * going
    # Time-major copies: one contiguous column per step of the scan instead of a strided one.
    deltas, decay = deltas.t().contiguous(), decay.t().contiguous()
    advantages = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for step in range(deltas.shape[0] - 1, -1, -1):
        running = torch.addcmul(deltas[step], decay[step], running, out=advantages[step])
    return advantages.t()


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


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns), of the same samples; 0 where returns are equal."""
    total = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / total if total > 0 else 0.0
