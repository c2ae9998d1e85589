"""The plan: every count, shape and byte of a run, worked out before it starts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from etude.building.build import (
    build,
    check_ranks,
    checked_start,
    make_curriculum,
    method_of,
    nest,
)
from etude.core.clock import Clock, Interval, Nest
from etude.core.contracts import EnvSpec
from etude.core.trees import Tree, num_bytes
from etude.metrics.board import Board
from etude.motion.curriculum import floor
from etude.planning import memory
from etude.planning.kinds import Sketch, World
from etude.planning.loading import Start
from etude.planning.recipe import Recipe, dump
from etude.runs import checkpoint
from etude.runs.folder import RunFolder
from etude.training.saving import RUN

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
    lines: list[str]
    """What an iteration does, in words."""
    shapes: dict[str, Any]
    shapes_title: str
    usage: str
    """How often a collected step is used, in words."""
    bytes: dict[str, int]
    data: dict[str, float]
    notes: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """Expected seconds by phase, where they were measured."""

    def to_json(self) -> Tree:
        return asdict(self)


def make_plan(
    recipe: Recipe,
    measure: bool = False,
    begun: bool = False,
    ranks: int = 1,
    notes: Sequence[str] = (),
) -> Plan:
    """Work out a recipe's plan; what does not add up is refused here.

    `begun`: the run exists already, so that the policy it started from is no longer needed.
    `ranks`: processes that share its shards. `notes`: more of them, to come first.
    """
    check_ranks(recipe, ranks)
    loops, method = nest(recipe), method_of(recipe)
    world = method.look(recipe)
    spec = world.spec
    starting = list(notes)
    if recipe.start_from is not None and not begun:
        starting.append(_start_note(checked_start(recipe, world.deployed.contract())))
    sketch = method.sketch(recipe, world)
    evaluations = loops.times_due(Interval.parse(recipe.evaluation.every), also_last=True)
    checkpoints = loops.times_due(Interval.parse(recipe.checkpoint.every), also_last=True)
    total = loops.total
    return Plan(
        recipe=recipe.name,
        seed=recipe.seed,
        exactness=asdict(world.exactness),
        levels={
            "epochs": total.epochs,
            "cycles_per_epoch": loops.cycles_per_epoch,
            "iterations_per_cycle": loops.iterations_per_cycle,
            "batches_per_iteration": loops.batches_per_iteration,
            "steps_per_iteration": loops.steps_per_iteration,
        },
        counts={
            "epochs": total.epochs,
            "cycles": total.cycles,
            "iterations": total.iterations,
            "updates": total.updates,
            "timesteps": total.timesteps,
            "environment_steps": total.timesteps // spec.agents,
            "log_rows": total.cycles,
            "evaluations": evaluations,
            "evaluation_episodes": evaluations * world.test_episodes,
            "checkpoints": checkpoints,
        },
        at_most=_at_most(recipe, sketch.at_most),
        geometry=_geometry(recipe, world) | sketch.geometry,
        lines=_collect_lines(recipe, spec, loops) + sketch.lines,
        shapes=sketch.shapes,
        shapes_title=sketch.title,
        usage=sketch.usage,
        bytes=_bytes(recipe, world, sketch),
        data=sketch.data,
        notes=[
            *starting,
            *_notes(recipe, spec),
            *rank_notes(recipe, ranks),
            *sketch.notes,
            *_length_notes(recipe, loops),
        ],
        seconds=_measure(recipe, loops, evaluations, checkpoints) if measure else {},
    )


def _start_note(start: Start) -> str:
    """What a run begins with that starts from another."""
    if start.training is None:
        return (
            f"Starts from the policy in {start.path} alone: its training state was not kept, so "
            "value functions and reward statistics begin anew."
        )
    return (
        f"Starts from {start.path}: its policy with its normaliser, its value function or critics, "
        "and the statistics or entropy coefficient these depend on. Optimizers, schedules, replay, "
        "discriminators and reward networks begin anew."
    )


def _at_most(recipe: Recipe, reason: str | None) -> dict[str, str]:
    if recipe.evaluation.stop_at_success is not None:
        return dict.fromkeys(COUNTS, "evaluation.stop_at_success may end the run early")
    if reason is None:
        return {}
    reasons = {"updates": reason}
    if Interval.parse(recipe.evaluation.every).unit == "updates":
        reasons |= {"evaluations": reason, "evaluation_episodes": reason}
    if Interval.parse(recipe.checkpoint.every).unit == "updates":
        reasons["checkpoints"] = reason
    return reasons


def _geometry(recipe: Recipe, world: World) -> dict[str, int]:
    rows = recipe.collector.rows if world.num_groups else 0
    return {
        "rows": rows,
        "agents": world.spec.agents,
        "environments": rows // world.spec.agents,
        "groups": world.num_groups,
        "group_rows": recipe.collector.group_rows if world.num_groups else 0,
        "shards": recipe.learner.shards,
        "learner_threads": recipe.learner.threads,
        "lag": recipe.collector.lag,
    }


def _collect_lines(recipe: Recipe, spec: EnvSpec, loops: Nest) -> list[str]:
    if not loops.steps_per_iteration:
        return []
    config, agents = recipe.collector, spec.agents
    rows, steps = f"{config.rows:,} environments", loops.steps_per_iteration // config.rows
    if agents > 1:
        rows = f"{config.rows // agents:,} environments x {agents} agents = {config.rows:,} rows"
    line = f"collect: {rows} ({config.num_groups:,} groups of {config.group_rows:,}) x {steps:,} "
    line += f"steps = {loops.steps_per_iteration:,}"
    if config.kind == "ray":
        actors = f"{config.actors:,}" if config.actors else "one per machine,"
        line += f"; on Ray actors: {actors} of {config.threads:,} threads, {config.address} cluster"
    return [line]


def _bytes(recipe: Recipe, world: World, sketch: Sketch) -> dict[str, int]:
    """Bytes in memory and on disk; those of the checkpoint are at the run's end."""
    parameters = sum(p.nbytes for p in world.deployed.parameters())
    arrays = dict(world.deployed.state_dict())
    normaliser = sum(b.nbytes for b in arrays.values()) - parameters
    training = _training(recipe, world) | {"algorithm": sketch.training}
    saved = checkpoint.checkpoint_bytes((arrays, world.deployed.contract()), training)
    exact = {**sketch.memory, "normaliser": normaliser}
    return {
        **exact,
        **sketch.estimates,
        "peak": memory.peak(sketch.estimates, sum(exact.values())),
        "snapshots": num_bytes(world.snapshot) * world.num_groups,
        **sketch.disk,
        "checkpoint": saved,
        "checkpoints_kept": saved * recipe.checkpoint.keep_last,
    }


