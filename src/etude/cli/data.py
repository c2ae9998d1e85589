"""`etude data`: inspect datasets, import them, check them, and record one's own."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from etude.cli.doctor import usable_cores
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting
from etude.cli.verbs import Verbs, run_verb
from etude.core.errors import UsageError
from etude.core.limited import Limits
from etude.data import editing
from etude.data.formats.base import FORMATS, ReadOptions, check_format
from etude.data.formats.opening import open_dataset, scan, shared_fields
from etude.data.importing import (
    Pictures,
    check_new,
    export_dataset,
    import_dataset,
    is_unfinished,
    remove,
    validate_store,
)
from etude.data.sentences import shown
from etude.data.store.episodes import EpisodeStore
from etude.data.store.manifest import is_dataset, open_episodes
from etude.evaluate.dataset import Facts, folder_size, render, source_facts, store_facts
from etude.evaluate.evaluation import bar
from etude.planning import recipes

USAGE = """\
etude data reads demonstrations of other systems, and records your own.

  etude data inspect  PATH                     content of a dataset, and what it can teach
  etude data import   PATHS... OUT [--obs ...] files of other systems as one dataset
  etude data validate PATH                     read everything: hashes, finite numbers, lengths
  etude data record   RECIPE OUT --episodes N  demonstrations of a task, successes and failures
  etude data add      DATASET PATHS... OUT     a dataset and the episodes of more files
  etude data merge    DATASETS... OUT          several datasets as one
  etude data filter   DATASET OUT --success yes   some of its episodes
  etude data clip     DATASET OUT --stop 50       a part of every episode
  etude data export   DATASET OUT --format lerobot  a dataset in the format of another system
  etude data add-embeddings DATASET TABLE OUT     vectors of its tasks' sentences: npz, csv, parquet

add, merge, filter, clip and add-embeddings make a new dataset that shares the files of the old ones
and takes no disk space.

PATH is a dataset of Etude, or in one of these formats:

FORMATS
Files are opened in a subprocess with memory and time limits. `etude data VERB --help` shows every
option.
"""


_KINDS = ", ".join(FORMATS.names())
_KEPT = (
    "How pictures are kept: raw is read fastest, png is smaller without loss, jpeg is smallest "
    "with a little loss."
)


class Reading(Reporting):
    """A command that opens files of other systems."""

    memory: float = Field(4.0, gt=0, description="GiB of memory that the reader may use.")
    seconds: float = Field(60.0, gt=0, description="Seconds that reading one episode may take.")

    @property
    def limits(self) -> Limits:
        return Limits(int(self.memory * (1 << 30)), self.seconds)


class Choosing(Reading):
    """A command that reads a part of a file."""

    obs: tuple[str, ...] = Field((), description="Names of the observations to read; all if empty.")
    mask: str | None = Field(None, description="Read only the episodes of this mask (robomimic).")
    format: str | None = Field(
        None, description=f"Format of the files: {_KINDS}; the first that recognises them if none."
    )


class InspectCommand(Choosing):
    """What a dataset holds; large arrays are not read."""

    path: Positional[str] = Field(description="A dataset or an episode store.")


class ImportCommand(Choosing):
    """Files of another system into one episode store."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Files or folders of other systems, then the dataset folder to make."
    )
    add_truncated: int = Field(
        0,
        ge=0,
        description="Number of clips to add, episodes cut off before success: returns then differ.",
    )
    success_reward: float | None = Field(
        None, description="Reward of the last step of successes, instead of the file's rewards."
    )
    assume_success: bool = Field(
        False, description="Count episodes of unknown success as successes."
    )
    seed: int = Field(0, description="Seed of the clips that are added.")
    pictures: Pictures = Field("raw", description=_KEPT)


class AddCommand(ImportCommand):
    """A dataset and the episodes of more files, as one new dataset."""

    paths: Positional[tuple[str, ...]] = Field(
        description="A dataset, files of other systems to add to it, then the dataset folder to "
        "make."
    )


