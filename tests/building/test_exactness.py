"""What a resume is held to: its recipe, and what the run was computed with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import etude
import short_recipes
from etude.api import Run, resume, train
from etude.cli.main import main
from etude.core.errors import UsageError
from etude.planning import recipes
from etude.planning.recipe import FREE, among, fields
from etude.runs import checkpoint, manifest
from etude.runs.folder import RunFolder
from etude.training.saving import RUN
from toys import changed, tiny_reach

LONGER = 4 * 256


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_reach(2), tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def edit(run: Path, **fields: Any) -> None:
    """Write other values into recipe.yaml, by section__key."""
    file = run / "recipe.yaml"
    content = yaml.safe_load(file.read_text())
    for name, value in fields.items():
        *sections, key = name.split("__")
        inside = content
        for section in sections:
            inside = inside[section]
        assert inside[key] != value
        inside[key] = value
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def statement(run: Path) -> str:
    return str(json.loads((run / "manifest.json").read_text())["exactness"])


def test_a_changed_recipe_is_refused_by_its_fields(run: Path) -> None:
    edit(run, seed=5, algorithm__learning_rate=0.0003)
    before = sorted(run.rglob("*"))
    with pytest.raises(UsageError) as refused:
        resume(run)
    said = str(refused.value)
    assert "seed was 0 and is 5; algorithm.learning_rate was 0.001 and is 0.0003" in said
    assert f"etude train {run / 'recipe.yaml'} --from {run}" in said
    assert sorted(run.rglob("*")) == before
    new = train(
        recipes.find(str(run / "recipe.yaml")).model_copy(update={"start_from": str(run)}),
        run.with_name("new"),
    )
    assert new.recipe.seed == 5
    edit(run, seed=0, algorithm__learning_rate=0.001)
    assert resume(run).path == run


@pytest.mark.parametrize(
    "fields",
    [
        {"env__tolerance": 0.01},
        {"collector__envs_per_group": 16},
        {"learner__threads": 2},
        {"policy__hidden": [32]},
        {"clock__cycles": 7},
    ],
)
def test_all_that_changes_bits_is_refused(fields: dict[str, Any], run: Path) -> None:
    edit(run, **fields)
    (name,) = fields
    with pytest.raises(UsageError, match=name.replace("__", r"\.") + " was "):
        resume(run)


def test_what_changes_no_bit_may_change(run: Path) -> None:
    edit(
        run,
        name="other",
        collector__threads=1,
        checkpoint__every="never",
        logs__tensorboard=False,
        evaluation__final_episodes=7,
    )
    said: list[str] = []
    resume(run, say=said.append)
    assert not any(" was " in text for text in said)
    assert statement(run).startswith("exact: ")


def test_a_changed_length_or_test_is_said(run: Path) -> None:
    edit(run, clock__total_timesteps=LONGER, evaluation__episodes=16)
    said: list[str] = []
    assert resume(run, say=said.append).summary()["counts"]["timesteps"] == LONGER
    assert "Since the last checkpoint, clock.total_timesteps was 512 and is 1024." in said
    assert "Since the last checkpoint, evaluation.episodes was 8 and is 16." in said
    said.clear()
    resume(run, say=said.append)  # from a checkpoint that knows
    assert not any("Since the last checkpoint" in text for text in said)


def test_before_anything_is_saved_a_changed_recipe_begins_anew(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    edit(run, seed=5)
    said: list[str] = []
    resume(run, say=said.append)
    assert any("changed before the first checkpoint" in text for text in said)
    fresh = train(changed(tiny_reach(2)).model_copy(update={"seed": 5}), run.with_name("fresh"))
    assert Run(run).fingerprint() == fresh.fingerprint()
    assert statement(run).startswith("exact: ")


EARLIER = {"num_envs": "rows", "envs_per_group": "group_rows"}
"""Fields of collector and evaluation by the names of earlier versions."""


def as_earlier(run: Path) -> None:
    """Make a run what an earlier version would have left: recipe, its hashes and its copies."""
    recipe = recipes.load(run / "recipe.yaml")
    content, named = recipe.model_dump(mode="json"), [*fields(recipe)]
    for section in ("collector", "evaluation"):
        content[section] = {EARLIER.get(k, k): v for k, v in content[section].items()}
        for new, old in EARLIER.items():
            field = f"{section}.{new}", f"{section}.{old}"
            named = [(field[1] if name == field[0] else name, value) for name, value in named]
    digest = [field for field in named if not among(field[0], FREE)]
    text = yaml.safe_dump(content, sort_keys=False)
    assert "num_envs" not in text
    with RunFolder.open(run) as folder:
        hashed = {"recipe": hashlib.sha256(json.dumps(digest).encode()).hexdigest()}
        folder.rewrite(folder.manifest() | hashed, {"recipe.yaml": text})
        copies = folder.copies()
    for path in checkpoint.resumable(run / "checkpoints") if (run / "checkpoints").is_dir() else ():
        arrays, contract, training = checkpoint.load_training(path)
        training[RUN] = copies
        checkpoint.save(path.parent, checkpoint.step_of(path), (arrays, contract), training)


def test_a_run_of_an_earlier_version_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, run.with_name("new"), symlinks=True)
    as_earlier(run)
    etude.load_policy(run)
    assert main(["eval", str(run), "--episodes", "8"]) == 0, capsys.readouterr()
    said: list[str] = []
    resumed = resume(run, total_timesteps=LONGER, say=said.append)
    assert not any(" was " in text for text in said), said
    expected = resume(run.with_name("new"), total_timesteps=LONGER)
    assert resumed.fingerprint() == expected.fingerprint()
    assert statement(run).startswith("exact: ")


def test_a_run_of_an_earlier_version_that_saved_nothing_begins(run: Path) -> None:
    shutil.copytree(run, run.with_name("new"), symlinks=True)
    shutil.rmtree(run / "checkpoints")
    as_earlier(run)
    said: list[str] = []
    assert resume(run, say=said.append).fingerprint() == Run(run.with_name("new")).fingerprint()
    assert not any("changed" in text for text in said), said


def other_computation(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(manifest, "standard_digest", lambda: "0" * 64)
    return "the hash of the standard computation was "


def other_instructions(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    return "the instruction set torch uses was "


def other_version(patch: pytest.MonkeyPatch) -> str:
    true = manifest._version
    patch.setattr(manifest, "_version", lambda name: "9.9" if name == "mujoco" else true(name))
    return "the version of mujoco was "


@pytest.mark.parametrize("change", [other_computation, other_instructions, other_version])
def test_other_bits_mark_a_run_for_good(
    change: Callable[[pytest.MonkeyPatch], str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with monkeypatch.context() as patch:
        words = change(patch)
        resume(run, say=said.append)  # it is finished: nothing is computed
        assert statement(run).startswith("exact: ")
        after = resume(run, LONGER, say=said.append)
    assert any(text.startswith("From here on this run is not exact: ") for text in said)
    marked = statement(run)
    assert marked.startswith(f"not exact: resumed where {words}")
    assert after.exactness == after.summary()["exactness"] == marked
    copies = checkpoint.load_document(run / "checkpoints" / "latest")["run"]
    assert json.loads(copies["manifest"])["exactness"] == marked
    said.clear()
    again = resume(run, LONGER + 512, say=said.append)  # where all is as it was
    assert f"This run is {marked}." in said
    assert again.summary()["exactness"] == statement(run) == marked
    # Nor does another manifest.json make it exact again: the checkpoints know.
    document = json.loads((run / "manifest.json").read_text()) | {"exactness": "exact: so it says"}
    (run / "manifest.json").write_text(json.dumps(document))
    assert resume(run, LONGER + 1024).exactness == marked


def test_a_resume_with_other_instructions_says_so_on_the_command_line(run: Path) -> None:
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine has no other instructions to choose from")
    edit(run, evaluation__final_episodes=0)
    command = [sys.executable, "-m", "etude", "resume", str(run), "--total-timesteps", str(LONGER)]
    done = subprocess.run(
        command,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "The environment variable ATEN_CPU_CAPABILITY was not set and is default" in done.stdout
    assert "From here on this run is not exact: resumed where the hash of the" in done.stdout
    assert "\nThis run is not exact: resumed where" in done.stdout
    assert Run(run).summary()["exactness"].startswith("not exact: ")


@pytest.mark.parametrize(
    "recipe", [tiny_reach(6), pytest.param("episodic-short", marks=pytest.mark.rotated)]
)
def test_when_a_run_is_saved_changes_no_fingerprint(recipe: Any, tmp_path: Path) -> None:
    recipe = short_recipes.find(recipe) if isinstance(recipe, str) else recipe
    often = train(changed(recipe, checkpoint={"every": "1 iteration"}), tmp_path / "often")
    once = train(changed(recipe, checkpoint={"every": "never"}), tmp_path / "once")
    assert often.fingerprint() == once.fingerprint()
    assert often.summary()["counts"]["checkpoints"] > once.summary()["counts"]["checkpoints"]


def test_the_digest_of_a_recipe_goes_by_what_results_follow_from() -> None:
    recipe = tiny_reach(2)
    same = changed(recipe, collector={"threads": 7}, checkpoint={"every": "never"})
    assert recipes.digest(same) == recipes.digest(recipe)
    text = yaml.safe_load(recipes.dump(recipe))
    assert recipes.digest(recipes.validated(text, "")) == recipes.digest(recipe)
    for section in ({"clock": {"cycles": 2}}, {"algorithm": {"gamma": 0.9}}):
        assert recipes.digest(changed(recipe, **section)) != recipes.digest(recipe)
