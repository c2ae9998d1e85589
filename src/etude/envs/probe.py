"""Random play, and the probe that finds out whether an environment resumes bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from etude.core.contracts import Array, BatchEnv, Exactness, StepResult
from etude.core.errors import UsageError
from etude.core.imports import describe
from etude.core.keys import Key
from etude.core.trees import digest

PROBE_STEPS = 50
STEPS_BEFORE = 23
"""Before the snapshot; a prime, so that it does not fall where episodes of round length end."""


def random_actions(env: BatchEnv, steps: int, key: Key, reach: float = 1.0) -> list[Array]:
    """Actions as a policy sends them, through `to_env`; a box is drawn from [-reach, reach]."""
    stream = key.generator()
    spec = env.spec.action
    actions: list[Array] = []
    for _ in range(steps):
        drawn: Array
        if spec.kind == "box":
            shape = (env.num_rows, len(spec.low))
            drawn = stream.uniform(-reach, reach, shape).astype(np.float32)
        else:
            drawn = stream.integers(spec.sizes, size=(env.num_rows, len(spec.sizes)))
        actions.append(spec.to_env(drawn))
    return actions


def result_bits(result: StepResult) -> str:
    """A digest of everything a step gave, but for the time it took."""
    episodes = {name.replace("/", "."): array for name, array in result.episodes.items()}
    return digest({**vars(result), "episodes": episodes, "physics_seconds": 0.0})


def play(env: BatchEnv, actions: list[Array]) -> list[str]:
    """A digest of every step, and of which rows are there after it."""
    steps: list[str] = []
    for action in actions:
        bits = result_bits(env.step(action))
        present = presence(env)
        steps.append(bits if present is None else bits + digest({"present": present}))
    return steps


def presence(env: BatchEnv) -> Array | None:
    """[rows] bool: which rows stand for an agent; None where all always do."""
    present: Array | None = getattr(env, "present", None)
    return present


def probe(make: Callable[[], BatchEnv], name: str) -> Exactness:
    """Snapshot, step, restore and step again, in the same and in another instance; compare bits.

    `make` gives a new instance; `name` is what the verdict calls it.
    """
    key = Key(0, ("probe",))
    env, other = make(), make()
    try:
        env.reset(key)
        play(env, random_actions(env, STEPS_BEFORE, key.child("before")))
        # The other instance has a past of its own, which the snapshot must overwrite.
        other.reset(key.child("other"))
        play(other, random_actions(other, PROBE_STEPS // 3, key.child("past")))
        snapshot = env.snapshot()
        actions = random_actions(env, PROBE_STEPS, key.child("after"))
        expected = play(env, actions)
        for place, instance in (("the same instance", env), ("a fresh instance", other)):
            instance.restore(snapshot, key)
            found = play(instance, actions)
            for step, (one, two) in enumerate(zip(expected, found, strict=True)):
                if one != two:
                    return Exactness(
                        False,
                        f"restored in {place}, '{name}' differs after {step + 1} steps: "
                        "it keeps state that is not in its snapshot",
                    )
    except UsageError:
        raise
    except Exception as error:  # foreign code may fail in any way once restored
        return Exactness(False, f"'{name}' cannot be restored: {describe(error)}")
    finally:
        env.close()
        other.close()
    return Exactness(True, f"a probe of {PROBE_STEPS} steps after a restore was equal in every bit")
