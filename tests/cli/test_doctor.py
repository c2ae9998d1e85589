"""The doctor: what is on this machine, in words, in a few seconds."""

from __future__ import annotations

import json
import time
from importlib import metadata
from pathlib import Path

import pytest

from etude.cli import doctor
from etude.cli import main as cli
from etude.cli.doctor import Finding
from etude.core.errors import EtudeError
from etude.runs import files


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    folder = tmp_path_factory.mktemp("here")
    start = time.monotonic()
    found = {finding.name: finding for finding in doctor.examine(folder)}
    assert time.monotonic() - start < 15  # 2 s on a free machine
    assert list(folder.iterdir()) == []
    return found


def test_everything_is_looked_at(findings: dict[str, Finding]) -> None:
    looked = {"versions", "cores", "memory", "GPU", "threads", "disk", "physics", "rendering"}
    assert looked <= findings.keys()
    for finding in findings.values():
        assert finding.found
        assert finding.means
    assert metadata.version("torch") in findings["versions"].found
    assert "MB/s" in findings["disk"].found
    assert "control steps/s" in findings["physics"].found
    assert f"{doctor.usable_cores():g} usable" in findings["cores"].found


def test_the_verdict_names_what_matters(findings: dict[str, Finding]) -> None:
    good, note = Finding("cores", "2", "fine"), Finding("GPU", "1", "not exact", "note")
    bad = Finding("disk", "full", "free some space", "bad")
    can = "This machine can train"
    away = Finding("extra ray", "not installed", "pip install", "optional")
    assert doctor.verdict([good, away]) == f"{can}."
    assert doctor.verdict([good, note]) == f"{can}; see the notes on: GPU."
    assert doctor.verdict([bad, note]) == "Missing or broken, repair first: disk."
    text = doctor.render([*findings.values(), bad])
    assert text.rstrip().endswith("repair first: disk.")
    assert max(len(line) for line in text.splitlines()) <= 100


def test_what_runs_need_is_missing_and_not_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["numpy>=2", "no-such-thing>=3", 'other-thing; extra == "away"']
    monkeypatch.setattr(metadata, "requires", lambda name: listed)
    (missing,) = doctor._missing()
    assert (missing.state, missing.found) == ("bad", "missing: no-such-thing")
    assert missing.means == "required by every run: pip install no-such-thing"
    assert doctor.verdict([missing]) == "Missing or broken, repair first: packages."


def test_extras_name_their_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["numpy>=2", 'numpy; extra == "there"', 'no-such-thing>=3; extra == "away"']
    monkeypatch.setattr(metadata, "requires", lambda name: listed)
    there, away = doctor._extras()
    assert (there.found, there.state) == ("installed", "good")
    assert away.state == "optional"
    before, after = doctor.render([there, away]).split("Optional and not installed")
    assert "extra there" in before
    assert "extra away" not in before
    assert "extra away" in after
    assert away.means == "pip install 'etude[away]' adds no-such-thing"


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    finding = doctor._guarded("disk", lambda: doctor._disk(tmp_path / "missing"))
    assert finding.state == "bad"
    assert "choose another folder" in finding.means

    class Full(files.Disk):
        def write(self, fd: int, data: files.Chunk) -> int:
            raise OSError(28, "No space left on device")

    with files.using(Full()):
        finding = doctor._guarded("disk", lambda: doctor._disk(tmp_path))
    assert "the disk is full" in finding.means
    assert list(tmp_path.iterdir()) == []


def test_waiting_threads_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert doctor._threads().state == "bad"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert doctor._threads().state == "good"


def test_a_renderer_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RENDER", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "RENDER_SECONDS", 0.1)
    started = doctor._start_renderers()
    assert doctor._rendering(started).found == "neither egl nor osmesa"
    assert all(process.poll() is not None for process in started.values())
    monkeypatch.setattr(doctor, "_RENDER", "pass")
    monkeypatch.setattr(doctor, "RENDER_SECONDS", 10.0)
    assert doctor._rendering(doctor._start_renderers()).found == "egl and osmesa"


def test_the_command(
    findings: dict[str, Finding],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda folder: list(findings.values()))
    assert cli.main(["doctor"]) == 0
    assert "physics" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} == set(findings)

    def fail() -> Finding:
        raise EtudeError("No physics here.")

    assert doctor._guarded("physics", fail).means == "No physics here."
