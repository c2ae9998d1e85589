"""Branches of a run, and the command that shows a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

import etude
from etude.building.forking import FORKED, fork
from etude.cli.main import main as cli
from etude.core.errors import NonFinite, UsageError
from etude.runs.failures import replay_command
from etude.runs.folder import RunFolder
from gates.lib.command import changed
from gates.lib.short_runs import SHORT
from toys import tiny_reach


def test_a_branch_without_a_change_ends_as_the_run(tmp_path: Path) -> None:
    run = etude.train(tiny_reach(6), tmp_path / "run")
    assert fork(run.path, 800, tmp_path / "branch") == 768
    branch = etude.resume(tmp_path / "branch")
    assert branch.fingerprint() == run.fingerprint()
    assert branch.folder.manifest()[FORKED] == {"run": str(run.path), "step": 768}


def test_a_branch_takes_its_replay_with_it(tmp_path: Path) -> None:
    run = etude.train(changed(*SHORT["sac"]), tmp_path / "run")
    step = int(run.history().last["timesteps"]) // 2
    fork(run.path, step, tmp_path / "branch")
    assert etude.resume(tmp_path / "branch").fingerprint() == run.fingerprint()


def test_the_command_trains_the_branch_with_its_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = etude.train(tiny_reach(6, evaluation={"final_episodes": 0}), tmp_path / "run")
    words = ["fork", str(run.path), "--at", "800", "--folder", str(tmp_path / "branch")]
    assert cli([*words, "--algorithm.learning-rate", "1e-4"]) == 0
    assert "shares the 768 steps" in capsys.readouterr().out
    branch = etude.Run(tmp_path / "branch")
    assert "changed at step 768: algorithm.learning_rate" in branch.changes[0]
    rows = [[row["train/value_loss"] for row in each.rows()] for each in (run, branch)]
    assert rows[0][0] == rows[1][0]
    assert rows[0][-1] != rows[1][-1]
    assert (tmp_path / "branch" / "beside.html").is_file()
    # A setting that cannot change leaves no folder behind.
    words = ["fork", str(run.path), "--at", "800", "--folder", str(tmp_path / "other")]
    assert cli([*words, "--policy.hidden", "8"]) != 0
    assert not (tmp_path / "other").exists()


def test_the_first_iteration_has_no_branch(tmp_path: Path) -> None:
    run = etude.train(tiny_reach(2), tmp_path / "run")
    with pytest.raises(UsageError, match="in the first iteration"):
        fork(run.path, 100, tmp_path / "branch")


def test_a_number_that_is_not_finite_names_the_command_that_shows_it(tmp_path: Path) -> None:
    run, now = RunFolder(tmp_path), {"now": {"iterations": 3, "timesteps": 768, "updates": 4}}
    seen = NonFinite("observation 'state' of environment 17, step 4, column 2")
    assert replay_command(seen, now, run) == f"etude replay {tmp_path} --at 768 --env 17"
    loss = NonFinite("the loss of a minibatch (shard 0)")
    assert replay_command(loss, now, run) == f"etude inspect {tmp_path} --at 768"
    assert replay_command(ValueError(), now, run) == ""
