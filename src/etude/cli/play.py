"""`etude play`: watch a run's best policy in MuJoCo's viewer."""

from __future__ import annotations

import importlib
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import mujoco
from pydantic import Field

from etude.api import Run
from etude.cli.options import Positional, parse
from etude.cli.target import Trusting
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.offscreen import camera, draw_target
from etude.planning.recipe import Recipe
from etude.reports import fresh
from etude.rollout.group import Inference, restart


class PlayCommand(Trusting):
    """Watch a run's best policy in MuJoCo's viewer."""

    run: Positional[str] = Field(description="The run's folder.")
    seed: int | None = Field(None, description="Seed of the episodes; default: that of the run.")


def run(arguments: list[str]) -> None:
    """Open the viewer."""
    command = parse("play", PlayCommand, arguments)
    run = Run(command.run, command.trust)
    play(run.recipe, run.path, command.seed)


def has_screen() -> bool:
    """Whether a window can be opened."""
    if not sys.platform.startswith("linux"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def play(recipe: Recipe, path: Path, seed: int | None = None) -> None:
    """Episode after episode in real time, until the window is closed."""
    if not has_screen():
        raise UsageError(
            "There is no screen here to open MuJoCo's viewer on. `etude eval "
            f"{path} --video` makes films and pictures instead."
        )
    env = recipe.task.build(recipe.task.num_agents)
    if not isinstance(env, MujocoEnv):
        raise UsageError(
            "Only tasks on Etude's own MuJoCo simulation can be played, such as reach and "
            f"pick-place; this run's environment is of the kind '{recipe.task.kind}'."
        )
    key = Key(recipe.seed if seed is None else seed).child("play")
    data = mujoco.MjData(env.simulation.model)
    viewer: Any = importlib.import_module("mujoco.viewer")
    with viewer.launch_passive(env.simulation.model, data) as window:
        view = camera(env.task.camera, env.simulation.model)
        window.cam.lookat[:], window.cam.distance = view.lookat, view.distance
        window.cam.azimuth, window.cam.elevation = view.azimuth, view.elevation
        _act(env, data, window, path, key)
    env.close()


def _act(env: MujocoEnv, data: Any, window: Any, path: Path, key: Key) -> None:
    policy, model = fresh.load(path), env.simulation.model
    fresh.check_fits(policy, env.spec, path)
    infer, state, obs = Inference(policy), policy.initial_state(1), env.reset(key)
    seconds, begin = model.opt.timestep * env.spec.substeps, time.monotonic()
    for step in count(1):
        if not window.is_running():
            return
        _show(env, data, window)
        actions, _, state = infer(obs, state, None)
        result = env.step(env.spec.action.to_env(actions))
        if len(result.final_envs):
            restart(state, policy, result.final_envs)
        obs = result.obs
        time.sleep(max(0.0, begin + step * seconds - time.monotonic()))


def _show(env: MujocoEnv, data: Any, window: Any) -> None:
    """The state of the task's one environment in the window's scene."""
    model, target = env.simulation.model, getattr(env.view, "target", None)
    integrated = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    with window.lock():
        mujoco.mj_setState(model, data, env.simulation.state[0], integrated)
        mujoco.mj_forward(model, data)
        window.user_scn.ngeom = 0
        if target is not None:
            draw_target(window.user_scn, env.task.camera, target[0])
    window.sync()
