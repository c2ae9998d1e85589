"""Which policies of which runs are evaluated, how, and what is said of them side by side."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from etude.api import Run, train
from etude.cli import main as cli
from etude.core.errors import UsageError
from etude.evaluate import fresh
from etude.evaluate.evaluation import finish
from etude.evaluate.report import Evaluated, table
from etude.rollout.group import evaluate
from etude.runs import checkpoint
from toys import tiny_reach


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_reach(6, checkpoint={"keep_last": 9}), path)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main(["eval", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert cli.main(["eval", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_a_checkpoint_is_chosen(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for which, step in (("latest", 1536), ("512", 512), ("1_024", 1024), ("best", None)):
        options = ("--checkpoint", which, "--episodes", "4", "--json")
        metrics = json.loads(shown(capsys, finished, *options))
        assert metrics["policy_step"] == (step or fresh.step_of(finished))
    inside = finished / "checkpoints" / checkpoint.step_name(512)
    assert "policy at step 512" in shown(capsys, inside, "--episodes", "4")
    said = refused(capsys, finished, "--checkpoint", "77")
    assert (
        said
        == f"{finished} has no checkpoint '77': choose best, latest or one of 512, 1024, 1536.\n"
    )
    assert "fresh episodes of the policy at step" in shown(
        capsys, finished.parent, "--episodes", "4"
    )


def test_all_checkpoints_are_a_table_and_a_curve(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, finished, "--checkpoint", "all", "--episodes", "4")
    seed = fresh.new_seed(Run(finished).recipe)
    assert f"4 fresh episodes each, deterministic, seed {seed}" in text
    assert "success rate of" in text
    assert text.count("best") >= 1
    kept = Path(text.split("Kept in ")[1].splitlines()[0])
    rows = list(csv.DictReader(io.StringIO(kept.read_text())))
    assert [row["step"] for row in rows] == ["512", "1024", "1536"]
    found = json.loads(shown(capsys, finished, "--checkpoint", "all", "--episodes=4", "--json"))
    assert [float(row["eval/mean_reward"]) for row in rows] == pytest.approx(
        [metrics["eval/mean_reward"] for metrics in found]
    )


def test_several_runs_in_a_changed_environment(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    train(tiny_reach(2), other)
    options = ("--episodes", "4", "--env.tolerance", "9", "--env.hold-steps", "1", "--seed", "5")
    text = shown(capsys, *options, finished, other)
    assert text.count("100.0%") == 2  # anywhere is close enough
    assert "seed 5" in text
    assert str(other) in text.replace("\n", "")


def evaluated(success: float, reward: float, step: int) -> Evaluated:
    metrics = {"eval/success_rate": success, "eval/success_low": 0.0, "eval/success_high": 1.0}
    metrics |= {"eval/mean_reward": reward, "eval/std_reward": 0.0, "eval/episodes": 4.0}
    return Evaluated(Path("run"), {**metrics, "policy_step": step, "seed": 0, "stochastic": False})


def test_ties_of_the_best_go_to_the_return_then_to_the_later() -> None:
    rows = [
        evaluated(0.5, 9.0, 1),
        evaluated(1.0, 5.0, 2),
        evaluated(1.0, 6.0, 3),
        evaluated(1.0, 6.0, 4),
        evaluated(1.0, 5.5, 5),
    ]
    assert max(rows, key=lambda row: row.score) is rows[3]
    highest = [line for line in table(rows).splitlines() if line.rstrip().endswith("highest")]
    assert [line.split()[0] for line in highest] == ["4"]


def test_actions_are_drawn_or_the_most_likely(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Run(finished).recipe
    plain, drawn, again = (
        fresh.play(recipe, finished, 4, stochastic=s) for s in (False, True, True)
    )
    assert not np.array_equal(plain.episodes["return"], drawn.episodes["return"])
    assert np.array_equal(drawn.episodes["return"], again.episodes["return"])
    # What is filmed is played again in the same way.
    env = recipe.task.for_evaluation().build(drawn.envs_per_group, 1)
    policy = fresh.load(finished)
    replayed = evaluate(env, policy, drawn.per_env, drawn.group_key(0), drawn.stochastic)
    assert np.array_equal(replayed["return"], drawn.episodes["return"])
    options = ("--episodes", "4", "--stochastic", "--seed", "0")
    assert "stochastic, seed 0" in shown(capsys, finished, *options)


def test_progress_is_told_as_it_goes(finished: Path) -> None:
    told: list[tuple[float, float]] = []
    fresh.play(
        Run(finished).recipe, finished, 6, tick=lambda done, total: told.append((done, total))
    )
    done = [each for each, _ in told]
    assert {total for _, total in told} == {6.0}
    assert len(set(done)) > 10  # steps of episodes count, not only their ends
    assert done == sorted(done)
    assert done[-1] == 6.0


@pytest.mark.rotated
def test_a_terminal_shows_progress_and_a_pipe_does_not(finished: Path) -> None:
    command = f"{sys.executable} -m etude eval {finished} --episodes 4"
    piped = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    terminal = ["script", "-qec", command, "/dev/null"]
    if shutil.which("script"):
        seen = subprocess.run(terminal, capture_output=True, text=True, check=True)
        assert "Evaluating" in seen.stdout


@pytest.mark.parametrize("links", ["followed", "lost"])
def test_a_copied_run_is_evaluated_under_its_own_step(
    links: str, finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy, symlinks=links == "lost")
    if links == "lost":
        for path in (copy / "checkpoints").iterdir():
            if path.is_symlink():
                path.unlink()
    assert fresh.step_of(copy) == fresh.step_of(finished) > 0
    policy = tmp_path / "policy"
    shutil.copytree(copy / "checkpoints" / checkpoint.step_name(512) / "policy", policy)
    assert fresh.step_of(policy) == 512


def test_a_run_from_python(finished: Path) -> None:
    run = Run(finished)
    assert [*run.policies()] == [512, 1024, 1536]
    near = run.evaluate(4, checkpoint=512, tolerance=9.0, hold_steps=1)
    assert near["eval/success_rate"] == 1.0
    assert run.evaluate(4) != run.evaluate(4, stochastic=True)
    with pytest.raises(UsageError, match=r"no field env.toleranse \(did you mean env.tolerance"):
        run.evaluate(4, toleranse=1.0)
    curves = run.curves("eval/mean_r*")
    assert [*curves] == ["eval/mean_reward"]
    steps, values = curves["eval/mean_reward"]
    assert steps[-1] == 1536
    assert len(steps) == len(values)
    assert {"timesteps", "eval/mean_reward"} <= run.curves().keys()
    latest, early = run.policy("latest"), run.policy(512)
    obs = np.zeros(25, np.float32)
    assert not np.array_equal(latest.act(obs), early.act(obs))


def test_films_from_python(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from etude.evaluate import film

    asked: list[Path] = []

    def made(recipe: object, path: Path, *rest: object) -> list[Path]:
        asked.append(path)
        return [path / "film.mp4"]

    monkeypatch.setattr(film, "check", lambda recipe: None)
    monkeypatch.setattr(film, "film", made)
    assert Run(finished).film(4, checkpoint=512)[0].name == "film.mp4"
    assert asked[0].name == checkpoint.step_name(512)


def returns(folder: Path | str) -> list[str]:
    with (Path(folder) / "episodes.csv").open() as stream:
        return [row["return"] for row in csv.DictReader(stream)]


def test_fresh_episodes_are_others_than_those_at_the_end_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tiny_reach(2), tmp_path / "run")
    finish(run.recipe.replace(evaluation__final_episodes=4), run.path, lambda text: None)
    (final,) = (run.path / "evaluations").iterdir()
    seed = fresh.new_seed(run.recipe)
    found = json.loads(shown(capsys, run.path, "--episodes", "4", "--json"))
    assert found["seed"] == seed != run.recipe.seed
    assert returns(found["folder"]) != returns(final)
    assert run.evaluate(4)["eval/mean_reward"] == found["eval/mean_reward"]
    # A seed that is named reproduces both.
    assert f"deterministic, seed {seed}" in shown(capsys, run.path, "--episodes", "4")
    for number, folder in ((seed, found["folder"]), (run.recipe.seed, final)):
        options = ("--episodes", "4", "--json", "--seed", str(number))
        again = json.loads(shown(capsys, run.path, *options))
        assert returns(again["folder"]) == returns(folder)
