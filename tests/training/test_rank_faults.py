"""Whatever befalls one rank is told by the first, ends all of them alike, and is not saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch.distributed import HashStore

from etude.api import resume, train
from etude.core.errors import NonFinite
from etude.core.ranks import LostRank
from etude.planning import recipes
from etude.runs import checkpoint
from etude.training.distributed import BEAT, Heartbeat
from gates.faults import rank_faults
from gates.lib import report
from rank_driver import free_port
from rank_fault_driver import COLLECTED, NOT_FINITE, STOPPED
from rank_runs import script
from run_hash import run_hash
from toys import tiny_reach

AT = 2
"""The iteration in which rank 1 of 2 meets its fault."""
RECIPE = tiny_reach(
    6,
    learner={"shards": 2, "timeout": 4.0},
    collector={"threads": 1},
    evaluation={"every": "never", "final_episodes": 0},
    checkpoint={"every": "1 iteration"},
)
KINDS = (
    *NOT_FINITE,
    "crash",
    "drift",
    "recipe",
    "bits",
    "code",
    "signal",
    "freeze",
    "freeze-and-signal",
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How the ranks ended, by the kind of fault; "run" is the folder."""
    folder = tmp_path_factory.mktemp("faults")
    files = [folder / "recipe.yaml", folder / "faults.json"]
    files[0].write_text(recipes.dump(RECIPE))
    faults = [{"kind": kind, "ranks": 2, "rank": 1, "iteration": AT} for kind in KINDS]
    files[1].write_text(json.dumps(faults))
    results = json.loads(script("rank_fault_driver.py", str(files[0]), str(folder), str(files[1])))
    return {
        result["kind"]: result | {"run": folder / str(number)}
        for number, result in enumerate(results)
    }


def saved(run: Path) -> int:
    """The newest step that can be resumed from."""
    newest = checkpoint.newest_verified(run / "checkpoints", repair=False)
    assert newest is not None
    return int(newest.name)


@pytest.mark.rotated(together=True)
@pytest.mark.parametrize("kind", NOT_FINITE)
def test_a_nan_on_any_rank_is_reported_by_the_first(
    kind: str, ends: dict[str, dict[str, Any]]
) -> None:
    end = ends[kind]
    assert end["codes"] == [NonFinite.exit_code] * 2
    assert kind in end["said"]
    assert "on rank 1" in end["said"]
    assert "Traceback" not in end["said"]
    assert saved(end["run"]) == AT * 256
    (report,) = (end["run"] / "failures").iterdir()
    assert "NonFinite" in (report / "error.txt").read_text()
    context = json.loads((report / "context.json").read_text())
    assert context["counters"]["now"]["iterations"] == AT
    kept = load_file(report / "reproduction.safetensors")
    if kind in ("physics", *COLLECTED):
        assert any(np.isnan(array).any() for array in kept.values() if array.dtype.kind == "f")


@pytest.mark.rotated(together=True)
def test_a_failure_of_any_kind_is_reported_by_the_first(ends: dict[str, dict[str, Any]]) -> None:
    end = ends["crash"]
    assert end["codes"] == [1, 1]
    assert "Rank 1 failed: ValueError: the roof has fallen in" in end["said"]
    (report,) = (end["run"] / "failures").iterdir()
    assert "in collect" in (report / "error.txt").read_text()  # where it was, on that rank


@pytest.mark.rotated(together=True)
def test_a_rank_that_drifts_ends_the_run_before_it_is_saved(
    ends: dict[str, dict[str, Any]],
) -> None:
    end = ends["drift"]
    assert end["codes"] == [1, 1]
    assert "Rank 0 and rank 1 no longer have the same weights, at step 768" in end["said"]
    assert saved(end["run"]) == AT * 256
    assert len(list((end["run"] / "failures").iterdir())) == 1


@pytest.mark.rotated(together=True)
def test_ranks_that_disagree_do_not_start(ends: dict[str, dict[str, Any]]) -> None:
    for kind, words in {
        "recipe": "Rank 1 has another recipe than rank 0: algorithm.learning_rate was 0.001",
        "bits": "computes other bits than rank 1",
        "code": "Rank 1 computes with other code than rank 0: etude.",
    }.items():
        assert ends[kind]["codes"] == [2, 2]
        assert words in ends[kind]["said"]
        assert not ends[kind]["run"].exists()


