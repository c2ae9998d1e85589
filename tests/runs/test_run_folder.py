"""Run folders: made whole, one writer, metrics that can be cut back, failures that can be seen."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from disk_faults import Died, Failing, Mortal, Volatile, Watched, save, tag_of
from safetensors.numpy import load_file

from etude.core.errors import Damaged, EtudeError, NonFinite, UsageError
from etude.runs import checkpoint, files, metrics_log
from etude.runs.failures import write_failure
from etude.runs.folder import REPORTING, RunFolder, default_path
from etude.runs.metrics_log import DiskHistory, MetricsLog, chain_of, planned_position
from etude.runs.pruning import find_foreign

NO_BYTES = hashlib.sha256().hexdigest()
HOLD = """
import sys, time
from pathlib import Path
from etude.runs.folder import RunFolder
run = RunFolder.open(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, "seed: 1\n", "the plan\n", {"steps": 1}, {"exactness": "exact"})


def test_create_and_open(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "reach" / "one"
    with create(path) as run:
        assert run.recipe.read_text() == "seed: 1\n"
        assert (path / "plan.txt").read_text() == "the plan\n"
        assert json.loads((path / "plan.json").read_text()) == {"steps": 1}
        assert run.manifest() == {"exactness": "exact"}
        assert run.checkpoints.is_dir()
        assert run.failures.is_dir()
        assert run.evaluation(5) == path / "evaluations" / "000000000005"
    assert RunFolder.open(path, write=False).metrics == path / "metrics.jsonl"
    whole = (path / "manifest.json").read_bytes()
    for i in range(len(whole)):
        (path / "manifest.json").write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(Damaged, match=r"manifest\.json"):
            RunFolder.open(path, write=False).manifest()
    assert run.manifest() == {"exactness": "exact"}  # as it was opened with


def test_what_etude_writes_is_not_foreign(tmp_path: Path) -> None:
    with create(tmp_path / "run") as folder:
        (folder.path / REPORTING).write_text("The log tensorboard failed.\n")
        write_failure(folder, ValueError("odd"), {}, {})
        assert find_foreign(folder.path) is None
        (folder.path / "notes.txt").write_text("mine")
        assert find_foreign(folder.path) == folder.path / "notes.txt"


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    with pytest.raises(UsageError, match="etude resume"):
        create(tmp_path / "one")
    with pytest.raises(UsageError, match="not a run"):
        RunFolder.open(tmp_path)


def test_create_is_all_or_nothing(tmp_path: Path) -> None:
    disk = Mortal()
    with files.using(disk):
        create(tmp_path / "counted").close()
    for number in range(len(disk.calls)):
        path = tmp_path / str(number)
        with files.using(Mortal(number)), pytest.raises(Died):
            create(path)
        if path.exists():
            RunFolder.open(path).close()
        full = tmp_path / f"full-{number}"
        failing = Failing(number, errno.ENOSPC, False)
        with files.using(failing), pytest.raises(EtudeError, match="disk is full"):
            create(full)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp-full")]


def test_default_path(tmp_path: Path) -> None:
    now = datetime(2031, 2, 3, 4, 5, 6)
    path = default_path("pick_place", 7, now, root=str(tmp_path))
    assert path == tmp_path / "pick_place" / "2031-02-03-040506-s7"
    path.mkdir(parents=True)
    assert default_path("pick_place", 7, now, str(tmp_path)).name == "2031-02-03-040506-s7-2"
    assert default_path("../my recipe", 7, now, str(tmp_path)).parent == tmp_path / "my-recipe"


def test_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "one"
    run = create(path)
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        RunFolder.open(path)
    RunFolder.open(path, write=False)
    run.close()
    RunFolder.open(path).close()


def test_nobody_gets_in_by_removing_the_locks_file(tmp_path: Path) -> None:
    path = tmp_path / "one"
    run = create(path)
    (path / ".lock").unlink()
    with pytest.raises(UsageError, match="is being written by process unknown"):
        RunFolder.open(path)
    run.check_writer()
    run.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_moved_away_is_no_longer_written(replaced: bool, tmp_path: Path) -> None:
    path = tmp_path / "one"
    run = create(path)
    path.rename(tmp_path / "elsewhere")
    if replaced:
        create(path).close()
    with pytest.raises(EtudeError, match="was moved, removed or replaced"):
        run.check_writer()
    run.close()


@pytest.mark.parametrize("gone", [False, True])
def test_rows_and_reports_of_a_folder_that_was_moved(gone: bool, tmp_path: Path) -> None:
    """Nothing is made where it was; a report goes to where it is, if it is anywhere."""
    path, moved = tmp_path / "one", tmp_path / "elsewhere"
    run = create(path)
    log = run.metrics_log()
    log.append({"cycle": 1})
    if gone:
        shutil.rmtree(path)
    else:
        path.rename(moved)
    with pytest.raises(EtudeError, match="was moved, removed or replaced") as caught:
        log.append({"cycle": 2})
    assert (str(moved) in str(caught.value)) != gone
    if gone:
        with pytest.raises(EtudeError, match="is gone"):
            write_failure(run, caught.value, {}, {})
    else:
        assert write_failure(run, caught.value, {}, {}).parent == moved / "failures"
    assert not path.exists()


def test_the_later_of_two_writers_loses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of a file system whose locks do not reach each other."""
    path = tmp_path / "one"
    first = create(path)
    assert (path / ".lock").read_text() == (
        f"{os.getpid()} on {socket.gethostname()} (inode {path.stat().st_ino})\n"
    )
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    second = RunFolder.open(path)
    second.check_writer()  # what it found may be the name of one that died
    first.metrics_log().append({"cycle": 1})
    with pytest.raises(EtudeError, match="which came first: this one has stopped"):
        second.check_writer()
    (path / ".lock").unlink()
    first.check_writer()
    assert "another-host" not in (path / ".lock").read_text()


NAMES = [".lock", "metrics.jsonl", "checkpoints", "manifest.json", "recipe.yaml", "wandb.json"]
DEEP = ["tensorboard/events", "evaluations/1/summary.json", "checkpoints/latest", "wandb/run/files"]


@pytest.mark.parametrize("name", NAMES + DEEP)
def test_nothing_is_written_through_a_link(name: str, tmp_path: Path) -> None:
    """A run folder from a stranger may lead a resume to files of its own choice."""
    path, precious = tmp_path / "one", tmp_path / "precious"
    create(path).close()
    precious.write_text("mine")
    target = path / name
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(precious)
    for write in (True, False):
        with pytest.raises(UsageError, match=f"{name} is a symbolic link"):
            RunFolder.open(path, write)
    # Also where the link appears only later.
    with pytest.raises(files.DiskFault, match="a symbolic link is in its place"):
        files.AppendFile(target)
    assert precious.read_text() == "mine"


def test_links_of_a_runs_own_stay(tmp_path: Path) -> None:
    create(tmp_path / "one").close()
    inside = tmp_path / "one" / "wandb" / "run-1" / "logs"
    inside.mkdir(parents=True)
    (inside.parents[1] / "latest-run").symlink_to("run-1")
    (inside.parents[1] / "debug.log").symlink_to("run-1/logs/debug.log")
    (tmp_path / "elsewhere").symlink_to("one")
    RunFolder.open(tmp_path / "elsewhere").close()


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "one"
    create(path).close()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {holder.pid}"):
            RunFolder.open(path)
        holder.send_signal(signal.SIGKILL)
    RunFolder.open(path).close()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = create(tmp_path / "one")
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        run.close()
        deadline = time.monotonic() + 5
        while True:  # the child may not have run its fork handler yet
            try:
                RunFolder.open(tmp_path / "one").close()
                break
            except UsageError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_without_locks_one_of_many_processes_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all of them overtake a writer that was killed."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "one"
    create(path).close()
    if (dead := os.fork()) == 0:
        RunFolder.open(path)
        os._exit(0)
    os.waitpid(dead, 0)
    assert (path / ".locked-1").is_file()
    (said, say), (held, let_go) = os.pipe(), os.pipe()
    children = list[int]()
    for _ in range(8):
        if (child := os.fork()) == 0:
            os.close(let_go)
            try:
                RunFolder.open(path)
                os.write(say, b"1")
            except UsageError:
                os.write(say, b"0")
            os.read(held, 1)  # until all have tried
            os._exit(0)
        children.append(child)
    answers = b"".join(os.read(said, 1) for _ in children)
    os.close(let_go)
    for child in children:
        os.waitpid(child, 0)
    assert answers.count(b"1") == 1
    RunFolder.open(path).close()
    assert not list(path.glob(".locked-*"))


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"cycle": 1, "a": np.float32(0.5), "b": float("nan"), "c": np.int64(3)})
    log.append({"cycle": 2})
    position = log.state_dict()
    kept = path.read_bytes()
    log.append({"cycle": 3})
    log.close()
    with path.open("ab") as torn:
        torn.write(b'{"cycle": 4, "a')
    again = MetricsLog(path)
    again.load_state_dict(position)
    assert path.read_bytes() == kept
    assert json.loads(kept.splitlines()[0]) == {"cycle": 1, "a": 0.5, "b": None, "c": 3}
    again.append({"cycle": 3})
    assert again.position()["bytes"] == path.stat().st_size
    assert MetricsLog(path).position() == again.position()
    again.cut_back({"bytes": 0, "sha256": MetricsLog(tmp_path / "empty").position()["sha256"]})
    assert path.read_bytes() == b""


@pytest.mark.parametrize("way", ["flip", "cut", "row gone", "newline", "all gone"])
def test_damaged_rows_are_named_and_marked(way: str, tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    log = MetricsLog(path)
    for cycle in range(1, 6):
        log.append({"cycle": cycle})
    position, whole = log.position(), path.read_bytes()
    log.append({"cycle": 6})
    log.close()
    lines = whole.splitlines(keepends=True)
    damaged, lost = {
        "flip": (whole.replace(b"3", b"7"), [3]),
        "cut": (whole[:-3], [5]),
        "row gone": (b"".join(lines[:1] + lines[2:]), [2]),
        "newline": (whole.replace(b"\n", b" ", 1), [1, 2]),
        "all gone": (b"", [1, 2, 3, 4, 5]),
    }[way]
    path.write_bytes(damaged)
    again = MetricsLog(path, said.append)
    again.load_state_dict(position)
    kept = [number for number in range(1, 6) if number not in lost]
    assert [*DiskHistory(path)] == [{"cycle": number} for number in kept]
    assert [json.loads(line).get("lost") for line in path.read_text().splitlines()] == [
        None if number in kept else number for number in range(1, 6)
    ]
    assert ", ".join(map(str, lost)) in said[0]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    again.append({"cycle": 6})
    MetricsLog(path).cut_back(again.position())
    assert len(said) == 1


def test_a_row_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"cycle": 1}\n{"cycle" 2}\n')
    with pytest.raises(Damaged, match="Row 2 of"):
        [*DiskHistory(path)]


MARKS = 64
"""Fewer than there are, so that a log is soon a long one."""


@pytest.fixture
def _few_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "MARKS", MARKS)


def log_of(path: Path, rows: int) -> MetricsLog:
    log = MetricsLog(path)
    for cycle in range(1, rows + 1):
        log.append({"cycle": cycle, "timesteps": 8 * cycle, "loss": 1.0 / cycle})
    return log


@pytest.mark.usefixtures("_few_marks")
def test_a_position_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    few, many = (log_of(tmp_path / str(rows), rows).position() for rows in (MARKS, 5 * MARKS))
    assert len(json.dumps(many)) <= len(json.dumps(few)) + 20
    planned = planned_position(5 * MARKS)
    assert planned.keys() == many.keys()
    assert len(planned["marks"]) == len(many["marks"])


@pytest.mark.usefixtures("_few_marks")
def test_a_resume_parses_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(tmp_path / "rows", 3 * MARKS)
    position = log.position()
    log.append({"cycle": 0})
    monkeypatch.setattr(metrics_log.json, "loads", None)
    again = MetricsLog(tmp_path / "rows")
    again.cut_back(position)
    assert again.position() == position
    assert again.num_rows == 3 * MARKS


@pytest.mark.usefixtures("_few_marks")
@pytest.mark.parametrize("way", ["flip", "row gone", "end gone"])
def test_a_long_log_loses_the_stretch_that_is_damaged(way: str, tmp_path: Path) -> None:
    """Its position names stretches of rows; those that were moved are found all the same."""
    path, said = tmp_path / "rows", list[str]()
    rows = 3 * MARKS + 5
    position, whole = log_of(path, rows).position(), path.read_bytes()
    assert position["stretch"] == 4
    lines = whole.splitlines(keepends=True)
    lines[101] = lines[101].replace(b'"cycle": 102', b'"cycle": 103')
    changed = {
        "flip": (b"".join(lines), range(101, 105)),
        "row gone": (b"".join(lines[:101] + lines[102:]), range(101, 105)),
        "end gone": (whole[:-10], range(rows, rows + 1)),
    }[way]
    path.write_bytes(changed[0])
    MetricsLog(path, said.append).cut_back(position)
    found = path.read_bytes().splitlines(keepends=True)
    assert [number for number, line in enumerate(found, 1) if b"lost" in line] == [*changed[1]]
    kept = [number for number in range(1, rows + 1) if number not in changed[1]]
    assert [json.loads(found[number - 1])["cycle"] for number in kept] == kept
    assert "rows it has lost row" in said[0]


def test_a_position_of_an_older_version_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    log = log_of(path, 40)
    position, whole = log.position(), path.read_bytes()
    crcs = [zlib.crc32(line) for line in whole.splitlines()]
    older = {"bytes": position["bytes"], "sha256": position["sha256"], "rows": crcs}
    log.append({"cycle": 41})
    again = MetricsLog(path)
    again.cut_back(older)
    assert again.position() == position
    path.write_bytes(whole.replace(b'"cycle": 7,', b'"cycle": 8,', 1))
    MetricsLog(path).cut_back(older)
    assert json.loads(path.read_bytes().splitlines()[6]) == {"lost": 7}


def test_rows_are_hashed_as_they_come_and_as_they_are_read(tmp_path: Path) -> None:
    """Without the columns that may differ, and whenever the process began anew."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    log, other = MetricsLog(whole), MetricsLog(stopped)
    for cycle in range(5):
        row = {"cycle": cycle, "a": np.float32(0.1), "b": float("nan"), "system/cpu": 1.0}
        log.append({**row, "time/fps": 1.0})
        other.append({**row, "time/fps": 2.5})
        position = other.position()
        other.close()
        other = MetricsLog(stopped)
        other.cut_back(position)
    assert whole.read_bytes() != stopped.read_bytes()
    chains = {log.position()["chain"], other.position()["chain"]}
    assert chains == {chain_of(DiskHistory(whole))} == {chain_of(DiskHistory(stopped))}
    other.append({"cycle": 5})
    assert other.position()["chain"] != log.position()["chain"]


def test_history_is_read_from_where_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    wide = "x" * 2000
    path.write_text("".join(f'{{"timesteps": {8 * i}, "note": "{wide}"}}\n' for i in range(3000)))
    assert path.stat().st_size > 4 * files.BLOCK
    history = DiskHistory(path)
    assert history.last["timesteps"] == 8 * 2999
    for step in (-1, 0, 1, 8 * 1234, 8 * 2998, 8 * 2999):
        found = [row["timesteps"] for row in history.after(step, lambda row: row["timesteps"])]
        assert found == [8 * i for i in range(3000) if 8 * i > step]
    calls = []
    next(history.after(8 * 2000, lambda row: calls.append(row) or row["timesteps"]))
    assert len(calls) < 800  # of 3,000


def test_metrics_of_an_older_version_must_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"cycle": 1})
    position = {name: value for name, value in log.position().items() if name != "rows"}
    MetricsLog(path).cut_back(position)
    path.write_bytes(b'{"cycle": 2}\n')
    with pytest.raises(EtudeError, match="earlier rows were changed"):
        MetricsLog(path).cut_back(position)


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    class Half(Watched):
        """Takes half of a row, then is full."""

        def write(self, fd: int, data: files.Chunk) -> int:
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "full")
            return os.write(fd, bytes(data)[:10])

    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append({"cycle": 1})
    with files.using(Half()), pytest.raises(EtudeError, match="disk is full"):
        log.append({"cycle": 2222})
    log.append({"cycle": 3})
    assert [json.loads(line)["cycle"] for line in path.read_text().splitlines()] == [1, 3]
    assert MetricsLog(path).position() == log.position()


