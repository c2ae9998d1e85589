"""Trainings that a gate keeps: each is made once, and its code is remembered."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gates.learn import trainings
from gates.lib import report

Measure = Callable[..., dict[str, list[float]]]


@pytest.fixture
def made() -> list[str]:
    """The trainings that were made, in order."""
    return []


@pytest.fixture
def measure(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    def train(folder: Path, evaluate: trainings.Evaluations) -> None:
        made.append(folder.name)
        for step in range(1, 101):
            evaluate(step, lambda obs: obs[:1], ended=step == 100)

    def threads(many: int, *_: object, **__: object) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(trainings, "ProcessPoolExecutor", threads)

    def call(*words: str) -> dict[str, list[float]]:
        parser = argparse.ArgumentParser()
        trainings.add_options(parser, "train_gymnasium")
        places = ["--folder", str(tmp_path / "runs"), "--kept", str(tmp_path / "kept")]
        places += ["--json", str(tmp_path / "result.json")]
        options = report.parse(parser, {}, [*places, *words])
        wanted = [
            trainings.Training(name, "Pendulum-v1", 1, 100, train)
            for name in ("etude-a-0", "etude-a-1", "sb3-a-0")
        ]
        with report.Gate("train_gymnasium", options, needs={"trainings": 3}) as gate:
            found = trainings.returns_of(gate, wanted, options)
            gate.figure("trainings", len(found))
        return found

    return call


def test_a_training_is_made_once(made: list[str], measure: Measure) -> None:
    first = measure("--now", "sb3-*")
    assert made == ["sb3-a-0"]
    whole = measure()
    assert made == ["sb3-a-0", "etude-a-0", "etude-a-1"]
    assert measure() == whole
    assert len(made) == 3
    assert whole["sb3-a-0"] == first["sb3-a-0"]
    assert len(whole["etude-a-0"]) == trainings.LAST


def test_a_training_is_evaluated_in_its_last_fifth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The points of an interrupted training stay, and a short one has at least its last policy."""
    monkeypatch.setattr(trainings, "play", lambda env, act, episodes: [act(None)] * episodes)

    def evaluated(path: Path, steps: range, ended: bool = True) -> dict[int, list[float]]:
        evaluate = trainings.Evaluations("", 2, 1000, path)
        for step in steps:
            evaluate(step, lambda _, step=step: float(step), ended and step == steps[-1])
        return evaluate.returns

    whole = evaluated(tmp_path / "whole", range(0, 999, 9))
    assert {point: returns[0] for point, returns in whole.items()} == {
        **{840: 846.0, 880: 882.0, 920: 927.0},
        **{960: 963.0, 1000: 990.0},
    }
    assert all(len(returns) == 2 for returns in whole.values())
    evaluated(tmp_path / "killed", range(0, 910, 9), ended=False)
    assert evaluated(tmp_path / "killed", range(900, 999, 9)) == whole
    assert evaluated(tmp_path / "short", range(0, 10)) == {1000: [9.0, 9.0]}


def test_what_was_kept_before_has_one_evaluation(measure: Measure, tmp_path: Path) -> None:
    measure()
    path = tmp_path / "kept" / "sb3-a-0.json"
    known = json.loads(path.read_text())
    del known["evaluations"]
    path.write_text(json.dumps(known | {"returns": [1.0, 3.0]}))
    assert measure()["sb3-a-0"] == [2.0]


def test_a_result_keeps_the_beginnings_of_all_its_trainings(
    measure: Measure, tmp_path: Path
) -> None:
    def begins() -> list[dict[str, str]]:
        measure()
        found: list[dict[str, str]] = json.loads((tmp_path / "result.json").read_text())["begins"]
        return found

    assert begins() == [{"computation": "here"}]
    change(tmp_path / "kept" / "sb3-a-0.json")
    assert len(begins()) == 1  # another library's training does not depend on this code
    change(tmp_path / "kept" / "etude-a-1.json")
    assert begins() == [{"computation": "here"}, {"computation": "elsewhere"}]


def change(path: Path) -> None:
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"begins": {"computation": "elsewhere"}}))
