"""The command line: what a person types, and what they read when it is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.api import Run, train
from etude.cli import completion, data
from etude.cli import main as cli
from etude.cli.target import REGISTRIES, find_target
from etude.core.catalogue import TUNED
from etude.core.errors import UsageError
from etude.models import CLASSES
from etude.planning import recipes
from etude.planning.recipe import ALGORITHMS, REWARDS
from etude.runs.folder import RunFolder
from toys import tiny_reach

SMALL = [
    "--collector.num_envs=32",
    "--collector.envs-per-group=8",
    "--algorithm.rollout-steps=8",
    "--algorithm.minibatch-size=64",
    "--evaluation.episodes=8",
    "--evaluation.num_envs=8",
    "--evaluation.envs-per-group=8",
    "--clock.total-timesteps=1024",
]


def call(arguments: Sequence[str | Path]) -> int:
    """The exit code, whether it is returned or raised by the parser."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def refused(arguments: Sequence[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a mistake: exit code 2, no traceback."""
    assert call(arguments) == 2
    shown = capsys.readouterr()
    text = shown.err + shown.out
    assert "Traceback" not in text
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    train(tiny_reach(2), path)
    return path


def test_ids_of_environments_name_their_tuned_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    for env_id in TUNED.names():
        recipe = recipes.find(env_id)
        assert recipe.name in recipes.names()
        assert recipe.env is not None
        assert recipe.env.task_name == env_id
    assert call(["plan", "Hopper-v5"]) == 0
    assert capsys.readouterr().out.startswith("hopper, seed 0: ")
    text = refused(["train", "Pusher-v5"], capsys)
    assert "There are no tuned settings for Pusher-v5: `etude train ppo --env.id Pusher-v5" in text
    text = refused(["train", "BipedalWalker-v2"], capsys)
    assert "settings for BipedalWalker-v2; did you mean BipedalWalker-v3? `etude train" in text


