"""Learning from a dataset in place of a replay: how it is opened, planned and evaluated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from etude.core.config import AbsolutePath
from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.data.contrast import contrast, draw_clips
from etude.data.sentences import TASK, shown, vector_of
from etude.data.store.episodes import StoreGeometry
from etude.data.store.files import DESCRIPTION
from etude.data.store.manifest import MANIFEST, Episodes, is_dataset
from etude.data.store.tasks import geometry_with_task, open_with_task, sentences_in, sentences_of
from etude.data.store.views import EpisodesOf
from etude.models.encoders import default_observations
from etude.models.policies import make_policy
from etude.planning.recipe import (
    AlgorithmConfig,
    Inputs,
    PlanSection,
    Recipe,
    Resolved,
    array_shapes,
)


class DatasetConfig(AlgorithmConfig):
    """What is learned from a dataset, and what is kept from it."""

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
        description="Clips (episodes cut short) that are added to learn a reward from. None adds "
        "one per episode if all returns of the dataset are equal, otherwise no clips.",
    )
    allow_equal_returns: bool = Field(
        False, description="Allow a dataset whose returns are too alike to learn a reward from."
    )

    prefetch: bool = Field(
        True,
        description="Draw the next minibatch of a dataset in a thread while this one trains; its "
        "bits are the same without.",
    )

    def completed(self, recipe: Recipe) -> Recipe:
        """With the observations that the policy reads, where none are named: those of the dataset
        that show its task, the images and all proprioceptive vectors. And with the vector of the
        sentence that the environment tells."""
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
    """What the dataset holds that a config names."""
    name = config.dataset
    if not name or not is_dataset(Path(name)):
        missing = f" (no {DESCRIPTION} or {MANIFEST} in it)"
        what = missing if name and Path(name).is_dir() else ""
        raise UsageError(
            f"There is no dataset at '{name}'{what}: name one with --algorithm.dataset FOLDER; "
            "`etude data record` makes one, `etude data import` reads those of others."
        )
    return geometry_with_task(Path(name))


def split_store(
    store: Episodes,
    config: DatasetConfig,
    action: ActionSpec | None = None,
    for_reward: bool = True,
    with_clips: bool = True,
) -> tuple[EpisodesOf, EpisodesOf]:
    """The episodes to learn from and those held out; a reward may also be learned from clips.

    action: what the stored actions are for, see `EpisodesOf`. A dataset that cannot teach a
    reward is refused where one is to be learned.
    """
    kept, held_out = split(store.returns, config.held_out, store.labels.groups)
    if not for_reward:
        return EpisodesOf(store, kept, action), EpisodesOf(store, held_out, action)
    if unknown := store.labels.num_unrewarded:
        raise UsageError(
            f"{store.path} has no rewards for {unknown:,} of its {store.num_episodes:,} episodes, "
            "and a reward is learned from returns: import files with rewards, or say that the "
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
            f"{store.path} teaches no reward: {found.reason}, so a constant per step solves the "
            "loss. Add episodes that fail (etude data record makes some), or go on regardless "
            "with allow_equal_returns."
        )
    return sides[0], sides[1]


def _clips(store: Episodes, config: DatasetConfig | None) -> tuple[Array, Array]:
    """Episodes [clips] int64 and first steps [clips] of the clips that are added; None adds none.

    They are the same for the same dataset. Where every return is 0, or every step is rewarded
    alike, clips would not differ either, and `split_store` refuses.
    """
    num = 0 if config is None else config.add_truncated
    if config is not None and num is None:
        returns, lengths = store.returns, store.lengths
        equal = not config.allow_equal_returns and not contrast(returns, lengths).enough
        num = store.num_episodes if equal else 0
    return draw_clips(store.lengths, num or 0, Key(0))


def split(returns: Array, held_out: float, groups: Array | None = None) -> tuple[Array, Array]:
    """Numbers of the episodes to learn from and of those held out, each ascending int64.

    Episodes [n] of one of `groups` [n] int64 share steps and stay together; without groups each
    episode is on its own. The part `held_out` of all groups is taken, but at least one, and at
    least one is left. They are evenly spaced in the order of their mean returns, so that both
    sides hold good and bad ones. The same returns give the same sides, without a random number.
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
"""Steps that the range of actions is taken from where there is no environment."""


class Data(NamedTuple):
    """The dataset of a recipe."""

    store: Episodes
    spec: EnvSpec
    """The dataset as an environment would describe itself."""
    reads: set[str]
    """Observations that policy and rewards read."""
    training: EpisodesOf
    held_out: EpisodesOf

    def shards(self, num: int) -> list[EpisodesOf]:
        """The episodes to learn from, dealt to so many shards; whole ones come before clips."""
        if self.training.num_whole < num:
            raise UsageError(
                f"{self.store.path} has {self.training.num_whole:,} episodes to learn from, and "
                f"each of {num:,} shards needs one: use fewer learner.shards."
            )
        return [self.training.part(slice(s, None, num)) for s in range(num)]


