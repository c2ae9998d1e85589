"""A learned reward, evaluated on the episodes held out: metrics, and charts of three of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from etude.core.contracts import Array
from etude.core.keys import Key
from etude.data.store.views import EpisodesOf
from etude.evaluate.evaluation import keep_metrics, new_folder
from etude.evaluate.fresh import step_of
from etude.models.reward_networks import rewards_of
from etude.planning.loading import policy_parts
from etude.planning.recipe import Recipe
from etude.rl.reward_only import RewardOnly, RewardOnlyConfig, make_reward_only, open_data
from etude.rl.rewards.scores import CHANCE, HIGH, LOW, PAIRS, PROGRESS, SUCCESS
from etude.runs import checkpoint, files

WIDTH, HEIGHT, MARGIN = 520, 150, 44


class Line(NamedTuple):
    """One curve of a chart."""

    name: str
    values: Array
    color: str


def examine(recipe: Recipe, path: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Evaluate a run's best reward on the episodes held out; its metrics, and as "untrained/..."
    the scores of the network that the run began with."""
    assert isinstance(recipe.algorithm, RewardOnlyConfig)
    config, store = open_data(recipe.algorithm)
    learner = make_reward_only(config, store, torch.device("cpu"), Key(recipe.seed).child("reward"))
    untrained = learner.evaluate()
    arrays, _ = policy_parts(path)
    with checkpoint.fitting(path, "policy"):
        learner.load_policy(arrays)
    metrics = learner.evaluate()
    held_out = learner.held_out
    clips = f" and {held_out.num_clips:,} clips" if held_out.num_clips else ""
    say(f"{held_out.num_whole:,} episodes{clips} of {store.path} that were held out")
    for line in _table(metrics, untrained):
        say(line)
    printed = [name for name in metrics if name.startswith(_SCORES)]
    if metrics.get(config.score + LOW, np.inf) <= CHANCE:
        say(f"By {config.score} this reward is not better than a constant one.")
    scores = {name: value for name, value in untrained.items() if name.startswith(_SCORES)}
    beside = {name.replace("eval/", "untrained/"): value for name, value in scores.items()}
    folder = new_folder(path, step_of(path))
    for index in _typical(held_out):
        text = _chart(learner, index)
        name = f"episode-{held_out.numbers[index]}-of-{held_out.lengths[index]}-steps.svg"
        files.replace_file(folder / name, [text.encode()])
    store.close()
    return keep_metrics(recipe, {**metrics, **beside}, folder, say, [*printed, *beside])


_SCORES = (PAIRS, SUCCESS, PROGRESS)


def _table(metrics: dict[str, float], untrained: dict[str, float]) -> list[str]:
    """The scores beside those of a constant reward and of the network before it was trained."""
    there = [name for name in _SCORES if name in metrics]
    if not there:
        return []
    lines = [f"{'score (95 % interval)':<24}{'this reward':<22}{'a constant':<14}untrained"]
    for name in there:
        mine, other = (
            f"{found[name]:.2f} ({found[name + LOW]:.2f} to {found[name + HIGH]:.2f})"
            for found in (metrics, untrained)
        )
        lines.append(f"{name:<24}{mine:<22}{CHANCE:<14}{other}")
    return lines


def _typical(episodes: EpisodesOf) -> list[int]:
    """The episodes with the least, the middle and the largest return, counted among these."""
    order = np.argsort(episodes.returns, kind="stable").tolist()
    return [order[i] for i in sorted({0, len(order) // 2, len(order) - 1})] if order else []


def _chart(learner: RewardOnly, index: int) -> str:
    """An SVG: the reward of every step, and its running sum beside the progress."""
    number = learner.held_out.numbers[index]
    steps, whole = learner.held_out.episode(index)
    rewards = rewards_of(learner.rrd.network, steps.obs, steps.actions, steps.next_obs)
    running = [Line("running sum", rewards.cumsum(), "#c0392b")]
    progress = learner.config.progress
    if progress is not None:
        done = steps.next_obs[progress].reshape(len(rewards)).astype(np.float64)
        running.append(Line("progress, to scale", _like(done, running[0].values), "#2471a3"))
    title = f"episode {number}: return {whole:.3g} in {len(rewards)} steps"
    panels = [
        _panel("learned reward of a step", [Line("", rewards, "#c0392b")], 24),
        _panel("running sum", running, 24 + HEIGHT + MARGIN),
    ]
    height = 2 * (HEIGHT + MARGIN) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{MARGIN}" y="16">{title}</text>'
        f"{''.join(panels)}</svg>"
    )


def _like(values: Array, other: Array) -> Array:
    """`values` moved and stretched to the range of `other`: only their shape is compared."""
    low, high = float(values.min()), float(values.max())
    share: Array = (values - low) / (high - low) if high > low else np.zeros_like(values)
    scaled: Array = other.min() + share * (other.max() - other.min())
    return scaled


def _panel(title: str, lines: Sequence[Line], top: float) -> str:
    """Curves over the steps of an episode, with the range of their values."""
    values = np.concatenate([line.values for line in lines])
    low, high = float(values.min()), float(values.max())
    span = high - low or 1.0
    parts = [
        f'<rect x="{MARGIN}" y="{top + 14}" width="{WIDTH}" height="{HEIGHT}" fill="none" '
        'stroke="#bbb"/>',
        f'<text x="{MARGIN}" y="{top + 10}" fill="#555">{title}</text>',
        f'<text x="2" y="{top + 24}" fill="#555">{high:.2g}</text>',
        f'<text x="2" y="{top + 12 + HEIGHT}" fill="#555">{low:.2g}</text>',
    ]
    for i, line in enumerate(lines):
        count = max(len(line.values) - 1, 1)
        points = " ".join(
            f"{MARGIN + WIDTH * t / count:.1f},{top + 14 + HEIGHT * (high - y) / span:.1f}"
            for t, y in enumerate(line.values.tolist())
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.color}" />')
        place = f'x="{MARGIN + 220 + 140 * i}" y="{top + 10}"'
        parts.append(f'<text {place} fill="{line.color}">{line.name}</text>')
    return "".join(parts)
