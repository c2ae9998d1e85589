"""W&B: every row once, however often its process, its service or its server was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from etude.core.errors import EtudeError, UsageError
from etude.core.output import notices
from etude.training.logs import outputs as apart
from etude.training.logs.outputs import ApartLog, Background, LoggedRun, LogsConfig
from log_points import read_records, row_points, rows_like_a_run, wandb_points
from wandb_server import WandbServer

pytest.importorskip("wandb", reason="wandb is not installed: pip install etude[wandb]")

from etude.training.logs import wandb as wandb_log
from etude.training.logs.wandb import WandbLog

ROWS = rows_like_a_run(8)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own cache and settings are not those of the person who runs the tests."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))


def make(folder: Path, said: list[str] | None = None) -> WandbLog:
    folder.mkdir(exist_ok=True)
    say = (lambda text: None) if said is None else said.append
    return WandbLog(folder, "etude", "a run", "offline", {"seed": 0}, say)


def follow(log: WandbLog, history: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    log.begin(history)
    for row in rows:
        log.write(row)
    log.close()


def test_rows_are_sent_once(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "run"
    follow(make(folder, said), [], ROWS[:5])
    assert "wandb sync" in said[0]
    name = json.loads((folder / "wandb.json").read_text())["id"]
    # Cut back to row 3, replayed from there, and ended.
    follow(make(folder), ROWS[:3], ROWS[3:])
    assert wandb_points(folder) == sorted(row_points(ROWS))
    assert json.loads((folder / "wandb.json").read_text())["id"] == name


def test_a_strangers_folder_does_not_lead_it_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = make(folder)
    state = {"id": "../../../x", "confirmed": -1, "sent": -1, "uploaded": False}
    (folder / "wandb.json").write_text(json.dumps(state))
    with pytest.raises(EtudeError, match="its id is not a W&B id"):
        log.begin([])
    state |= {"id": "x", "unfinished": "../../important"}
    (folder / "wandb.json").write_text(json.dumps(state))
    with pytest.raises(EtudeError, match="its folder does not belong to W&B"):
        log.begin([])
    (folder / "wandb.json").unlink()
    (folder / "wandb").mkdir()
    (folder / "wandb" / "settings").write_text("[default]\nbase_url = https://example.com\n")
    with pytest.raises(UsageError, match="would tell W&B where to send the run"):
        log.begin([])


def test_what_a_killed_process_had_buffered_is_sent_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from log_points import rows_like_a_run\n"
        "from etude.training.logs.wandb import WandbLog\n"
        "log = WandbLog(Path(sys.argv[1]), 'etude', 'a run', 'offline', {})\n"
        "log.begin([])\n"
        "for row in rows_like_a_run(8)[:5]: log.write(row)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = Path(__file__).parent
    # The child has a W&B process of its own, which dies with it.
    env = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    env["PYTHONPATH"] = os.pathsep.join([str(here.parents[1] / "lib"), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script, str(folder), str(here)]
    subprocess.run(command, check=False, env=env)
    assert json.loads((folder / "wandb.json").read_text())["sent"] == ROWS[4]["timesteps"]
    follow(make(folder), ROWS[:4], ROWS[4:])
    assert wandb_points(folder) == sorted(row_points(ROWS))


def test_rows_of_a_killed_process_of_an_earlier_version_are_sent_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    follow(make(folder), [], ROWS[:5])
    state = json.loads((folder / "wandb.json").read_text())
    del state["unfinished"]
    state["confirmed"] = ROWS[2]["timesteps"]  # and rows 4 and 5 were in its buffers
    (folder / "wandb.json").write_text(json.dumps(state))
    for file in folder.glob("wandb/*run-*/*.wandb"):
        file.unlink()
    follow(make(folder), ROWS[:5], ROWS[5:])
    assert wandb_points(folder) == sorted(row_points(ROWS[3:]))


def test_files_that_were_synced_and_removed_are_not_missed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    follow(make(folder), [], ROWS[:5])
    for file in folder.glob("wandb/*run-*/*.wandb"):
        file.unlink()
    follow(make(folder), ROWS[:3], ROWS[3:])
    assert wandb_points(folder) == sorted(row_points(ROWS[5:]))


def test_the_final_policy_is_an_artifact_once(tmp_path: Path) -> None:
    folder, policy = tmp_path / "run", tmp_path / "policy"
    policy.mkdir()
    (policy / "contract.json").write_text("{}")
    for history, rows in (([], ROWS), (ROWS, [])):
        log = make(folder)
        log.begin(history)
        for row in rows:
            log.write(row)
        log.finish(policy)
        log.close()
    files = list(folder.glob("wandb/*run-*/*.wandb"))
    assert len(files) == 1  # a finished run is not opened again
    kept = [r.artifact for r in read_records(files[0]) if r.WhichOneof("record_type") == "artifact"]
    assert [(a.type, a.name, sorted(a.aliases)) for a in kept] == [
        ("model", "a-run-policy", ["final", "latest"])
    ]
    assert [entry.path for entry in kept[0].manifest.contents] == ["contract.json"]
    assert wandb_points(folder) == sorted(row_points(ROWS))


def test_a_missing_wandb_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install etude\[wandb\]"):
        wandb_log.require()


def test_the_final_evaluation_is_in_the_summary_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log, policy = make(folder), tmp_path / "policy"
    policy.mkdir()
    (policy / "weights").write_text("w")
    log.begin([])
    log.write(ROWS[0])
    log.finish(policy)
    log.close()
    drawn = tmp_path / "success.png"
    Image.new("RGB", (8, 5)).save(drawn)
    for _ in range(2):  # as a resume of a finished run does
        make(folder).add_final(512, {"final/mean_reward": 2.5}, {"final/success": drawn})
    found = [
        float(json.loads(item.value_json))
        for file in sorted(folder.glob("wandb/*run-*/*.wandb"))
        for record in read_records(file)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
        if "final/mean_reward" in (item.key, "/".join(item.nested_key))
    ]
    assert found == [2.5]
    (copied,) = folder.glob("wandb/*run-*/files/media/images/final/success*.png")
    assert copied.read_bytes() == drawn.read_bytes()
    assert json.loads((folder / "wandb.json").read_text())["uploaded"]
    assert wandb_points(folder) == sorted(row_points(ROWS[:1]))


def test_a_film_is_sent_once_with_the_next_row(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    place = folder / "evaluations" / "000000000100-film"
    place.mkdir(parents=True)
    first, second = (Image.new("RGB", (8, 5), color) for color in ("red", "blue"))
    first.save(place / "film.gif", save_all=True, append_images=[second])
    follow(make(folder), [], ROWS[:2])
    follow(make(folder), ROWS[:2], ROWS[2:4])
    (sent,) = folder.glob("wandb/*run-*/files/media/videos/film*.gif")
    assert sent.read_bytes() == (place / "film.gif").read_bytes()
    assert json.loads((folder / "wandb.json").read_text())["filmed"] == 100


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    server = WandbServer()
    wandb_log.end_service()  # W&B reads the variables once for as long as a service lives
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(wandb_log, "END", 8.0)
    monkeypatch.setattr(apart, "FIRST_PAUSE", 0.0)
    yield server
    server.stop()
    wandb_log.end_service()


def online(folder: Path, rows: list[dict[str, Any]]) -> ApartLog:
    """As a run has it; rows: those of metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    make = partial(WandbLog, folder, "etude", "a run", "online", {"seed": 0})
    return ApartLog(Background(make, 8.0, wandb_log.end_service), "wandb", lambda: rows)


