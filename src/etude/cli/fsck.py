"""`etude fsck`: check every file of a run or dataset, and list what can be recovered.

It reads every byte and changes nothing.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.building import resuming
from etude.cli.options import Positional, Reporting, parse
from etude.core.errors import EtudeError, UsageError
from etude.core.output import waiting
from etude.core.trees import Tree
from etude.core.user_code import Untrusted
from etude.data.store import manifest
from etude.data.store.episodes import EpisodeStore
from etude.planning.recipe import Recipe, load
from etude.runs import checkpoint
from etude.runs.checkpoint import check_part
from etude.runs.documents import decode_sealed
from etude.runs.folder import MANIFEST, PLAN, PLAN_JSON, RECIPE, RunFolder
from etude.runs.metrics_log import DiskHistory, Marks, is_as_saved, named, parsed, salvage


class FsckCommand(Reporting):
    """Check every file of a run or dataset, and list what can be recovered; changes nothing."""

    path: Positional[str] = Field(description="A run's folder, or a dataset's.")


def run(arguments: list[str]) -> int:
    """Print the report; 1 if a file is damaged or missing."""
    command = parse("fsck", FsckCommand, arguments)
    report = examine(Path(command.path))
    command.show(report.to_json(), render(report))
    return int(report.damaged)


Verdict = Literal["whole", "damaged", "missing", "not checked"]


@dataclass(frozen=True)
class FileCheck:
    """The result for one file."""

    path: str
    """Relative to the examined folder; absolute if it is outside of it."""
    verdict: Verdict
    note: str = ""


@dataclass
class Report:
    """The files of a folder, and what can be recovered."""

    folder: Path
    findings: list[FileCheck] = field(default_factory=list)
    resumable: list[int] = field(default_factory=list)
    """Steps a run can be resumed from, the newest first."""
    policies: list[int] = field(default_factory=list)
    """Steps whose policy is undamaged, the newest first."""
    saved: list[str] = field(default_factory=list)
    """Sentences on what can be recovered."""

    @property
    def damaged(self) -> bool:
        return any(file.verdict in ("damaged", "missing") for file in self.findings)

    def to_json(self) -> Tree:
        return {**asdict(self), "folder": str(self.folder), "damaged": self.damaged}

    def add(self, path: Path, wrong: str, note: str = "") -> None:
        """Add a file; wrong: its fault or ""; note: how to repair it."""
        verdict: Verdict = "missing" if wrong == "is missing" else "damaged" if wrong else "whole"
        words = [wrong] if verdict == "damaged" else []
        words += [note] if note and wrong else []
        name = str(path.relative_to(self.folder) if self.folder in path.parents else path)
        # Two checkpoints may share a block: the worse verdict counts.
        for old in [file for file in self.findings if file.path == name]:
            if old.verdict != "whole" or verdict == "whole":
                return
            self.findings.remove(old)
        self.findings.append(FileCheck(name, verdict, "; ".join(words)))


@waiting("reading every file")
def examine(path: Path) -> Report:
    """Read every byte of a run folder or a dataset."""
    report = Report(path)
    if manifest.is_dataset(path) or os.path.lexists(path / "sealed.json"):
        _dataset(report, path)
        return report
    folder = RunFolder.open(path, write=False)
    _checkpoints(report, folder)
    recipe = _texts(report, folder)
    _metrics(report, folder)
    if recipe is None:
        report.resumable = []
    elif isinstance(recipe, Untrusted):
        report.saved.append(f"A resume asks for trust first. {recipe}")
    elif (dataset := getattr(recipe.algorithm, "dataset", "")) and Path(dataset).is_dir():
        _dataset(report, Path(dataset))
    _rest(report, folder)
    _conclude(report)
    return report


def _dataset(report: Report, path: Path) -> None:
    for file, wrong in manifest.examine(path).items():
        report.add(file, wrong, "put back a good copy")


def _files(path: Path, resumable: bool) -> dict[Path, str]:
    """{file of a checkpoint: its fault, or ""}."""
    found: dict[Path, str] = {}
    for name in ("policy", "training") if resumable else ("policy",):
        try:
            found |= check_part(path / name, name).examine()
        except checkpoint.DamagedCheckpoint as error:
            found[error.path] = error.wrong
    if resumable and not any(found.values()):
        try:
            checkpoint.verify(path)
        except checkpoint.DamagedCheckpoint as error:
            found[error.path] = error.wrong
    return found


def _checkpoints(report: Report, folder: RunFolder) -> None:
    """Check every checkpoint with its replay."""
    steps = sorted(checkpoint.steps(folder.checkpoints), reverse=True)
    for step in steps:
        path = folder.checkpoints / checkpoint.step_name(step)
        resumable = path in checkpoint.resumable(folder.checkpoints)
        found = _files(path, resumable)
        for file, wrong in found.items():
            report.add(file, wrong)
        if not any(wrong for file, wrong in found.items() if file.parent.name != "training"):
            report.policies.append(step)
        if any(found.values()) or not resumable:
            continue
        stores = checkpoint.load_training(path)[2].get("algorithm", {}).get("stores", {})
        whole = True
        for shard, name in enumerate(sorted(stores)):
            if "sealed_sha256" in stores[name]:
                continue
            replay = EpisodeStore.examine(folder.path / "replay" / f"shard-{shard}", stores[name])
            for file, wrong in replay.items():
                rebuilt = file.suffix == ".json"
                report.add(file, wrong, "a resume writes it again" if rebuilt else "")
                whole = whole and (not wrong or rebuilt)
        if whole:
            report.resumable.append(step)


def _texts(report: Report, folder: RunFolder) -> Recipe | Untrusted | None:
    """Check the texts of a run; its recipe, None if it is lost, or why it is not trusted."""
    copies = resuming.copies(folder) or {}
    changed, rewritten = (
        folder.changed_texts(copies.get("manifest", "")),
        "a resume writes it again",
    )
    copied = (
        "a resume takes it from the newest checkpoint" if copies else "no checkpoint holds a copy"
    )
    notes = {RECIPE: _of_recipe(folder, copies, copied), MANIFEST: copied}
    notes |= {PLAN: rewritten, PLAN_JSON: rewritten}
    for name in notes:
        path, wrong = folder.path / name, ""
        if not path.is_file():
            wrong = "is missing"
        elif name in changed:
            wrong = "was changed after it was written"
        report.add(path, wrong, notes[name])
    summary = folder.path / "summary.json"
    if summary.is_file() or (folder.checkpoints / "final").exists():
        wrong = "" if summary.is_file() else "is missing"
        try:
            decode_sealed(summary.read_bytes() if not wrong else b"")
        except (OSError, ValueError) as error:
            wrong = wrong or str(error)
        report.add(summary, wrong, rewritten)
    try:
        return resuming.recipe_of(folder)
    except Untrusted as error:
        return error
    except UsageError:
        return None


def _of_recipe(folder: RunFolder, copies: Tree, copied: str) -> str:
    """How a resume treats a changed recipe."""
    try:
        recipe = load(folder.recipe)
    except Untrusted:
        return "a resume compares it once its code is trusted"
    except UsageError:
        return copied
    try:
        resuming.check_recipe(recipe, copies, folder, lambda text: None)
    except UsageError:
        return "a resume refuses it: put back the recipe of the run"
    return "a resume uses it"


def _metrics(report: Report, folder: RunFolder) -> None:
    """Check metrics.jsonl against its hashes in the newest checkpoint."""
    newest = checkpoint.newest_verified(folder.checkpoints, lambda text: None, repair=False)
    position = {} if newest is None else checkpoint.load_document(newest)["metrics"]
    marks = Marks.at(position) if "rows" in position else Marks()
    if not folder.metrics.is_file():
        if marks.count:
            report.add(folder.metrics, "is missing", "its rows are lost; a resume continues")
        return
    whole = bool(position) and is_as_saved(folder.metrics, position)
    lost = [] if whole else salvage(folder.metrics, marks)[1]
    wrong = f"has lost {named(lost)} of {marks.count:,}" if lost else ""
    if not wrong:
        try:
            # If the saved rows are unchanged, only those after them can be damaged.
            for number, line in DiskHistory(folder.metrics).lines():
                if number > marks.count or not whole:
                    parsed(folder.metrics, number, line)
        except EtudeError as error:
            wrong = str(error)
    report.add(folder.metrics, wrong, "a resume continues without them" if lost else "")


def _rest(report: Report, folder: RunFolder) -> None:
    """Check links, and list the files that a resume does not need."""
    known = {file.path for file in report.findings}
    marks = checkpoint.marks(folder.checkpoints) if folder.checkpoints.is_dir() else {}
    for root, folders, names in os.walk(folder.path):
        folders.sort()
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for path in (Path(root) / name for name in [*sorted(names), *links]):
            name = str(path.relative_to(folder.path))
            if path.parent == folder.checkpoints and (path.is_symlink() or path.name in marks):
                target = folder.checkpoints / marks.get(path.name, "none")
                report.add(path, "" if target.exists() else "leads nowhere")
            elif name not in known:
                report.findings.append(FileCheck(name, "not checked", "no resume needs it"))


def _conclude(report: Report) -> None:
    if report.resumable:
        newest, *older = report.resumable
        others = f"; with --checkpoint also from {', '.join(map(str, older))}" if older else ""
        report.saved.append(f"The run can be resumed from step {newest}{others}.")
        return
    report.saved.append("No checkpoint can be resumed from.")
    if report.policies:
        path = report.folder / "checkpoints" / checkpoint.step_name(report.policies[0])
        report.saved.append(f"A new run can start from the policy of one: --from {path}.")


def render(report: Report) -> str:
    """A line for each file, then what can be recovered."""
    lines = [
        f"{file.verdict:<12} {file.path}" + (f"  ({file.note})" if file.note else "")
        for file in report.findings
    ]
    bad = [f.path for f in report.findings if f.verdict in ("damaged", "missing")]
    verdict = f"Damaged: {', '.join(bad)}." if bad else "Whole."
    return "\n".join([*lines, "", verdict, *report.saved]) + "\n"
