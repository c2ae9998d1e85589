"""The curriculum over motions in whole runs: learned from failures, exact, and never zero."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import etude
import short_recipes
from etude.api import Interrupted, Run, resume, train
from etude.cli import main as cli
from etude.core.contracts import EnvSpec, Fragment
from etude.core.errors import UsageError
from etude.core.trees import copy_arrays, digest
from etude.planning import recipes
from etude.planning.plan import make_curriculum
from etude.runs import checkpoint
from etude.training.curriculum import MotionCurriculumConfig
from etude.training.loop import Callback, Context
from etude.training.practice import (
    MotionCurriculum,
    floor,
    practice_weights,
    run_up_weights,
    visited,
)
from run_hash import run_hash
from toy_envs import BOX
from toys import changed, tiny_motions


def ended(motion: int, start: float, played: float, success: int) -> dict[str, Any]:
    """The statistics of one episode."""
    values = {"motion": motion, "start": start, "played": played, "is_success": success}
    return {name: np.array([float(value)]) for name, value in values.items()}


@given(start=st.floats(0, 0.999), played=st.floats(0, 3), bins=st.integers(1, 12), data=st.data())
def test_parts_that_an_episode_was_in(start: float, played: float, bins: int, data: Any) -> None:
    """Every place of an episode is in one of them, and each of them has a place of the episode."""
    (found,) = visited(np.array([start]), np.array([played]), bins)
    place = start + data.draw(st.floats(0, 1)) * played
    assert found[int(place * bins) % bins]
    for part in range(int(start * bins) + 1, int((start + played) * bins) + 1):
        assert found[part % bins]
    assert found.sum() == min(bins, int((start + played) * bins) - int(start * bins) + 1)


def test_failure_rates_are_those_of_a_part_among_episodes_that_came_to_it() -> None:
    one = MotionCurriculum(MotionCurriculumConfig(enabled=True, decay=0.0), 2, 4)
    assert one.broadcast()["starts"].tolist() == [[0.125] * 4] * 2
    metrics = one.update(
        [
            ended(1, 0.1, 0.5, 0),  # through parts 0 and 1, and fails in part 2
            ended(1, 0.5, 0.45, 1),  # through parts 2 and 3
            ended(1, 0.8, 0.1, 0),  # fails in part 3
            ended(0, 0.9, 0.2, 0),  # a loop: from part 3, and fails in part 0
        ]
    )
    np.testing.assert_allclose(one.rates, [[1, 0, 0, 0], [0, 0, 1 / 2, 1 / 2]])
    assert metrics["curriculum/failing"] == 3.0
    two = MotionCurriculum(MotionCurriculumConfig(enabled=True, decay=0.5), 1, 1)
    for success in (0, 0, 1, 1):
        two.update(
            [{name: np.array([v]) for name, v in [("motion", 0.0), ("is_success", success)]}]
        )
    # Failures 1/8 + 1/4 of 1/8 + 1/4 + 1/2 + 1 episodes.
    np.testing.assert_allclose(two.rates, [[0.375 / 1.875]])


def test_failures_are_practised_from_the_run_up() -> None:
    rates = np.zeros((2, 5))
    rates[0, 3], rates[1, 0] = 0.7, 0.2
    found = run_up_weights(rates, 3, 0.5)
    np.testing.assert_allclose(found[0], np.array([0, 1, 2, 4, 0]) * 0.1)
    np.testing.assert_allclose(found[1], [0.2, 0, 0, 0, 0])  # nothing before the first part


@given(
    rates=arrays(np.float64, (3, 4), elements=st.floats(0, 1)),
    mix=st.floats(0, 0.95),
    run_up=st.integers(1, 6),
)
def test_no_part_has_probability_zero(rates: Any, mix: float, run_up: int) -> None:
    spread = run_up_weights(rates, run_up, 0.8)
    np.testing.assert_allclose(spread.sum(axis=1), rates.sum(axis=1))
    weights = practice_weights(spread, mix)
    assert weights.sum() == pytest.approx(1.0)
    assert weights.min() >= floor(12, mix) - 1e-12
    order = spread.ravel().argsort()
    assert (np.diff(weights.ravel()[order]) >= -1e-12).all()


def test_it_goes_on_from_its_state() -> None:
    one, two = (MotionCurriculum(MotionCurriculumConfig(enabled=True), 3, 10) for _ in range(2))
    for played in (0.2, 0.35):
        one.update([ended(1, 0.3, played, 0), ended(2, 0.0, played, 1)])
        two.load_state_dict(copy_arrays(one.state_dict()))
        assert digest(two.state_dict()) == digest(one.state_dict())
        assert digest(two.broadcast()) == digest(one.broadcast())
    before = digest(one.state_dict())
    one.broadcast()["starts"][:] = 0.0
    one.state_dict()["visits"][:] = 0.0
    assert digest(one.state_dict()) == before


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
    _, run, watch = whole
    rows = run.rows()
    assert rows[-1]["curriculum/failing"] == 1
    # Of three motions the one that always fails gets 0.8, and its third of the rest.
    assert rows[-1]["curriculum/largest_weight"] == pytest.approx(0.8 + 0.2 / 3)
    assert "rollout/motion" not in rows[-1]
    assert not any(watch.restarted)
    late = np.concatenate(watch.motions[4:])
    assert (late == 0).mean() > 0.6
    assert (late > 0).any()


@pytest.mark.parametrize("stop_at", [3, 4, 5])
def test_it_resumes_exactly(stop_at: int, whole: tuple[int, Run, Watch], tmp_path: Path) -> None:
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
    assert "3 motions, each, with a probability of at least 6.67%" in note
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


def test_replay_may_practise_too() -> None:
    """Nothing is cut off by new weights, so that algorithms with whole episodes have them too."""
    content = recipes.find("sac").model_dump(mode="json")
    content |= tiny_motions().model_dump(mode="json", include={"env", "motions", "evaluation"})
    assert any(
        "3 motions" in note for note in etude.plan(recipes.validated(content, "a test")).notes
    )