@pytest.mark.rotated(together=True)
def test_a_frozen_rank_is_named_and_nothing_is_lost(ends: dict[str, dict[str, Any]]) -> None:
    whole = run_hash(train(RECIPE, ends["freeze"]["run"].parent / "whole").path)
    for kind in STOPPED[:2]:
        end = ends[kind]
        assert end["codes"] == [1]
        assert end["seconds"] < 10
        assert "No sign of life from rank 1 for" in end["said"]
        assert not list((end["run"] / "failures").iterdir())
        assert run_hash(resume(end["run"]).path) == whole


@pytest.mark.rotated(together=True)
def test_a_signal_to_one_rank_saves_and_stops_all(ends: dict[str, dict[str, Any]]) -> None:
    end = ends["signal"]
    assert end["codes"] == [75, 75]
    assert end["said"].count("Stopped and saved.") == 1
    assert not list((end["run"] / "failures").iterdir())


@pytest.mark.rotated
def test_ranks_with_other_instructions_are_refused(tmp_path: Path) -> None:
    """The command itself, in processes of their own."""
    (tmp_path / "recipe.yaml").write_text(recipes.dump(RECIPE))
    command = [sys.executable, "-m", "etude", "train", str(tmp_path / "recipe.yaml"), "--folder"]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    meet["PYTHONPATH"] = os.pathsep.join(sys.path)
    plain = {"ATEN_CPU_CAPABILITY": "default"}
    ranks = [
        subprocess.Popen(
            [*command, str(tmp_path / "run")],
            env=os.environ | meet | {"RANK": str(rank)} | (plain if rank else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=100)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [2, 2], first + second
    assert "computes other bits than rank 1" in first
    assert "Traceback" not in first
    assert second == ""
    assert not (tmp_path / "run").exists()


def test_a_rank_that_lives_but_does_not_come_is_named() -> None:
    store = HashStore()
    one, two = (Heartbeat(rank, 2, store, None) for rank in range(2))
    one.exchanges, two.exchanges = 7, 6
    with pytest.raises(LostRank, match=r"are alive: rank 1 did not take part \(.*no answer"):
        one.explain(RuntimeError("no answer"), seconds=4 * BEAT)
    for heart in (one, two):
        heart.stop()


def test_notes_too_long_for_the_store_leave_their_arrays_behind() -> None:
    store = HashStore()
    one, two = (Heartbeat(rank, 2, store, None) for rank in range(2))
    two.leave(NonFinite("a gradient", {"large": np.zeros(2 << 20, np.float32)}))
    with pytest.raises(NonFinite, match="a gradient") as raised:
        one.explain(RuntimeError("connection closed"))
    assert raised.value.arrays == {}
    assert raised.value.__notes__[0].startswith("On rank 1:")


@pytest.mark.rotated
@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"codes": [1, 3]},
        {"said": "Not a finite number: the reward of row 3."},
        {"kind": "kill", "codes": [1], "said": "another rank was killed"},
        {"kind": "freeze", "codes": [143], "said": "No sign of life from rank 1 for 4 s"},
    ],
)
def test_the_gate_fails_where_ranks_end_otherwise(
    broken: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "Not a finite number: physics of environment 3, on rank 1."
    fault = {
        "kind": "physics",
        "ranks": 2,
        "rank": 1,
        "iteration": AT,
        "codes": [3, 3],
        "said": told,
    }
    options = report.parse(
        ArgumentParser(), {}, ["--smallest", "--json", str(tmp_path / "result.json")]
    )
    with report.Gate("rank_faults", options, needs={"ends": 1}) as gate:
        gate.count("ends")
        gate.figure("s", 1.0)
        if "kind" in broken:
            monkeypatch.setattr(rank_faults, "fingerprint", lambda path: "same")
            monkeypatch.setattr(
                rank_faults.etude, "resume", lambda run: Mock(path=run), raising=False
            )
            assert rank_faults.judge_loss(gate, fault | broken, tmp_path, "same")
        else:  # An empty folder: nothing was reported in it.
            rank_faults.judge_nan(gate, fault | broken, tmp_path)
    assert gate.code == report.FAILED
