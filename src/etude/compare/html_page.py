"""The HTML page of a run, or of several with their comparison: one file that needs no network.

A run's folder is untrusted: every text from it is escaped, its pictures are embedded as data, and
the hash in the page's security policy allows no script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from etude.compare import outputs
from etude.compare.comparison import Comparison
from etude.compare.reading import RunRecord, printable, shown
from etude.compare.sweeps import halving
from etude.compare.sweeps.halving import Sweep
from etude.core.metrics import ELAPSED, Metrics, Warning, chart_values, numbers, step_of
from etude.evaluate.charts import COLORS
from etude.runs import files
from etude.runs.folder import PLAN, RECIPE
from etude.training.logs.curves import duration

_ASSETS = Path(__file__).parent / "page"
_POINTS, _POINTS_OF_MANY, _METRICS, _METRICS_OF_MANY = 400, 150, 60, 16
_TEXT, _PICTURE, _PICTURES = 1 << 16, 600_000, 2_400_000
"""Bytes of a text, a picture and all pictures of a page."""
_SMALL_FILM, _SMALL_FILMS, _FILM, _FILMS = 2_000_000, 6_000_000, 8 << 20, 40 << 20
"""Bytes of a small film and of all, and of large ones."""
_PNG, _WEBP, _MP4 = (0, b"\x89PNG\r\n\x1a\n"), (0, b"RIFF"), (4, b"ftyp")
"""Where files of a kind have which bytes."""
_EVALUATIONS = 3
_TRIALS = 500
"""Most trials of a sweep in its table and charts."""
_TABLE_WIDTH = 110


@dataclass(frozen=True)
class RunPage:
    """The content of a run's page that its files alone do not have."""

    record: RunRecord
    command: str
    """The command that trains the run again."""
    title: str = ""
    """Names of its task and recipe."""
    changed: str = ""
    """Settings that differ from the recipe of that name."""
    metrics: Metrics = ()
    """Declarations of its metrics."""
    warnings: tuple[Warning, ...] = ()
    trend: str = ""
    evaluated: str = ""
    fingerprint: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()
    """Reasons why something is missing."""


@dataclass
class Budget:
    """Bytes left for pictures, small films and large films."""

    pictures: int
    small_films: int
    films: int

    def take(self, path: Path, most: int, of: str, magic: tuple[int, bytes]) -> str:
        """A file as base64, taken from a budget; "" if it is missing, too large or of another
        kind."""
        data, (at, wanted) = _bytes(path, min(most, getattr(self, of))), magic
        if data is None or not data[at:].startswith(wanted):
            return ""
        setattr(self, of, getattr(self, of) - len(data))
        return base64.b64encode(data).decode()


