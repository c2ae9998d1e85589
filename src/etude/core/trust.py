"""Which code may run: what a person names may, what a recipe file names needs their trust, once.

A recipe is data, but some of its texts can name code: a task's class, a module, an environment of
a package, a Ray cluster. `doubt` notes every text of a file that was read, and whatever would run
code asks `check` first. Trust is remembered outside of any run folder, per recipe file:

    $XDG_STATE_HOME/etude/trusted/<SHA-256 of the file's path>.json

A process that Etude starts is handed only what was checked in the one that starts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.errors import UsageError


class Untrusted(UsageError):
    """Code that a file names and nobody has trusted."""


class _Source(NamedTuple):
    """The file that names something, and whether it was opened with trust."""

    path: Path
    trust: bool


_doubted: dict[str, _Source] = {}
_vouched: set[str] = set()
_used: dict[str, Path | None] = {}
"""What was let through in this process, and the file its code is in, where there is one."""


def vouch(texts: Iterable[str]) -> None:
    """A person has named these here: they are trusted, unless a file had named them before."""
    _vouched.update(text for text in texts if text not in _doubted)


def doubt(texts: Iterable[str], path: Path, trust: bool) -> None:
    """A recipe file holds these: where one of them names code, it must be trusted.

    Trust that was given with a text of this file stays.
    """
    real = Path(os.path.realpath(path))
    new = {text for text in texts if _doubted.get(text) != _Source(real, True)}
    _doubted.update((text, _Source(real, trust)) for text in new - _vouched)


def check(name: str, what: str, origin: Path | None = None) -> None:
    """Refuse what a file has named and nobody trusts.

    what: what would happen, as in "file.yaml names 'x', which would <what>"; origin: the file of
    the code, whose contents are part of what is trusted.
    """
    source = _doubted.get(name)
    if source is not None and source.trust:
        _record(source.path, {name: {"from": _text(origin), "sha256": _sha256(origin)}})
    elif source is not None and (name not in _used or _used[name] != origin):
        why = _objection(_recorded(source.path).get(name), origin)
        if why:
            raise Untrusted(
                f"{source.path} names '{name}', which would {what}, {why}. That is code, and can "
                "do whatever you can: look at it, then say --trust once (trust=True in Python). It "
                "is remembered for this file on this machine."
            )
    _used[name] = origin


def remember(path: Path, texts: Iterable[str]) -> None:
    """This file was written here, by who runs the code that it names: that stays trusted."""
    named = {text: _used[text] for text in texts if text in _used}
    if named:
        entries = {n: {"from": _text(origin), "sha256": None} for n, origin in named.items()}
        _record(Path(os.path.realpath(path)), entries)


def origins(texts: Iterable[str]) -> dict[str, Path]:
    """{text: file of the code that it names} of texts that were let through in this process."""
    found = {text: _used.get(text) for text in texts}
    return {text: origin for text, origin in found.items() if origin is not None}


def has_run(texts: Iterable[str]) -> bool:
    """Whether one of these names code that was let through in this process."""
    return any(text in _used for text in texts)


def _objection(known: dict[str, Any] | None, origin: Path | None) -> str:
    """What speaks against code, given what was trusted under its name; "" if nothing does."""
    if known is None or known["from"] != _text(origin):
        return "and nobody has trusted it here yet"
    changed = known["sha256"] not in (None, _sha256(origin))
    return "and has changed since it was trusted" if changed else ""


def _text(origin: Path | None) -> str:
    return "" if origin is None else str(origin)


def _sha256(origin: Path | None) -> str | None:
    if origin is None:
        return None
    try:
        return hashlib.sha256(origin.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"


def _store(path: Path) -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = hashlib.sha256(os.fsencode(path)).hexdigest()
    return Path(state) / "etude" / "trusted" / f"{name}.json"


def _recorded(path: Path) -> dict[str, dict[str, Any]]:
    """What is trusted of the file at a path, by name."""
    try:
        content = json.loads(_store(path).read_text())
        return {str(n): {key: e[key] for key in ("from", "sha256")} for n, e in content["code"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Trust more of a file; where it cannot be kept, it holds for this process."""
    for name in entries:
        _doubted.pop(name, None)
    code, store = {**_recorded(path), **entries}, _store(path)
    beside = store.with_name(f".tmp-{store.name}-{os.getpid()}")
    try:
        store.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.write_text(json.dumps({"file": str(path), "code": list(code.items())}, indent=2))
        os.replace(beside, store)
    except OSError as error:
        print(f"Trust in {path} could not be kept: {store}: {error.strerror}.", file=sys.stderr)