def until(condition: Any) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "this did not come about within 30 s"
        time.sleep(0.02)


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["timesteps"] for row in rows]


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_dies_or_hangs_is_started_again(
    strike: signal.Signals, tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(notices, "add", told.append)
    written = list[dict[str, Any]]()
    log = online(tmp_path / "run", written)
    log.begin([])
    sent = tmp_path / "run" / "wandb.json"
    for row in ROWS:
        written.append(row)
        log.write(row)
        if row is ROWS[2]:
            until(lambda: sent.exists() and json.loads(sent.read_text())["sent"] >= 512)
            wandb_log._service().send_signal(strike)
    log.close()
    # What it has not got by the end, a resume sends.
    resumed = online(tmp_path / "run", written)
    resumed.begin(written)
    resumed.close()
    assert sorted(set(server.steps)) == steps(ROWS)
    assert told[0].startswith("The log wandb failed, and the run goes on without it: ")
    assert len([line for line in told if "failed" in line]) == 1


def test_a_server_that_is_away_costs_the_start_nothing(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(notices, "add", told.append)
    monkeypatch.setattr(wandb_log, "START", 3.0)
    server.mood = "hangs"
    log, begin = online(tmp_path / "run", ROWS), time.monotonic()
    log.begin([])
    for row in ROWS[:4]:
        log.write(row)
    assert time.monotonic() - begin < 1.0
    log.close()
    assert time.monotonic() - begin < 12.0
    (sentence,) = told
    assert "etude resume" in sentence or "It has not answered" in sentence
    # It answers again by the time of a resume.
    server.mood = "well"
    resumed = online(tmp_path / "run", ROWS)
    resumed.begin(ROWS)
    resumed.close()
    assert server.steps == steps(ROWS)
    assert len(told) == 1


def test_its_variables_count_where_the_recipe_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME and WANDB_DIR."""
    for name, value in (("PROJECT", "arms"), ("ENTITY", "lab"), ("NAME", "mine")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    said: list[str] = []

    def opened(**fields: Any) -> Any:
        (kind,) = LogsConfig(tensorboard=False, wandb=True, **fields).kinds()
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        log: Any = kind.open(
            LoggedRun(folder, {"name": "ppo"}, said.append, "Hopper-v5, ppo")
        ).writer
        return log._make()

    log = opened()
    log.begin([])
    assert (log._run.project, log._run.settings.entity, log._run.name) == ("arms", "lab", "mine")
    log.write(ROWS[0])
    log.close()
    assert f"{tmp_path / 'elsewhere'}/wandb/offline-run-*" in said[0]
    assert [*(tmp_path / "elsewhere" / "wandb").glob("offline-run-*")]
    assert not (tmp_path / "run" / "wandb").exists()
    monkeypatch.delenv("WANDB_NAME")
    assert opened()._name == "Hopper-v5-ppo-run"
    # What the recipe has comes first.
    assert opened(wandb_project="legs")._project == "legs"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert LogsConfig(tensorboard=False, wandb=True).kinds() == []
    assert opened(wandb_mode="offline")._mode == "offline"
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    (kind,) = LogsConfig(tensorboard=False, wandb=True).kinds()
    with pytest.raises(UsageError, match="WANDB_MODE is 'sometimes': set it to online, offline"):
        kind.check()
