"""`etude play`: watch a run's best policy in MuJoCo's viewer."""

from __future__ import annotations

from pydantic import Field

from etude.api import Run
from etude.cli.options import Positional, parse
from etude.cli.target import Trusting
from etude.reports.play import play


class PlayCommand(Trusting):
    """Watch a run's best policy in MuJoCo's viewer."""

    run: Positional[str] = Field(description="The run's folder.")
    seed: int | None = Field(None, description="Other episodes than those of the run's own seed.")


def run(arguments: list[str]) -> None:
    """Open the viewer."""
    command = parse("play", PlayCommand, arguments)
    run = Run(command.run, command.trust)
    play(run.recipe, run.path, command.seed)
