"""`etude demo`: a trained policy that comes with the package, in the browser or as a film."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from etude.cli.options import Positional, parse
from etude.cli.watching import Watching
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.progress import waiting
from etude.envs.mujoco import windows
from etude.envs.mujoco.offscreen import NoPictures
from etude.evaluate import film, fresh
from etude.evaluate.footage import footage
from etude.evaluate.playing import Episode, Player, actor
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import files

FOLDER = Path(__file__).parents[1] / "demos"
"""Policies that come with the package, each in a folder that has the name of its recipe."""
NAMES = ("reach", "pick-place", "walk-go1")
_EPISODES = 5
"""Of a film, at most."""


class DemoCommand(Watching):
    """Watch a trained policy that comes with the package: in the browser where there is a screen,
    and as a film where there is none."""

    aliases = {"film": "video out output"}  # noqa: RUF012

    name: Positional[str] = Field(NAMES[0], description=f"{', '.join(NAMES[:-1])} or {NAMES[-1]}.")
    film: str | None = Field(
        None, description="Write a film to this file: .webp, .gif, or .mp4 with imageio-ffmpeg."
    )
    seed: int = Field(0, description="Seed of the episodes.")
    seconds: float = Field(6.0, gt=0, le=600, description="Length of the film, at most.")


def run(arguments: list[str]) -> int:
    """Show a policy, or film it."""
    command = parse("demo", DemoCommand, arguments)
    if command.name not in NAMES:
        raise UsageError(
            f"There is no demo '{command.name}': choose {', '.join(NAMES[:-1])} or {NAMES[-1]}."
        )
    if command.web and command.film is not None:
        raise UsageError("--web shows a page and --film writes a film: leave out one of them.")
    path, recipe = FOLDER / command.name, recipes.find(command.name)
    steps = f"{fresh.step_of(path):,} steps"
    print(f"{recipe.name}: a policy of `etude train {recipe.name}`, after {steps}.", flush=True)
    if command.film is not None:
        return _film(command, recipe, Path(command.film))
    if command.web or windows.has_screen():
        return _show(command, recipe)
    print("There is no screen here: this makes a film, and --web serves a page.", flush=True)
    try:
        return _film(command, recipe, Path(f"demo-{recipe.name}.webp"))
    except NoPictures as error:
        again = f"`etude demo {recipe.name} --web` serves a page, which a browser draws."
        raise UsageError(f"{error} Or else: {again}") from error


def _show(command: DemoCommand, recipe: Recipe) -> int:
    """Episode after episode in the browser, until it is stopped."""
    opens, command = not command.web, command.model_copy(update={"web": True})
    config = recipe.task.for_evaluation()
    env = command.environment(config)
    key = Key(command.seed).child("demo")
    player = Player(env, actor(str(FOLDER / recipe.name), env, key), key)
    return command.watch(player, f"{recipe.name}, trained policy", opens)


def _film(command: DemoCommand, recipe: Recipe, path: Path) -> int:
    """A few episodes in a file, which is named at the end."""
    film.check_file(path)
    env = command.environment(recipe.task.for_evaluation().for_film())
    key = Key(command.seed).child("demo")
    player = Player(env, actor(str(FOLDER / recipe.name), env, key), key)
    played = player.record(command.seconds, _EPISODES)
    files.make_folder(path.parent)
    title = f"{recipe.name}, trained policy"
    scenes = [
        film.Scene(footage(env, shown), title, f"episode {each.number}", *_outcome(each))
        for each, shown in played
    ]
    with waiting(f"drawing {sum(scene.footage.seconds for scene in scenes):.0f} s of film"):
        film.write_file(scenes, path)
    print(path)
    ended = [each.success for each, _ in played if each.ending]
    if ended:
        print(f"{sum(map(bool, ended))} of {len(ended)} episodes succeeded.")
    return 0


def _outcome(episode: Episode) -> tuple[str, bool | None]:
    """What the end of an episode's film says, and whether that is good."""
    if episode.success is None or not episode.ending:
        return episode.ending, None
    return ("success" if episode.success else "failure"), episode.success
