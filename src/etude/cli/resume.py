"""`etude resume`: continue a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from etude.api import resume
from etude.cli.options import Positional, parse
from etude.cli.target import Trusting, spelled_out
from etude.cli.train import finish, say
from etude.rollout.local import Placement


class ResumeCommand(Trusting):
    """Continue a run from its last good checkpoint."""

    run: Positional[str] = Field(description="The run's folder.")
    checkpoint: int | None = Field(
        None,
        ge=0,
        description="Go back to the checkpoint of this step; those after it are set aside.",
    )
    total_timesteps: int | None = Field(
        None, ge=1, description="A larger budget of environment steps than the run was given."
    )
    pause_after: int | None = Field(
        None,
        ge=1,
        description="Stop once so many iterations of the run are done, and save; the next resume "
        "goes on from there.",
    )
    collector: Placement = Field(Placement(), description="Where rollouts run from now on.")


def run(arguments: list[str]) -> None:
    """Continue a run, and evaluate what came of it."""
    command = parse("resume", ResumeCommand, spelled_out(arguments))
    resumed = resume(
        Path(command.run),
        command.total_timesteps,
        say=say,
        console=True,
        collector=command.collector,
        checkpoint=command.checkpoint,
        trust=command.trust,
        pause_after=command.pause_after,
    )
    if command.pause_after is None or resumed.summary():
        finish(resumed)
