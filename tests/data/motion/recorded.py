"""The published clips, for tests that need real ones."""

from __future__ import annotations

import importlib.util

import pytest

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
