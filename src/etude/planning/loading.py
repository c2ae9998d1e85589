"""Load from runs: policies, curves, and the state that another run starts from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from etude.core.config import Config
from etude.core.errors import EtudeError, UsageError
from etude.core.metrics import numbers, step_of
from etude.core.trees import Tree
from etude.data.sentences import vector_of
from etude.envs.config import EnvConfig
from etude.planning.recipe import Recipe
from etude.runs import checkpoint
from etude.training.saving import RUN


def policy_parts(path: Path) -> tuple[Tree, Tree]:
    """(arrays, contract) of the policy in a run, a checkpoint or a policy folder."""
    chosen = policy_path(path)
    try:
        return checkpoint.load_policy_parts(chosen)
    except checkpoint.DamagedCheckpoint as error:
        fix = f"Remove {chosen} to use the next one" if chosen != path else "Use another one"
        raise EtudeError(f"{error} {fix}.") from error


def chosen_path(run: Path, which: str) -> Path:
    """The checkpoint of a run that "latest" or a step names; the run itself for "best"."""
    if which == "best":
        return run
    there = policies(run)
    if which == "latest":
        return there[max(there)]
    step = int(which.replace("_", "").replace(",", "")) if which[:1].isdigit() else -1
    if step not in there:
        raise UsageError(
            f"{run} has no checkpoint '{which}': choose best, latest or one of "
            f"{', '.join(map(str, there))}."
        )
    return there[step]


def policies(run: Path) -> dict[int, Path]:
    """{step: checkpoint} of all policies that a run has kept, the oldest first."""
    folder = run / "checkpoints"
    found = checkpoint.policies(folder) if folder.is_dir() else {}
    if not found:
        raise UsageError(f"{run} has no checkpoint yet; `etude resume {run}` continues it.")
    return found


def policy_path(path: Path) -> Path:
    """The best, else the final, else the newest checkpoint of a run; other paths as they are.

    If a run was copied without its links, its newest checkpoint has the step of the best.
    """
    path = checkpoint.resolve_mark(path)
    folder = path / "checkpoints"
    if folder.is_dir():
        for name in ("best", "final", "latest"):
            if found := checkpoint.marked_checkpoint(folder, name):
                return found
        there, best = policies(path), checkpoint.best(folder)
        return there[max(there) if best is None or best.step not in there else best.step]
    names = ("policy", "manifest.json", "contract.json", "arrays.safetensors")
    if path.exists() and not any((path / name).exists() for name in names):
        raise UsageError(
            f"{path} is not a policy of Etude's: give a run's folder, one of its checkpoints, or a "
            "copy of a policy/ folder."
        )
    return path


class Start(NamedTuple):
    """The state that a new run starts from."""

    path: Path
    arrays: Tree
    contract: Tree
    training: Tree | None
    """State of the algorithm; None if only the policy was kept."""
    algorithm: str = ""
    """Kind of the algorithm."""


def start_path(path: Path) -> Path:
    """The newest checkpoint of a run that can be resumed; other paths as they are."""
    path = checkpoint.resolve_mark(path)
    if not (path / "checkpoints").is_dir():
        return path
    newest = checkpoint.newest_verified(path / "checkpoints", lambda text: None, repair=False)
    return policy_path(path) if newest is None else newest


def load_start(path: Path) -> Start:
    """The state that a new run starts from, of a run, checkpoint or policy folder."""
    chosen = start_path(path)
    if (chosen / "training").is_dir():
        try:
            arrays, contract, training = checkpoint.load_training(chosen)
        except checkpoint.DamagedCheckpoint as error:
            raise EtudeError(f"{error} Use another one.") from error
        state = training.get("algorithm", {})
        return Start(chosen, arrays, contract, state, _algorithm_kind(training))
    return Start(chosen, *policy_parts(chosen), None)


_PARTS = {"observations": "observation", "action": "action", "policy": "network"}
"""{part of a contract: what a policy has of it}."""
_FIELDS = {"hidden": "hidden layers", "kind": "kind", "shape": "shape"}
_MISSING = object()


def _apart(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value there, value here) of the leaves that differ."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            inner = f"{name}.{key}" if name else str(key)
            yield from _apart(there.get(key, _MISSING), here.get(key, _MISSING), inner)
    elif json.dumps(there, default=repr) != json.dumps(here, default=repr):
        yield name, there, here


def _shown(value: Any) -> str:
    """A value of a contract as short text."""
    if value is _MISSING:
        return "none"
    text = json.dumps(value, sort_keys=True)
    if isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value):
        text = f"({', '.join(map(str, value))})"
    return text if len(text) <= 80 else f"{text[:77]}..."


def checked_start(recipe: Recipe, contract: Tree) -> Start:
    """The state that `start_from` names; refuses a policy with another contract than `contract`.

    Training state of another algorithm is left out.
    """
    path = Path(recipe.start_from or "")
    start = load_start(path)
    known = start.contract | {"policy": _completed(start.contract.get("policy"), recipe.policy)}
    for part, title in _PARTS.items():
        found = list(_apart(known.get(part), contract.get(part)))
        if found:
            name, there, here = found[0]
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            words = " ".join(filter(None, [_FIELDS.get(name, name), _shown(there)]))
            raise UsageError(
                f"The policy in {path} has another {title} than this recipe: {words} of the run "
                f"against {_shown(here)} of the recipe{more}. Give this recipe the same, or start "
                "without --from."
            )
    same = start.algorithm in ("", recipe.algorithm.kind)
    return start if same else start._replace(training=None)


def _completed(fields: Any, config: Config) -> Any:
    """A policy's fields, with defaults for fields of later versions."""
    if not isinstance(fields, dict):
        return fields
    declared = type(config).model_fields
    defaults = {n: f.default for n, f in declared.items() if not f.is_required()}
    plain = {
        n: x.model_dump(mode="json") if isinstance(x, Config) else x for n, x in defaults.items()
    }
    return {**json.loads(json.dumps(plain)), **fields}


def _algorithm_kind(training: Tree) -> str:
    """The kind of the algorithm in a checkpoint's training state; "" without a recipe in it."""
    try:
        text = yaml.safe_load(str(training[RUN]["recipe"]))
        return str(text["algorithm"]["kind"])
    except (KeyError, TypeError, yaml.YAMLError):
        return ""


def matching(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The names that equal one of `wanted`, or match a pattern with * in it."""
    return [name for name in names if any(fnmatch(name, each) for each in wanted)]


def curves(
    rows: Iterable[Mapping[str, Any]], names: Sequence[str] = ()
) -> dict[str, tuple[list[int], list[float]]]:
    """{metric: (steps, values)} over the rows with the metric.

    names: names of metrics, or patterns with *; default all.
    """
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            if not names or matching([name], names):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step_of(row))
                values.append(value)
    return found


def recipe_with_sentence(recipe: Recipe, path: str | Path) -> Recipe:
    """The recipe with `env_with_sentence`."""
    if recipe.env is None:
        return recipe
    return recipe.replace(env=env_with_sentence(recipe.env, path))


def env_with_sentence(env: EnvConfig, path: str | Path) -> EnvConfig:
    """The environment with the vector that the policy at `path` knows for its sentence."""
    if not env.sentence:
        return env
    vectors = policy_parts(Path(path))[1].get("sentences", {})
    return env.replace(task_vector=vector_of(env.sentence, vectors, path))
