"""Scores of a learned reward on held-out episodes.

The sum of any positive reward grows with the number of steps, so a constant reward orders episodes
and clips by length: with clips that are failures it can reach a rank correlation of .9. Each score
here compares sums over *equal numbers* of steps. It is the fraction of pairs whose learned sums are
in the order of the true ones; a tie counts half. A constant reward ties every pair and scores .5
exactly, the true reward scores 1.

    reward_pairs     Two episodes or clips, by their stored rewards: the last steps of each, as
                     many as the shorter one has. Pairs that earned the same there do not count.
    reward_success   The same of a success and a failure each, which is the area under the ROC
                     curve at equal length.
    reward_progress  Two windows of one episode, each a tenth of it, by the progress in them; the
                     mean over episodes.

A score that the held-out episodes cannot give is omitted; `missing` lists these with the reasons.
The 95 % intervals are from a bootstrap over episodes: an episode and the clips that were cut from
it are sampled together. With a single episode the interval is [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from etude.core.contracts import Array
from etude.core.keys import Key
from etude.core.metrics import Column, Health, Metric, Metrics, Warning
from etude.data.contrast import SAME
from etude.data.store.views import EpisodesOf
from etude.models.reward_networks import RewardNetwork, compute_rewards

CHANCE = 0.5
"""The score of a constant reward."""
EVAL_LOSS, CONSTANT_LOSS = "eval/R_loss", "eval/R_loss_of_constant"
PAIRS, SUCCESS, PROGRESS = "eval/reward_pairs", "eval/reward_success", "eval/reward_progress"
LOW, HIGH = "_low", "_high"
"""Suffixes of a score's name for the limits of its 95 % interval."""
WINDOWS = 10
"""Windows of an episode for `reward_progress`."""
MOST = 500
"""The maximum number of episodes and clips that are compared; an even selection of more."""
_DRAWS = 1000
"""Samples of the bootstrap."""


def _summary(name: str, what: str) -> str:
    """The line about a score at the end of a run."""
    interval = f"{{row[{name}{LOW}]:.2f}} to {{row[{name}{HIGH}]:.2f}}"
    return (
        f"{{value:.2f}} of {what} in the right order, 95 % interval {interval}; a constant reward "
        f"scores {CHANCE}"
    )


def not_above_chance(health: Health) -> Warning | None:
    """Warn if the last evaluation, late in a run, is not above chance."""
    last = next((row for row in reversed(health.rows) if PAIRS in row or PROGRESS in row), {})
    name = PROGRESS if PROGRESS in last else PAIRS
    if health.progress < 0.5 or last.get(name + LOW, math.inf) > CHANCE:
        return None
    return Warning(
        "no better than a constant reward",
        f"{name} is {last[name]:.2f} (95 % interval {last[name + LOW]:.2f} to "
        f"{last[name + HIGH]:.2f}) where a constant reward scores {CHANCE}: add failures to the "
        "dataset, or hold out more episodes (algorithm.held_out)",
    )


METRICS: Metrics = (
    Metric(
        EVAL_LOSS,
        "eval R loss",
        column=Column(92, 12, "offline"),
        about="squared error of the mean reward",
    ),
    Metric(
        CONSTANT_LOSS,
        "of constant",
        column=Column(93, 11, "offline"),
        about="the same of a constant reward",
    ),
    Metric(
        PROGRESS,
        "progress (chance .5)",
        ".2f",
        Column(94, 20, "offline"),
        about="windows of an episode in the order of progress",
        summary=_summary(PROGRESS, "an episode's windows"),
    ),
    Metric(
        PAIRS,
        "pairs (chance .5)",
        ".2f",
        Column(95, 17, "offline"),
        about="pairs of equal length in the order of returns",
        summary=_summary(PAIRS, "pairs of equal length"),
        check=not_above_chance,
    ),
    Metric(SUCCESS, "successes", ".2f", about="successes above failures of equal length"),
)


class Score(NamedTuple):
    """A fraction of pairs, with its 95 % interval."""

    value: float
    low: float
    high: float


class Judged(NamedTuple):
    """Learned and stored rewards of held-out episodes and clips."""

    learned: list[Array]
    """[T] of each."""
    stored: list[Array]
    """[T] of each."""
    groups: Array
    """[n] int64: an episode and its clips have the same number."""
    successes: list[bool | None]
    """[n]: None for clips, and if unknown."""


def constant_reward(training: EpisodesOf) -> float:
    """The constant that minimises the loss of a return decomposition on these episodes, sampled in
    proportion to their lengths: sum R / sum T."""
    return float(training.returns.sum() / training.lengths.sum())


