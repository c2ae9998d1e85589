"""`etude eval`: fresh deterministic episodes of a run's best policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny

from etude.api import Run, silent
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting
from etude.cli.train import say
from etude.envs.config import ENVS, EnvConfig
from etude.reports import evaluation


class EvalCommand(Trusting, Reporting):
    """Fresh deterministic episodes of a run's best policy, also in a changed environment."""

    run: Positional[str] = Field(description="The run's folder.")
    episodes: int | None = Field(
        None, ge=1, description="Number of episodes; default 100, or every motion once."
    )
    video: bool = Field(
        False, description="Film a success and a failure of each kind: mp4 and a strip of pictures."
    )
    seed: int | None = Field(None, description="Seed of the episodes; default: that of the run.")
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="The run's environment, whose fields may be changed: --env.NAME VALUE."
    )


def run(arguments: list[str]) -> None:
    """Evaluate a run."""
    default = None
    if any(argument.startswith("--env.") for argument in arguments) and arguments[0][:1] != "-":
        known = Run(arguments[0], "--trust" in arguments)
        default = EvalCommand(run=arguments[0], env=known.recipe.env)
    command = parse("eval", EvalCommand, arguments, default)
    run = Run(command.run, command.trust)
    recipe = run.recipe
    if command.env is not None:
        recipe = recipe.model_copy(update={"env": command.env})
    speak = silent if command.json_output else say
    metrics = evaluation.examine(
        recipe, run.path, command.episodes, command.seed, command.video, speak
    )
    command.show(metrics, "")
