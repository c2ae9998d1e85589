"""The comparison with other libraries at its smallest size, and the page that is made from it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import page, prepare, run, update_profile  # isort: skip
from benchmarks.progress import Progress  # isort: skip
from benchmarks.tasks import TASKS  # isort: skip


def results_of(arguments: list[str], out: Path) -> tuple[int, list[dict[str, Any]]]:
    code = run.main([*arguments, "--here", "--patience", "0", "--out", str(out)])
    return code, json.loads(out.read_text())["runs"]


def test_each_library_has_one_line_in_all_charts() -> None:
    assert {*page.LINES} >= {*run.PEERS}
    assert len({str(line) for line in page.LINES.values()}) == len(page.LINES)
    named: dict[str, set[str]] = {}
    for path in page.IMAGES.glob("benchmark-[!k]*.svg"):
        line = r"stroke: (#\w+)[^<]*/>\s*</g>\s*<g id=[^>]*>\s*<text[^>]*>([a-z]\w+)<"
        pairs = re.findall(line, path.read_text())
        for color, peer in pairs:  # of the legend
            named.setdefault(peer, set()).add(color)
    assert len(named) > 3
    assert all(colors == {page.LINES[peer][0]} for peer, colors in named.items())


def test_peers_of_this_environment_end_with_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    peers = ["etude", "cleanrl_style", "stable_baselines3"]
    wanted = ["--peers", *peers, "--tasks", "halfcheetah", "--measures", "speed"]
    wanted += ["--smallest", "--rounds", "1", "--steps", "512"]
    code, runs = results_of(wanted, out)
    assert code == 0
    assert [record["peer"] for record in runs] == peers
    for record in runs:
        assert record["error"] is None
        assert record["steps"] == 512
        assert record["steps_per_second"] > 0
        assert record["peak_memory"] > 50 * 2**20
        assert 0 < record["environment_share"] < 1
    before = out.read_text()
    assert run.main([*wanted, "--here", "--out", str(out)]) == 0  # all of it is there
    assert json.loads(out.read_text()) == json.loads(before)
    longer = [*wanted[:-1], "1024", "--peers", "cleanrl_style"]  # another run than the one there
    code, runs = results_of(longer, out)
    assert code == 0
    assert [record["steps"] for record in runs] == [512, 512, 1024]
    text, _ = page.render(json.loads(before))
    for peer in peers:
        assert f"| {peer}" in text


def test_all_peers_take_their_turn_before_one_is_timed_again() -> None:
    chosen = {"measures": ["speed", "kill"], "tasks": ["ant"], "peers": ["etude", "skrl"]}
    order = run.jobs(argparse.Namespace(**chosen, rounds=2, seeds=5))
    turns = [(job.measure, job.peer, job.seed) for job in order]
    assert turns == [
        ("speed", "etude", 0),
        ("speed", "skrl", 0),
        ("speed", "etude", 1),
        ("speed", "skrl", 1),
        ("kill", "etude", 0),
        ("kill", "skrl", 0),
    ]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("raise SystemExit('it broke')", "it broke"),
        ("pass", "no figure"),
        ('print(\'{"version": "1"}\')', "no figure"),
        ("import time; time.sleep(60)", "no end within"),
    ],
)
def test_a_broken_runner_is_seen(body: str, fault: str) -> None:
    job = run.Job("speed", "broken", "halfcheetah", 0)
    words = [sys.executable, "-c", textwrap.dedent(body), "--out", "x"]
    outcome = run.execute(words, 1.0, 1)
    record = run.describe(job, words, outcome, 0.0, 1)
    assert fault in record["error"]
    assert "FAILED" in run.told(record)
    text, drawn = page.render({"installs": {}, "runs": [record]})
    assert "| failed |" in text
    assert not drawn


def speaking(*lines: dict[str, Any]) -> list[str]:
    """The words of a runner that prints some lines, and stays for longer than anyone waits."""
    said = "\n".join(map(json.dumps, lines))
    body = f"import time; print({said!r}, flush=True); time.sleep(60)"
    return [sys.executable, "-c", body, "--steps", "1000000", "--out", "x"]


def test_a_runner_that_has_said_its_end_need_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ENDS_WITHIN", 0.2)
    points = [{"seconds": s, "steps": 10**5 * s, "mean": 1.0, "success": None} for s in (1, 2, 9)]
    words = speaking({"version": "1"}, *points, {"end": "cap", "steps": 900_000, "seconds": 9})
    outcome = run.execute(words, 20.0, 1)
    job = run.Job("speed", "a", "halfcheetah", 0)
    assert run.describe(job, words, outcome, 0.0, 1)["error"] is None
    words = speaking(
        {"version": "1"}, *points, {"end": run.LIBRARY_ENDED, "steps": 900_000, "seconds": 9}
    )
    outcome = run.execute(words, 20.0, 1)
    assert "by itself" in run.describe(job, words, outcome, 0.0, 1)["error"]


@pytest.mark.parametrize(
    ("measure", "head", "why"),
    [
        ("score", {"own_engine": True, "resumes": "x"}, "only its speed"),
        ("kill", {"own_engine": False, "resumes": None}, "resumes nothing"),
    ],
)
def test_what_the_page_does_not_use_is_not_trained(
    measure: str, head: dict[str, Any], why: str
) -> None:
    job, words = run.Job(measure, "a", "walk-go1", 0), speaking(head)
    outcome = run.execute(words, 20.0, 1, lambda line: bool(run.why_not(job, line)))
    record = run.describe(job, words, outcome, 0.0, 1)
    assert record["error"] is None
    assert why in record["not_offered"]
    assert why in page.render({"installs": {}, "runs": [record]})[0]


def test_a_resumed_run_knows_the_episodes_before(tmp_path: Path) -> None:
    """Its mean is over the newest 100 episodes of both processes, not of the second alone."""

    def progress(resume: bool) -> Progress:
        return Progress(
            argparse.Namespace(
                task=TASKS["ant"],
                seed=0,
                out=tmp_path,
                resume=resume,
                steps=10**6,
                cap=1e6,
                target=False,
                all_points=True,
            )
        )

    first = progress(False)
    for step in (10, 20, 30):
        first.episode(float(step))
        first.point(step)
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write("[20, [[4")  # a kill cut it
    second = progress(True)
    second.goes_on_from(20)  # the third episode came after the checkpoint
    assert list(second._returns) == [10.0, 20.0]


def test_no_run_without_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--peers", "skrl", "--environments", str(tmp_path), "--out", str(tmp_path / "r")])
    assert "prepare.py skrl" in capsys.readouterr().err


def test_retry_repeats_only_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(job: run.Job, *_: Any) -> dict[str, Any]:
        return {**job._asdict(), "command": "again", "error": "broke again"}

    monkeypatch.setattr(run, "measure", measured)
    out = tmp_path / "results.json"
    failed = [
        {**run.Job("speed", peer, "ant", 0)._asdict(), "command": "once", "error": "broke"}
        for peer in ("skrl", "etude")
    ]
    out.write_text(json.dumps({"installs": {}, "runs": failed}))
    wanted = ["--retry", "--rounds", "1", "--peers", "etude", "--tasks", "ant"]
    wanted += ["--measures", "speed"]
    code, runs = results_of(wanted, out)
    assert code == 1
    assert [(r["peer"], r["error"]) for r in runs] == [("skrl", "broke"), ("etude", "broke again")]


def test_speed_leaves_out_the_start_and_the_warm_up() -> None:
    task = TASKS["pick-place-sac"]
    rates = [[10.0, 0], [11.0, 5_000], [12.0, 5_120], [20.0, 6_000], [32.0, 7_200]]
    assert run.speed_of([[*point, None, None] for point in rates], task) == 100.0
    assert run.speed_of([[1.0, 9_000, None, None]], task) is None


def test_the_page_says_how_far_runs_of_one_library_lie_apart() -> None:
    def timed(peer: str, measure: str, *speeds: float) -> list[dict[str, Any]]:
        shared = {"peer": peer, "task": "ant", "measure": measure, "error": None}
        return [{**shared, "steps_per_second": speed} for speed in speeds]

    once = timed("skrl", "speed", 5.0) + timed("skrl", "kill", 50.0)
    assert page.spread(once) == ""
    said = page.spread([*once, *timed("etude", "speed", 10.0, 15.0), *timed("sbx", "score", 4, 3)])
    assert "1.4 times the steps/s" in said
    assert "1.5 times (etude on ant)" in said


def test_a_kill_is_compared_at_equal_steps() -> None:
    def outcome(*points: tuple[int, float], **last: Any) -> run.Outcome:
        lines = [{"seconds": 1.0, "steps": s, "mean": m, "success": None} for s, m in points]
        return run.Outcome([*lines, {"end": "steps", **last}], 0, None)

    alone = outcome((10, 1.0), (20, 2.0), (30, 3.0), fingerprint="a")
    first = outcome((10, 1.0), (20, 2.0))
    second = outcome((20, 2.5), (30, 3.0), fingerprint="a")
    second.lines.insert(0, {"went_on_from": 10})
    found = run.compare(alone, first, second, TASKS["ant"])
    assert found["killed_at"] == 20
    assert found["went_on_from"] == 10
    assert found["largest_difference"] == 0.5
    assert found["final_difference"] == 0.0
    assert found["bit_equal"] is True


def test_medians_count_runs_that_never_got_there() -> None:
    record = {"steps_per_second": 10.0, "peak_memory": 2**20, "version": "1", "own_engine": False}
    record["peer"] = "a"
    runs = [{**record, "measure": "score", "reached": r} for r in ([5.0, 50], [7.0, 70], None)]
    assert page.figures("a", runs)[1:4] == ["7", "70", "2 of 3"]
    assert page.figures("a", runs[1:])[1:4] == ["-", "-", "1 of 2"]


def test_of_an_error_the_page_shows_the_line_that_says_it() -> None:
    error = "Traceback\n  in parse\nFileNotFoundError: no a|b\n\nFor more set FULL_ERROR=1.\n"
    killed = {**run.Job("kill", "a", "ant", 0)._asdict(), "error": error}
    assert "| failed: `FileNotFoundError: no a\\|b` |" in page.kills([killed])
    assert page.fault("it broke\nat the end") == "at the end"


def test_gradient_steps_are_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, steps in {"SKIPPED": 1, "TIMED": 3, "WATCHED": 2}.items():
        monkeypatch.setattr(update_profile, name, steps)
    monkeypatch.setattr(update_profile, "kept", lambda **about: {"computation": "here"})
    task = replace(TASKS["halfcheetah"].smallest(), update_epochs=4)
    found = update_profile.measure(task, tmp_path)
    assert found["products"] == 16  # of two networks of three layers, forwards and backwards
    assert found["products_milliseconds"] > 0
    assert found["milliseconds"] > 0
    found |= {"peer": "etude", "task": task.name}
    said = page.profiled(found)
    assert "16 matrix products" in said
    monkeypatch.setattr(page, "is_older", lambda profile: not profile["begins"])
    assert page.OLDER not in page.profiled({**found, "begins": ["known"]})
    assert page.OLDER in page.profiled({**found, "begins": []})


def test_time_in_environments_is_told_apart() -> None:
    record = {"steps_per_second": 500.0, "environment_share": 0.75}
    assert page.spent([record]) == ["1,500", "500"]
    assert page.spent([{"steps_per_second": 500.0, "environment_share": None}]) == ["", ""]


def test_the_page_is_what_the_results_make() -> None:
    text, drawn = page.render(run.read(run.RESULTS))
    assert page.PAGE.read_text() == text, "python benchmarks/page.py"
    found = {path.name: path.read_bytes() for path in page.IMAGES.glob("benchmark-*.svg")}
    assert found == drawn, "python benchmarks/page.py"


def test_each_library_has_one_colour_and_pages_begin_with_figures() -> None:
    assert set(run.PEERS) <= set(page.LINES)
    assert len(set(page.LINES.values())) == len(page.LINES)
    results = run.read(run.RESULTS)
    text, drawn = page.render(results)
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings[0] == "## In short"
    assert headings.index("## Rules") > headings.index("## After kill -9 at half time")
    assert text.index(page.SECONDS_PICTURE) < text.index("| task | seconds")
    # A library has the colour of its bar in the curves too; bars of runs without a score are pale.
    bars = drawn[page.SECONDS_PICTURE].decode()
    for task, peers in page.scored_peers(results["runs"]).items():
        curves = drawn[f"benchmark-{task}.svg"].decode()
        assert all(page.LINES[peer][0] in curves and page.LINES[peer][0] in bars for peer in peers)
    never = [
        scored
        for peers in page.scored_peers(results["runs"]).values()
        for scored in peers.values()
        if page.seconds_of(scored)[0] == float("inf")
    ]
    assert bars.count("opacity: 0.4") == len(never) == bars.count(">over ")


def test_no_result_names_a_folder_of_a_machine() -> None:
    said = 'File "/home/me/.venv/lib/python3.11/site-packages/a/b.py", line 3'
    assert run.without_paths(said) == 'File "a/b.py", line 3'
    for folder in (run.ROOT / "gates" / "results", run.RESULTS.parent):
        for path in folder.rglob("*.json"):
            assert not re.search(r"/(root|home|work|tmp)/", path.read_text()), path


def test_every_peer_has_its_versions() -> None:
    for peer in run.PEERS:
        wanted = prepare.REQUIREMENTS / f"{prepare.SHARED.get(peer, peer)}.txt"
        lines = [line for line in wanted.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert [line for line in lines if "==" not in line] == []
