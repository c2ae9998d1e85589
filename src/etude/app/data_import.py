"""Datasets into and out of the episode store: import, and validation of what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.experience.datasets import (
    DataError,
    Limits,
    ReadOptions,
    SourceEpisode,
    Summary,
    open_dataset,
)
from etude.experience.episodes import EpisodeStore, StoreGeometry
from etude.experience.episodes_about import ABOUT, clip_kind
from etude.experience.episodes_files import DESCRIPTION
from etude.experience.episodes_geometry import OBS
from etude.runs import files

_SHORTEST = 0.1
"""Share of an episode that a clip of it has at least, and lacks at least."""
_FLAGS = {
    "rewards": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
}

Tick = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class Kept:
    """One episode of a store, as `about.json` tells of it."""

    name: str
    steps: int
    total: float
    success: bool | None
    kind: str
    """"whole", or "clip of <name>", or what was recorded."""


@contextmanager
def new_store(path: Path, fields: dict[str, ArraySpec], max_steps: int) -> Iterator[EpisodeStore]:
    """A store of whole episodes in a new folder; it is removed again where something fails.

    fields: observations as "obs/<name>", and "actions".
    """
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; choose another folder, or delete it first.")
    files.make_folder(path.resolve().parent)
    geometry = StoreGeometry({**fields, **_FLAGS}, lanes=1, max_episode_steps=max_steps)
    store = EpisodeStore.create(path, geometry, files.Disk())
    try:
        yield store
    except BaseException:
        store.close()
        files.remove_tree(path)
        raise


def finish(store: EpisodeStore, about: dict[str, Any], kept: list[Kept]) -> EpisodeStore:
    """Seal a store, with what is known of its episodes beside it."""
    document = {**about, "episodes": [asdict(episode) for episode in kept]}
    files.write_file(store.path / ABOUT, [json.dumps(document, indent=1).encode()])
    return store.seal()


def draw_clips(lengths: Array, num: int, seed: int) -> dict[int, list[int]]:
    """{episode: steps of its clips}: `num` in all, spread evenly, drawn from the seed."""
    long = np.flatnonzero(lengths >= 2)
    if num and not len(long):
        raise UsageError("No episode is long enough to be cut; leave out --add-truncated.")
    generator, clips = Key(seed).child("data", "clips").generator(), dict[int, list[int]]()
    for start in range(0, num, max(1, len(long))):
        for episode in generator.permutation(long)[: num - start].tolist():
            steps = int(lengths[episode])
            least = max(1, round(_SHORTEST * steps))
            cut = int(generator.integers(least, max(least, steps - least) + 1))
            clips.setdefault(episode, []).append(min(cut, steps - 1))
    return clips


def import_dataset(
    path: Path,
    out: Path,
    options: ReadOptions,
    limits: Limits,
    add_truncated: int = 0,
    seed: int = 0,
    tick: Tick = lambda done, total: None,
) -> tuple[Summary, EpisodeStore, list[Kept]]:
    """A file's episodes, and clips of them, in a sealed store."""
    with open_dataset(path, "read", options, limits) as dataset:
        summary = dataset.summary
        summary.check_alike()
        clips = draw_clips(summary.lengths, add_truncated, seed)
        fields = {
            name if name == "actions" else OBS + name: ArraySpec(field.shape, field.dtype)
            for name, field in summary.fields.items()
        }
        kept: list[Kept] = []
        with new_store(out, fields, int(summary.lengths.max())) as store:
            done = 0
            for number, episode in enumerate(dataset.episodes()):
                known = summary.episodes[number]
                store.append_episode(
                    episode.obs, episode.actions, episode.rewards, episode.terminated
                )
                total = float(episode.rewards.sum(dtype=np.float64))
                kept.append(Kept(known.name, known.steps, total, known.success, "whole"))
                kept += [
                    _append_clip(store, episode, cut, known.success is not None)
                    for cut in clips.get(number, [])
                ]
                done += known.steps
                tick(done, summary.num_steps)
            about = {
                "source": str(path),
                "format": summary.format,
                "notes": summary.notes,
                "options": asdict(options) | {"add_truncated": add_truncated, "seed": seed},
            }
            return summary, finish(store, about, kept), kept


def _append_clip(store: EpisodeStore, episode: SourceEpisode, cut: int, known: bool) -> Kept:
    """The first `cut` steps of an episode, as one that was cut short."""
    rewards = episode.rewards[:cut]
    obs = {name: array[: cut + 1] for name, array in episode.obs.items()}
    store.append_episode(obs, episode.actions[:cut], rewards, False)
    total = float(rewards.sum(dtype=np.float64))
    kind = clip_kind(episode.name)
    return Kept(f"{episode.name}[:{cut}]", cut, total, total > 0 if known else None, kind)


def is_store(path: Path) -> bool:
    return path.is_dir() and os.path.lexists(path / DESCRIPTION)


def validate_store(path: Path, tick: Tick = lambda done, total: None) -> EpisodeStore:
    """Read all of a store: hashes, finite numbers, flags and returns; raises at the first fault."""
    store = EpisodeStore.open(path)
    store.check_blocks()
    done = 0
    for number in range(store.num_episodes):
        steps, total = store.episode(number)
        name = f"episode {number:,}"
        arrays = {**steps.obs, "actions": steps.actions, "rewards": steps.rewards}
        arrays |= {f"next {n}": a[-1:] for n, a in steps.next_obs.items()}
        for label, array in arrays.items():
            _check_finite(path, name, label, array)
        ends = steps.terminated | steps.truncated
        if not ends[-1] or ends[:-1].any() or (steps.terminated & steps.truncated).any():
            raise DataError(path, "does not end once, at its last step; import it again", name)
        if not np.isclose(steps.rewards.sum(dtype=np.float64), total, rtol=1e-5, atol=1e-5):
            raise DataError(path, "has rewards that do not add up to its return", name)
        done += len(ends)
        tick(done, store.num_transitions)
    return store


def _check_finite(path: Path, episode: str, label: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        step = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
        what = f"'{label}' is not a finite number at step {step:,}; import or record it again"
        raise DataError(path, what, episode)
