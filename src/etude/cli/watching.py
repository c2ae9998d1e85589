"""`etude play`, `etude demo`, `etude view`: episodes in a window, in the browser or as a film."""

from __future__ import annotations

import difflib
import re
import webbrowser
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, FiniteFloat, SerializeAsAny

from etude.api import Run
from etude.cli.options import Positional, Trusting, parse
from etude.cli.signals import Signals
from etude.cli.target import env_config
from etude.core.catalogue import RECIPES
from etude.core.config import Config
from etude.core.contracts import BatchEnv, ability
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.core.output import waiting
from etude.envs.config import ENVS, EnvConfig
from etude.envs.mujoco import rendering
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.rendering import NoPictures
from etude.evaluate import film, fresh
from etude.evaluate.footage import footage
from etude.evaluate.playing import RANDOM, ZERO, Episode, Player, actor, hold, outcome, watch
from etude.planning import recipes
from etude.planning.loading import env_with_sentence
from etude.planning.recipe import Recipe
from etude.runs import files

DEMO_FOLDER = Path(__file__).parents[1] / "demos"
"""Policies that come with the package, each in a folder with the name of its recipe."""
DEMOS = ("reach", "pick-place", "walk-go1")
_DEMO_NAMES = f"{', '.join(DEMOS[:-1])} or {DEMOS[-1]}"
_DEMO_EPISODES = 5
"""Most episodes in a film of a demo."""


class Watching(Config):
    """A command that shows a task."""

    command: tuple[FiniteFloat, FiniteFloat, FiniteFloat] | None = Field(
        None,
        description="Velocity command to hold, for tasks that follow commands: x and y in m/s, "
        "yaw in rad/s.",
    )
    web: bool = Field(
        False, description="Show the task in the browser, by a server for this machine only."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="Port of that server; default: a free one from 8080."
    )

    def environment(self, config: EnvConfig) -> BatchEnv:
        """One environment, with the velocity command held."""
        if self.port is not None and not self.web:
            raise UsageError("--port is the port of the page in the browser: add --web.")
        env = config.make(config.num_agents)
        hold(env, self.command)
        return env

    def watch(self, player: Player, title: str, open_browser: bool = False) -> int:
        """Show episodes until the window is closed or a signal arrives; the exit code."""
        env, window = player.env, self._window(player, title)
        with Signals() as signals, window, TemporaryDirectory(prefix="etude-page-") as folder:
            if open_browser:
                _open(window.url, Path(folder))
            shows_itself = player.simulated is None
            report = self._report if shows_itself else lambda episode: None
            watch(player, window, lambda: signals.received is not None, report)
        env.close()
        if signals.received is None:
            return 0
        print("Stopped.")
        return 128 + signals.received

    @staticmethod
    def _report(episode: Episode) -> None:
        print(f"Episode {episode.number}: {episode.sentence()}", flush=True)

    def _window(self, player: Player, title: str) -> Any:
        simulated = player.simulated
        if simulated is None:
            print(f"{title}: its own window (Ctrl+C stops)", flush=True)
            return OwnWindow()
        if not self.web:
            return rendering.ScreenWindow(simulated)
        window = browser_window(simulated, title, self.port)
        print(f"{title}: {window.url} (for this machine only; Ctrl+C stops)", flush=True)
        return window


class OwnWindow:
    """The window that an environment opens and draws itself."""

    def is_running(self) -> bool:
        return True

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """The environment has drawn itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class PlayCommand(Watching, Trusting):
    """Watch a run's best policy in MuJoCo's viewer, in the browser, or in the window of a Gymnasium
    environment."""

    run: Positional[str] = Field(description="The run's folder.")
    seed: int | None = Field(None, description="Seed of the episodes; default: the run's.")


class DemoCommand(Watching):
    """Watch a trained policy that comes with the package: in the browser on a machine with a
    screen, otherwise as a film."""

    aliases = {"film": "video out output"}  # noqa: RUF012

    name: Positional[str] = Field(DEMOS[0], description=f"{_DEMO_NAMES}.")
    film: str | None = Field(
        None, description="Write a film to this file: .webp, .gif, or .mp4 with imageio-ffmpeg."
    )
    seed: int = Field(0, description="Seed of the episodes.")
    seconds: float = Field(6.0, gt=0, le=600, description="Longest duration of the film.")


class ViewCommand(Watching, Trusting):
    """Look at a task before it is trained: one episode as a film, or live in the browser."""

    task: Positional[str] = Field(
        description="A recipe, a kind of environment, module:Class or file.py:Class."
    )
    policy: str = Field(
        ZERO,
        description="zero: the middle of every action's range; random: random actions; or a run's "
        "folder: its best policy.",
    )
    seed: int = Field(0, description="Seed of the episodes.")
    seconds: float = Field(10.0, gt=0, le=3600, description="Longest duration of the film.")
    small: bool = Field(False, description="A film of 640 x 360 instead of 1280 x 720.")
    out: str = Field("films", description="Folder for the film and the strip of pictures.")
    env: Annotated[SerializeAsAny[EnvConfig] | None, BeforeValidator(ENVS.validate)] = Field(
        None, description="The task's environment; --env.FIELD VALUE changes a field."
    )


def run_play(arguments: list[str]) -> int:
    """Watch a run's policy; the exit code."""
    command = parse("play", PlayCommand, arguments)
    run = Run(command.run, command.trust)
    return play(run.recipe, run.path, command)


