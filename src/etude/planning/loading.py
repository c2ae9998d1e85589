"""What runs leave behind, loaded: policies, curves, and what another run starts from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from etude.core.config import Config
from etude.core.errors import EtudeError, UsageError
from etude.core.metrics.declared import numbers, step_of
from etude.core.trees import Tree
from etude.planning.recipe import Recipe
from etude.runs import checkpoint
from etude.training.saving import RUN


def policy_parts(path: Path) -> tuple[Tree, Tree]:
    """(arrays, contract) of a run (its best, final or latest), a checkpoint or a policy folder."""
    chosen = policy_path(path)
    try:
        return checkpoint.load_policy_parts(chosen)
    except checkpoint.DamagedCheckpoint as error:
        fix = f"Remove {chosen} to use the next one" if chosen != path else "Use another one"
        raise EtudeError(f"{error} {fix}.") from error


def chosen_path(run: Path, which: str) -> Path:
    """Where the policy of a run is that "best", "latest" or a step names; of the best, the run."""
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
    """{step: checkpoint} of every policy that a run has kept, the oldest first."""
    folder = run / "checkpoints"
    found = checkpoint.policies(folder) if folder.is_dir() else {}
    if not found:
        raise UsageError(f"{run} has no checkpoint yet; `etude resume {run}` continues it.")
    return found


def policy_path(path: Path) -> Path:
    """The checkpoint whose policy stands for a run, or the path itself.

    Of a run, that is the best, the final or the newest one. Where it was copied without its links,
    the newest checkpoint says which was the best.
    """
    path = checkpoint.resolve_mark(path)
    folder = path / "checkpoints"
    if folder.is_dir():
        for name in ("best", "final", "latest"):
            if found := checkpoint.marked_checkpoint(folder, name):
                return found
        there, best = policies(path), checkpoint.best_step(folder)
        return there[max(there) if best not in there else best]
    names = ("policy", "manifest.json", "contract.json", "arrays.safetensors")
    if path.exists() and not any((path / name).exists() for name in names):
        raise UsageError(
            f"{path} is not a policy of Etude's: give a run's folder, one of its checkpoints, or a "
            "copy of a policy/ folder."
        )
    return path


class Start(NamedTuple):
    """What a new run begins with."""

    path: Path
    arrays: Tree
    contract: Tree
    training: Tree | None
    """The algorithm's state; None where only the policy was kept."""
    algorithm: str = ""
    """The kind of that algorithm."""


def start_path(path: Path) -> Path:
    """A run's newest checkpoint that can be resumed, or the path itself."""
    path = checkpoint.resolve_mark(path)
    if not (path / "checkpoints").is_dir():
        return path
    newest = checkpoint.newest_verified(path / "checkpoints", lambda text: None, repair=False)
    return policy_path(path) if newest is None else newest


def load_start(path: Path) -> Start:
    """What a new run takes from the run, checkpoint or policy folder at `path`."""
    chosen = start_path(path)
    if (chosen / "training").is_dir():
        try:
            arrays, contract, training = checkpoint.load_training(chosen)
        except checkpoint.DamagedCheckpoint as error:
            raise EtudeError(f"{error} Use another one.") from error
        state = training.get("algorithm", {})
        return Start(chosen, arrays, contract, state, _algorithm_kind(training))
    return Start(chosen, *policy_parts(chosen), None)


def checked_start(recipe: Recipe, contract: Tree) -> Start:
    """What `start_from` names, for a policy with a contract; refused where the two differ.

    Training state of another algorithm is left where it is.
    """
    path = Path(recipe.start_from or "")
    start = load_start(path)
    known = start.contract | {"policy": _completed(start.contract.get("policy"), recipe.policy)}
    for part in ("observations", "action", "policy"):
        there, here = (json.dumps(c.get(part), sort_keys=True) for c in (known, contract))
        if there != here:
            raise UsageError(
                f"The policy in {path} was made for other {part} than this recipe has: "
                f"{there[:300]} and not {here}. Give this recipe the same, or start without it."
            )
    same = start.algorithm in ("", recipe.algorithm.kind)
    return start if same else start._replace(training=None)


def _completed(fields: Any, config: Config) -> Any:
    """A policy's fields, with the defaults of those that came with a later version."""
    if not isinstance(fields, dict):
        return fields
    declared = type(config).model_fields
    defaults = {n: f.default for n, f in declared.items() if not f.is_required()}
    plain = {
        n: x.model_dump(mode="json") if isinstance(x, Config) else x for n, x in defaults.items()
    }
    return {**json.loads(json.dumps(plain)), **fields}


def _algorithm_kind(training: Tree) -> str:
    """The algorithm that a checkpoint's training state is of; "" in one without its recipe."""
    try:
        text = yaml.safe_load(str(training[RUN]["recipe"]))
        return str(text["algorithm"]["kind"])
    except (KeyError, TypeError, yaml.YAMLError):
        return ""


def curves(
    rows: Iterable[Mapping[str, Any]], names: Sequence[str] = ()
) -> dict[str, tuple[list[int], list[float]]]:
    """{metric: (steps, values)} of the rows that have it.

    names: the metrics wanted, where * stands for anything; all of them if there are none.
    """
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in numbers(row).items():
            if not names or any(fnmatch(name, wanted) for wanted in names):
                steps, values = found.setdefault(name, ([], []))
                steps.append(step_of(row))
                values.append(value)
    return found
