"""What a run falls back on: older checkpoints, copies in them, and `etude fsck`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from damage_cases import DamagedRuns, on_policy, replay
from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.core.errors import EtudeError, UsageError
from etude.data.store.log import DamagedStore
from etude.training.loop import Callback, Context
from toys import toy_dataset


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 96, 128 and 160, the last of all."""
    path = tmp_path_factory.mktemp("runs") / "run"
    train(on_policy(path), path)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_an_older_checkpoint_can_be_chosen(run: Path, finished: Path) -> None:
    said: list[str] = []
    checkpoints = run / "checkpoints"
    whole = (checkpoints / "000000000160" / "training" / "state.json").read_bytes()
    resume(run, say=said.append, checkpoint=96)
    assert any("Resuming" in text and "at step 96." in text for text in said)
    for step in ("000000000128", "000000000160"):
        assert (checkpoints / f"{step}.aside" / "training").is_dir()
        assert any(f"{step} is set aside as {step}.aside" in text for text in said)
    assert (checkpoints / "000000000160.aside" / "training" / "state.json").read_bytes() == whole
    assert Run(run).fingerprint() == Run(finished).fingerprint()
    assert Run(run).summary() == Run(finished).summary()
    assert os.readlink(checkpoints / "final") == "000000000160"
    with pytest.raises(UsageError, match="of step 100 that can be resumed: choose one of 160, 128"):
        resume(run, checkpoint=100)
    (checkpoints / "000000000128" / "policy" / "contract.json").write_bytes(b"")
    with pytest.raises(EtudeError, match=r"contract\.json has 0 bytes"):
        resume(run, checkpoint=128)
    assert (checkpoints / "000000000160").is_dir()


def test_an_older_checkpoint_by_command_line(
    run: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["resume", str(run), "--checkpoint", "128"]) == 0
    assert "set aside as 000000000160.aside" in capsys.readouterr().out
    assert Run(run).fingerprint() == Run(finished).fingerprint()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("act", [flip, lambda path: path.write_bytes(b""), Path.unlink])
@pytest.mark.parametrize("name", ["manifest.json", "recipe.yaml", "plan.json", "summary.json"])
def test_texts_are_taken_from_a_checkpoint_or_written_anew(
    name: str, act: Callable[[Path], object], run: Path, finished: Path
) -> None:
    whole = (run / name).read_bytes()
    if name == "recipe.yaml" and act is flip:
        (run / name).write_bytes(b"\xff" + whole)  # what still reads well is a changed recipe
    else:
        act(run / name)
    said: list[str] = []
    assert cli.main(["fsck", str(run)]) == 1
    resume(run, say=said.append)
    assert Run(run).fingerprint() == Run(finished).fingerprint()
    if name != "plan.json":  # its notes are those of a run that has begun
        assert (run / name).read_bytes() == whole
    if name != "summary.json":  # which every end of a run writes
        assert any(name in text for text in said)
    assert cli.main(["fsck", str(run)]) == 0


def test_a_lost_recipe_without_a_checkpoint_is_said(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "recipe.yaml").write_text("")
    with pytest.raises(UsageError, match="No checkpoint holds a copy"):
        resume(run)


def test_rows_that_are_lost_are_made_again_from_an_older_checkpoint(
    run: Path, finished: Path
) -> None:
    rows = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    rows[3] = rows[3].replace(b"1", b"2", 1)
    (run / "metrics.jsonl").write_bytes(b"".join(rows))
    said: list[str] = []
    resume(run, say=said.append)
    assert any("of 5 rows it has lost row 4" in text for text in said)
    found, whole = Run(run).fingerprint(), Run(finished).fingerprint()
    assert {k for k in whole if found[k] != whole[k]} == {"metrics"}
    resume(run, checkpoint=96)
    assert Run(run).fingerprint() == whole


