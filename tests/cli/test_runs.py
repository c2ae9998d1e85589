"""`etude runs` and `etude prune`: how runs stand, and what of them nobody needs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from etude.api import Interrupted, Run, resume, train
from etude.cli.main import main
from etude.compare.inventory import entry
from etude.core.contracts import BatchMetrics
from etude.runs import checkpoint
from etude.runs.file_system import Lock, is_locked
from etude.runs.finding import disk_bytes, find_runs
from etude.runs.folder import RunFolder
from etude.runs.pruning import delete_surplus, find_killed_runs, find_surplus
from etude.training.loop import Callback, Context
from toys import tiny_reach


class Act(Callback):
    """Does something in the middle of an update."""

    def __init__(self, act: Any, iteration: int = 2) -> None:
        self.act, self.iteration = act, iteration

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if context.clock.now.iterations == self.iteration:
            self.act()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ValueError("on purpose")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each state but running."""
    folder = tmp_path_factory.mktemp("made")
    often = {"checkpoint__every": "1 iteration", "checkpoint__keep_last": 3}
    train(tiny_reach(6).replace(**often), folder / "a" / "finished")
    rarely = tiny_reach(6).replace(checkpoint__every="never")
    with pytest.raises(Interrupted):
        train(rarely, folder / "stopped", callbacks=[Act(stop)])
    with pytest.raises(ValueError, match="on purpose"):
        train(rarely, folder / "failed", callbacks=[Act(fail, 1)])
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of these runs."""
    return Path(shutil.copytree(made, tmp_path / "runs", symlinks=True))


def test_states(folder: Path) -> None:
    found = {path.name: entry(path) for path in find_runs(folder)}
    assert {name: each.state for name, each in found.items()} == {
        "finished": "finished",
        "stopped": "stopped",
        "failed": "failed",
    }
    finished = found["finished"]
    assert (finished.steps, finished.total) == (1536, 1536)
    assert finished.score == Run(folder / "a" / "finished").rows()[-1]["eval/success_rate"]
    assert finished.score_name == "success"
    assert finished.bytes == disk_bytes(folder / "a" / "finished")
    assert found["stopped"].steps == 768
    assert found["failed"].steps == 0
    assert all(each.age < 600 for each in found.values())
    with RunFolder.open(folder / "stopped"):
        assert entry(folder / "stopped").state == "running"
    assert not is_locked(folder / "stopped")


def test_a_failed_run_that_went_on_is_no_longer_failed(folder: Path) -> None:
    with pytest.raises(Interrupted):
        resume(folder / "failed", callbacks=[Act(stop, 1)])
    assert entry(folder / "failed").state == "stopped"
    resume(folder / "failed")
    assert entry(folder / "failed").state == "finished"


def test_a_longer_run_is_not_finished_before_its_end(folder: Path) -> None:
    with pytest.raises(Interrupted):
        resume(folder / "a" / "finished", 3072, callbacks=[Act(stop, 8)])
    assert entry(folder / "a" / "finished").state == "stopped"


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["state", "steps", "success", "age", "size", "recipe", "run"]
    assert lines[-1].startswith("3 runs, ")
    assert lines[-1].endswith("1 finished, 1 stopped, 1 failed.")
    stopped = next(line for line in lines if line.startswith("stopped"))
    assert "768  of 1,536" in stopped
    assert main(["runs", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {each["state"] for each in document} == {"finished", "stopped", "failed"}


def test_damaged_runs_are_listed_all_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "stopped"
    (run / "metrics.jsonl").write_bytes(b'{"timesteps": 12}\n[]\n{"times\xff\n\n' + b"x" * 200_000)
    (run / "plan.json").write_text("[" * 100_000)
    (run / "recipe.yaml").write_bytes(b"\xff\x1b[2J: [")
    (folder / "a" / "finished" / "summary.json").write_text('{"counts": 3}')
    assert main(["runs", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("stopped  ") == 2


def test_the_last_evaluation_is_found_far_from_the_end(folder: Path) -> None:
    run = folder / "stopped"
    rows = [{"timesteps": 1, "eval/success_rate": 0.25, "pad": "x" * 70_000}]
    rows += [{"timesteps": i, "rollout/success_rate": 0.5, "pad": "x" * 500} for i in range(600)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run / "metrics.jsonl").write_text(text)
    assert entry(run).score == 0.25


LIST = """
import sys
from etude.cli.main import main
assert main(["runs", sys.argv[1]]) == 0
assert not {"torch", "mujoco", "gymnasium", "numpy"} & {*sys.modules}
"""


def test_a_list_loads_nothing_heavy(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", LIST, str(folder)], check=True, timeout=60)


def test_nothing_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == main(["prune", str(tmp_path)]) == 2
    assert "There are no runs in" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
    assert "There is no folder" in capsys.readouterr().err


def test_a_look_does_not_keep_a_writer_out(tmp_path: Path) -> None:
    """One that only asks holds the lock for a moment."""
    code = "import fcntl, os, sys, time; fd = os.open(sys.argv[1], os.O_RDONLY); "
    code += "fcntl.flock(fd, fcntl.LOCK_SH); print(flush=True); time.sleep(0.05)"
    looking = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    assert looking.stdout is not None
    looking.stdout.readline()
    Lock(tmp_path).release()
    looking.communicate()


def names(folder: Path) -> list[str]:
    """The checkpoints of a run, with what is in them."""
    return sorted(
        f"{int(path.parent.name)}/{path.name}"
        for path in folder.glob("checkpoints/*/*")
        if path.is_dir() and not path.parent.is_symlink()
    )


def test_pruned_runs_go_on_and_are_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "a" / "finished"
    before, fingerprint = names(run), Run(run).fingerprint()
    shown = Run(run).evaluate(4)
    assert before.count("1536/training") == 1
    assert sum("training" in name for name in before) == 3
    assert main(["prune", str(run)]) == 0  # nobody is there to be asked
    assert "Nothing was removed: --yes removes it." in capsys.readouterr().out
    assert names(run) == before
    expected, size = find_surplus([run]), disk_bytes(run)
    assert main(["prune", str(run), "--yes"]) == 0
    assert disk_bytes(run) <= size - sum(each.bytes for each in expected) + 8192
    assert [name for name in names(run) if "training" in name] == ["1536/training"]
    assert os.readlink(run / "checkpoints" / "latest") == "000000001536"
    assert Run(run).fingerprint() == fingerprint
    assert Run(run).evaluate(4) == shown
    resume(run, 2048)
    capsys.readouterr()
    assert main(["prune", str(run), "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)


def test_nothing_is_removed_without_yes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody asked, at a terminal either."""
    run = folder / "a" / "finished"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    before = names(run)
    assert main(["prune", str(run)]) == 0
    assert names(run) == before
    assert main(["prune", str(run), "--yes"]) == 0
    assert find_surplus([run]) == []
    assert "Freed " in capsys.readouterr().out


