"""Results stand while the first iterations of their training do, and only those a change reaches
are marked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gates.lib import beginnings, fresh
from gates.lib.beginnings import Doubt, doubt

GATES = Path(beginnings.__file__).parents[1]

PLANTED = """
import json

from gates.lib import beginnings
from etude.rl.ppo import PPO

SMALL = "--collector.num-envs 8 --collector.envs-per-group 8 --collector.threads 1"
FEW = "--evaluation.episodes 2 --evaluation.num-envs 2 --evaluation.envs-per-group 2"
LEARNING = "--algorithm.rollout-steps 8 --algorithm.minibatch-size 32 --algorithm.update-epochs 1"
beginnings.BEGINNINGS = {
    "reach": beginnings.train(f"reach {SMALL} {FEW} {LEARNING}", 64),
    "sac": beginnings.train(
        f"episodic {SMALL} {FEW} --algorithm.rollout-steps 8 --algorithm.train-batches 2 "
        "--algorithm.batch-size 16 --algorithm.warmup-steps 64 --rewards.kind given",
        *(64, 64),
    ),
}
plain = PPO._normalise_advantages


def one_bit(self):
    plain(self)
    import torch

    self.shards[0].advantages.view(torch.int32).view(-1)[0] ^= 1


def more_calls(self):
    plain(self)
    for _ in range(100):
        self.shards[0].advantages.clone()


found = {}
for name, planted in (("plain", plain), ("one bit", one_bit), ("more calls", more_calls)):
    PPO._normalise_advantages = planted
    calls = name != "one bit"
    found[name] = {"reach": beginnings.begin("reach", calls), "sac": beginnings.begin("sac", False)}
print(json.dumps(found))
"""
"""Prints {change: {beginning: fingerprint}}."""


@pytest.fixture(scope="module")
def planted() -> dict[str, Any]:
    command = [sys.executable, "-c", PLANTED]
    said = subprocess.run(
        command, cwd=GATES.parent, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, Any] = json.loads(said)
    return found


def results(begun: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """One of each kind: learned by PPO, learned by SAC, and what trains nothing."""
    begins = [{"computation": "here"} | begun]
    return {
        "ppo": {"gate": "train_reach", "variant": "reach", "begins": begins},
        "sac": {"gate": "peer_off_policy", "variant": "Hopper-v5", "begins": begins},
        "counted": {"gate": "fuzz", "variant": "", "begins": []},
    }


def doubts(planted: dict[str, Any], change: str) -> dict[str, Doubt]:
    known = {"here": planted[change], "gates": {"fuzz": ""}}
    return {name: doubt(result, known) for name, result in results(planted["plain"]).items()}


def test_the_same_code_marks_nothing(planted: dict[str, Any]) -> None:
    found = doubts(planted, "plain")
    assert found["ppo"] == Doubt()
    assert found["sac"] == Doubt("", beginnings.NOT_COUNTED)
    assert found["counted"] == Doubt("", beginnings.NOT_COUNTED)


def test_one_bit_marks_what_it_can_change_and_nothing_else(planted: dict[str, Any]) -> None:
    found = doubts(planted, "one bit")
    assert "of the policy's arrays now hold other numbers" in found["ppo"].learned
    assert found["ppo"].timed == found["ppo"].learned
    assert found["sac"].learned == found["counted"].learned == ""


def test_more_calls_mark_the_timings_and_not_what_was_learned(planted: dict[str, Any]) -> None:
    found = doubts(planted, "more calls")
    more = r"an iteration now makes \d+% more calls of torch \(Tensor.clone: 116 instead of 16\)"
    assert found["ppo"].learned == ""
    assert re.fullmatch(more, found["ppo"].timed)
    assert found["sac"].learned == ""


def test_a_result_without_a_fingerprint_is_not_proven(planted: dict[str, Any]) -> None:
    result = {"gate": "train_reach", "variant": "reach"}
    known = {"here": planted["plain"]}
    assert doubt(result, known).learned == beginnings.NOT_PROVEN
    elsewhere = results(planted["plain"])["ppo"] | {"begins": [{"computation": "elsewhere"}]}
    assert doubt(elsewhere, known).learned == beginnings.NOT_PROVEN


def test_a_gate_that_fails_at_its_smallest_size_marks_its_counts() -> None:
    result = {"gate": "fuzz", "variant": ""}
    assert doubt(result, {"gates": {"fuzz": "exit code 1"}}).learned == "exit code 1"


@pytest.mark.parametrize(("calls", "stands"), [(10_900, True), (11_100, False), (9_100, True)])
def test_a_tenth_of_the_calls_of_etude_may_be_others(calls: int, stands: bool) -> None:
    then, today = (
        {"bits": {}, "calls": {"torch: relu": 50, "etude: functions": many}}
        for many in (10_000, calls)
    )
    said = "an iteration now makes 11% more calls of Etude's functions (functions: 11,100 instead "
    assert beginnings.slower(then, today) == ("" if stands else f"{said}of 10,000)")


def test_a_timing_of_what_trains_nothing_stands_while_a_beginning_makes_the_same_calls() -> None:
    then = {"bits": {"policy a": "1"}, "calls": {"numpy: mean": 100}}
    slower = then | {"calls": {"numpy: mean": 120}}
    result = {"gate": "gym_workers", "variant": ""}
    begun = result | {"begins": [{"computation": "here", "workers": then}]}
    repeated = {"gates": {"gym_workers": ""}}
    for today, timed in ((then, ""), (slower, "an iteration now makes 20% more calls of NumPy")):
        found = doubt(begun, repeated | {"here": {"workers": today}})
        assert found.learned == ""
        assert found.timed.startswith(timed)
        assert bool(found.timed) == bool(timed)
    assert doubt(result, repeated) == Doubt("", beginnings.NOT_PROVEN)
    assert doubt(begun, {"here": {"workers": then}}).learned == beginnings.NOT_REPEATED


def test_names_and_new_columns_do_not_count() -> None:
    then = {"bits": {"policy a": "1", "policy b": "2", "train/loss": "3"}}
    renamed = {"bits": {"policy c": "1", "policy d": "2", "train/loss": "3", "train/new": "4"}}
    assert beginnings.difference(then, renamed) == ""
    other = {"bits": renamed["bits"] | {"train/loss": "5"}}
    assert beginnings.difference(then, other) == (
        "after two iterations the log now has another train/loss"
    )


def test_the_check_of_another_machine_compares_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fresh, "computation", lambda: "another")
    assert fresh.main(["--check"]) == 0
    assert "not comparable" in capsys.readouterr().out


@pytest.mark.parametrize(("today", "code"), [("1", 0), ("2", 1)])
def test_the_check_fails_where_first_iterations_have_changed(
    today: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fresh, "computation", lambda: "here")
    known = {"here": {"reach": {"bits": {"policy a": "1"}}}}
    monkeypatch.setattr(fresh, "now", lambda: known)
    begun = {"bits": {"policy a": today}}
    monkeypatch.setattr(beginnings, "begin", lambda name, calls: begun)
    assert fresh.main(["--check", "--only", "reach", "walk-go1"]) == code
    said = capsys.readouterr().out
    assert ("reach: after two iterations 1 of the policy's arrays now hold" in said) == bool(code)
    assert "1 beginnings in" in said


def test_every_beginning_is_of_a_result() -> None:
    """And names of results that train are those of beginnings."""
    assert {*beginnings.OF} <= {path.stem for path in (GATES / "results").glob("*.json")}
    named = {name for names in beginnings.OF.values() for name in names}
    assert [name for name in named if not beginnings.can_begin(name)] == []