def test_failure_report(tmp_path: Path) -> None:
    arrays = {
        "obs/state": np.array([1.0, np.nan]),
        "net": {"w": torch.ones(2)},
        "text": "left out",
        "odd": np.array([object()]),
    }
    with create(tmp_path / "one") as run:
        try:
            raise NonFinite("observation 'state', column 1")
        except NonFinite as error:
            first = write_failure(run, error, arrays, {"iteration": 3, "type": object})
            second = write_failure(run, error, {}, {})
    assert first != second
    assert "column 1" in (first / "error.txt").read_text()
    assert "Traceback" in (first / "error.txt").read_text()
    assert json.loads((first / "context.json").read_text())["iteration"] == 3
    loaded = load_file(first / "reproduction.safetensors")
    assert loaded.keys() == {"obs/state", "net/w"}
    assert np.isnan(loaded["obs/state"][1])


def test_a_run_that_is_not_exact_any_more_stays_so(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", "", "", {}, {"exactness": "exact", "cpu": "x"}) as run:
        run.mark_not_exact("worker 0 computes other bits")
    again = RunFolder.open(tmp_path / "run", write=False).manifest()
    assert again == {"exactness": "not exact: worker 0 computes other bits", "cpu": "x"}


def begin_and_save(path: Path) -> None:
    """Make a run, or open the one that is there, write a row and save."""
    run = RunFolder.open(path) if path.exists() else create(path)
    try:
        log = run.metrics_log()
        log.cut_back({"bytes": 0, "sha256": NO_BYTES})
        log.append({"loss": 1.0})
        log.position()
        log.close()
        save(run.checkpoints, 1)
    finally:
        run.close()


@pytest.mark.parametrize("number", range(70))
def test_a_kill_and_a_power_loss_after_the_next_save(number: int, tmp_path: Path) -> None:
    """What a killed process had named but not flushed is flushed by the one that goes on."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Volatile(root, number)
    path = root / "runs" / "run"
    with files.using(disk):
        try:
            begin_and_save(path)
        except Died:
            disk.fatal, disk.dead = None, False
            begin_and_save(path)
    disk.after_power_loss(tmp_path / "left", "lost")
    run = RunFolder.open(tmp_path / "left" / "runs" / "run", write=False)
    assert run.metrics.read_text() == '{"loss": 1.0}\n'
    found = checkpoint.newest_verified(run.checkpoints, repair=False)
    assert found is not None
    assert tag_of(found) == 1
