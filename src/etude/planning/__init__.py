"""The recipe, its resolved form, and the plan of a run."""

FREE = (
    "name",
    "collector.kind",
    "collector.threads",
    "collector.actors",
    "collector.address",
    "collector.deadline",
    "collector.allow_inexact",
    "collector.engine_threads",
    "evaluation.final_episodes",
    "evaluation.final_video",
    "evaluation.film_every",
    "learner.timeout",
    "learner.compare_every",
    "checkpoint",
    "logs",
)
"""Fields and sections that do not change results: a resume may change them."""


def among(name: str, fields: tuple[str, ...]) -> bool:
    """Whether a field is one of `fields`, or in a section that is."""
    return any(name == field or name.startswith(f"{field}.") for field in fields)
