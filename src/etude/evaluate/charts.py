"""Charts in one style, drawn with matplotlib, as SVG or PNG files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from typing import Any

from etude.core.metrics import Metrics

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""{label: (steps, values)}"""

COLORS = ("#2563eb", "#e07b00", "#16935a", "#c2335b", "#7c4dbd", "#0f8b9c", "#8a6d1f", "#5b6472")
INK, FAINT, GRID = "#1e2228", "#667085", "#e4e7ec"
STYLE = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "etude",  # the same chart is the same file
    "text.parse_math": False,  # a label may have dollar signs
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.xmargin": 0.0,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
    "legend.frameon": False,
}
_PNG_DPI, _POINTS = 200, 80
"""Points per inch of a file, and of a chart in a notebook, which is drawn at twice that."""


def drawn(draw: Callable[[Any], None], width: float, height: float, kind: str = "svg") -> bytes:
    """The bytes of a chart; draw: adds axes and curves to an empty `matplotlib.figure.Figure`.

    width, height: in inches. kind: svg or png.
    """
    with _styled():
        return _bytes(_figure(draw, width, height), kind, _PNG_DPI)


def shown(draw: Callable[[Any], None], width: float, height: float) -> Any:
    """A chart as a `matplotlib.figure.Figure`, which notebooks show as a picture; see `drawn`."""

    def png() -> tuple[bytes, dict[str, int]]:
        with _styled():
            size = {"width": round(width * _POINTS), "height": round(height * _POINTS)}
            return _bytes(figure, "png", 2 * _POINTS), size

    with _styled():
        figure = _figure(draw, width, height)
    figure._repr_png_ = png
    return figure


def of_curves(curves: Lines, metrics: Metrics, unit: str, paired: bool) -> Any:
    """A figure of curves with a panel for each, see `shown`.

    curves: {metric: (steps, values)}. metrics: declared in the run. paired: draw metrics of
    training and of evaluations with the same label in one panel.
    """
    declared = {metric.name: metric for metric in metrics}
    found: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        metric = declared.get(name)
        label = metric.label if metric is not None and paired else name
        in_training = label.removeprefix("eval ")
        share = " %" if metric is not None and metric.format.endswith("%") else ""
        lines = found.setdefault(in_training + share, {})
        lines["training" if label == in_training else "evaluation"] = curve
    columns = min(len(found), 3)
    size = (4.6 * columns, 3.2 * -(-len(found) // columns))
    return shown(lambda figure: panels(figure, found, unit, columns), *size)


def panels(figure: Any, lines: Mapping[str, Lines], unit: str, columns: int) -> None:
    """Draw {title: {label: (steps, values)}} as a grid of axes; titles that end in % are shares."""
    grid = figure.subplots(-(-len(lines) // columns), columns, squeeze=False).flat
    for (title, curves), axes in zip(lines.items(), grid, strict=False):
        axes.set_title(title.removesuffix(" %"))
        for (label, (steps, values)), color in zip(curves.items(), cycle(COLORS), strict=False):
            marker = "" if len(steps) > 1 else "o"
            axes.plot(steps, values, marker=marker, linewidth=2, color=color, label=label)
        axes.xaxis.set_major_formatter(steps_text)
        axes.set_xlabel(unit)
        axes.set_xlim(left=0)
        if title.endswith(" %"):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.set_ylim(-0.04, 1.04)
        if len(curves) > 1:
            axes.legend()
    for axes in grid:  # the rest of the last row
        axes.set_axis_off()


def _styled() -> ExitStack:
    """Matplotlib in our style, and without warnings of characters that its font does not have."""
    from matplotlib import style

    with ExitStack() as entered:
        entered.enter_context(style.context(["default", STYLE]))
        entered.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return entered.pop_all()


def _figure(draw: Callable[[Any], None], width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    draw(figure)
    return figure


def _bytes(figure: Any, kind: str, dpi: int) -> bytes:
    stream = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator")) if kind == "svg" else {"Software": None}
    figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
    return stream.getvalue()


def steps_text(value: float, position: int | None = None) -> str:
    """A number of steps, short: 250k, 1.5M; also the formatter of an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"
