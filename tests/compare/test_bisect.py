"""Where two runs first differ, and which commit changed the bits of a recipe."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import etude
from etude.cli.commits import difference, first_change
from etude.cli.main import main as cli
from etude.compare.bisect import bisect, different_leaves, first_difference
from etude.core.errors import UsageError
from etude.planning.recipe import Recipe
from etude.runs import checkpoint
from toys import tiny_reach

SOURCE = Path(etude.__file__).parent


def recipe() -> Recipe:
    return tiny_reach(4).replace(checkpoint__every="1 iteration", checkpoint__keep_last=9)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return etude.train(recipe(), tmp_path_factory.mktemp("runs") / "a").path


def test_equal_runs_need_no_resume(run: Path, tmp_path: Path) -> None:
    other = etude.train(recipe().replace(collector__threads=1), tmp_path / "b").path
    found = bisect(run, other)
    assert found.difference is None
    assert found.resumes == 0


def test_another_rate_shows_in_the_first_gradient_step(run: Path, tmp_path: Path) -> None:
    rate = recipe().replace(algorithm__learning_rate=2e-4)
    found = bisect(run, etude.train(rate, tmp_path / "b").path)
    first = found.difference
    assert first is not None
    assert (first.iteration, first.phase, first.gradient_step) == (1, "update", 0)
    assert first.tensor == "metrics/train.learning_rate"
    assert found.resumes == 2
    assert "algorithm.learning_rate" in found.notes[0]


def test_a_changed_checkpoint_is_compared_with_the_computation(run: Path, tmp_path: Path) -> None:
    """A number that no code of this machine explains: here written into a checkpoint and all after,
    as by a hardware error while the run trained."""
    path = tmp_path / "b"
    shutil.copytree(run, path, symlinks=True)
    folder = path / "checkpoints"
    for step in (768, 1024):
        arrays, contract, training = checkpoint.load_training(folder / f"{step:012d}")
        moment = training["algorithm"]["optimizer"]["mean"].clone()
        moment[7] += 1.0
        training["algorithm"]["optimizer"]["mean"] = moment
        shutil.rmtree(folder / f"{step:012d}")
        checkpoint.save(folder, step, (arrays, contract), training)
    first = bisect(run, path).difference
    assert first is not None
    assert (first.iteration, first.phase, first.tensor, first.place) == (
        2,
        "update",
        "algorithm/optimizer/mean",
        (7,),
    )
    assert "b has other numbers in its checkpoint of step 768" in first.inferred


def test_runs_of_other_sizes_are_refused(run: Path, tmp_path: Path) -> None:
    other = etude.train(recipe().replace(algorithm__minibatch_size=128), tmp_path / "b").path
    with pytest.raises(UsageError, match=r"different algorithms or sizes.*minibatch_size"):
        bisect(run, other)


def test_the_first_number_of_a_tensor_is_named() -> None:
    a = {"x": np.zeros((2, 3), np.float32), "y": 1}
    b = {"x": np.zeros((2, 3), np.float32), "y": 1}
    b["x"][1, 2] = -0.0  # equal as a number, and not as bits
    (found,) = different_leaves(a, b)
    assert (found.tensor, found.place, found.differing, found.size) == ("x", (1, 2), 1, 6)
    assert first_difference({"update": [a, a]}, {"update": [a, b]}) == ("update", 1, [found])
    assert first_difference({"update": [a]}, {"update": [a, a]}) is not None
    assert first_difference({"collect": [a]}, {"collect": [a]}) is None


def test_the_first_hash_that_differs_has_an_iteration_and_a_phase() -> None:
    log = [("collect", {"x": "1"}), ("iteration", {}), ("collect", {"x": "2", "y": "3"})]
    assert difference(log, log) is None
    assert difference(log, [*log[:2], ("collect", {"x": "2", "y": "4"})]) == (1, "collect", "y")
    # A name that only one version has is no difference.
    assert difference(log, [*log[:2], ("collect", {"x": "2", "z": "5"})]) is None
    assert difference(log, log[:2]) == (1, "log", "the number of phases")


@pytest.mark.rotated
def test_the_commit_that_changes_bits_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "repository"
    shutil.copytree(SOURCE, root / "src" / "etude", ignore=shutil.ignore_patterns("__pycache__"))
    file = root / "src" / "etude" / "rl" / "ppo.py"

    def commit(text: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        (root / "README.md").write_text(text)
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", text]):
            subprocess.run(["git", *words], cwd=root, check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True)
        return head.stdout.decode().strip()

    one = commit("one")
    before = file.read_text()
    file.write_text(before.replace("div_(spread + 1e-8)", "div_(spread + 1e-4)"))
    assert file.read_text() != before
    two = commit("two")
    words = ["bisect", "reach-short", "--between", f"{one},{two}", "--repository", str(root)]
    assert cli([*words, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["commit"], found["phase"]) == (two, "ingest")
    assert not list((root / ".git").glob("worktrees/*"))
    with pytest.raises(UsageError, match="is not an ancestor"):
        first_change("reach-short", two, one, repository=root)


def test_the_command_says_where(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = etude.train(recipe().replace(seed=1), tmp_path / "b").path
    assert cli(["bisect", str(run), str(other)]) == 1
    said = capsys.readouterr().out
    assert "They first differ in iteration 0" in said
    assert "The recipes differ in seed" in said
    assert cli(["bisect", str(run)]) != 0
    assert "Name two runs" in capsys.readouterr().err
