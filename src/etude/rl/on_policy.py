"""The base of on-policy algorithms: segment geometry, buffers, and their part of a plan."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

from etude.core.clock import Loops
from etude.core.contracts import Algorithm
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import num_bytes
from etude.data.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.models.actor_critic import ActorCritic
from etude.models.policies import make_policy
from etude.planning import memory
from etude.planning.recipe import (
    AlgorithmConfig,
    Learner,
    PlanSection,
    Recipe,
    Resolved,
    array_shapes,
)
from etude.planning.resolve import check_policy
from etude.rl.rewards.given import RewardSource
from etude.runs.folder import RunFolder


class OnPolicyConfig(AlgorithmConfig):
    """An algorithm that fills a buffer of segments, learns from it, and drops it.

    A subclass defines `make`, which puts the algorithm together; planning, buffers and the reward
    source are taken care of here.
    """

    takes_ranks: ClassVar[bool] = True
    policies: ClassVar[str] = "actor-critic"
    rewards_from: ClassVar[str] = "rollouts"

    kind: str
    rollout_steps: int = Field(32, ge=1, description="Steps of every environment in an iteration.")
    horizon: int = Field(
        1,
        ge=1,
        description="Consecutive steps that stay together in a minibatch, for recurrent policies.",
    )
    minibatch_size: int = Field(512, ge=1, description="Steps of one minibatch, over all shards.")
    update_epochs: int = Field(
        8,
        ge=1,
        description="Passes over the rollout buffer in an update; epochs of the run, blocks of "
        "cycles, are clock.epochs.",
    )

    @abstractmethod
    def make(
        self,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: RewardSource,
        ranks: Ranks,
    ) -> Algorithm:
        """The algorithm, best derived from `PolicyAlgorithm`.

        For a plan it is made on the meta device and without buffers: its `state_dict` has the
        shapes of the checkpoint, and what is under "optimizer" is counted as the optimizer's.
        """

    def coverage(self, geometry: SegmentGeometry) -> float:
        """The share of segments that an iteration trains on, at the most."""
        return 1.0

    @property
    def may_stop_early(self) -> str | None:
        """Why an update may have fewer gradient steps than planned; None where it never has."""
        return None

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        """How the buffer divides; refuses what does not, and what would not learn."""
        check_policy(recipe, self.policies)
        recipe.rewards.require_rollouts(self.kind)
        recipe.rewards.check(recipe.learner.shards)
        if recipe.policy.is_recurrent and self.horizon == 1:
            raise UsageError(
                f"A policy with memory ({recipe.policy.kind}) learns along its segments, and "
                "algorithm.horizon 1 makes them one step long: give it a longer one, such as "
                f"--algorithm.horizon {self.rollout_steps}, a whole rollout."
            )
        return SegmentGeometry(
            num_envs=recipe.collector.num_envs,
            steps=self.rollout_steps,
            horizon=self.horizon,
            minibatch=self.minibatch_size,
            shards=recipe.learner.shards,
            envs_per_group=recipe.collector.envs_per_group,
            agents=recipe.task.num_agents,
        )

    def loops(self, recipe: Recipe, geometry: SegmentGeometry) -> Loops:
        batches = geometry.num_minibatches * self.update_epochs + recipe.rewards.num_updates
        return Loops.of(recipe.clock, geometry.buffer_steps, batches, _collect_only(recipe))

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        policy = make_policy(run.recipe.policy, run.spec, key.child("policy"))
        contents, lag = _contents(run), run.recipe.collector.lag
        local = ranks.part(contents.num_envs)
        buffers = [SegmentBuffer(contents, local) for _ in range(1 + lag)]
        source = run.recipe.rewards.for_rollouts(run, key.child("rewards"), run.device, ranks)
        algorithm = self.make(policy, run.geometry, buffers, run.device, source, ranks)  # type: ignore[arg-type]
        return Learner(algorithm, buffers)

    def plan(self, run: Resolved) -> PlanSection:
        recipe, geometry, policy = run.recipe, run.geometry, run.deployed
        meta = torch.device("meta")
        source = recipe.rewards.for_rollouts(run, None, meta)
        algorithm = self.make(policy, geometry, [], meta, source, ALONE)  # type: ignore[arg-type]
        rewards, training = recipe.rewards.plan(source), algorithm.state_dict()
        model = sum(p.nbytes for p in policy.parameters())
        estimates = memory.on_policy(run)
        estimates["workspace"] += rewards.workspace
        passes, coverage = self.update_epochs, self.coverage(geometry)
        used = "every step is used" if coverage == 1.0 else "a step is used, on average,"
        learning = max(run.loops.iterations - run.loops.idle_iterations, 0)
        steps = learning * run.loops.steps_per_iteration
        return PlanSection(
            geometry={
                "rollout_steps": geometry.steps,
                "horizon": geometry.horizon,
                "buffer_steps": geometry.buffer_steps,
                "segments": geometry.num_segments,
                "minibatch_steps": geometry.minibatch,
                "segments_per_minibatch": geometry.segments_per_minibatch,
                "minibatches": geometry.num_minibatches,
                "update_epochs": passes,
                **rewards.geometry,
            },
            lines=[self._update_line(geometry), *rewards.lines],
            shapes=_shapes(run),
            title="Buffer: [segments, horizon, ...]",
            usage=f"{used} {passes:g} times; {geometry.shards} shard(s)",
            data={
                "passes_per_iteration": passes,
                "gradient_samples_per_step": float(passes),
                "coverage": coverage,
                "gradient_samples": float(steps * passes),
            },
            memory={
                "buffer": _contents(run).num_bytes * (1 + recipe.collector.lag),
                "model": model,
                "gradient": model,
                "optimizer": num_bytes(training.get("optimizer", {})),
                **rewards.memory,
            },
            estimates=estimates,
            training=training,
            at_most=self.may_stop_early,
            notes=_notes(run, coverage),
        )

    def _update_line(self, geometry: SegmentGeometry) -> str:
        passes, early = self.update_epochs, self.may_stop_early
        segments = (
            f" ({geometry.segments_per_minibatch:,} segments of {geometry.horizon:,})"
            if geometry.horizon > 1
            else ""
        )
        return (
            f"update: {passes:,} update {'epoch' if passes == 1 else 'epochs'} (passes over the "
            f"buffer) x "
            f"{geometry.num_minibatches:,} minibatches of {geometry.minibatch:,} steps{segments} = "
            f"{'at most ' if early else ''}{passes * geometry.num_minibatches:,} batches"
            f"{f'; {early}' if early else ''}"
        )


def _collect_only(recipe: Recipe) -> int:
    """The first iterations, which only collect: a normaliser without statistics needs some.

    With lag 1 the second iteration, too, is collected before the normaliser has seen any.
    """
    return 0 if recipe.start_from is not None else 1 + recipe.collector.lag


def _contents(run: Resolved) -> BufferSpec:
    geometry, states = run.geometry, run.deployed.state_specs  # type: ignore[attr-defined]
    return BufferSpec(run.spec, states, geometry.num_envs, geometry.steps, geometry.horizon)


def _shapes(run: Resolved) -> dict[str, Any]:
    """Buffer and minibatch shapes of every stored array."""
    geometry, horizon = run.geometry, run.geometry.horizon
    num, drawn = geometry.num_segments, geometry.segments_per_minibatch
    arrays = {f"obs/{name}": spec for name, spec in run.spec.observations.items()}
    arrays["actions"] = run.spec.action.array
    states = {f"state/{name}": spec for name, spec in _contents(run).states.items()}
    steps = array_shapes(arrays, [num, horizon], [drawn, horizon])
    return steps | array_shapes(states, [num], [drawn])


def _notes(run: Resolved, coverage: float) -> list[str]:
    idle, notes = _collect_only(run.recipe), []
    if idle:
        first = "iteration only collects" if idle == 1 else f"{idle} iterations only collect"
        reason = "the normaliser needs statistics before anything is learned"
        if not getattr(run.deployed, "normalisers", True):
            reason = "normalisers are fitted there, and this policy has none"
        notes = [f"The first {first}: {reason}."]
    if coverage < 1.0:
        notes.append(
            f"Prioritised draws leave segments out: an iteration trains on {coverage:.0%} of them "
            "if all are alike and on fewer otherwise (train/coverage)."
        )
    return notes
