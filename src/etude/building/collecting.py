"""The collector and the evaluator of a run, with environments of their own."""

from __future__ import annotations

from functools import partial

from etude.core.clock import Clock
from etude.core.contracts import Collector
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.models.policies import BasePolicy, make_policy
from etude.planning.kinds import Learner
from etude.planning.recipe import Recipe
from etude.planning.resolve import Resolved
from etude.rollout.local import NoCollector, Workers
from etude.training.evaluation import Evaluator, Tester
from etude.training.sharing import FirstTests, SharedCollector


def make_collection(
    run: Resolved, learner: Learner, key: Key, clock: Clock, ranks: Ranks
) -> tuple[Collector, Tester]:
    """The collector that fills the learner's buffers, and the evaluator; this rank's of them."""
    recipe = run.recipe
    if not learner.buffers:
        if learner.evaluator is not None:
            return NoCollector(*learner.dataset), learner.evaluator
        workers = Workers(recipe.collector.threads)
        policy = make_policy(recipe.policy, run.spec, None)
        evaluator = make_evaluator(recipe, key, workers, policy)
        return NoCollector(*learner.dataset, workers), evaluator
    workers, config = Workers(recipe.collector.threads), recipe.collector
    new_policy = partial(make_policy, recipe.policy, run.spec, None)
    collector = config.build(
        partial(recipe.task.make, config.group_rows, config.engine_threads),
        new_policy,
        learner.buffers,
        key.child("collect"),
        workers,
        ranks.part(config.num_groups),
        run.exactness.exact,
    )
    if config.lag:
        from etude.rollout.overlap import OverlappedCollector

        collector = OverlappedCollector(collector, lambda i: i < clock.nest.iterations)
    tester: Tester | None = learner.evaluator
    if tester is None and ranks.is_first:
        tester = make_evaluator(recipe, key, workers, new_policy())
    return SharedCollector(ranks, collector), FirstTests(ranks, tester)


def make_evaluator(recipe: Recipe, key: Key, workers: Workers, policy: BasePolicy) -> Evaluator:
    """An evaluator with environments of its own."""
    config, task = recipe.evaluation, recipe.task.for_evaluation()
    envs = [
        task.make(config.group_rows, recipe.collector.engine_threads)
        for _ in range(config.rows // config.group_rows)
    ]
    return Evaluator(envs, policy, config.episodes, key.child("evaluate"), workers)


def num_motions(recipe: Recipe) -> int:
    """How many motions the recipe's environment imitates; 0 for one that imitates none."""
    env = recipe.task.make(recipe.task.num_agents)
    env.close()
    return len(env.spec.motions)
