"""The loop through its parts: callbacks, rows, the order of things at a boundary."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from etude.api import Interrupted, Run, resume, train
from etude.core.contracts import BatchMetrics, Fragment
from etude.core.trees import Tree
from etude.runs import checkpoint
from etude.training.loop import Callback, Context
from toys import tiny_reach


class Recorder(Callback):
    """Counts what it is told, and has memory."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.iterations = 0
        self.stop_at = stop_at

    def run_start(self, context: Context) -> None:
        self.events.append("start")

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        assert set(metrics.values) >= {"train/approx_kl", "train/grad_norm"}
        self.events.append("batch")

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self.events.append("iteration")
        self.iterations += 1
        context.record("own/iterations", float(self.iterations))
        if self.iterations == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def cycle_end(self, context: Context, row: dict[str, float]) -> None:
        self.events.append("cycle")

    def epoch_end(self, context: Context, summary: dict[str, float]) -> None:
        self.events.append("epoch")

    def run_end(self, context: Context) -> None:
        self.events.append("end")

    def state_dict(self) -> Tree:
        return {"iterations": self.iterations}

    def load_state_dict(self, state: Tree) -> None:
        self.iterations = int(state["iterations"])


def test_callbacks_hear_of_every_level_in_order(tmp_path: Path) -> None:
    recorder, phases = Recorder(), []
    recipe = tiny_reach(5, clock={"cycles": 2})  # 2 + 2 + 1 iterations, 2 + 1 cycles
    run = train(recipe, tmp_path / "run", callbacks=[recorder], on_phase=phases.append)
    levels = [event for event in recorder.events if event != "batch"]
    i, c, e = "iteration", "cycle", "epoch"
    assert levels == ["start", i, i, c, i, i, c, e, i, c, e, "end"]
    # The first iteration only collects.
    assert recorder.events.count("batch") == run.summary()["counts"]["updates"] == 4 * 8
    # A mean over the two iterations of a cycle.
    assert [row["own/iterations"] for row in run.rows()] == [1.5, 3.5, 5.0]
    assert [p for p in phases if p][:3] == ["collect", "train", "save"]
    assert [p for p in phases if p][-4:] == ["collect", "train", "test", "save"]


def test_rows_have_the_columns_people_know(tmp_path: Path) -> None:
    run = train(tiny_reach(4), tmp_path / "run")
    rows = run.rows()
    assert [(row["cycle"], row["iterations"], row["timesteps"]) for row in rows] == [
        (1, 2, 512),
        (2, 4, 1024),
    ]
    expected = {"epoch", "episodes", "updates", "train/learning_rate", "train/value_loss"}
    expected |= {"train/explained_variance", "train/n_updates", "train/std", "time/fps"}
    assert expected <= rows[0].keys()
    assert "eval/success_rate" in rows[1]
    assert rows[1]["train/n_updates"] == rows[1]["updates"] == 24


def test_a_signal_saves_at_the_boundary_and_the_result_is_the_same(tmp_path: Path) -> None:
    untouched = train(tiny_reach(6), tmp_path / "untouched", callbacks=[Recorder()])
    with pytest.raises(Interrupted, match="etude resume") as stopped:
        train(tiny_reach(6), tmp_path / "run", callbacks=[Recorder(stop_at=3)])
    assert stopped.value.exit_code == 75
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert checkpoint.verify(latest.resolve()) == 3 * 256  # between two cycles
    recorder = Recorder()
    resumed = resume(tmp_path / "run", callbacks=[recorder])
    assert recorder.iterations == 6
    assert resumed.fingerprint() == untouched.fingerprint()
    assert resumed.summary()["counts"] == untouched.summary()["counts"]


def test_best_is_the_best_evaluation_and_can_act(tmp_path: Path) -> None:
    recipe = tiny_reach(8, evaluation={"every": "1 iteration"}, checkpoint={"every": "never"})
    run = train(recipe, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "best").exists()
    assert (folder / "final").resolve() == (folder / "latest").resolve()
    metrics: dict[str, Any] = run.evaluate(episodes=8)
    assert metrics["eval/episodes"] == 8
    assert metrics == run.evaluate(episodes=8)
    assert metrics != run.evaluate(episodes=8, seed=5)
    best = run.summary()["best"]
    step = int((folder / "best").resolve().name)
    assert step % 256 == 0
    assert best is not None


def test_a_finished_run_is_resumed_without_change(tmp_path: Path) -> None:
    run = train(tiny_reach(2), tmp_path / "run")
    before = (run.path / "metrics.jsonl").read_bytes(), run.fingerprint()
    said: list[str] = []
    resume(tmp_path / "run", say=said.append)
    assert any("finished already" in text for text in said)
    assert ((run.path / "metrics.jsonl").read_bytes(), run.fingerprint()) == before


def test_wall_clock_saves_change_no_result(tmp_path: Path) -> None:
    often = tiny_reach(4, checkpoint={"every": "never", "seconds": 1e-6})
    one = train(often, tmp_path / "often")
    two = train(tiny_reach(4, checkpoint={"every": "never"}), tmp_path / "rarely")
    assert one.fingerprint() == two.fingerprint()


def test_a_run_can_be_described_again(tmp_path: Path) -> None:
    run = train(tiny_reach(2), tmp_path / "run")
    again = Run(tmp_path / "run")
    assert again.recipe == run.recipe == tiny_reach(2)
    assert json.loads((run.path / "plan.json").read_text())["counts"] == run.summary()["counts"]
