"""Sweeps: rungs, what follows from them, and what is left of a sweep that was killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etude
import etude.api
from etude.building.build import SUMMARY
from etude.cli.main import main
from etude.compare.sweeps import running
from etude.compare.sweeps.halving import (
    Asked,
    Sweep,
    Trial,
    fitting,
    most_rungs,
    pauses,
    rung_titles,
    to_csv,
    to_json,
    to_table,
)
from etude.core.clock import Loops
from etude.core.errors import RESUMABLE, EtudeError, UsageError
from etude.planning.resolve import resolve
from etude.training.loop import Callback, Context
from toys import tiny_reach

RECIPE = tiny_reach(
    6,
    evaluation={"every": "2 iterations", "final_episodes": 0},
    collector={"num_envs": 32, "envs_per_group": 8, "threads": 1},
)
VARY = ("algorithm.learning_rate=1e-3,1e-2,3e-2", "algorithm.minibatch_size=64,100")
ASKED = Asked(VARY, "grid", trials=6, rungs=2)


def test_a_paused_run_ends_with_the_bits_of_one_that_never_paused(tmp_path: Path) -> None:
    """Also where the next iteration is collected already when it pauses."""
    recipe = tiny_reach(4, collector={"num_envs": 32, "envs_per_group": 8, "lag": 1})
    whole, path = etude.train(recipe, tmp_path / "whole"), tmp_path / "paused"
    etude.api.create(resolve(recipe), path)
    done: list[int] = []

    class Count(Callback):
        def iteration_end(self, context: Context, fragments: Any) -> None:
            done.append(context.clock.now.iterations)

    for after in (1, 3, 2, None):
        etude.resume(path, pause_after=after, callbacks=[Count()])
    assert done == [1, 2, 3, 4]
    assert etude.Run(path).fingerprint() == whole.fingerprint()
    assert etude.Run(path).summary() == whole.summary()


def test_rungs_end_where_an_evaluation_was_logged() -> None:
    asked = Asked(("a=1",), trials=9, rungs=3)
    loops = Loops(18, 2, 5, 256, 4)  # rows every 2 iterations
    every = RECIPE.replace(evaluation__every="3 iterations")
    assert pauses(every, loops, asked) == [4, 6, 18]
    assert pauses(RECIPE.replace(evaluation__every="never"), loops, asked) == [2, 6, 18]
    rare = RECIPE.replace(evaluation__every="9 iterations")
    with pytest.raises(UsageError, match=r"3 rungs do not fit.*10, 10, 18"):
        pauses(rare, loops, asked)
    assert fitting(rare, loops, asked).rungs == 2
    assert fitting(RECIPE.replace(evaluation__every="18 iterations"), loops, asked).rungs == 1
    assert [most_rungs(n, 3) for n in (1, 2, 3, 8, 9, 16, 27)] == [1, 1, 2, 2, 3, 3, 4]


def test_the_best_go_on_and_ties_are_settled(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, RECIPE, Asked(("seed=1..9",), trials=6, rungs=2))
    scores, ties = [0.0, 0.5, 0.5, 0.5, 0.0], [9.0, 1.0, 2.0, 2.0, 0.0]
    for n, (score, tie) in enumerate(zip(scores, ties, strict=True)):
        sweep.trials.append(Trial(n, 0, {"seed": n}, scores=[score], ties=[tie]))
    sweep.trials.append(Trial(5, 0, {"seed": 5}, refused="impossible"))
    sweep.complete = 1
    assert [t.number for t in sweep.contenders()] == [2]
    sweep.asked = Asked(("seed=1..9",), trials=6, rungs=2, reduction_factor=2, minimize=True)
    assert [t.number for t in sweep.contenders()] == [0, 4]
    sweep.trials[0].failed = "diverged"  # nobody takes its place
    assert [t.number for t in sweep.contenders()] == [4]


# A sweep whose processes are calls in this one.


def trained(path: Path, after: int | None) -> None:
    """What a process of a sweep does."""
    etude.resume(path, pause_after=after)


def pretended(path: Path, after: int | None) -> None:
    """The same without training: the rows of a run, whose score is its learning rate."""
    score = etude.Run(path).recipe.algorithm.learning_rate
    for iterations in range(2, (after or 6) + 1, 2):
        row = {"iterations": iterations, "timesteps": 256 * iterations, "eval/mean_reward": score}
        with (path / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
    if after is None:
        (path / "summary.json").write_text("{}")


class Fake:
    """Begins trials here; a fault may take the place of one, by the number of the call."""

    def __init__(
        self,
        faults: dict[int, Callable[[], int]] | None = None,
        seed: int = 0,
        work: Callable[[Path, int | None], None] = trained,
    ) -> None:
        self.faults, self.calls, self.work = faults or {}, 0, work
        self.begun: list[str] = []
        self.chance = random.Random(seed)

    def __call__(self, verb: list[str], log: Path) -> Fake.Process:
        self.calls += 1
        self.begun.append(Path(verb[1]).name)
        after = int(verb[verb.index("--pause-after") + 1]) if "--pause-after" in verb else None

        def work() -> int:
            self.work(Path(verb[1]), after)
            return 0

        return Fake.Process(self.faults.get(self.calls, work), self.chance)

    class Process:
        def __init__(self, work: Callable[[], int], chance: random.Random) -> None:
            self.work, self.chance = work, chance

        def poll(self) -> int | None:
            return None if self.chance.random() < 0.5 else self.work()

        def send_signal(self, number: int) -> None:
            self.work = lambda: RESUMABLE


def pretending(faults: dict[int, Callable[[], int]] | None = None, seed: int = 0) -> Fake:
    return Fake(faults, seed, pretended)


def iterations_pretended(path: Path) -> int:
    """As many as a pretended run has rows for: it has no checkpoints."""
    log = path / "metrics.jsonl"
    rows = log.read_text().splitlines() if log.exists() else []
    return int(json.loads(rows[-1])["iterations"]) if rows else 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.compare.sweeps.processes._POLL", 0.001)


def done(folder: Path, start: Fake, workers: int = 3) -> Sweep:
    """The sweep in a folder, brought to its end."""
    new = not (folder / "sweep.json").exists()
    sweep = Sweep.create(folder, RECIPE, ASKED) if new else Sweep.open(folder)
    try:
        running.run(sweep, start, workers, lambda text: None)
    finally:
        sweep.close()
    return sweep


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("etude.compare.sweeps.processes._POLL", 0.001)
        return done(tmp_path_factory.mktemp("sweep") / "quiet", Fake())


def fingerprints(sweep: Sweep) -> list[dict[str, str]]:
    return [etude.Run(sweep.path(t)).fingerprint() for t in sweep.trials if not t.refused]


def test_impossible_trials_are_refused_before_any_training(quiet: Sweep) -> None:
    refused = [trial for trial in quiet.trials if trial.refused]
    assert [trial.number for trial in refused] == [1, 3, 5]
    assert all("does not divide the buffer" in trial.refused for trial in refused)
    assert not any(quiet.path(trial).exists() for trial in refused)
    text = to_table(quiet)
    assert "t1, t3, t5: algorithm.minibatch_size 100 does not divide" in text
    assert text.count("refused") == 3
    assert rung_titles(quiet) == ["at 512", "at 1,536"]
    assert to_csv(quiet).splitlines()[0].startswith("trial,algorithm.learning_rate,algorithm.mini")
    assert sorted(len(t.scores) for t in quiet.trials) == [0, 0, 0, 1, 1, 2]
    best = quiet.best()
    assert best is not None
    assert to_json(quiet)["best"] == str(quiet.path(best))
    assert etude.Run(quiet.path(best)).summary()["counts"]["iterations"] == 6


def test_survivors_are_ordinary_runs(quiet: Sweep, tmp_path: Path) -> None:
    best = quiet.best()
    assert best is not None
    whole = etude.train(running.recipe_of(quiet, best), tmp_path / "whole")
    assert etude.Run(quiet.path(best)).fingerprint() == whole.fingerprint()


def killed() -> int:
    return -signal.SIGKILL


def stopping() -> int:
    raise InterruptedError


def test_killed_sweeps_and_workers_end_with_the_same_table(quiet: Sweep, tmp_path: Path) -> None:
    """Whatever order trials end in, and wherever the sweep is ended."""

    def partly() -> int:  # killed after a checkpoint, before the rung's end
        etude.resume(tmp_path / "loud" / "t0", pause_after=1)
        return -signal.SIGKILL

    starts = [Fake({1: partly, 2: killed, 4: stopping}, seed=1), Fake({1: killed, 3: stopping}, 2)]
    for start in starts:
        with pytest.raises(InterruptedError):
            done(tmp_path / "loud", start, workers=2)
    last = Fake(seed=3)
    loud = done(tmp_path / "loud", last, workers=1)
    assert to_table(loud) == to_table(quiet)
    assert fingerprints(loud) == fingerprints(quiet)
    begun = [name for start in (*starts, last) for name in start.begun]
    assert len(begun) > 4
    again = Fake()
    assert to_table(done(tmp_path / "loud", again)) == to_table(quiet)
    assert not again.begun


@pytest.fixture
def _rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretended runs have no checkpoints and no evaluations: their rows say how far they are."""
    monkeypatch.setattr(running, "iterations_of", iterations_pretended)
    monkeypatch.setattr(running, "is_finished", lambda path, recipe: (path / SUMMARY).exists())


