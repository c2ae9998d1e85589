"""Evaluations of runs without an environment, on the held-out episodes of their dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.core.contracts import Array, Broadcast
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE
from etude.data.store.views import EpisodesOf
from etude.evaluate.charts import COLORS, drawn
from etude.evaluate.evaluation import keep_metrics, new_folder
from etude.evaluate.fresh import step_of
from etude.models.reward_networks import compute_rewards
from etude.planning.loading import policy_parts
from etude.planning.recipe import Recipe
from etude.planning.resolve import resolve
from etude.rl.reward_only import RewardOnly, RewardOnlyConfig, make_reward_only, open_data
from etude.rl.rewards.scores import CHANCE, HIGH, LOW, PAIRS, PROGRESS, SUCCESS
from etude.runs import checkpoint, files
from etude.runs.folder import RunFolder

Say = Callable[[str], None]
_SCORES = (PAIRS, SUCCESS, PROGRESS)


def examine_policy(recipe: Recipe, path: Path, say: Say) -> dict[str, Any]:
    """Evaluate the newest policy and critics of a run; return their metrics."""
    newest = checkpoint.newest_verified(path / "checkpoints", say, repair=False)
    if newest is None:
        raise UsageError(f"{path} has no checkpoint yet; `etude resume {path}` continues it.")
    arrays, _, training = checkpoint.load_training(newest)
    run = resolve(recipe)
    folder = RunFolder.open(path, write=False)
    made = recipe.algorithm.build(run, Key(recipe.seed), folder, ALONE)
    learner, evaluator = made.algorithm, made.evaluator
    assert evaluator is not None  # where there is no environment
    with checkpoint.explain_mismatch(newest, "state"):
        learner.load_policy(arrays)
        learner.load_state_dict(training["algorithm"])
    metrics = evaluator.evaluate(Broadcast(0, {})).metrics
    say(f"{run.data.held_out.num_episodes:,} held-out episodes of {run.data.store.path}")
    run.data.store.close()
    return keep_metrics(recipe, metrics, new_folder(path, checkpoint.step_of(newest)), say)


def examine_reward(recipe: Recipe, path: Path, say: Say) -> dict[str, Any]:
    """Evaluate the best reward of a run, and draw three episodes with it.

    Returns its metrics, and as "untrained/..." the scores of the network before training.
    """
    assert isinstance(recipe.algorithm, RewardOnlyConfig)
    config, store = open_data(recipe.algorithm)
    learner = make_reward_only(config, store, torch.device("cpu"), Key(recipe.seed).child("reward"))
    before = learner.evaluate()
    arrays, _ = policy_parts(path)
    with checkpoint.explain_mismatch(path, "policy"):
        learner.load_policy(arrays)
    metrics = learner.evaluate()
    held_out = learner.held_out
    clips = f" and {held_out.num_clips:,} clips" if held_out.num_clips else ""
    say(f"{held_out.num_whole:,} held-out episodes{clips} of {store.path}")
    for line in _table(metrics, before):
        say(line)
    if metrics.get(config.score + LOW, np.inf) <= CHANCE:
        say(f"By {config.score} this reward is not better than a constant one.")
    scores = {n: value for n, value in before.items() if n.startswith(_SCORES)}
    untrained = {n.replace("eval/", "untrained/"): value for n, value in scores.items()}
    folder = new_folder(path, step_of(path))
    for index in _typical(held_out):
        name = f"episode-{held_out.numbers[index]}-of-{held_out.lengths[index]}-steps.svg"
        files.replace_file(folder / name, [_chart(learner, index)])
    store.close()
    printed = [*untrained, *(name for name in metrics if name.startswith(_SCORES))]
    return keep_metrics(recipe, metrics | untrained, folder, say, printed)


def _table(metrics: dict[str, float], untrained: dict[str, float]) -> list[str]:
    """Scores beside those of a constant reward and of the network before training."""
    known = [name for name in _SCORES if name in metrics]
    lines = [f"{'score (95 % interval)':<24}{'this reward':<22}{'a constant':<14}untrained"]
    for name in known:
        trained, before = (
            f"{found[name]:.2f} ({found[name + LOW]:.2f} to {found[name + HIGH]:.2f})"
            for found in (metrics, untrained)
        )
        lines.append(f"{name:<24}{trained:<22}{CHANCE:<14}{before}")
    return lines if known else []


def _typical(episodes: EpisodesOf) -> list[int]:
    """Indices of the episodes with the smallest, the median and the largest return."""
    order = np.argsort(episodes.returns, kind="stable").tolist()
    return [order[i] for i in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def _chart(learner: RewardOnly, index: int) -> bytes:
    """An SVG: the reward of every step, and its running sum beside the progress."""
    steps, whole = learner.held_out.episode(index)
    rewards = compute_rewards(learner.rrd.network, steps.obs, steps.actions, steps.next_obs)
    running = rewards.cumsum()
    progress = learner.config.progress

    def draw(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True)
        number = learner.held_out.numbers[index]
        figure.suptitle(f"episode {number}: return {whole:.3g} in {len(rewards)} steps")
        above.set_title("learned reward of a step")
        above.plot(rewards, color=COLORS[0], gid="reward")
        below.set_xlabel("step")
        below.plot(running, color=COLORS[0], gid="sum", label="sum of rewards")
        if progress is not None:
            done = steps.next_obs[progress].reshape(len(rewards)).astype(np.float64)
            scaled = _scaled_to(done, running)
            below.plot(scaled, color=COLORS[1], gid="progress", label="progress, to scale")
        below.legend()

    return drawn(draw, 7.0, 4.5)


def _scaled_to(values: Array, other: Array) -> Array:
    """`values` in the range of `other`, to compare their shapes."""
    low, high = float(values.min()), float(values.max())
    share: Array = (values - low) / (high - low) if high > low else np.zeros_like(values)
    scaled: Array = other.min() + share * (other.max() - other.min())
    return scaled
