"""Mistakes a person can make: one clear sentence with the fix, an exit code, no traceback."""

from __future__ import annotations

import errno
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.api import Run, train
from etude.cli import main as cli
from etude.planning import recipes
from etude.runs import files
from toys import tiny_reach

JARGON = ("Traceback", "pydantic", "validation error", "Value error", "input_value", "type=", "╭")


def say(arguments: Sequence[str | Path], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """What is said on the error stream: one line, with nothing of the machinery in it."""
    capsys.readouterr()
    assert cli.main([str(argument) for argument in arguments]) == code
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    assert not [word for word in JARGON if word in text], text
    assert text[:-1].endswith((".", "?", "...")) or "`" in text, text
    return text.strip()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    train(tiny_reach(4), path)
    return path


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--collector.num_envs -3", "--collector.num-envs must be at least 1, not -3."),
        ("--collector.num_envs=-3", "--collector.num-envs must be at least 1, not -3."),
        ("--collector.num_envs abc", "--collector.num-envs must be a whole number, not 'abc'."),
        ("--collector.num_envs 3.5", "--collector.num-envs must be a whole number, not 3.5."),
        ("--algorithm.gamma 2", "--algorithm.gamma must be at most 1, not 2."),
        ("--algorithm.learning-rate 0", "--algorithm.learning-rate must be more than 0, not 0."),
        ("--algorithm.learning-rate nan", "--algorithm.learning-rate must be"),
        ("--policy.hidden 64 x", "--policy.hidden must be a whole number, not 'x'."),
        ("--learner.device tpu", "--learner.device must be 'cpu', 'cuda' or 'auto', not 'tpu'."),
        ("--algorithm.target_kl x", "--algorithm.target-kl must be a number or none, not 'x'."),
        ("--env.reward.hold much", "--env.reward.hold must be a number, not 'much'."),
        ("--checkpoint.every 0_steps", "--checkpoint.every: '0_steps' is not an interval"),
        ("--seed -1", "--seed must be at least 0, not -1."),
        ("--seed", "--seed needs a value (default: 0)."),
        ("--seed 1 2", "'2' belongs to no option: options are written --section.field value."),
        ("extra", "'extra' belongs to no option"),
        ("--evaluation.evry 3", "did you mean --evaluation.every?"),
        ("--colector.num-envs 3", "did you mean --collector.num-envs?"),
        ("--evalution.num-envs 3", "did you mean --evaluation.num-envs?"),
        ("--motion.enabled", "did you mean --motions.enabled?"),
        (
            "--every 3",
            "did you mean --evaluation.every (How often; the run's end always counts",
        ),
        ("--learning-rate 3", "did you mean --algorithm.learning-rate?"),
        ("--algorithm.learning_rat 3", "did you mean --algorithm.learning-rate?"),
        ("--zzz 3", "There is no option --zzz; `etude plan reach --help-all` shows them all."),
        ("--lr 3", "no option --lr; did you mean --algorithm.learning-rate (Learning rate of"),
        ("--algorithm.lr 3", "did you mean --algorithm.learning-rate (Learning rate of"),
        ("--n-envs 3", "did you mean --collector.num-envs (Parallel environments"),
        ("--num-envs 3", "--collector.num-envs (Parallel environments; each agent of several"),
        ("--n_steps 3", "did you mean --algorithm.rollout-steps (Steps"),
        ("--batch-size 3", "did you mean --algorithm.minibatch-size (Steps"),
        ("--algorithm.kind sac --algorithm.tau 3", "did you mean --algorithm.polyak (1 - tau"),
        ("--algorithm.kind sac --algorithm.ent-coef 3", "did you mean --algorithm.alpha ("),
        ("--total-timesteps 3", "did you mean --clock.total-timesteps?"),
        ("--optimizer.lr 3", "did you mean --algorithm.learning-rate (Learning rate of"),
        ("--epochs 3", "--clock.epochs (Epochs of the run, each a block of cycles"),
        ("--epochs 3", "--algorithm.update-epochs (Passes over the rollout buffer"),
        ("--env CartPole-v1", "--env is a section: give one of its fields, for example --env.id."),
        ("--collector rey", "--collector.kind must be 'local' or 'ray', not 'rey'."),
        ("--collector ray --collector.actors 0", "--collector.actors must be at least 1, not 0."),
        ("--collector ray --collector.address 10.0.0.5:6379", "with RAY_AUTH_MODE=token"),
        ("--evaluation 3", "--evaluation is a section: give one of its fields, for example"),
        (
            "--measure maybe",
            "--measure takes no value, not 'maybe': write it alone, or leave it out.",
        ),
        ("--env.kind gym", "--env.task module:Class or --env.parallel MODULE chooses another"),
        ("--env.task", "--env.task needs a value"),
        ("--env.id CartPole-v1 --env.kwargs a", "--env.kwargs takes pairs of a name and a value"),
        ("--env.id CartPol-v1", "no environment 'CartPol-v1'. Nearest: CartPole-v1"),
        ("--env.id no_such_package:Env-v0", "There is no module 'no_such_package' in"),
        ("--clock.epochs 3", "Give either clock.total_timesteps or clock.epochs, and not both."),
        (
            "--evaluation.num_envs 30",
            "evaluation.episodes 200 must be a multiple of evaluation.num_envs 30",
        ),
        ("--algorithm.minibatch-size 500", "Sizes that work: algorithm.minibatch_size 256 or 512."),
        ("--clock.total-timesteps 5", "raise it to at least that."),
        ("--learner.device cuda", "no GPU was found: use cpu."),
        ("--compare learner.shards=x", "--learner.shards must be a whole number, not 'x'."),
        ("--compare learner.shrds=1", "did you mean --learner.shards?"),
    ],
)
def test_options(
    options: str,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # Other tests start clusters.
    assert sentence in say(["plan", "reach", *options.split()], capsys)


def test_an_interval_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    text = say(["plan", "reach", "--evaluation.every", "3 moons"], capsys)
    assert text.startswith("--evaluation.every: '3 moons' is not an interval; write a number")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["trian", "reach"], "There is no command 'etude trian'. Did you mean 'train'?"),
        (["train"], "Name a recipe first"),
        (["train", "reech"], "There is no recipe 'reech'; did you mean 'reach'?"),
        (["train", "nowhere.yaml"], "There is no file nowhere.yaml; check the path."),
        (["eval"], "Name the runs first: etude eval RUN ..."),
        (["check"], "Name the task first: etude check TASK ..."),
        (["eval", "x", "--episodes", "0"], "--episodes must be at least 1, not 0."),
        (["resume", "x", "--total-timestep", "5"], "did you mean --total-timesteps?"),
        (["resume", "x", "--collector.threads", "0"], "--collector.threads must be at least 1"),
        (["eval", "--episodes", "0", "x"], "--episodes must be at least 1, not 0."),
        (["eval", "--video", "x", "--episodes", "0"], "--episodes must be at least 1, not 0."),
        (["resume", "x", "y"], "'y' belongs to no option"),
        (["resume", "no/such/run"], "There is no run no/such/run. Check the path."),
        (["doctor", "--jason"], "did you mean --json?"),
    ],
)
def test_commands(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in say(arguments, capsys)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("seed: 0", "sed: 0", "there is no field sed (did you mean seed?)."),
        ("  tolerance: 0.02", "  tolerence: 0.02", "(did you mean env.tolerance?)."),
        ("  gamma: 0.95", "  gama: 0.95", "(did you mean algorithm.gamma?)."),
        ("  gamma: 0.95", "  tolerance: 0.95", "(did you mean env.tolerance?)."),
        ("  gamma: 0.95", "  gamma: high", "algorithm.gamma must be a number, not 'high'."),
        ("  gamma: 0.95", "  gamma: .nan", "algorithm.gamma must be a finite number, not nan."),
        ("  num_envs: 32", "  num_envs: -3", "collector.num_envs must be at least 1, not -3."),
        (
            "kind: reach",
            "kind: fly",
            "env.kind must be 'reach', 'pick-place', 'walk-go1', 'track', 'gym'",
        ),
        ("kind: reach", "kind: imitation", "env.kind imitation is now env.kind track"),
        ("  kind: reach\n", "", "env must say its kind"),
        ("clock:", "clok:", "clock is missing: add it; there is no field clok"),
        ("name: reach-short", "name: 3", "name must be text, not 3."),
        ("name: reach-short", "name: [", "cannot be read as YAML"),
    ],
)
def test_recipe_files(
    old: str, new: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = recipes.dump(tiny_reach())
    assert old in text
    path = tmp_path / "recipe.yaml"
    path.write_text(text.replace(old, new, 1))
    shown = say(["plan", path], capsys)
    assert sentence in shown
    assert shown.startswith(str(path))


def test_a_run_that_exists(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = say(["train", "reach-short", "--folder", run], capsys)
    assert f"{run} exists already and is never overwritten: continue it with `etude resume" in text


def test_folders_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    arguments = ["train", "reach-short", "--folder"]
    assert "choose another" in say([*arguments, tmp_path / "file" / "run"], capsys, 1)

    class ReadOnly(files.Disk):
        def mkdir(self, path: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    with files.using(ReadOnly()):
        text = say([*arguments, tmp_path / "run"], capsys, 1)
    assert "it is not writable; check its owner and permissions." in text
    assert not (tmp_path / "run").exists()


def test_foreign_policies(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.zip").write_bytes(b"PK")
    arguments = ["train", "ppo", "--env.id=CartPole-v1", "--folder", tmp_path / "new", "--from"]
    for path in (tmp_path, tmp_path / "model.zip"):
        text = say([*arguments, path], capsys)
        assert f"{path} is not a policy of Etude's: give a run's folder" in text
    assert "There is no checkpoint at" in say([*arguments, tmp_path / "none"], capsys)
    text = say([*arguments, run], capsys)
    assert "has another observation than this recipe: " in text
    assert "start without --from." in text
    assert not (tmp_path / "new").exists()


def test_damaged_checkpoints(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(run, path, symlinks=True)
    best = (path / "checkpoints" / "best").resolve() / "policy" / "arrays.safetensors"
    best.write_bytes(best.read_bytes()[:-1])
    begun = ["train", "reach-short", "--folder", tmp_path / "new", "--from"]
    marked = path / "checkpoints" / "best"
    fixes = f"Remove {best.parents[1]} to use the next one.", "Use another one."
    for arguments, fix in zip((["eval", path], [*begun, marked]), fixes, strict=True):
        text = say(arguments, capsys, 1)
        assert best.name in text
        assert fix in text
    # The newest checkpoint that can be resumed is damaged: the one before takes over, aloud.
    latest = (path / "checkpoints" / "latest").resolve() / "training" / "state.json"
    latest.write_bytes(b"{}")
    assert cli.main(["resume", str(path)]) == 0
    shown = capsys.readouterr()
    assert f"Damaged checkpoint: {latest.parents[1]}" in shown.out
    assert "trying the one before" in shown.out
    assert "Traceback" not in shown.out + shown.err
    assert Run(path).fingerprint() == Run(run).fingerprint()


def test_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(files.Disk):
        """Has room for the run's folder, and none for a checkpoint."""

        def open(self, path: Path, flags: int) -> int:
            if path.name == "arrays.safetensors":
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(path, flags)

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipes.dump(tiny_reach(2)))
    with files.using(Full()):
        text = say(["train", recipe, "--folder", tmp_path / "run"], capsys, 1)
    assert "The checkpoint of step 512 was not saved; those before it are untouched." in text
    assert "the disk is full; free some space." in text


def test_control_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    for verb in ("train", "plan"):
        monkeypatch.setitem(cli.VERBS, verb, interrupted)
        text = say([verb, "reach"], capsys, 128 + signal.SIGINT)
        assert ("`etude resume RUN` continues a run" in text) == (verb == "train")


@pytest.mark.parametrize("arguments", [["train", "reach"], ["plan", "ppo"], ["eval"], ["check"]])
def test_help_shows_every_field(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*arguments, "--help-all"])
    assert not stop.value.code
    text = capsys.readouterr().out
    if arguments[0] in ("train", "plan"):
        for name in ("--env.", "--algorithm.gamma", "--clock.total-timesteps", "--learner.device"):
            assert name in text
        assert len(re.findall(r"\(default", text)) > 40


def test_usage_names_every_command() -> None:
    for verb in cli.VERBS:
        assert f"etude {verb}" in cli.USAGE
