"""A page about runs: one HTML file that needs no network and trusts nothing a run's folder says.

Every text of a run is escaped, its pictures are data, and the page's own script is the only one
that a browser runs: its hash is in the page's security policy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from etude.compare import comparison_text
from etude.compare.charts import COLORS
from etude.compare.comparison import Comparison
from etude.compare.reading import RunRecord, printable
from etude.core.metrics.declared import ELAPSED, Metrics, Warning, charted, numbers, step_of
from etude.runs.folder import PLAN, RECIPE
from etude.training.logs.curves import duration

_ASSETS = Path(__file__).parent / "page"
_POINTS, _POINTS_OF_MANY, _METRICS, _METRICS_OF_MANY = 400, 150, 60, 16
_TEXT, _PICTURE, _PICTURES, _FILM, _FILMS = 1 << 16, 600_000, 2_400_000, 8 << 20, 40 << 20
"""Bytes of a text, a picture, all pictures, a film and all films of a page."""
_KINDS = {".png": (b"\x89PNG\r\n\x1a\n", "image/png"), ".webp": (b"RIFF", "image/webp")}
_EVALUATIONS = 3


@dataclass(frozen=True)
class RunPage:
    """What the page says of a run."""

    record: RunRecord
    command: str
    """What starts it again."""
    changed: str = ""
    """The settings in which it is not the recipe of its name."""
    metrics: Metrics = ()
    """What it logs, in words."""
    warnings: tuple[Warning, ...] = ()
    trend: str = ""
    evaluated: str = ""
    fingerprint: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    """What could not be found out, and why."""


def page(
    runs: Sequence[RunPage], comparison: Comparison | None, films: bool = False, note: str = ""
) -> str:
    """The page of a run, or of several with their comparison.

    films: with films, which are large. note: why there is no comparison of several.
    """
    title = runs[0].record.name or runs[0].record.path.name
    title = title if len(runs) == 1 else f"{len(runs)} runs of {title}"
    charts: list[dict[str, Any]] = []
    budget = Budget(_PICTURES, _FILMS if films else 0)
    body = [f"<h1>{escape(printable(title))}</h1>"]
    if len(runs) == 1:
        body += _run(runs[0], charts, budget)
    else:
        body += _several(runs, comparison, note, charts, budget)
    script, style = ((_ASSETS / n).read_text() for n in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    document = {"charts": charts, "colors": COLORS, "unit": runs[0].record.unit}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(printable(title))}</title>",
            f"<style>\n{style}</style></head><body>",
            *body,
            f'<script type="application/json" id="data">{_embedded(document)}</script>',
            f"<script>{script}</script></body></html>\n",
        ]
    )


def _embedded(document: Any) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@dataclass
class Budget:
    """Bytes that are left for pictures and films."""

    pictures: int
    films: int


def _run(run: RunPage, charts: list[dict[str, Any]], budget: Budget) -> list[str]:
    """The page of one run."""
    parts = (
        ("asked", "What was asked", _asked(run)),
        ("evaluation", "Evaluation", _evaluations(run)),
        ("episodes", "Episodes seen", _pictures(run, budget)),
        ("health", "Health", _health(run)),
        ("failures", "Failures of the run", _failures(run)),
        ("curves", "Curves", _curves([run], charts, {})),
        ("plan", "Plan", _plan(run)),
        ("machine", "Machine and versions", _machine(run)),
        ("repeat", "How to repeat it", _repeat(run)),
    )
    there = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in there)
    lines = [f'<p class="faint">{_text(run.record.path)}</p>', *_cards(run), f"<nav>{links}</nav>"]
    for key, title, inside in there:
        lines += [f'<h2 id="{key}">{title}</h2>', *inside]
    return lines


def _several(
    runs: Sequence[RunPage],
    comparison: Comparison | None,
    note: str,
    charts: list[dict[str, Any]],
    budget: Budget,
) -> list[str]:
    """The page of several runs: their comparison, their curves, and each of them folded."""
    lines = [f'<p class="warning">{_text(note)}</p>'] if note else []
    letters: dict[Path, str] = {}
    if comparison is not None:
        lines += ['<h2 id="comparison">Comparison</h2>', *_comparison(comparison, charts)]
        letters = {run.path: group.letter for group in comparison.groups for run in group.runs}
    lines += ['<h2 id="curves">Curves of the runs</h2>', *_curves(runs, charts, letters)]
    lines += ['<h2 id="runs">Runs</h2>']
    for run in runs:
        warned = f", {len(run.warnings)} warnings" if run.warnings else ""
        lines += [
            '<section class="run"><details><summary>'
            f"{_text(run.record.path)}, seed {_text(run.record.seed)}{warned}</summary>",
            *_cards(run),
            *(part for make in (_asked, _evaluations) for part in make(run)),
            *_pictures(run, budget),
            *_failures(run),
            "<h3>Health</h3>",
            *_health(run),
            "<h3>Machine and versions</h3>",
            *_machine(run),
            *_repeat(run),
            "</details></section>",
        ]
    return lines


def _cards(run: RunPage) -> list[str]:
    """The figures that one looks for first."""
    rows = run.record.rows
    last = numbers(rows[-1]) if rows else {}
    found: list[tuple[str, str]] = []
    final = _final(run)
    if final is not None and "eval/success_rate" in final:
        count = final.get("eval/episodes", 0)
        found.append(
            (f"{final['eval/success_rate']:.1%}", f"success of {count:.0f} fresh episodes")
        )
    if final is not None and "eval/mean_reward" in final:
        found.append((f"{final['eval/mean_reward']:,.2f}", "mean return of them"))
    if last:
        found.append((f"{step_of(last):,}", run.record.unit))
        found.append((duration(last.get(ELAPSED, 0.0)), "time"))
    if "time/fps" in last:
        found.append((f"{last['time/fps']:,.0f}", "steps/s at the end"))
    found.append((_text(run.record.seed), "seed"))
    cards = (f'<div class="card"><b>{value}</b><span>{name}</span></div>' for value, name in found)
    return [f'<div class="cards">{"".join(cards)}</div>']


def _final(run: RunPage) -> dict[str, float] | None:
    """The figures of the evaluation at the end of training."""
    for folder in reversed(_evaluation_folders(run)):
        if folder.name.endswith("-final"):
            try:
                document = json.loads(_bytes(folder / "summary.json", _TEXT) or b"")
            except (ValueError, RecursionError):
                return None
            return numbers(document) if isinstance(document, dict) else None
    return None


def _asked(run: RunPage) -> list[str]:
    recipe = _file(run.record.path / RECIPE)
    what = f", with {_text(run.changed)}" if run.changed else ""
    return [
        f"<p>The recipe <code>{_text(run.record.name)}</code>{what}.</p>",
        f'<pre class="wrap">{_text(run.command)}</pre>',
        f"<details><summary>The whole recipe</summary><pre>{recipe}</pre></details>",
    ]


def _plan(run: RunPage) -> list[str]:
    text = _file(run.record.path / PLAN)
    return [f"<pre>{text}</pre>"] if text else []


def _curves(
    runs: Sequence[RunPage], charts: list[dict[str, Any]], letters: Mapping[Path, str]
) -> list[str]:
    """A chart for each metric, with a line for each run."""
    single = len(runs) == 1
    most, points = (_METRICS, _POINTS) if single else (_METRICS_OF_MANY, _POINTS_OF_MANY)
    series: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        letter = letters.get(run.record.path, "")
        color = ord(letter) - ord("A") if letter else number
        for name, line in _series(run.record, points).items():
            label = f"{letter} seed {run.record.seed}" if letter else run.record.path.name
            series.setdefault(name, []).append({"label": printable(label), "color": color, **line})
    if not series:
        return ["<p>There are no rows yet.</p>"]
    labels = {metric.name: metric.label for run in runs for metric in run.metrics}
    order = {m.name: m.curve.place for run in runs for m in run.metrics if m.curve is not None}
    chosen = sorted(series, key=lambda name: (order.get(name, 1000), name))
    shown = [name for name in chosen if not name.startswith(("time/", "system/"))]
    shown = (shown + [name for name in chosen if name not in shown])[:most]
    lines = [
        '<div class="tools"><label><input type="checkbox" id="log"> logarithmic</label>'
        '<label><input type="checkbox" id="time"> over seconds</label>'
        '<span class="faint">Point at a curve for its values.</span></div>',
        "<noscript><p>Curves are drawn by a script, which this browser does not run.</p>"
        "</noscript>",
        '<div class="charts">',
        *(_figure(charts, name, labels.get(name, ""), series[name]) for name in shown),
        "</div>",
    ]
    left = len(series) - len(shown)
    return [*lines, f'<p class="faint">{left} more are in metrics.jsonl.</p>'] if left else lines


def _series(record: RunRecord, points: int) -> dict[str, dict[str, list[float]]]:
    """{metric: {"x": steps, "y": values, "t": seconds}}, of at most so many points each."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in record.rows:
        step, seconds = step_of(numbers(row)), numbers(row).get(ELAPSED, 0.0)
        for name, value in charted(row).items():
            if name != ELAPSED:
                found.setdefault(name, []).append((step, value, round(seconds, 2)))
    lines = {}
    for name, each in found.items():
        stride = -(-len(each) // points)
        kept = each[::-1][::stride][::-1]  # the last one is always there
        x, y, t = zip(*kept, strict=True)
        lines[name] = {"x": [*x], "y": [float(f"{v:.6g}") for v in y], "t": [*t]}
    return lines


def _figure(
    charts: list[dict[str, Any]],
    name: str,
    label: str,
    series: list[dict[str, Any]],
    large: bool = False,
) -> str:
    share = name.endswith(("success_rate", "clip_fraction"))
    charts.append({"name": printable(name), "share": share, "series": series})
    said = f" {escape(label)}" if label else ""
    return (
        f'<figure class="chart" data-chart="{len(charts) - 1}"{" data-large=1" if large else ""}>'
        f'<figcaption><span><b>{_text(name)}</b>{said}</span><span class="value"></span>'
        "</figcaption></figure>"
    )


def _comparison(comparison: Comparison, charts: list[dict[str, Any]]) -> list[str]:
    document = comparison_text.to_json(comparison)
    series = [
        {
            "label": group["group"],
            "color": number,
            "x": group["curve"]["steps"],
            "y": group["curve"]["iqm"],
            "low": group["curve"]["low"],
            "high": group["curve"]["high"],
        }
        for number, group in enumerate(document["groups"])
    ]
    legend = "".join(
        f'<span><span class="swatch" style="background:{COLORS[k % len(COLORS)]}"></span>'
        f"{_text(group.name)}, {len(group.runs)} runs</span>"
        for k, group in enumerate(comparison.groups)
    )
    return [
        f"<p>{_text(comparison.metric)}: the interquartile mean over seeds with the 95 % interval "
        "of a bootstrap.</p>",
        '<div class="charts large">'
        + _figure(charts, comparison.metric, "interquartile mean over seeds", series, large=True)
        + "</div>",
        f'<div class="legend">{legend}</div>',
        f"<pre>{_text_lines(comparison_text.to_table(comparison, 110))}</pre>",
    ]


def _evaluation_folders(run: RunPage) -> list[Path]:
    folder = run.record.path / "evaluations"
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in inside if path.is_dir()]


