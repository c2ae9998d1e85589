"""The plan: every count, shape and byte of a run, worked out before it starts."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.app import memory
from etude.app.build import (
    buffer_spec,
    build,
    device,
    geometry,
    make_curriculum,
    nest,
    start_arrays,
)
from etude.app.recipes import Recipe, dump
from etude.core.clock import Clock, Interval, Nest
from etude.core.contracts import BatchEnv, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree, num_bytes
from etude.envs.catalog import env_exactness, make_env
from etude.experience.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.metrics.board import Board
from etude.models.adam import Adam
from etude.models.normalise import RewardScaler
from etude.models.policies import ActorCritic, make_policy
from etude.rollout.group import Group
from etude.runs import checkpoint
from etude.runs.folder import RunFolder

COUNTS = (
    "epochs",
    "cycles",
    "iterations",
    "updates",
    "timesteps",
    "environment_steps",
    "log_rows",
    "evaluations",
    "evaluation_episodes",
    "checkpoints",
)
"""What a plan counts, and a finished run's summary too."""
_LONGEST_MEASUREMENT = 60.0
"""Seconds after which no further iteration is timed, once there are two."""


@dataclass(frozen=True)
class Plan:
    """What a run is going to do. `counts` is what it will have done at its end."""

    recipe: str
    seed: int
    exactness: dict[str, Any]
    levels: dict[str, int]
    """How many of each level are in the one above it."""
    counts: dict[str, int]
    at_most: dict[str, str]
    """Counts that are maxima, and why."""
    geometry: dict[str, int]
    shapes: dict[str, Any]
    bytes: dict[str, int]
    data: dict[str, float]
    notes: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """Expected seconds by phase, where they were measured."""

    def to_json(self) -> Tree:
        return asdict(self)


def make_plan(recipe: Recipe, measure: bool = False, begun: bool = False) -> Plan:
    """Work out a recipe's plan; what does not add up is refused here.

    `begun`: the run exists already, so that the policy it started from is no longer needed.
    """
    cut, loops = geometry(recipe), nest(recipe)
    env = make_env(recipe.env, recipe.collector.group_rows, 1)
    spec, snapshot = env.spec, _snapshot(env, recipe)
    env.close()
    if spec.max_episode_steps is None:
        raise UsageError(
            "This environment has no limit on an episode's steps, so an evaluation might never "
            "end: give it one, for Gymnasium with --env.kwargs max_episode_steps 1000."
        )
    if recipe.start_from is not None and not begun:
        start_arrays(Path(recipe.start_from), make_policy(recipe.policy, spec, None))
    exactness = _exactness(recipe)
    evaluations = loops.times_due(Interval.parse(recipe.evaluation.every), also_last=True)
    total = loops.total
    counts = {
        "epochs": total.epochs,
        "cycles": total.cycles,
        "iterations": total.iterations,
        "updates": total.updates,
        "timesteps": total.timesteps,
        "environment_steps": total.timesteps // spec.agents,
        "log_rows": total.cycles,
        "evaluations": evaluations,
        "evaluation_episodes": evaluations * recipe.evaluation.episodes,
        "checkpoints": loops.times_due(Interval.parse(recipe.checkpoint.every), also_last=True),
    }
    return Plan(
        recipe=recipe.name,
        seed=recipe.seed,
        exactness=asdict(exactness),
        levels={
            "epochs": total.epochs,
            "cycles_per_epoch": loops.cycles_per_epoch,
            "iterations_per_cycle": loops.iterations_per_cycle,
            "batches_per_iteration": loops.batches_per_iteration,
            "steps_per_iteration": loops.steps_per_iteration,
        },
        counts=counts,
        at_most=_at_most(recipe),
        geometry=_geometry(cut, recipe, spec),
        shapes=_shapes(recipe, cut, spec),
        bytes=_bytes(recipe, cut, spec, snapshot),
        data={
            "passes_per_iteration": recipe.algorithm.update_epochs,
            "gradient_samples_per_step": float(recipe.algorithm.update_epochs),
            "coverage": _coverage(recipe, cut),
            "gradient_samples": float(total.updates * recipe.algorithm.minibatch_size),
        },
        notes=_notes(recipe, loops, spec),
        seconds=_measure(recipe, loops, evaluations, counts["checkpoints"]) if measure else {},
    )


def _snapshot(env: BatchEnv, recipe: Recipe) -> Tree:
    """One group's, as it is within an episode: foreign environments know little at its start."""
    policy, group, key = make_policy(recipe.policy, env.spec, None), Group(env), Key(recipe.seed)
    begun, two = (
        group.begin(policy, key),
        BufferSpec(env.spec, policy.state_specs, env.num_rows, 2, 1),
    )
    everyone = slice(0, env.num_rows)
    return group.rollout(policy, begun, key, 0, SegmentBuffer(two).part(everyone))[1]


def _exactness(recipe: Recipe) -> Exactness:
    if device(recipe).type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ between runs")
    return env_exactness(recipe.env)


