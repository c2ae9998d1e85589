"""Learning from a dataset instead of a rollout: opening, splitting, planning and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from etude.core.config import AbsolutePath
from etude.core.contracts import ActionSpec, Algorithm, Array, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.contrast import contrast, draw_clips
from etude.data.sentences import TASK, quoted, vector_of
from etude.data.store.episodes import StoreGeometry
from etude.data.store.files import DESCRIPTION
from etude.data.store.manifest import MANIFEST, Episodes, is_dataset, num_excluded
from etude.data.store.views import (
    EpisodesOf,
    geometry_with_task,
    open_with_task,
    sentences_in,
    sentences_of,
)
from etude.models.encoders import default_observations
from etude.models.policies import make_policy
from etude.planning.recipe import (
    AlgorithmConfig,
    Inputs,
    Learner,
    PlanSection,
    Recipe,
    Resolved,
    array_shapes,
)
from etude.training.evaluation import HeldOutEvaluator


class DatasetConfig(AlgorithmConfig):
    """Base config of algorithms that learn from a dataset."""

    dataset: AbsolutePath = Field(
        "", description="Folder of a finished dataset to learn from; see `etude data`."
    )
    held_out: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="Fraction of a dataset's episodes that are held out for evaluation.",
    )
    add_truncated: int | None = Field(
        None,
        ge=0,
        description="Clips (truncated episodes) that are added to learn a reward from. None adds "
        "one per episode if all returns of the dataset are equal, otherwise no clips.",
    )
    allow_equal_returns: bool = Field(
        False, description="Allow a dataset whose returns are too similar to learn a reward from."
    )

    prefetch: bool = Field(
        True,
        description="Sample the next minibatch of a dataset in a thread during a gradient step; "
        "does not change results.",
    )

    def learns_from(self, recipe: Recipe) -> str:
        return "dataset"

    def completed(self, recipe: Recipe) -> Recipe:
        """Fill in the vector of the environment's sentence, and the observations that the policy
        reads if none are given: the dataset's task, images and all proprioceptive vectors."""
        if self.dataset and recipe.env is not None and recipe.env.sentence:
            known = sentences_of(Path(self.dataset))
            vector = vector_of(recipe.env.sentence, known, self.dataset)
            recipe = recipe.replace(env__task_vector=vector)
        policy = recipe.policy
        if not self.dataset or policy.actor_reads:
            return recipe
        there = dataset_geometry(self).observations
        reads = default_observations(there, policy.encoder)
        return recipe.replace(policy__actor_reads=reads)


def dataset_geometry(config: DatasetConfig) -> StoreGeometry:
    """The geometry of the dataset in a config. Raise an error if it does not exist."""
    name = config.dataset
    if not name or not is_dataset(Path(name)):
        missing = f" (no {DESCRIPTION} or {MANIFEST} in it)"
        what = missing if name and Path(name).is_dir() else ""
        raise UsageError(
            f"There is no dataset at '{name}'{what}: give one with --algorithm.dataset FOLDER; "
            "`etude data record` records one, `etude data import` imports other formats."
        )
    return geometry_with_task(Path(name))


