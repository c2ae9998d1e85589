"""Sentences of tasks and their vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etude.core.errors import UsageError

TASK = "task"
"""The name of the observation with the vector."""
_MAX_QUOTED = 12


def vector_of(
    sentence: str, known: Mapping[str, Sequence[float]], where: object
) -> tuple[float, ...]:
    """The vector of a sentence; an unknown one is refused with a list of the known ones."""
    if sentence not in known:
        there = quoted(sorted(known)) if known else "it has none"
        raise UsageError(f"The sentence '{sentence}' is unknown to {where}: {there}.")
    return tuple(known[sentence])


def quoted(sentences: Sequence[str]) -> str:
    """Sentences in quotes, at most 12 of them."""
    named = ", ".join(f"'{sentence}'" for sentence in sentences[:_MAX_QUOTED])
    more = len(sentences) - _MAX_QUOTED
    return f"{named} and {more:,} more" if more > 0 else named
