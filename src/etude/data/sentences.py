"""Sentences of tasks, and the vectors that they are told by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from etude.core.errors import UsageError

TASK = "task"
"""The observation that holds the vector."""
_SHOWN = 12


def vector_of(
    sentence: str, known: Mapping[str, Sequence[float]], where: object
) -> tuple[float, ...]:
    """The vector of a sentence; one that is not known is refused with those that are."""
    if sentence not in known:
        there = shown(sorted(known)) if known else "it knows none"
        raise UsageError(f"The sentence '{sentence}' is unknown to {where}: {there}.")
    return tuple(known[sentence])


def shown(sentences: Sequence[str]) -> str:
    """Some sentences in quotes; of many the first ones."""
    named = ", ".join(f"'{sentence}'" for sentence in sentences[:_SHOWN])
    more = len(sentences) - _SHOWN
    return f"{named} and {more:,} more" if more > 0 else named
