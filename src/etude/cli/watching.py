"""What commands that show a task share: the window, the joystick's command, and how it ends."""

from __future__ import annotations

import signal
import webbrowser
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Self

from pydantic import Field, FiniteFloat

from etude.core.abilities import ability
from etude.core.config import Config
from etude.core.contracts import BatchEnv
from etude.core.errors import UsageError
from etude.envs.config import EnvConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.windows import ScreenWindow
from etude.evaluate.playing import Player, hold, watch


class Watching(Config):
    """A command that shows a task."""

    command: tuple[FiniteFloat, FiniteFloat, FiniteFloat] | None = Field(
        None,
        description="A velocity to follow all the time, where the task follows commands: "
        "x and y in m/s, yaw in rad/s.",
    )
    web: bool = Field(
        False, description="Show it in the browser, by a server for this machine only."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="Port of that server; default: a free one from 8080."
    )

    def environment(self, config: EnvConfig) -> BatchEnv:
        """The one environment that is shown, with the command held."""
        if self.port is not None and not self.web:
            raise UsageError("--port is that of the page in the browser: add --web.")
        env = config.make(config.num_agents)
        hold(env, self.command)
        return env

    def watch(self, player: Player, title: str, opens: bool = False) -> int:
        """Show episodes until the window is closed, or a signal comes; the exit code.

        opens: the page is opened in this machine's browser.
        """
        env, window = player.env, self._window(player, title)
        with Signals() as signals, window, TemporaryDirectory(prefix="etude-page-") as folder:
            if opens:
                _open(window.url, Path(folder))
            watch(player, window, lambda: signals.came is not None)
        env.close()
        if signals.came is None:
            return 0
        print("Stopped.")
        return 128 + signals.came

    def _window(self, player: Player, title: str) -> Any:
        shown = player.simulated
        assert shown is not None, "it was checked"
        if not self.web:
            return ScreenWindow(shown)
        window = browser_window(shown, title, self.port)
        print(f"{title}: {window.url} (for this machine only; Ctrl+C stops)", flush=True)
        return window


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

    By a file in a folder that only this user can read: the address has a token, and every user can
    read a browser's command line.
    """
    page = folder / "open.html"
    page.write_text(f'<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">{url}</a>')
    webbrowser.open(page.as_uri())


def check_shown(env: BatchEnv, config: EnvConfig, instead: Callable[[], str]) -> None:
    """Refuse an environment that a window cannot show; instead: what to do with it."""
    if ability(env, MujocoEnv) is not None:
        return
    raise UsageError(
        "A window shows tasks on Etude's own MuJoCo simulation alone; this environment is of the "
        f"kind '{config.kind}'. {instead()}"
    )


class Signals:
    """Takes the first request to stop; a second one ends the process as it would without this."""

    def __init__(self) -> None:
        self.came: int | None = None

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.came = number
        self.__exit__()

    def __enter__(self) -> Self:
        wanted = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._take) for number in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
