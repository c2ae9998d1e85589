"""Etude's tasks in Gymnasium's registry: `import etude.gym; gymnasium.make("etude/Reach-v0")`.

`gymnasium.make("etude.gym:etude/Reach-v0")` imports this by itself.
"""

from __future__ import annotations

from etude.tasks.gymnasium_api import TASKS, make, make_vec, register_tasks

__all__ = ["TASKS", "make", "make_vec", "register_tasks"]

register_tasks()
