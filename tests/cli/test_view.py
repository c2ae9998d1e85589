"""`etude view` and `etude play --web`: films, the page in the browser, and who can reach it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from etude.api import train
from etude.cli import main as cli
from etude.cli import watching
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.envs.mujoco import browser, rendering
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.decor import decorated
from etude.evaluate import film
from etude.evaluate import footage as footages
from etude.evaluate.playing import Player, ZeroActor
from etude.planning import recipes
from sockets import descendants, listening
from toys import tiny_reach

STARTS = 60.0
"""Seconds that a busy machine may take to begin."""


def test_a_film_of_a_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(footages, "STRIP_SIZE", (60, 80))
    asked = ["view", "reach", "--policy", "random", "--seconds", "0.2", "--small", "--out"]
    assert cli.main([*asked, str(tmp_path)]) == 0
    *paths, sentence = capsys.readouterr().out.splitlines()
    names = [f"reach-random.{kind}" for kind in ("png", "mp4", "webp")]
    assert [Path(path).name for path in paths] == names
    assert all(Path(path).stat().st_size > 1000 for path in paths)
    assert "in 2 steps (0.2 s), cut there. Terms of the reward: progress " in sentence


@pytest.fixture
def filmed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What films would have been made of: nothing is drawn."""
    calls: list[tuple[Any, ...]] = []

    def write(scenes: Any, *arguments: Any) -> list[Path]:
        (scene,) = scenes
        calls.append((*scene.footage, scene.title, *arguments))
        return []

    monkeypatch.setattr(film, "check_tools", lambda: None)
    monkeypatch.setattr(film, "write", write)
    monkeypatch.setattr(watching, "footage", lambda env, recording: (env, recording))
    return calls


