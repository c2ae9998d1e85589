"""The plain table: a heading now and then, one line per cycle, a summary per epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from etude.metrics.rows import Judge, fleet, is_offline, numbers

Column = tuple[str, str, int, str]
"""Heading, metric, width and format."""
_EPISODES: tuple[Column, ...] = (
    ("steps", "timesteps", 11, "{:,.0f}"),
    ("cycle", "cycle", 6, "{:.0f}"),
    ("updates", "updates", 9, "{:,.0f}"),
    ("fps", "time/fps", 8, "{:,.0f}"),
    ("return", "rollout/ep_rew_mean", 9, "{:.2f}"),
    ("length", "rollout/ep_len_mean", 8, "{:.1f}"),
    ("success", "rollout/success_rate", 8, "{:.0%}"),
)
_TESTS: tuple[Column, ...] = (
    ("eval success", "eval/success_rate", 13, "{:.1%}"),
    ("eval return", "eval/mean_reward", 12, "{:.2f}"),
)
_UPDATES: tuple[Column, ...] = (
    ("kl", "train/approx_kl", 8, "{:.4f}"),
    ("clip", "train/clip_fraction", 7, "{:.0%}"),
    ("explained", "train/explained_variance", 10, "{:.2f}"),
    ("std", "train/std", 6, "{:.2f}"),
)
COLUMNS: tuple[Column, ...] = (*_EPISODES, *_UPDATES, *_TESTS)
STYLE_COLUMNS: tuple[Column, ...] = (
    *_EPISODES,
    ("style", "amp/style_reward", 7, "{:.3f}"),
    ("told agent", "amp/agent_accuracy", 11, "{:.0%}"),
    ("demo", "amp/demo_accuracy", 6, "{:.0%}"),
    *_UPDATES,
    *_TESTS,
)
REPLAY_COLUMNS: tuple[Column, ...] = (
    *_EPISODES,
    ("Q", "train/q_mean", 8, "{:.2f}"),
    ("Q loss", "train/critic_loss", 9, "{:.3g}"),
    ("alpha", "train/ent_coef", 8, "{:.3g}"),
    ("R loss", "train/R_loss", 9, "{:.3g}"),
    *_TESTS,
)
OFFLINE_COLUMNS: tuple[Column, ...] = (
    ("updates", "updates", 11, "{:,.0f}"),
    ("cycle", "cycle", 6, "{:.0f}"),
    ("passes", "dataset/passes", 9, "{:,.1f}"),
    ("Q", "train/q_mean", 9, "{:.3g}"),
    ("Q loss", "train/critic_loss", 10, "{:.3g}"),
    ("imitation", "train/behaviour_error", 10, "{:.3g}"),
    ("R loss", "train/R_loss", 10, "{:.3g}"),
    ("eval actions", "eval/action_error", 13, "{:.3g}"),
    *_TESTS,
)
REWARD_COLUMNS: tuple[Column, ...] = (
    ("updates", "updates", 11, "{:,.0f}"),
    ("cycle", "cycle", 6, "{:.0f}"),
    ("passes", "dataset/passes", 9, "{:,.1f}"),
    ("R loss", "train/R_loss", 10, "{:.3g}"),
    ("R mean", "train/R_mean", 10, "{:.3g}"),
    ("R std", "train/R_std", 10, "{:.3g}"),
    ("eval R loss", "eval/R_loss", 12, "{:.3g}"),
    ("rank", "eval/rank_correlation", 7, "{:.2f}"),
    ("of time", "eval/time_correlation", 8, "{:.2f}"),
    ("of returns", "eval/return_correlation", 11, "{:.2f}"),
)


def columns_of(row: Mapping[str, float]) -> tuple[Column, ...]:
    """What is worth showing of a run, by what it logs: a buffer, a replay, or a dataset
    that teaches a policy or a reward alone."""
    if is_offline(row):
        return OFFLINE_COLUMNS if "train/critic_loss" in row else REWARD_COLUMNS
    if "replay/transitions" in row:
        return REPLAY_COLUMNS
    return STYLE_COLUMNS if "amp/style_reward" in row else COLUMNS


ROWS_PER_HEADING = 20


class ConsoleTable:
    """Prints log rows for a person to follow; what a run does not have stays empty."""

    def __init__(self, stream: TextIO | None = None, judge: Judge | None = None) -> None:
        """`judge`: says at every epoch's end what the rows mean; without one, nothing is said."""
        self._stream = stream or sys.stdout
        self._judge = judge
        self._rows = 0
        self._last: Mapping[str, float] = {}
        self._told: set[str] = set()

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Rows from before a resume have been printed before."""
        if self._judge is not None:
            for row in history:
                self._judge.add(numbers(row))

    def write(self, row: dict[str, Any]) -> None:
        values = numbers(row)
        columns = columns_of(values)
        if self._rows % ROWS_PER_HEADING == 0:
            heading = "".join(f"{name:>{width}}" for name, _, width, _ in columns)
            print(heading, file=self._stream)
        self._rows += 1
        cells = (
            f"{form.format(values[metric]) if metric in values else '':>{width}}"
            for _, metric, width, form in columns
        )
        print("".join(cells).rstrip(), file=self._stream, flush=True)
        self._last = values
        if self._judge is not None:
            self._judge.add(values)

    def epoch(self, number: int, summary: Mapping[str, float]) -> None:
        """Print the line of an epoch that ended, of whose metrics `summary` holds the means."""
        if self._judge is not None:
            line = self._summary(self._judge, number, {**self._last, **summary})
            print(line, file=self._stream, flush=True)

    def close(self) -> None: ...

    def _summary(self, judge: Judge, number: int, values: Mapping[str, float]) -> str:
        """One line: the phase, what was reached, what looks wrong (at first with what to try)."""
        parts = [f"epoch {number}: {judge.phase}"]
        for name, metric, form in (
            ("success", "rollout/success_rate", "{:.0%}"),
            ("return", "rollout/ep_rew_mean", "{:.2f}"),
            ("R loss", "train/R_loss", "{:.3g}"),
        ):
            if metric in values:
                parts.append(f"{name} {form.format(values[metric])}")
        parts += fleet(values)
        warnings = judge.warnings
        for warning in warnings:
            known = warning.name in self._told
            parts.append(f"WARNING {warning.name}" + ("" if known else f" ({warning.text})"))
        self._told = {warning.name for warning in warnings}
        return "  " + ", ".join(parts)
