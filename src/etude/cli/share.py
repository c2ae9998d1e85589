"""`etude export` and `etude bundle`: a run's policy as ONNX, and a run as one folder or tar."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from etude.api import Run
from etude.building.build import silent
from etude.cli.options import Positional, Reporting, Trusting, parse
from etude.cli.target import split_run
from etude.cli.train import say
from etude.core.errors import UsageError
from etude.core.output import size
from etude.planning.loading import chosen_path
from etude.planning.recipes import digest
from etude.runs import bundle
from etude.runs.folder import PLAN_JSON, default_path
from etude.share.bundle import Shared, write
from etude.share.export import Exported, export_run, fingerprint_of


class ExportCommand(Trusting, Reporting):
    """A run's policy as ONNX with its normaliser, and a description of its observations and actions
    as policy.json: for the package etude-runtime, which needs no torch."""

    aliases = {"to": "output out folder dir"}  # noqa: RUF012

    run: Positional[str] = Field(description="Folder of a run, or a checkpoint inside of one.")
    to: str = Field(description="New folder for policy.onnx and policy.json.")
    checkpoint: str = Field("best", description="best, latest or a step.")


class BundleCommand(Trusting, Reporting):
    """A run as one folder or tar: policy, ONNX, recipe, evaluation, films, and a card. `etude
    verify` checks it on any machine."""

    aliases = {"to": "output out folder dir", "license": "licence", "upload": "hub push"}  # noqa: RUF012

    run: Positional[str] = Field(
        description="Folder of a run, or a checkpoint inside of one; with --upload also a bundle."
    )
    to: str | None = Field(
        None, description="New folder, or NAME.tar; default bundles/<recipe>/<date-time>-s<seed>."
    )
    checkpoint: str = Field("best", description="best, latest or a step.")
    license: str | None = Field(
        None, description="Licence of the policy, for example apache-2.0; default: none stated."
    )
    episodes: int | None = Field(
        None, ge=1, description="Episodes of its evaluation; default: as many as after training."
    )
    film: bool = Field(True, description="Film a success and a failure of each kind.")
    onnx: bool = Field(True, description="Export the policy as ONNX as well.")
    upload: str | None = Field(
        None, description="Upload to USER/NAME on the Hugging Face hub; default: no upload."
    )
    private: bool = Field(False, description="With --upload: a new repository is not public.")


def run_export(arguments: list[str]) -> None:
    """Export one policy."""
    command = parse("export", ExportCommand, arguments)
    folder, step = split_run(command.run)
    run = Run(folder, command.trust)
    exported = export_run(run, command.to, step or command.checkpoint, command.trust)
    check = exported.contract["check"]
    document = {"folder": str(exported.path), "files": exported.sizes, **check}
    command.show(document, _export_text(exported))


def _export_text(exported: Exported) -> str:
    contract, check = exported.contract, exported.contract["check"]
    terms = [
        f"{term['key']} {term['size']}"
        + (f" {term['unit']}" if term["unit"] not in ("", "1") else "")
        for each in contract["observations"].values()
        for term in each["terms"]
    ]
    output = contract["output"]
    return "\n".join(
        [
            f"Exported the policy of step {contract['run']['policy_step']:,} to {exported.path}:",
            *(f"  {name:<20} {size:>9,} bytes" for name, size in exported.sizes.items()),
            f"  reads   {'; '.join(terms)}",
            f"  acts    {output['space']} of {output['size']}",
            f"  check   {check['steps']:,} recorded steps, largest difference from torch "
            f"{check['largest_difference']:.1e}",
            "",
        ]
    )


def run_bundle(arguments: list[str]) -> None:
    """Write a bundle, and upload it with --upload."""
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
        path = _write_bundle(command)
    if command.upload is not None:
        from etude.share.bundle import upload

        url = upload(path, command.upload, command.private, speak)
        speak(f"Uploaded to {url}")


def _write_bundle(command: BundleCommand) -> Path:
    """Write the bundle of a run; its path."""
    folder, step = split_run(command.run)
    run = Run(folder, command.trust)
    recipe = run.recipe
    to = Path(command.to) if command.to else default_path(recipe.name, recipe.seed, root="bundles")
    if to.suffix in (".gz", ".tgz", ".zip", ".xz", ".bz2"):
        raise UsageError(f"A bundle is a folder or a plain tar: --to {to.name.split('.')[0]}.tar.")
    shared = Shared(
        recipe,
        run.folder,
        chosen_path(run.path, step or command.checkpoint),
        fingerprint_of(run),
        _why_another_run(run),
        command.license or "",
        command.episodes,
        command.film,
        command.onnx,
        command.trust,
    )
    made = write(shared, to, silent if command.json_output else say)
    listed = made.index["files"]
    document = {"bundle": str(to), "sha256": made.sha256, "files": listed}
    text = (
        f"Bundled the policy of step {made.index['policy_step']:,} as {to}: "
        f"{len(listed) + 1} files, {size(made.num_bytes)}.\n"
        f"  sha256  {made.sha256} of {bundle.INDEX}, which names all other files\n"
        f"  licence {command.license or 'none stated: --license NAME states one'}\n"
        f"Check it on any machine: etude verify {to}\n"
    )
    command.show(document, text)
    return to


def _why_another_run(run: Run) -> str:
    """Why training the recipe from the start would not give this run; "" if it would."""
    if run.folder.manifest().get("recipe") != digest(run.recipe):
        return "its recipe was changed on the way, for example by a larger budget."
    summary = run.summary()
    if not summary:
        return "it was bundled before its end."
    planned = json.loads((run.path / PLAN_JSON).read_bytes())["counts"]["iterations"]
    done = summary["counts"]["iterations"]
    if done != planned and run.recipe.evaluation.stop_at_success is None:
        return f"a callback ended it after {done:,} of {planned:,} iterations."
    return ""
