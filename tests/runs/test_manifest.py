"""The manifest says what a run was made with, and what has changed since."""

from __future__ import annotations

import copy
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

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
    again = manifest.collect("exact on CPU", {"learner": 2}, tmp_path)
    assert manifest.differences(made, again) == ([], [])


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
    (said,) = manifest.differences(before, manifest.collect("", project=tmp_path)).possible
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
    decisive, said = manifest.differences(old, new)
    assert decisive == [f"The version of torch was {old['versions']['torch']} and is 9.9 now."]
    assert len(said) == 3
    assert "The environment variable MKL_CBWR was not set and is COMPATIBLE now." in said
    assert any(s.startswith("The CPU was") for s in said)
    assert any(s.startswith("The number of torch threads was") for s in said)


@pytest.mark.parametrize(
    "name",
    [
        *("GLIBC_TUNABLES", "LD_PRELOAD", "NPY_DISABLE_CPU_FEATURES", "DNNL_MAX_CPU_ISA"),
        *("ATEN_CPU_CAPABILITY", "PYTHONHASHSEED", "MKL_CBWR", "OPENBLAS_CORETYPE"),
    ],
)
def test_variables_that_move_bits_are_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    old = manifest.collect("exact", project=tmp_path)
    monkeypatch.setenv(name, "1")
    new = manifest.collect("exact", project=tmp_path)
    said = f"The environment variable {name} was not set and is 1 now."
    assert manifest.differences(old, new) == ([], [said])


@pytest.mark.parametrize(
    ("group", "name"),
    [("cpu", "capability"), *(("versions", package) for package in manifest.PACKAGES)],
)
def test_what_ends_exactness(group: str, name: str, tmp_path: Path) -> None:
    old = manifest.collect("exact", project=tmp_path)
    old[group][name] = "one"
    new = copy.deepcopy(old)
    new[group][name] = "other"
    (said,), none = manifest.differences(old, new)
    assert said.endswith("was one and is other now.")
    assert none == []
    del old[group][name]  # as in a manifest that did not record it yet
    assert manifest.differences(old, new).decisive == []


def test_code_in_a_file_of_any_folder_is_compared(tmp_path: Path) -> None:
    """Its name is a path: a "/" in it is not the separator of the manifest's groups."""
    name = "robots/pole.py"
    old = manifest.collect("exact", project=tmp_path, code={name: "one"})
    assert manifest.differences(old, copy.deepcopy(old)) == ([], [])
    new = manifest.collect("exact", project=tmp_path, code={name: "other"})
    (said,), _ = manifest.differences(old, new)
    assert said == f"The hash of the code of {name} was one and is other now."


def test_required_packages_are_named_by_version(tmp_path: Path) -> None:
    old, new = (
        manifest.collect("exact", project=tmp_path, code={"gripper (version)": version})
        for version in ("1.0", "1.1")
    )
    (said,), _ = manifest.differences(old, new)
    assert said == "The version of gripper was 1.0 and is 1.1 now."


def test_the_standard_computation_decides(tmp_path: Path) -> None:
    old = manifest.collect("exact", project=tmp_path)
    assert old["computation"] == manifest.standard_digest()
    new = old | {"computation": "0" * 64}
    (said,), _ = manifest.differences(old, new)
    assert said.startswith("The hash of the standard computation was ")


def test_the_standard_computation_is_short_and_always_the_same() -> None:
    torch.set_num_threads(2)
    manifest.standard_digest()
    start = time.perf_counter()
    again = manifest.standard_digest.__wrapped__()
    assert time.perf_counter() - start < 0.3
    assert again == manifest.standard_digest()
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "variable",
    [
        "ATEN_CPU_CAPABILITY=default",
        pytest.param("OPENBLAS_CORETYPE=Nehalem", marks=pytest.mark.rotated),
        pytest.param("DNNL_MAX_CPU_ISA=SSE41", marks=pytest.mark.rotated),
        pytest.param("GLIBC_TUNABLES=glibc.cpu.hwcaps=-AVX2,-FMA", marks=pytest.mark.rotated),
    ],
)
def test_the_standard_computation_notices_other_instructions(variable: str) -> None:
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no other instructions to choose from")
    name, _, value = variable.partition("=")
    code = "from etude.runs import manifest; print(manifest.standard_digest())"
    command = [sys.executable, "-c", code]
    found = subprocess.run(
        command, env={**os.environ, name: value}, capture_output=True, text=True, check=True
    )
    assert len(found.stdout.strip()) == 64
    assert found.stdout.strip() != manifest.standard_digest()
