"""What `etude eval` says of fresh episodes, keeps of them, and shows of them."""

from __future__ import annotations

import csv
import importlib
import io
import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
from PIL import Image

from etude.api import Run, train
from etude.cli import main as cli
from etude.cli import watching
from etude.core.contracts import EnvSpec
from etude.core.errors import EtudeError, UsageError
from etude.core.intervals import wilson
from etude.core.keys import Key
from etude.envs.mujoco import rendering
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.markers import Ghost
from etude.envs.mujoco.rendering import Studio
from etude.evaluate import evaluation, film, fresh
from etude.evaluate import footage as footages
from etude.evaluate.evaluation import new_folder
from etude.evaluate.footage import Simulated, footage
from etude.evaluate.fresh import FreshEpisodes
from etude.evaluate.report import Report, kinds_of
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.rollout.group import evaluate
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.tasks.pick_place.terms import OUTCOMES
from etude.tasks.reach import ReachingArm
from toy_envs import BOX
from toys import tiny_reach


def pictures() -> str | None:
    """Why nothing can be drawn here, if so."""
    try:
        rendering.backend()
    except EtudeError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def drawable() -> None:
    if reason := pictures():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_reach(2), path)
    return path


def made_up(**episodes: list[float]) -> FreshEpisodes:
    """Five episodes on two rows would not divide: one row of five, then."""
    spec = EnvSpec({}, BOX, 200, outcomes=OUTCOMES if "outcome" in episodes else ())
    arrays = {name: np.array(values, np.float64) for name, values in episodes.items()}
    return FreshEpisodes(arrays, spec, 4096, 7, Key(7), envs_per_group=1, per_env=5)


FIVE: dict[str, list[float]] = {
    "return": [10, 2, 3, 12, 1],
    "length": [20, 200, 200, 40, 60],
    "is_success": [1, 0, 0, 1, 0],
    "reward/reach": [1, 1, 1, 1, 1],
    "placement_error": [0.004, 0.2, 0.2, 0.006, 0.5],
    "outcome": [0, 2, 2, 0, 3],
}


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    # Published values: Newcombe 1998, table I, method 3; and the closed forms at 0 and n.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (100, 100, 1 / (1 + 1.959964**2 / 100), 1.0),
    ],
)
def test_wilson_interval(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson(successes, episodes) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_holds_the_rate() -> None:
    for successes in range(51):
        low, high = wilson(successes, 50)
        assert 0 <= low <= successes / 50 <= high <= 1


def test_kinds_are_named_and_counted() -> None:
    report = Report(made_up(**FIVE))
    grasp = "reached but no grasp"
    assert report.kinds == ["success", grasp, grasp, "success", "dropped"]
    assert list(report.counts().items()) == [("success", 2), (grasp, 2), ("dropped", 1)]
    without = {name: values for name, values in FIVE.items() if name != "outcome"}
    kinds = kinds_of(made_up(**without))
    assert kinds == ["success", "failure", "failure", "success", "failure"]
    assert kinds_of(made_up(**{"return": [1.0], "length": [3.0]})) == []


def test_metrics_and_table_are_those_of_the_episodes() -> None:
    report = Report(made_up(**FIVE))
    metrics = report.metrics()
    assert metrics["eval/success_rate"] == 0.4
    assert (metrics["eval/success_low"], metrics["eval/success_high"]) == wilson(2, 5)
    assert metrics["eval/placement_error_of_successes"] == pytest.approx(0.005)
    assert metrics["kinds"] == report.counts()
    text = report.render()
    assert "success 40.0% (2 of 5; 95 % interval 11.8% to 76.9%)" in text
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["reward"].split()[1:4] == ["5.60", "±", "4.50"]
    assert "5.00 ± 1.00" in lines["placement error, mm"]
    assert lines["reached but no grasp"].split()[-4:] == ["2", "40.0%", "1,", "2"]
    assert "success  " not in text


def test_table_of_an_environment_that_knows_no_success() -> None:
    report = Report(made_up(**{"return": [1.0, 2.0], "length": [3.0, 5.0]}))
    text = report.render()
    assert "success" not in text
    assert "1.50 ± 0.50" in text
    assert report.csv() == "episode,return,length\n0,1,3\n1,2,5\n"
    assert "eval/success_low" not in report.metrics()


def test_csv_has_a_line_for_every_episode() -> None:
    report = Report(made_up(**FIVE))
    lines = list(csv.DictReader(io.StringIO(report.csv())))
    assert [line["kind"] for line in lines] == report.kinds
    for name in ("return", "length", "is_success", "reward/reach", "placement_error"):
        assert [float(line[name]) for line in lines] == FIVE[name]


@pytest.mark.usefixtures("drawable")
def test_what_is_imitated_is_a_ghost_in_the_films(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pose = np.linspace(0.2, 0.8, 7)

    def markers(arm: ReachingArm, env_id: int, step: int) -> list[Ghost]:
        return [Ghost(pose * step / 100)]

    recipe = Run(finished).recipe
    played = fresh.play(recipe, finished, 4)
    task = film.environments(recipe, played)
    alone = film.replay(task, finished, played, [1])
    monkeypatch.setattr(ReachingArm, "markers", markers)
    task = film.environments(recipe, played)
    recordings = film.replay(task, finished, played, [1])
    recording, steps = recordings[1], len(alone[1].states)
    assert np.array_equal(recording.states, alone[1].states)
    # Step 0 is the start: the reference neither lags behind the state nor runs ahead of it.
    ghosts = [each[1].pose for each in recording.markers]
    assert np.array_equal(ghosts, [pose * step / 100 for step in range(steps)])
    assert steps == played.episodes["length"][1] + 1
    recording.path[:] = [recording.path[0]] * len(recording.path)  # only the ghost moves
    shown = footage(task, recording)
    moments = [0, (steps - 1) * shown.substeps]
    first, last = shown.draw(moments, (320, 180))
    red, green, blue = np.moveaxis(np.stack([first.pixels, last.pixels]).astype(int), -1, 0)
    ghost = (green > red + 25) & (green > blue + 25)
    assert ghost.sum(axis=(1, 2)).min() > 200
    assert (ghost[0] ^ ghost[1]).sum() > 100, "it moves"
    assert [line.text for line in first.legend] == ["target", "reference motion"]
    frame = np.asarray(next(film._frames(film.Scene(shown, "a title"), (64, 36))))
    assert frame.shape == (36, 64, 3)


def test_no_evaluation_is_overwritten(tmp_path: Path) -> None:
    made = [new_folder(tmp_path, 512) for _ in range(3)]
    names = ["000000000512-fresh", "000000000512-fresh-2", "000000000512-fresh-3"]
    assert [path.name for path in made] == names


def test_where_an_episode_was_played(finished: Path) -> None:
    """Episodes are ordered by group, episode of the row, row, and so they are found again."""
    recipe = Run(finished).recipe
    played = fresh.play(recipe, finished, 6)
    half = FreshEpisodes(
        played.episodes, played.spec, 0, 0, played.key, envs_per_group=2, per_env=2
    )
    places = [half.place(index) for index in (0, 1, 2, 3, 4)]
    assert places == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)]
    env = recipe.env.make(played.envs_per_group)
    again = evaluate(env, fresh.load(finished), played.per_env, played.group_key(0))
    assert all((again[name] == played.episodes[name]).all() for name in again)


