"""Import into a dataset, export to other formats, validation, and descriptions of datasets."""

from __future__ import annotations

import hashlib
import json
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.limited import Limits
from etude.core.output import size
from etude.data.contrast import contrast, draw_clips
from etude.data.formats.base import (
    DataError,
    DatasetFormat,
    Described,
    Episode,
    ExportedDataset,
    ReadOptions,
)
from etude.data.formats.opening import Dataset, Summary, notes_of, open_dataset, scan, shared_fields
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.files import SEAL, read_json, write_json
from etude.data.store.geometry import OBS, is_picture
from etude.data.store.labels import Labels
from etude.data.store.manifest import MANIFEST, Episodes, num_excluded, open_episodes
from etude.runs import files
from etude.runs.file_system import AlreadyLocked, FolderLock

_MAX_ABOUT = 1 << 28
ABOUT = "about.json"
"""Where a dataset's files came from, for people; the program does not need it."""
PROGRESS = "import.json"
"""Progress of an import; deleted when it is finished."""
_OWN = re.compile(
    r"[a-z]+-[0-9]{12,}\.bin|(\.tmp-)?(store|sealed|labels|about|import)\.json(-[0-9]+)?"
)
"""Names of files that an import writes; other files in its folder are never deleted."""
SAVE_SECONDS = 5.0
"""Seconds of an import that a kill may lose."""
_FLAGS = {
    "rewards": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
}

Pictures = Literal["raw", "png", "jpeg"]
"""How pictures are stored: as bytes, or compressed without or with a little loss."""
Tick = Callable[[int, int], None]
"""Called with (steps done, all steps)."""


@contextmanager
def new_store(
    path: Path, fields: dict[str, ArraySpec], max_steps: int, pictures: Pictures = "raw"
) -> Iterator[EpisodeStore]:
    """A store of whole episodes in a new folder, which is removed on failure.

    fields: observations as "obs/<name>", and "actions".
    """
    check_new(path)
    files.make_folder(path.resolve().parent)
    geometry = _geometry(fields, max_steps, pictures)
    store = EpisodeStore.create(path, geometry, files.current())
    try:
        yield store
    except BaseException:
        store.close()
        files.remove_tree(path)
        raise


def _geometry(fields: dict[str, ArraySpec], max_steps: int, pictures: Pictures) -> StoreGeometry:
    encoded = {n: pictures for n, s in fields.items() if n.startswith(OBS) and is_picture(s)}
    return StoreGeometry(
        {**fields, **_FLAGS},
        lanes=1,
        max_episode_steps=max_steps,
        encoded={} if pictures == "raw" else encoded,
    )


def check_new(path: Path) -> None:
    """Refuse a new folder that exists already."""
    if path.is_dir():
        raise UsageError(f"{path} exists already; choose another folder, or delete it first.")
    if os.path.lexists(path):
        raise UsageError(f"{path} is a file: name the folder to make last.")


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Make a folder beside `out`; it is renamed to `out` at the end, or removed on failure."""
    check_new(out)
    beside = files.free_path(out.resolve().with_name(f".{out.name}.partial"))
    files.make_folder(beside.parent)
    files.new_folder(beside)
    try:
        yield beside
        files.rename(beside, out)
    except BaseException:
        files.remove_tree(beside)
        raise
    files.fsync_folder(beside.parent)


def finish(store: EpisodeStore, about: dict[str, Any], labels: Labels) -> EpisodeStore:
    """Seal a store with the labels of its episodes; about: where they are from."""
    files.replace_file(store.path / ABOUT, [json.dumps(about, indent=1).encode()])
    return store.seal(labels)


def read_about(path: Path) -> dict[str, Any]:
    """Read `about.json` in a dataset's folder; {} without one."""
    about = path / ABOUT
    if not about.is_file() or about.is_symlink() or about.stat().st_size > _MAX_ABOUT:
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
    pictures: Pictures = "raw",
    kind: str | None = None,
) -> EpisodeStore:
    """The episodes of all files, and clips of them, in one sealed store.

    kind: the format of the files; None for the first that recognises each. An import that was
    killed continues when it is called again with the same files and options, and ends with the
    same bytes.
    """
    if not is_unfinished(out):
        check_new(out)
    summaries = [scan(path, options, limits, kind) for path in paths]
    shared, left_out = shared_fields(summaries, options.obs)
    lengths = np.concatenate([summary.lengths for summary in summaries])
    ends: list[list[int]] = [[] for _ in lengths]  # lengths of the clips of each episode
    if add_truncated and (lengths < 2).all():
        raise UsageError("No episode is long enough to be clipped; leave out --add-truncated.")
    for number, end in zip(*draw_clips(lengths, add_truncated, Key(seed)), strict=True):
        ends[number].append(int(end))
    fields = {
        name if name == "actions" else OBS + name: ArraySpec(field.shape, field.dtype)
        for name, field in shared.items()
    }
    notes = notes_of([e for summary in summaries for e in summary.episodes], options)
    if left_out:
        names = ", ".join(f"'{name}'" for name in left_out)
        notes.append(f"Not every episode has {names} in the same size: left out.")
    if add_truncated:
        notes.append(
            f"{add_truncated:,} clips that end before their episode does are added, with the "
            f"rewards until then (seed {seed}); each follows its original."
        )
    chosen_options = asdict(options) | {"add_truncated": add_truncated, "seed": seed}
    chosen_options |= {} if pictures == "raw" else {"pictures": pictures}
    chosen_options |= {} if kind is None else {"format": kind}
    about = {
        "source": str(paths[0]) + (f" and {len(paths) - 1:,} more" if paths[1:] else ""),
        "files": [str(path) for path in paths],
        "format": ", ".join(dict.fromkeys(summary.format for summary in summaries)),
        "notes": notes,
        "options": chosen_options,
    }
    chosen = replace(options, obs=tuple(name for name in shared if name != "actions"))
    wanted = _hash_of(summaries, chosen_options)
    geometry = _geometry(fields, int(lengths.max(initial=1)), pictures)
    with _unfinished(out, wanted):
        store = EpisodeStore.create(out, geometry, files.current())
        try:
            read = partial(open_dataset, job="read", options=chosen, limits=limits, kind=kind)
            labels = _fill(store, summaries, read, ends, wanted, tick)
            done = finish(store, about, labels)
        except (DataError, UsageError):  # would happen again
            store.close()
            remove(out)
            raise
        files.remove_tree(out / PROGRESS)
    return done


