"""The one place where objects are put together from a recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.algorithms.ppo import PPO
from etude.app.recipes import Recipe
from etude.core.clock import Clock, Interval, Nest
from etude.core.contracts import BatchEnv, Collector, EnvSpec, LogWriter, Stateful
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.envs.catalog import make_env
from etude.experience.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.metrics.board import Board
from etude.models.policies import ActorCritic, make_policy
from etude.rollout.local import LocalCollector, Workers
from etude.rollout.overlap import OverlappedCollector
from etude.runs import checkpoint
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import MetricsLog
from etude.training.callbacks import Callback, StopAtSuccess
from etude.training.curriculum import Curriculum, NoCurriculum, SuccessCurriculum
from etude.training.evaluation import Evaluator
from etude.training.loop import Loop
from etude.training.saving import Saver
from etude.training.stopwatch import Stopwatch


def geometry(recipe: Recipe) -> SegmentGeometry:
    """How the buffer divides; refuses what does not, and what would not learn."""
    if recipe.policy.kind != "mlp" and recipe.algorithm.horizon == 1:
        raise UsageError(
            f"A policy with memory ({recipe.policy.kind}) learns along its segments, and "
            "algorithm.horizon 1 makes them one step long: give it a longer one, such as "
            f"--algorithm.horizon {recipe.algorithm.rollout_steps}, a whole rollout."
        )
    if recipe.collector.lag and recipe.algorithm.advantages != "vtrace":
        raise UsageError(
            "With collector.lag 1 experience comes from older weights, which algorithm.advantages "
            f"{recipe.algorithm.advantages} takes for today's: add --algorithm.advantages vtrace."
        )
    return SegmentGeometry(
        rows=recipe.collector.rows,
        steps=recipe.algorithm.rollout_steps,
        horizon=recipe.algorithm.horizon,
        minibatch=recipe.algorithm.minibatch_size,
        shards=recipe.learner.shards,
        group_rows=recipe.collector.group_rows,
    )


def nest(recipe: Recipe) -> Nest:
    """The nest of loops."""
    cut = geometry(recipe)
    batches = cut.num_minibatches * recipe.algorithm.update_epochs
    return Nest.of(recipe.clock, cut.buffer_steps, batches)


def device(recipe: Recipe) -> torch.device:
    """Where the learner computes."""
    choice, there = recipe.learner.device, torch.cuda.is_available()
    if choice == "cuda" and not there:
        raise UsageError("learner.device is cuda, but no GPU was found: use auto or cpu.")
    return torch.device("cuda" if there and choice != "cpu" else "cpu")


@dataclass
class Parts:
    """A built run: the loop and what must be closed after it."""

    loop: Loop
    algorithm: PPO
    metrics: MetricsLog
    close: Callable[[], None]


class RowsLog:
    """Log rows into metrics.jsonl."""

    def __init__(self, metrics: MetricsLog) -> None:
        self._metrics = metrics

    def begin(self, history: list[dict[str, Any]]) -> None:
        """The file has been cut back already, with the rest of the run's state."""

    def write(self, row: dict[str, Any]) -> None:
        self._metrics.append(row)

    def close(self) -> None:
        self._metrics.close()


