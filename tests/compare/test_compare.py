"""`etude compare`: groups of seeds, what is refused, and what is written."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from etude.cli.main import main
from etude.compare import reading
from etude.planning import FREE
from etude.rollout.placement import Placement
from etude.runs.folder import RunFolder

EVALS = (0.0, 0.5, 0.9, 0.95)
RECIPE = {
    "name": "toy",
    "seed": 0,
    "env": {"kind": "reach", "tolerance": 0.02, "reward": {"progress": 10.0}},
    "algorithm": {"kind": "ppo", "learning_rate": 0.001},
    "collector": {"kind": "local", "threads": 2, "num_envs": 8},
    "logs": {"console": "auto"},
}


def make_run(
    path: Path,
    seed: int = 0,
    evals: tuple[float, ...] = EVALS,
    changes: dict[str, Any] | None = None,
) -> Path:
    """A run's folder without a training: an evaluation every 1,000 steps, each after 10 s."""
    recipe = json.loads(json.dumps(RECIPE)) | {"seed": seed}
    for name, value in (changes or {}).items():
        section, _, field = name.partition(".")
        if field:
            recipe[section][field] = value
        else:
            recipe[section] = value
    manifest = {"cpu": {"model": "fast"}, "versions": {"etude": "0.1.0"}}
    RunFolder.create(path, yaml.safe_dump(recipe), "plan\n", {}, manifest).close()
    rows = [
        {
            "iterations": 2 * k + 1 + odd,
            "timesteps": 1000 * k + 500 + 500 * odd,
            "rollout/ep_rew_mean": 10.0 * value,
            "time/time_elapsed": 10.0 * k + 5 + 5 * odd,
            **({"eval/success_rate": value, "eval/mean_reward": 20.0 * value} if odd else {}),
        }
        for k, value in enumerate(evals)
        for odd in (0, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of a good learning rate, and three of a bad one."""
    for seed in range(3):
        make_run(tmp_path / f"good-s{seed}", seed, (0.1, 0.6 + seed / 10, 0.9, 0.94 + seed / 50))
        bad = {"algorithm.learning_rate": 0.1}
        make_run(tmp_path / f"bad-s{seed}", seed, (0.0, 0.1, 0.2, 0.3 + seed / 10), bad)
    (tmp_path / "good-s0.log").write_text("beside the runs")
    return tmp_path


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["compare", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["compare", *map(str, arguments)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_runs_that_differ_in_their_seed_are_a_group(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(capsys, *runs.iterdir())
    assert found["metric"] == "eval/success_rate"
    assert found["at"] == 4000
    assert found["differences"] == {"algorithm.learning_rate": ["0.1", "0.001"]} or found[
        "differences"
    ] == {"algorithm.learning_rate": ["0.001", "0.1"]}
    good = next(group for group in found["groups"] if group["label"] == "learning_rate 0.001")
    assert [run["seed"] for run in good["runs"]] == [0, 1, 2]
    assert good["iqm"]["value"] == good["mean"]["value"] == pytest.approx(0.96)
    assert good["curve"]["steps"] == [1000, 2000, 3000, 4000]
    assert good["curve"]["iqm"] == pytest.approx([0.1, 0.7, 0.9, 0.96])


def test_steps_and_time_to_success(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, runs / "good-*", runs / "bad-*", "--success", "0.7")
    good, bad = found["groups"]
    each = [(run["steps_to_success"], run["seconds_to_success"]) for run in good["runs"]]
    assert each == [(3000, 30.0), (2000, 20.0), (2000, 20.0)]
    assert (good["reached"], good["steps_to_success"], good["seconds_to_success"]) == (3, 2000, 20)
    assert (bad["reached"], bad["steps_to_success"]) == (0, None)
    (pair,) = found["probability_of_improvement"]
    low = 3 / (3 + 1.959963984540054**2)  # Wilson's of 3 in 3
    expected = {"of": "A", "over": "B", "value": 1.0, "low": low, "high": 1.0}
    expected |= {"p_value": 0.1, "smallest_p_value": 0.1}  # 2 of the 20 ways to draw 3 of 6
    assert pair == pytest.approx(expected)


def test_the_table_says_it_in_words(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["compare", str(runs / "good-*"), str(runs / "bad-*")]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("A "))
    assert "learning_rate 0.001 3 96.0% 96.0%" in " ".join(line.split())
    assert "3 of 3 3,000 0:30" in " ".join(line.split())
    assert (
        "A scores higher than B with probability 1.00 (95 % interval 0.44 to 1.00; permutation "
        "test p = 0.1). 3 against 3 runs cannot give a p below 0.1: too few to decide, 4 against "
        "4 are the fewest."
    ) in " ".join(text.split())
    assert "algorithm.learning_rate  0.001  0.1" in text


def test_a_narrow_table_is_still_one(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", str(runs / "good-*"), str(runs / "bad-*")]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("A "))
    assert " ".join(line.split()).startswith("A learning_rate")
    assert len(text.splitlines()) < 15


def test_what_changes_no_result_makes_no_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", 0)
    other = {"logs": {"console": "plain"}, "collector.threads": 1, "name": "other"}
    make_run(tmp_path / "b", 1, changes=other)
    found = compared(capsys, tmp_path)
    assert len(found["groups"]) == 1
    assert any("collector.threads is 1 and 2" in note for note in found["notes"])
    assert {f"collector.{name}" for name in Placement.model_fields} < set(FREE)


def test_folders_can_make_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two versions of a program have the same recipes."""
    for name, last in (("before", 0.5), ("after", 0.6)):
        (tmp_path / name).mkdir()
        for seed in range(3):
            make_run(tmp_path / name / f"s{seed}", seed, (0.1, last + seed / 10))
    found = compared(capsys, tmp_path / "before", tmp_path / "after", "--by", "folder")
    assert [group["label"] for group in found["groups"]] == ["before", "after"]
    assert found["probability_of_improvement"][0]["value"] == pytest.approx(2 / 9)


def test_budgets_must_be_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "long", 0)
    make_run(tmp_path / "short", 1, EVALS[:2])
    said = refusal(capsys, tmp_path)
    assert "different budgets" in said
    assert "--at 2000" in said
    found = compared(capsys, tmp_path, "--at", "2000")
    assert [run["score"] for run in found["groups"][0]["runs"]] == [0.5, 0.5]
    assert "before --at 4,000" in refusal(capsys, tmp_path, "--at", "4000")


def test_tasks_must_be_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 0, changes={"env.tolerance": 0.05})
    said = refusal(capsys, tmp_path)
    assert "different tasks: env.tolerance is 0.02 and 0.05" in said
    assert len(compared(capsys, tmp_path, "--any-task")["groups"]) == 2


