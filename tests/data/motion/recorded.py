"""The published clips, for tests that need real ones."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from etude.core.contracts import Array
from etude.data.motion import files
from etude.data.motion.motions import Motion
from etude.envs.mujoco.reference import ModelKinematics, load_robot
from etude.envs.robots.humanoid import MODEL

needs_clips = pytest.mark.skipif(
    importlib.util.find_spec("pybullet_data") is None,
    reason="pybullet_data, which holds the clips, is not installed (the extra 'mocap')",
)
CLIPS = (
    "backflip",
    "cartwheel",
    "crawl",
    "dance_a",
    "dance_b",
    "getup_facedown",
    "getup_faceup",
    "jump",
    "kick",
    "punch",
    "roll",
    "run",
    "spin",
    "spinkick",
    "walk",
)


@cache
def humanoid() -> ModelKinematics:
    """The bodies of our humanoid, which the clips are for."""
    return ModelKinematics(load_robot(MODEL).compile())


def still() -> Array:
    """The pose [43] of the humanoid at rest, 1 m above the floor."""
    pose = humanoid().home.copy()
    pose[2] = 1.0
    return pose


def fitted(*names: str) -> list[Motion]:
    """Clips by name, or all, with the humanoid's poses."""
    return [humanoid().fit(clip, humanoid().home) for clip in files.load(names)]
