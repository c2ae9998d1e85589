"""`etude data`: inspect datasets, import them, check them, and record one's own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.doctor import usable_cores
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting
from etude.cli.verbs import Verbs, run_verb
from etude.core.errors import UsageError
from etude.datasets.importing import import_dataset, is_store, validate_store
from etude.datasets.opening import Limits, open_dataset, scan
from etude.datasets.summary import ReadOptions, shared_fields
from etude.experience.store.episodes import EpisodeStore
from etude.planning import recipes
from etude.reports.dataset import Facts, folder_size, render, source_facts, store_facts
from etude.reports.progress import bar

USAGE = """\
etude data reads demonstrations of other systems, and records one's own.

  etude data inspect  PATH                     what a dataset holds, and what it can teach
  etude data import   PATHS... OUT [--obs ...] all of them into one episode store
  etude data validate PATH                     read everything: hashes, finite numbers, lengths
  etude data record   RECIPE OUT --episodes N  demonstrations of a task, successes and failures

PATH is robomimic or LIBERO HDF5, a Minari folder or file, or an episode store. Files are opened in
a process of its own with limits. `etude data VERB --help` shows every option.
"""


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


class InspectCommand(Choosing):
    """What a dataset holds; large arrays are not read."""

    path: Positional[str] = Field(description="A dataset or an episode store.")


class ImportCommand(Choosing):
    """Files of another system into one episode store."""

    paths: Positional[tuple[str, ...]] = Field(
        description="Files to read (robomimic, LIBERO or Minari), then the dataset folder to make."
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


class ValidateCommand(Reading):
    """Read all of a dataset; exit code 1 and the culprit where something is wrong."""

    path: Positional[str] = Field(description="A dataset or an episode store.")


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
    reward: Literal["success", "task"] = Field(
        "success", description="success: 1 in the step that succeeds; task: the task's rewards."
    )
    seed: int = Field(0, description="Seed of the episodes.")
    workers: int = Field(0, ge=0, description="Processes that draw pictures; 0: one per core.")


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
        facts = source_facts(scan(path, options, command.limits))
    command.show(facts, render(facts, _width()))


def _import(arguments: list[str]) -> None:
    command = parse("data import", ImportCommand, arguments)
    if len(command.paths) < 2:
        raise UsageError(
            "Name the files to read, then the folder to make: etude data import PATHS... OUT"
        )
    paths, out = [_located(path) for path in command.paths[:-1]], Path(command.paths[-1])
    for i, path in enumerate(paths):
        if is_store(path):
            raise UsageError(f"{path} is an episode store already: there is nothing to import.")
        # Otherwise both sides of a split would hold its episodes.
        if path.resolve() in [other.resolve() for other in paths[:i]]:
            raise UsageError(f"{path} is named twice: name each file once.")
    start = time.perf_counter()
    options = ReadOptions(command.obs, command.mask, command.success_reward, command.assume_success)
    with bar("Importing", "steps") as tick:
        store = import_dataset(
            paths, out, options, command.limits, command.add_truncated, command.seed, tick
        )
    _finish(command, store_facts(store), out, start)


def _validate(arguments: list[str]) -> None:
    command = parse("data validate", ValidateCommand, arguments)
    path, start = _located(command.path), time.perf_counter()
    with bar("Reading", "") as tick:
        if is_store(path):
            facts = store_facts(validate_store(path, tick))
        else:
            with open_dataset(path, "check", None, command.limits) as dataset:
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
    from etude.recording.record import RecordOptions, kinds, record

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
}