@pytest.mark.usefixtures("_rows_count")
def test_a_trial_that_diverges_is_left_behind(tmp_path: Path) -> None:
    sweep = done(tmp_path / "sweep", pretending({1: lambda: 3}))
    assert sweep.trials[0].failed.startswith("diverged")
    assert "t0: diverged: not a finite number" in to_table(sweep)
    assert sweep.best() is not None


@pytest.mark.usefixtures("_rows_count")
def test_failures_end_the_sweep_and_can_be_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"

    def failing() -> int:
        folder.joinpath("t0.log").write_text("...\nThe disk is full.\n\n")
        return 1

    with pytest.raises(EtudeError, match=r"t0 failed: The disk is full\. .* --drop 0"):
        done(folder, pretending({1: failing}))
    with pytest.raises(EtudeError, match="killed 3 times in a row"):
        done(folder, pretending(dict.fromkeys(range(1, 9), killed)))
    sweep = Sweep.open(folder)
    with pytest.raises(UsageError, match="is being written"):
        Sweep.open(folder)
    sweep.close()
    assert main(["sweep", "--resume", str(folder), "--drop", "9"]) == 2
    assert "has no trial 9" in capsys.readouterr().err
    sweep = Sweep.open(folder)
    sweep.trials[0].failed = "dropped"
    sweep.save()
    sweep.close()
    sweep = done(folder, pretending())
    assert sweep.trials[0].scores == []
    assert sweep.best() is not None