def refuse_collection(recipe: Recipe) -> None:
    """Refuse what only makes sense where something is collected."""
    if recipe.collector.lag:
        raise UsageError(
            "Learning from a dataset has nothing to collect ahead: leave collector.lag at 0."
        )


def check(recipe: Recipe, batch_size: int) -> None:
    """Refuse sizes that do not divide."""
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

    Episodes of an evaluation say which policy is the best: an environment counts as well.
    """
    if recipe.learner.torch_device().type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ")
    if recipe.env is not None and not recipe.env.exactness().exact:
        return recipe.env.exactness()
    return Exactness(True, "the dataset is sealed and named by its hash")


def open_data(config: DatasetConfig, recipe: Recipe) -> Data:
    """The dataset, compared with the environment where the recipe names one."""
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
    """[-1, 1], which is what most datasets of robots have, or a dimension's range in a sample.

    The dataset keeps raw actions. What is drawn of it is scaled to this box and clipped there.
    """
    spec = store.geometry.specs["actions"]
    if np.dtype(spec.dtype).kind != "f":
        raise UsageError(
            f"The actions of {store.path} are {spec.dtype}, choices whose number only an "
            "environment knows: name it with --env.kind (and ppo's policy kinds to imitate them)."
        )
    every = EpisodesOf(store, np.arange(store.num_episodes))
    sample = every.sample_actions(Key(0).child("probe").generator(), _PROBE)
    low, high = np.minimum(sample.min(0), -1.0), np.maximum(sample.max(0), 1.0)
    return ActionSpec("box", tuple(low.tolist()), tuple(high.tolist()))


def _fits(recipe: Recipe, store: Episodes) -> ActionSpec:
    """The actions of the environment; refuses one in which what is learned could not act."""
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
    """Refuse an environment whose actions, or observations that are read, are not the dataset's."""
    there = store.geometry.observations
    if TASK in reads and TASK in there and TASK not in observations:
        raise UsageError(
            f"The policy is told its task by a sentence, and this environment says none: name one "
            f"with --env.sentence ({shown([*sentences_in(store)])}), or what else the policy reads "
            "with --policy.actor-reads."
        )
    for name in reads:
        if name in there and observations.get(name) != there[name]:
            raise UsageError(
                f"The policy reads '{name}', which is {_said(there[name])} in {store.path} and "
                f"{_said(observations.get(name))} in this environment: choose observations "
                "both have with --policy.actor-reads, or the environment the data is of."
            )
    actions = store.geometry.specs["actions"]
    if action.array != actions:
        raise UsageError(
            f"The actions of {store.path} are {_said(actions)}, and those of this environment "
            f"{_said(action.array)}: name the environment the data is of, or none."
        )


def _said(spec: ArraySpec | None) -> str:
    return "missing" if spec is None else f"{spec.dtype} of shape {spec.shape}"


def inputs(config: DatasetConfig, recipe: Recipe) -> Inputs:
    """What a run learns from, with the dataset held open for it."""
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
    """What is to be known of a policy whose actions are those of a dataset."""
    action, notes = data.spec.action, []
    beyond = sum(
        low < -1.0 or high > 1.0 for low, high in zip(action.low, action.high, strict=True)
    )
    if recipe.env is None and beyond:
        notes.append(
            f"Actions go beyond [-1, 1] in {beyond:,} of {len(action.low):,} dimensions: what the "
            "policy learns there is scaled to the range they have in the dataset. An environment "
            "(--env.kind, --env.id or --env.task) gives its own range."
        )
    if recipe.env is None:
        notes.append(
            "No environment is named: the policy is evaluated on the episodes held out, and the "
            "newest is taken for the best."
        )
    return notes


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
    """The plan of learning from a dataset, `batch` steps at a time.

    sides: the episodes to learn from and those held out. sizes: those of the learner; learner:
    the other fields of its `PlanSection`.
    """
    training, held_out = sides
    drawn, geometry = run.loops.total.updates * batch, store.geometry
    passes, num_steps = drawn / training.num_transitions, store.num_transitions
    said = [
        f"{held_out.num_whole:,} of {store.num_episodes:,} episodes are held out for tests.",
        "Curves are over gradient updates: nothing is collected.",
    ]
    if clips := training.num_clips + held_out.num_clips:
        found = contrast(store.returns, store.lengths)
        why = "" if found.enough else f", because {found.reason} and would teach no reward"
        said.append(
            f"{clips:,} clips that end before their episode does are added as failures{why} "
            "(algorithm.add_truncated)."
        )
    if unread := sorted(geometry.observations.keys() - set(reads)):
        names = ", ".join(f"'{name}'" for name in unread)
        said.append(f"Nothing reads {names} of the dataset: it stays on the disk.")
    return PlanSection(
        geometry={**sizes, "episodes": store.num_episodes, "steps": num_steps},
        shapes=array_shapes(geometry.specs_read(reads), [num_steps], [batch]),
        title="Dataset: [steps, ...]",
        usage=f"every step that is not held out is used {passes:,.1f} times in all, on average",
        data={"passes": passes, "gradient_samples": float(drawn)},
        disk={"dataset": store.disk_bytes},
        notes=[*said, *notes],
        **learner,
    )