def _at_most(recipe: Recipe) -> dict[str, str]:
    if recipe.evaluation.stop_at_success is not None:
        return dict.fromkeys(COUNTS, "evaluation.stop_at_success may end the run early")
    if recipe.algorithm.target_kl is None:
        return {}
    reason = "target_kl may end an update early"
    reasons = {"updates": reason}
    if Interval.parse(recipe.evaluation.every).unit == "updates":
        reasons |= {"evaluations": reason, "evaluation_episodes": reason}
    if Interval.parse(recipe.checkpoint.every).unit == "updates":
        reasons["checkpoints"] = reason
    return reasons


def _geometry(cut: SegmentGeometry, recipe: Recipe, spec: EnvSpec) -> dict[str, int]:
    return {
        "rows": cut.rows,
        "agents": spec.agents,
        "environments": cut.rows // spec.agents,
        "groups": cut.num_groups,
        "group_rows": cut.group_rows,
        "rollout_steps": cut.steps,
        "horizon": cut.horizon,
        "buffer_steps": cut.buffer_steps,
        "segments": cut.num_segments,
        "minibatch_steps": cut.minibatch,
        "segments_per_minibatch": cut.segments_per_minibatch,
        "minibatches": cut.num_minibatches,
        "update_epochs": recipe.algorithm.update_epochs,
        "shards": cut.shards,
        "learner_threads": recipe.learner.threads,
        "lag": recipe.collector.lag,
    }


def _coverage(recipe: Recipe, cut: SegmentGeometry) -> float:
    """The share of segments an iteration trains on; for prioritised draws, at the most.

    Equal priorities cover most: every minibatch then leaves out a segment with 1 - 1/minibatches.
    """
    if recipe.algorithm.sampling == "uniform":
        return 1.0
    draws = cut.num_minibatches * recipe.algorithm.update_epochs
    return 1.0 - (1.0 - 1.0 / cut.num_minibatches) ** draws


def _shapes(recipe: Recipe, cut: SegmentGeometry, spec: EnvSpec) -> dict[str, Any]:
    """Buffer and minibatch shapes of every stored array."""
    arrays = {f"obs/{name}": (o, [cut.horizon]) for name, o in spec.observations.items()}
    arrays["actions"] = (spec.action.array, [cut.horizon])
    states = make_policy(recipe.policy, spec, None).state_specs
    arrays |= {f"state/{name}": (state, []) for name, state in states.items()}
    return {
        name: {
            "dtype": array.dtype,
            "buffer": [cut.num_segments, *steps, *array.shape],
            "minibatch": [cut.segments_per_minibatch, *steps, *array.shape],
        }
        for name, (array, steps) in arrays.items()
    }


def _bytes(recipe: Recipe, cut: SegmentGeometry, spec: EnvSpec, snapshot: Tree) -> dict[str, int]:
    """Tensor bytes, and the bytes of the checkpoint at the run's end."""
    with torch.device("meta"):
        policy = make_policy(recipe.policy, spec, None)
    model = sum(p.nbytes for p in policy.parameters())
    normaliser = sum(b.nbytes for b in policy.state_dict().values()) - model
    policy_parts = dict(policy.state_dict()), policy.contract()
    training = _training_template(recipe, cut, spec, policy, snapshot)
    saved = checkpoint.checkpoint_bytes(policy_parts, training)
    exact = {
        "buffer": buffer_spec(recipe, spec, policy).num_bytes * (1 + recipe.collector.lag),
        "model": model,
        "normaliser": normaliser,
        "gradient": model,
        "optimizer": num_bytes(training["algorithm"]["optimizer"]),
    }
    estimated = memory.memory(recipe, cut, spec, policy, snapshot)
    return {
        **exact,
        **estimated,
        "peak": memory.peak(estimated, sum(exact.values())),
        "snapshots": num_bytes(snapshot) * cut.num_groups,
        "checkpoint": saved,
        "checkpoints_kept": saved * recipe.checkpoint.keep_last,
    }


