"""Window that shows a running simulation on a screen; `browser.py` shows it in a web page."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Self

import mujoco

from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.framing import aim
from etude.envs.mujoco.offscreen import draw_target

INTEGRATED = int(mujoco.mjtState.mjSTATE_INTEGRATION)


def has_screen() -> bool:
    """Whether this machine has a screen."""
    if not sys.platform.startswith("linux"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class ScreenWindow:
    """MuJoCo's passive viewer."""

    def __init__(self, env: MujocoEnv) -> None:
        viewer: Any = importlib.import_module("mujoco.viewer")
        self._model = decorated(env)
        self._data = mujoco.MjData(self._model)
        self._window = viewer.launch_passive(self._model, self._data)
        aim(self._window.cam, env.task.camera, self._model)

    def is_running(self) -> bool:
        return bool(self._window.is_running())

    def show(self, env: MujocoEnv, lines: Sequence[str]) -> None:
        """Show the state of the task's only environment; this viewer does not show the lines."""
        target = getattr(env.view, "target", None)
        with self._window.lock():
            mujoco.mj_setState(self._model, self._data, env.simulation.state[0], INTEGRATED)
            mujoco.mj_forward(self._model, self._data)
            self._window.user_scn.ngeom = 0
            if target is not None:
                draw_target(self._window.user_scn, env.task.camera, target[0])
        self._window.sync()

    def __enter__(self) -> Self:
        self._window.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._window.__exit__(*details)
