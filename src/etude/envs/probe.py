"""Random play, and a probe of whether an environment resumes bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from etude.core.contracts import AbsentAgents, Array, BatchEnv, Exactness, StepResult, ability
from etude.core.errors import EtudeError, Exited, UsageError, describe_error
from etude.core.guard import Hung, Supervisor, supervised
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.trees import Tree, digest
from etude.envs.adapters import object_state
from etude.envs.config import EnvConfig

KEY = Key(0, ("probe",))
PROBE_STEPS = 50
STEPS_BEFORE = 23
"""Steps before the snapshot; a prime, so that episodes of round length do not end there."""
PATIENCE = 60.0
"""Timeout of a fresh process, s."""


def random_actions(env: BatchEnv, steps: int, key: Key, reach: float = 1.0) -> list[Array]:
    """Random actions, converted by `to_env`; those of a box are uniform in [-reach, reach]."""
    stream = key.generator()
    spec = env.spec.action
    actions: list[Array] = []
    for _ in range(steps):
        drawn: Array
        if spec.kind == "box":
            shape = (env.num_envs, len(spec.low))
            drawn = stream.uniform(-reach, reach, shape).astype(np.float32)
        else:
            drawn = stream.integers(spec.sizes, size=(env.num_envs, len(spec.sizes)))
        actions.append(spec.to_env(drawn))
    return actions


def result_bits(result: StepResult) -> str:
    """Digest of the result of a step, without its time."""
    episodes = {name.replace("/", "."): array for name, array in result.episodes.items()}
    return digest({**vars(result), "episodes": episodes, "physics_seconds": 0.0})


def play(env: BatchEnv, actions: list[Array]) -> list[str]:
    """Step through the actions; digests of every step and of the rows present after it."""
    steps: list[str] = []
    for action in actions:
        bits = result_bits(env.step(action))
        present = presence(env)
        steps.append(bits if present is None else bits + digest({"present": present}))
    return steps


def presence(env: BatchEnv) -> Array | None:
    """Rows with an agent, [rows] bool; None if all rows always have one."""
    found = ability(env, AbsentAgents)
    return None if found is None else found.present


def probe(make: Make, config: EnvConfig, rows: int, name: str) -> Exactness:
    """Probe whether an environment resumes bit for bit; cached per process and folder.

    Take a snapshot, step, restore and step again in the same instance, in another instance, and in
    two fresh processes with different string hashes, and compare all bits. make: a function of a
    module, which those processes import. name: of the environment, for the verdict.
    """
    asked = f"{make.__module__} {config.model_dump_json()} {rows} {os.getcwd()}"
    if asked not in _verdicts:
        with waiting(f"probing whether '{name}' resumes exactly"):
            verdict, trial = supervised(lambda s: _here(make, config, rows, name, s))
            _verdicts[asked] = verdict if trial is None else _elsewhere(make, config, trial, name)
    return _verdicts[asked]


Make = Callable[[Any, int], BatchEnv]
_verdicts: dict[str, Exactness] = {}


@dataclass(frozen=True)
class Trial:
    """Record of a play, to be repeated in other processes."""

    rows: int
    snapshot: Tree
    after: list[str]
    """Digests of the steps after the snapshot."""
    begin: list[str]
    """Digests of the first steps, from a reset to the snapshot."""


def _here(
    make: Make, config: EnvConfig, rows: int, name: str, supervisor: Supervisor
) -> tuple[Exactness, Trial | None]:
    """Verdict in this process and, if it is exact, the trial to repeat in other processes."""
    env, other = (supervisor.guard(make(config, rows), "the probe") for _ in range(2))
    try:
        begin = first_steps(env)
        # Bring the other instance to another state, which the snapshot must overwrite.
        other.reset(KEY.child("other"))
        play(other, random_actions(other, PROBE_STEPS // 3, KEY.child("past")))
        snapshot = env.snapshot()
        expected = play(env, random_actions(env, PROBE_STEPS, KEY.child("after")))
        for place, instance in (("the same instance", env), ("a fresh instance", other)):
            found = steps_after(instance, snapshot)
            if (step := _first_difference(expected, found)) is not None:
                reason = (
                    f"restored in {place}, '{name}' differs after {step} steps: it keeps state "
                    "that is not in its snapshot"
                )
                return Exactness(False, reason), None
    except (UsageError, Hung, Exited):
        raise
    except Exception as error:  # third-party code may raise anything after a restore
        return Exactness(False, f"'{name}' cannot be restored: {describe_error(error)}"), None
    finally:
        env.close()
        other.close()
    return Exactness(True, _EQUAL), Trial(rows, snapshot, expected, begin)


def first_steps(env: BatchEnv) -> list[str]:
    """Digests of the steps from a reset to the snapshot."""
    env.reset(KEY)
    return play(env, random_actions(env, STEPS_BEFORE, KEY.child("before")))


def steps_after(env: BatchEnv, snapshot: Tree) -> list[str]:
    """Digests of the steps after restoring the snapshot."""
    env.restore(snapshot, KEY)
    return play(env, random_actions(env, PROBE_STEPS, KEY.child("after")))


def _elsewhere(make: Make, config: EnvConfig, trial: Trial, name: str) -> Exactness:
    """Verdict of two fresh processes, or that of this process with a note if they cannot run.

    A resume is in another process, where sets of strings have another order.
    """
    code = object_state.encode(trial.snapshot)
    if digest(object_state.decode(code)) != digest(trial.snapshot):
        return _exact_here(name, "its snapshot holds more than arrays, numbers and strings")
    order = {
        "make": [make.__module__, make.__qualname__],
        "config": [type(config).__module__, type(config).__qualname__],
        "fields": config.model_dump(mode="json"),
        "rows": trial.rows,
        "snapshot": code,
    }
    for answer in _ask(json.dumps(order).encode()):
        if "unmade" in answer:
            return _exact_here(name, answer["unmade"])
        if "failed" in answer:
            reason = f"'{name}' cannot be restored in another process: {answer['failed']}"
            return Exactness(False, reason)
        for what, expected in (("", trial.begin), ("restored there, ", trial.after)):
            step = _first_difference(expected, answer["after" if what else "begin"])
            if step is not None:
                reason = (
                    f"in another process, {what}'{name}' differs after {step} steps: it depends on "
                    "the order of a set, on hash(), or on something else that differs between "
                    "processes"
                )
                return Exactness(False, reason)
    return Exactness(True, f"{_EQUAL}, in this and in two fresh processes")


_EQUAL = f"a probe of {PROBE_STEPS} steps after a restore was equal in every bit"


def _exact_here(name: str, why: str) -> Exactness:
    return Exactness(
        True, f"{_EQUAL}, but only in this process: '{name}' cannot run in a fresh one ({why})"
    )


def _first_difference(expected: list[str], found: list[str]) -> int | None:
    """Number of the first step in which two plays differ; None if they are equal."""
    pairs = zip(expected, found, strict=True)
    return next((n for n, (one, two) in enumerate(pairs, 1) if one != two), None)


def _ask(order: bytes) -> list[dict[str, Any]]:
    """Run two fresh processes in parallel; returns their answers."""
    path = os.pathsep.join(filter(None, sys.path))
    processes = [
        subprocess.Popen(
            # `-P`: do not import Etude from the current folder.
            [sys.executable, "-P", "-m", "etude.envs.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        )
        for seed in ("1", "2")
    ]
    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(lambda process: _answer(process, order), processes))


def _answer(process: subprocess.Popen[bytes], order: bytes) -> dict[str, Any]:
    try:
        said, _ = process.communicate(order, timeout=PATIENCE)
        return dict(json.loads(said))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"unmade": f"it did not answer within {PATIENCE} s"}
    except (OSError, ValueError):
        return {"unmade": f"the process ended with code {process.returncode}"}


def _found(place: list[str]) -> Any:
    module, name = place
    return getattr(import_module(module), name)


def _main() -> dict[str, Any]:
    """Digests {"begin", "after"} of the steps in a fresh process, or the reason for none.

    Run as `python -m etude.envs.probe < order > answer`, without torch, whose import would take
    most of the time.
    """
    order = json.load(sys.stdin)
    try:
        config = _found(order["config"]).model_validate(order["fields"])
        env = _found(order["make"])(config, order["rows"])
    except Exception as error:  # registrations of the other process are missing here
        own = isinstance(error, EtudeError)
        return {"unmade": str(error).rstrip(".") if own else describe_error(error)}
    try:
        # As in a resume, the first call of a new instance is `restore`.
        after = steps_after(env, object_state.decode(order["snapshot"]))
        return {"after": after, "begin": first_steps(env)}
    except Exception as error:  # third-party code may raise anything after a restore
        return {"failed": describe_error(error)}


if __name__ == "__main__":
    # What an environment prints must not get into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(_main(), answer)
    answer.flush()
    os._exit(0)  # Threads of environments must not keep this process alive.
