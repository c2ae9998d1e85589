"""Settings that a resume changes: recorded with their step, exact from there on, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from damage_cases import replay
from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.compare import reading
from etude.core.errors import UsageError
from etude.core.user_code import Untrusted
from etude.planning import recipes
from etude.runs.changes import CHANGES
from toys import tiny_reach

RATE = {"algorithm.learning_rate": 1e-4}
WORDS = "changed at step 768: algorithm.learning_rate 0.001 -> 0.0001"


@pytest.fixture(scope="module")
def paused_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 iterations of 256 steps that has saved after 3."""
    path = tmp_path_factory.mktemp("runs") / "paused"
    train(tiny_reach(3, algorithm={"learning_rate": 1e-3}, checkpoint=EVERY), path)
    resume(path, total_timesteps=6 * 256, pause_after=4)
    resume(path, checkpoint=768, pause_after=3)
    return path


EVERY = {"every": "1 iteration", "keep_last": 9}


@pytest.fixture
def paused(paused_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(paused_once, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def contents(folder: Path) -> dict[Path, bytes]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {path: path.read_bytes() for path in found}


def rates(run: Run) -> list[float]:
    return [row["train/learning_rate"] for row in run.rows() if "train/learning_rate" in row]


def test_a_changed_run_is_exact_from_there_on_and_says_so(paused: Path, tmp_path: Path) -> None:
    for name in ("plain", "whole"):
        shutil.copytree(paused, tmp_path / name, symlinks=True)
    asked = (paused / "recipe.yaml").read_text()
    said: list[str] = []
    resume(paused, changes=RATE, pause_after=4, say=said.append)
    assert f"{WORDS[:1].upper()}{WORDS[1:]}." in said
    resume(paused, pause_after=5)  # without options, with the changed settings
    broken, whole = resume(paused), resume(tmp_path / "whole", changes=RATE)
    plain = resume(tmp_path / "plain")
    assert broken.fingerprint() == whole.fingerprint()
    assert broken.fingerprint()["policy"] != plain.fingerprint()["policy"]
    assert rates(broken)[-1] == pytest.approx(0.1 * rates(plain)[-1])
    # recipe.yaml has what was asked first; the run has what changed, in one lineage.
    assert (paused / "recipe.yaml").read_text() == asked
    assert broken.recipe == plain.recipe.replace("algorithm.learning_rate", 1e-4)
    assert broken.changes == [WORDS] == whole.changes
    assert broken.exactness.endswith(f"; {WORDS}")
    assert broken.exactness.startswith("exact: ")
    assert plain.exactness == broken.exactness.removesuffix(f"; {WORDS}")
    (change,) = broken.summary()[CHANGES]
    assert change == {"step": 768, "fields": {"algorithm.learning_rate": [0.001, 0.0001]}}
    assert f"The run was {WORDS}." in (paused / "plan.txt").read_text()
    assert Run(paused).recipe == broken.recipe


def test_it_is_shown_wherever_runs_are(
    paused: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(paused, tmp_path / "plain", symlinks=True)
    options = ["--algorithm.learning-rate", "1e-4", "--pause-after=4"]
    assert cli.main(["resume", str(paused), *options]) == 0
    resume(tmp_path / "plain", pause_after=4)
    capsys.readouterr()
    assert cli.main(["runs", str(paused)]) == 0
    assert f"s0, {WORDS}" in capsys.readouterr().out
    assert cli.main(["report", str(paused), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert WORDS.replace(">", "&gt;") in page
    assert f"etude train {paused}/recipe.yaml" in page
    changed, plain = (reading.read(path) for path in (paused, tmp_path / "plain"))
    assert changed.compared.keys() - plain.compared.keys() == {
        "algorithm.learning_rate from step 768 on"
    }
    assert cli.main(["resume", str(paused)]) == 0
    assert f"This run was {WORDS}." in capsys.readouterr().out


def test_a_second_change_and_one_that_is_taken_back(paused: Path) -> None:
    resume(paused, changes=RATE, pause_after=4)
    # Before a step is made with it, a change of the same step replaces it.
    resume(paused, changes={"algorithm.clip": 0.1}, pause_after=4)
    resume(paused, changes={"algorithm.clip": 0.2}, pause_after=4)
    assert Run(paused).changes == [WORDS]
    said: list[str] = []
    resume(paused, changes={"algorithm.learning_rate": 1e-3}, pause_after=5, say=said.append)
    later = "changed at step 1,024: algorithm.learning_rate 0.0001 -> 0.001"
    assert Run(paused).changes == [WORDS, later]
    # From an earlier checkpoint, what changed after it changes there.
    resume(paused, checkpoint=768, pause_after=4)
    assert Run(paused).changes == []
    assert Run(paused).recipe.algorithm.learning_rate == 1e-3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed cannot change within a run"),
        ({"env.tolerance": 0.5}, "env.tolerance cannot change"),
        ({"collector.num_envs": 64}, "collector.num_envs cannot change"),
        ({"clock.iterations": 1}, "clock.iterations cannot change"),
        (
            {"algorithm.minibatch_size": 32},
            "minibatch_size cannot change .* geometry and the loops",
        ),
        (
            {"algorithm.minibatch_size": 32, "algorithm.clip": 0.1},
            "^algorithm.minibatch_size cannot change .*--algorithm.clip 0.1",
        ),
        ({"algorithm.desired_kl": 0.01}, "desired_kl cannot change .* shapes of the state"),
        ({"rewards.kind": "amp"}, "rewards.kind cannot change"),
        ({"policy.hidden": [8]}, "--policy.hidden 8"),
    ],
)
def test_what_the_state_does_not_fit_is_refused_with_a_command(
    changes: dict[str, Any], words: str, paused: Path
) -> None:
    before = contents(paused)
    with pytest.raises(UsageError, match=words) as refused:
        resume(paused, changes=changes)
    start = "" if "policy.hidden" in changes else f" --from {paused}"
    assert f"`etude train {paused}/recipe.yaml{start} --" in str(refused.value)
    assert contents(paused) == before


def test_options_of_the_command(paused: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*options: str) -> str:
        assert cli.main(["resume", str(paused), *options]) == 2
        return capsys.readouterr().err

    assert "did you mean --algorithm.learning-rate?" in refused("--algorithm.learning-rat", "1")
    assert "algorithm.learning-rate" in refused("--algorithm.learning-rate", "fast")
    assert "env.tolerance cannot change" in refused("--env.tolerance", ".5")
    options = ("--clock.total-timesteps", "2048", "--algorithm.learning-rate=1e-4")
    assert cli.main(["resume", str(paused), *options]) == 0
    text = capsys.readouterr().out
    assert "The budget grows from 1,536 to 2,048 steps at step 768" in text
    assert f"This run was {WORDS}." in text
    assert Run(paused).rows()[-1]["timesteps"] == 2048
    assert "is finished, so nothing is left to train" in refused("--algorithm.clip", ".1")


def test_a_start_value_that_the_state_has_replaced_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(tiny_reach(2, algorithm={"desired_kl": 0.01}), path)
    with pytest.raises(UsageError, match=r"learning_rate .* is read at the start of a run only"):
        resume(path, total_timesteps=1024, changes=RATE)


def test_off_policy_too(tmp_path: Path) -> None:
    for name in ("run", "whole"):
        train(replay(tmp_path / name).replace(clock__total_timesteps=192), tmp_path / name)
    done = int(Run(tmp_path / "run").rows()[-1]["iterations"])
    for name, pause in (("run", done + 1), ("whole", None)):
        resume(tmp_path / name, 320, changes=RATE, pause_after=pause)
    run = resume(tmp_path / "run")
    assert run.fingerprint() == Run(tmp_path / "whole").fingerprint()
    assert rates(run)[-1] == 1e-4


def test_a_manifest_cannot_make_a_run_execute_code(paused: Path, tmp_path: Path) -> None:
    """What it changes is not trusted more than the recipe, and some fields never change."""
    from etude.runs.folder import RunFolder

    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'done')!r}, 'w')\n")
    for fields, error in (
        ({"logs.writers": [[], [f"{tmp_path / 'evil.py'}:Log"]]}, Untrusted),
        ({"env.tolerance": [0.1, 0.2]}, UsageError),
        ("text", UsageError),
    ):
        with RunFolder.open(paused) as folder:
            record = {CHANGES: [{"step": 1, "fields": fields}]}
            folder.rewrite(folder.manifest() | record, {})
        with pytest.raises(error):
            Run(paused)
        with pytest.raises(error):
            resume(paused)
    assert not (tmp_path / "done").exists()
    assert json.loads((paused / "manifest.json").read_text())[CHANGES]
    assert recipes.load(paused / "recipe.yaml").name