def split_store(
    store: Episodes,
    config: DatasetConfig,
    action: ActionSpec | None = None,
    for_reward: bool = True,
    with_clips: bool = True,
) -> tuple[EpisodesOf, EpisodesOf]:
    """Split the episodes into those to learn from and those held out, with clips for a reward.

    action: the action space of the environment, see `EpisodesOf`. for_reward: a reward is learned;
    raise an error if this dataset's returns cannot teach one.
    """
    kept, held_out = split(store.returns, config.held_out, store.labels.groups)
    if not for_reward:
        return EpisodesOf(store, kept, action), EpisodesOf(store, held_out, action)
    if unknown := store.labels.num_unrewarded:
        raise UsageError(
            f"{store.path} has no rewards for {unknown:,} of its {store.num_episodes:,} episodes, "
            "and a reward is learned from returns: import files with rewards, or declare that "
            "episodes succeeded (etude data import --assume-success --success-reward 1)."
        )
    clips, steps = _clips(store, config if with_clips else None)
    sides = []
    for side in (kept, held_out):
        among = np.isin(clips, side)
        numbers = np.concatenate((side, clips[among]))
        lengths = np.concatenate((store.lengths[side], steps[among]))
        sides.append(EpisodesOf(store, numbers, action, lengths))
    found = contrast(sides[0].returns, sides[0].lengths)
    if not found.enough and not config.allow_equal_returns:
        raise UsageError(
            f"{store.path} teaches no reward: {found.reason}, so a constant reward minimises the "
            "loss. Add episodes that fail (etude data record makes some), or train nevertheless "
            "with allow_equal_returns."
        )
    return sides[0], sides[1]


def _clips(store: Episodes, config: DatasetConfig | None) -> tuple[Array, Array]:
    """Episodes [clips] int64 and lengths [clips] of the added clips; None adds none.

    They are the same for the same dataset. If every return is 0 or every step has the same reward,
    clips do not help, and `split_store` raises an error.
    """
    num = 0 if config is None else config.add_truncated
    if config is not None and num is None:
        returns, lengths = store.returns, store.lengths
        equal = not config.allow_equal_returns and not contrast(returns, lengths).enough
        num = store.num_episodes if equal else 0
    return draw_clips(store.lengths, num or 0, Key(0))


def split(returns: Array, held_out: float, groups: Array | None = None) -> tuple[Array, Array]:
    """Numbers of the episodes to learn from and of those held out, each ascending int64.

    Episodes of the same group (`groups` [n] int64) share steps and stay together; without groups
    each episode is its own. The fraction `held_out` of the groups is held out, at least one, and at
    least one is left. They are evenly spaced in the order of mean returns, so that both parts have
    good and bad ones. The split depends on returns and groups alone, not on a random number.
    """
    groups = np.arange(len(returns)) if groups is None else groups
    _, place, counts = np.unique(groups, return_inverse=True, return_counts=True)
    total = len(counts)
    num = min(max(round(held_out * total), 1), total - 1) if held_out else 0
    means = np.bincount(place, returns, total) / counts
    chosen = np.zeros(total, bool)
    middles = (np.arange(num) + 0.5) * total / max(num, 1)
    chosen[np.argsort(means, kind="stable")[middles.astype(np.int64)]] = True
    return np.flatnonzero(~chosen[place]), np.flatnonzero(chosen[place])


_PROBE = 16_384
"""Steps that are sampled for the range of actions if there is no environment."""


class Data(NamedTuple):
    """The opened dataset of a recipe."""

    store: Episodes
    spec: EnvSpec
    """The spec of an environment with the dataset's observations and actions."""
    reads: set[str]
    """Observations that policy and rewards read."""
    training: EpisodesOf
    held_out: EpisodesOf

    def shards(self, num: int) -> list[EpisodesOf]:
        """The episodes to learn from, divided into `num` shards; whole ones come before clips."""
        if self.training.num_whole < num:
            raise UsageError(
                f"{self.store.path} has {self.training.num_whole:,} episodes to learn from, and "
                f"each of {num:,} shards needs one: use fewer learner.shards."
            )
        return [self.training.part(slice(s, None, num)) for s in range(num)]


def refuse_collection(recipe: Recipe) -> None:
    """Raise an error for settings of collection, which a dataset does not need."""
    if recipe.collector.lag:
        raise UsageError(
            "Learning from a dataset has nothing to collect ahead: leave collector.lag at 0."
        )


def check(recipe: Recipe, batch_size: int) -> None:
    """Raise an error for sizes that do not divide over the shards."""
    refuse_collection(recipe)
    shards = recipe.learner.shards
    if batch_size % shards:
        raise UsageError(
            f"algorithm.batch_size {batch_size:,} does not divide by learner.shards "
            f"{shards:,}: use {batch_size // shards * shards or shards:,}."
        )
    recipe.rewards.check(shards)


