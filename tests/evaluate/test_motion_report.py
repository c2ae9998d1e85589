"""What an evaluation says of motions: each on its own, long clips counting no more than short."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from etude.api import train
from etude.cli import main as cli
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.evaluate.fresh import FreshEpisodes, _spread
from etude.evaluate.motion import ALL, SUCCESSES
from etude.evaluate.report import Report
from etude.training.evaluation import summarise
from toy_envs import BOX
from toys import tiny_motions

CLIPS = ("walk", "backflip", "spin")
EPISODES: dict[str, list[float]] = {
    "return": [300, 10, 30, 20, 60, 60],
    "length": [900, 30, 90, 60, 60, 60],
    "is_success": [1, 0, 1, 0, 1, 1],
    "reward/position": [1, 1, 1, 1, 1, 1],
    "motion": [0, 1, 2, 1, 2, 2],
    "progress": [1, 0.3, 1, 0.5, 1, 1],
    "mpjpe_g": [60, 200, 40, 300, 30, 20],
    "mpjpe_l": [20, 100, 35, 140, 30, 25],
    "mpjpe_pa": [15, 80, 25, 90, 20, 15],
    "vel_dist": [5, 20, 6, 30, 5, 4],
    "accel_dist": [2, 9, 3, 11, 2, 1],
    "success_25": [1, 0, 1, 0, 0, 0],
}
"""The walk once, a backflip that fails twice, and three spins."""


def made_up(**changes: list[float]) -> Report:
    arrays = {name: np.array(v, np.float64) for name, v in {**EPISODES, **changes}.items()}
    spec = EnvSpec({}, BOX, 900, motions=CLIPS)
    return Report(FreshEpisodes(arrays, spec, 4096, 7, Key(7), envs_per_group=1, per_env=6))


def test_averages_are_per_motion_first() -> None:
    motions = made_up().motions
    assert motions is not None
    assert motions.motions()["walk"]["mpjpe_l"] == 20
    assert motions.motions()["backflip"]["mpjpe_l"] == 120
    assert motions.motions()["spin"]["mpjpe_l"] == 30
    everything, won = motions.averages()[ALL], motions.averages()[SUCCESSES]
    assert everything["mpjpe_l"] == pytest.approx((20 + 120 + 30) / 3)
    assert everything["is_success"] == pytest.approx(2 / 3)
    assert everything["success_25"] == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert won["mpjpe_l"] == pytest.approx((20 + 30) / 2)
    assert won["is_success"] == 1.0


def test_evaluation_metrics_are_too() -> None:
    metrics = summarise({name: np.array(v, np.float64) for name, v in EPISODES.items()})
    assert metrics["eval/mpjpe_l"] == pytest.approx((20 + 120 + 30) / 3)
    assert metrics["eval/mpjpe_l_of_successes"] == 25.0
    assert metrics["eval/success_rate"] == pytest.approx(2 / 3)
    assert metrics["eval/mean_ep_length"] == pytest.approx((900 + 45 + 70) / 3)
    assert metrics["eval/episodes"] == 6.0
    assert "eval/motion" not in metrics
    nothing = summarise(
        {name: np.array(v, np.float64) for name, v in EPISODES.items()}
        | {"is_success": np.zeros(6)}
    )
    assert not any("_of_successes" in name for name in nothing)
    assert np.isfinite(list(nothing.values())).all()


def test_a_table_for_people() -> None:
    text = made_up().render(120)
    lines = {line.split("  ")[0]: " ".join(line.split()) for line in text.splitlines()}
    titles = "success at .25 m g l pa vel accel progress"
    assert lines["motion"] == f"motion {titles}"
    assert lines["walk"] == "walk 100% 100% 60.0 20.0 15.0 5.0 2.0 100%"
    assert lines["backflip"] == "backflip 0% 0% 250.0 120.0 85.0 25.0 10.0 40%"
    assert lines["all (3)"] == "all (3) 67% 44% 113.3 56.7 40.0 11.7 4.7 80%"
    assert lines["successes only (2)"] == (
        "successes only (2) 100% 67% 45.0 25.0 17.5 5.0 2.0 100%"
    )
    assert "mpjpe" not in text.split("motion  ")[0]  # once is enough
    assert "nan" not in text


def test_no_success_is_a_dash_and_no_nan() -> None:
    report = made_up(is_success=[0] * 6)
    text = report.render(120)
    (line,) = (line for line in text.splitlines() if line.startswith("successes only (0)"))
    assert set(line.split()[3:]) == {"-"}
    assert "nan" not in text
    metrics = report.metrics()
    assert set(metrics["motion_averages"][SUCCESSES].values()) == {None}
    json.dumps(metrics, allow_nan=False)
    assert report.motions is not None
    last = report.motions.csv().splitlines()[-1]
    assert last == "successes only (0)," + "," * len(report.motions.statistics)


def test_a_line_per_motion_and_per_episode() -> None:
    report = made_up()
    assert report.motions is not None
    lines = list(csv.DictReader(io.StringIO(report.motions.csv())))
    assert [line["motion"] for line in lines] == [*CLIPS, "all (3)", "successes only (2)"]
    assert [line["episodes"] for line in lines] == ["1", "2", "3", "", ""]
    assert float(lines[1]["mpjpe_pa"]) == 85.0
    assert float(lines[4]["mpjpe_l"]) == 25.0
    episodes = list(csv.DictReader(io.StringIO(report.csv())))
    assert [line["motion"] for line in episodes] == [CLIPS[int(m)] for m in EPISODES["motion"]]
    assert [line["kind"] for line in episodes][:2] == ["success", "failure"]


def test_every_motion_is_played_equally_often() -> None:
    assert _spread(15, 1, 15) == (15, 15)
    assert _spread(45, 1, 15) == (45, 45)
    assert _spread(300, 1, 300) == (300, 300)
    rows, group = _spread(150, 1, 15)
    assert (150 % rows, rows % group, group % 15) == (0, 0, 0)
    with pytest.raises(UsageError, match="90 or 105 episodes"):
        _spread(100, 1, 15)


def test_a_run_is_evaluated_motion_by_motion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    run = train(tiny_motions(clock={"total_timesteps": 512}), path)
    assert run.evaluate()["eval/episodes"] == 3
    assert cli.main(["eval", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: m["is_success"] for name, m in found["motions"].items()} == {
        "clip-0": 0.0,
        "clip-1": 1.0,
        "clip-2": 1.0,
    }
    assert found["eval/success_rate"] == pytest.approx(2 / 3)
    assert (Path(found["folder"]) / "motions.csv").read_text().startswith("motion,episodes,")
    assert cli.main(["eval", str(path), "--episodes", "100"]) == 2
    assert "99 or 102 episodes" in capsys.readouterr().err
