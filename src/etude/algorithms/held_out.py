"""A dataset to learn from: its config, what is held out of it, and the part that is learned from.

An episode and the clips that were cut from it are on one side: a test on steps that were learned
from would tell nothing. Clips that the dataset holds are kept with their source by its labels;
clips that are added here are views of an episode and take no room.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import Field

from etude.core.config import AbsolutePath
from etude.core.contracts import ActionSpec, Array
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.experience.contrast import contrast, draw_clips
from etude.experience.sentences import vector_of
from etude.experience.store.episodes import StoreGeometry
from etude.experience.store.files import DESCRIPTION
from etude.experience.store.manifest import MANIFEST, Episodes, is_dataset
from etude.experience.store.tasks import geometry_with_task, sentences_of
from etude.experience.store.views import EpisodesOf
from etude.models.encoders import observations_that_show_the_task
from etude.planning.kinds import AlgorithmConfig
from etude.planning.recipe import Recipe


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
        reads = observations_that_show_the_task(there, policy.encoder)
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