def build(
    recipe: Recipe,
    folder: RunFolder,
    logs: Sequence[LogWriter] = (),
    callbacks: Sequence[Callback] = (),
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Parts:
    """All parts of a run, connected, at the state of a fresh start."""
    torch.set_num_threads(recipe.learner.threads)
    key, cut = Key(recipe.seed), geometry(recipe)
    workers = Workers(recipe.collector.threads)
    envs = [
        make_env(recipe.env, recipe.collector.group_rows, recipe.collector.engine_threads)
        for _ in range(cut.num_groups)
    ]
    spec = envs[0].spec

    def copy_of_policy() -> ActorCritic:
        return make_policy(recipe.policy, spec, None)

    clock, board, metrics = Clock(nest(recipe)), Board(spec.statistics), folder.metrics_log()
    contents = buffer_spec(recipe, spec, copy_of_policy())
    buffers = [SegmentBuffer(contents) for _ in range(1 + recipe.collector.lag)]
    algorithm = _learner(recipe, spec, buffers, key)
    views = [[b.part(cut.group_part(g)) for g in range(cut.num_groups)] for b in buffers]
    local = LocalCollector(envs, copy_of_policy(), key.child("collect"), workers, views)
    collector = _ahead(local, recipe, clock)
    evaluator = make_evaluator(recipe, key, workers, copy_of_policy())
    curriculum = make_curriculum(recipe, spec)
    state: dict[str, Stateful] = {
        "clock": clock,
        "collector": collector,
        "algorithm": algorithm,
        "curriculum": curriculum,
        "evaluator": evaluator,
        "board": board,
        "metrics": metrics,
    }
    if recipe.evaluation.stop_at_success is not None:
        callbacks = [*callbacks, StopAtSuccess(recipe.evaluation.stop_at_success)]
    state |= _with_memory(callbacks)
    loop = Loop(
        key=key,
        clock=clock,
        collector=collector,
        algorithm=algorithm,
        evaluator=evaluator,
        evaluate_every=Interval.parse(recipe.evaluation.every),
        curriculum=curriculum,
        board=board,
        logs=[RowsLog(metrics), *logs],
        saver=Saver(folder, recipe.checkpoint, algorithm, state),
        callbacks=callbacks,
        stopwatch=Stopwatch(on_phase),
    )

    closing = ExitStack()  # Closes the rest where one of them fails.
    for close in (evaluator.close, collector.close, *(log.close for log in reversed(loop.logs))):
        closing.callback(close)
    return Parts(loop, algorithm, metrics, closing.close)


def _ahead(collector: Collector, recipe: Recipe, clock: Clock) -> Collector:
    """The collector as far ahead of the learner as the recipe wants it."""
    if recipe.collector.lag == 0:
        return collector
    return OverlappedCollector(collector, lambda iteration: iteration < clock.nest.iterations)


def _with_memory(callbacks: Sequence[Callback]) -> dict[str, Stateful]:
    """The callbacks that are part of a checkpoint, by name."""
    return {
        f"callback-{i}-{type(callback).__name__}": callback
        for i, callback in enumerate(callbacks)
        if isinstance(callback, Stateful)
    }


def make_curriculum(recipe: Recipe, spec: EnvSpec) -> Curriculum:
    """The curriculum a recipe asks for."""
    if not recipe.curriculum.enabled:
        return NoCurriculum()
    if "is_success" not in spec.statistics:
        raise UsageError("This environment does not report success, which a curriculum goes by.")
    return SuccessCurriculum(recipe.curriculum)


def buffer_spec(recipe: Recipe, spec: EnvSpec, policy: ActorCritic) -> BufferSpec:
    """What an iteration's buffer holds."""
    cut = geometry(recipe)
    return BufferSpec(spec, policy.state_specs, cut.rows, cut.steps, cut.horizon)


def _learner(recipe: Recipe, spec: EnvSpec, buffers: Sequence[SegmentBuffer], key: Key) -> PPO:
    """The algorithm with a new policy."""
    policy = make_policy(recipe.policy, spec, key.child("policy"))
    return PPO(recipe.algorithm, policy, geometry(recipe), buffers, device(recipe))


def start_policy(recipe: Recipe, algorithm: PPO) -> None:
    """Begin a run with the policy of another, where the recipe says so."""
    if recipe.start_from is not None:
        algorithm.load_policy(start_arrays(Path(recipe.start_from), algorithm.policy))
        algorithm.initial.copy_(algorithm.flat.data)


def start_arrays(path: Path, policy: ActorCritic) -> Tree:
    """Weights and normaliser of another run for a policy of the same make."""
    arrays, contract = policy_parts(path)
    own = policy.contract()
    for part in ("observations", "action", "policy"):
        there, here = (json.dumps(c.get(part), sort_keys=True) for c in (contract, own))
        if there != here:
            raise UsageError(
                f"The policy in {path} was made for other {part} than this recipe has: {there} "
                f"and not {here}. Give this recipe the same, or start without it."
            )
    return arrays


def policy_parts(path: Path) -> tuple[Tree, Tree]:
    """(arrays, contract) of a run (its best, final or latest), a checkpoint or a policy folder."""
    chosen = policy_path(path)
    try:
        return checkpoint.load_policy_parts(chosen)
    except checkpoint.DamagedCheckpoint as error:
        fix = f"Remove {chosen} to use the next one" if chosen != path else "Use another one"
        raise EtudeError(f"{error} {fix}.") from error


def policy_path(path: Path) -> Path:
    """The checkpoint whose policy stands for a run, or the path itself."""
    if (path / "checkpoints").is_dir():
        for name in ("best", "final", "latest"):
            if (path / "checkpoints" / name).exists():
                return path / "checkpoints" / name
        raise UsageError(f"{path} has no checkpoint yet; `etude resume {path}` continues it.")
    own = ("policy", "manifest.json", "contract.json", "arrays.safetensors")
    if path.exists() and not any((path / name).exists() for name in own):
        raise UsageError(
            f"{path} is not a policy of Etude's: give a run's folder, one of its checkpoints, or a "
            "copy of a policy/ folder."
        )
    return path


def make_evaluator(recipe: Recipe, key: Key, workers: Workers, policy: ActorCritic) -> Evaluator:
    """An evaluator with environments of its own."""
    config = recipe.evaluation
    envs: list[BatchEnv] = [
        make_env(recipe.env, config.group_rows, recipe.collector.engine_threads)
        for _ in range(config.rows // config.group_rows)
    ]
    return Evaluator(envs, policy, config.episodes, key.child("evaluate"), workers)