def _fill(
    store: EpisodeStore,
    summaries: Sequence[Summary],
    read: Callable[..., Dataset],
    ends: list[list[int]],
    wanted: str,
    tick: Tick,
) -> Labels:
    """Append every episode and its clips, from where an earlier import stopped; their labels.

    read: opens a file. ends: lengths of each episode's clips. wanted: the hash of the import.
    """
    labels, clips, total = Labels(), iter(ends), sum(int(s.lengths.sum()) for s in summaries)
    skip, saved = _go_on(store), time.monotonic()
    done = 0
    for summary in summaries:
        prefix = f"{summary.path.stem}/" if len(summaries) > 1 else ""
        skipped = min(max(skip - done, 0), len(summary.episodes))
        for known in summary.episodes[:skipped]:
            cuts = next(clips)
            rewards = store.episode(len(labels))[0].rewards if cuts else np.empty(0)
            _label(labels, known, prefix, known.task or summary.task, rewards, cuts)
        done += len(summary.episodes)
        if skipped == len(summary.episodes):
            continue
        with read(summary.path, skip=skipped) as dataset:
            if dataset.summary.lengths.tolist() != summary.lengths.tolist():
                raise DataError(
                    summary.path, "changed while it was being imported; import it again"
                )
            left = summary.episodes[skipped:]
            for number, (known, episode) in enumerate(zip(left, dataset.episodes(), strict=True)):
                cuts = next(clips)
                _append(store, episode, cuts)
                task = known.task or summary.task
                _label(labels, known, prefix, task, episode.rewards, cuts)
                tick(store.num_transitions, total)
                if time.monotonic() - saved > SAVE_SECONDS:
                    before = done - len(left) + number + 1
                    _save(store, before, wanted)
                    saved = time.monotonic()
    return labels


def _hash_of(summaries: Sequence[Summary], options: dict[str, Any]) -> str:
    """The hash of an import: files, sizes, times, episodes and options."""
    sha = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for summary in summaries:
        file = summary.path.stat()
        changed = [file.st_size, file.st_mtime_ns] if summary.path.is_file() else []
        sha.update(json.dumps([summary.path.stem, changed]).encode())
        for episode in summary.episodes:
            sha.update(json.dumps(asdict(episode), sort_keys=True).encode())
    return sha.hexdigest()


def remove(out: Path) -> None:
    """Delete the files of an import, and the folder if nothing else is in it."""
    files.remove_files(out, [*filter(_OWN.fullmatch, sorted(os.listdir(out)))])


def is_unfinished(out: Path) -> bool:
    """Whether a folder has an unfinished import, which can be continued."""
    return os.path.lexists(out / PROGRESS) and not os.path.lexists(out / SEAL)


