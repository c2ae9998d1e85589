"""Evaluations of policies and rewards, films, and policies that act."""

OFFLINE = {
    "held-out": "etude.evaluate.offline:examine",
    "rewards": "etude.evaluate.rewards:examine",
}
"""Evaluations of runs without an environment, by `AlgorithmConfig.offline_evaluation`."""