def test_success_means_the_same_whatever_the_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 0, changes={"env.reward": {"progress": 1.0}})
    assert compared(capsys, tmp_path)["differences"] == {"env.reward.progress": ["10.0", "1.0"]}
    assert "different tasks" in refusal(capsys, tmp_path, "--metric", "eval/mean_reward")


def test_a_copy_is_no_second_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 0)
    assert "are the same run, of seed 0: leave one out" in refusal(capsys, tmp_path)


def test_mistakes_are_answered(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"There is no run {runs / 'nothing'}." in refusal(capsys, runs / "nothing")
    (runs / "hollow").mkdir()
    assert "is not a run and holds none" in refusal(capsys, runs / "hollow")
    assert "no run that matches" in refusal(capsys, runs / "x*")
    assert "has no metric 'nope'" in refusal(capsys, runs, "--metric", "nope")
    assert "its suffix must be" in refusal(capsys, runs, "-o", "a.gif")
    make_run(runs / "empty", 9, ())
    assert "has no rows yet" in refusal(capsys, runs)


def test_files(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [tmp_path / "made" / f"c.{ending}" for ending in ("svg", "png", "csv", "json")]
    assert main(["compare", str(runs), "-o", *map(str, out)]) == 0
    picture = ElementTree.fromstring(out[0].read_bytes())
    texts = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "A  learning_rate 0.1, 3 runs" in texts
    assert out[1].read_bytes().startswith(b"\x89PNG")
    lines = [*csv.reader(io.StringIO(out[2].read_text()))]
    assert len(lines) == 1 + 6 * 4
    assert lines[0] == ["group", "label", "run", "seed", "steps", "eval/success_rate"]
    assert json.loads(out[3].read_text())["groups"][0]["label"] == "learning_rate 0.1"


def test_what_a_recipe_says_is_never_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "<script>alert(1)</script>[red]\x1b[31m&"
    make_run(tmp_path / "a", 0)
    make_run(tmp_path / "b", 0, changes={"algorithm.learning_rate": hostile})
    picture = tmp_path / "c.svg"
    assert main(["compare", str(tmp_path), "-o", str(picture)]) == 0
    ElementTree.fromstring(picture.read_bytes())
    assert b"<script" not in picture.read_bytes()
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[red]" in said


def test_a_recipe_that_repeats_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "a", 0)
    lines = ["a: &a0 {x: 1, y: 2, z: 3, w: 4}"]
    lines += [
        f"b{i}: &a{i + 1} {{{', '.join(f'k{j}: *a{i}' for j in range(8))}}}" for i in range(9)
    ]
    (path / "recipe.yaml").write_text("\n".join(lines))
    assert "holds more than" in refusal(capsys, path)


def test_links_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_run(tmp_path / "a", 0)
    (tmp_path / "elsewhere").write_text("{}")
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(capsys, path)


def test_ten_runs_take_less_than_two_seconds_and_no_torch(tmp_path: Path) -> None:
    for seed in range(5):
        for rate in (0.001, 0.1):
            evals = tuple(k / 300 * (1 - rate) + seed / 100 for k in range(300))
            changes = {"algorithm.learning_rate": rate}
            make_run(tmp_path / f"{rate}-{seed}", seed, evals, changes)
    script = """
import sys, time
from etude.cli.main import main
assert main(["compare", sys.argv[1]]) == 0
print(time.process_time())
assert main(["compare", sys.argv[1], "-o", sys.argv[1] + "/c.svg"]) == 0
assert "torch" not in sys.modules and "mujoco" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = [line for line in done.stdout.splitlines() if re.fullmatch(r"[0-9.]+", line)]
    assert float(seconds[0]) < 2.0


def test_records_know_where_runs_are(runs: Path) -> None:
    assert len(reading.find([str(runs)])) == 6
    assert len(reading.find([str(runs), str(runs / "good-s0")])) == 6
    assert len(reading.find([str(runs / "good-s0"), str(runs / "good-s0.log")])) == 1
