"""The reference that AMP compares motion with: asked of the environment, and checked."""

from __future__ import annotations

import numpy as np

from etude.core.abilities import StyleMotions, StyleReference, ability
from etude.core.contracts import Array, EnvSpec
from etude.core.errors import UsageError
from etude.envs.config import EnvConfig

STYLE = "style"
"""The observation that the discriminator sees, [frames, features] float32, newest frame last."""
MOTION = "motion"
"""The observation that says which motion of the reference a row practises, [1] float32."""


def reference_windows(config: EnvConfig, env: EnvSpec) -> tuple[Array, Array | None]:
    """[n, frames, features]: what the environment's motion is to be like; and the motion [n] that
    each window is of, where several are practised."""
    windows, motions = _reference(config) if STYLE in env.observations else (None, None)
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


def _reference(config: EnvConfig) -> tuple[Array | None, Array | None]:
    """All windows [n, frames, features] of the environment's reference, if it has one; and the
    motion [n] int64 that each is of, where the environment says so."""
    env = config.build_unchecked(config.num_agents)
    try:
        reference, motions = ability(env, StyleReference), ability(env, StyleMotions)
        return (
            None if reference is None else reference.style_windows(),
            None if motions is None else motions.style_motions(),
        )
    finally:
        env.close()