def page(
    runs: Sequence[RunPage],
    comparison: Comparison | None,
    films: bool = False,
    note: str = "",
    sweep: Sweep | None = None,
) -> str:
    """The page as HTML.

    films: embed large films. note: the reason why several runs are not compared. sweep: whose
    trials the runs are, the best first.
    """
    title = runs[0].title or runs[0].record.name or runs[0].record.path.name
    title = title if len(runs) == 1 else f"{len(runs)} runs of {title}"
    if sweep is not None:
        title = f"Sweep of {title}" if len(runs) == 1 else f"Sweep: {title}"
    budget = Budget(_PICTURES, _SMALL_FILMS, _FILMS if films else 0)
    charts, letters = list[dict[str, Any]](), dict[Path, str]()
    if comparison is not None:
        charts.append(_comparison_chart(comparison))
        letters = {run.path: group.letter for group in comparison.groups for run in group.runs}
    scatters = [] if sweep is None else [*_scatters(sweep)]
    charts += scatters
    first = len(charts)
    curves = _curves(runs, letters)
    charts += curves[: _METRICS if len(runs) == 1 else _METRICS_OF_MANY]
    script, style = ((_ASSETS / n).read_text() for n in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    loader = FileSystemLoader(_ASSETS)
    env = Environment(loader=loader, autoescape=True, finalize=_finalize, undefined=StrictUndefined)
    return env.get_template("page.html").render(
        title=title,
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=_json({"charts": charts, "colors": COLORS, "unit": runs[0].record.unit}),
        charts=charts,
        drawn_curves=range(first, len(charts)),
        other_curves=len(curves) - len(charts) + first,
        comparison=comparison,
        table="" if comparison is None else outputs.to_table(comparison, _TABLE_WIDTH),
        colors=COLORS,
        legend=[] if letters or len(runs) == 1 else _legend(runs),
        sweep=None if sweep is None else _ranking(sweep),
        scatters=range(first - len(scatters), first),
        note=note,
        runs=[_content(run, budget) for run in runs],
    )


def _finalize(value: object) -> object:
    """A text without control characters, except for line breaks."""
    if isinstance(value, Markup):
        return value
    return "\n".join(printable(line) for line in str(value).split("\n"))


def _json(document: Any) -> str:
    """JSON that cannot end the element it is in."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _content(run: RunPage, budget: Budget) -> dict[str, Any]:
    """The fields of a run in the template."""
    path, folders = run.record.path, _subfolders(run.record.path / "evaluations")
    failures = [(folder, _file(folder / "error.txt")) for folder in _subfolders(path / "failures")]
    evaluations = [
        (folder, _file(folder / "report.txt") or _file(folder / "summary.json"))
        for folder in folders
    ]
    evaluations = [(folder, text) for folder, text in evaluations if text][-_EVALUATIONS:]
    drawn = {
        file.with_suffix(".png"): None
        for folder in folders[::-1]
        for file in sorted([*folder.glob("*.png"), *folder.glob("*.webp")])
    }
    pictures = [_picture(file, budget) for file in drawn]
    trend = f"Training is {run.trend}" if run.trend else ""
    fingerprint = (run.fingerprint or {}).items()
    return {
        "path": path,
        "name": run.record.name,
        "seed": run.record.seed,
        "changed": run.changed,
        "command": run.command,
        "recipe": _file(path / RECIPE),
        "plan": _file(path / PLAN),
        "cards": [*_cards(run, folders)],
        "evaluations": [(_folder_title(folder), text) for folder, text in evaluations],
        "failures": [(folder.name, text) for folder, text in failures[-_EVALUATIONS:] if text],
        "pictures": [picture for picture in pictures if picture is not None],
        "left_out": pictures.count(None),
        "warnings": run.warnings,
        "health": "; ".join(text for text in (trend, run.evaluated) if text),
        "machine": [*_leaves(run.record.manifest)],
        "fingerprint": "\n".join(f"{name:<10}{value}" for name, value in fingerprint),
        "notes": run.notes,
    }


def _cards(run: RunPage, evaluations: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(value, name) of the most important figures."""
    final = _final_metrics(evaluations)
    played = f"{final.get('eval/episodes', 0):.0f} fresh episodes"
    if "eval/success_rate" in final:
        yield f"{final['eval/success_rate']:.1%}", f"success of {played}"
    if "eval/mean_reward" in final:
        yield f"{final['eval/mean_reward']:,.2f}", f"mean return of {played}"
    if run.record.rows:
        last = numbers(run.record.rows[-1])
        yield f"{step_of(last):,}", run.record.unit
        yield duration(last.get(ELAPSED, 0.0)), "time"
        if "time/fps" in last:
            yield f"{last['time/fps']:,.0f}", "steps/s at the end"
    yield str(run.record.seed), "seed"


def _final_metrics(evaluations: Sequence[Path]) -> dict[str, float]:
    """Metrics of the evaluation at the end of training; {} without one."""
    final = [folder for folder in evaluations if folder.name.endswith("-final")]
    try:
        document = json.loads(_bytes(final[-1] / "summary.json", _TEXT) or b"") if final else {}
    except (ValueError, RecursionError):
        return {}
    return numbers(document) if isinstance(document, dict) else {}


def _curves(runs: Sequence[RunPage], letters: Mapping[Path, str]) -> list[dict[str, Any]]:
    """A chart for each metric, with a line for each run, in the order of the dashboard."""
    series: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        letter = letters.get(run.record.path, "")
        color = ord(letter) - ord("A") if letter else min(number, len(COLORS) - 1)
        label = f"{letter} seed {run.record.seed}" if letter else run.record.path.name
        lines = _series(run.record, _POINTS if len(runs) == 1 else _POINTS_OF_MANY)
        for name, line in lines.items():
            series.setdefault(name, []).append({"label": printable(label), "color": color, **line})
    labels = {metric.name: metric.label for run in runs for metric in run.metrics}
    order = {m.name: m.curve.place for run in runs for m in run.metrics if m.curve is not None}

    def place(name: str) -> tuple[bool, float, str]:
        return name.startswith(("time/", "system/")), order.get(name, 1000), name

    return [_chart(name, labels.get(name, ""), series[name]) for name in sorted(series, key=place)]


def _legend(runs: Sequence[RunPage]) -> list[tuple[str, str]]:
    """(colour, name) of runs that are not in groups; those that share the last colour together."""
    alone = len(COLORS) if len(runs) <= len(COLORS) else len(COLORS) - 1
    names = [*zip(COLORS, (run.record.path.name for run in runs[:alone]), strict=False)]
    return [*names, *([(COLORS[-1], f"{len(runs) - alone} others")] if len(runs) > alone else [])]


def _ranking(sweep: Sweep) -> dict[str, Any]:
    """The fields of a sweep in the template."""
    best, titles = sweep.best(), halving.rung_titles(sweep)
    rows = []
    for place, trial in enumerate(halving.ordered(sweep)[:_TRIALS], 1):
        scores = [halving.shown_score(sweep.metric, score) for score in trial.scores]
        rows.append(
            {
                "place": place if trial.scores else "",
                "name": trial.name,
                "values": [shown(value) for value in trial.values.values()],
                "scores": [*scores, *[""] * (len(titles) - len(scores))],
                "is_best": trial is best,
                "note": trial.refused or trial.failed or ("best" if trial is best else ""),
            }
        )
    return {
        "metric": sweep.metric or "no score yet",
        "order": "lower is better" if sweep.asked.minimize else "higher is better",
        "fields": _short([vary.field for vary in sweep.varied]),
        "titles": titles,
        "legend": [*zip(COLORS, titles, strict=False)],
        "rows": rows,
        "left_out": max(0, len(sweep.trials) - _TRIALS),
    }


def _short(fields: list[str]) -> list[str]:
    """Names of fields without their sections, where these are different."""
    names = [field.rpartition(".")[2] for field in fields]
    return names if len({*names}) == len(names) else fields


def _scatters(sweep: Sweep) -> Iterator[dict[str, Any]]:
    """A chart for each varied field: the last scores of trials over its values."""
    scored = [t for t in sweep.trials if t.scores and np.isfinite(t.scores[-1])][:_TRIALS]
    for vary in sweep.varied if scored else ():
        found = [trial.values[vary.field] for trial in scored]
        texts = [printable(shown(value)) for value in found]
        plain = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found)
        choices = list[str]()
        if vary.choices or not plain:
            order = np.argsort(found, kind="stable") if plain else np.argsort(texts, kind="stable")
            choices = [*dict.fromkeys(texts[int(index)] for index in order)]
        xs = [choices.index(text) for text in texts] if choices else found
        points = [
            {
                "x": x,
                "y": trial.scores[-1],
                "color": min(len(trial.scores), len(COLORS)) - 1,
                "label": f"{trial.name}, {text}",
            }
            for trial, x, text in zip(scored, xs, texts, strict=True)
        ]
        is_wide = not choices and min(xs) > 0 and (vary.log or max(xs) >= 20 * min(xs))
        scatter = {"name": printable(vary.field), "label": "", "points": points}
        yield {**_chart(sweep.metric or "", "", []), **scatter, "choices": choices, "log": is_wide}