class MergeCommand(Reporting):
    """Several datasets as one; episodes that two of them share are taken once."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Datasets to merge, then the dataset folder to make."
    )


class FilterCommand(Reporting):
    """The episodes of a dataset that are like this; patterns are those of a shell: *drawer*."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The dataset folder to make.")
    task: str | None = Field(None, description="Pattern for the sentence of the task.")
    name: str | None = Field(None, description="Pattern for the name of the episode.")
    kind: str | None = Field(None, description="Pattern for how it came about: whole, clip, ...")
    success: Literal["yes", "no", "unknown"] | None = Field(
        None, description="Whether it succeeded."
    )
    min_return: float | None = Field(None, description="Return at least.")
    max_return: float | None = Field(None, description="Return at most.")
    min_steps: int | None = Field(None, description="Steps at least.")
    max_steps: int | None = Field(None, description="Steps at most.")
    episodes: int | None = Field(None, ge=1, description="Only so many, the first ones.")


class ClipCommand(Reporting):
    """Steps start to stop of every episode, as in episode[start:stop] of Python."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The dataset folder to make.")
    start: int = Field(0, description="First step; a negative one counts from the end.")
    stop: int | None = Field(None, description="Step to end before; None is the end.")


class ExportCommand(Reporting):
    """A dataset in the format of another system; other formats have other options."""

    path: Positional[str] = Field(description="A dataset.")
    out: Positional[str] = Field(description="The folder to make.")
    format: str = Field("lerobot", description=f"Format to write: {_KINDS}.")


class EmbedCommand(Reporting):
    """A dataset with the vectors that a text encoder gave the sentences of its tasks.

    A policy is then told its task by them; otherwise by a one-hot.
    """

    path: Positional[str] = Field(description="A dataset.")
    table: Positional[str] = Field(
        description="npz (arrays sentences [n], vectors [n, size]), csv (a sentence and its "
        "numbers in every row) or parquet (columns sentence and vector)."
    )
    out: Positional[str] = Field(description="The dataset folder to make.")


class ValidateCommand(Reading):
    """Read all of a dataset; exit code 1 and the culprit where something is wrong."""

    path: Positional[str] = Field(description="A dataset of Etude, or files of another system.")
    format: str | None = Field(
        None, description=f"Format of the files: {_KINDS}; the first that recognises them if none."
    )


class RecordCommand(Trusting, Reporting):
    """Demonstrations of a task, by its scripted expert or a trained policy."""

    recipe: Positional[str] = Field(description="A recipe of the task reach or pick-place.")
    out: Positional[str] = Field(description="The dataset folder to make.")
    episodes: int = Field(100, ge=1, description="Number of episodes.")
    fail_share: float = Field(0.5, ge=0, le=1, description="Share of the episodes that fail.")
    policy: str | None = Field(None, description="A run whose policy acts; None: the expert.")
    noise: tuple[float, ...] = Field(
        (0.0, 0.1, 0.2),
        description="Standard deviations of action noise; each success draws one of them.",
    )
    fail_noise: float = Field(
        2.0, ge=0, description="Largest standard deviation of the noise that makes episodes fail."
    )
    image_size: int = Field(
        128, ge=0, le=1024, description="Pixels per side of the pictures; 0 records none."
    )
    labels: Literal["taken", "intended"] = Field(
        "taken",
        description="Actions that are stored: those that were taken, or those that were intended "
        "before noise was added, which is what a cloned policy should do there (DART).",
    )
    reward: Literal["success", "task"] = Field(
        "success", description="success: 1 in the step that succeeds; task: the task's rewards."
    )
    seed: int = Field(0, description="Seed of the episodes.")
    pictures: Pictures = Field("raw", description=_KEPT)
    workers: int = Field(0, ge=0, description="Processes that draw pictures; 0: one per core.")


def run(arguments: list[str]) -> int:
    """Run `etude data ...`; the exit code. What goes wrong is raised as an `EtudeError`."""
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
    command.show(facts, render(facts, _width()))


def _import(arguments: list[str]) -> None:
    command = parse("data import", ImportCommand, arguments)
    if len(command.paths) < 2:
        raise UsageError(
            "Name the files to read, then the folder to make: etude data import PATHS... OUT"
        )
    start, out = time.perf_counter(), Path(command.paths[-1])
    store = _imported(command, command.paths[:-1], out)
    _finish(command, store_facts(store), out, start)


def _imported(command: ImportCommand, names: Sequence[str], out: Path) -> EpisodeStore:
    """The episodes of files in a store of their own."""
    paths = [_located(name) for name in names]
    for i, path in enumerate(paths):
        if is_dataset(path):
            raise UsageError(
                f"{path} is a dataset of Etude already; `etude data merge` joins several."
            )
        # Otherwise both sides of a split would hold its episodes.
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
            "Name a dataset, the files to add, then the folder to make: "
            "etude data add DATASET PATHS... OUT"
        )
    old, *names, new = command.paths
    out = Path(new)
    check_new(out)
    _dataset(old)
    beside = out.resolve().with_name(f".{out.name}.added")
    _imported(command, names, beside)
    _edited(command, editing.take([Path(old), beside]), out, f"{', '.join(names)} added to")
    remove(beside)  # its blocks are in the new dataset now


def _merge(arguments: list[str]) -> None:
    command = parse("data merge", MergeCommand, arguments)
    if len(command.paths) < 3:
        raise UsageError(
            "Name the datasets, then the folder to make: etude data merge DATASETS... OUT"
        )
    *olds, new = command.paths
    _edited(command, editing.take([_dataset(old) for old in olds]), Path(new), "merged from")


def _filter(arguments: list[str]) -> None:
    command = parse("data filter", FilterCommand, arguments)
    chosen = command.model_dump(exclude={"path", "out", "json_output"}, exclude_none=True)
    taken = editing.keep(editing.take([_dataset(command.path)]), editing.Filter(**chosen))
    said = ", ".join(f"{name} {value}" for name, value in chosen.items()) or "all"
    _edited(command, taken, Path(command.out), f"filtered ({said}) from")


def _clip(arguments: list[str]) -> None:
    command = parse("data clip", ClipCommand, arguments)
    taken = editing.take([_dataset(command.path)])
    cut = editing.clip(taken, command.start, command.stop)
    _edited(command, cut, Path(command.out), "clipped from")


def _embed(arguments: list[str]) -> None:
    command = parse("data add-embeddings", EmbedCommand, arguments)
    from etude.data.editing import read_embeddings

    taken = editing.take([_dataset(command.path)])
    table = read_embeddings(Path(command.table))
    taken.labels.embed(table)
    if lacking := sorted(set(taken.labels.tasks) - taken.labels.embeddings.keys()):
        raise UsageError(
            f"{command.table} has no vector of {shown(lacking)}, which are tasks of "
            f"{command.path}: add them."
        )
    _edited(command, taken, Path(command.out), f"embeddings of {command.table} added to")


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
    summary = f"Written to {out}: {data.num_episodes:,} episodes, {folder_size(out)}"
    facts = {"path": str(out), "format": command.format, "episodes": data.num_episodes}
    lines = [*notes, f"{summary} in {seconds:.1f} s."]
    command.show({**facts, "notes": notes}, "\n".join(lines) + "\n")


def _dataset(name: str) -> Path:
    """A path that must be a dataset of Etude."""
    path = Path(name)
    if not is_dataset(path):
        fix = "import it first (etude data import)" if path.exists() else "check the path"
        raise UsageError(f"{path} is no dataset of Etude: {fix}.")
    return path


def _edited(command: Reporting, taken: editing.Taken, out: Path, said: str) -> None:
    store = editing.write(taken, out, said)
    facts = store_facts(store)
    kept = f"Kept in {out}: it shares its files with the old datasets, no step was copied.\n"
    command.show(facts, render(facts, _width()) + kept)


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
    said = f"Valid: every number was read and is finite ({seconds:.1f} s).\n"
    command.show(facts, render(facts, _width()) + said)


def _record(arguments: list[str]) -> None:
    command = parse("data record", RecordCommand, arguments)
    # Where nothing is recorded, nothing that simulates is loaded.
    from etude.evaluate.record import RecordOptions, kinds, record

    if not command.noise or min(command.noise) < 0:
        raise UsageError("--noise takes standard deviations that are not negative, such as 0 0.1.")
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
    said = f"Kept in {out}: {folder_size(out)} in {seconds:.1f} s ({rate}).\n"
    command.show({**facts, "seconds": seconds}, render(facts, _width()) + said)


def _located(target: str) -> Path:
    """A path, or the folder of a dataset that the package minari knows by this id."""
    path = Path(target)
    if path.exists() or target.startswith((".", "/")):
        return path
    try:
        from minari.storage import get_dataset_path
    except ImportError:
        return path
    found = Path(get_dataset_path(target))
    return found if found.is_dir() else path


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


VERBS: Verbs = {
    "inspect": _inspect,
    "import": _import,
    "validate": _validate,
    "record": _record,
    "add": _add,
    "merge": _merge,
    "filter": _filter,
    "clip": _clip,
    "export": _export,
    "add-embeddings": _embed,
}
