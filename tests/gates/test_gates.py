"""Gates that cannot pass empty: fed a broken product, each of them fails."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gates import ROOT
from gates.lib import report, smallest
from gates.lib.full import GATES, Entry
from gates.speed import update_speed

from products import PRODUCTS, WAYS, Bench, reward_of_failures  # isort: skip

from toys import tiny_reach


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three resumable checkpoints."""
    import etude

    return etude.train(tiny_reach(8), tmp_path_factory.mktemp("gates") / "run").path


def test_no_gate_is_missing_here() -> None:
    assert set(PRODUCTS) == set(smallest.gates())
    folders = ("exact", "faults", "learn", "speed")
    files = [file for name in folders for file in (ROOT / "gates" / name).glob("*.py")]
    commands = {
        f"{file.parent.name}.{file.stem}" for file in files if "__main__" in file.read_text()
    }
    assert {entry.module for entry in GATES.values()} == commands


def test_annotations_name_what_exists() -> None:
    """Modules with `from __future__ import annotations` never evaluate them."""
    files = (ROOT / "gates").glob("*/*.py")
    modules = [importlib.import_module(f"gates.{file.parent.name}.{file.stem}") for file in files]
    assert len(modules) > 40
    for module in modules:
        for each in vars(module).values():
            own = getattr(each, "__module__", "") == module.__name__
            if own and (inspect.isfunction(each) or inspect.isclass(each)):
                inspect.get_annotations(each, eval_str=True)


def test_the_functions_timed_by_update_speed_exist() -> None:
    missing = [name for _, owner, name in update_speed.WRAPPED if not hasattr(owner, name)]
    assert missing == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(PRODUCTS))
def test_a_gate_fails_on_a_broken_product(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path
) -> None:
    check(name, PRODUCTS[name], way, monkeypatch, tmp_path, run)


@pytest.mark.parametrize("way", WAYS)
def test_the_gate_of_rewards_fails_where_failures_taught_nothing(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path
) -> None:
    check("train_reward_only", reward_of_failures, way, monkeypatch, tmp_path, run)


def check(
    name: str,
    product: Callable[[Bench], list[str]],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    run: Path,
) -> None:
    """Run a gate on a product; it must pass where that is good, and fail where it is not."""
    gate = importlib.import_module(f"gates.{GATES[name].module}")
    if hasattr(gate, "report_load"):
        monkeypatch.setattr(gate, "report_load", lambda _: None)
    arguments = product(Bench(gate, way, monkeypatch, tmp_path, run))
    file = tmp_path / "result.json"
    code = gate.main([*GATES[name].smallest, *arguments, "--json", str(file)])
    result = json.loads(file.read_text())
    assert (code, result["verdict"]) == ((0, "passed") if way == "good" else (1, "FAILED")), result
    assert bool(result["failures"]) == (way != "good")
    assert result["figures"] or way != "good"


def test_a_kept_run_is_judged_again_and_not_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path
) -> None:
    gate = importlib.import_module("gates.learn.train")
    monkeypatch.setattr(gate, "report_load", lambda _: None)
    PRODUCTS["train_return"](Bench(gate, "good", monkeypatch, tmp_path, run))
    known, verbs = gate.command, []

    def command(of: Any, verb: str, *words: str) -> Any:
        verbs.append(verb)
        return known(of, verb, *words)

    monkeypatch.setattr(gate, "command", command)
    file = tmp_path / "result.json"
    words = ["cartpole", "--keep", str(tmp_path), "--json", str(file), "--seeds"]
    assert gate.main([*words, "1"]) == 0
    (tmp_path / "cartpole-0/checkpoints/final").mkdir(parents=True)
    assert gate.main([*words, "2"]) == 0
    assert verbs == ["train", "eval", "eval", "train", "eval"]
    figures = json.loads(file.read_text())["figures"]
    assert [name for name in figures if "seconds" in name] == ["seconds of seed 1"]


def test_a_run_that_hangs_ends_the_gate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Path
) -> None:
    gate = importlib.import_module("gates.exact.exact_resume")
    arguments = PRODUCTS["exact_resume"](Bench(gate, "hang", monkeypatch, tmp_path, run))
    begin, file = time.monotonic(), tmp_path / "result.json"
    assert gate.main([*arguments, "--limit", "3", "--json", str(file)]) == 1
    assert time.monotonic() - begin < 30
    assert "end within" in " ".join(json.loads(file.read_text())["failures"])


# The report itself.