def evaluate(
    network: RewardNetwork, episodes: EpisodesOf, progress: str | None, constant: float
) -> dict[str, float]:
    """Scores of a learned reward on held-out episodes with all their steps; {} without any.

    "eval/R_loss": mean of (mean r - R / T)^2 over episodes and clips; with all steps there is no
    sampling variance to correct. "eval/R_loss_of_constant": the same for the reward `constant`.
    Also the scores of the module's docstring, each with "_low" and "_high".
    With the name of a progress signal:
    "eval/rank_correlation": Spearman's, between running sums of the learned reward and progress in
    an episode, averaged over episodes with progress; "eval/time_correlation" is the same for time,
    which is what any constant reward above 0 reaches.
    "eval/pooled_correlation": over the steps of all episodes together, which also compares
    episodes with each other; "eval/pooled_time_correlation" is the same for time.
    """
    if not episodes.num_episodes:
        return {}
    judged, followed = _judge(network, episodes, progress)
    targets = episodes.returns / episodes.lengths
    means = np.array([rewards.mean() for rewards in judged.learned])
    metrics = {
        EVAL_LOSS: float(np.square(means - targets).mean()),
        CONSTANT_LOSS: float(np.square(constant - targets).mean()),
    }
    scores = {
        PAIRS: pairs_score(judged),
        SUCCESS: success_score(judged),
        PROGRESS: progress_score(followed, judged.groups[: len(followed)]),
    }
    for name, score in scores.items():
        if score is not None:
            metrics |= {name: score.value, name + LOW: score.low, name + HIGH: score.high}
    return metrics | _correlations(followed)


def _judge(
    network: RewardNetwork, episodes: EpisodesOf, progress: str | None
) -> tuple[Judged, list[tuple[Array, Array]]]:
    """All rewards; and for whole episodes, learned rewards [T] with the progress [T + 1] before the
    first step and after each."""
    learned, stored, followed = list[Array](), list[Array](), list[tuple[Array, Array]]()
    whole: dict[int, Array] = {}
    for place, number in enumerate(episodes.numbers.tolist()):
        if place >= episodes.num_whole and number in whole:  # A clip is an episode's first steps.
            learned.append(whole[number][: episodes.lengths[place]])
            stored.append(episodes.rewards(place))
            continue
        steps, _ = episodes.episode(place)
        rewards = compute_rewards(network, steps.obs, steps.actions, steps.next_obs)
        learned.append(rewards)
        stored.append(steps.rewards.astype(np.float64))
        if place < episodes.num_whole:
            whole[number] = rewards
            if progress is not None:
                seen = (steps.obs[progress][:1], steps.next_obs[progress])
                done = np.concatenate(seen).reshape(-1).astype(np.float64)
                followed.append((rewards, done))
    return Judged(learned, stored, episodes.groups, episodes.successes), followed


def pairs_score(judged: Judged) -> Score | None:
    """The score over episodes and clips by their stored rewards; None if all sums are equal."""
    judged = _at_most(judged)
    truth = _order(judged.stored)
    return _of_pairs((1.0 + _order(judged.learned) * truth) / 2.0, truth != 0, judged.groups)


def success_score(judged: Judged) -> Score | None:
    """The score of successes against failures; None without successes or without failures."""
    judged = _at_most(judged)
    won = np.array([success is True for success in judged.successes], bool)
    lost = np.array([success is False for success in judged.successes], bool)
    if not (won.any() and lost.any()):
        return None
    above = (1.0 + _order(judged.learned)) / 2.0
    return _of_pairs(above, won[:, None] & lost, judged.groups)


def progress_score(followed: Sequence[tuple[Array, Array]], groups: Array) -> Score | None:
    """The score of windows of an episode by the progress in them, the mean over episodes.

    followed: learned rewards [T] and progress [T + 1] of each episode; groups: [episodes] int64.
    None if no two windows of any episode differ in progress.
    """
    shares = [windows_share(rewards, done) for rewards, done in followed]
    there = np.array([share is not None for share in shares], bool)
    if not there.any():
        return None
    values = np.array([share for share in shares if share is not None])
    place = _places(groups[there])
    won, tried = np.bincount(place, values), np.bincount(place).astype(np.float64)
    drawn = _bootstrap(len(won))
    return _with_interval(won.sum() / tried.sum(), drawn @ won, drawn @ tried, len(won))


