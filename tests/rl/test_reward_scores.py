"""Scores of a learned reward: .5 for a constant, 1 for the true one, none without a signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude.core.contracts import ActionSpec, ArraySpec, Broadcast, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.metrics import Health
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.data.store.labels import Labels
from etude.data.store.views import EpisodesOf
from etude.models.reward_networks import RewardNetworkConfig
from etude.planning import recipes
from etude.planning.recipe import metrics_of
from etude.rl.reward_only import RewardOnly, RewardOnlyConfig, make_reward_only
from etude.rl.rewards.rrd import RRDConfig
from etude.rl.rewards.scores import (
    MOST,
    Judged,
    evaluate,
    missing,
    not_above_chance,
    pairs_score,
    progress_score,
    spearman,
    success_score,
    tails,
    windows_share,
)
from etude.runs.files import Disk
from etude.training.evaluation import HeldOutEvaluator
from toys import changed, toy_dataset

Array = np.ndarray[Any, Any]
WEIGHTS = np.array([1.0, -0.5, 0.25, 0.0])
SCORES = {"eval/reward_pairs", "eval/reward_success", "eval/reward_progress"}
LINEAR = RRDConfig(network=RewardNetworkConfig(hidden=()))
FAILURES = (False, True, True, False, True, False, True, True, False, True)


def write(path: Path, kind: str, episodes: int = 40) -> Path:
    """Random walks of 10 to 60 steps.

    dense: the reward is linear in the state, and progress is what it adds up to. sparse: 1 at the
    end of each. failures: the same, and 0 for four of ten. In the last two cases the last number
    of the state is 1 in the step that is rewarded and 0 elsewhere, and the one before it is 1 in
    the first step and 0 elsewhere.
    """
    spec = {"state": ArraySpec((4,)), "progress": ArraySpec((1,))}
    specs = store_specs(EnvSpec(spec, ActionSpec("box", (-1.0,) * 2, (1.0,) * 2), None))
    store, labels = EpisodeStore.create(path, StoreGeometry(specs, 1, 100), Disk()), Labels()
    rng = np.random.default_rng(7)
    for number in range(episodes):
        length = int(rng.integers(10, 60))
        state = rng.normal(size=(length + 1, 4)).cumsum(0) * 0.15 + rng.normal(size=4)
        success = kind != "failures" or FAILURES[number % len(FAILURES)]
        if kind == "dense":
            rewards = state[:-1] @ WEIGHTS
        else:
            rewards = success * np.eye(length)[-1]
            state[:, 3] = np.append(rewards, 0.0)
            state[:, 2] = np.eye(length + 1)[0]
        progress = np.concatenate(([0.0], rewards.cumsum()))[:, None].astype(np.float32)
        obs = {"state": state.astype(np.float32), "progress": progress}
        actions = rng.uniform(-1, 1, (length, 2)).astype(np.float32)
        store.append_episode(obs, actions, rewards.astype(np.float32), True)
        labels.add(str(number), success=None if kind == "dense" else success)
    store.seal(labels).close()
    return path


def learner(path: Path, **changes: Any) -> RewardOnly:
    config = RewardOnlyConfig(dataset=str(path), rrd=LINEAR, held_out=0.3, **changes)
    return make_reward_only(config, EpisodeStore.open(path), torch.device("cpu"), Key(5))


def set_reward(algorithm: RewardOnly, weights: Array, bias: float = 0.0) -> None:
    """Make the network r = weights . state + bias."""
    parameters = dict(algorithm.policy.named_parameters())
    (weight,) = (x for x in parameters.values() if x.ndim == 2)
    (offset,) = (x for x in parameters.values() if x.ndim == 1)
    with torch.no_grad():
        weight.zero_()
        weight[0, :4] = torch.from_numpy(weights)
        offset.fill_(bias)


def scores(algorithm: RewardOnly) -> dict[str, float]:
    return {name: value for name, value in algorithm.evaluate().items() if name in SCORES}


@pytest.mark.parametrize("constant", [0.1, 1.0 / 3.0, -0.7, 0.0])
@pytest.mark.parametrize("kind", ["dense", "sparse", "failures"])
def test_a_constant_scores_chance_exactly(tmp_path: Path, kind: str, constant: float) -> None:
    algorithm = learner(write(tmp_path / "data", kind), progress="progress")
    set_reward(algorithm, np.zeros(4), constant)
    found = algorithm.evaluate()
    assert found.keys() >= (SCORES if kind == "failures" else {"eval/reward_pairs"})
    for name in SCORES & found.keys():
        assert (found[name], found[f"{name}_low"], found[f"{name}_high"]) == (0.5, 0.5, 0.5)


def test_sums_of_a_constant_follow_the_returns_of_clips_all_the_same(tmp_path: Path) -> None:
    """What was printed before: with clips as failures, a constant correlates with the returns."""
    held_out = learner(write(tmp_path / "data", "sparse")).held_out
    assert held_out.num_clips
    assert spearman(0.1 * held_out.lengths, held_out.returns) > 0.5


@pytest.mark.parametrize("kind", ["dense", "sparse", "failures"])
def test_the_true_reward_scores_1_and_its_opposite_0(tmp_path: Path, kind: str) -> None:
    algorithm = learner(write(tmp_path / "data", kind), progress="progress")
    truth = WEIGHTS if kind == "dense" else np.array([0.0, 0.0, 0.0, 1.0])
    expected = {"eval/reward_pairs", "eval/reward_progress"}
    expected |= {"eval/reward_success"} if kind == "failures" else set()
    for sign, score in ((1.0, 1.0), (-1.0, 0.0)):
        set_reward(algorithm, sign * truth)
        assert scores(algorithm) == dict.fromkeys(expected, pytest.approx(score))


def test_equal_returns_give_no_number_but_a_note(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "sparse")
    algorithm = learner(path, add_truncated=0, allow_equal_returns=True)
    assert algorithm.held_out.num_clips == 0
    assert algorithm.evaluate().keys() == {"eval/R_loss", "eval/R_loss_of_constant"}
    note = missing(algorithm.held_out, None)
    assert "eval/reward_pairs (all sums of rewards are equal)" in note
    assert "eval/reward_success (there are no failures)" in note
    assert "eval/reward_progress (algorithm.progress is not set)" in note
    whole = learner(write(tmp_path / "other", "failures"), progress="progress")
    assert missing(whole.held_out, "progress") == ""


def test_the_plan_says_what_the_best_is_chosen_by(tmp_path: Path) -> None:
    recipe = recipes.find("reward-only")
    rrd = recipe.algorithm.rrd.model_dump(mode="json") | {"network": {"reads": ("state",)}}
    data = {"dataset": str(write(tmp_path / "data", "sparse")), "rrd": rrd}
    notes = " ".join(etude.plan(changed(recipe, algorithm=data)).notes)
    assert "the highest eval/reward_pairs, among those whose 95 % interval is above 0.5" in notes
    assert "cannot give eval/reward_success (there are no failures)" in notes
    data |= {"add_truncated": 0, "allow_equal_returns": True}
    notes = " ".join(etude.plan(changed(recipe, algorithm=data)).notes)
    assert "No held-out episodes give eval/reward_pairs: the newest reward counts" in notes


def test_clips_count_in_the_loss_and_so_where_scores_are_equal(tmp_path: Path) -> None:
    """A reward in each first step adds up to the return of every episode, but not of its clips."""
    algorithm = learner(write(tmp_path / "data", "sparse"))
    held_out, first, end = algorithm.held_out, np.eye(4)[2], np.eye(4)[3]
    set_reward(algorithm, first)
    found = algorithm.evaluate()
    is_clip = np.arange(held_out.num_episodes) >= held_out.num_whole
    expected = (is_clip / held_out.lengths**2).mean()
    assert found["eval/R_loss"] == pytest.approx(expected)
    assert found["eval/R_loss"] > 0.0
    pairs, low = "eval/reward_pairs", "eval/reward_pairs_low"
    evaluator = HeldOutEvaluator(algorithm.evaluate, 12, pairs, "eval/R_loss", low, 0.5)
    verdicts = []
    for bias in (0.2, 0.0, 0.1):  # which does not change a pair
        set_reward(algorithm, end, bias)
        result = evaluator.evaluate(Broadcast(0, {}))
        assert result.metrics[pairs] == 1.0
        verdicts.append(result.is_best)
    assert verdicts == [True, True, False]


def test_none_is_the_best_that_does_not_beat_a_constant(tmp_path: Path) -> None:
    algorithm = learner(write(tmp_path / "data", "failures"))
    low = "eval/reward_pairs_low"
    evaluator = HeldOutEvaluator(
        algorithm.evaluate, 12, "eval/reward_pairs", "eval/R_loss", low, 0.5
    )
    end = np.array([0.0, 0.0, 0.0, 1.0])
    verdicts = []
    for weights, bias in ((0.0 * end, 0.02), (-end, 0.0), (end, 0.0), (0.0 * end, 0.02)):
        set_reward(algorithm, weights, bias)
        verdicts.append(evaluator.evaluate(Broadcast(0, {})).is_best)
    assert verdicts == [False, False, True, False]


def judged(lengths: list[int], rewards: Any, groups: list[int] | None = None) -> Judged:
    """Episodes whose stored reward is 1 at the end of every other one."""
    stored = [np.eye(n)[-1] * (i % 2) for i, n in enumerate(lengths)]
    learned = [rewards(n, i % 2) for i, n in enumerate(lengths)]
    places = np.arange(len(lengths)) if groups is None else np.array(groups)
    return Judged(learned, stored, places, [bool(i % 2) for i in range(len(lengths))])


def test_tails_by_hand() -> None:
    table = tails([np.array([1.0, 2.0, 4.0]), np.array([8.0, 16.0])])
    assert table.tolist() == [[7.0, 6.0], [24.0, 24.0]]


def test_scores_by_hand() -> None:
    lengths = [3, 4, 5, 6, 7]  # 1 and 3 succeed
    shares = {1: 0.5, 3: 0.4, 0: 0.1, 2: 0.45, 4: -1.0}
    found = judged(lengths, lambda n, won: np.full(n, shares[n - 3]))
    # 1 beats 0, 2, 4; 3 beats 0 and 4.
    assert success_score(found)[0] == pytest.approx(5 / 6)  # type: ignore[index]
    assert pairs_score(found)[0] == pytest.approx(5 / 6)  # type: ignore[index]


def test_lengths_alone_tell_nothing() -> None:
    """Successes twice as long as failures: the sum of a constant is, its score is not above .5."""
    lengths = [10, 20] * 10
    found = judged(lengths, lambda n, won: np.full(n, 0.3))
    assert pairs_score(found) == success_score(found) == (0.5, 0.5, 0.5)


def test_intervals_are_of_whole_episodes_not_of_their_clips() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(10, 30, 40).tolist()

    def noisy(n: int, won: int) -> Array:
        return np.full(n, 0.6 * won + rng.normal())

    apart = judged(lengths, noisy)
    together = apart._replace(groups=np.arange(40) // 8)
    one, five = pairs_score(apart), pairs_score(together)
    assert one is not None
    assert five is not None
    assert one.value == five.value
    assert 0.0 < one.low < one.value < one.high < 1.0
    alone = pairs_score(apart._replace(groups=np.zeros(40, int)))
    assert alone == (one.value, 0.0, 1.0)
    assert pairs_score(apart) == one  # the same draws every time


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Sums of N(d, 1) against N(0, 1): the true share is Phi(d / sqrt 2), here .76."""
    rng, held = np.random.default_rng(3), 0
    for _ in range(60):
        found = judged([5] * 60, lambda n, won: np.full(n, (won + rng.normal()) / n))
        score = success_score(found)
        assert score is not None
        held += score.low <= 0.7602 <= score.high
    assert held >= 51


