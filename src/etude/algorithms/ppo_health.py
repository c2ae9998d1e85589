"""When the metrics of PPO are a warning."""

from __future__ import annotations

from statistics import fmean, median

from etude.metrics.declared import RECENT, Warning
from etude.metrics.health import Health, fares_well


def kl_high(health: Health) -> Warning | None:
    values = health.recent("train/approx_kl")
    if not values or min(values) < 0.06 or fares_well(health):
        return None
    return Warning(
        "KL too high",
        f"the policy moves by {values[-1]:.3f} in KL per update: lower algorithm.learning_rate or "
        "algorithm.update_epochs, or set algorithm.target_kl",
    )


def entropy_collapsed(health: Health) -> Warning | None:
    """Without a success rate nobody knows whether the task was learned before."""
    std, success = health.series("train/std"), health.recent("rollout/success_rate")
    if not std or not success or std[-1] > 0.1 * std[0] or fmean(success) > 0.8:
        return None
    return Warning(
        "entropy collapsed",
        f"the action spread fell from {std[0]:.2f} to {std[-1]:.3f} before the task was "
        "learned: raise algorithm.entropy_coef",
    )


def value_blind(health: Health) -> Warning | None:
    """Values are wrong only where there is something to explain: once all returns are about the
    same, the explained share of their variance is low, and so is the value loss."""
    rows = health.rows[-max(RECENT, len(health.rows) // 4) :]
    explained = health.series("train/explained_variance", rows)
    losses = health.series("train/value_loss")
    if health.progress < 0.4 or len(explained) < RECENT or fmean(explained) > 0.25:
        return None
    small = losses and median(health.series("train/value_loss", rows)) < 0.3 * max(losses)
    if small or fares_well(health):
        return None
    return Warning(
        "value function explains nothing",
        f"explained variance is {fmean(explained):.2f}: check algorithm.value_coef and the "
        "reward's scale, give the critic more observations, or lower algorithm.gamma",
    )
