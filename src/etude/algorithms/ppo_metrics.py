"""What PPO logs, and when its metrics are a warning."""

from __future__ import annotations

from etude.metrics.declared import Column, Curve, Metric, Metrics

METRICS: Metrics = (
    Metric(
        "train/approx_kl",
        "kl",
        ".4f",
        Column(20, 8),
        Curve(61, "magenta", (0, None), "KL"),
        check="etude.algorithms.ppo_health:kl_high",
    ),
    Metric("train/clip_fraction", "clip", ".0%", Column(21, 7)),
    Metric("train/value_loss", "value loss", curve=Curve(63, "cyan", (0, None))),
    Metric(
        "train/std",
        "std",
        ".2f",
        Column(23, 6),
        Curve(64, "yellow", (0, None)),
        check="etude.algorithms.ppo_health:entropy_collapsed",
        reduce="last",
        explored_by="policy.init_std, algorithm.entropy_coef",
    ),
    Metric(
        "train/explained_variance",
        "explained",
        ".2f",
        Column(22, 10),
        Curve(62, "cyan", (-1, 1), "explained var."),
        check="etude.algorithms.ppo_health:value_blind",
    ),
)
