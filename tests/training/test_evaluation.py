"""Evaluation: its own streams, all groups, the best so far."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from pydantic import ValidationError

from etude.core.contracts import Array, Broadcast
from etude.core.keys import Key
from etude.core.trees import digest
from etude.rollout.local import Workers
from etude.training.evaluation import (
    EvaluationConfig,
    Evaluator,
    HeldOutEvaluator,
    sampling_error,
    summarise,
)
from toy_envs import ToyEnv
from toys import toy_policy


def make(threads: int = 1) -> tuple[Evaluator, Broadcast]:
    envs = [ToyEnv(2) for _ in range(3)]
    evaluator = Evaluator(envs, toy_policy(envs[0], 1), 12, Key(0), Workers(threads))
    return evaluator, Broadcast(3, dict(toy_policy(envs[0]).state_dict()))


def test_threads_and_history_change_nothing() -> None:
    one, broadcast = make()
    two, _ = make(3)
    two.episodes(broadcast, "other")
    expected = one.episodes(broadcast, 7)
    assert digest(two.episodes(broadcast, 7)) == digest(expected)
    assert len(expected["return"]) == 12
    assert digest(one.episodes(broadcast, 8)) != digest(expected)


def test_groups_play_different_episodes() -> None:
    evaluator, broadcast = make()
    levels = evaluator.episodes(broadcast, 0)["level"]
    assert len(np.unique(levels)) == 12


def test_the_best_is_by_success_then_by_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, broadcast = make()
    results = [(0.5, 1.0), (0.5, 0.9), (0.4, 9.0), (0.5, 1.1), (0.6, -5.0), (0.6, -5.0)]
    verdicts = []
    for success, reward in results:
        fixed = {
            "return": np.full(4, reward),
            "length": np.ones(4),
            "is_success": np.full(4, success),
        }
        monkeypatch.setattr(evaluator, "episodes", lambda *_, fixed=fixed: fixed)
        verdicts.append(evaluator.evaluate(broadcast).is_best)
        state = json.loads(json.dumps(evaluator.state_dict()))
        evaluator, _ = make()
        evaluator.load_state_dict(state)
    # Of two that are equal the later one is the best: it has trained longer.
    assert verdicts == [True, False, False, True, True, True]
    assert evaluator.best == (0.6, -5.0)
    assert (evaluator.num_done, evaluator.num_episodes) == (6, 24)


def test_of_policies_that_cannot_be_told_apart_the_later_is_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four episodes with a spread of 2: a standard error of 1, around the largest so far."""
    evaluator, broadcast = make()
    spread = np.array([-2.0, 2.0, -2.0, 2.0])
    verdicts = []
    for success, reward in [(1.0, 5.0), (1.0, 4.2), (1.0, 3.9), (1.0, 5.5), (1.0, 4.2), (0.5, 9.0)]:
        fixed = {
            "return": reward + spread,
            "length": np.ones(4),
            "is_success": np.full(4, success),
        }
        monkeypatch.setattr(evaluator, "episodes", lambda *_, fixed=fixed: fixed)
        verdicts.append(evaluator.evaluate(broadcast).is_best)
    assert verdicts == [True, True, False, True, False, False]
    assert evaluator.best == (1.0, 5.5)


def verdicts_over_motions(
    monkeypatch: pytest.MonkeyPatch, motions: Array, results: list[Array]
) -> list[bool]:
    """Whether each of some evaluations is the best; each gives the returns [episodes]."""
    evaluator, broadcast = make()
    verdicts = []
    for returns in results:
        fixed = {"return": returns, "length": np.ones(len(returns)), "motion": motions}
        fixed["is_success"] = np.ones(len(returns))
        monkeypatch.setattr(evaluator, "episodes", lambda *_, fixed=fixed: fixed)
        verdicts.append(evaluator.evaluate(broadcast).is_best)
    return verdicts