def play(recipe: Recipe, path: Path, command: PlayCommand) -> int:
    """Show episodes in real time until the window is closed; the exit code."""
    instead = partial(how_to_film, recipe, path)
    task = env_with_sentence(recipe.task, path)
    env = command.environment(task)
    is_simulated = ability(env, MujocoEnv) is not None
    if command.web:
        check_shown(env, task, instead)
    elif not rendering.has_screen():
        web = "--web shows it in a browser. " if is_simulated else ""
        raise UsageError(f"There is no screen here to open a window on. {web}{instead()}")
    elif not is_simulated:
        env.close()
        env = command.environment(task.for_window())
    key = Key(recipe.seed if command.seed is None else command.seed).child("play")
    player = Player(env, actor(str(path), env, key, command.trust), key)
    return command.watch(player, f"{recipes.title(recipe)}, {path.name}")


def how_to_film(recipe: Recipe, path: Path) -> str:
    """The command that films a run, or why the run cannot be filmed."""
    try:
        film.check(recipe)
    except EtudeError as error:
        return str(error)
    return f"`etude eval {path} --video` makes films and pictures."


def run_demo(arguments: list[str]) -> int:
    """Show or film a policy of the package; the exit code."""
    command = parse("demo", DemoCommand, arguments)
    if command.name not in DEMOS:
        raise UsageError(f"There is no demo '{command.name}': choose {_DEMO_NAMES}.")
    if command.web and command.film is not None:
        raise UsageError("--web shows a page and --film writes a film: leave out one of them.")
    recipe = recipes.find(command.name)
    steps = f"{fresh.step_of(DEMO_FOLDER / command.name):,} steps"
    print(f"{recipe.name}: a policy of `etude train {recipe.name}`, after {steps}.", flush=True)
    if command.film is not None:
        return _film_demo(command, recipe, Path(command.film))
    if command.web or rendering.has_screen():
        open_browser, command = not command.web, command.model_copy(update={"web": True})
        player = _demo_player(command, recipe, recipe.task.for_evaluation())
        return command.watch(player, f"{recipe.name}, trained policy", open_browser)
    print("There is no screen here: this makes a film, and --web serves a page.", flush=True)
    try:
        return _film_demo(command, recipe, Path(f"demo-{recipe.name}.webp"))
    except NoPictures as error:
        page = f"`etude demo {recipe.name} --web` serves a page, which a browser draws."
        raise UsageError(f"{error} Or else: {page}") from error


def _demo_player(command: DemoCommand, recipe: Recipe, config: EnvConfig) -> Player:
    env, key = command.environment(config), Key(command.seed).child("demo")
    return Player(env, actor(str(DEMO_FOLDER / recipe.name), env, key), key)


def _film_demo(command: DemoCommand, recipe: Recipe, path: Path) -> int:
    """Film a few episodes into a file."""
    film.check_file(path)
    player = _demo_player(command, recipe, recipe.task.for_evaluation().for_film())
    played = player.record(command.seconds, _DEMO_EPISODES)
    files.make_folder(path.parent)
    title = f"{recipe.name}, trained policy"
    scenes = [
        film.Scene(footage(player.env, recording), title, f"episode {e.number}", *outcome(e))
        for e, recording in played
    ]
    with waiting(f"drawing {sum(scene.footage.seconds for scene in scenes):.0f} s of film"):
        film.write_file(scenes, path)
    print(path)
    ended = [each.success for each, _ in played if each.ending]
    if ended:
        print(f"{sum(map(bool, ended))} of {len(ended)} episodes succeeded.")
    return 0


def run_view(arguments: list[str]) -> int:
    """Film or show a task; the exit code."""
    default = None
    if arguments and arguments[0][:1] != "-":
        default = ViewCommand(task=arguments[0], env=task_config(arguments[0]))
    command = parse("view", ViewCommand, arguments, default)
    config = task_config(command.task) if command.env is None else command.env
    if not command.web:
        film.check_tools()
        config = config.for_film()
    if command.policy not in (ZERO, RANDOM) and Path(command.policy).exists():
        config = env_with_sentence(config, command.policy)
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
    if formats := film.formats():
        print(formats)
    return 0


def task_config(target: str) -> EnvConfig:
    """The environment of a recipe, or of any name that `etude check` takes."""
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


def browser_window(env: MujocoEnv, title: str, port: int | None) -> Any:
    """MuJoCo's viewer in the browser, for this machine only; port None: the first free one."""
    try:
        from etude.envs.mujoco.browser import BrowserWindow
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"MuJoCo {version('mujoco')} has no web viewer here that Etude can keep to this "
            f"machine ({error}); leave out --web."
        ) from error
    return BrowserWindow(env, title, port)


def _open(url: str, folder: Path) -> None:
    """Open a page in this machine's browser.

    The address has a token, and every user can read a browser's command line: the browser is given
    a file in a folder that only this user can read.
    """
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">{url}</a>')
    webbrowser.open(page.as_uri())


def check_shown(env: BatchEnv, config: EnvConfig, instead: Callable[[], str]) -> None:
    """Refuse an environment that a window cannot show; instead: an alternative, as a sentence."""
    if ability(env, MujocoEnv) is not None:
        return
    raise UsageError(
        "A window shows only tasks on Etude's own MuJoCo simulation; this environment is of the "
        f"kind '{config.kind}'. {instead()}"
    )
