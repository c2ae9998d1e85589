"""Resolve a recipe: derive once what planning, building and reports need."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from etude.core.contracts import BatchEnv, EnvSpec, Exactness
from etude.core.errors import UsageError
from etude.core.guard import Supervisor, supervised
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.envs.config import ENVS
from etude.models.policies import POLICIES, BasePolicy, make_policy
from etude.planning.loading import recipe_with_sentence
from etude.planning.memory import check_policy_size
from etude.planning.recipe import (
    ALGORITHMS,
    REWARDS,
    Inputs,
    Recipe,
    Resolved,
    kinds_with,
)
from etude.rollout.group import Group
from etude.rollout.local import COLLECTORS


def resolve(recipe: Recipe) -> Resolved:
    """Resolve a recipe; refuses settings that do not fit together."""
    recipe = _with_kind_classes(recipe)
    algorithm = recipe.algorithm
    recipe = algorithm.completed(recipe)
    if recipe.env is not None and recipe.env.sentence and recipe.start_from is not None:
        recipe = recipe_with_sentence(recipe, recipe.start_from)
    if recipe.learner.step == "compiled" and not algorithm.compiles:
        raise UsageError(
            f"learner.step compiled is for {kinds_with('compiles', True)}, not for "
            f"{algorithm.kind}: leave it at eager."
        )
    geometry = algorithm.geometry(recipe)
    loops = algorithm.loops(recipe, geometry)
    inputs = algorithm.inputs(recipe) or _from_environment(recipe)
    device = recipe.learner.torch_device()
    return Resolved(recipe=recipe, loops=loops, geometry=geometry, device=device, **vars(inputs))


def _with_kind_classes(recipe: Recipe) -> Recipe:
    """The recipe with each section in the class that its `kind` names.

    After `config.model_copy(update={"kind": "ray"})` a section still has its old class.
    """
    registries: dict[str, Registry[Any]] = {
        "env": ENVS,
        "collector": COLLECTORS,
        "policy": POLICIES,
        "algorithm": ALGORITHMS,
        "rewards": REWARDS,
    }
    sections = {name: getattr(recipe, name) for name in registries}
    made = {name: value and registries[name].validate(value) for name, value in sections.items()}
    changed = {name: value for name, value in made.items() if value is not sections[name]}
    return recipe.model_copy(update=changed) if changed else recipe


def check_policy(recipe: Recipe, family: str) -> None:
    """Refuse a policy that the algorithm cannot train."""
    if recipe.policy.family != family:
        fitting = [name for name in POLICIES.names() if POLICIES.make(name).family == family]
        raise UsageError(
            f"{recipe.algorithm.kind} does not train a policy of the kind '{recipe.policy.kind}': "
            f"use --policy.kind {' or '.join(fitting)}."
        )


def exactness(recipe: Recipe) -> Exactness:
    """Whether a run in the recipe's environment is exact, and why."""
    if recipe.learner.torch_device().type != "cpu":
        return Exactness(False, "learning happens on a GPU, where bits may differ between runs")
    if recipe.learner.reduce == "fast":
        return Exactness(
            False,
            "learner.reduce fast sums gradients in an order that depends on the number of ranks",
        )
    return recipe.task.exactness()


@waiting("building an environment to inspect")
def _from_environment(recipe: Recipe) -> Inputs:
    """The inputs of a run in the recipe's environment: builds one group and steps it twice."""
    recipe.collector.check()
    spec, policy, snapshot = supervised(partial(_inspect, recipe), recipe.collector.deadline)
    if spec.max_episode_steps is None:
        raise UsageError(
            "This environment has no limit on an episode's steps, so an evaluation might never "
            "end: give it one, for Gymnasium with --env.kwargs max_episode_steps 1000."
        )
    if spec.motions:
        check_motions(recipe, len(spec.motions))
    _check_discount(recipe)
    return Inputs(
        spec=spec,
        exactness=exactness(recipe),
        deployed=policy,
        evaluation_episodes=recipe.evaluation.episodes,
        snapshot=snapshot,
        num_groups=recipe.collector.num_groups,
    )


def _inspect(recipe: Recipe, supervisor: Supervisor) -> tuple[EnvSpec, BasePolicy, Tree]:
    """(spec, policy on the meta device, snapshot) of one group of environments."""
    env = supervisor.guard(recipe.task.make(recipe.collector.envs_per_group), "the inspection")
    with torch.device("meta"):
        policy = make_policy(recipe.policy, env.spec, None)
    check_policy_size(sum(p.nbytes for p in policy.parameters()))
    inspected = env.spec, policy, _snapshot(env, recipe)
    env.close()
    return inspected


def _snapshot(env: BatchEnv, recipe: Recipe) -> Tree:
    """A group's snapshot within an episode: at its start some environments lack part of it."""
    policy, group, key = make_policy(recipe.policy, env.spec, None), Group(env), Key(recipe.seed)
    two = SegmentBuffer(BufferSpec(env.spec, policy.state_specs, env.num_envs, 2, 1))
    begun = group.begin(policy, key)
    return group.rollout(policy, begun, key, 0, two.part(slice(0, env.num_envs)))[1]


def _check_discount(recipe: Recipe) -> None:
    """Refuse potential-based shaping with another discount than the algorithm's."""
    shaping, gamma = recipe.task.shaping_discount(), getattr(recipe.algorithm, "gamma", None)
    if shaping is not None and gamma is not None and shaping != gamma:
        raise UsageError(
            f"This environment shapes rewards by a potential with env.discount {shaping:g}, and "
            f"algorithm.gamma is {gamma:g}: if they differ, shaping changes the best policy. Use "
            f"--env.discount {gamma:g}."
        )


def check_motions(recipe: Recipe, num: int) -> None:
    """Refuse evaluations that would play some motions more often than others."""
    config = recipe.evaluation
    if config.envs_per_group % num:
        group = num * max(1, round(config.envs_per_group / num))
        num_envs = group * max(1, round(config.num_envs / group))
        episodes = num_envs * (config.episodes // config.num_envs)
        raise UsageError(
            f"Evaluation plays each of the {num} motions equally often, and "
            f"evaluation.envs_per_group {config.envs_per_group} is not a multiple of that: use "
            f"--evaluation.envs-per-group {group} --evaluation.num-envs {num_envs} "
            f"--evaluation.episodes {episodes}."
        )
    if config.final_episodes % num:
        near = num * max(1, round(config.final_episodes / num))
        raise UsageError(
            f"The {num} motions are each played equally often, and evaluation.final_episodes "
            f"{config.final_episodes} is not a multiple of that: use --evaluation.final-episodes "
            f"{near}, or 0 for none."
        )
