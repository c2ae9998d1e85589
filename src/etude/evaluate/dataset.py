"""Descriptions of datasets, as text for people and as JSON for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.units import size
from etude.data.contrast import contrast
from etude.data.formats.opening import Summary
from etude.data.importing import read_about
from etude.data.store.episodes import EpisodeStore
from etude.data.store.geometry import OBS
from etude.data.store.manifest import Episodes

Facts = dict[str, Any]
_SHOWN = 3
"""Tasks in the text; there may be hundreds."""


def source_facts(summary: Summary) -> Facts:
    """Facts of a file of another system."""
    fields = summary.fields
    actions = fields.pop("actions")
    unrewarded = sum(not episode.rewarded for episode in summary.episodes)
    return {
        "path": str(summary.path),
        "format": summary.format,
        "steps_in_file": summary.num_file_steps,
        "observations": {name: asdict(field) for name, field in fields.items()},
        "actions": {
            **asdict(actions),
            "largest": max(episode.largest_action for episode in summary.episodes),
        },
        "tasks": list(dict.fromkeys(e.task or summary.task for e in summary.episodes)),
        "masks": summary.masks,
        "notes": summary.notes,
        **_numbers(summary.lengths, summary.returns, summary.num_successes, unrewarded),
    }


def store_facts(store: Episodes) -> Facts:
    """Facts of a finished dataset, with its source."""
    specs, about, labels = store.geometry.specs, read_about(store.path), store.labels
    notes = about.get("notes")
    return {
        "path": str(store.path),
        "format": "episode store" if isinstance(store, EpisodeStore) else "manifest",
        "source": str(about.get("source", "unknown")),
        "steps_in_file": store.num_transitions,
        "observations": {
            n.removeprefix(OBS): {"shape": s.shape, "dtype": s.dtype}
            for n, s in specs.items()
            if n.startswith(OBS)
        },
        "actions": {"shape": specs["actions"].shape, "dtype": specs["actions"].dtype},
        "tasks": [task for task in dict.fromkeys(labels.tasks) if task],
        "embeddings": [len(labels.embeddings), *{len(x) for x in labels.embeddings.values()}],
        "masks": {},
        "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
        **_numbers(store.lengths, store.returns, labels.num_successes, labels.num_unrewarded),
    }


def _numbers(lengths: Array, returns: Array, successes: int | None, unrewarded: int) -> Facts:
    found = contrast(returns, lengths)
    without = (
        f"{unrewarded:,} of {len(lengths):,} episodes have no rewards: policies can be learned "
        "from them, rewards cannot."
    )
    return {
        "episodes": len(lengths),
        "steps": int(lengths.sum()),
        "lengths": {
            "min": int(lengths.min()),
            "median": float(np.median(lengths)),
            "max": int(lengths.max()),
        },
        "returns": {n: float(getattr(returns, n)()) for n in ("min", "mean", "max", "std")},
        "successes": successes,
        "unrewarded": unrewarded,
        "contrast": found.enough and not unrewarded,
        "verdict": without if unrewarded else found.sentence,
    }


def render(facts: Facts, width: int = 100) -> str:
    """The facts as text, the verdict last."""
    lengths, returns = facts["lengths"], facts["returns"]
    steps, in_file = facts["steps"], facts["steps_in_file"]
    rows = [
        ("format", facts["format"] + (f", {facts['source']}" if "source" in facts else "")),
        ("episodes", f"{facts['episodes']:,}"),
        ("steps", f"{steps:,}" + (f" ({in_file:,} in the file)" if in_file != steps else "")),
        ("lengths", f"{lengths['min']:,} to {lengths['max']:,}, median {lengths['median']:,g}"),
        (
            "returns",
            f"{returns['min']:g} to {returns['max']:g}, mean {returns['mean']:.4g}, standard "
            f"deviation {returns['std']:.4g}",
        ),
        ("successes", "unknown" if facts["successes"] is None else str(facts["successes"])),
    ]
    if facts["tasks"]:
        more = f" and {len(facts['tasks']) - _SHOWN:,} more" if len(facts["tasks"]) > _SHOWN else ""
        rows.append(("tasks", "; ".join(facts["tasks"][:_SHOWN]) + more))
    if facts.get("embeddings", [0])[0]:
        sentences, numbers = facts["embeddings"]
        rows.append(("embeddings", f"of {sentences:,} sentences, {numbers:,} numbers each"))
    if facts["masks"]:
        rows.append(("masks", ", ".join(f"{name} ({num})" for name, num in facts["masks"].items())))
    largest = facts["actions"].get("largest")
    said = "" if largest is None else f", largest {largest:.4g}"
    rows.append(("actions", _array(facts["actions"]) + said))
    rows += [(f"obs {name}", _array(spec)) for name, spec in facts["observations"].items()]
    wide = max(len(name) for name, _ in rows) + 2
    lines = [facts["path"], *(f"  {name:<{wide}}{text}" for name, text in rows), ""]
    for text in [*facts["notes"], facts["verdict"]]:
        lines += textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    # Names and sentences from untrusted files may contain control sequences of terminals.
    shown = ("".join(c if c.isprintable() else "?" for c in line) for line in lines)
    return "\n".join(shown) + "\n"


def _array(spec: Facts) -> str:
    return f"{spec['dtype']} [{', '.join(map(str, spec['shape']))}]"


def folder_size(path: Path) -> str:
    """Size of the files in a folder, as text."""
    return size(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
