"""The curriculum over motions in whole runs: learned from evaluation, exact, and never zero."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
import short_recipes
from etude.api import Interrupted, Run, resume, train
from etude.cli import main as cli
from etude.core.clock import Clock, Loops
from etude.core.contracts import EnvSpec, Fragment
from etude.core.errors import UsageError
from etude.core.trees import copy_arrays, digest
from etude.planning import recipes
from etude.planning.plan import make_curriculum
from etude.runs import checkpoint
from etude.training.curriculum import MotionCurriculum, MotionCurriculumConfig
from etude.training.loop import Callback, Context
from run_hash import run_hash
from toy_envs import BOX
from toys import changed, tiny_motions

NEST = Loops(6, 1, 2, 100, 1)
"""Epochs of two iterations."""


def evaluation(*success: float) -> dict[str, Any]:
    return {"motion": np.arange(float(len(success))), "is_success": np.array(success)}


def test_an_evaluation_counts_from_the_next_epoch_on() -> None:
    one = MotionCurriculum(MotionCurriculumConfig(enabled=True, mix=0.5, decay=0.0), 4)
    clock, even = Clock(NEST), [0.25] * 4
    one.evaluated(evaluation(0, 1, 1, 1))
    clock.advance(1, 0)
    metrics = one.turn(clock)  # in the middle of an epoch
    assert one.broadcast()["weights"].tolist() == even
    assert metrics == {
        "curriculum/failing": 1.0,
        "curriculum/largest_weight": 0.25,
        "curriculum/round": 0.0,
    }
    one.evaluated(evaluation(1, 0, 1, 1))  # evaluation and epoch end together: evaluation first
    clock.advance(1, 0)
    assert one.turn(clock)["curriculum/round"] == 1.0
    assert one.broadcast()["weights"].tolist() == [0.125, 0.625, 0.125, 0.125]
    assert one.broadcast()["round"] == 1


def test_it_goes_on_from_its_state() -> None:
    one, two = (MotionCurriculum(MotionCurriculumConfig(enabled=True), 3) for _ in range(2))
    clock = Clock(NEST)
    for success in ((0, 1, 1), (0, 0, 1)):
        one.evaluated(evaluation(*success))
        clock.advance(1, 0)
        one.turn(clock)
        two.load_state_dict(copy_arrays(one.state_dict()))
        assert digest(two.state_dict()) == digest(one.state_dict())
        assert digest(two.broadcast()) == digest(one.broadcast())
    one.broadcast()["weights"][:] = 0.0  # what was sent out is nobody else's
    assert one.weights.sum() == pytest.approx(1.0)


class Watch(Callback):
    """The motions of finished episodes by iteration; may end the process politely."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at = stop_at
        self.motions: list[np.ndarray[Any, Any]] = []
        self.restarted: list[bool] = []

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        self.motions.append(np.concatenate([f.episodes["motion"] for f in fragments]))
        self.restarted.append(all(f.restarted.all() for f in fragments))
        if context.clock.now.iterations == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module", params=[0, 1])
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Run, Watch]:
    watch = Watch()
    path = tmp_path_factory.mktemp("whole") / "run"
    return request.param, train(tiny_motions(request.param), path, callbacks=[watch]), watch


def test_what_fails_is_practised_more(whole: tuple[int, Run, Watch]) -> None:
    lag, run, watch = whole
    rows = run.rows()
    assert [row["curriculum/round"] for row in rows] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert [row["curriculum/failing"] for row in rows][-1] == 1
    weights = [row["curriculum/largest_weight"] for row in rows]
    assert weights[0] == pytest.approx(1 / 3)
    assert weights == sorted(weights)
    assert 0.8 < weights[-1] < 0.8 + 0.2 / 3 + 1e-9
    assert "rollout/motion" not in rows[-1]
    restarts = [2, 4, 6] if lag == 0 else [3, 5, 7]
    assert [i for i, restarted in enumerate(watch.restarted) if restarted] == restarts
    late = np.concatenate(watch.motions[restarts[1] :])
    assert (late == 0).mean() > 0.6
    assert (late > 0).any()


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_it_resumes_exactly_around_a_new_round(
    stop_at: int, whole: tuple[int, Run, Watch], tmp_path: Path
) -> None:
    lag, untouched, _ = whole
    path = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(tiny_motions(lag), path, callbacks=[Watch(stop_at)])
    latest = (path / "checkpoints" / "latest").resolve()
    assert checkpoint.verify(latest) == stop_at * 256
    resumed = resume(path, callbacks=[Watch()])
    assert run_hash(path) == run_hash(untouched.path)
    assert resumed.fingerprint() == untouched.fingerprint()


def test_threads_change_nothing(whole: tuple[int, Run, Watch], tmp_path: Path) -> None:
    lag, one, _ = whole
    three = train(
        tiny_motions(lag, collector={"threads": 3}), tmp_path / "run", callbacks=[Watch()]
    )
    assert run_hash(three.path) == run_hash(one.path)


def test_the_plan_says_what_happens_and_is_right(whole: tuple[int, Run, Watch]) -> None:
    lag, run, _ = whole
    plan = etude.plan(tiny_motions(lag))
    (note,) = (note for note in plan.notes if "motions" in note)
    assert note.startswith("3 motions")
    assert "at least 6.67%" in note
    assert "at the end of every epoch" in note
    assert plan.counts == run.summary()["counts"]
    saved = (run.path / "checkpoints" / "final").resolve()
    size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    assert plan.bytes["checkpoint"] == pytest.approx(size, rel=0.01)


def test_old_recipes_and_old_curricula_stay_as_they_were() -> None:
    content = short_recipes.find("pick-place-short").model_dump(mode="json")
    del content["motions"]
    recipe = recipes.validated(content, "a file from before")
    assert recipe == short_recipes.find("pick-place-short")
    assert not recipe.motions.enabled


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"curriculum": {"enabled": True}}, "one curriculum"),
        ({"evaluation": {"envs_per_group": 2}}, "envs-per-group 3 --evaluation.num-envs 6"),
        ({"evaluation": {"final_episodes": 100}}, "final-episodes 99"),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        etude.plan(tiny_motions(**sections))


def test_only_motions_can_be_chosen_among() -> None:
    recipe = changed(recipes.find("reach-short"), motions={"enabled": True})
    with pytest.raises(UsageError, match="no motions"):
        make_curriculum(recipe, EnvSpec({}, BOX, 10, ("is_success",)))
    with pytest.raises(UsageError, match="statistics"):
        make_curriculum(recipe, EnvSpec({}, BOX, 10, ("is_success",), motions=("walk",)))


def test_it_can_be_asked_for_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--env.task", "toy_envs:MotionEnv", "--env.evaluation-options", "in_turn", "True"]
    options += ["--motions.enabled", "--motions.mix", "0.25", "--evaluation.final-episodes", "0"]
    options += ["--evaluation.episodes", "3", "--evaluation.num_envs", "3"]
    assert cli.main(["plan", "ppo", *options, "--evaluation.envs-per-group", "3", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert any("at least 25.00%" in note for note in plan["notes"])
    assert cli.main(["plan", "reach", "--motions.enabled"]) == 2
    assert "no motions" in capsys.readouterr().err


def test_whole_episodes_cannot_be_cut() -> None:
    content = recipes.find("sac").model_dump(mode="json")
    content |= tiny_motions().model_dump(mode="json", include={"env", "motions", "evaluation"})
    with pytest.raises(UsageError, match="whole episodes"):
        etude.plan(recipes.validated(content, "a test"))
