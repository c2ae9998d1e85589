"""Format bytes, durations, counts and tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Format bytes: 524 B, 1.4 MiB."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} {_UNITS[unit]}" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format seconds: 41.0 s, 3 min 20 s, 5 h 12 min, 12 d 3 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for upper, lower, high, low in ((3600, 60, "min", "s"), (86400, 3600, "h", "min")):
        if seconds < upper:
            rest = int(seconds % lower) if low == "s" else int(seconds % lower) // 60
            return f"{int(seconds // lower)} {high} {rest} {low}"
    return f"{int(seconds // 86400)} d {int(seconds % 86400) // 3600} h"


def amount(count: int, what: str) -> str:
    """Format a count with its unit: 1 cycle, 2,048 cycles."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def rendered(parts: Iterable[Any], width: int = 100, color: bool = False) -> str:
    """Lines and tables of `rich` as a text."""
    from rich.console import Console  # only commands that print tables load it

    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def new_table(*columns: str, left: Sequence[str] = (), **options: Any) -> Any:
    """An empty table; the first column and those of `left` are aligned to the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", **options)
    for index, name in enumerate(columns):
        if not index or name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Rows as CSV."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue()