def windows_share(rewards: Array, done: Array) -> float | None:
    """The fraction of pairs of windows of one episode that are in the order of their progress.

    rewards: [T]; done: [T + 1]. Last steps that do not fill a window are omitted.
    """
    gains = np.diff(done)
    size = max(len(gains) // WINDOWS, 1)
    num = len(gains) // size
    sums, sizes, gained = (
        x[: num * size].reshape(num, size).sum(1) for x in (rewards, np.abs(rewards), gains)
    )
    scale = np.full(num, np.abs(done).max())
    truth = _signs(gained[:, None], gained, scale[:, None], scale)
    right = (1.0 + _signs(sums[:, None], sums, sizes[:, None], sizes) * truth) / 2.0
    return float(right[truth != 0].mean()) if truth.any() else None


def tails(rewards: Sequence[Array]) -> Array:
    """[n, n]: the sum of i's last steps, as many as the shorter of i and j has."""
    lengths = np.array([len(x) for x in rewards])
    table = np.empty((len(rewards), len(rewards)))
    for row, x in zip(table, rewards, strict=True):
        sums = np.concatenate(([0.0], x[::-1].cumsum()))
        row[:] = sums[np.minimum(lengths, len(x))]
    return table


def _order(rewards: Sequence[Array]) -> Array:
    """[n, n]: 1 if the sum of i is larger than that of j at equal length, -1 if smaller, else 0."""
    sums, sizes = tails(rewards), tails([np.abs(x) for x in rewards])
    return _signs(sums, sums.T, sizes, sizes.T)


def _signs(a: Array, b: Array, size_a: Array, size_b: Array) -> Array:
    """1 where a > b, -1 where a < b, 0 where they are equal up to rounding."""
    difference = a - b
    found: Array = np.sign(difference)
    found[np.abs(difference) <= SAME * np.maximum(size_a, size_b)] = 0.0
    return found


def _at_most(judged: Judged) -> Judged:
    """Select at most `MOST` of them, since a table has all pairs."""
    num = len(judged.learned)
    if num <= MOST:
        return judged
    chosen = np.linspace(0, num - 1, MOST).astype(np.int64)
    return Judged(
        [judged.learned[i] for i in chosen],
        [judged.stored[i] for i in chosen],
        judged.groups[chosen],
        [judged.successes[i] for i in chosen],
    )


def _of_pairs(right: Array, counts: Array, groups: Array) -> Score | None:
    """The mean of `right` [n, n] where `counts` [n, n]; None if no pair counts."""
    if not counts.any():
        return None
    place = _places(groups)
    num = int(place.max()) + 1
    at = (place[:, None] * num + place).reshape(-1)
    won, tried = (
        np.bincount(at, table.reshape(-1), num * num).reshape(num, num)
        for table in (np.where(counts, right, 0.0), counts.astype(np.float64))
    )
    drawn = _bootstrap(num)
    sums, totals = (((drawn @ table) * drawn).sum(1) for table in (won, tried))
    return _with_interval(won.sum() / tried.sum(), sums, totals, num)


def _places(groups: Array) -> Array:
    """Renumber groups from 0 without gaps: [n] int64."""
    places: Array = np.unique(groups, return_inverse=True)[1]
    return places


def _bootstrap(num: int) -> Array:
    """Bootstrap samples [draws, num] float64: how often each of `num` groups is in a sample."""
    generator = Key(0).child("bootstrap").generator()
    return generator.multinomial(num, np.full(num, 1.0 / num), _DRAWS).astype(np.float64)


def _with_interval(value: float, sums: Array, totals: Array, num: int) -> Score:
    """The score of `value` with the interval of sums / totals [draws]; num: number of groups."""
    if num < 2:
        return Score(float(value), 0.0, 1.0)
    some = totals > 0
    low, high = np.quantile(sums[some] / totals[some], (0.025, 0.975))
    return Score(float(value), float(low), float(high))


def missing(episodes: EpisodesOf, progress: str | None) -> str:
    """Describe the scores that these held-out episodes cannot give, with reasons; "" if none."""
    if not episodes.num_episodes:
        return ""
    reasons = []
    places = np.linspace(0, episodes.num_episodes - 1, min(episodes.num_episodes, MOST))
    if not _order([episodes.rewards(int(place)) for place in places]).any():
        reasons.append(f"{PAIRS} (all sums of rewards are equal)")
    known = set(episodes.successes)
    if not {True, False} <= known:
        what = "failures" if True in known else "successes"
        why = f"there are no {what}" if known - {None} else "success is unknown"
        reasons.append(f"{SUCCESS} ({why})")
    if progress is None:
        reasons.append(f"{PROGRESS} (algorithm.progress is not set)")
    return f"The held-out episodes cannot give {', '.join(reasons)}." if reasons else ""


def _correlations(followed: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """Rank correlations of running sums with progress, per episode and pooled."""
    if not followed:
        return {}
    lines = [(rewards.cumsum(), np.arange(len(rewards)), done[1:]) for rewards, done in followed]
    running, time, done = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    metrics = {
        "eval/rank_correlation": _mean([spearman(sums, done) for sums, _, done in lines]),
        "eval/time_correlation": _mean([spearman(time, done) for _, time, done in lines]),
        "eval/pooled_correlation": spearman(running, done),
        "eval/pooled_time_correlation": spearman(time, done),
    }
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _mean(values: list[float]) -> float:
    """The mean of the finite values; NaN without any."""
    there = [value for value in values if np.isfinite(value)]
    return float(np.mean(there)) if there else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Rank correlation of x [n] and y [n], with mean ranks for ties; NaN if one is constant."""
    a, b = _ranks(x), _ranks(y)
    a, b = a - a.mean(), b - b.mean()
    size = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / size if size > 0.0 else float("nan")


def _ranks(values: Array) -> Array:
    """Ranks [n] float64 from 0, with mean ranks for ties."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = (ends - (counts + 1) / 2)[place]
    return ranks
