"""`etude verify`: check the files of a bundle, and repeat its results on this machine."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from etude.api import Run, resume, train
from etude.building.build import Say, silent
from etude.cli.options import Positional, Reporting, Trusting, parse
from etude.cli.train import say
from etude.core.errors import UsageError
from etude.core.output import size, waiting
from etude.core.trees import Tree
from etude.planning.recipe import Recipe, digest, parsed
from etude.runs import bundle
from etude.runs.folder import NOT_EXACT, default_path
from etude.runs.manifest import Differences
from etude.share import verify as verifying
from etude.share.verify import Finding
from etude.training.logs.outputs import LogsConfig


class VerifyCommand(Trusting, Reporting):
    """Check that a bundle's files are unchanged, and that its episodes, and with --retrain its
    training, give the same results on this machine."""

    bundle: Positional[str] = Field(description="A bundle's folder, or its tar.")
    files_only: bool = Field(False, description="Check the files only.")
    retrain: bool = Field(
        False, description="Train its recipe again and compare the fingerprint, bit for bit."
    )
    seconds: float = Field(
        verifying.SECONDS,
        gt=0,
        le=1e6,
        description="Time limit of its recorded steps and episodes together.",
    )
    folder: str | None = Field(
        None,
        description="With --retrain: the run's folder; an existing run is continued; default "
        "runs/<recipe>/<date-time>-s<seed>.",
    )


def run(arguments: list[str]) -> int:
    """Print the findings; 1 if a file is damaged or a result differs."""
    command = parse("verify", VerifyCommand, arguments)
    if command.folder is not None and not command.retrain:
        raise UsageError("--folder is for the run that is trained again: add --retrain.")
    if command.files_only and command.retrain:
        raise UsageError("--files-only runs nothing, and --retrain trains: leave one of them out.")
    path = Path(command.bundle)
    with (
        tempfile.TemporaryDirectory(prefix="etude-verify-") as scratch,
        bundle.opened(path, Path(scratch) / "bundle") as folder,
    ):
        return _Verification(command, path, folder).run()


class _Verification:
    """The verification of one bundle, with its findings."""

    def __init__(self, command: VerifyCommand, path: Path, folder: Path) -> None:
        self.command, self.path, self.folder = command, path, folder
        self.findings: list[Finding] = []

    def say(self, text: str) -> None:
        """Print one line, without control characters from the bundle."""
        if not self.command.json_output:
            print("".join(c if c.isprintable() else "?" for c in text), flush=True)

    def run(self) -> int:
        with waiting("reading every file"):
            examined = bundle.examine(self.folder)
        about = examined.index
        if examined.wrong:
            for name, wrong in examined.wrong.items():
                self.say(f"  {name} {wrong}")
            count = len(examined.wrong)
            files = f"{count} files have changed" if count > 1 else "a file has changed"
            return self._conclude(examined.sha256, examined.wrong, f"{files} since it was bundled")
        self.say(
            f"{self.path}: {len(about['files']) + 1} files, {size(examined.num_bytes)}, all "
            "unchanged since they were bundled; none is code."
        )
        self.say(f"  sha256     {examined.sha256} of {bundle.INDEX}; its author can name it too")
        if self.command.files_only:
            return self._conclude(examined.sha256, {}, "")
        self._compare(about)
        differing = [each.what for each in self.findings if each.verdict == "differs"]
        wrong = f"the results of {self.path} differ: {', '.join(differing)}" if differing else ""
        return self._conclude(examined.sha256, {}, wrong)

    def _compare(self, about: Tree) -> None:
        command, folder = self.command, self.folder
        data = bundle.read_text(folder, bundle.RECIPE).encode()
        # Trust is for the path on the command line, not for the folder that a tar is unpacked in.
        name = self.path / bundle.RECIPE
        recipe = parsed(data, str(name), name, command.trust)
        changed = verifying.changed_machine(recipe, verifying.document(folder, bundle.MANIFEST))
        for sentence in changed.decisive:
            self.say(f"  machine    {sentence}")
        if changed.decisive:
            self.say("  machine    Bits may therefore differ: results are compared statistically.")
        self._add(verifying.check_metrics(folder, about))
        deadline = verifying.Deadline(command.seconds)
        policy = verifying.load_policy(folder)
        self._add(verifying.check_onnx(folder, policy, deadline))
        there = folder / bundle.POLICY
        self._add(verifying.check_episodes(recipe, folder, there, changed.decisive, deadline))
        self._explain(changed)
        if command.retrain:
            self._retrain(recipe, about, changed)
            self._explain(changed)

    def _retrain(self, recipe: Recipe, about: Tree, changed: Differences) -> None:
        if about.get("another_run"):
            raise UsageError(
                f"Training {self.path} again would give another run: {about['another_run']} Leave "
                "--retrain out."
            )
        if str(about.get("exactness", "")).startswith(NOT_EXACT):
            self.say(f"The bundled run is {about['exactness']}: expect other bits.")
        run = _train(recipe, self.command.folder, silent if self.command.json_output else say)
        arguments = (recipe, self.folder, about, run.path, run.fingerprint(), changed.decisive)
        self._add(verifying.check_retrained(*arguments, verifying.Deadline(self.command.seconds)))

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.say(f"  {finding.what:<10} {finding.verdict}: {finding.words}")

    def _explain(self, changed: Differences) -> None:
        """Print possible reasons for a difference in the newest finding."""
        if self.findings[-1].verdict in ("close", "differs"):
            for sentence in changed.possible:
                self.say(f"             Possible reason: {sentence}")

    def _conclude(self, sha256: str, damaged: dict[str, str], wrong: str) -> int:
        close = [each.what for each in self.findings if each.verdict == "close"]
        done = (
            "The files are unchanged; results were not repeated."
            if self.command.files_only
            else "Verified."
        )
        verdict = f"Not verified: {wrong}." if wrong else done
        if close and not wrong:
            verdict = f"Verified, but not bit for bit: {', '.join(close)}."
        document = {
            "bundle": str(self.path),
            "sha256": sha256,
            "damaged": damaged,
            "findings": [asdict(finding) for finding in self.findings],
            "verified": not wrong,
            "exact": not wrong and not close,
        }
        self.command.show(document, verdict + "\n")
        return int(bool(wrong))


def _train(recipe: Recipe, folder: str | None, speak: Say) -> Run:
    """Train a bundle's recipe in this process, without logs to other programs."""
    local = recipe.replace(collector__kind="local", logs=LogsConfig(tensorboard=False))
    path = Path(folder) if folder else default_path(recipe.name, recipe.seed)
    if path.exists():
        if digest(Run(path).recipe) != digest(recipe):
            raise UsageError(f"{path} is a run of another recipe: choose another --folder.")
        return resume(path, say=speak, console=speak is say)
    return train(local, path, say=speak, console=speak is say)
