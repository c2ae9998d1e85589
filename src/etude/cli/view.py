"""`etude view`: look at a task before it is trained, in a film or in the browser."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SerializeAsAny

from etude.cli.check import env_config
from etude.cli.options import Positional, parse
from etude.cli.target import Trusting
from etude.cli.watching import Watching, check_shown
from etude.core.catalogue import RECIPES
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.config import ENVS, EnvConfig
from etude.evaluate import film
from etude.evaluate.footage import footage
from etude.evaluate.playing import RANDOM, ZERO, Player, actor
from etude.planning import recipes
from etude.planning.sentences import telling
from etude.runs import files


class ViewCommand(Watching, Trusting):
    """Look at a task before it is trained: one episode as a film, or live in the browser."""

    task: Positional[str] = Field(
        description="A recipe, a kind of environment, module:Class or file.py:Class."
    )
    policy: str = Field(
        ZERO,
        description="What acts: zero, the middle of every action's range; random; or a run's "
        "folder, for its best policy.",
    )
    seed: int = Field(0, description="Seed of the episodes.")
    seconds: float = Field(10.0, gt=0, le=3600, description="Length of the film, at most.")
    small: bool = Field(False, description="A film of 640 x 360 instead of 1280 x 720.")
    out: str = Field("films", description="Folder for the film and the strip of pictures.")
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="The task's environment, whose fields may be changed: --env.NAME VALUE."
    )


def run(arguments: list[str]) -> int:
    """Film a task, or show it."""
    default = None
    if arguments and arguments[0][:1] != "-":
        default = ViewCommand(task=arguments[0], env=task_config(arguments[0]))
    command = parse("view", ViewCommand, arguments, default)
    config = task_config(command.task) if command.env is None else command.env
    if not command.web:
        film.check_tools()
        config = config.for_film()
    if command.policy not in (ZERO, RANDOM) and Path(command.policy).exists():
        config = telling(config, command.policy)
    env = command.environment(config)
    key = Key(command.seed).child("view")
    acting = actor(command.policy, env, key.child("act"), command.trust)
    policy = command.policy if command.policy in (ZERO, RANDOM) else Path(command.policy).name
    title = f"{command.task}, {policy} policy"
    if command.web:
        check_shown(env, config, lambda: "Leave out --web for a film.")
        return command.watch(Player(env, acting, key), title)
    film.check_env(env, config.kind)
    folder = Path(command.out)
    files.make_folder(folder)
    ((episode, recording),) = Player(env, acting, key).record(command.seconds)
    name = re.sub(r"\W+", "-", f"{command.task.rpartition(':')[2]}-{policy}")
    scene = film.Scene(footage(env, recording), title, "", episode.ending)
    for path in film.write([scene], folder, name, film.SMALL if command.small else film.SIZE):
        print(path)
    print(episode.sentence())
    return 0


def task_config(target: str) -> EnvConfig:
    """The environment of a recipe, or whatever `etude check` takes."""
    if target in RECIPES.names():
        return recipes.find(target).task
    if target in ENVS.names() or not re.fullmatch(r"[\w-]+(?<!-v\d)(?<!-v\d\d)", target):
        return env_config(target, {})
    near = difflib.get_close_matches(target, [*RECIPES.names(), *ENVS.names()], n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"There is no task '{target}'; {hint}`etude list` shows the recipes, and FILE.py:Class "
        "works too."
    )
