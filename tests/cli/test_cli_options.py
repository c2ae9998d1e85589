"""Options as people type them: numbers, lists, switches, help in two pages, and the Tab key."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from etude.cli import main as cli
from etude.cli.options import parse
from etude.cli.plan import PlanCommand
from etude.cli.target import find_target
from etude.cli.train import TrainCommand
from etude.cli.verbs import OFTEN
from etude.planning.recipe import Recipe


def chosen(*options: str, recipe: str = "reach") -> Recipe:
    """The recipe that a command line asks for."""
    found, rest = find_target([recipe, *options])
    return parse("train", TrainCommand, rest, TrainCommand(recipe=found)).recipe


@pytest.mark.parametrize("text", ["1e6", "1_000_000", "1000000", "1.0e6", "+1e6"])
def test_whole_numbers_as_people_write_them(text: str) -> None:
    assert chosen("--clock.total-timesteps", text).clock.total_timesteps == 1_000_000
    assert chosen(f"--clock.total-timesteps={text}").clock.total_timesteps == 1_000_000


@pytest.mark.parametrize(
    "texts", [["128,64"], ["128", "64"], ["[128,", "64]"], ["(128,64)"], ["128,6_4"]]
)
def test_lists_as_people_write_them(texts: list[str]) -> None:
    assert chosen("--policy.hidden", *texts).policy.hidden == (128, 64)  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["none", "None", "null"])
def test_none_is_understood_where_it_can_be(text: str) -> None:
    recipe = chosen("--algorithm.target-kl", text, "--evaluation.stop-at-success", text)
    assert recipe.algorithm.target_kl is None  # type: ignore[attr-defined]
    assert recipe.evaluation.stop_at_success is None


def test_switches_take_true_and_false_and_may_say_what_is_so_already() -> None:
    assert not chosen("--logs.tensorboard", "false").logs.tensorboard
    assert not chosen("--logs.tensorboard=False").logs.tensorboard
    assert not chosen("--logs.no-tensorboard").logs.tensorboard
    assert not chosen("--no-logs.tensorboard").logs.tensorboard
    assert chosen("--logs.tensorboard").logs.tensorboard
    assert chosen("--logs.no-tensorboard", "false").logs.tensorboard
    assert chosen("--logs.wandb", "true").logs.wandb
    assert not chosen("--logs.no-wandb").logs.wandb


def test_intervals_need_no_quotes() -> None:
    recipe = chosen("--evaluation.every", "5000", "steps", "--checkpoint.every", "2 epochs")
    assert (recipe.evaluation.every, recipe.checkpoint.every) == ("5000 steps", "2 epochs")


def test_from_is_short_for_start_from() -> None:
    assert chosen("--from", "runs/a").start_from == "runs/a"
    assert chosen("--from=runs/a") == chosen("--start-from", "runs/a")
    found, rest = find_target(["reach", "--from", "runs/a"])
    assert parse("plan", PlanCommand, rest, PlanCommand(recipe=found)).recipe.start_from == "runs/a"


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed by a command that then exits well."""
    with suppress(SystemExit):
        assert cli.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_help_needs_no_recipe(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, verb, "--help")
    assert all(f"--{name}" in text for name in OFTEN)
    assert "pick-place-original" in text
    assert re.search(r"--env.kind +a MuJoCo task of your own: FILE.py:Class", text)
    assert max(map(len, text.splitlines())) <= 110
    assert len(page(capsys, verb, "--help-all").splitlines()) > 150


def test_help_has_two_pages(capsys: pytest.CaptureFixture[str]) -> None:
    first, whole = (page(capsys, "train", "reach", word) for word in ("--help", "--help-all"))
    assert "`etude train reach --help-all` shows all" in first
    # What is often changed, what the recipe sets, the task's own, and the command's own.
    for name in ("--algorithm.learning-rate", "--policy.init-std", "--env.tolerance", "--folder"):
        assert f"  {name}" in first
    for name in ("--learner.reduce", "--collector.deadline", "--env.reward.hold"):
        assert f"  {name}" not in first
        assert f"  {name}" in whole
    assert 2 * first.count("\n  --") < whole.count("\n  --") + 10
    assert "--policy.hidden INT ..." in whole


