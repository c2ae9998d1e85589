"""`etude data`: look into datasets, import them, check them, and record one's own."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.doctor import usable_cores
from etude.cli.options import Json, Positional, parse
from etude.cli.verbs import Verbs, run_verb
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.datasets.importing import import_dataset, is_store, validate_store
from etude.datasets.opening import Limits, ReadOptions, Summary, open_dataset, scan
from etude.datasets.summary import shared_fields
from etude.experience.store.episodes import EpisodeStore
from etude.planning import recipes
from etude.reports.dataset import bar, folder_size, render, source_facts, store_facts

USAGE = """\
etude data reads demonstrations of other systems, and records one's own.

  etude data inspect  PATH                     what a dataset holds, and what it can teach
  etude data import   PATHS... OUT [--obs ...] all of them into one episode store
  etude data validate PATH                     read everything: hashes, finite numbers, lengths
  etude data record   RECIPE OUT --episodes N  demonstrations of a task, successes and failures

PATH is robomimic or LIBERO HDF5, a Minari folder or file, or an episode store. Files are opened in
a process of its own with limits. `etude data VERB --help` shows every option.
"""
_GIB = 1 << 30


class InspectCommand(Config):
    """What a dataset holds; large arrays are not read."""

    path: Positional[str] = Field(description="A dataset or an episode store.")
    obs: tuple[str, ...] = Field((), description="Only these observations.")
    mask: str | None = Field(None, description="Only the episodes of this mask (robomimic).")
    memory: float = Field(4.0, gt=0, description="GiB that reading may take.")
    seconds: float = Field(60.0, gt=0, description="That reading one episode may take.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


class ImportCommand(Config):
    """Files of another system into one episode store."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Files to read (robomimic, LIBERO or Minari), then the dataset folder to make."
    )
    obs: tuple[str, ...] = Field((), description="Only these observations.")
    mask: str | None = Field(None, description="Only the episodes of this mask (robomimic).")
    add_truncated: int = Field(
        0, ge=0, description="Add so many clips that end before success, for contrast."
    )
    success_reward: float | None = Field(
        None, description="Reward at the end of successes, instead of the file's rewards."
    )
    assume_success: bool = Field(
        False, description="Count episodes of unknown success as successes."
    )
    seed: int = Field(0, description="Which clips are drawn.")
    memory: float = Field(4.0, gt=0, description="GiB that reading may take.")
    seconds: float = Field(60.0, gt=0, description="That reading one episode may take.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


class ValidateCommand(Config):
    """Read all of a dataset; exit code 1 and the culprit where something is wrong."""

    path: Positional[str] = Field(description="A dataset or an episode store.")
    memory: float = Field(4.0, gt=0, description="GiB that reading may take.")
    seconds: float = Field(60.0, gt=0, description="That reading one episode may take.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


class RecordCommand(Config):
    """Demonstrations of a task, by its scripted expert or a trained policy."""

    recipe: Positional[str] = Field(description="reach, pick-place, or a recipe of them.")
    out: Positional[str] = Field(description="The folder to make.")
    episodes: int = Field(100, ge=1, description="How many, exactly.")
    fail_share: float = Field(0.5, ge=0, le=1, description="Share of them that fail.")
    policy: str | None = Field(None, description="A run whose policy acts; None: the expert.")
    noise: tuple[float, ...] = Field(
        (0.0, 0.1, 0.2), description="Of actions: each good episode draws one of these."
    )
    fail_noise: float = Field(2.0, ge=0, description="Largest noise of clumsy failures.")
    image_size: int = Field(128, ge=0, le=1024, description="Pixels; 0 records no pictures.")
    reward: Literal["success", "task"] = Field(
        "success", description="1 at success alone, or the task's own rewards."
    )
    trust: bool = Field(False, description="Run the code that the recipe file names.")
    seed: int = Field(0, description="Other episodes.")
    workers: int = Field(0, ge=0, description="Processes that draw; 0: one per core.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


def run(arguments: list[str]) -> int:
    """Run `etude data ...`; the exit code. What goes wrong is raised as an `EtudeError`."""
    return run_verb("etude data", USAGE, VERBS, arguments)


def _inspect(arguments: list[str]) -> None:
    command = parse("data inspect", InspectCommand, arguments)
    path = _located(command.path)
    if is_store(path):
        facts = store_facts(EpisodeStore.open(path))
    else:
        options = ReadOptions(command.obs, command.mask)
        facts = source_facts(scan(path, options, _limits(command.memory, command.seconds)))
    print(json.dumps(facts, indent=2) if command.json_output else render(facts, _width()), end="")
    print(end="\n" if command.json_output else "")


def _import(arguments: list[str]) -> None:
    command = parse("data import", ImportCommand, arguments)
    if len(command.paths) < 2:
        raise UsageError(
            "Name the files to read, then the folder to make: etude data import PATHS... OUT"
        )
    paths, out = [_located(path) for path in command.paths[:-1]], Path(command.paths[-1])
    _check_paths(paths)
    start, limits = time.perf_counter(), _limits(command.memory, command.seconds)
    options = ReadOptions(command.obs, command.mask, command.success_reward, command.assume_success)
    with bar("Importing", "steps") as tick:
        store = import_dataset(
            paths, out, options, limits, command.add_truncated, command.seed, tick
        )
    _finish(store_facts(store), out, start, command.json_output)


def _check_paths(paths: list[Path]) -> None:
    """Refuse stores, and a file that is named twice: both sides of a split would hold it."""
    for path in paths:
        if is_store(path):
            raise UsageError(f"{path} is an episode store already: there is nothing to import.")
    seen = set[Path]()
    for path in paths:
        if path.resolve() in seen:
            raise UsageError(f"{path} is named twice: name each file once.")
        seen.add(path.resolve())


def _validate(arguments: list[str]) -> None:
    command = parse("data validate", ValidateCommand, arguments)
    path, start = _located(command.path), time.perf_counter()
    with bar("Reading", "") as tick:
        if is_store(path):
            facts = store_facts(validate_store(path, tick))
        else:
            limits = _limits(command.memory, command.seconds)
            facts = source_facts(_check_source(path, limits, tick))
    facts["valid"] = True
    if command.json_output:
        print(json.dumps(facts, indent=2))
        return
    print(render(facts, _width()), end="")
    print(f"Valid: every number was read and is finite ({time.perf_counter() - start:.1f} s).")


def _check_source(path: Path, limits: Limits, tick: Callable[[int, int], None]) -> Summary:
    with open_dataset(path, "check", None, limits) as dataset:
        shared_fields([dataset.summary])
        for done, _ in enumerate(dataset.progress(), 1):
            tick(done, len(dataset.summary.episodes))
        return dataset.summary


def _record(arguments: list[str]) -> None:
    command = parse("data record", RecordCommand, arguments)
    # Where nothing is recorded, nothing that simulates is loaded.
    from etude.recording.record import RecordOptions, kinds, record

    if not command.noise or min(command.noise) < 0:
        raise UsageError("--noise takes standard deviations that are not negative, such as 0 0.1.")
    recipe, out = recipes.find(command.recipe, command.trust), Path(command.out)
    start, kept = time.perf_counter(), {"recipe", "out", "json_output", "workers", "policy"}
    chosen = command.model_dump(exclude={*kept, "trust"})
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
    _finish(facts, out, start, command.json_output)


def _finish(facts: dict[str, object], out: Path, start: float, as_json: bool) -> None:
    seconds, steps = time.perf_counter() - start, facts["steps"]
    assert isinstance(steps, int)
    if as_json:
        print(json.dumps({**facts, "seconds": seconds}, indent=2))
        return
    print(render(facts, _width()), end="")
    rate = f"{steps / seconds:,.0f} steps/s"
    print(f"Kept in {out}: {folder_size(out)} in {seconds:.1f} s ({rate}).")


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


def _limits(memory: float, seconds: float) -> Limits:
    return Limits(int(memory * _GIB), seconds)


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


VERBS: Verbs = {
    "inspect": _inspect,
    "import": _import,
    "validate": _validate,
    "record": _record,
}
