"""The plain table: a heading now and then, one line per cycle."""

from __future__ import annotations

import sys
from typing import Any, TextIO

COLUMNS = (
    ("steps", "timesteps", 11, "{:,.0f}"),
    ("cycle", "cycle", 6, "{:.0f}"),
    ("updates", "updates", 9, "{:,.0f}"),
    ("fps", "time/fps", 8, "{:,.0f}"),
    ("return", "rollout/ep_rew_mean", 9, "{:.2f}"),
    ("length", "rollout/ep_len_mean", 8, "{:.1f}"),
    ("success", "rollout/success_rate", 8, "{:.0%}"),
    ("kl", "train/approx_kl", 8, "{:.4f}"),
    ("clip", "train/clip_fraction", 7, "{:.0%}"),
    ("explained", "train/explained_variance", 10, "{:.2f}"),
    ("std", "train/std", 6, "{:.2f}"),
    ("eval success", "eval/success_rate", 13, "{:.1%}"),
    ("eval return", "eval/mean_reward", 12, "{:.2f}"),
)
"""Heading, metric, width and format."""

ROWS_PER_HEADING = 20


class ConsoleTable:
    """Prints log rows for a person to follow; what a run does not have stays empty."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._rows = 0

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Rows from before a resume have been printed before."""

    def write(self, row: dict[str, Any]) -> None:
        if self._rows % ROWS_PER_HEADING == 0:
            heading = "".join(f"{name:>{width}}" for name, _, width, _ in COLUMNS)
            print(heading, file=self._stream)
        self._rows += 1
        cells = (
            f"{form.format(row[metric]) if metric in row else '':>{width}}"
            for _, metric, width, form in COLUMNS
        )
        print("".join(cells).rstrip(), file=self._stream, flush=True)

    def close(self) -> None: ...
