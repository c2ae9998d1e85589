"""Ten runs of CI do all that rotates, and catch what is broken in any part of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rotation
from gates.lib import smallest
from rotation import PARTS, Parts, chosen

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With 23 commits, the last of them a merge of a branch with three commits."""
    folder = tmp_path_factory.mktemp("repository")
    commit = ("commit", "--quiet", "--allow-empty", "--message")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for number in range(22):
        git(folder, *commit, f"change {number}")
    git(folder, "checkout", "--quiet", "-b", "branch", "HEAD~3")
    for number in range(3):
        git(folder, *commit, f"of the branch {number}")
    git(folder, "checkout", "--quiet", "main")
    git(folder, "merge", "--quiet", "--no-ff", "--message", "a merge", "branch")
    return folder


def git(folder: Path, *arguments: str) -> str:
    person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


def heads(folder: Path) -> list[str]:
    """The commits of main, the newest last."""
    return git(folder, "rev-list", "--first-parent", "--reverse", "main").split()


def test_any_ten_successive_commits_are_in_ten_parts(repository: Path) -> None:
    parts = []
    for head in heads(repository):
        git(repository, "checkout", "--quiet", head)
        parts += chosen("commit", repository)
    assert len(parts) == 23
    for first in range(len(parts) - PARTS + 1):
        assert sorted(parts[first : first + PARTS]) == list(range(PARTS))


@pytest.mark.parametrize("at_once", [1, 2, 5, 10, 12])
def test_no_part_is_left_out_where_several_commits_arrive_at_once(
    repository: Path, at_once: int
) -> None:
    """Ten commits later, in however many runs, all parts were done."""
    commits, seen = heads(repository), set()
    for last in range(0, PARTS, at_once):
        git(repository, "checkout", "--quiet", commits[last + at_once])
        seen |= chosen(f"since:{commits[last]}", repository)
    assert seen == set(range(PARTS))