def _training(recipe: Recipe, world: World) -> Tree:
    """A tree of the shape of a checkpoint's `training/` at the run's end, but for the algorithm."""
    groups = {f"{g:06d}": world.snapshot for g in range(world.num_groups)}
    collector: Tree = {"groups": groups} if groups else {}
    loops, curriculum = nest(recipe), make_curriculum(recipe, world.spec)
    clock, total = Clock(loops), loops.total
    if recipe.collector.lag:
        arrays = world.deployed.state_dict()
        collector["broadcast"] = {
            "version": total.iterations - 1,
            "policy": {name: array.expand(array.shape) for name, array in arrays.items()},
            "curriculum": curriculum.broadcast(),
        }
    clock.before, clock.now, clock.episodes = loops.at(total.iterations - 1), total, total.timesteps
    return {
        "clock": clock.state_dict(),
        "collector": collector,
        "curriculum": curriculum.state_dict(),
        "evaluator": {"best": [1 / 3, 1 / 3], "num_done": total.epochs, "num_episodes": 0},
        "board": Board(world.spec.statistics).state_dict(),
        "metrics": {
            "bytes": total.cycles * 1000,
            "sha256": "0" * 64,
            "rows": [1 << 31] * total.cycles,
        },
        "saver": {"best": total.timesteps, "num_saved": total.epochs},
        RUN: {"recipe": dump(recipe), "manifest": "0" * 1200},
    }


def _notes(recipe: Recipe, spec: EnvSpec) -> list[str]:
    notes = []
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
    if recipe.curriculum.enabled:
        ease = recipe.curriculum
        notes.append(
            f"Training widens from level {ease.start:g} by {ease.step:g} whenever "
            f"{ease.raise_at:.0%} of {ease.episodes} episodes succeed; evaluation never is eased."
        )
    if recipe.motions.enabled:
        least = floor(len(spec.motions), recipe.motions.mix)
        notes.append(
            f"{len(spec.motions)} motions are practised by how often they fail in evaluation, each "
            f"with a probability of at least {least:.2%}. At every epoch's end it is worked out "
            "again, and all rows then begin new episodes."
        )
    if recipe.learner.shards > 1:
        notes.append(
            f"{recipe.learner.shards} learner shards are a geometry of their own: the result is "
            "exact, but not that of another number of shards."
        )
    return notes


def rank_notes(recipe: Recipe, ranks: int) -> list[str]:
    """Who has which shards, where there are several ranks."""
    if ranks == 1:
        return []
    shards, fast = recipe.learner.shards, recipe.learner.reduce == "fast"
    own = shards // ranks
    which = [f"{r * own}" if own == 1 else f"{r * own}-{(r + 1) * own - 1}" for r in range(ranks)]
    listed = [f"{shard} on rank {r}" for r, shard in enumerate(which)]
    if ranks > 8:
        listed[2:-1] = ["..."]
    return [
        f"{ranks:,} ranks share {shards:,} learner shards: {', '.join(listed)}. Rank 0 writes and "
        f"evaluates. Another number of ranks gives {'other' if fast else 'the same'} bits."
    ]


def _length_notes(recipe: Recipe, loops: Nest) -> list[str]:
    notes, total, asked = [], loops.total, recipe.clock.total_timesteps
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
    notes.append("The best policy of the evaluations is kept as well, without training state.")
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
        loop.clock.skip_idle()
        first = loop.clock.now.iterations
        for i in range(rounds + 1):
            start = time.perf_counter()
            if i > 1 and start - begin > _LONGEST_MEASUREMENT:
                break
            fragments = loop.collector.collect(loop.algorithm.broadcast(loop.clock), first + i)
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
    learning = max(loops.iterations - loops.idle_iterations, 0)
    counts = {"collect": loops.iterations, "train": learning}
    seconds = {k: float(np.median(v[1:])) * counts[k] for k, v in timings.items()}
    seconds |= {"test": test * evaluations, "save": save * checkpoints}
    return {**seconds, "total": sum(seconds.values())}