def exactness(recipe: Recipe) -> Exactness:
    """Whether a run that learns from a dataset resumes bit for bit.

    An environment counts as well: evaluations in it decide which policy is the best.
    """
    if recipe.learner.torch_device().type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ")
    if recipe.env is not None and not recipe.env.exactness().exact:
        return recipe.env.exactness()
    return Exactness(True, "the dataset is sealed, and its hash is known")


def open_data(config: DatasetConfig, recipe: Recipe) -> Data:
    """Open the dataset and compare it with the environment, if the recipe has one."""
    recipe.rewards.require_replay(recipe.algorithm.kind)
    there, rewards = dataset_geometry(config).observations, recipe.rewards
    reads = {*recipe.policy.actor_reads, *recipe.policy.critic_reads, *rewards.reads(there)}
    store = open_with_task(Path(config.dataset), reads)
    if not store.num_episodes:
        raise UsageError(f"{store.path} holds no episode to learn from.")
    action = _bounds(store) if recipe.env is None else _fits(recipe, store)
    there, longest = {**there, **store.geometry.observations}, store.geometry.max_episode_steps
    spec = EnvSpec(there, action, longest, sentences=sentences_in(store))
    split = split_store(store, config, action, rewards.from_returns, rewards.from_clips)
    return Data(store, spec, reads, *split)


def _bounds(store: Episodes) -> ActionSpec:
    """The action space of a dataset: [-1, 1], as in most datasets of robots, or the range of a
    dimension in a sample if that is larger.

    The dataset has raw actions. Sampled actions are scaled to this box and clipped.
    """
    spec = store.geometry.specs["actions"]
    if np.dtype(spec.dtype).kind != "f":
        raise UsageError(
            f"The actions of {store.path} are {spec.dtype}, choices whose number only the "
            "environment defines: give it with --env.kind (with ppo's policy kinds to imitate)."
        )
    every = EpisodesOf(store, np.arange(store.num_episodes))
    sample = every.sample_actions(Key(0).child("probe").generator(), _PROBE)
    low, high = np.minimum(sample.min(0), -1.0), np.maximum(sample.max(0), 1.0)
    return ActionSpec("box", tuple(low.tolist()), tuple(high.tolist()))


def _fits(recipe: Recipe, store: Episodes) -> ActionSpec:
    """The action space of the environment. Raise an error if it does not fit the dataset."""
    env = recipe.task.make(recipe.evaluation.envs_per_group)
    spec = env.spec
    env.close()
    check_fits(store, spec.observations, spec.action, recipe.policy.actor_reads)
    return spec.action


def check_fits(
    store: Episodes,
    observations: Mapping[str, ArraySpec],
    action: ActionSpec,
    reads: Collection[str],
) -> None:
    """Raise an error if the environment's actions, or observations that are read, differ from the
    dataset's."""
    there = store.geometry.observations
    if TASK in reads and TASK in there and TASK not in observations:
        raise UsageError(
            f"The policy reads a sentence with its task, and this environment has none: give one "
            f"with --env.sentence ({quoted([*sentences_in(store)])}), or other observations with "
            "--policy.actor-reads."
        )
    for name in reads:
        if name in there and observations.get(name) != there[name]:
            raise UsageError(
                f"The policy reads '{name}', which is {_described(there[name])} in {store.path} "
                f"and {_described(observations.get(name))} in this environment: choose "
                "observations that both have with --policy.actor-reads, or the environment in "
                "which the data was recorded."
            )
    actions = store.geometry.specs["actions"]
    if action.array != actions:
        raise UsageError(
            f"Action spaces do not match: {_described(actions)} in {store.path}, "
            f"{_described(action.array)} in this environment: give the environment in which the "
            "data was recorded, or none."
        )


def _described(spec: ArraySpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype} of shape {spec.shape}"


