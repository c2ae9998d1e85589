"""The recipe, its resolved form, and the plan of a run."""

_PLACED = ("kind", "threads", "actors", "address", "deadline", "allow_inexact", "engine_threads")
FREE = (
    *("name", *(f"collector.{name}" for name in _PLACED)),
    *("evaluation.final_episodes", "evaluation.final_video"),
    *("learner.timeout", "learner.compare_every", "checkpoint", "logs"),
)
"""Fields and sections that do not change results: a resume may change them."""
