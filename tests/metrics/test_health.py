"""What rows of metrics say about a run, in the words of its own algorithm."""

from __future__ import annotations

import pytest

from etude.metrics.health import Health


@pytest.mark.parametrize(
    ("own", "fields"),
    [
        ({"train/approx_kl": 0.01, "train/std": 0.5}, "policy.init_std, algorithm.entropy_coef"),
        ({"train/critic_loss": 1.0, "train/ent_coef": 0.1}, "algorithm.target_entropy"),
        ({"train/critic_loss": 1.0}, "(algorithm.exploration, algorithm.warmup_steps)"),
    ],
)
def test_a_hint_names_fields_the_algorithm_has(own: dict[str, float], fields: str) -> None:
    health = Health(30)
    for i in range(1, 31):
        health.add({"iterations": i, "rollout/success_rate": 0.3, **own})
    (warning,) = health.warnings
    assert warning.name == "success stuck"
    assert fields in warning.text
