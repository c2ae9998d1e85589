"""What lies beside a store's blocks: where its episodes come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array

ABOUT = "about.json"
"""Its name. A store is whole without one."""
_CLIP = "clip of "
_MOST_BYTES = 1 << 28


def clip_kind(name: str) -> str:
    """What kind of episode the beginning of the episode `name` is."""
    return f"{_CLIP}{name}"


def read_about(path: Path) -> dict[str, Any]:
    """What `about.json` in a store's folder says, {} without one."""
    about = path / ABOUT
    if not about.is_file() or about.is_symlink() or about.stat().st_size > _MOST_BYTES:
        return {}
    try:
        document = json.loads(about.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def read_sources(path: Path, num_episodes: int) -> Array:
    """[episodes] int64: the episode each was cut from, itself where it is whole.

    Also itself where nothing is known of it.
    """
    own = np.arange(num_episodes)
    episodes = read_about(path).get("episodes")
    if not isinstance(episodes, list) or len(episodes) != num_episodes:
        return own
    told = [
        (e.get("name"), e.get("kind")) if isinstance(e, dict) else (None, None) for e in episodes
    ]
    numbers = {name: i for i, (name, _) in enumerate(told) if isinstance(name, str)}
    for i, (_, kind) in enumerate(told):
        if isinstance(kind, str) and kind.startswith(_CLIP):
            own[i] = numbers.get(kind.removeprefix(_CLIP), i)
    return own