def test_a_signal_stops_the_trials_and_the_sweep(tmp_path: Path) -> None:
    def struck() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return -signal.SIGTERM

    with pytest.raises(running.Stopped, match="etude sweep --resume") as end:
        done(tmp_path / "sweep", pretending({2: struck}))
    assert end.value.exit_code == RESUMABLE


def test_nothing_is_left_where_no_trial_can_be_run(tmp_path: Path) -> None:
    asked = Asked(("algorithm.minibatch_size=100,200",), "grid", trials=2)
    with pytest.raises(UsageError, match=r"None of the 2 trials can be run: .* does not divide"):
        running.run(Sweep.create(tmp_path / "s", RECIPE, asked), Fake(), 1, lambda text: None)
    assert not (tmp_path / "s").exists()


@pytest.mark.usefixtures("_rows_count")
def test_brackets_learn_from_those_before(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    asked = Asked(("algorithm.learning_rate=1e-4..1e-2:log",), "tpe", trials=2, brackets=2)
    tables = []
    for seed, workers in ((1, 1), (2, 2)):
        sweep = Sweep.create(tmp_path / str(seed), RECIPE, asked)
        running.run(sweep, pretending(seed=seed), workers, lambda text: None)
        sweep.close()
        tables.append(to_table(sweep))
        assert [trial.bracket for trial in sweep.trials] == [0, 0, 1, 1]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "Name a recipe first"),
        ("--workers 2", "Name a recipe first"),
        ("--resume", "--resume needs a value."),
        ("--resume nothing", "is not a sweep"),
        ("reach-short", "Name a field to vary"),
        ("reach-short --vary seed=0,1 --resume x", "etude sweep --resume x"),
        ("reach-short --vary seed=0,1 --vary seed=2,3", "names a field twice"),
        ("reach-short --vary seed=0,1 --trials 3", "leaves 2 different trials"),
        ("reach-short --vary seed=0,1 --rungs 3", "1 rung at most"),
        ("reach-short --vary seed=0,1 --sampler random", "give their number with --trials"),
        ("reach-short --vary seed=0,1 --sampler grid --trials 2", "leave --trials"),
        ("reach-short --vary seed=0..9", "give --trials N"),
        ("reach-short --vary seed=0,1 --eta 2", "did you mean --reduction-factor"),
    ],
)
def test_mistakes_are_answered(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sweep", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_command_goes_on_and_prints_the_table(
    quiet: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--resume", str(quiet.folder)]) == 0
    assert to_table(quiet).splitlines()[2] in capsys.readouterr().out
    assert main(["sweep", "--resume", str(quiet.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "eval/success_rate"
    assert main(["sweep", "reach-short", "--vary", "seed=0,1", "--folder", str(quiet.folder)]) == 2
    assert "is another sweep" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(quiet.folder), "--metric", "eval/mean_reward"]) == 2
    assert "already been ranked by eval/success_rate" in capsys.readouterr().err