def _training_template(
    recipe: Recipe, cut: SegmentGeometry, spec: EnvSpec, policy: ActorCritic, snapshot: Tree
) -> Tree:
    """A tree of the shape a checkpoint's `training/` has at the end of the run."""
    # One number seen as a whole vector: shapes without memory, whatever the model's size.
    one, size = torch.zeros(1), sum(p.numel() for p in policy.parameters())
    optimizer = Adam(one, one, recipe.algorithm.adam_epsilon).state_dict()
    algorithm = {
        "optimizer": {k: v.expand(size) if v.ndim else v for k, v in optimizer.items()},
        "initial": one.expand(size),
        "rewards": RewardScaler(cut.rows, recipe.algorithm.gamma).state_dict(),
    }
    collector: Tree = {"groups": {f"{g:06d}": snapshot for g in range(cut.num_groups)}}
    loops = nest(recipe)
    clock, total = Clock(loops), loops.total
    if recipe.collector.lag:
        sent = {name: tensor.expand(tensor.shape) for name, tensor in policy.state_dict().items()}
        curriculum = make_curriculum(recipe, spec).broadcast()
        version = total.iterations - 1
        collector["broadcast"] = {"version": version, "policy": sent, "curriculum": curriculum}
    clock.before, clock.now, clock.episodes = loops.at(total.iterations - 1), total, total.timesteps
    return {
        "clock": clock.state_dict(),
        "collector": collector,
        "algorithm": algorithm,
        "curriculum": make_curriculum(recipe, spec).state_dict(),
        "evaluator": {"best": [1 / 3, 1 / 3], "num_done": total.epochs, "num_episodes": 0},
        "board": Board(spec.statistics).state_dict(),
        "metrics": {"bytes": total.cycles * 1000, "sha256": "0" * 64},
        "saver": {"best": total.timesteps, "num_saved": total.epochs},
    }


def _notes(recipe: Recipe, loops: Nest, spec: EnvSpec) -> list[str]:
    notes, total, asked = [], loops.total, recipe.clock.total_timesteps
    if spec.agents > 1:
        notes.append(
            f"Each of the {spec.agents} agents of an environment is a row of its own: steps, "
            "buffer and episodes count agents, and are not multiplied again."
        )
    if recipe.collector.lag:
        notes.append(
            "Each iteration is collected while the one before it trains, with the weights that one "
            "began with. The first one waits for its own collection, and then the second is "
            "collected with the same weights; in the last one nothing is collected."
        )
    if recipe.algorithm.sampling == "prioritised":
        cover = _coverage(recipe, geometry(recipe))
        notes.append(
            f"Prioritised draws leave segments out: an iteration trains on {cover:.0%} of them if "
            "all are alike and on fewer otherwise (train/coverage)."
        )
    if asked is not None and asked != total.timesteps:
        notes.append(
            f"{asked:,} steps were asked for; {total.iterations:,} whole iterations are "
            f"{total.timesteps:,} steps."
        )
    if total.iterations % loops.iterations_per_cycle:
        short = total.iterations % loops.iterations_per_cycle
        notes.append(
            f"The last cycle is short: {short} of {loops.iterations_per_cycle} iterations."
        )
    if total.cycles % loops.cycles_per_epoch:
        short = total.cycles % loops.cycles_per_epoch
        notes.append(f"The last epoch is short: {short} of {loops.cycles_per_epoch} cycles.")
    if recipe.checkpoint.seconds is not None:
        notes.append(
            f"Checkpoints also every {recipe.checkpoint.seconds:g} s of wall clock, not counted."
        )
    if recipe.curriculum.enabled:
        ease = recipe.curriculum
        notes.append(
            f"Training widens from level {ease.start:g} by {ease.step:g} whenever "
            f"{ease.raise_at:.0%} of {ease.episodes} episodes succeed; evaluation never is eased."
        )
    notes.append("The best policy of the evaluations is kept as well, without training state.")
    if recipe.learner.shards > 1:
        notes.append(
            f"{recipe.learner.shards} learner shards are a geometry of their own: the result is "
            "exact, but not that of another number of shards."
        )
    return notes


def _measure(
    recipe: Recipe, loops: Nest, evaluations: int, checkpoints: int, rounds: int = 3
) -> dict[str, float]:
    """Expected seconds of the whole run, from a few real iterations in a folder thrown away.

    Evaluation is timed on an untrained policy, whose episodes last as long as they can.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder.create(Path(scratch) / "run", dump(recipe), "", {}, {})
        parts = build(recipe, folder)
        loop = parts.loop
        timings: dict[str, list[float]] = {"collect": [], "train": []}
        begin = time.perf_counter()
        for i in range(rounds + 1):
            start = time.perf_counter()
            if i > 1 and start - begin > _LONGEST_MEASUREMENT:
                break
            fragments = loop.collector.collect(loop.algorithm.broadcast(loop.clock), i)
            middle = time.perf_counter()
            loop.algorithm.ingest(fragments, loop.clock)
            for _ in loop.algorithm.batches(loop.clock, loop.key.child("measure", i)):
                pass
            loop.algorithm.end_iteration()
            loop.clock.advance(0, 0)
            timings["collect"].append(middle - start)
            timings["train"].append(time.perf_counter() - middle)
        start = time.perf_counter()
        loop.evaluator.test(loop.algorithm.broadcast(loop.clock))
        test = time.perf_counter() - start
        start = time.perf_counter()
        loop.saver.save_if_due(loop.clock, urgent=True)
        save = time.perf_counter() - start
        parts.close()
        folder.close()
    # The first round warms caches and is not typical.
    seconds = {k: float(np.median(v[1:])) * loops.iterations for k, v in timings.items()}
    seconds |= {"test": test * evaluations, "save": save * checkpoints}
    return {**seconds, "total": sum(seconds.values())}
