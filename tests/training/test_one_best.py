"""One best: the checkpoint, the summary, the console, the last line and the page agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.core.metrics import Best
from etude.planning import recipes
from etude.runs import checkpoint
from etude.training.loop import Callback, Context
from toys import tiny_reach

EVERY = {"every": "1 iteration", "episodes": 8, "num_envs": 4, "envs_per_group": 4}
RECIPE = tiny_reach(
    6, evaluation={**EVERY, "final_episodes": 4}, clock={"cycles": 2, "iterations": 1}
)


def kept(run: Run) -> Best:
    """The best of a finished run from its checkpoint, after a look at everything else on disk."""
    found = checkpoint.best(run.folder.checkpoints)
    assert found is not None
    assert (run.folder.checkpoints / "best").resolve().name == checkpoint.step_name(found.step)
    summary = run.summary()
    assert Best(*summary["best"], summary["best_step"]) == found
    rows = {row["timesteps"]: row for row in run.rows()}
    assert rows[found.step]["eval/mean_reward"] == found.reward
    return found


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run of the command line in which an evaluation before the best has a higher return."""
    folder = tmp_path_factory.mktemp("one")
    for seed in range(20):
        file, path = folder / f"{seed}.yaml", folder / f"run-{seed}"
        file.write_text(recipes.dump(RECIPE.replace(seed=seed)))
        with pytest.MonkeyPatch.context() as patch:
            lines: list[str] = []
            patch.setattr("sys.stdout", _Lines(lines))
            assert cli.main(["train", str(file), "--folder", str(path)]) == 0
        run = Run(path)
        rewards = [row["eval/mean_reward"] for row in run.rows()]
        if max(rewards) > kept(run).reward and kept(run).success == 0.0:
            return run, "".join(lines)
    raise AssertionError("no seed has the case")


class _Lines:
    """A stream that keeps what is written."""

    def __init__(self, lines: list[str]) -> None:
        self.write, self.flush = lines.append, lambda: None

    def isatty(self) -> bool:
        return False


def test_all_outputs_name_the_best_that_is_kept(output: tuple[Run, str], tmp_path: Path) -> None:
    run, text = output
    best = kept(run)
    words = f"{best.reward:.2f} at {best.step:,}"
    last_epoch = [line for line in text.splitlines() if line.startswith("  epoch")][-1]
    assert f"(best {words})" in last_epoch or f"(best 0.0% at {best.step:,})" in last_epoch
    (end,) = [line for line in text.splitlines() if line.startswith("Last evaluation in training")]
    assert end.endswith((f"best {words}.", f"best 0.0% at {best.step:,}."))
    assert f"Now the policy of step {best.step:,}: the best of 6 evaluations" in text
    assert cli.main(["report", str(run.path), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"\(best [^)]* at ([\d,]+)\)", page) == [f"{best.step:,}"]


class Bests(Callback):
    def __init__(self) -> None:
        self.found: list[Best | None] = []

    def run_start(self, context: Context) -> None:
        self.found.append(context.best)

    def evaluation_end(self, context: Context, metrics: dict[str, float]) -> None:
        self.found.append(context.best)


def test_a_resumed_run_begins_with_the_best_of_its_checkpoint(tmp_path: Path) -> None:
    whole, first, second = Bests(), Bests(), Bests()
    train(RECIPE, tmp_path / "whole", callbacks=[whole])
    train(RECIPE.replace(clock__total_timesteps=3 * 256), tmp_path / "run", callbacks=[first])
    run = resume(tmp_path / "run", total_timesteps=6 * 256, callbacks=[second])
    assert first.found[0] is None
    assert second.found[0] == first.found[-1] is not None
    assert second.found[-1] == kept(run)
