"""The recipe, what follows from it before anything is learned, and the plan."""

_PLACED = ("kind", "threads", "actors", "address", "deadline", "allow_inexact", "engine_threads")
FREE = (
    *("name", *(f"collector.{name}" for name in _PLACED)),
    *("evaluation.final_episodes", "evaluation.final_video"),
    *("learner.timeout", "learner.compare_every", "checkpoint", "logs"),
)
"""Fields and sections that change no result: each resume may have others."""
