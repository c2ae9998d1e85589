"""Where PPO's rewards come from, as the app sees it: made, planned, and refused."""

from __future__ import annotations

import numpy as np
import torch

from etude.algorithms.amp import AMP, MOTION, STYLE, AMPConfig, bytes_by_part
from etude.algorithms.rewards import GIVEN, GivenConfig, OnPolicyRewards
from etude.cli.environments import style_reference
from etude.core.contracts import Array, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.models.discriminator import make_discriminator, window_shape
from etude.planning.recipe import Recipe

_KEPT_PER_UNIT = 6
"""float32 numbers per window and unit that a discriminator's gradient keeps: the way there, its
slope, and the way back through both."""


def check(recipe: Recipe) -> None:
    """Refuse a reward source that does not judge fresh experience, or does not divide."""
    config = recipe.rewards
    if isinstance(config, AMPConfig):
        config.check(recipe.learner.shards)
    elif not isinstance(config, GivenConfig):
        raise UsageError(
            f"ppo learns from the environment's rewards as they come, and rewards.kind "
            f"{config.kind} from replayed ones: use algorithm sac or td3."
        )


def num_updates(recipe: Recipe) -> int:
    """Gradient steps of an iteration that are the reward source's own."""
    return recipe.rewards.updates if isinstance(recipe.rewards, AMPConfig) else 0


def make(
    recipe: Recipe,
    env: EnvSpec,
    key: Key | None,
    where: torch.device,
    ranks: Ranks = ALONE,
) -> OnPolicyRewards:
    """The reward source a recipe asks for; without a key its weights are not drawn."""
    config = recipe.rewards
    if not isinstance(config, AMPConfig):
        return GIVEN
    windows, motions = _reference(recipe, env)
    with torch.device("meta" if key is None else "cpu"):
        network = make_discriminator(window_shape(windows), config.hidden, key)
    return AMP(config, network, windows, recipe.learner.shards, where, ranks, motions)


def _reference(recipe: Recipe, env: EnvSpec) -> tuple[Array, Array | None]:
    """[n, frames, features]: what the environment's motion is to be like; and the motion [n] that
    each window is of, where several are practised."""
    windows, motions = style_reference(recipe.task) if STYLE in env.observations else (None, None)
    if windows is None or env.agents > 1:
        raise UsageError(
            "rewards.kind amp compares motion with a reference, and this environment has none: it "
            f"needs an observation '{STYLE}' and the method style_windows(). Use rewards.kind "
            "given."
        )
    seen = env.observations[STYLE]
    if windows.shape[1:] != seen.shape or len(windows) == 0 or len(seen.shape) != 2:
        raise UsageError(
            f"style_windows() gives {list(windows.shape)}, and the observation '{STYLE}' is "
            f"{list(seen.shape)}: they must be [n, frames, features] and [frames, features]."
        )
    if (windows.dtype, seen.dtype) != (np.float32, "float32") or not np.isfinite(windows).all():
        raise UsageError(
            f"style_windows() and the observation '{STYLE}' must be finite numbers of float32."
        )
    if MOTION not in env.observations or motions is None:
        return windows, None
    known, shape = set(range(max(len(env.motions), 1))), env.observations[MOTION].shape
    if motions.shape != windows.shape[:1] or set(motions.tolist()) != known or shape != (1,):
        raise UsageError(
            f"style_motions() must say of each of the {len(windows):,} windows which of the "
            f"environment's {len(known):,} motions it is of (0, 1, ...), with at least one window "
            f"of each; and the observation '{MOTION}' must be one number."
        )
    return windows, motions.astype(np.int64)


def lines(source: OnPolicyRewards) -> list[str]:
    """What it adds to the plan of an iteration."""
    if not isinstance(source, AMP):
        return []
    config = source.config
    frames, features = window_shape(source.reference)
    return [
        f"before it, {config.updates:,} of the discriminator: {config.batch_size:,} windows of the "
        f"policy, half of them replayed, against {config.batch_size:,} of the reference's "
        f"{len(source.reference):,}; a window is {frames:,} frames x {features:,} features"
    ]


def geometry(source: OnPolicyRewards) -> dict[str, int]:
    """Its sizes."""
    if not isinstance(source, AMP):
        return {}
    config = source.config
    frames, features = window_shape(source.reference)
    return {
        "discriminator_batches": config.updates,
        "discriminator_batch_size": config.batch_size,
        "replay_capacity": config.replay_capacity,
        "window_frames": frames,
        "window_features": features,
    }


def memory(source: OnPolicyRewards) -> dict[str, int]:
    """Bytes that are exact."""
    return bytes_by_part(source) if isinstance(source, AMP) else {}


def workspace(source: OnPolicyRewards) -> int:
    """Bytes of a gradient, estimated."""
    if not isinstance(source, AMP):
        return 0
    frames, features = window_shape(source.reference)
    units = frames * features + sum(source.config.hidden)
    return 4 * _KEPT_PER_UNIT * units * 2 * source.config.batch_size // source.shards