def test_more_than_the_most_are_thinned_out() -> None:
    found = judged([4] * (2 * MOST + 2), lambda n, won: np.full(n, float(won)))
    score = pairs_score(found)
    assert score is not None
    assert score.value == 1.0


def test_windows_of_an_episode_by_progress() -> None:
    done = np.array([0.0, 1.0, 1.0, 3.0])  # gains 1, 0, 2
    assert windows_share(np.array([1.0, 0.0, 2.0]), done) == 1.0
    assert windows_share(np.array([1.0, 2.0, 0.0]), done) == pytest.approx(0.0)
    assert windows_share(np.array([2.0, 0.0, 1.0]), done) == pytest.approx(2 / 3)
    assert windows_share(np.ones(3) / 3, done) == 0.5
    assert windows_share(np.ones(3), np.zeros(4)) is None
    assert windows_share(np.ones(1), np.array([0.0, 1.0])) is None
    even = np.arange(101) * np.float32(0.1)  # equal gains but for rounding
    assert windows_share(np.random.default_rng(0).normal(size=100), even) is None
    assert progress_score([(np.ones(3), np.zeros(4))], np.array([0])) is None
    two = progress_score([(np.ones(3), done), (np.array([1.0, 0.0, 2.0]), done)], np.array([4, 9]))
    assert two is not None
    assert (two.value, two.low, two.high) == (0.75, 0.5, 1.0)


