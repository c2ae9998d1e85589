"""The manifest says what a run was made with, and what has changed since."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path

import pytest

from etude.runs import manifest


def test_collect_is_json_and_stable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = manifest.collect("exact on CPU", {"learner": 2}, tmp_path)
    assert json.loads(json.dumps(made)) == made
    assert made["environment"]["OMP_NUM_THREADS"] == "1"
    assert made["threads"]["learner"] == 2
    assert made["versions"]["torch"]
    assert made["cpu"]["model"]
    assert made["git"] == {}
    assert (
        manifest.differences(made, manifest.collect("exact on CPU", {"learner": 2}, tmp_path)) == []
    )


def test_git_commit_is_recorded(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    assert manifest.collect("", project=tmp_path)["git"] == {}
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    before = manifest.collect("", project=tmp_path)
    assert len(before["git"]["commit"]) == 40
    git("checkout", "-q", "--detach")
    assert manifest.collect("", project=tmp_path)["git"] == before["git"]
    git("checkout", "-q", "-b", "other")
    git("pack-refs", "--all")
    inside = tmp_path / "a folder"
    inside.mkdir()
    assert manifest.collect("", project=inside)["git"] == before["git"]
    git("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "third")
    assert manifest.collect("", project=tmp_path / "tree")["git"] == before["git"]
    (tmp_path / "a").write_text("2")
    git("commit", "-qam", "b")
    (said,) = manifest.differences(before, manifest.collect("", project=tmp_path))
    assert said.startswith("The git commit of the project was ")


def test_nothing_of_a_repository_is_run(tmp_path: Path) -> None:
    """A repository names programs for git to run: filters, hooks, a monitor of its files."""

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    trap = f"touch {tmp_path / 'sprung'}; cat"
    git("config", "filter.trap.clean", trap)
    git("config", "core.fsmonitor", trap)
    (tmp_path / ".gitattributes").write_text("a filter=trap\n")
    (tmp_path / "a").write_text("2")
    assert len(manifest.collect("", project=tmp_path)["git"]["commit"]) == 40
    assert not (tmp_path / "sprung").exists()


def test_differences_are_sentences(tmp_path: Path) -> None:
    old = manifest.collect("exact", project=tmp_path)
    new = copy.deepcopy(old)
    new["versions"]["torch"] = "9.9"
    new["cpu"] |= {"model": "Abacus", "count": 999}
    new["threads"]["torch"] = 64
    new["environment"] = old["environment"] | {"MKL_CBWR": "COMPATIBLE"}
    said = manifest.differences(old, new)
    assert len(said) == 4
    assert f"The version of torch was {old['versions']['torch']} and is 9.9 now." in said
    assert "The environment variable MKL_CBWR was not set and is COMPATIBLE now." in said
    assert any(s.startswith("The CPU was") for s in said)
    assert any(s.startswith("The number of torch threads was") for s in said)