@pytest.mark.parametrize("name", ["ppo", "sac", "td3"])
def test_a_recipe_for_any_environment_asks_for_one(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("plan", "train"):
        text = refused([verb, name], capsys)
        assert f"{name} is for any environment: name one with --env.id ID" in text
        assert "`etude train CartPole-v1`" in text
    assert call(["plan", name, "--env.id", "Pendulum-v1", "--json"]) == 0


def test_help_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert call([]) == call(["--help"]) == 0
    assert "etude resume RUN" in capsys.readouterr().out
    assert call(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and recipes.purpose(name) in text for name in recipes.names())
    groups = {part.splitlines()[0]: part.split() for part in text.split("\n\n")}
    assert list(groups)[:4] == ["Reaching a point", "Pick and place", "Walking", "Imitating motion"]
    assert "walk-go1-rough" in groups["Walking"]
    assert {"episodic", "reach-short"} <= set(groups["Reaching a point"])
    assert "bc" in groups["Learning from a dataset"]
    assert call(["list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(recipes.names())


def test_kinds_are_listed_with_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["list", "--kinds"]) == 0
    text = capsys.readouterr().out
    assert "algorithm\n  ppo" in text
    assert "Soft actor-critic." in text
    said = [line.split(maxsplit=1)[1] for line in text.splitlines() if line.split()[0] in CLASSES]
    assert len(set(said)) == len(CLASSES)  # all of which have one config
    assert call(["list", "--kinds", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["rewards"]["rrd"] == "etude"
    assert set(known) == {*REGISTRIES, "logs", "format"}
    assert call(["list", "--names"]) == 0
    assert capsys.readouterr().out.split() == recipes.names()
    assert "did you mean --kinds?" in refused(["list", "--kind"], capsys)


@pytest.mark.parametrize(
    ("typed", "offered"), [("etude pl", "plan"), ("etude train reach-sh", "reach-short")]
)
def test_completion(typed: str, offered: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["completion", "bash"]) == 0
    words = typed.split()
    script = (
        f"etude() {{ {sys.executable} -m etude $@; }}\n{capsys.readouterr().out}"
        f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _etude; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert offered in done.stdout.split()
    assert "bash and zsh" in refused(["completion", "fish"], capsys)


def test_completion_knows_every_verb_of_data() -> None:
    assert completion.DATA.split() == list(data.VERBS)


def test_a_kind_is_chosen_with_its_defaults() -> None:
    """Where one kind derives from another, what the recipe says stays."""
    recipe, _ = find_target(["reach", "--algorithm.kind=sac", "--policy.kind", "squashed"])
    assert recipe.algorithm == ALGORITHMS.make("sac")
    assert recipe.policy == recipes.reach().policy.model_copy(update={"kind": "squashed"})
    recipe, _ = find_target(["reach", "--collector", "ray", "--rewards.kind", "amp"])
    assert recipe.collector.kind == "ray"
    assert recipe.collector.num_envs == recipes.reach().collector.num_envs
    assert recipe.rewards == REWARDS.make("amp")
    with pytest.raises(UsageError, match=r"--rewards.kind must be 'given', .* or 'amp', not 'rdr'"):
        find_target(["reach", "--rewards.kind=rdr"])


def test_help_shows_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["train", "reach", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--algorithm.learning-rate" in text
    assert "0.001" in text
    assert "--env.tolerance" in text
    assert "Learning rate of Adam at the start" in " ".join(text.replace("│", " ").split())


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "reach-short", *SMALL]) == 0
    text = capsys.readouterr().out
    assert "1,024 environment steps" in text
    assert "Exact" in text
    assert call(["plan", "reach-short", *SMALL, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["counts"]["timesteps"] == 1024
    assert plan["geometry"]["num_envs"] == 32


def test_plan_compare(capsys: pytest.CaptureFixture[str]) -> None:
    variants = "learner.shards=1,2,4"
    assert call(["plan", "reach-short", *SMALL, "--compare", variants]) == 0
    assert "shards" in capsys.readouterr().out
    assert call(["plan", "reach-short", *SMALL, "--compare", variants, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert {k: v["geometry"]["shards"] for k, v in plans.items()} == {"1": 1, "2": 2, "4": 4}
    assert "section.key=a,b,c" in refused(["plan", "reach", "--compare", "rows"], capsys)
    assert "nowhere" in refused(["plan", "reach", "--compare", "nowhere.at=1"], capsys)


def test_train_eval_and_resume_of_a_finished_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert call(["train", "reach-short", *SMALL, "--seed=3", "--folder", folder]) == 0
    text = capsys.readouterr().out
    assert "1,024 steps" in text
    assert "etude eval" in text
    assert Run(folder).recipe.seed == 3
    assert call(["eval", folder, "--episodes=6", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["eval/episodes"] == 6
    assert call(["eval", folder, "--episodes=6"]) == 0
    assert f"{metrics['eval/mean_reward']:,.2f}" in capsys.readouterr().out
    before = Run(folder).fingerprint()
    assert call(["resume", folder]) == 0
    assert "finished already" in capsys.readouterr().out
    assert Run(folder).fingerprint() == before


def test_a_recipe_file_runs_again(finished: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert call(["train", finished / "recipe.yaml", "--folder", again]) == 0
    assert Run(again).fingerprint() == Run(finished).fingerprint()


def test_unknown_names_get_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'train'" in refused(["trian", "reach"], capsys)
    assert "did you mean 'reach'" in refused(["train", "raech"], capsys)
    assert "Name a recipe first" in refused(["train"], capsys)
    assert "Name a recipe first" in refused(["plan", "--json"], capsys)
    assert "learning-rate" in refused(["plan", "reach", "--algorithm.learning-rat=1"], capsys)
    assert "CartPole" in refused(["plan", "ppo", "--env.id=CartPol-v1"], capsys)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--collector.num_envs=-3"], "num_envs"),
        (["--collector.num_envs=0"], "num_envs"),
        (["--collector.num_envs=many"], "num_envs"),
        (["--algorithm.gamma=1.5"], "gamma"),
        (["--algorithm.learning-rate=nan"], "learning_rate"),
        (["--evaluation.every", "often"], "interval"),
        (["--checkpoint.every", "0 steps"], "never"),
        (["--clock.epochs=3"], "not both"),
        (["--algorithm.minibatch-size=500"], "256 or 512"),
        (["--evaluation.num_envs=30"], "multiple"),
        (["--seed=-1"], "seed"),
        (["--logs.writers", "tensorboard", "nothing"], "--logs.writers must be"),
    ],
)
def test_wrong_values_are_refused_by_name(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["plan"], ["train", "--folder", tmp_path / "run"]):
        text = refused([verb[0], "reach", *verb[1:], *options], capsys)
        assert said in text.replace("-", "_") or said in text
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in finished.iterdir())
    text = refused(["train", "reach-short", *SMALL, "--folder", finished], capsys)
    assert "never overwritten" in text
    assert "etude resume" in text
    assert sorted(path.name for path in finished.iterdir()) == before


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tmp_path, "is not a run"), (tmp_path / "missing", "There is no run")):
        assert said in refused(["resume", path], capsys)
        assert said in refused(["eval", path], capsys)


def test_a_run_has_one_writer(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder.open(finished):
        text = refused(["resume", finished], capsys)
    assert f"process {os.getpid()}" in text
    assert call(["resume", finished]) == 0


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "etude", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_saves_and_resume_ends_as_if_untouched(tmp_path: Path) -> None:
    options = [*SMALL[:-1], "--clock.total-timesteps=20480", "--algorithm.update-epochs=1"]
    options += ["--evaluation.every=never", "--checkpoint.every=30 cycles"]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = start("train", "reach-short", *options, "--folder", stopped)
    metrics, patience = stopped / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < patience
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert f"etude resume {stopped}" in err
    assert "Traceback" not in err
    assert not (stopped / "summary.json").exists()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    latest = int((stopped / "checkpoints" / "latest").resolve().name)
    assert latest - rows[-1]["timesteps"] in (0, 256)  # saved at the boundary, not at a cycle's end
    assert call(["resume", stopped]) == 0
    assert call(["train", "reach-short", *options, "--folder", whole]) == 0
    assert Run(stopped).fingerprint() == Run(whole).fingerprint()
    assert Run(stopped).summary() == Run(whole).summary()