def _evaluations(run: RunPage) -> list[str]:
    """What the newest evaluations say."""
    lines = []
    for folder in _evaluation_folders(run)[-_EVALUATIONS:]:
        text = _file(folder / "report.txt") or _file(folder / "summary.json")
        if text:
            lines += [f"<h3>{_text(folder.name)}</h3>", f"<pre>{text}</pre>"]
    return lines


def _pictures(run: RunPage, budget: Budget) -> list[str]:
    """Strips of successes and failures, and their films where these are wanted."""
    figures, left_out = [], 0
    for folder in reversed(_evaluation_folders(run)):
        for path in sorted(folder.glob("*.png")):
            embedded = _media(path, budget)
            left_out += embedded is None
            if embedded is not None:
                name = path.stem.replace("-", " ").replace("_", " ")
                figures.append(
                    f"<figure>{embedded}<figcaption>{_text(name)}, {_text(folder.name)}"
                    "</figcaption></figure>"
                )
    lines = [f'<div class="pictures">{"".join(figures)}</div>'] if figures else []
    if left_out:
        lines.append(f'<p class="faint">{left_out} more are in evaluations/.</p>')
    return lines


def _media(path: Path, budget: Budget) -> str | None:
    """A picture, with its film where there is room for one; None where it is too large."""
    alternative = f'alt="{_text(path.stem)}"'
    film = _bytes(path.with_suffix(".mp4"), min(_FILM, budget.films)) if budget.films else None
    if film is not None and film[4:8] == b"ftyp":
        budget.films -= len(film)
        return f'<video controls loop muted src="data:video/mp4;base64,{_base64(film)}"></video>'
    magic, kind = _KINDS[path.suffix]
    picture = _bytes(path, min(_PICTURE, budget.pictures))
    if picture is None or not picture.startswith(magic):
        return None
    budget.pictures -= len(picture)
    return f'<img {alternative} src="data:{kind};base64,{_base64(picture)}">'