def test_a_finished_run_that_has_lost_all_its_rows(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    for _ in range(2):
        assert cli.main(["resume", str(run)]) == 0
        assert Run(run).rows() == []
    assert cli.main(["fsck", str(run)]) == 1
    assert sorted(path.name for path in run.glob("metrics*")) == [
        "metrics.jsonl",
        "metrics.jsonl.damaged",
    ]


def test_fsck(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert cli.main(["fsck", str(run)]) == 0
    out = capsys.readouterr().out
    assert "whole        metrics.jsonl\n" in out
    assert "resumed from step 160; with --checkpoint also from 128, 96." in out
    flip(run / "checkpoints" / "000000000160" / "training" / "arrays.safetensors")
    (run / "checkpoints" / "000000000128" / "policy" / "contract.json").unlink()
    flip(run / "plan.txt")
    assert cli.main(["fsck", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    verdicts = {f["path"]: f["verdict"] for f in found["findings"] if f["verdict"] != "whole"}
    verdicts = {path: verdict for path, verdict in verdicts.items() if verdict != "not checked"}
    assert verdicts == {
        "checkpoints/000000000160/training/arrays.safetensors": "damaged",
        "checkpoints/000000000128/policy/contract.json": "missing",
        "plan.txt": "damaged",
    }
    assert (found["resumable"], found["policies"]) == ([96], [160, 96])
    assert before.keys() - dict.fromkeys(run.rglob("*"), 0) == {
        run / "checkpoints" / "000000000128" / "policy" / "contract.json"
    }
    for step in (96, 128):
        shutil.rmtree(run / "checkpoints" / f"{step:012d}")
    assert cli.main(["fsck", str(run)]) == 1
    out = capsys.readouterr().out
    assert "No checkpoint can be resumed from." in out
    assert "--from" in out


def test_fsck_says_what_a_resume_does_with_a_changed_recipe(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = run / "recipe.yaml"
    text = recipe.read_text()
    for changed, does in {
        text.replace("seed: 0", "seed: 7"): "a resume refuses it",
        text.replace("keep_last: 3", "keep_last: 2"): "a resume uses it",
        text.replace("seed: 0", "seed: ["): "a resume takes it from the newest checkpoint",
    }.items():
        assert changed != text
        recipe.write_text(changed)
        assert cli.main(["fsck", str(run)]) == 1
        assert f"damaged      recipe.yaml  (was changed after it was written; {does}" in (
            capsys.readouterr().out
        )
        refuses = "refuses" in does
        assert (cli.main(["resume", str(run)]) == 2) == refuses


def test_fsck_of_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = toy_dataset(tmp_path / "data")
    assert cli.main(["fsck", str(data)]) == 0
    assert "whole        labels.json" in capsys.readouterr().out
    flip(data / "steps-000000000000.bin")
    assert cli.main(["fsck", str(data)]) == 1
    assert "damaged      steps-000000000000.bin  (is damaged" in capsys.readouterr().out
    assert cli.main(["fsck", str(tmp_path)]) == 2


def test_a_replay_that_is_damaged(tmp_path: Path) -> None:
    """The last block: the checkpoint before takes over. All of them: it is said, and nothing is
    changed."""
    runs, said = DamagedRuns(tmp_path, replay), list[str]()
    shards = runs.run / "replay"
    state = json.loads((runs.run / "checkpoints/latest/training/state.json").read_text())
    store = json.loads((shards / "shard-0" / "store.json").read_text())
    slots = store["lanes"] * store["block_steps"]
    block, inside = divmod(state["algorithm/stores/000000/steps/count"] - 1, slots)
    newest = shards / "shard-0" / f"steps-{block:012d}.bin"
    data = bytearray(newest.read_bytes())
    data[inside * len(data) // slots] ^= 1  # in the newest record that a checkpoint names
    newest.write_bytes(data)
    resume(runs.run, say=said.append)
    assert any(f"{newest} is damaged" in t and "trying the one before" in t for t in said)
    assert Run(runs.run).fingerprint() == runs.fingerprint
    for path in (shards / "shard-1").glob("steps-*"):
        path.unlink()
    there = sorted((runs.run / "checkpoints").iterdir())
    with pytest.raises(EtudeError, match=r"is missing.*--from .* starts a new run"):
        resume(runs.run)
    assert sorted((runs.run / "checkpoints").iterdir()) == there


class At(Callback):
    """Does something once, after an iteration."""

    def __init__(self, act: Callable[[], object], iteration: int) -> None:
        self._act, self._iteration = act, iteration

    def iteration_end(self, context: Context, fragments: object) -> None:
        if context.clock.now.iterations == self._iteration:
            self._act()


def test_a_replay_that_is_cut_while_it_is_used_ends_in_a_report(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()

    def cut() -> None:
        for path in (run / "replay" / "shard-0").glob("steps-*"):
            os.truncate(path, 0)

    with pytest.raises(DamagedStore, match=r"steps-\d+\.bin was (cut|changed) while it was in use"):
        train(replay(tmp_path), run, [At(cut, 10)], say=said.append)
    assert "DamagedStore" in next((run / "failures").rglob("error.txt")).read_text()
    assert any("Report:" in text for text in said)


@pytest.mark.parametrize("gone", [False, True])
def test_a_folder_that_is_moved_while_training(gone: bool, tmp_path: Path) -> None:
    run, moved, said = tmp_path / "run", tmp_path / "moved", list[str]()

    def move() -> None:
        if gone:
            shutil.rmtree(run)
        else:
            run.rename(moved)

    recipe = on_policy(tmp_path)
    with pytest.raises(EtudeError, match="was moved, removed or replaced"):
        train(recipe, run, [At(move, 3)], say=said.append)
    assert not run.exists()
    if gone:
        assert "No report" in said[-1]
        return
    assert str(moved / "failures") in said[-1]
    resume(moved)
    assert Run(moved).fingerprint() == Run(train(recipe, tmp_path / "untouched").path).fingerprint()
