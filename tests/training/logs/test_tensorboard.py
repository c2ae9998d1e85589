"""TensorBoard files: every number once, whatever was there before."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from etude.core.errors import EtudeError
from etude.training.logs.tensorboard import TensorBoardLog
from log_points import row_points, rows_like_a_run, single, tensorboard_events, tensorboard_points


def write(folder: Path, history: list[dict[str, float]], rows: list[dict[str, float]]) -> None:
    log = TensorBoardLog(folder)
    log.begin(history)
    for row in rows:
        log.write(row)
    log.close()


def test_every_number_of_every_row_is_a_point(tmp_path: Path) -> None:
    rows = rows_like_a_run(6)
    write(tmp_path, [], rows)
    assert tensorboard_points(tmp_path, ()) == single(row_points(rows, ()))


def test_a_resumed_run_has_the_points_of_an_untouched_one(tmp_path: Path) -> None:
    rows = rows_like_a_run(9)
    write(tmp_path / "untouched", [], rows)
    for kept in (0, 1, 4, 9):
        folder = tmp_path / f"killed-{kept}"
        log = TensorBoardLog(folder)
        log.begin([])
        for row in rows[: kept + 2]:
            log.write(row)  # and the process is gone without a close
        write(folder, rows[:kept], rows[kept:])
        assert len(list(folder.iterdir())) == 1
        assert tensorboard_points(folder) == tensorboard_points(tmp_path / "untouched")


def test_what_metrics_jsonl_cannot_hold_is_no_point_in_either(tmp_path: Path) -> None:
    live = {"timesteps": 8, "updates": 1, "a": math.nan, "b": math.inf, "c": 2.5, "flag": True}
    kept = {**live, "a": None, "b": None}
    write(tmp_path / "live", [], [live])
    write(tmp_path / "kept", [kept], [])
    expected = [("c", 8, 2.5)]
    assert tensorboard_points(tmp_path / "live") == expected
    assert tensorboard_points(tmp_path / "kept") == expected


def test_without_environment_steps_the_axis_is_updates(tmp_path: Path) -> None:
    write(tmp_path, [], [{"timesteps": 0, "updates": 32, "train/R_loss": 0.5}])
    assert ("train/R_loss", 32, 0.5) in tensorboard_points(tmp_path)


def test_time_goes_on_over_a_resume_and_readers_drop_the_old_file(tmp_path: Path) -> None:
    history = [
        {"timesteps": 8 * i, "updates": i, "time/time_elapsed": seconds}
        for i, seconds in enumerate((1.0, 2.0, 0.5, 3.0), start=1)  # resumed after the second
    ]
    write(tmp_path, history, [])
    version, start, _, *events = tensorboard_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == start.session_log.START
    times = [event.wall_time - events[0].wall_time for event in events]
    assert times == pytest.approx([0.0, 1.0, 1.5, 4.0], abs=1e-3)


def test_steps_episodes_and_seconds_are_curves_of_runs_that_collect(tmp_path: Path) -> None:
    rows = [{**row, "time/total_timesteps": row["timesteps"]} for row in rows_like_a_run(3)]
    write(tmp_path, [], rows)
    points = tensorboard_points(tmp_path, free=())
    for tag, column in (
        ("time/episodes", "episodes"),
        ("time/total_timesteps", "timesteps"),
        ("time/time_elapsed", "time/time_elapsed"),
    ):
        expected = [(tag, row["timesteps"], float(row[column])) for row in rows]
        assert [point for point in points if point[0] == tag] == expected
    offline = [{**row, "timesteps": 0, "dataset/passes": 1.0} for row in rows]
    write(tmp_path / "offline", [], offline)
    assert not [p for p in tensorboard_points(tmp_path / "offline", ()) if "episodes" in p[0]]


def test_other_files_stay_and_a_fault_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, [], rows_like_a_run(1))
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(EtudeError, match=r"Could not write curves to .*notes\.txt"):
        TensorBoardLog(tmp_path / "notes.txt").begin([])


def test_recipe_and_plan_are_texts_and_settings_are_hyperparameters(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("seed: 7\n")
    (tmp_path / "plan.txt").write_text("4 epochs\n")
    recipe = {
        "name": "mine",
        "seed": 7,
        "algorithm": {"kind": "ppo", "learning_rate": 1e-3, "target_kl": None, "fast": True},
        "policy": {"hidden": [64, 64]},
        "logs": {"tensorboard": True},
    }
    log = TensorBoardLog(tmp_path, recipe)
    log.begin([])
    log.close()
    values = {v.tag: v for event in tensorboard_events(tmp_path) for v in event.summary.value}
    assert values["recipe/text_summary"].metadata.plugin_data.plugin_name == "text"
    assert values["recipe/text_summary"].tensor.string_val == [b"    seed: 7"]
    assert values["plan/text_summary"].tensor.string_val == [b"    4 epochs"]
    plugin = values["_hparams_/session_start_info"].metadata.plugin_data
    found = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
    assert plugin.plugin_name == "hparams"
    assert {name: found[name].WhichOneof("kind") for name in found} == {
        "seed": "number_value",
        "algorithm.kind": "string_value",
        "algorithm.learning_rate": "number_value",
        "algorithm.fast": "bool_value",
        "policy.hidden": "string_value",
    }
    assert found["algorithm.learning_rate"].number_value == 1e-3


def test_the_final_evaluation_is_added_and_a_resume_drops_it(tmp_path: Path) -> None:
    rows = rows_like_a_run(3)
    write(tmp_path, [], rows)
    TensorBoardLog(tmp_path).add_final(1024, {"final/mean_reward": 2.5}, {})
    expected = single(row_points(rows, ()))
    assert tensorboard_points(tmp_path, ()) == [*expected, ("final/mean_reward", 1024, 2.5)]
    write(tmp_path, rows, [])
    assert tensorboard_points(tmp_path, ()) == expected


def test_pictures_of_the_final_evaluation(tmp_path: Path) -> None:
    drawn = tmp_path / "success.png"
    Image.new("RGB", (8, 5), (255, 0, 0)).save(drawn)
    TensorBoardLog(tmp_path).add_final(1024, {}, {"final/success": drawn})
    events = tensorboard_events(tmp_path)
    ((step, value),) = [(e.step, v) for e in events for v in e.summary.value if v.HasField("image")]
    assert (step, value.tag) == (1024, "final/success")
    assert (value.image.width, value.image.height) == (8, 5)
    assert value.image.encoded_image_string == drawn.read_bytes()


def film(folder: Path, step: int) -> bytes:
    """A film of two pictures in a run's folder."""
    place = folder / "evaluations" / f"{step:012d}-film"
    place.mkdir(parents=True)
    first, second = (Image.new("RGB", (8, 5), color) for color in ("red", "blue"))
    first.save(place / "film.gif", save_all=True, append_images=[second])
    return (place / "film.gif").read_bytes()


def test_films_are_added_with_the_next_row_and_again_after_a_resume(tmp_path: Path) -> None:
    rows = rows_like_a_run(4)
    log = TensorBoardLog(tmp_path)
    log.begin([])
    log.write(rows[0])
    films = [film(tmp_path, 100)]
    log.write(rows[1])
    films.append(film(tmp_path, 200))
    log.close()

    def added() -> list[tuple[int, int, bytes]]:
        return [
            (event.step, value.image.width, value.image.encoded_image_string)
            for event in tensorboard_events(tmp_path)
            for value in event.summary.value
            if value.tag == "film"
        ]

    expected = [(100, 8, films[0]), (200, 8, films[1])]
    assert added() == expected
    write(tmp_path, rows[:2], rows[2:])
    assert added() == expected


def test_tensorflow_is_not_loaded_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('TensorFlow loaded')")
    script = (
        "import sys; from pathlib import Path\n"
        "from etude.training.logs.tensorboard import TensorBoardLog\n"
        "log = TensorBoardLog(Path(sys.argv[1]), {'seed': 1})\n"
        "log.begin([]); log.write({'timesteps': 1, 'a': 1.0}); log.close()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    assert tensorboard_points(tmp_path / "run") == [("a", 1, 1.0)]