def _chart(name: str, label: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    is_share = name.endswith(("success_rate", "clip_fraction"))
    return {"name": printable(name), "label": label, "share": is_share, "series": series}


def _series(record: RunRecord, max_points: int) -> dict[str, dict[str, list[float]]]:
    """{metric: {"x": steps, "y": values, "t": seconds}}."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in record.rows:
        step, seconds = step_of(numbers(row)), numbers(row).get(ELAPSED, 0.0)
        for name, value in chart_values(row).items():
            if name != ELAPSED:
                found.setdefault(name, []).append((step, value, round(seconds, 2)))
    lines = {}
    for name, points in found.items():
        stride = -(-len(points) // max_points)
        kept = points[::-1][::stride][::-1]  # with the last one
        x, y, t = zip(*kept, strict=True)
        lines[name] = {"x": [*x], "y": [float(f"{v:.6g}") for v in y], "t": [*t]}
    return lines


def _comparison_chart(comparison: Comparison) -> dict[str, Any]:
    groups = outputs.to_json(comparison)["groups"]
    series = [
        {
            "label": group["group"],
            "color": number,
            "x": group["curve"]["steps"],
            "y": group["curve"]["iqm"],
            "low": group["curve"]["low"],
            "high": group["curve"]["high"],
        }
        for number, group in enumerate(groups)
    ]
    return _chart(comparison.metric, "interquartile mean over seeds", series)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []


def _folder_title(folder: Path) -> str:
    """The name of an evaluation's folder as words: "step 40,960, final"."""
    step, _, label = folder.name.partition("-")
    is_step = step.isascii() and step.isdecimal() and len(step) < 20
    return f"step {int(step):,}, {label}".rstrip(", ") if is_step else folder.name


def _picture(path: Path, budget: Budget) -> dict[str, Any] | None:
    """A strip of pictures and the film of that name; None if they are too large."""
    stem = path.stem.replace("-", " ").replace("_", " ")
    folder = _folder_title(path.parent)
    name = folder if folder.endswith(stem) else f"{folder}, {stem}"
    large = budget.films and budget.take(path.with_suffix(".mp4"), _FILM, "films", _MP4)
    small, webp = "", path.with_suffix(".webp")
    if not large:
        small = budget.take(webp, _SMALL_FILM, "small_films", _WEBP)
    strip = budget.take(path, _PICTURE, "pictures", _PNG)
    if not (large or small or strip):
        return None
    return {
        "name": name,
        "video": f"data:video/mp4;base64,{large}" if large else "",
        "film": f"data:image/webp;base64,{small}" if small else "",
        "strip": f"data:image/png;base64,{strip}" if strip else "",
    }


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in [*tree.items()][:50]:
        if isinstance(value, Mapping):
            yield from ((f"{name} {k}", str(v)[:300]) for k, v in [*value.items()][:50])
        else:
            yield str(name), str(value)[:300]


def _file(path: Path) -> str:
    """A text file, cut if it is long; "" without one."""
    data = _bytes(path, None)
    if data is None:
        return ""
    cut = "\n..." if len(data) > _TEXT else ""
    return data[:_TEXT].decode(errors="replace").rstrip() + cut


def _bytes(path: Path, most: int | None) -> bytes | None:
    """The content of a regular file of at most `most` bytes, or the beginning of a text (None).

    Symbolic links are not followed.
    """
    try:
        with files.open_regular(path) as stream:
            if most is not None and os.fstat(stream.fileno()).st_size > most:
                return None
            return stream.read(_TEXT + 1 if most is None else most)
    except OSError:
        return None
