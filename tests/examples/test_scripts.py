"""The scripts in examples/ do what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import etude

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("train", "own_environment", "own_network", "own_dataset", "deploy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs are: `deploy` exports that of `train`."""
    return tmp_path_factory.mktemp("examples")


def run(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> list[str]:
    """What a script prints, run in this process, which has loaded the libraries already."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def percent(line: str) -> int:
    found = re.search(r"(\d+)%", line)
    assert found, line
    return int(found[1])


def test_train(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    to = folder / "train"
    lines = run("train", ["--steps", "12288", "--folder", str(to)], monkeypatch, capsys)
    assert lines[0] == "Planned: 12,288 steps, 176 gradient steps"
    evaluated = [line for line in lines if line.endswith("of episodes succeed")]
    assert [line.split()[0] for line in evaluated] == ["6,144", "12,288", "18,432", "24,576"]
    assert percent(lines[-1]) >= 80  # the arm has learned it
    # The run went on after its first end: all steps are in one folder.
    assert etude.Run(to).rows()[-1]["timesteps"] == 24_576


def test_deploy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    options = ["--run", str(folder / "train"), "--to", str(folder / "policy")]
    lines = run("deploy", options, monkeypatch, capsys)
    found = re.fullmatch(r"(\d+) of 20 episodes succeed", lines[3])
    assert found, lines
    assert int(found[1]) >= 16
    assert "joint_position [7]" in lines[2]
    assert lines[-1].startswith("10 steps of 100 ms: median")


def test_own_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    to = folder / "parking"
    lines = run("own_environment", ["--steps", "8192", "--folder", str(to)], monkeypatch, capsys)
    assert lines[0].startswith(f"Trained in {to}; exact: ")
    assert percent(lines[1].partition(":")[2]) >= 80
    etude.resume(to, total_timesteps=9_216)  # the module in its id is found again


def test_own_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    to = folder / "network"
    lines = run("own_network", ["--steps", "4096", "--folder", str(to)], monkeypatch, capsys)
    assert "own_network.py:GatedConfig: reads state (25,)" in lines[0]
    network = etude.load_policy(to).policy.actor
    assert type(network).__name__ == "GatedNetwork"
    assert network.hidden.weight.shape == (48, 48)
    assert network.output.weight.abs().max() > 0  # zero before it was trained


def test_own_dataset(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    to = folder / "demonstrations"
    lines = run("own_dataset", ["--episodes", "10", "--folder", str(to)], monkeypatch, capsys)
    assert lines[0].startswith("Imported 10 episodes")
    found = re.search(r"mean return (-?[\d.]+);", lines[-1])
    assert found, lines
    assert float(found[1]) > 85  # a policy that does nothing has 0


def test_each_script_is_short_and_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "tutorial_ppo"}
    for name in SCRIPTS:
        text = (EXAMPLES / f"{name}.py").read_text()
        assert text.count("\n") <= 66
        assert f"python examples/{name}.py" in text.split('"""')[1]
        assert f"({name}.py)" in listed
