"""`etude play` of runs on Gymnasium's environments, which show themselves."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from etude.api import train
from etude.cli import main as cli
from etude.envs.mujoco import rendering
from etude.planning import recipes


class Blind(gymnasium.Env[Any, Any]):
    """An environment that draws nothing."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 0.0, True, False, {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = recipes.find("ppo").replace(
        clock__total_timesteps=1024,
        clock__iterations=1,
        evaluation__episodes=2,
        evaluation__num_envs=2,
        evaluation__envs_per_group=2,
    )
    return train(recipe, tmp_path_factory.mktemp("runs") / "run").path


def test_an_environment_plays_in_its_own_window(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pygame = pytest.importorskip("pygame")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    drawn: list[bool] = []
    flip = pygame.display.flip

    def shown() -> None:
        drawn.append(pygame.surfarray.array3d(pygame.display.get_surface()).std() > 0)
        flip()

    monkeypatch.setattr(pygame.display, "flip", shown)
    timer = threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert cli.main(["play", str(run)]) == 128 + signal.SIGINT
    timer.join()
    said = capsys.readouterr().out
    assert f"CartPole-v1, ppo, {run.name}: its own window" in said
    assert "Episode 0: The episode has a return of" in said
    assert len(drawn) > 10
    assert all(drawn)


def test_what_cannot_be_shown_is_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendering, "_works", lambda name: True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendering.sys, "platform", "linux")
    assert cli.main(["play", str(run)]) == 2
    said = capsys.readouterr().err
    assert "no screen here to open a window on. `etude eval" in said
    assert "--web" not in said
    assert cli.main(["play", str(run), "--web"]) == 2
    assert "of the kind 'gym'" in capsys.readouterr().err
    gymnasium.register("Blind-v0", Blind)
    config: Any = recipes.find("ppo").task
    with pytest.raises(Exception, match="neither 'human' nor 'rgb_array'"):
        config.replace(id="Blind-v0").for_window()
