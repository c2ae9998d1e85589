"""`etude eval`: fresh deterministic episodes of a run's best policy."""

from __future__ import annotations

from pydantic import Field

from etude.api import Run, silent
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting
from etude.cli.train import say
from etude.reports import evaluation


class EvalCommand(Trusting, Reporting):
    """Fresh deterministic episodes of a run's best policy."""

    run: Positional[str] = Field(description="The run's folder.")
    episodes: int | None = Field(
        None, ge=1, description="Number of episodes; default 100, or every motion once."
    )
    video: bool = Field(
        False, description="Film a success and a failure of each kind: mp4 and a strip of pictures."
    )
    seed: int | None = Field(None, description="Seed of the episodes; default: that of the run.")


def run(arguments: list[str]) -> None:
    """Evaluate a run."""
    command = parse("eval", EvalCommand, arguments)
    run = Run(command.run, command.trust)
    speak = silent if command.json_output else say
    metrics = evaluation.examine(
        run.recipe, run.path, command.episodes, command.seed, command.video, speak
    )
    command.show(metrics, "")
