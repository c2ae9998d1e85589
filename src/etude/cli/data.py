"""`etude data`: inspect, import, validate, record, edit and export datasets."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from etude.cli.options import Positional, Reporting, Trusting, parse, terminal_width
from etude.cli.verbs import Verbs, run_verb
from etude.core.config import Config
from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.limited import Limits
from etude.core.progress_bar import bar
from etude.data import editing
from etude.data.formats.base import FORMATS, ReadOptions, check_format
from etude.data.formats.opening import open_dataset, scan, shared_fields
from etude.data.importing import (
    Facts,
    Pictures,
    check_new,
    export_dataset,
    folder_size,
    import_dataset,
    is_unfinished,
    remove,
    render,
    source_facts,
    store_facts,
    validate_store,
)
from etude.data.sentences import quoted
from etude.data.store.episodes import EpisodeStore
from etude.data.store.manifest import is_dataset, open_episodes

USAGE = """\
etude data reads demonstrations of other systems, and records new ones.

  etude data inspect  PATH                     show a dataset's contents, and what can learn from it
  etude data view     PATH                     look at episodes in the browser, exclude some
  etude data import   PATHS... OUT [--obs ...] import files of other systems into one dataset
  etude data validate PATH                     read everything: hashes, finite numbers, lengths
  etude data record   RECIPE OUT --episodes N  record demonstrations of a task, with failures
  etude data add      DATASET PATHS... OUT     add the episodes of more files
  etude data merge    DATASETS... OUT          merge several datasets
  etude data filter   DATASET OUT --success yes   select episodes
  etude data clip     DATASET OUT --stop 50       cut a part out of every episode
  etude data exclude  DATASET NUMBERS...       exclude episodes from training; include undoes it
  etude data include  DATASET [NUMBERS...]     include excluded episodes again
  etude data export   DATASET OUT --format lerobot  export to the format of another system
  etude data add-embeddings DATASET TABLE OUT     add vectors for its task sentences

add, merge, filter, clip and add-embeddings make a new dataset that shares the files of the old ones
and needs no further space.

PATH is a dataset of Etude, or in one of these formats:

FORMATS
Files are read in a subprocess with memory and time limits. `etude data VERB --help` shows every
option.
"""


_KINDS = ", ".join(FORMATS.names())
_PICTURES = (
    "Encoding of pictures: raw is read fastest, png is smaller without loss, jpeg is smallest "
    "with a small loss."
)


class Reading(Reporting):
    """A command that reads files of other systems."""

    memory: float = Field(4.0, gt=0, description="Memory limit of the reading process, GiB.")
    seconds: float = Field(60.0, gt=0, description="Time limit for reading one episode, s.")

    @property
    def limits(self) -> Limits:
        return Limits(int(self.memory * (1 << 30)), self.seconds)


class Selecting(Reading):
    """A command that reads some observations or episodes of a file."""

    obs: tuple[str, ...] = Field((), description="Names of the observations to read; default: all.")
    mask: str | None = Field(None, description="Read only the episodes of this mask (robomimic).")
    format: str | None = Field(
        None, description=f"Format of the files: {_KINDS}; default: the first that recognises them."
    )


class InspectCommand(Selecting):
    """Show the contents of a dataset, without reading large arrays."""

    path: Positional[str] = Field(description="A dataset or an episode store.")


class ImportCommand(Selecting):
    """Import files of another system into one dataset."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Files or folders of other systems, then the new dataset's folder."
    )
    add_truncated: int = Field(
        0,
        ge=0,
        description="Number of clips to add: episodes that are cut off before success, so that "
        "returns differ.",
    )
    success_reward: float | None = Field(
        None, description="Reward of the last step of a success, in place of the file's rewards."
    )
    assume_success: bool = Field(
        False, description="Count episodes of unknown success as successes."
    )
    seed: int = Field(0, description="Seed of these clips.")
    pictures: Pictures = Field("raw", description=_PICTURES)


class AddCommand(ImportCommand):
    """Add the episodes of files to a dataset, as a new dataset."""

    paths: Positional[tuple[str, ...]] = Field(
        description="A dataset, files of other systems to add to it, then the new dataset's folder."
    )


