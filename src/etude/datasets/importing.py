"""Datasets into and out of the episode store: import, and validation of what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.datasets.opening import Limits, notes_of, open_dataset, scan
from etude.datasets.summary import DataError, Described, Episode, ReadOptions, shared_fields
from etude.experience.contrast import draw_clips
from etude.experience.store.episodes import EpisodeStore, StoreGeometry
from etude.experience.store.files import DESCRIPTION
from etude.experience.store.geometry import OBS
from etude.experience.store.labels import Labels
from etude.runs import files

_MOST_ABOUT = 1 << 28
ABOUT = "about.json"
"""Where a dataset's files came from, for people; a dataset is whole without it."""
_FLAGS = {
    "rewards": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
}

Tick = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@contextmanager
def new_store(path: Path, fields: dict[str, ArraySpec], max_steps: int) -> Iterator[EpisodeStore]:
    """A store of whole episodes in a new folder; it is removed again where something fails.

    fields: observations as "obs/<name>", and "actions".
    """
    check_new(path)
    files.make_folder(path.resolve().parent)
    geometry = StoreGeometry({**fields, **_FLAGS}, lanes=1, max_episode_steps=max_steps)
    store = EpisodeStore.create(path, geometry, files.current())
    try:
        yield store
    except BaseException:
        store.close()
        files.remove_tree(path)
        raise


def check_new(path: Path) -> None:
    """Refuse a folder to make that is there already."""
    if path.is_dir():
        raise UsageError(f"{path} exists already; choose another folder, or delete it first.")
    if os.path.lexists(path):
        raise UsageError(f"{path} is a file: the folder to make is named last.")


def finish(store: EpisodeStore, about: dict[str, Any], labels: Labels) -> EpisodeStore:
    """Seal a store with what is known of its episodes, and say beside it where they are from."""
    files.write_file(store.path / ABOUT, [json.dumps(about, indent=1).encode()])
    return store.seal(labels)


def read_about(path: Path) -> dict[str, Any]:
    """What `about.json` in a store's folder says, {} without one."""
    about = path / ABOUT
    if not about.is_file() or about.is_symlink() or about.stat().st_size > _MOST_ABOUT:
        return {}
    try:
        document = json.loads(about.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def import_dataset(
    paths: Sequence[Path],
    out: Path,
    options: ReadOptions,
    limits: Limits,
    add_truncated: int = 0,
    seed: int = 0,
    tick: Tick = lambda done, total: None,
) -> EpisodeStore:
    """The episodes of all files, and clips of them, in one sealed store."""
    check_new(out)
    summaries = [scan(path, options, limits) for path in paths]
    shared, left_out = shared_fields(summaries, options.obs)
    lengths = np.concatenate([summary.lengths for summary in summaries])
    ends: list[list[int]] = [[] for _ in lengths]  # of the clips of each episode
    if add_truncated and (lengths < 2).all():
        raise UsageError("No episode is long enough to be cut; leave out --add-truncated.")
    for number, end in zip(*draw_clips(lengths, add_truncated, Key(seed)), strict=True):
        ends[number].append(int(end))
    fields = {
        name if name == "actions" else OBS + name: ArraySpec(field.shape, field.dtype)
        for name, field in shared.items()
    }
    notes = notes_of([e for summary in summaries for e in summary.episodes], options)
    if left_out:
        names = ", ".join(f"'{name}'" for name in left_out)
        notes.append(f"Not every episode has {names} in the same size: that is left out.")
    if add_truncated:
        notes.append(
            f"{add_truncated:,} clips that end before their episode does are added, with the "
            f"rewards until then (seed {seed}); each follows its original."
        )
    chosen = replace(options, obs=tuple(name for name in shared if name != "actions"))
    with new_store(out, fields, int(lengths.max())) as store:
        labels, total, clips = Labels(), int(lengths.sum()), iter(ends)
        for summary in summaries:
            with open_dataset(summary.path, "read", chosen, limits) as dataset:
                if dataset.summary.lengths.tolist() != summary.lengths.tolist():
                    raise DataError(
                        summary.path, "changed while it was being imported; import it again"
                    )
                prefix = f"{summary.path.stem}/" if len(paths) > 1 else ""
                for known, episode in zip(summary.episodes, dataset.episodes(), strict=True):
                    _append(store, labels, episode, known, prefix, summary.task, next(clips))
                    tick(store.num_transitions, total)
        about = {
            "source": str(paths[0]) + (f" and {len(paths) - 1:,} more" if paths[1:] else ""),
            "files": [str(path) for path in paths],
            "format": ", ".join(dict.fromkeys(summary.format for summary in summaries)),
            "notes": notes,
            "options": asdict(options) | {"add_truncated": add_truncated, "seed": seed},
        }
        return finish(store, about, labels)


def _append(
    store: EpisodeStore,
    labels: Labels,
    episode: Episode,
    known: Described,
    prefix: str,
    task: str,
    ends: list[int],
) -> None:
    """An episode, then its clips: its first steps, up to each of the `ends`."""
    number, name, rewards = len(labels), prefix + known.name, episode.rewards
    store.append_episode(episode.obs, episode.actions, rewards, episode.terminated)
    labels.add(name, "whole", None, known.success, known.rewarded, task)
    for end in ends:
        obs = {key: array[: end + 1] for key, array in episode.obs.items()}
        store.append_episode(obs, episode.actions[:end], rewards[:end], False)
        # A clip fails where its episode does, or is rewarded only later; else it is unknown.
        fails = known.success is False
        fails |= bool(known.success and rewards[end:].any() and not rewards[:end].any())
        success = False if fails else None
        labels.add(f"{name}[:{end}]", "clip", number, success, known.rewarded, task)


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
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                step = int(np.argmin(np.isfinite(array).reshape(len(array), -1).all(axis=1)))
                what = f"'{label}' is not a finite number at step {step:,}; "
                what += "import or record it again"
                raise DataError(path, what, name)
        ends = steps.terminated | steps.truncated
        if not ends[-1] or ends[:-1].any() or (steps.terminated & steps.truncated).any():
            raise DataError(path, "does not end once, at its last step; import it again", name)
        if not np.isclose(steps.rewards.sum(dtype=np.float64), total, rtol=1e-5, atol=1e-5):
            raise DataError(path, "has rewards that do not add up to its return", name)
        done += len(ends)
        tick(done, store.num_transitions)
    return store