def _failures(run: RunPage) -> list[str]:
    """Reports of what ended the run before its time."""
    folder = run.record.path / "failures"
    lines = []
    for path in sorted(folder.iterdir())[-_EVALUATIONS:] if folder.is_dir() else ():
        if text := _file(path / "error.txt"):
            lines += [f"<h3>{_text(path.name)}</h3><pre>{text}</pre>"]
    return lines


def _health(run: RunPage) -> list[str]:
    lines = [
        f'<p class="warning"><b>{_text(warning.name)}</b>: {_text(warning.text)}</p>'
        for warning in run.warnings
    ]
    if not lines:
        lines = ['<p class="fine">No warnings at the end of the run.</p>']
    said = [f"Training is {run.trend}" if run.trend else "", run.evaluated]
    words = "; ".join(text for text in said if text)
    return [*lines, f"<p>{_text(words)}.</p>"] if words else lines


def _machine(run: RunPage) -> list[str]:
    rows = [*_leaves(run.record.manifest)]
    if not rows:
        return ["<p>manifest.json is damaged or missing: `etude fsck` says more.</p>"]
    cells = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows
    )
    return [f'<div class="wide"><table>{cells}</table></div>']


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in [*tree.items()][:50]:
        if isinstance(value, Mapping):
            yield from ((f"{name} {k}", str(v)[:300]) for k, v in [*value.items()][:50])
        else:
            yield str(name), str(value)[:300]