def test_a_warning_where_a_constant_is_as_good() -> None:
    metrics = metrics_of(recipes.find("reward-only"))
    for low, expected in ((0.4, 1), (0.6, 0)):
        health = Health(metrics, 10)
        row = {"eval/reward_pairs": 0.62, "eval/reward_pairs_low": low, "iterations": 4}
        health.add({**row, "eval/reward_pairs_high": 0.8})
        assert not_above_chance(health) is None  # so early
        health.add({"iterations": 9})
        names = [warning.name for warning in health.warnings]
        assert names.count("no better than a constant reward") == expected


def test_rank_correlation_by_hand() -> None:
    x = np.array([1.0, 2.0, 2.0, 5.0])  # ranks 0, 1.5, 1.5, 3
    assert spearman(x, np.exp(x)) == pytest.approx(1.0)
    assert spearman(x, -x) == pytest.approx(-1.0)
    y = np.array([4.0, 1.0, 3.0, 2.0])  # ranks 3, 0, 2, 1
    expected = np.corrcoef([0, 1.5, 1.5, 3], [3, 0, 2, 1])[0, 1]
    assert spearman(x, y) == pytest.approx(expected)
    assert np.isnan(spearman(x, np.ones(4)))


def test_evaluation_compares_with_progress_and_with_time(tmp_path: Path) -> None:
    algorithm = learner(write(tmp_path / "data", "dense"), progress="progress")
    before = algorithm.evaluate()
    set_reward(algorithm, WEIGHTS)
    after = algorithm.evaluate()
    assert after["eval/R_loss"] < before["eval/R_loss"]
    assert after["eval/R_loss"] < after["eval/R_loss_of_constant"]
    assert after["eval/rank_correlation"] == pytest.approx(1.0)
    assert after["eval/time_correlation"] == before["eval/time_correlation"]
    nothing = EpisodesOf(algorithm.store, np.empty(0, np.int64))
    assert evaluate(algorithm.policy, nothing, None, 0.0) == {}
    assert missing(nothing, None) == ""
    assert "eval/rank_correlation" not in learner(tmp_path / "data").evaluate()
    with pytest.raises(UsageError, match="progress 'state' is not one number"):
        learner(tmp_path / "data", progress="state")


def test_clips_of_successes_are_no_failures(tmp_path: Path) -> None:
    """Neither those that are added here nor those that the dataset holds."""
    path = write(tmp_path / "data", "failures", 10)
    store = EpisodeStore.open(path)
    assert EpisodesOf(store, np.arange(10)).successes == list(FAILURES)
    store.labels.kinds[1] = "clip"
    store.labels.successes[1] = False
    view = EpisodesOf(store, np.array([1, 2, 3, 2]), None, np.array([*store.lengths[1:4], 5]))
    assert view.successes == [None, True, False, None]


def test_clips_are_judged_without_reading_their_episode_again(tmp_path: Path) -> None:
    store = EpisodeStore.open(toy_dataset(tmp_path / "data"))
    view = EpisodesOf(store, np.array([3, 11, 3]), None, np.array([*store.lengths[[3, 11]], 4]))
    steps, _ = view.episode(2)
    np.testing.assert_array_equal(view.rewards(2), steps.rewards.astype(np.float64))
    assert view.groups.tolist() == [3, 11, 3]
    assert view.successes == [None, None, None]
