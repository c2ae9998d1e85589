"""Trainings that a gate keeps: each is made once, and its code is remembered."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gates.learn import peer_off_policy, trainings
from gates.lib import report

Measure = Callable[..., dict[str, list[float]]]


@pytest.fixture
def made() -> list[str]:
    """The trainings that were made, in order."""
    return []


@pytest.fixture
def measure(made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    def train(folder: Path) -> trainings.Act:
        made.append(folder.name)
        return lambda obs: obs[:1]

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
            trainings.Training(name, "Pendulum-v1", 2, train)
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
    assert len(whole["etude-a-0"]) == 2  # episodes


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


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        ([100.0], [100.0], False),  # one seed of ours says nothing about chance
        ([100.0, 98.0, 102.0], [100.0], True),
        ([70.0, 72.0, 71.0], [100.0], False),
        ([300.0, 20.0, 10.0], [100.0, 100.0], False),  # the mean is theirs, and seeds differ much
        ([1.0, 400.0, 2.0], [100.0, 300.0, 90.0], False),
        ([-110.0, -112.0], [-100.0], True),  # returns below zero
        ([-130.0, -131.0], [-100.0], False),
        ([100.0, 101.0], [0.0], False),  # no share of nothing
    ],
)
def test_a_wide_spread_of_ours_is_no_excuse(
    ours: list[float],
    theirs: list[float],
    passes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def returns_of(gate: report.Gate, wanted: list[trainings.Training], _: object) -> object:
        gate.count("trainings", len(wanted))
        sides = {True: iter(ours), False: iter(theirs)}
        return {each.name: [next(sides[each.ours])] for each in wanted}

    monkeypatch.setattr(peer_off_policy, "returns_of", returns_of)
    words = ["--methods", "sac", "--json", str(tmp_path / "result.json")]
    words += ["--seeds", str(len(ours)), "--peer-seeds", str(len(theirs))]
    assert (peer_off_policy.main(words) == report.PASSED) == passes


def change(path: Path) -> None:
    known = json.loads(path.read_text())
    path.write_text(json.dumps(known | {"begins": {"computation": "elsewhere"}}))
