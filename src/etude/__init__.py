"""Etude trains robot skills: planned, exact, elastic, safe and fast."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# Read when torch is loaded: threads that wait actively starve the physics beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "WORLD_SIZE" in os.environ:  # Lost ranks are reported in a sentence, to which torch adds a page.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_EXPORTS = {
    "plan": ("etude.api", "plan"),
    "train": ("etude.api", "train"),
    "resume": ("etude.api", "resume"),
    "export": ("etude.share.export", "export_run"),
    "import_dataset": ("etude.api", "import_dataset"),
    "load_policy": ("etude.evaluate.acting", "load_policy"),
    "load_reward": ("etude.rl.rewards.learned", "load_reward"),
    "make": ("etude.gym", "make"),
    "make_vec": ("etude.gym", "make_vec"),
    "Run": ("etude.api", "Run"),
    "Recipe": ("etude.planning.recipes", "Recipe"),
    "Callback": ("etude.training.loop", "Callback"),
    "ArrayTask": ("etude.envs.array_task", "ArrayTask"),
    "State": ("etude.envs.array_task", "State"),
    "Outcome": ("etude.envs.array_task", "Outcome"),
    "ActionSpec": ("etude.core.contracts", "ActionSpec"),
    "ArraySpec": ("etude.core.contracts", "ArraySpec"),
}

__all__ = [
    "ActionSpec",
    "ArraySpec",
    "ArrayTask",
    "Callback",
    "Outcome",
    "Recipe",
    "Run",
    "State",
    "export",
    "import_dataset",
    "load_policy",
    "load_reward",
    "make",
    "make_vec",
    "mj",
    "plan",
    "recipes",
    "resume",
    "train",
]


def __dir__() -> list[str]:
    """The public names, loaded or not, for completion."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, so that `import etude` is quick."""
    if name in ("recipes", "mj"):
        return import_module("etude.mj" if name == "mj" else "etude.planning.recipes")
    if name in _EXPORTS:
        module, attribute = _EXPORTS[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'etude' has no attribute '{name}'")