@pytest.mark.parametrize(
    ("recipe", "field"),
    [(name, "dataset") for name in ("bc", "offline", "iql", "reward-only", "pick-place-bc", "rlpd")]
    + [("walk-go1-student", "teacher")],
)
@pytest.mark.parametrize("word", ["--help", "--help-all"])
def test_help_begins_with_what_must_be_given(
    recipe: str, field: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(capsys, "train", recipe, word)
    begun = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert begun[:2] == [f"--algorithm.{field}", "--algorithm.kind"]
    assert len(begun) == len(set(begun))
    assert "Must be given." in " ".join(text.partition("--algorithm.kind")[0].split())
    # The other fields of the algorithm follow, and the command's own after them.
    own = [name.startswith("--algorithm.") for name in begun]
    assert own == sorted(own, reverse=True)
    assert "\n\n\n" not in text


def test_help_of_other_recipes_begins_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for recipe in ("reach", "sac"):
        text = page(capsys, "train", recipe, "--help")
        assert text.index("--folder") < text.index("--algorithm.learning-rate")
        assert "--algorithm.dataset" not in text


def test_a_switch_that_turns_something_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(page(capsys, "train", "reach", "--help-all").split())
    assert "--logs.no-tensorboard Turns off (default: on): Write curves" in words
    assert "--logs.wandb Send rows and the final policy to W&B. --" in words


def test_epochs_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(page(capsys, "train", "reach", "--help-all").split())
    assert "Epochs of the run, each a block of cycles, instead of total_timesteps. Passes" in words
    assert "Passes over the rollout buffer in an update; epochs of the run" in words
    assert "update epochs (passes over the buffer)" in " ".join(
        page(capsys, "plan", "reach").split()
    )


HELP_PAGE = """\
  --learner.device cpu|cuda|auto
        Device of the learner. (default: auto)
  --algorithm.kind KIND
  --algorithm.learning-rate NUMBER
  --stochastic
"""


class Bash:
    """An interactive bash on a terminal, with the completion loaded and a quick `etude`."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "completion").write_text(script)
        (folder / "page").write_text(HELP_PAGE)
        (folder / "setup").write_text(
            f'etude() {{ case "$*" in *--help-all) cat {folder}/page ;; '
            f'*) {sys.executable} -m etude "$@" ;; esac; }}\n'
            f"source {folder}/completion\necho rea''dy\n"
        )
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "PS1": "> ", "TERM": "dumb"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environment)
        self.type(f"source {folder}/setup\n", "ready\r")

    def type(self, text: str, awaited: str) -> str:
        """What the terminal shows after some keys, until the awaited text."""
        os.write(self.fd, text.encode())
        shown, end = "", time.monotonic() + 30
        while awaited not in shown and time.monotonic() < end:
            if select.select([self.fd], [], [], 0.1)[0]:
                shown += os.read(self.fd, 4096).decode(errors="replace")
        return shown

    def close(self) -> None:
        os.write(self.fd, b"\x15exit\n")
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def test_the_tab_key_of_a_real_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bash = Bash(tmp_path, page(capsys, "completion", "bash"))
    try:
        for typed, completed in [
            ("etude tra", "etude train "),
            ("etude train reach-sh", "etude train reach-short "),
            ("etude train reach --algorithm.lea", "--algorithm.learning-rate "),
            ("etude train reach --learner.device cu", "--learner.device cuda "),
            ("etude train reach --algorithm.kind td", "--algorithm.kind td3 "),
            ("etude eval --stoch", "etude eval --stochastic "),
            ("etude data rec", "etude data record "),
            (f"etude eval {tmp_path}/set", "/setup "),
        ]:
            assert completed in bash.type(f"{typed}\t", completed), typed
            bash.type("\x15", "> ")
    finally:
        bash.close()


@pytest.mark.parametrize(("values", "said"), [("2", "more values"), ("1 2 3", "2 values at most")])
def test_a_pair_with_too_few_or_too_many_values(
    values: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "walk-go1", "--env.random.latency", *values.split()]) == 2
    assert f"--env.random.latency must have {said}" in capsys.readouterr().err
