"""`etude play`: watch a run's best policy in MuJoCo's viewer, or in the browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pydantic import Field

from etude.api import Run
from etude.cli.options import Positional, parse
from etude.cli.target import Trusting
from etude.cli.watching import Watching, check_shown
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.envs.mujoco import windows
from etude.evaluate.playing import Player, actor
from etude.planning.recipe import Recipe
from etude.planning.sentences import told


class PlayCommand(Watching, Trusting):
    """Watch a run's best policy in MuJoCo's viewer, or in the browser."""

    run: Positional[str] = Field(description="The run's folder.")
    seed: int | None = Field(None, description="Seed of the episodes; default: that of the run.")


def run(arguments: list[str]) -> int:
    """Open the viewer."""
    command = parse("play", PlayCommand, arguments)
    run = Run(command.run, command.trust)
    return play(run.recipe, run.path, command)


def play(recipe: Recipe, path: Path, command: PlayCommand) -> int:
    """Episode after episode in real time, until the window is closed; the exit code."""
    instead = partial(films, recipe, path)
    task = told(recipe, path).task
    env = command.environment(task)
    check_shown(env, task, instead)
    if not command.web and not windows.has_screen():
        raise UsageError(
            "There is no screen here to open MuJoCo's viewer on. --web shows it in a browser. "
            + instead()
        )
    key = Key(recipe.seed if command.seed is None else command.seed).child("play")
    player = Player(env, actor(str(path), env, key, command.trust), key)
    return command.watch(player, f"{recipe.name}, {path.name}")


def films(recipe: Recipe, path: Path) -> str:
    """A sentence about how to film a run, or about what stands in the way."""
    from etude.evaluate import film

    try:
        film.check(recipe)
    except EtudeError as error:
        return str(error)
    return f"`etude eval {path} --video` makes films and pictures."