def _repeat(run: RunPage) -> list[str]:
    lines = [
        "<p>With the versions above, on a machine that computes the same bits, this gives the same "
        "run:</p>",
        f'<pre class="wrap">{_text(run.command)}</pre>',
    ]
    if run.fingerprint is not None:
        lines.append("<p>Its fingerprint (SHA-256) is then</p>")
        rows = "\n".join(f"{name:<10}{value}" for name, value in run.fingerprint.items())
        lines.append(f"<pre>{_text_lines(rows)}</pre>")
    return lines + [f'<p class="faint">{_text(note)}</p>' for note in run.notes]


def _text(value: object) -> str:
    return escape(printable(value))


def _text_lines(text: str) -> str:
    return "\n".join(_text(line) for line in text.split("\n"))


def _file(path: Path) -> str:
    """A text file as HTML, cut where it is long; "" where there is none."""
    data = _bytes(path, None)
    if data is None:
        return ""
    cut = "\n..." if len(data) > _TEXT else ""
    return _text_lines(data[:_TEXT].decode(errors="replace").rstrip() + cut)


def _bytes(path: Path, most: int | None) -> bytes | None:
    """What is in a regular file of at most so many bytes, or the beginning of a text (most None);
    nothing is opened through a link in its place."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (most is not None and status.st_size > most):
                return None
            return stream.read(_TEXT + 1 if most is None else most)
    except OSError:
        return None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
