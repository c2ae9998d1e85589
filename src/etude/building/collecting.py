"""What methods share that learn from environments: how these are looked at and put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from etude.core.clock import Clock
from etude.core.contracts import Algorithm, BatchEnv, Collector, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.experience.segments import BufferSpec, SegmentBuffer
from etude.models.policies import BasePolicy, make_policy
from etude.planning.kinds import Assembly, World, device
from etude.planning.recipe import Recipe
from etude.rollout.elastic import ElasticCollector
from etude.rollout.group import Group
from etude.rollout.host import Blueprint, Host
from etude.rollout.local import LocalCollector, Workers
from etude.rollout.overlap import OverlappedCollector
from etude.rollout.schedule import Patience, Schedule
from etude.training.evaluation import Evaluator
from etude.training.sharing import FirstTests, SharedCollector


class Learning(NamedTuple):
    """A new algorithm, and the buffers that collectors fill for it in turn."""

    algorithm: Algorithm
    buffers: Sequence[SegmentBuffer]


def check_policy(recipe: Recipe, kinds: tuple[str, ...]) -> None:
    """Refuse a policy that the algorithm cannot train."""
    if recipe.policy.kind not in kinds:
        raise UsageError(
            f"{recipe.algorithm.kind} does not train a policy of the kind '{recipe.policy.kind}': "
            f"use --policy.kind {' or '.join(kinds)}."
        )


def look(recipe: Recipe) -> World:
    """One group of the recipe's environments."""
    if recipe.collector.kind == "ray":
        from etude.rollout.ray import check

        check(recipe.collector.address)
    env = recipe.task.make(recipe.collector.group_rows)
    spec, snapshot = env.spec, _snapshot(env, recipe)
    env.close()
    if spec.max_episode_steps is None:
        raise UsageError(
            "This environment has no limit on an episode's steps, so an evaluation might never "
            "end: give it one, for Gymnasium with --env.kwargs max_episode_steps 1000."
        )
    _check_motions(recipe, len(spec.motions))
    _check_discount(recipe)
    with torch.device("meta"):
        policy = make_policy(recipe.policy, spec, None)
    groups, tests = recipe.collector.num_groups, recipe.evaluation.episodes
    return World(spec, exactness(recipe), policy, snapshot, groups, tests)


