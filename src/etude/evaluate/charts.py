"""Charts in one style, drawn with matplotlib, as SVG or PNG files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

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
_PNG_DPI = 200


def drawn(draw: Callable[[Any], None], width: float, height: float, kind: str = "svg") -> bytes:
    """The bytes of a chart; draw: adds axes and curves to an empty `matplotlib.figure.Figure`.

    width, height: in inches. kind: svg or png.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    stream = io.BytesIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font does not have
        figure = Figure((width, height), layout="constrained")
        draw(figure)
        metadata = dict.fromkeys(("Date", "Creator")) if kind == "svg" else {"Software": None}
        figure.savefig(stream, format=kind, dpi=_PNG_DPI, metadata=metadata)
    return stream.getvalue()


def steps_text(value: float, position: int | None = None) -> str:
    """A number of steps, short: 250k, 1.5M; also the formatter of an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:g}"
