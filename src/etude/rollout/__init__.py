"""Rollouts: groups of environments, and the collectors that step them."""

COLLECTORS = {
    "local": "etude.rollout.local:CollectorConfig",
    "ray": "etude.rollout.ray:RayCollectorConfig",
}
MOST_FAILURES = 3
"""After this number of errors of one group in an iteration, the group is the cause."""