def _check_motions(recipe: Recipe, num: int) -> None:
    """Refuse evaluations in which some motions would be played more often than others."""
    config = recipe.evaluation
    if num and config.group_rows % num:
        group = num * max(1, round(config.group_rows / num))
        rows = group * max(1, round(config.rows / group))
        episodes = rows * (config.episodes // config.rows)
        raise UsageError(
            f"Evaluation plays each of the {num} motions equally often, and evaluation.group_rows "
            f"{config.group_rows} is no multiple of that: use --evaluation.group-rows {group} "
            f"--evaluation.rows {rows} --evaluation.episodes {episodes}."
        )
    if num and config.final_episodes % num:
        near = num * max(1, round(config.final_episodes / num))
        raise UsageError(
            f"The {num} motions are each played equally often, and evaluation.final_episodes "
            f"{config.final_episodes} is no multiple of that: use --evaluation.final-episodes "
            f"{near}, or 0 for none."
        )


def _check_discount(recipe: Recipe) -> None:
    """Refuse gains of a potential that are discounted unlike what is learned from them."""
    shaping, gamma = recipe.task.shaping_discount(), getattr(recipe.algorithm, "gamma", None)
    if shaping is not None and gamma is not None and shaping != gamma:
        raise UsageError(
            f"This environment rewards gains of a potential with env.discount {shaping:g}, and "
            f"algorithm.gamma is {gamma:g}: where they differ, lingering earns or costs. Use "
            f"--env.discount {gamma:g}."
        )


def exactness(recipe: Recipe) -> Exactness:
    """Whether a run of the recipe resumes bit for bit."""
    if device(recipe).type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ between runs")
    if recipe.learner.reduce == "fast":
        return Exactness(False, "learner.reduce fast adds gradients as the number of ranks has it")
    return recipe.task.exactness()


def _snapshot(env: BatchEnv, recipe: Recipe) -> Tree:
    """One group's, as it is within an episode: foreign environments know little at its start."""
    policy, group, key = make_policy(recipe.policy, env.spec, None), Group(env), Key(recipe.seed)
    two = SegmentBuffer(BufferSpec(env.spec, policy.state_specs, env.num_rows, 2, 1))
    begun = group.begin(policy, key)
    return group.rollout(policy, begun, key, 0, two.part(slice(0, env.num_rows)))[1]


def assemble(
    recipe: Recipe, learning: Learning, key: Key, clock: Clock, spec: EnvSpec, ranks: Ranks
) -> Assembly:
    """Environments, collector and evaluator around an algorithm."""
    workers, own = Workers(recipe.collector.threads), ranks.part(recipe.collector.num_groups)
    collector = make_collector(recipe, learning.buffers, key.child("collect"), workers, spec, own)
    if recipe.collector.lag:
        collector = OverlappedCollector(collector, lambda i: i < clock.nest.iterations)
    evaluator = None
    if ranks.is_first:
        testing = make_policy(recipe.policy, spec, None)
        evaluator = make_evaluator(recipe, key, workers, testing)
    shared = SharedCollector(ranks, collector), FirstTests(ranks, evaluator)
    return Assembly(learning.algorithm, *shared, spec)


def make_collector(
    recipe: Recipe,
    buffers: Sequence[SegmentBuffer],
    key: Key,
    workers: Workers,
    spec: EnvSpec,
    own: range,
) -> Collector:
    """The collector a recipe asks for, of this rank's own groups; it closes the workers."""
    groups = recipe.collector
    views = [[b.part(groups.part(g)) for g in own] for b in buffers]
    new_env = partial(recipe.task.make, groups.group_rows, groups.engine_threads)
    new_policy = partial(make_policy, recipe.policy, spec, None)
    if groups.kind == "local":
        envs = [new_env() for _ in own]
        return LocalCollector(envs, new_policy(), key, workers, views, own.start)
    # Where nothing is sent anywhere, Ray is not loaded.
    from etude.rollout.ray import RayFleet

    one = replace(buffers[0].spec, rows=groups.group_rows)
    blueprint = Blueprint(new_env, new_policy, one, key, groups.threads)
    exact = exactness(recipe).exact
    # Fragments of an iteration on their way, and those before them not yet let go of.
    room = 3 * buffers[0].spec.num_bytes
    fleet = RayFleet(blueprint, groups.actors, groups.address, room, exact)
    probe = Host(blueprint, workers).probe if exact else None
    schedule = Schedule(groups.num_groups, groups.threads, Patience(groups.deadline))
    return ElasticCollector(fleet, schedule, views, probe, groups.allow_inexact, workers.close)


def env_spec(recipe: Recipe) -> EnvSpec:
    """What the recipe's environment is."""
    env = recipe.task.make(recipe.collector.group_rows)
    env.close()
    return env.spec


def num_motions(recipe: Recipe) -> int:
    """How many motions the recipe's environment imitates; 0 for one that imitates none."""
    env = recipe.task.make(recipe.task.num_agents)
    env.close()
    return len(env.spec.motions)


def make_evaluator(recipe: Recipe, key: Key, workers: Workers, policy: BasePolicy) -> Evaluator:
    """An evaluator with environments of its own."""
    config = recipe.evaluation
    envs: list[BatchEnv] = [
        recipe.task.for_evaluation().make(config.group_rows, recipe.collector.engine_threads)
        for _ in range(config.rows // config.group_rows)
    ]
    return Evaluator(envs, policy, config.episodes, key.child("evaluate"), workers)
