"""`etude export`: a run's policy as ONNX, with a contract of what it reads and does."""

from __future__ import annotations

from pydantic import Field

from etude.api import Run
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting, split_run
from etude.share.export import Exported, export_run


class ExportCommand(Trusting, Reporting):
    """A run's policy as ONNX with its normaliser, and what it reads and does as policy.json: for
    the package etude-runtime, which needs no torch."""

    aliases = {"to": "output out folder dir"}  # noqa: RUF012

    run: Positional[str] = Field(description="Folder of a run, or a checkpoint inside of one.")
    to: str = Field(description="New folder for policy.onnx and policy.json.")
    checkpoint: str = Field("best", description="best, latest or a step.")


def run(arguments: list[str]) -> None:
    """Export one policy."""
    command = parse("export", ExportCommand, arguments)
    folder, inside = split_run(command.run)
    known = Run(folder, command.trust)
    done = export_run(known, command.to, inside or command.checkpoint, command.trust)
    document = {"folder": str(done.path), "files": done.sizes, **done.contract["check"]}
    command.show(document, _text(done))


def _text(done: Exported) -> str:
    contract, check = done.contract, done.contract["check"]
    lines = [f"{name:<20} {size:>9,} bytes" for name, size in done.sizes.items()]
    terms = [
        f"{term['key']} {term['size']}"
        + (f" {term['unit']}" if term["unit"] not in ("", "1") else "")
        for each in contract["observations"].values()
        for term in each["terms"]
    ]
    output = contract["output"]
    return "\n".join(
        [
            f"Exported the policy of step {contract['run']['policy_step']:,} to {done.path}:",
            *(f"  {line}" for line in lines),
            f"  reads   {'; '.join(terms)}",
            f"  acts    {output['space']} of {output['size']}",
            f"  check   {check['steps']:,} recorded steps, largest difference from torch "
            f"{check['largest_difference']:.1e}",
            "",
        ]
    )
