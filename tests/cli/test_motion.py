"""`etude motion` from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from etude.cli.main import main
from etude.data.motion import files
from etude.envs.mujoco import rendering
from etude.envs.robots.go1 import MODEL
from made_motions import walk

pytest.importorskip("pybullet_data", reason="it holds the clips (the extra 'mocap')")


def test_all_clips_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["motion", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 16
    assert "speed m/s" in lines[0]
    assert main(["motion", "list", "--json"]) == 0
    walk = next(row for row in json.loads(capsys.readouterr().out) if row["clip"] == "walk")
    assert len(walk.pop("joints")) == 12
    assert walk == {
        "clip": "walk",
        "frames": 39,
        "seconds": 1.267,
        "loops": True,
        "fps": 30.0,
        "speed": 0.98,
    }


def test_a_strip_is_drawn(tmp_path: Path) -> None:
    try:
        rendering.backend()
    except rendering.NoPictures as error:
        pytest.skip(str(error))
    out = tmp_path / "walk.png"
    assert main(["motion", "show", "walk", "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000


def test_mistakes_end_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, told in (
        (["motion", "lst"], "Did you mean 'list'"),
        (["motion", "show", "swim"], "There is no clip 'swim'; there are backflip"),
        (["motion", "show", "all"], "One clip is shown at a time: name one of"),
        (["motion", "list", "--folder", str(tmp_path / "none")], "There is no folder"),
    ):
        assert main(arguments) == 2
        assert told in capsys.readouterr().err
    assert main(["motion"]) == 0
    assert "etude motion show CLIP" in capsys.readouterr().out


def test_without_pybullet_its_own_option_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pybullet_data", None)
    for arguments in (["motion", "list"], ["motion", "show", "walk"]):
        assert main(arguments) == 2
        assert "name a folder of clips (--folder FOLDER)" in capsys.readouterr().err


def test_motions_of_any_robot_are_listed_converted_and_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, table = tmp_path / "walk.npz", tmp_path / "other.csv"
    files.write(walk(), path)
    assert main(["motion", "import", str(path), "--out", str(table), "--loops", "false"]) == 0
    assert "26 frames, 0.50 s, 12 joints" in capsys.readouterr().out
    assert not files.read(table).loops
    assert main(["motion", "list", str(tmp_path)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["clip", "frames"],
        ["other", "26"],
        ["walk", "26"],
    ]
    check = ["motion", "check", "walk.npz", "--folder", str(tmp_path), "--robot", str(MODEL)]
    assert main(check) == 0
    assert "walk: nothing beyond" in capsys.readouterr().out
    assert main([*check, "--below", "0.01", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["motion"], row["beyond"]) == ("walk", ["below"])
    assert row["below"]["where"].endswith("_foot")
    assert 0.01 < row["below"]["size"] < 0.03
    assert main(check[:-2]) == 2
    assert "walk is not a motion of our humanoid: name its robot" in capsys.readouterr().err
    assert main([*check[:-1], "humanoid.xml"]) == 2
    assert "There is no file" in capsys.readouterr().err


def test_a_motion_is_drawn_on_its_robot(tmp_path: Path) -> None:
    try:
        rendering.backend()
    except rendering.NoPictures as error:
        pytest.skip(str(error))
    files.write(walk(), tmp_path / "walk.npz")
    out = tmp_path / "strip.png"
    given = [str(tmp_path / "walk.npz"), "--robot", str(MODEL), "--out", str(out)]
    assert main(["motion", "show", *given]) == 0
    assert out.stat().st_size > 10_000
