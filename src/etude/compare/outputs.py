"""A comparison as a table for the terminal, as JSON, as CSV and as a chart."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from etude.compare import comparison
from etude.compare.comparison import Comparison, Group, Improvement
from etude.compare.reading import printable
from etude.core.output import rendered
from etude.evaluate.charts import COLORS, FAINT, drawn, steps_text
from etude.training.logs.curves import EIGHTHS, duration

_MOST_SHOWN = 12
"""Most lines in a part of the table."""
_CURVE = 12
"""Characters of a curve in the table."""
_WIDE = 100
"""Width of a terminal with room for all columns."""


def to_json(it: Comparison) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "metric": it.metric,
        "at": it.end,
        "unit": it.unit,
        "success": it.success,
        "groups": [_group(it, group) for group in it.groups],
        "probability_of_improvement": [
            {"of": a.letter, "over": b.letter, **p._asdict()} for a, b, p in it.pairs()
        ],
        "differences": it.differences,
        "notes": list(it.notes),
    }


def _group(it: Comparison, group: Group) -> dict[str, Any]:
    middle, low, high = comparison.band(group.values)
    runs = zip(group.runs, group.final[:, 0], group.reached, strict=True)
    document: dict[str, Any] = {
        "group": group.letter,
        "label": group.label,
        "iqm": comparison.estimate(comparison.iqm, group.final)._asdict(),
        "mean": comparison.estimate(comparison.mean, group.final)._asdict(),
        "standard_deviation": float(group.final.std(ddof=1)) if len(group.runs) > 1 else None,
        "runs": [
            {
                "run": str(run.path),
                "seed": run.seed,
                "score": float(score),
                "steps_to_success": None if reached is None else reached.step,
                "seconds_to_success": None if reached is None else reached.seconds,
            }
            for run, score, reached in runs
        ],
        "curve": {
            "steps": group.steps,
            "iqm": middle.tolist(),
            "low": low.tolist(),
            "high": high.tolist(),
        },
    }
    if it.success is not None:
        document["reached"] = sum(reached is not None for reached in group.reached)
        for part, name in enumerate(("steps_to_success", "seconds_to_success")):
            value = group.median(part)
            document[name] = value if math.isfinite(value) else None
    return document


def to_csv(it: Comparison) -> str:
    """The comparison as CSV, with a row for each run and step."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["group", "label", "run", "seed", it.unit, it.metric])
    for group in it.groups:
        for run, values in zip(group.runs, group.values, strict=True):
            for step, value in zip(group.steps, values, strict=True):
                seed, path = run.seed, str(run.path)
                line = [group.letter, group.label, path, seed, step, f"{value:.9g}"]
                writer.writerow([_cell(each) for each in line])
    return stream.getvalue()


def to_table(it: Comparison, width: int = 100, color: bool = False) -> str:
    """The comparison as a table for the terminal."""
    runs = sum(len(group.runs) for group in it.groups)
    parts: list[RenderableType] = [
        f"{it.metric} at {it.end:,} {it.unit}: {runs} "
        f"run{'s' if runs > 1 else ''}; IQM is the interquartile mean, with the 95 % interval "
        "of a bootstrap over seeds",
        _scores(it, width),
    ]
    if len(it.groups) > 1:
        parts += ["", *(_better(a, b, p) for a, b, p in it.pairs()[:_MOST_SHOWN])]
        if len(it.groups) > 5:
            parts.append("--json has the probabilities of all pairs.")
        parts += ["", _differing(it)]
    parts += [Text(f"Note: {note}") for note in it.notes]
    return rendered(parts, width, color)