@pytest.mark.parametrize("times", [1, 4])
def test_less_on_every_motion_is_not_the_best(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips differ by more than 9 % in what can be earned in them, and that is not chance."""
    motions = np.tile(np.arange(12.0), times)
    returns = np.tile(np.geomspace(20.0, 300.0, 12), times)
    assert returns.std() / len(returns) ** 0.5 > 0.09 * returns.mean()
    results = [returns, 0.91 * returns, 0.999 * returns, returns, 1.001 * returns]
    expected = [True, False, False, True, True]
    assert verdicts_over_motions(monkeypatch, motions, results) == expected


def test_motions_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Better on one clip and worse on another by more: the mean decides, without a tolerance."""
    before = np.array([100.0, 10.0, 300.0])
    change = np.array([9.0, 0.0, -10.0])
    results = [before, before + change, before - change]
    assert verdicts_over_motions(monkeypatch, np.arange(3.0), results) == [True, False, True]


def test_what_is_random_inside_motions_is_still_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clips, each four times from drawn starts, +-2 around 10 and 1000: an error of .71."""
    motions, spread = np.repeat([0.0, 1.0], 4), np.tile([-2.0, 2.0], 4)
    returns = np.repeat([10.0, 1000.0], 4) + spread
    fixed = {"return": returns, "motion": motions}
    assert sampling_error(fixed) == pytest.approx(2.0 / 8**0.5)
    results = [returns, returns - 0.6, returns - 0.8]
    assert verdicts_over_motions(monkeypatch, motions, results) == [True, True, False]


def test_without_motions_the_error_is_that_of_the_mean() -> None:
    returns = np.random.default_rng(0).normal(size=50)
    assert sampling_error({"return": returns}) == pytest.approx(returns.std() / 50**0.5)
    assert sampling_error({"return": np.full(50, 0.1)}) == pytest.approx(0.0, abs=1e-12)


def test_a_summary() -> None:
    episodes = {"return": np.array([1.0, 3.0]), "length": np.array([4.0, 6.0])}
    assert summarise(episodes) == {
        "eval/mean_reward": 2.0,
        "eval/std_reward": 1.0,
        "eval/mean_ep_length": 5.0,
        "eval/episodes": 2.0,
    }
    with_success = summarise({**episodes, "is_success": np.array([1.0, 0.0])})
    assert with_success["eval/success_rate"] == 0.5


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match="multiple"):
        EvaluationConfig(episodes=100, num_envs=30, envs_per_group=10)
    with pytest.raises(ValidationError, match="envs_per_group=100"):
        EvaluationConfig(episodes=100, num_envs=100, envs_per_group=30)
    EvaluationConfig(episodes=100, num_envs=100, envs_per_group=100)


def test_of_equal_scores_on_held_out_episodes_the_later_is_the_best() -> None:
    found = iter([(0.5, 2.0), (0.5, 1.0), (0.5, 1.0), (0.5, 1.5), (0.6, 3.0)])
    evaluator = HeldOutEvaluator(
        lambda: dict(zip(("score", "loss"), next(found), strict=True)), 1, "score", "loss"
    )
    verdicts = [evaluator.evaluate(Broadcast(0, {})).is_best for _ in range(5)]
    assert verdicts == [True, True, True, False, True]


def test_held_out_scores_that_chance_may_give_are_never_the_best() -> None:
    found = iter([(0.6, 0.4), (0.7, 0.6), (0.9, 0.5), (0.65, 0.61), (0.7, 0.6)])

    def make_one(metrics: Iterator[tuple[float, float]]) -> HeldOutEvaluator:
        return HeldOutEvaluator(
            lambda: dict(zip(("score", "low"), next(metrics), strict=True)),
            1,
            "score",
            "",
            "low",
            0.5,
        )

    evaluator, verdicts = make_one(found), []
    for _ in range(5):
        verdicts.append(evaluator.evaluate(Broadcast(0, {})).is_best)
        state = json.loads(json.dumps(evaluator.state_dict()))
        evaluator = make_one(found)
        evaluator.load_state_dict(state)
    assert verdicts == [False, True, False, False, True]
    assert evaluator.best == (0.7, -0.0)
    # A best by the score of an earlier version is no bar.
    evaluator.load_state_dict({**state, "score": "eval/return_correlation", "best": [0.9, 0.0]})
    assert evaluator.best is None


def test_without_a_score_in_the_metrics_the_newest_is_the_best() -> None:
    found = iter([2.0, 1.0, 3.0])
    evaluator = HeldOutEvaluator(lambda: {"loss": next(found)}, 1, "score", "loss", "low", 0.5)
    assert [evaluator.evaluate(Broadcast(0, {})).is_best for _ in range(3)] == [True] * 3
