"""Motions made by functions, for tests of tasks that track a motion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from etude.data.motion import files
from etude.data.motion.motions import Motion
from etude.envs.robots.go1 import MODEL
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.tasks.tracking import TrackConfig

FEET = ".*_calf"


SPEED = 0.4
"""m/s."""


def walk() -> Motion:
    """A Go1 that walks ahead: diagonal legs swing in turn, twice a second."""
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    home = model.key("stand").qpos
    times = np.arange(26) / 50
    poses = np.tile(home, (len(times), 1))
    poses[:, 0] += SPEED * times
    names = [model.joint(j).name for j in range(1, model.njnt)]
    for column, name in enumerate(names, 7):
        leg, part, _ = name.split("_")
        phase = (2 * times / times[-1] + (leg in ("FL", "RR"))) % 2  # swings from 0 to 1
        lift = np.where(phase < 1, np.sin(np.pi * phase) ** 2, 0.0)
        ahead = np.where(phase < 1, -np.cos(np.pi * phase), 3 - 2 * phase)
        reach = SPEED * times[-1] / 4 / home[2]
        if part == "thigh":
            poses[:, column] += 0.3 * lift - reach * ahead
        elif part == "calf":
            poses[:, column] -= 0.6 * lift
    return Motion("walk", times, poses, True, dict.fromkeys(names, 1))


def go1_config(folder: Path, **changes: Any) -> TrackConfig:
    """Tracking of the walk, from a file in a folder."""
    path = folder / "walk.npz"
    files.write(walk(), path)
    fields = {
        "robot": str(MODEL),
        "motion": (str(path),),
        "home": "stand",
        "ends": FEET,
        "timestep": 0.004,
        "substeps": 5,
        "max_episode_steps": 100,
    }
    return TrackConfig(**{**fields, **changes})


def go1_recipe(name: str, folder: Path) -> Recipe:
    """A recipe of tracking with the Go1 as its robot."""
    return recipes.find(name).replace(env=go1_config(folder))
