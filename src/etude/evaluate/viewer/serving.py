"""The page of episodes: what it asks for, and its answers.

Texts of a dataset are untrusted. They are sent as JSON, and the page's script writes them as text;
its security policy allows no script but its own, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.local_web import Answer
from etude.data.editing import Filter
from etude.data.store.geometry import OBS
from etude.evaluate.charts import COLORS
from etude.evaluate.viewer.sources import Source, film_kind
from etude.evaluate.viewer.statistics import MAX_DIMENSIONS, flat, statistics

_FOLDER = Path(__file__).parent
_ROWS, _POINTS, _TEXT = 200, 1500, 1000
"""Episodes of one answer, points of a curve, and characters of a name or sentence."""
_MAX_FILM = 256 << 20
_CONDITIONS = {
    "task": str,
    "name": str,
    "success": str,
    "min_steps": int,
    "max_steps": int,
    "min_return": float,
    "max_return": float,
}
"""Fields of `Filter` that the page sets."""


class Viewer:
    """Answers of the page; one request reads files at a time."""

    def __init__(self, title: str, sources: Sequence[Source]) -> None:
        self._title, self._sources = title, sources
        self._reading = threading.Lock()
        self._statistics: dict[int, dict[str, Any]] = {}
        self._page = _page(title)

    def get(self, path: str, query: Mapping[str, str]) -> Answer:
        """The answer to a path of the page."""
        if path == "/":
            return self._page
        parts = {
            "/about": self._about,
            "/episodes": self._episodes,
            "/episode": self._episode,
            "/picture": self._picture,
            "/statistics": self._statistics_of,
            "/film": self._film,
        }
        if path not in parts:
            return Answer.of({"error": f"There is no {path} on this page."}, 404)
        with self._reading:
            return parts[path](query)

    def send(self, message: Any) -> dict[str, Any]:
        """Exclude episodes, or include them again, as the page asks; the excluded ones."""
        if not isinstance(message, dict) or not isinstance(message.get("episodes"), list):
            raise UsageError("The page sent no list of episodes.")
        number, episodes = _whole(message.get("source")), message["episodes"]
        with self._reading:
            source = self._source({"source": str(number)})
            source.exclude([_whole(each) for each in episodes], bool(message.get("undo")))
            self._statistics.pop(number, None)
            return {"excluded": np.flatnonzero(source.excluded).tolist()}

    def _source(self, query: Mapping[str, str]) -> Source:
        return self._sources[_place(query, "source", len(self._sources))]

    def _about(self, query: Mapping[str, str]) -> Answer:
        sources = [
            {
                "name": source.name,
                "episodes": len(source.table),
                "steps": int(source.table["length"].sum()),
                "excluded": np.flatnonzero(source.excluded).tolist(),
                "can_exclude": source.can_exclude,
                "note": source.note,
                "dataset": source.dataset,
                "films": [*source.films],
            }
            for source in self._sources
        ]
        return Answer.of({"title": self._title, "sources": sources, "colors": COLORS})

    def _episodes(self, query: Mapping[str, str]) -> Answer:
        """A part of the list of episodes that meet the page's conditions."""
        source, conditions = self._source(query), _conditions(query)
        found = Filter(**conditions).chosen(source.table, source.labels)
        marked = query.get("excluded", "")
        if marked in ("yes", "no"):
            found = found[source.excluded[found] == (marked == "yes")]
        start = _whole(query.get("start", "0"))
        rows = [_row(source, number) for number in found[start : start + _ROWS].tolist()]
        answer = {"count": len(found), "rows": rows, "steps": int(_lengths(source, found).sum())}
        return Answer.of({**answer, "command": _command(source, conditions)})

    def _episode(self, query: Mapping[str, str]) -> Answer:
        """The curves of an episode; of a long one, every n-th step."""
        source = self._source(query)
        number = _place(query, "number", len(source.table))
        length, curves = int(source.table["length"][number]), []
        stride = max(1, -(-length // _POINTS))
        offsets = np.arange(0, length, stride)
        rewarded = source.labels.rewarded[number]
        names = [name for name in source.curves if name != "rewards" or rewarded]
        arrays = source.columns(number, names, offsets) if source.specs else {}
        for name, array in arrays.items():
            shown = flat(array, MAX_DIMENSIONS)
            dims = int(np.prod(array.shape[1:], dtype=np.int64))
            lines = [_finite(line) for line in shown.T]
            names = [*source.names.get(name, ())][: len(lines)]
            label = name.removeprefix(OBS)
            curves.append({"name": label, "dims": dims, "lines": lines, "names": names})
        return Answer.of(
            {
                **_row(source, number),
                "stride": stride,
                "curves": curves,
                "pictures": source.pictures,
                "numbers": source.numbers(number),
            }
        )

    def _picture(self, query: Mapping[str, str]) -> Answer:
        """A picture of a step, as PNG."""
        from PIL import Image

        source = self._source(query)
        number = _place(query, "number", len(source.table))
        step = _place(query, "step", int(source.table["length"][number]))
        name = query.get("name", "")
        if name not in source.pictures:
            raise UsageError(f"There is no picture '{name[:80]}' in these episodes.")
        (pixels,) = source.columns(number, [OBS + name], np.array([step]))[OBS + name]
        stream = io.BytesIO()
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        picture.save(stream, "PNG", compress_level=1)
        return Answer(stream.getvalue(), "image/png")

    def _statistics_of(self, query: Mapping[str, str]) -> Answer:
        number = _place(query, "source", len(self._sources))
        if number not in self._statistics:
            self._statistics[number] = statistics(self._sources[number])
        return Answer.of(self._statistics[number])

    def _film(self, query: Mapping[str, str]) -> Answer:
        file = self._source(query).films.get(query.get("name", ""))
        if file is None or file.stat().st_size > _MAX_FILM:
            raise UsageError("There is no such film, or it is too large for the page.")
        return Answer(file.read_bytes(), film_kind(file))


def embedded(title: str, source: Source, film: Sequence[str], stride: int, rate: float) -> str:
    """The page of a few episodes as one file that needs no network.

    film: pictures of episode 0 as data URIs, one of every `stride` steps; rate: steps per second.
    """
    viewer = Viewer(title, [source])
    numbers = range(len(source.table))
    content = {
        "about": json.loads(viewer.get("/about", {}).body),
        "episodes": json.loads(viewer.get("/episodes", {"source": "0"}).body),
        "film": {"pictures": [*film], "stride": stride, "rate": rate},
        **{
            f"episode {n}": json.loads(
                viewer.get("/episode", {"source": "0", "number": f"{n}"}).body
            )
            for n in numbers
        },
        "statistics": statistics(source),
    }
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    script, style = ((_FOLDER / n).read_text() for n in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _rendered(title, script, style, text, policy)


def _rendered(title: str, script: str, style: str, content: str = "", policy: str = "") -> str:
    env = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    return env.get_template("page.html").render(
        title=title, script=script, style=style, content=content, policy=policy
    )


def _page(title: str) -> Answer:
    """The page, whose policy allows its own script and style, by their hashes."""
    script, style = ((_FOLDER / n).read_text() for n in ("script.js", "style.css"))
    page = _rendered(title, script, style)
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "img-src 'self' data:; media-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return Answer(page.encode(), "text/html; charset=utf-8", policy)


def _row(source: Source, number: int) -> dict[str, Any]:
    """An episode in the list."""
    labels, entry = source.labels, source.table[number]
    return {
        "number": number,
        "name": labels.names[number][:_TEXT],
        "kind": labels.kinds[number][:_TEXT],
        "success": labels.successes[number],
        "task": labels.tasks[number][:_TEXT],
        "steps": int(entry["length"]),
        "return": float(entry["return"]) if labels.rewarded[number] else None,
        "excluded": bool(source.excluded[number]),
    }


def _lengths(source: Source, numbers: Array) -> Array:
    found: Array = source.table["length"][numbers]
    return found


def _conditions(query: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `Filter` in a query; texts are found anywhere."""
    found: dict[str, Any] = {}
    for name, kind in _CONDITIONS.items():
        if text := query.get(name, "").strip():
            try:
                found[name] = kind(text)
            except ValueError as error:
                option = name.replace("_", " ")
                raise UsageError(f"'{text[:80]}' is not a number ({option}).") from error
    for name in ("task", "name"):
        if name in found:
            found[name] = f"*{found[name]}*"
    if found.get("success", "yes") not in ("yes", "no", "unknown"):
        raise UsageError("Success is yes, no or unknown.")
    return found


def _command(source: Source, conditions: Mapping[str, Any]) -> str:
    """The command that makes a dataset of the episodes in the list; "" if there is none."""
    if not source.dataset or not conditions:
        return ""
    options = [f"--{n.replace('_', '-')} {shlex.quote(str(v))}" for n, v in conditions.items()]
    return " ".join(["etude data filter", shlex.quote(source.dataset), "OUT", *options])


def _finite(line: Array) -> list[float | None]:
    """Numbers with six digits; None for those that are not finite."""
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in line.tolist()]


def _whole(value: Any) -> int:
    """A number that the page sent."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    if type(value) is int and value >= 0:
        return value
    raise UsageError(f"'{str(value)[:80]}' is not a number of the page.")


def _place(query: Mapping[str, str], name: str, count: int) -> int:
    """A number in a query, below `count`."""
    number = _whole(query.get(name, ""))
    if number >= count:
        raise UsageError(f"There is no {name} {number:,}: there are {count:,}.")
    return number