class MergeCommand(Reporting):
    """Merge datasets; episodes that several of them share are taken once."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Datasets to merge, then the new dataset's folder."
    )


class FilterCommand(Reporting):
    """Select episodes of a dataset; patterns are those of a shell: *drawer*."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The new dataset's folder.")
    task: str | None = Field(None, description="Pattern for the sentence of the task.")
    name: str | None = Field(None, description="Pattern for the name of the episode.")
    kind: str | None = Field(
        None, description="Pattern for the kind of the episode: whole, clip, ..."
    )
    success: Literal["yes", "no", "unknown"] | None = Field(
        None, description="Success of the episode."
    )
    min_return: float | None = Field(None, description="Minimum return.")
    max_return: float | None = Field(None, description="Maximum return.")
    min_steps: int | None = Field(None, description="Minimum number of steps.")
    max_steps: int | None = Field(None, description="Maximum number of steps.")
    episodes: int | None = Field(
        None, ge=1, description="Number of episodes to take, the first ones."
    )


class ClipCommand(Reporting):
    """Cut steps start to stop out of every episode, as episode[start:stop] in Python."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The new dataset's folder.")
    start: int = Field(0, description="First step; a negative one counts from the end.")
    stop: int | None = Field(None, description="Step to end before; default: the end.")


class ViewCommand(Config):
    """Look at episodes in the browser, and exclude some, by a server for this machine only."""

    path: Positional[str] = Field(
        description="A dataset, files of another system, or a run: its replay and evaluations."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="Port of the server; default: a free one from 8080."
    )
    format: str | None = Field(
        None, description=f"Format of the files: {_KINDS}; default: the first that recognises them."
    )
    memory: float = Field(4.0, gt=0, description="Memory limit for reading such files, GiB.")
    seconds: float = Field(60.0, gt=0, description="Time limit for reading one episode, s.")


class ExcludeCommand(Reporting):
    """Exclude episodes of a dataset from training, export and edits; `include` undoes it."""

    path: Positional[str] = Field(description="A dataset.")
    numbers: Positional[tuple[int, ...]] = Field(
        description="Numbers of the episodes, as `etude data view` shows them."
    )


class IncludeCommand(Reporting):
    """Include excluded episodes of a dataset again."""

    path: Positional[str] = Field(description="A dataset.")
    numbers: Positional[tuple[int, ...]] = Field(
        (), description="Numbers of the episodes; default: all that are excluded."
    )


class ExportCommand(Reporting):
    """Export a dataset to the format of another system; each format has its own options."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The new folder.")
    format: str = Field("lerobot", description=f"Format to write: {_KINDS}.")


class EmbedCommand(Reporting):
    """Add the vectors of a text encoder for the sentences of a dataset's tasks.

    Policies observe their task as this vector; without it, as a one-hot vector.
    """

    path: Positional[str] = Field(description="A dataset.")
    table: Positional[str] = Field(
        description="npz (arrays sentences [n], vectors [n, size]), csv (rows of a sentence and "
        "its numbers) or parquet (columns sentence and vector)."
    )
    out: Positional[str] = Field(description="The new dataset's folder.")


class ValidateCommand(Reading):
    """Read all of a dataset; exit code 1 and the name of the file if something is wrong."""

    path: Positional[str] = Field(description="A dataset of Etude, or files of another system.")
    format: str | None = Field(
        None, description=f"Format of the files: {_KINDS}; default: the first that recognises them."
    )