def _scores(it: Comparison, width: int) -> Table:
    """A line for each group; without curves and means in a narrow terminal."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    table.add_column("group", overflow="fold", min_width=12)
    best = max(it.groups, key=lambda group: float(comparison.iqm(group.final)))
    for index, group in enumerate(it.groups):
        iqm = comparison.estimate(comparison.iqm, group.final)
        spread = f"{it.score(iqm.low)} to {it.score(iqm.high)}"
        cells = {"runs": str(len(group.runs))}
        if width >= _WIDE:
            cells["mean"] = it.score(float(group.final.mean()))
        cells |= {"IQM": it.score(iqm.value)}
        cells |= {"95 % interval": spread if len(group.runs) > 1 else "one run"}
        if it.success is not None:
            names = (f"reach {it.level(it.success)}", it.unit, "time")
            cells |= dict(zip(names, _reached(group), strict=True))
        for name in () if index else cells:
            table.add_column(name, justify="right", no_wrap=True)
        if width >= _WIDE:
            cells["curve"] = _spark(it, group)
            if not index:
                table.add_column("curve", no_wrap=True)
        style = "bold" if group is best and len(it.groups) > 1 else ""
        table.add_row(group.letter, Text(group.label), *cells.values(), style=style)
    return table


def _reached(group: Group) -> list[str]:
    count = sum(reached is not None for reached in group.reached)
    step, seconds = group.median(0), group.median(1)
    words = [f"{step:,.0f}", duration(seconds)] if math.isfinite(step) else ["-", "-"]
    return [f"{count} of {len(group.runs)}", *words]


def _spark(it: Comparison, group: Group) -> str:
    """The curve of a group in characters, on the same scale as the other groups."""
    curves = [comparison.iqm(each.values.T[..., None]) for each in it.groups]
    low, high = (0.0, 1.0) if it.is_share else (min(map(min, curves)), max(map(max, curves)))
    middle = curves[it.groups.index(group)]
    at = np.linspace(group.steps[0], group.steps[-1], _CURVE)
    index = np.searchsorted(group.steps, at + 1e-6, side="right") - 1
    shares = (middle[index] - low) / ((high - low) or 1.0)
    return "".join(EIGHTHS[max(1, round(8 * share))] for share in np.clip(shares, 0.0, 1.0))


def _differing(it: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("what differs", overflow="fold")
    for group in it.groups:
        table.add_column(group.letter, overflow="fold")
    for name, values in [*it.differences.items()][:_MOST_SHOWN]:
        table.add_row(Text(name), *(Text(value) for value in values))
    if not it.differences:
        table.add_row("nothing in the recipes")
    if len(it.differences) > _MOST_SHOWN:
        table.add_row(f"and {len(it.differences) - _MOST_SHOWN} more: see --json")
    return table


def _cell(value: Any) -> Any:
    """A cell that a spreadsheet does not read as a formula."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@") and value[1:2]
    return f"'{value}" if is_formula and not _is_number(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _better(a: Group, b: Group, p: Improvement) -> str:
    turned = p._replace(value=1 - p.value, low=1 - p.high, high=1 - p.low)
    first, second, shown = (a, b, p) if p.value >= 0.5 else (b, a, turned)
    text = (
        f"{first.letter} scores higher than {second.letter} with probability {shown.value:.2f} "
        f"(95 % interval {shown.low:.2f} to {shown.high:.2f}; permutation test p = {p.p_value:.2g})"
    )
    if p.smallest_p_value <= 0.05:
        return text
    return (
        f"{text}. {len(first.runs)} against {len(second.runs)} runs cannot give a p below "
        f"{p.smallest_p_value:.2g}: too few to decide, 4 against 4 are the fewest."
    )


def to_chart(it: Comparison, kind: str) -> bytes:
    """A chart of the curves with their bands, and of the final scores; kind: svg or png."""
    height = 4.4 + 0.2 * len(it.groups)
    return drawn(lambda figure: _draw(figure, it), 9.6, height, kind)


def _draw(figure: Any, it: Comparison) -> None:
    curves, scores = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    curves.set_title(printable(it.metric))
    curves.set_xlabel(it.unit)
    curves.xaxis.set_major_formatter(steps_text)
    curves.yaxis.set_major_formatter(lambda value, _: it.level(value))
    scores.set_title("final scores, IQM")
    scores.set_xticks(range(len(it.groups)), [group.letter for group in it.groups])
    scores.set_xlim(-0.5, len(it.groups) - 0.5)
    for index, group in enumerate(it.groups):
        color = COLORS[index % len(COLORS)]
        middle, low, high = comparison.band(group.values)
        count = f"{len(group.runs)} run{'s' if len(group.runs) > 1 else ''}"
        label = printable(f"{group.name}, {count}")[:110]
        marker = "" if len(group.steps) > 1 else "o"
        curves.plot(group.steps, middle, marker=marker, linewidth=2, color=color, label=label)
        found, error = comparison.estimate(comparison.iqm, group.final, draws=10_000), None
        if len(group.runs) > 1:
            curves.fill_between(group.steps, low, high, color=color, alpha=0.18, linewidth=0)
            error = [[found.value - found.low], [found.high - found.value]]
        scores.errorbar(index, found.value, error, fmt="o", capsize=4, color=color)
        beside = index + 0.12 + 0.05 * (np.arange(len(group.runs)) % 3)
        scores.plot(beside, group.final[:, 0], ".", markeredgewidth=0, alpha=0.5, color=color)
    if it.success is not None:
        bottom, top = curves.get_ylim()
        if it.is_share or bottom < it.success < top:
            curves.axhline(it.success, color=FAINT, linestyle="--", linewidth=1)
    if it.is_share:
        curves.set_ylim(-0.04, 1.04)
    curves.set_xlim(left=0)
    figure.legend(loc="outside lower left")