def options_of(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    return report.parse(parser, {"runs": 1}, [*words, "--json", str(tmp_path / "result.json")])


def ended(
    tmp_path: Path, counted: int = 3, figures: dict[str, Any] | None = None, **how: Any
) -> tuple[int, dict[str, Any]]:
    """(exit code, JSON) of a gate that needs 3 runs."""
    options = options_of(tmp_path)
    with report.Gate("a", options, needs=how.pop("needs", {"runs": 3})) as gate:
        gate.count("runs", counted)
        for name, figure in (figures or {}).items():
            gate.figure(name, **figure)
        if "busy" in how:
            gate.too_busy(how["busy"])
        if "error" in how:
            raise how["error"]
    return gate.code, json.loads((tmp_path / "result.json").read_text())


FINE = {"figure": {"value": 1.0, "at_least": 0.5, "at_most": 1.5}}


def test_the_command_of_a_result_is_given_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` sets the first argument to the file of the module."""
    script = ROOT / "gates" / "learn" / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), "reach", "--seeds", "3"])
    options = report.parse(argparse.ArgumentParser(), {}, ["--json", str(tmp_path / "a.json")])
    with report.Gate("a", options, needs={}) as gate:
        gate.figure("x", 1.0, at_least=0.0)
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["command"] == "python -m gates.learn.train reach --seeds 3"


def test_a_good_gate_passes(tmp_path: Path) -> None:
    code, result = ended(tmp_path, figures=FINE)
    assert (code, result["verdict"], result["failures"]) == (0, "passed", [])
    assert result["counts"] == {"runs": 3}
    known = ("date", "commit", "machine", "command", "seconds", "processor_seconds")
    assert all(result[name] is not None for name in known)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "no figure"),
        ({"figures": {"figure": {"value": math.nan}}}, "nothing was measured"),
        ({"figures": {"figure": {"value": None}}}, "nothing was measured"),
        ({"figures": {"figure": {"value": math.inf, "at_least": 1.0}}}, "nothing was measured"),
        ({"figures": {"figure": {"value": 1.0, "at_least": 2.0}}}, "must be at least 2"),
        ({"figures": {"figure": {"value": 3.0, "at_most": 2.0}}}, "must be at most 2"),
        ({"figures": FINE, "counted": 2}, "2 runs counted, 3 needed"),
        ({"figures": FINE, "counted": 0}, "0 runs counted, 3 needed"),
        ({"figures": FINE, "needs": {}}, "`needs` is empty"),
        ({"figures": FINE, "needs": {"runs": 0}}, "must be at least 1"),
        ({"figures": FINE, "error": ValueError("odd")}, "ended with ValueError: odd"),
        ({"figures": FINE, "error": SystemExit(0)}, "ended with SystemExit"),
        (
            {"figures": {"figure": {"value": 1.0, "at_least": 2.0}}, "busy": "busy"},
            "must be at least 2",  # not a timing: a busy machine is no excuse
        ),
    ],
)
def test_nothing_measured_or_out_of_bounds_fails(
    how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    code, result = ended(tmp_path, **how)
    assert (code, result["verdict"]) == (1, "FAILED")
    assert words in " ".join(result["failures"])


def test_a_timing_on_a_busy_machine_is_not_judged(tmp_path: Path) -> None:
    slow = {"figure": {"value": 1.0, "at_least": 2.0, "timing": True}}
    code, result = ended(tmp_path, figures=slow, busy="too busy")
    assert (code, result["verdict"]) == (2, "not judged, too busy")
    assert ended(tmp_path, figures=slow)[0] == 1
    assert ended(tmp_path, figures=slow, busy="too busy", counted=1)[0] == 1


def test_a_gate_that_does_not_end_fails(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    options = options_of(tmp_path, "--limit", "0.2")
    with report.Gate("a", options, needs={"runs": 1}) as gate:
        gate.count("runs")
        gate.figure("figure", 1.0)
        threading.Event().wait(60.0)
    assert gate.code == 1
    assert "no end within 0.2 s" in gate.failures
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_smallest_size_changes_defaults_only(tmp_path: Path) -> None:
    assert options_of(tmp_path, "--smallest").runs == 1
    assert options_of(tmp_path, "--smallest", "--runs", "7").runs == 7
    assert options_of(tmp_path).runs == 3


# The gates at their smallest size.


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[dict[str, Any]]:
    _, result = ended(tmp_path, figures=FINE)
    return result | {"smallest": True}


def test_a_gate_without_a_result_is_noticed(whole: dict[str, Any]) -> None:
    assert smallest.fault_of(0, whole) == ""
    assert "no JSON" in smallest.fault_of(0, None)
    assert "no finite figure" in smallest.fault_of(0, whole | {"figures": {}})
    none = {"figure": {"value": None, "timing": False}}
    assert "no finite figure" in smallest.fault_of(0, whole | {"figures": none})
    assert "exit code 1" in smallest.fault_of(1, whole)
    assert "exit code 0" in smallest.fault_of(0, whole | {"verdict": "FAILED"})
    assert "nothing counted" in smallest.fault_of(0, whole | {"counts": {}})
    unjudged = whole | {"verdict": "not judged, too busy"}
    assert "timing" in smallest.fault_of(2, unjudged)
    timing = {"figure": {"value": 1.0, "timing": True}}
    assert smallest.fault_of(2, unjudged | {"figures": timing}) == ""


def test_a_gate_that_dies_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smallest, "GATES", {"dies": Entry("lib.no_such_module")})
    assert smallest.gates() == ["dies"]
    assert smallest.main([]) == 1
    assert "FAILED: dies" in capsys.readouterr().out