class RecordCommand(Trusting, Reporting):
    """Record demonstrations of a task, by its scripted expert or a trained policy."""

    recipe: Positional[str] = Field(description="A recipe of the task reach or pick-place.")
    out: Positional[str] = Field(description="The new dataset's folder.")
    episodes: int = Field(100, ge=1, description="Number of episodes.")
    fail_share: float = Field(0.5, ge=0, le=1, description="Share of the episodes that fail.")
    policy: str | None = Field(None, description="A run whose policy acts; default: the expert.")
    noise: tuple[float, ...] = Field(
        (0.0, 0.1, 0.2),
        description="Standard deviations of action noise; each successful episode draws one.",
    )
    fail_noise: float = Field(
        2.0,
        ge=0,
        description="Maximum standard deviation of the noise in episodes that shall fail.",
    )
    image_size: int = Field(
        128, ge=0, le=1024, description="Pixels per side of the pictures; 0 records none."
    )
    labels: Literal["taken", "intended"] = Field(
        "taken",
        description="Actions to store: those that were taken, or those that were intended before "
        "noise was added, as targets for behavioural cloning (DART).",
    )
    reward: Literal["success", "task"] = Field(
        "success", description="success: 1 in the step that succeeds; task: the task's rewards."
    )
    seed: int = Field(0, description="Seed of the episodes.")
    pictures: Pictures = Field("raw", description=_PICTURES)
    workers: int = Field(0, ge=0, description="Processes that render pictures; 0: one per core.")


def run(arguments: list[str]) -> int:
    """Run `etude data VERB ...`; the exit code."""
    formats = "".join(f"  {kind:<12}{FORMATS.purpose(kind)}\n" for kind in FORMATS.names())
    return run_verb("etude data", USAGE.replace("FORMATS\n", f"{formats}\n"), VERBS, arguments)


def _inspect(arguments: list[str]) -> None:
    command = parse("data inspect", InspectCommand, arguments)
    path = _located(command.path)
    if is_dataset(path):
        facts = store_facts(open_episodes(path))
    else:
        options = ReadOptions(command.obs, command.mask)
        facts = source_facts(scan(path, options, command.limits, command.format))
    command.show(facts, render(facts, terminal_width()))


def _import(arguments: list[str]) -> None:
    command = parse("data import", ImportCommand, arguments)
    if len(command.paths) < 2:
        raise UsageError(
            "Name the files to read, then the new folder: etude data import PATHS... OUT"
        )
    start, out = time.perf_counter(), Path(command.paths[-1])
    store = _imported(command, command.paths[:-1], out)
    _finish(command, store_facts(store), out, start)


def _imported(command: ImportCommand, names: Sequence[str], out: Path) -> EpisodeStore:
    """Import files into a new episode store."""
    paths = [_located(name) for name in names]
    for i, path in enumerate(paths):
        if is_dataset(path):
            raise UsageError(
                f"{path} is already a dataset of Etude; `etude data merge` merges datasets."
            )
        # Copies of an episode could be on both sides of a split.
        if path.resolve() in [other.resolve() for other in paths[:i]]:
            raise UsageError(f"{path} is named twice: name each file once.")
    options = ReadOptions(command.obs, command.mask, command.success_reward, command.assume_success)
    word = "Importing the rest" if is_unfinished(out) else "Importing"
    with bar(word, "steps") as tick:
        return import_dataset(
            paths,
            out,
            options,
            command.limits,
            command.add_truncated,
            command.seed,
            tick,
            command.pictures,
            command.format,
        )


def _add(arguments: list[str]) -> None:
    command = parse("data add", AddCommand, arguments)
    if len(command.paths) < 3:
        raise UsageError(
            "Name a dataset, the files to add, then the new folder: "
            "etude data add DATASET PATHS... OUT"
        )
    old, *names, new = command.paths
    out = Path(new)
    check_new(out)
    _dataset(old)
    beside = out.resolve().with_name(f".{out.name}.added")
    _imported(command, names, beside)
    _edited(command, editing.select([Path(old), beside]), out, f"{', '.join(names)} added to")
    remove(beside)  # its files are linked in the new dataset


def _merge(arguments: list[str]) -> None:
    command = parse("data merge", MergeCommand, arguments)
    if len(command.paths) < 3:
        raise UsageError("Name the datasets, then the new folder: etude data merge DATASETS... OUT")
    *olds, new = command.paths
    _edited(command, editing.select([_dataset(old) for old in olds]), Path(new), "merged from")


