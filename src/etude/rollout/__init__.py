"""Rollouts: groups of environments, and the collectors that step them."""

COLLECTORS = {
    "local": "etude.rollout.local:CollectorConfig",
    "ray": "etude.rollout.ray:RayCollectorConfig",
}