def test_the_first_episode_is_filmed_and_told(
    filmed: list[tuple[Any, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--out", str(tmp_path)]
    assert cli.main(["view", "reach", "--env.max-episode-steps", "3", *there]) == 0
    assert "in 3 steps (0.3 s), ended by the time limit." in capsys.readouterr().out
    assert cli.main(["view", "walk-go1", "--policy", "random", *there]) == 0
    told = capsys.readouterr().out
    assert "ended by 'tilted'" in told or "ended by 'down'" in told
    (_, short, *_), (env, recording, title, folder, name, size) = filmed
    assert size == film.SIZE
    assert len(short.states) == 4
    assert (title, folder, name) == ("walk-go1, random policy", tmp_path, "walk-go1-random")
    # The sum of the terms that are told is the return.
    total = float(told.split("return of ")[1].split()[0])
    terms = told.split("reward: ")[1].rstrip(".\n").split(", ")
    assert sum(float(term.split()[1]) for term in terms) == pytest.approx(total, abs=0.06)
    assert len(recording.states) == 1 + int(told.split(" in ")[1].split()[0])
    assert env.num_envs == 1


def test_a_command_is_held(filmed: list[tuple[Any, ...]], tmp_path: Path) -> None:
    asked = ["view", "walk-go1", "--command", "0.5", "-0.2", "0", "--env.command-every", "0.02"]
    assert cli.main([*asked, "0.04", "--seconds", "0.2", "--out", str(tmp_path)]) == 0
    env = filmed[0][0]
    assert env.ability(VelocityCommand).target.tolist() == [[0.5, -0.2, 0.0]]
    env.restart()
    assert env.ability(VelocityCommand).target.tolist() == [[0.5, -0.2, 0.0]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wlak-go1"], "There is no task 'wlak-go1'; did you mean 'walk-go1'?"),
        (
            ["reach", "--policy", "rnadom"],
            "There is no run rnadom: the policy must be zero, random",
        ),
        (["reach", "--command", "1", "0", "0"], "follows no velocity commands"),
        (["walk-go1", "--command", "1", "0"], "command"),
        (["reach", "--port", "8080"], "add --web"),
        (["reach", "--env.max-episode-stpes", "3"], "did you mean --env.max-episode-steps?"),
        (["CartPole-v1", "--web"], "of the kind 'gym'. Leave out --web for a film."),
        (["toy_envs:MotionEnv"], "give the task a method picture(env_id)"),
        (["nothing.py:Task"], "nothing.py"),
        ([], "Name the task first"),
    ],
)
def test_what_cannot_be_viewed_is_said_in_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["view", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_a_policy_of_another_task_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(tiny_reach(1), run)
    assert cli.main(["view", "walk-go1", "--policy", str(run)]) == 2
    assert "was trained on another task" in capsys.readouterr().err
    opened: list[Shown] = []

    def window(env: Any, title: str, port: int | None) -> Shown:
        opened.append(Shown(title, port))
        return opened[-1]

    monkeypatch.setattr(watching, "browser_window", window)
    assert cli.main(["play", str(run), "--web", "--port", "8123"]) == 0
    assert (len(opened[0].lines), opened[0].port) == (3, 8123)
    assert opened[0].lines[2][0].startswith("episode 0, step 2, ")
    assert cli.main(["view", "reach", "--web", "--policy", str(run)]) == 0
    assert opened[1].title == "reach, run policy"


class Shown:
    """A page that is closed after three steps."""

    url = "http://127.0.0.1/"

    def __init__(self, title: str, port: int | None) -> None:
        self.title, self.port = title, port
        self.lines: list[list[str]] = []

    def is_running(self) -> bool:
        return len(self.lines) < 3

    def show(self, env: Any, lines: list[str]) -> None:
        self.lines.append(lines)

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_the_joystick_holds_commands_and_lets_go() -> None:
    env: Any = watching.task_config("walk-go1").build(1)
    Player(env, ZeroActor(env.spec), Key(0)).begin()
    part = env.ability(VelocityCommand)
    drawn = tuple(part.target[0].tolist())
    window: Any = SimpleNamespace(_panel=SimpleNamespace(held=True, command=(0.4, 0.0, -0.3)))
    browser.BrowserWindow._follow(window, part)
    assert part.fixed
    assert part.target.tolist() == [[0.4, 0.0, -0.3]]
    window._panel.held = False
    browser.BrowserWindow._follow(window, part)
    env.reset(Key(0))
    browser.BrowserWindow._follow(window, part)
    assert window._panel.command == drawn
    assert part.ranges.tolist() == [[-1.5, 1.5], [-0.8, 0.8], [-1.2, 1.2]]


@pytest.mark.parametrize("name", ["reach", "walk-go1", "walk-go1-rough", "pick-place"])
def test_what_people_see_has_the_same_states(name: str) -> None:
    env: Any = recipes.find(name).task.build(1)
    plain, seen = env.simulation.model, decorated(env)
    sizes = ("nq", "nv", "na", "nu", "nbody", "nmocap", "nhfielddata", "nuserdata")
    assert [getattr(seen, size) for size in sizes] == [getattr(plain, size) for size in sizes]
    own = [index for index in range(seen.ngeom) if seen.geom(index).name != "etude/floor"]
    assert np.array_equal(seen.geom_pos[own], plain.geom_pos)
    assert seen.ntex > plain.ntex


def test_a_viewer_that_would_listen_widely_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = watching.task_config("reach").build(1)
    monkeypatch.setattr(browser, "LocalViewer", browser.web_viewer.WebViewer)
    with pytest.raises(EtudeError, match="would open the web viewer to other machines"):
        browser.BrowserWindow(env, "reach", None)
    assert listening({os.getpid()})["beyond"] == set()
    monkeypatch.setitem(sys.modules, "etude.envs.mujoco.browser", None)
    with pytest.raises(EtudeError, match="has no web viewer here that Etude can keep"):
        watching.browser_window(env, "reach", None)


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that shows a task, and the address of its page."""
    command = [sys.executable, "-m", "etude", *arguments, "--web"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and "http://127.0.0.1:" not in line:  # It may say first what it waits for.
            line = process.stdout.readline()
        yield process, next(word for word in line.split() if word.startswith("http"))
    finally:
        process.kill()
        process.wait()


@pytest.mark.rotated
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_page_is_for_this_machine_only(number: signal.Signals) -> None:
    with served("view", "reach") as (process, url):
        found = listening(descendants(process.pid))
        assert found["beyond"] == set()
        assert len(found["loopback"]) == 2
        with urllib.request.urlopen(url, timeout=STARTS) as page:
            assert b"canvas" in page.read()
        address = url.replace("http", "ws") + "state"
        origin, _, _ = url.rstrip("/").rpartition("/")
        with connect(address, origin=origin) as own:  # type: ignore[arg-type]
            assert "viewers=1" in str(own.recv(timeout=STARTS))
        with pytest.raises(InvalidStatus):
            connect(address, origin="http://example.com")  # type: ignore[arg-type]
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{origin}/model", timeout=STARTS)
        ports = {int(address.rpartition(":")[2], 16) for address in found["loopback"]}
        (inner,) = ports - {int(origin.rpartition(":")[2])}  # for the viewer's own threads
        stranger = socket.create_connection(("127.0.0.1", inner), timeout=STARTS)
        with stranger, suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        process.send_signal(number)
        assert process.wait(STARTS) == 128 + number
        assert process.stdout is not None
        assert process.stdout.read() == "Stopped.\n"


@pytest.mark.rotated
def test_a_browser_shows_the_state_as_it_advances(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    flags = ["--headless=new", "--no-sandbox", "--use-angle=swiftshader", "--no-first-run"]
    flags += ["--enable-unsafe-swiftshader", f"--user-data-dir={tmp_path / 'profile'}"]
    with served("view", "walk-go1") as (process, url):
        page = subprocess.Popen(
            [chromium, *flags, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            # States are sent once a page has loaded, runs, and shows the panel.
            with connect(url.replace("http", "ws") + "state", max_size=None) as spectator:
                states, until = set[bytes](), time.monotonic() + STARTS
                while len(states) < 10 and time.monotonic() < until:
                    received = spectator.recv(timeout=STARTS)
                    if isinstance(received, bytes):
                        states.add(received)
                        spectator.send("state_ack")
            assert len(states) == 10
            assert process.poll() is None
            assert listening(descendants(process.pid))["beyond"] == set()
        finally:
            page.terminate()
            page.wait()