def _filter(arguments: list[str]) -> None:
    command = parse("data filter", FilterCommand, arguments)
    chosen = command.model_dump(exclude={"path", "out", "json_output"}, exclude_none=True)
    selection = editing.filter_episodes(
        editing.select([_dataset(command.path)]), editing.Filter(**chosen)
    )
    conditions = ", ".join(f"{name} {value}" for name, value in chosen.items()) or "all"
    _edited(command, selection, Path(command.out), f"filtered ({conditions}) from")


def _clip(arguments: list[str]) -> None:
    command = parse("data clip", ClipCommand, arguments)
    selection = editing.select([_dataset(command.path)])
    cut = editing.clip(selection, command.start, command.stop)
    _edited(command, cut, Path(command.out), "clipped from")


def _view(arguments: list[str]) -> int:
    command = parse("data view", ViewCommand, arguments)
    # Only this command loads the server.
    from etude.cli.signals import Signals
    from etude.core.local_web import PageServer
    from etude.evaluate.viewer.serving import Viewer
    from etude.evaluate.viewer.sources import open_sources

    path = _located(command.path)
    limits = Limits(int(command.memory * (1 << 30)), command.seconds)
    viewer = Viewer(path.resolve().name, open_sources(path, command.format, limits))
    with Signals() as signals, PageServer(viewer.get, viewer.send, command.port) as server:
        print(f"{path}: {server.url} (for this machine only; Ctrl+C stops)", flush=True)
        while signals.received is None:
            time.sleep(0.1)
    print("Stopped.")
    return 128 + signals.received


def _exclude(arguments: list[str]) -> None:
    command = parse("data exclude", ExcludeCommand, arguments)
    path = _dataset(command.path)
    _show_excluded(command, path, editing.exclude(path, command.numbers))


def _include(arguments: list[str]) -> None:
    command = parse("data include", IncludeCommand, arguments)
    path = _dataset(command.path)
    numbers = command.numbers or editing.exclude(path, ())
    _show_excluded(command, path, editing.exclude(path, numbers, undo=True))


def _show_excluded(command: Reporting, path: Path, excluded: Array) -> None:
    """Print the excluded episodes of a dataset, and its hash, which they are part of."""
    data = open_episodes(path, ())
    facts = {"path": str(path), "excluded": excluded.tolist(), "sha256": data.seal_sha256}
    named = ", ".join(map(str, excluded[:20].tolist())) + (" ..." if len(excluded) > 20 else "")
    text = f"{path}: {data.num_episodes:,} of {data.num_episodes + len(excluded):,} episodes"
    text += f", excluded are {named}." if len(excluded) else ", none is excluded."
    command.show(facts, f"{text} SHA-256 {data.seal_sha256[:12]}.\n")


def _embed(arguments: list[str]) -> None:
    command = parse("data add-embeddings", EmbedCommand, arguments)
    from etude.data.editing import read_embeddings

    selection = editing.select([_dataset(command.path)])
    table = read_embeddings(Path(command.table))
    selection.labels.embed(table)
    if lacking := sorted(set(selection.labels.tasks) - selection.labels.embeddings.keys()):
        raise UsageError(
            f"{command.table} has no vector for {quoted(lacking)}, which are tasks of "
            f"{command.path}: add them."
        )
    _edited(command, selection, Path(command.out), f"embeddings of {command.table} added to")


def _export(arguments: list[str]) -> None:
    given = re.search(r"(?m)^--format[=\n](.+)$", "\n".join(arguments))
    kind = given[1] if given else "lerobot"
    check_format(kind)
    fields = {n: f for n, f in FORMATS.load(kind).model_fields.items() if n != "kind"}
    columns: Any = {name: (field.annotation, field) for name, field in fields.items()}
    options = create_model(
        "ExportCommand", __base__=ExportCommand, __doc__=ExportCommand.__doc__, **columns
    )
    command = parse("data export", options, arguments)
    form = FORMATS.validate({"kind": kind, **command.model_dump(include={*fields})})
    out, start = Path(command.out), time.perf_counter()
    data = open_episodes(_dataset(command.path))
    with bar("Writing", "episodes") as tick:
        notes = export_dataset(data, out, form, tick)
    seconds = time.perf_counter() - start
    written = f"Written to {out}: {data.num_episodes:,} episodes, {folder_size(out)}"
    facts = {"path": str(out), "format": command.format, "episodes": data.num_episodes}
    lines = [*notes, f"{written} in {seconds:.1f} s."]
    command.show({**facts, "notes": notes}, "\n".join(lines) + "\n")


