"""Names of this package's own modules, and errors of other people's code."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Any


def attribute(name: str) -> Any:
    """What is behind "module:name" in this package, where modules name each other without an
    import: those above themselves, and those that are rarely needed."""
    module, _, inside = name.partition(":")
    return getattr(importlib.import_module(module), inside)


def describe(error: BaseException) -> str:
    """An error in someone else's code in a few words, with file and line where they are known."""
    text = " ".join(str(error).split()).rstrip(".") or "no message"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {text}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"
