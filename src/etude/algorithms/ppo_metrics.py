"""What PPO logs, and when its metrics are a warning."""

from __future__ import annotations

from statistics import fmean

from etude.metrics.declared import RECENT, Column, Curve, Health, Metric, Metrics, Warning


def _fares_well(health: Health) -> bool:
    """Nearly all episodes succeed, or the return is the highest so far."""
    success, returns = (health.recent(f"rollout/{n}") for n in ("success_rate", "ep_rew_mean"))
    before = health.series("rollout/ep_rew_mean", health.rows[:-RECENT])
    rises = bool(returns and before) and fmean(returns) > max(before)
    return rises or (bool(success) and fmean(success) > 0.8)


def _kl_high(health: Health) -> Warning | None:
    values = health.recent("train/approx_kl")
    if not values or min(values) < 0.06 or _fares_well(health):
        return None
    return Warning(
        "KL too high",
        f"the policy moves by {values[-1]:.3f} in KL per update: lower algorithm.learning_rate or "
        "algorithm.update_epochs, or set algorithm.target_kl",
    )


def _entropy_collapsed(health: Health) -> Warning | None:
    std, success = health.series("train/std"), health.recent("rollout/success_rate")
    if not std or std[-1] > 0.1 * std[0] or (success and fmean(success) > 0.8):
        return None
    return Warning(
        "entropy collapsed",
        f"the action spread fell from {std[0]:.2f} to {std[-1]:.3f} before the task was "
        "learned: raise algorithm.entropy_coef",
    )


def _value_blind(health: Health) -> Warning | None:
    values = health.recent("train/explained_variance")
    if health.progress < 0.2 or not values or max(values) > 0.1:
        return None
    return Warning(
        "value function explains nothing",
        f"explained variance is {values[-1]:.2f}: check the reward's scale, give the critic more "
        "observations, or lower algorithm.gamma",
    )


METRICS: Metrics = (
    Metric(
        "train/approx_kl",
        "kl",
        ".4f",
        Column(20, 8),
        Curve(61, "magenta", (0, None), "KL"),
        check=_kl_high,
    ),
    Metric("train/clip_fraction", "clip", ".0%", Column(21, 7)),
    Metric(
        "train/std",
        "std",
        ".2f",
        Column(23, 6),
        check=_entropy_collapsed,
        reduce="last",
        explored_by="policy.init_std, algorithm.entropy_coef",
    ),
    Metric(
        "train/explained_variance",
        "explained",
        ".2f",
        Column(22, 10),
        Curve(62, "cyan", (0, 1), "explained var."),
        check=_value_blind,
    ),
)
