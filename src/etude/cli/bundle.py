"""`etude bundle`: a run as one folder or tar that others can check, and on a hub."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from etude.api import Run
from etude.building.executing import silent
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting, split_run
from etude.cli.train import say
from etude.core.errors import UsageError
from etude.core.units import size
from etude.planning.loading import chosen_path
from etude.planning.recipes import digest
from etude.runs import bundle
from etude.runs.folder import PLAN_JSON, default_path
from etude.share.bundle import Shared, write
from etude.share.export import fingerprint_of


class BundleCommand(Trusting, Reporting):
    """A run as one folder or tar: policy, ONNX, recipe, evaluation, films, and a card. `etude
    verify` checks it wherever it was moved."""

    aliases = {"to": "output out folder dir", "license": "licence", "upload": "hub push"}  # noqa: RUF012

    run: Positional[str] = Field(
        description="Folder of a run, or a checkpoint inside of one; with --upload also a bundle."
    )
    to: str | None = Field(
        None, description="New folder, or NAME.tar; default bundles/<recipe>/<date-time>-s<seed>."
    )
    checkpoint: str = Field("best", description="best, latest or a step.")
    license: str | None = Field(
        None, description="Under which others may use it, such as apache-2.0; default none stated."
    )
    episodes: int | None = Field(
        None, ge=1, description="Episodes of its evaluation; default as many as after training."
    )
    film: bool = Field(True, description="Film a success and a failure of each kind.")
    onnx: bool = Field(True, description="Export the policy as ONNX as well.")
    upload: str | None = Field(
        None,
        description="USER/NAME on the Hugging Face hub, where it is put; by default nowhere.",
    )
    private: bool = Field(False, description="With --upload: a new repository is not public.")


def run(arguments: list[str]) -> None:
    """Make a bundle, and upload it where that is asked for."""
    command = parse("bundle", BundleCommand, arguments)
    speak = silent if command.json_output else say
    if command.private and command.upload is None:
        raise UsageError("--private is about a repository on a hub: add --upload USER/NAME.")
    if command.upload is not None:
        from etude.share.bundle import check_upload

        check_upload(command.upload)
    path = Path(command.run)
    if bundle.is_bundle(path):
        if command.upload is None or command.to is not None:
            raise UsageError(
                f"{path} is a bundle already: `etude verify {path}` checks it, --upload USER/NAME "
                "puts it on a hub."
            )
    else:
        path = _make(command, path)
    if command.upload is not None:
        from etude.share.bundle import upload

        url = upload(path, command.upload, command.private, speak)
        speak(f"Uploaded to {url}")


def _make(command: BundleCommand, path: Path) -> Path:
    """Write the bundle of a run; its path."""
    folder, inside = split_run(command.run)
    known = Run(folder, command.trust)
    recipe = known.recipe
    to = Path(command.to) if command.to else default_path(recipe.name, recipe.seed, root="bundles")
    if to.suffix in (".gz", ".tgz", ".zip", ".xz", ".bz2"):
        raise UsageError(f"A bundle is a folder or a plain tar: --to {to.name.split('.')[0]}.tar.")
    shared = Shared(
        recipe,
        known.folder,
        chosen_path(known.path, inside or command.checkpoint),
        fingerprint_of(known),
        _another_run(known),
        command.license or "",
        command.episodes,
        command.film,
        command.onnx,
        command.trust,
    )
    speak = silent if command.json_output else say
    made = write(shared, to, speak)
    listed = made.index["files"]
    document = {"bundle": str(to), "sha256": made.sha256, "files": listed}
    text = "\n".join(
        [
            f"Bundled the policy of step {made.index['policy_step']:,} as {to}: "
            f"{len(listed) + 1} files, {size(made.num_bytes)}.",
            f"  sha256  {made.sha256} of {bundle.INDEX}, which names all other files",
            f"  licence {command.license or 'none stated: --license NAME says one'}",
            f"Check it, here or elsewhere: etude verify {to}",
            "",
        ]
    )
    command.show(document, text)
    return to


def _another_run(run: Run) -> str:
    """Why training the recipe from its beginning would not give this run; "" if it would."""
    if run.folder.manifest().get("recipe") != digest(run.recipe):
        return "its recipe was changed on the way, such as by a larger budget."
    summary = run.summary()
    if not summary:
        return "it was bundled before its end."
    planned = json.loads((run.path / PLAN_JSON).read_bytes())["counts"]["iterations"]
    done = summary["counts"]["iterations"]
    if done != planned and run.recipe.evaluation.stop_at_success is None:
        return f"a callback ended it after {done:,} of {planned:,} iterations."
    return ""