def test_a_checkout_without_its_history_does_the_part_of_the_day(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", "shallow")
    for folder in (tmp_path, tmp_path / "shallow"):
        days = set()
        for day in range(PARTS):
            monkeypatch.setattr(rotation.time, "time", lambda day=day: 86_400.0 * (20_000 + day))
            days |= chosen("commit", folder)
        assert days == set(range(PARTS))


def test_the_same_commit_is_in_the_same_part(repository: Path) -> None:
    assert chosen("commit", repository) == chosen("commit", repository)
    assert chosen("7") == {7}
    assert chosen("all") == set(range(PARTS))


def test_every_name_is_in_one_part_whether_it_was_recorded_or_not() -> None:
    recorded = rotation.load()["rotated"]
    names = [*recorded, *(f"test_new.py::test_{number}" for number in range(200))]
    parts = Parts(recorded)
    assert {parts[name] for name in names} == set(range(PARTS))
    assert [parts[name] for name in names] == [Parts(recorded)[name] for name in names]


def test_a_new_test_moves_no_other_to_another_part() -> None:
    recorded = {f"test_{number}": 1.0 + number % 7 for number in range(100)}
    before, after = Parts(recorded), Parts(recorded)
    assert after["test_new"] in range(PARTS)
    assert [before[name] for name in recorded] == [after[name] for name in recorded]


def test_parts_take_equally_long() -> None:
    recorded = rotation.load()["rotated"]
    minutes = Parts(recorded).minutes
    assert max(minutes) - min(minutes) <= max(recorded.values()) / 60
    assert sum(minutes) == pytest.approx(sum(recorded.values()) / 60)


def test_ten_parts_hold_all_gates_once() -> None:
    names = smallest.gates()
    found = Counter(name for part in range(PARTS) for name in smallest.rotated(names, {part}))
    assert found == Counter(names)
    assert smallest.rotated(names, set(range(PARTS))) == names


CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
import rotation
from pathlib import Path

rotation.RECORD = Path(__file__).with_name("seconds.json")

def pytest_addoption(parser):
    rotation.add_options(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "rotated: ")
    config.pluginmanager.register(rotation.Plugin(config))
"""
TOY = """
import pytest
from product import promise

@pytest.mark.rotated
@pytest.mark.parametrize("number", range(40))
def test_rotated(number):
    assert promise(number)

@pytest.mark.rotated(together=True)
@pytest.mark.parametrize("number", range(5))
def test_together(number):
    assert promise(number)

def test_always():
    assert promise(0)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tests, all but one of which rotate."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "conftest.py").write_text(CONFTEST.format(tests=str(TESTS)))
    (folder / "test_toy.py").write_text(TOY)
    return folder


def run(folder: Path, rotation: str, broken: set[int], *options: str) -> tuple[int, list[str]]:
    """(exit code, failed tests) of a part of the tests; numbers for which the product is broken."""
    (folder / "product.py").write_text(f"def promise(number):\n    return number not in {broken!r}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=."]
    command += [f"--rotation={rotation}", "-rf", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return done.returncode, failed


def test_what_is_broken_in_any_part_is_caught_within_ten_runs(toy: Path) -> None:
    """A product that breaks every promise: each test fails in one run of ten, or in all."""
    found = Counter()
    for part in range(PARTS):
        code, failed = run(toy, str(part), set(range(40)))
        assert code == 1
        found.update(failed)
        assert sum("together" in name for name in failed) in (0, 5)
    rotated = {f"test_toy.py::test_rotated[{number}]": 1 for number in range(40)}
    together = {f"test_toy.py::test_together[{number}]": 1 for number in range(5)}
    assert found == Counter({**rotated, **together, "test_toy.py::test_always": PARTS})


def test_one_broken_promise_is_caught_by_its_part_alone(toy: Path) -> None:
    part = Parts({})["test_toy.py::test_rotated[17]"]
    assert run(toy, str(part), {17}) == (1, ["test_toy.py::test_rotated[17]"])
    assert run(toy, str(part + 1), {17}) == (0, [])
    assert run(toy, "all", {17}) == (1, ["test_toy.py::test_rotated[17]"])


def test_what_took_longer_is_left_out_where_it_is_not_wanted(toy: Path) -> None:
    (toy / "seconds.json").write_text('{"always": {"test_toy.py::test_always": 3.0}}')
    try:
        assert run(toy, "0", {0}, "-k", "always", "--at-most=3")[0] == 1
        assert run(toy, "0", {0}, "-k", "always", "--at-most=2.9")[0] == 5  # no test is left
        assert run(toy, "all", {1}, "-k", "rotated", "--at-most=1")[0] == 1  # that is for others
    finally:
        (toy / "seconds.json").unlink()


def test_a_record_says_how_long_tests_took_and_balances_the_parts(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "seconds.json"
    for path, seconds in (("test_toy.py::test_always", 0.3), ("test_b.py::test_old", 2.0)):
        taken = rotation.load(file)
        taken["always"][path] = seconds
        rotation.save(taken, file)
    assert run(toy, "all", set(), f"--record={file}") == (0, [])
    assert rotation.load(file)["always"] == {"test_b.py::test_old": 2.0}  # the other took no time
    taken = rotation.load(file)
    taken["rotated"] = {f"test_toy.py::test_rotated[{number}]": 6.0 for number in range(40)}
    rotation.save(taken, file)
    with pytest.raises(SystemExit, match="not of all"):
        rotation.main([str(file)])
    rotation.add_gate("ranks", 60.0, file)
    monkeypatch.setattr(rotation, "RECORD", tmp_path / "kept.json")
    assert rotation.main([str(file)]) == 0
    told = capsys.readouterr().out
    assert "part 3      tests   0.4 min" in told
    assert "part 0      tests   0.4 min, gates  1.0 min" in told
    assert rotation.load(tmp_path / "kept.json") == rotation.load(file)