def test_a_copy_without_links_keeps_its_best(folder: Path) -> None:
    run = folder / "a" / "finished"
    best = checkpoint.step_of(run / "checkpoints" / "best")
    for link in ("best", "final", "latest"):
        (run / "checkpoints" / link).unlink()
    assert not [text for _, text in delete_surplus(find_surplus([run])) if text]
    assert f"{best}/policy" in names(run)
    assert "1536/training" in names(run)


def test_policies_that_the_recipe_keeps_are_kept(tmp_path: Path) -> None:
    recipe = tiny_reach(6).replace(checkpoint__every="1 iteration", checkpoint__keep_every=512)
    run = train(recipe, tmp_path / "run").path
    kept = [name for name in names(run) if name.endswith("policy")]
    assert len(kept) >= 4
    assert not [text for _, text in delete_surplus(find_surplus([run])) if text]
    left = names(run)
    assert [name for name in left if name.endswith("training")] == ["1536/training"]
    assert {"256/policy", "512/policy", "1024/policy", "1536/policy"} <= {*left}


def test_leftovers_of_dead_saves_and_what_was_set_aside(folder: Path) -> None:
    run = folder / "stopped"
    newest = run / "checkpoints" / "000000000768"
    for name in (".tmp-000000001024-99", "000000000512.damaged", "000000000256.aside-2"):
        shutil.copytree(newest, run / "checkpoints" / name)
    (run / ".tmp-manifest.json-99").write_text("{}")
    notes, said = run / "checkpoints" / "notes.damaged", list[str]()
    notes.write_text("of a person")
    assert find_surplus([run], say=said.append) == []
    assert said == [f"{run} is left: Etude has not written {notes}."]
    notes.unlink()
    found = find_surplus([run])
    assert {each.path.name for each in found} == {
        *(".tmp-000000001024-99", ".tmp-manifest.json-99"),
        *("000000000512.damaged", "000000000256.aside-2"),
    }
    assert [text for _, text in delete_surplus(found)] == [""] * 4
    assert find_surplus([run]) == []
    assert resume(run).summary()["counts"]["timesteps"] == 1536