@contextmanager
def _unfinished(out: Path, wanted: str) -> Iterator[None]:
    """Lock the folder of a new or unfinished import for this process; another import is refused.

    The folder is created together with the file that has the hash of the import.
    """
    if not is_unfinished(out):
        with made_whole(out) as folder:
            write_json(folder / PROGRESS, {"of": wanted, "episodes": 0}, files.current())
    if read_json(out / PROGRESS).get("of") != wanted:
        raise UsageError(
            f"{out} is an unfinished import of other files, or with other options: repeat that "
            "command to finish it, or delete the folder."
        )
    try:
        hold = FolderLock(out)
    except AlreadyLocked as error:
        raise UsageError(f"Another process is importing to {out}: wait for it.") from error
    try:
        yield
    finally:
        hold.release()


def _save(store: EpisodeStore, episodes: int, wanted: str) -> None:
    """Write the progress of an import; `state_dict` flushes the episodes first."""
    state = store.state_dict()
    logs = {name: state[name] for name in store.log_names}
    document = {"of": wanted, "episodes": episodes, "logs": logs}
    write_json(store.path / PROGRESS, document, files.current())


def _go_on(store: EpisodeStore) -> int:
    """Truncate a store to the recorded progress; returns its number of the files' episodes."""
    document = read_json(store.path / PROGRESS)
    if "logs" not in document:
        return 0
    store.verify = False  # hashes are checked when a block is read
    steps = document["logs"]["steps"]["count"]
    opened = {"open_starts": [steps], "open_returns": [0.0], "ahead": {}}
    store.load_state_dict({**document["logs"], **opened})
    return int(document["episodes"])


def _append(store: EpisodeStore, episode: Episode, ends: list[int]) -> None:
    """Append an episode and its clips, each the first steps up to one of `ends`."""
    rewards = episode.rewards
    store.append_episode(episode.obs, episode.actions, rewards, episode.terminated)
    for end in ends:
        obs = {key: array[: end + 1] for key, array in episode.obs.items()}
        store.append_episode(obs, episode.actions[:end], rewards[:end], False)


def _label(
    labels: Labels, known: Described, prefix: str, task: str, rewards: Array, ends: list[int]
) -> None:
    """Add the labels of an episode and of its clips."""
    number, name = len(labels), prefix + known.name
    labels.add(name, "whole", None, known.success, known.rewarded, task)
    for end in ends:
        success = success_of_clip(known.success, rewards, end)
        labels.add(f"{name}[:{end}]", "clip", number, success, known.rewarded, task)


def success_of_clip(success: bool | None, rewards: Array, end: int) -> bool | None:
    """Whether the first `end` steps of an episode succeeded: False if the episode failed or is
    rewarded only later; otherwise unknown."""
    fails = success is False or bool(success and rewards[end:].any() and not rewards[:end].any())
    return False if fails else None


def export_dataset(
    data: Episodes,
    out: Path,
    form: DatasetFormat,
    tick: Tick = lambda done, total: None,
) -> list[str]:
    """Write a dataset in another format into a new folder; returns what was lost, in sentences.

    tick counts episodes.
    """
    labels = data.labels

    def episodes() -> Iterator[Episode]:
        for number in range(data.num_episodes):
            steps, _ = data.episode(number)
            last = {name: array[-1:] for name, array in steps.next_obs.items()}
            yield Episode(
                labels.names[number],
                {name: np.concatenate([array, last[name]]) for name, array in steps.obs.items()},
                steps.actions,
                steps.rewards,
                bool(steps.terminated[-1]),
                labels.tasks[number],
                labels.successes[number],
            )
            tick(number + 1, data.num_episodes)

    exported = ExportedDataset(
        data.path.name,
        data.geometry.observations,
        data.geometry.specs["actions"],
        data.num_transitions,
        labels.tasks,
        labels.successes,
        labels.rewarded,
        episodes,
    )
    with made_whole(out) as folder:
        return form.write(exported, folder)


def validate_store(path: Path, tick: Tick = lambda done, total: None) -> Episodes:
    """Check a whole dataset: hashes, finite numbers, flags, returns; raises at the first fault."""
    store = open_episodes(path)
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
            raise DataError(
                path, "does not end exactly once, at its last step; import it again", name
            )
        if not np.isclose(steps.rewards.sum(dtype=np.float64), total, rtol=1e-5, atol=1e-5):
            raise DataError(path, "has rewards that do not add up to its return", name)
        done += len(ends)
        tick(done, store.num_transitions)
    return store


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
    said, excluded = about.get("notes"), num_excluded(store)
    notes = [str(note) for note in said] if isinstance(said, list) else []
    if excluded:
        notes.append(f"{excluded:,} more episodes are excluded: `etude data include` undoes that.")
    return {
        "path": str(store.path),
        "format": "manifest" if os.path.lexists(store.path / MANIFEST) else "episode store",
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
        "notes": notes,
        "excluded": excluded,
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
