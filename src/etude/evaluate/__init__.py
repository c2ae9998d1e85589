"""Evaluations of policies and rewards, films, and policies that act."""

EPISODES = "episodes.csv"
"""The table of an evaluation's episodes."""
OFFLINE = {
    "held-out": "etude.evaluate.offline:examine_policy",
    "rewards": "etude.evaluate.offline:examine_reward",
}
"""Evaluations of runs without an environment, by `AlgorithmConfig.offline_evaluation`."""