@pytest.mark.parametrize(
    ("episodes", "spread"), [(100, (100, 50)), (256, (256, 64)), (1, (1, 1)), (101, (101, 101))]
)
def test_episodes_are_spread_over_rows(episodes: int, spread: tuple[int, int]) -> None:
    assert fresh._spread(episodes, 1) == spread


def test_agents_of_an_environment_are_not_parted() -> None:
    assert fresh._spread(600, 3) == (150, 30)
    assert fresh._spread(3, 3) == (3, 3)
    with pytest.raises(UsageError, match="use 99 or 102 episodes"):
        fresh._spread(100, 3)


def test_a_replay_is_the_episode(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Run(finished).recipe
    played = fresh.play(recipe, finished, 6, seed=3)
    task = film.environments(recipe, played)
    recordings = film.replay(task, finished, played, [4, 1])
    for number, recording in recordings.items():
        assert len(recording.states) == played.episodes["length"][number] + 1
        # It ends where the episode did, not where the next one begins.
        task.simulation.state[0] = recording.states[-1]
        task.simulation.forward()
        away = task.view.hand[0] - recording.markers[-1][0].position
        assert np.linalg.norm(away) == pytest.approx(played.episodes["final_distance"][number])
    states = recordings[4].states
    assert all(map(np.array_equal, recordings[4].path[:: task.task.substeps], states))
    monkeypatch.setattr(Simulated, "draw", lambda self, moments, size: moments)
    steps, _ = footage(task, recordings[4]).strip()
    assert steps == sorted(steps)
    assert (len(steps), steps[0], steps[-1]) == (8, 0, played.episodes["length"][4])


def test_each_kind_gets_an_episode_of_middle_length() -> None:
    five = made_up(**{**FIVE, "length": [20, 50, 200, 40, 60]})
    chosen = film.typical(five, kinds_of(five))
    assert chosen == {"success": [0, 3], "reached but no grasp": [1, 2], "dropped": [4]}


@pytest.mark.usefixtures("drawable")
def test_strip_and_film(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg")
    recipe = Run(finished).recipe
    played = fresh.play(recipe, finished, 2)
    task = film.environments(recipe, played)
    recordings = film.replay(task, finished, played, [0])
    recording = recordings[0]
    width, height = 150, 200
    monkeypatch.setattr(footages, "STRIP_SIZE", (width, height))
    scene = film.Scene(footage(task, recording), "a title", "episode 0", "success", True)
    strip = np.asarray(film.strip(scene))
    head, row = 2 * film.CAPTION, height + film.CAPTION  # a title and a legend
    assert strip.shape == (head + 2 * row, 4 * (width + film.GAP) - film.GAP, 3)
    cells = [
        strip[top : top + height, left : left + width]
        for top in (head, head + row)
        for left in range(0, strip.shape[1], width + film.GAP)
    ]
    assert len({cell.tobytes() for cell in cells}) == 8
    red, green, blue = np.moveaxis(cells[0].astype(int), -1, 0)
    assert ((green > red + 60) & (green > blue + 60)).sum() > 10, "the target is not to be seen"
    recording.path[21:] = []  # two control steps
    scene = replace(scene, footage=footage(task, recording))
    film._write_films([scene], tmp_path / "film.mp4", tmp_path / "film.webp", film.SMALL)
    reader: Any = importlib.import_module("imageio_ffmpeg").read_frames(str(tmp_path / "film.mp4"))
    facts = next(reader)
    assert facts["size"] == film.SMALL
    assert facts["fps"] == pytest.approx(100 / 3, abs=0.01), "every third physics step, of 10 ms"
    frames = [np.frombuffer(frame, np.uint8) for frame in reader]
    # Between control steps the arm moves too; then the film stays at the end, with the outcome.
    moved = [np.abs(a.astype(int) - b).max() for a, b in pairwise(frames[:7])]
    assert min(moved) > 20
    assert len(frames) == pytest.approx(8 + 33, abs=1)
    with Image.open(tmp_path / "film.webp") as moving:
        assert moving.size == film.SMALL
        assert moving.n_frames == 5, "every second picture; those that are alike are one"


@pytest.mark.usefixtures("drawable")
def test_pick_place_shows_cube_and_target() -> None:
    task: Any = PickPlaceConfig().make(1)
    task.reset(Key(0))
    with Studio(decorated(task), task.task.camera, 640, 360) as camera:
        picture = camera.picture(task.simulation.state[0], task.markers(0))
    red, green, blue = np.moveaxis(picture.astype(int), -1, 0)
    assert picture.shape == (360, 640, 3)
    assert ((red > green + 60) & (red > blue + 60)).sum() > 100
    assert ((green > red + 60) & (green > blue + 60)).sum() > 100
    task.close()


def test_eval_command(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Run(finished).fingerprint()
    assert cli.main(["eval", str(finished), "--episodes", "6"]) == 0
    text = capsys.readouterr().out
    assert "6 fresh episodes of the policy at step" in text
    assert "95 % interval" in text
    assert cli.main(["eval", str(finished), "--episodes", "6", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    folder = Path(metrics["folder"])
    kept = json.loads((folder / "summary.json").read_text())
    assert kept == {name: metrics[name] for name in kept}
    assert sum(metrics["kinds"].values()) == metrics["eval/episodes"] == 6
    assert len((folder / "episodes.csv").read_text().splitlines()) == 7
    assert Run(finished).evaluate(6)["eval/mean_reward"] == metrics["eval/mean_reward"]
    assert Run(finished).fingerprint() == before


def test_eval_in_a_changed_environment(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the evaluation's environment changes, and what there is not is refused."""
    known = Run(finished).recipe
    changed = ["eval", str(finished), "--episodes", "4", "--json", "--env.max-episode-steps", "7"]
    assert cli.main(changed) == 0
    assert json.loads(capsys.readouterr().out)["eval/mean_ep_length"] == 7.0
    assert Run(finished).recipe == known
    changed[1] = str(finished.parent)  # a folder that holds runs
    assert cli.main(changed) == 0
    assert json.loads(capsys.readouterr().out)["eval/mean_ep_length"] == 7.0
    assert cli.main(["eval", str(finished), "--env.bogus", "1"]) == 2
    assert "no option --env.bogus" in capsys.readouterr().err
    assert cli.main(["eval", str(finished), "--env.max-episode-steps", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_the_evaluation_that_ends_training(finished: Path) -> None:
    said: list[str] = []
    recipe, before = Run(finished).recipe, Run(finished).fingerprint()

    def ending(episodes: int) -> Recipe:
        config = recipe.evaluation.model_copy(update={"final_episodes": episodes})
        return recipe.model_copy(update={"evaluation": config})

    evaluation.finish(ending(0), finished, said.append)
    assert said == []
    evaluation.finish(ending(4), finished, said.append)
    (folder,) = (finished / "evaluations").glob("*-final")
    kept = [(folder / name).read_bytes() for name in ("episodes.csv", "summary.json")]
    evaluation.finish(ending(4), finished, said.append)
    assert [(folder / name).read_bytes() for name in ("episodes.csv", "summary.json")] == kept
    assert "4 fresh episodes" in said[0]
    assert Run(finished).fingerprint() == before


def test_the_final_evaluation_is_filmed_where_that_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_reach(2, evaluation={"final_episodes": 2, "final_video": True})
    path = tmp_path / "run"
    train(recipe, path)
    said: list[str] = []
    monkeypatch.setattr(rendering, "_works", lambda name: False)
    evaluation.finish(recipe, path, said.append)
    assert "was not filmed. " in said[1]
    (folder,) = (path / "evaluations").glob("*-final")
    assert (folder / "summary.json").is_file()

    def draw(
        recipe: Recipe, path: Path, fresh: Any, kinds: list[str], folder: Path, *_: Any
    ) -> None:
        Image.new("RGB", (8, 5)).save(folder / "drawn.png")

    monkeypatch.setattr(film, "check", lambda recipe: None)
    monkeypatch.setattr(film, "film", draw)
    shutil.rmtree(folder)
    evaluation.finish(recipe, path, said.append)
    logged = [file.read_bytes() for file in path.glob("events.*.final*")]
    assert sum(b"final/drawn" in content for content in logged) == 1


class Window:
    """What MuJoCo's passive viewer gives, without a screen; closed after three steps."""

    def __init__(self, model: Any, data: Any) -> None:
        self.cam, self.user_scn = mujoco.MjvCamera(), mujoco.MjvScene(model, maxgeom=4)
        self.data = data
        self.shown: list[float] = []

    def is_running(self) -> bool:
        return len(self.shown) < 3

    def lock(self) -> Any:
        return nullcontext()

    def sync(self) -> None:
        assert self.user_scn.ngeom == 1, "the target"
        self.shown.append(float(self.data.time))

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_play_shows_the_policy_at_work(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Window] = []

    def launch(model: Any, data: Any) -> Window:
        opened.append(Window(model, data))
        return opened[0]

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setitem(sys.modules, "mujoco.viewer", SimpleNamespace(launch_passive=launch))
    watching.play(Run(finished).recipe, finished, watching.PlayCommand(run=str(finished)))
    assert opened[0].shown == pytest.approx([0.0, 0.1, 0.2])
    assert opened[0].cam.distance == 1.5


def test_what_cannot_be_shown_is_said(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendering, "_works", lambda name: False)
    assert cli.main(["eval", str(finished), "--video"]) == 1
    assert "apt-get install" in capsys.readouterr().err
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(rendering.sys, "platform", "linux")
    # A command that would refuse is not recommended.
    assert cli.main(["play", str(finished)]) == 2
    told = capsys.readouterr().err
    assert "no screen" in told
    assert "apt-get install" in told
    assert "--video" not in told
    monkeypatch.setattr(rendering, "_works", lambda name: True)
    assert cli.main(["play", str(finished)]) == 2
    assert f"etude eval {finished} --video" in capsys.readouterr().err
    assert cli.main(["eval", str(finished), "--small"]) == 2
    assert "add --video" in capsys.readouterr().err


def test_films_without_ffmpeg_are_webp_and_say_why(
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    drawable: None,
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    monkeypatch.setattr(film, "SMALL", (96, 54))
    monkeypatch.setattr(footages, "STRIP_SIZE", (30, 40))
    assert cli.main(["eval", str(finished), "--episodes", "2", "--video"]) == 0
    said = capsys.readouterr().out
    assert "an .mp4 needs imageio-ffmpeg, `pip install etude[video]`" in said
    newest = max(finished.glob("evaluations/*-fresh*"), key=lambda path: path.stat().st_mtime)
    assert not [*newest.glob("*.mp4")]
    for path in newest.glob("*.webp"):
        with Image.open(path) as moving:
            assert moving.size == (96, 54)
            assert moving.n_frames > 3
    assert [*newest.glob("*.webp")]


def test_a_finished_run_shows_its_final_evaluation_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, path = tmp_path / "recipe.yaml", str(tmp_path / "run")
    recipe.write_text(recipes.dump(tiny_reach(2, evaluation={"final_episodes": 4})))
    assert cli.main(["train", str(recipe), "--folder", path]) == 0
    table = "4 fresh episodes"
    assert table in capsys.readouterr().out

    def play(*_: object) -> None:
        raise AssertionError("it was played again")

    monkeypatch.setattr(fresh, "play", play)
    assert cli.main(["resume", path]) == 0
    said = capsys.readouterr().out
    assert "finished already" in said
    assert table in said
    assert "Played when the run ended" in said