def test_what_might_still_be_needed_is_left(folder: Path) -> None:
    run = folder / "a" / "finished"
    assert find_surplus([run])
    with RunFolder.open(run):
        assert find_surplus([run]) == []  # someone writes it
    other = folder / "stopped"
    text = (other / "recipe.yaml").read_text()
    assert "start_from: null" in text
    start = run / "checkpoints" / "000000001280"
    (other / "recipe.yaml").write_text(text.replace("start_from: null", f"start_from: {start}"))
    assert find_surplus([run, other]) == []  # another run starts from it
    (other / "recipe.yaml").write_text(text)
    damage = run / "checkpoints" / "000000001536" / "training" / "arrays.safetensors"
    damage.write_bytes(b"\0" + damage.read_bytes()[1:])
    found = find_surplus([run])  # by sizes, of which all are right
    assert {each.path.name: why for each, why in delete_surplus(found)} == {
        "000000001024": "",
        "000000001280": f"{start} has changed and is left.",
    }
    assert checkpoint.verify(start) == 1280
    for path in run.glob("checkpoints/0*/training/arrays.safetensors"):
        path.write_bytes(b"")
    shutil.copytree(
        run / "checkpoints" / "000000001536", run / "checkpoints" / "000000000001.damaged"
    )
    assert find_surplus([run]) == []  # nothing is whole, so that anything may be of use


def test_a_run_that_began_meanwhile_is_left(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "a" / "finished"
    found, before = find_surplus([run]), names(run)
    with RunFolder.open(run):
        left = [text for _, text in delete_surplus(found)]
    assert ["is being written" in text for text in left] == [True]
    assert names(run) == before


def age(path: Path, seconds: float) -> None:
    """Make a run look as if nobody had written it for so long."""
    then = time.time() - seconds
    for each in [path, *path.rglob("*")]:
        os.utime(each, (then, then), follow_symlinks=False)


def test_runs_that_saved_nothing(folder: Path) -> None:
    run = folder / "failed"
    assert find_surplus([run]) == []  # a minute old: someone may still look at it
    age(run, 7200)
    half = folder / ".tmp-half-99"
    shutil.copytree(run, half)
    age(half, 60)
    assert find_killed_runs(folder) == []
    age(half, 7200)
    found = [*find_surplus([run]), *find_killed_runs(folder)]
    assert [each.path for each in found] == [run, half]
    assert [text for _, text in delete_surplus(found)] == ["", ""]
    assert not run.exists()
    assert not half.exists()
    age(folder / "stopped", 7200)
    assert find_surplus([folder / "stopped"]) == []
