"""`etude new-task`: a file that runs, for robots that it has never seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etude.cli import main as cli
from etude.envs.adapters.gym_native import ASSETS
from etude.envs.mujoco.simulation import model_file
from etude.envs.robots.go1 import MODEL

SCENE = """<mujoco><include file="go1.xml"/><worldbody>
<geom name="floor" type="plane" size="0 0 .05" contype="0" conaffinity="1"/></worldbody></mujoco>"""


@pytest.mark.parametrize(
    ("robot", "name"), [("ant", "Ant"), ("humanoid", "Humanoid"), ("pusher_v5", "PusherV5")]
)
def test_the_file_passes_the_check_as_it_is(
    robot: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.py"
    assert cli.main(["new-task", str(ASSETS / f"{robot}.xml"), "--out", str(file)]) == 0
    assert f"etude check {file}:{name}" in capsys.readouterr().out
    assert cli.main(["check", f"{file}:{name}", "--steps", "40"]) == 0
    assert "keeps the contract" in capsys.readouterr().out


@pytest.fixture
def menagerie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of MuJoCo Menagerie that has one robot."""
    pytest.importorskip("mujoco_menagerie")
    folder = tmp_path / "menagerie" / "unitree_go1"
    folder.mkdir(parents=True)
    shutil.copy(MODEL, folder / "go1.xml")
    (folder / "scene.xml").write_text(SCENE)
    monkeypatch.setenv("MENAGERIE_ROOT", str(folder.parent))
    return folder


def test_a_robot_of_menagerie_is_named(menagerie: Path, tmp_path: Path) -> None:
    assert model_file("unitree_go1") == menagerie / "scene.xml"
    assert model_file("unitree_go1/go1") == menagerie / "go1.xml"
    file = tmp_path / "task.py"
    assert cli.main(["new-task", "unitree_go1", "--out", str(file)]) == 0
    assert 'ROBOT = "unitree_go1"' in file.read_text()
    assert cli.main(["check", f"{file}:UnitreeGo1", "--steps", "40"]) == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unitree_go5", "no robot unitree_go5 in MuJoCo Menagerie. Did you mean unitree_go1?"),
        ("unitree_a1", "MuJoCo Menagerie cannot give unitree_a1: "),
        ("unitree_go1/nosuch", "available: go1, scene"),
        ("unitree_go1.xml", "There is no model file unitree_go1.xml."),
    ],
)
def test_what_is_not_there_is_said(
    name: str, sentence: str, menagerie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new-task", name]) == 2
    assert sentence in capsys.readouterr().err


def test_the_package_that_would_know_a_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco_menagerie", None)
    assert cli.main(["new-task", "unitree_go1"]) == 2
    assert "pip install mujoco-menagerie" in capsys.readouterr().err
