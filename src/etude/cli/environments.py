"""The environment that a name stands for, and what its motion is compared with."""

from __future__ import annotations

import re

from etude.envs.config import ENVS, EnvConfig


def env_config(target: str, options: dict[str, bool | int | float | str]) -> EnvConfig:
    """What a person means by a kind, a Gymnasium id, a PettingZoo module, or a task's class."""
    if target in ENVS.names():
        return ENVS.load(target).model_validate({"kind": target, **options})
    # Gymnasium's own way to name a package, package:Env-v0, has a colon as well.
    if ":" in target and not re.search(r"-v\d+$", target):
        return ENVS.validate({"kind": "task", "task": target, "options": options})
    if re.fullmatch(r"\w+(\.\w+)*\.\w+_v\d+", target):
        return ENVS.validate({"kind": "pettingzoo", "parallel": target, "kwargs": options})
    return ENVS.validate({"kind": "gym", "id": target, "kwargs": options})