def inputs(config: DatasetConfig, recipe: Recipe) -> Inputs:
    """The inputs of a run that learns from a dataset, which is opened."""
    data = open_data(config, recipe)
    with torch.device("meta"):
        policy = make_policy(recipe.policy, data.spec, None)
    return Inputs(
        spec=data.spec,
        exactness=exactness(recipe),
        deployed=policy,
        evaluation_episodes=recipe.evaluation.episodes
        if recipe.env
        else data.held_out.num_episodes,
        snapshot={},
        num_groups=0,
        data=data,
    )


def imitation_notes(recipe: Recipe, data: Data) -> list[str]:
    """Notes of a plan about a policy that imitates a dataset."""
    action, notes = data.spec.action, []
    beyond = sum(
        low < -1.0 or high > 1.0 for low, high in zip(action.low, action.high, strict=True)
    )
    if recipe.env is None and beyond:
        notes.append(
            f"Actions go beyond [-1, 1] in {beyond:,} of {len(action.low):,} dimensions: the "
            "policy's actions are scaled to the range in the dataset. An environment (--env.kind, "
            "--env.id or --env.task) defines its own range."
        )
    if recipe.env is None:
        notes.append(
            "No environment is given: the policy is evaluated on held-out episodes, and the newest "
            "counts as the best."
        )
    return notes


def make_learner(
    run: Resolved, algorithm: Algorithm, evaluate: Callable[[], dict[str, float]], loss: str
) -> Learner:
    """The learner of a dataset, evaluated on held-out episodes if there is no environment.

    evaluate: metrics on the held-out episodes; loss: the metric of them that decides the best.
    """
    data: Data = run.data
    held_out = HeldOutEvaluator(evaluate, data.held_out.num_episodes, loss=loss)
    return Learner(
        algorithm,
        dataset=(data.training.num_whole, data.training.num_transitions),
        evaluator=None if run.recipe.env is not None else held_out,
    )


def dataset_section(
    run: Resolved,
    store: Episodes,
    reads: Collection[str],
    sides: tuple[EpisodesOf, EpisodesOf],
    batch: int,
    sizes: dict[str, int],
    notes: Sequence[str] = (),
    **learner: Any,
) -> PlanSection:
    """The plan of learning from a dataset, `batch` steps per gradient step.

    sides: the episodes to learn from and those held out. sizes: of the learner, for `geometry`;
    learner: the other fields of its `PlanSection`.
    """
    training, held_out = sides
    drawn, geometry = run.loops.total.updates * batch, store.geometry
    passes, num_steps = drawn / training.num_transitions, store.num_transitions
    common = [
        f"{held_out.num_whole:,} of {store.num_episodes:,} episodes are held out for evaluation.",
        "The x axis of curves is gradient updates: nothing is collected.",
    ]
    if clips := training.num_clips + held_out.num_clips:
        found = contrast(store.returns, store.lengths)
        why = "" if found.enough else f", because {found.reason} and would teach no reward"
        common.append(
            f"{clips:,} clips that end before their episode does are added as failures{why} "
            "(algorithm.add_truncated)."
        )
    if excluded := num_excluded(store):
        common.append(f"{excluded:,} more episodes are excluded (etude data exclude): not used.")
    if unread := sorted(geometry.observations.keys() - set(reads)):
        names = ", ".join(f"'{name}'" for name in unread)
        common.append(f"{names} of the dataset are not read: they stay on the disk.")
    return PlanSection(
        geometry={**sizes, "episodes": store.num_episodes, "steps": num_steps},
        shapes=array_shapes(geometry.specs_read(reads), [num_steps], [batch]),
        title="Dataset: [steps, ...]",
        usage=f"every step that is not held out is used {passes:,.1f} times in all, on average",
        data={"passes": passes, "gradient_samples": float(drawn)},
        disk={"dataset": store.disk_bytes},
        notes=[*common, *notes],
        **learner,
    )
