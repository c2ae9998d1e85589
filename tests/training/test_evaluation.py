"""Evaluation: its own streams, all groups, the best so far."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from etude.core.contracts import Broadcast
from etude.core.keys import Key
from etude.core.trees import digest
from etude.rollout.local import Workers
from etude.training.evaluation import EvaluationConfig, Evaluator, HeldOutEvaluator, summarise
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
