"""A fresh process of the probe: make the environment, restore, play, and tell what came of it.

    python -m etude.envs.probe_child < order > answer

Torch is not loaded here, which would take most of the time.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

from etude.core.errors import EtudeError
from etude.core.imports import describe
from etude.envs.adapters import object_state
from etude.envs.probe import first_steps, steps_after


def _found(place: list[str]) -> Any:
    module, name = place
    return getattr(import_module(module), name)


def main() -> dict[str, Any]:
    """{"begin", "after"}: digests of steps; or why there are none."""
    order = json.load(sys.stdin)
    try:
        config = _found(order["config"]).model_validate(order["fields"])
        env = _found(order["make"])(config, order["rows"])
    except Exception as error:  # what one process has registered, another does not know
        told = isinstance(error, EtudeError)
        return {"unmade": str(error).rstrip(".") if told else describe(error)}
    try:
        # As in a resume: the first that happens to a new instance is that it is restored.
        after = steps_after(env, object_state.decode(order["snapshot"]))
        return {"after": after, "begin": first_steps(env)}
    except Exception as error:  # foreign code may fail in any way once restored
        return {"failed": describe(error)}


if __name__ == "__main__":
    # An environment may print: that must not get into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(main(), answer)
    answer.flush()
    os._exit(0)  # Whatever threads an environment has left must not keep this process.