def _dataset(name: str) -> Path:
    """The path of a dataset of Etude; refuses other paths."""
    path = Path(name)
    if not is_dataset(path):
        fix = "import it first (etude data import)" if path.exists() else "check the path"
        raise UsageError(f"{path} is not a dataset of Etude: {fix}.")
    return path


def _edited(command: Reporting, selection: editing.Selection, out: Path, origin: str) -> None:
    """Write an edited dataset; origin: how it was made from the old ones."""
    store = editing.write(selection, out, origin)
    facts = store_facts(store)
    text = f"Written to {out}, which shares the files of the old datasets.\n"
    command.show(facts, render(facts, terminal_width()) + text)


def _validate(arguments: list[str]) -> None:
    command = parse("data validate", ValidateCommand, arguments)
    path, start = _located(command.path), time.perf_counter()
    with bar("Reading", "") as tick:
        if is_dataset(path):
            facts = store_facts(validate_store(path, tick))
        else:
            with open_dataset(path, "check", None, command.limits, 0, command.format) as dataset:
                shared_fields([dataset.summary])
                for done, _ in enumerate(dataset.progress(), 1):
                    tick(done, len(dataset.summary.episodes))
            facts = source_facts(dataset.summary)
    facts["valid"] = True
    seconds = time.perf_counter() - start
    valid = f"Valid: every number was read and is finite ({seconds:.1f} s).\n"
    command.show(facts, render(facts, terminal_width()) + valid)


def _record(arguments: list[str]) -> None:
    command = parse("data record", RecordCommand, arguments)
    # Only this command loads torch and the simulation.
    from etude.cli.doctor import usable_cores
    from etude.evaluate.record import RecordOptions, kinds, record
    from etude.planning import recipes

    if not command.noise or min(command.noise) < 0:
        raise UsageError("--noise takes standard deviations of at least 0, for example 0 0.1.")
    recipe, out = recipes.find(command.recipe, command.trust), Path(command.out)
    start = time.perf_counter()
    chosen = command.model_dump(
        exclude={"recipe", "out", "json_output", "workers", "policy", "trust"}
    )
    options = RecordOptions(
        **chosen,
        policy=None if command.policy is None else Path(command.policy),
        workers=command.workers or max(1, int(usable_cores())),
    )
    with bar("Recording", "episodes") as tick:
        store = record(recipe, out, options, tick)
    facts = store_facts(store)
    facts["kinds"] = kinds(store.labels)
    facts["notes"] = [", ".join(f"{num} x {kind}" for kind, num in facts["kinds"].items()) + "."]
    _finish(command, facts, out, start)


def _finish(command: Reporting, facts: Facts, out: Path, start: float) -> None:
    seconds = time.perf_counter() - start
    rate = f"{facts['steps'] / seconds:,.0f} steps/s"
    text = f"Written to {out}: {folder_size(out)} in {seconds:.1f} s ({rate}).\n"
    command.show({**facts, "seconds": seconds}, render(facts, terminal_width()) + text)


def _located(target: str) -> Path:
    """A path, or the folder of the dataset with this id in the package minari."""
    path = Path(target)
    if path.exists() or target.startswith((".", "/")):
        return path
    try:
        from minari.storage import get_dataset_path
    except ImportError:
        return path
    found = Path(get_dataset_path(target))
    return found if found.is_dir() else path


VERBS: Verbs = {
    "inspect": _inspect,
    "view": _view,
    "import": _import,
    "validate": _validate,
    "record": _record,
    "add": _add,
    "merge": _merge,
    "filter": _filter,
    "clip": _clip,
    "exclude": _exclude,
    "include": _include,
    "export": _export,
    "add-embeddings": _embed,
}
