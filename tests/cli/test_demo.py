"""`etude demo`: policies that come with the package are good, and can be seen on any machine."""

from __future__ import annotations

import importlib.util
import webbrowser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from etude.cli import main as cli
from etude.cli import watching
from etude.core.errors import EtudeError
from etude.envs.mujoco import rendering
from etude.evaluate import film, fresh
from etude.planning import recipes


@pytest.fixture
def filmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[Any], Path]]:
    """What films would have been made of, without a screen: nothing is drawn."""
    calls: list[tuple[list[Any], Path]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rendering, "has_screen", lambda: False)
    monkeypatch.setattr(film, "check_tools", lambda: None)
    monkeypatch.setattr(film, "write_file", lambda scenes, path: calls.append((scenes, path)))
    return calls


@pytest.mark.rotated
@pytest.mark.parametrize("name", watching.DEMOS)
def test_its_policies_are_good(name: str) -> None:
    played = fresh.play(recipes.find(name), watching.DEMO_FOLDER / name, episodes=16, seed=5)
    assert played.episodes["is_success"].mean() > 0.9


def test_without_a_screen_it_is_a_film(
    filmed: list[tuple[list[Any], Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "reach: a policy of `etude train reach`, after 131,072 steps."
    assert "There is no screen here" in told[1]
    assert "--web" in told[1]
    assert told[2:] == ["demo-reach.webp", "5 of 5 episodes succeeded."]
    ((scenes, path),) = filmed
    assert path == Path("demo-reach.webp")
    assert [(scene.outcome, scene.success) for scene in scenes] == 5 * [("success", True)]
    assert [scene.detail for scene in scenes] == [f"episode {n}" for n in range(5)]
    assert all(0.1 < scene.footage.seconds < 5.0 for scene in scenes)


def test_a_film_is_as_long_as_asked(filmed: list[tuple[list[Any], Path]]) -> None:
    asked = ["demo", "--seconds", "0.2", "walk-go1", "--command", "0.5", "0", "0"]
    assert cli.main([*asked, "--film", "films/walk.mp4"]) == 0
    (((scene,), path),) = filmed
    assert path == Path("films/walk.mp4")
    assert path.parent.is_dir()
    assert scene.footage.seconds == pytest.approx(0.2)
    assert scene.outcome == ""


def test_with_a_screen_the_browser_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    shown: list[tuple[str, int | None]] = []

    class Page:
        """A page that is closed at once."""

        url = "http://127.0.0.1:1/"

        def __init__(self, env: Any, title: str, port: int | None) -> None:
            shown.append((title, port))

        def is_running(self) -> bool:
            return False

        def __enter__(self) -> Page:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(watching, "browser_window", Page)

    def opens(address: str) -> None:
        """The token of the page is in a file of this user's, and in no command line."""
        page = Path(address.removeprefix("file://"))
        assert page.parent.stat().st_mode & 0o077 == 0
        opened.append(page.read_text())

    monkeypatch.setattr(webbrowser, "open", opens)
    monkeypatch.setattr(rendering, "has_screen", lambda: True)
    assert cli.main(["demo", "pick-place", "--port", "8099"]) == 0
    assert shown == [("pick-place, trained policy", 8099)]
    assert f"url={Page.url}" in opened[0]
    monkeypatch.setattr(rendering, "has_screen", lambda: False)
    assert (
        cli.main(["demo", "--web"]) == 0
    )  # Somebody looks at it from elsewhere, through a tunnel.
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reech"], "There is no demo 'reech': choose reach, pick-place or walk-go1."),
        (["reach", "walk-go1"], "'walk-go1' belongs to no option"),
        (
            ["--film", "film.avi"],
            "film.avi is not the name of a film: it must end in .mp4, .webp or .gif.",
        ),
        (["--film", "folder.gif"], "folder.gif is a folder"),
        (["--film", "film.gif", "--web"], "leave out one of them"),
        (["--film", "film.gif", "--port", "80"], "add --web"),
        (["--film", "film.gif", "--command", "1", "0", "0"], "follows no velocity commands"),
        (["--film"], "--film needs a value"),
        (["--seconds", "0"], "seconds"),
        (["--video", "film.mp4"], "did you mean --film (Write a film to this file"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_sentence(
    arguments: list[str],
    said: str,
    filmed: list[tuple[list[Any], Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("folder.gif").mkdir()
    assert cli.main(["demo", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert not filmed


def test_a_machine_that_cannot_draw_is_told_of_the_page(
    filmed: list[tuple[list[Any], Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise rendering.NoPictures("Pictures cannot be drawn here.")

    monkeypatch.setattr(film, "check_tools", fails)
    assert cli.main(["demo", "walk-go1"]) == 2
    told = "Or else: `etude demo walk-go1 --web` serves a page, which a browser draws."
    assert told in capsys.readouterr().err


@pytest.mark.rotated
def test_films_need_no_ffmpeg_but_for_mp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))
    find = importlib.util.find_spec
    without = {"imageio_ffmpeg": None}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: without[name] if name in without else find(name)
    )
    monkeypatch.setattr(film, "SMALL", (96, 54))
    asked = ["demo", "--seconds", "0.3", "--film"]
    assert cli.main([*asked, str(tmp_path / "film.mp4")]) == 2
    assert "end with .webp or .gif" in capsys.readouterr().err
    for name in ("film.webp", "film.gif"):
        assert cli.main([*asked, str(tmp_path / name)]) == 0
        with Image.open(tmp_path / name) as moving:
            assert moving.size == (96, 54)
            assert moving.n_frames >= 4
