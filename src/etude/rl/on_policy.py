"""The base of on-policy algorithms.

`OnPolicyConfig`: segment geometry, buffers, and the algorithm's section of a plan. `Shard`: one
shard of a rollout as tensors, and the minibatches drawn from it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field

from etude.core.clock import Loops
from etude.core.contracts import Algorithm, Array, Fragment
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import ALONE, Ranks
from etude.core.trees import num_bytes
from etude.data.segments import (
    BufferSpec,
    SegmentBuffer,
    SegmentGeometry,
    episode_starts,
    nearest_divisor,
)
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.policies import Features, make_policy, map_features
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
from etude.rl.base import PolicyAlgorithm
from etude.rl.rewards.given import RewardSource
from etude.runs.folder import RunFolder


class OnPolicyConfig(AlgorithmConfig):
    """Base config of an algorithm that fills a rollout buffer, learns from it, and empties it.

    A subclass defines `make`, which constructs the algorithm; planning, buffers and the reward
    source are handled here.
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
        """Construct the algorithm, best derived from `PolicyAlgorithm`.

        For a plan it is constructed on the meta device without buffers: its `state_dict` gives the
        shapes of the checkpoint, and "optimizer" in it the memory of the optimizer.
        """

    def coverage(self, geometry: SegmentGeometry) -> float:
        """The largest fraction of segments that an iteration can train on."""
        return 1.0

    @property
    def may_stop_early(self) -> str | None:
        """Why an update may have fewer gradient steps than planned; None if it cannot."""
        return None

    def fitted(self, recipe: Recipe, given: Collection[str]) -> Recipe:
        """Sizes that divide `collector.num_envs`, and minibatches that divide the buffer."""
        recipe = super().fitted(recipe, given)
        buffer = recipe.collector.num_envs * self.rollout_steps
        unit, size = self.horizon * recipe.learner.shards, self.minibatch_size
        if buffer % size == 0 or "algorithm.minibatch_size" in given or buffer % unit:
            return recipe
        near = unit * nearest_divisor(buffer // unit, max(size // unit, 1))
        return recipe.replace(algorithm__minibatch_size=near)

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        """The geometry of the buffer. Raise an error for sizes that do not divide and for
        combinations that cannot learn."""
        check_policy(recipe, self.policies)
        recipe.rewards.require_rollouts(self.kind)
        recipe.rewards.check(recipe.learner.shards)
        if recipe.policy.is_recurrent and self.horizon == 1:
            raise UsageError(
                f"A recurrent policy ({recipe.policy.kind}) learns along segments, and "
                "algorithm.horizon 1 makes them one step long: use a longer one, for example "
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
    """The number of first iterations that only collect, for the statistics of the normaliser.

    With lag 1 the second iteration is collected before the normaliser has any statistics, too.
    """
    return 0 if recipe.start_from is not None else 1 + recipe.collector.lag


def _contents(run: Resolved) -> BufferSpec:
    geometry, states = run.geometry, run.deployed.state_specs  # type: ignore[attr-defined]
    return BufferSpec(run.spec, states, geometry.num_envs, geometry.steps, geometry.horizon)


def _shapes(run: Resolved) -> dict[str, Any]:
    """The shapes of every array in the buffer and in a minibatch."""
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
            f"Prioritised sampling leaves segments out: an iteration trains on {coverage:.0%} of "
            "them if all priorities are equal, and on fewer otherwise (train/coverage)."
        )
    return notes


def to_segments(x: torch.Tensor, horizon: int) -> torch.Tensor:
    """Split x [num_envs, steps, ...] into segments [n, horizon, ...]."""
    return x.reshape(x.shape[0] * x.shape[1] // horizon, horizon, *x.shape[2:])


@torch.no_grad()
def policy_inputs(
    algorithm: PolicyAlgorithm, rollout: Fragment, horizon: int
) -> tuple[Features, Memory | None]:
    """Normalised features of a rollout's segments, and the recurrent state at their starts."""
    features = algorithm.prepare(rollout.obs)
    memory = None
    if algorithm.policy.state_specs:
        state = {name: algorithm.put(x).flatten(0, 1) for name, x in rollout.states.items()}
        memory = Memory(state, algorithm.put(episode_starts(rollout, horizon)))
    return map_features(features, lambda x: to_segments(x, horizon)), memory


FLOOR = 1e-6
"""Added to every priority, so that no segment has probability zero."""


class Draw(NamedTuple):
    """The minibatches of one pass (update epoch) over a shard."""

    segments: Array
    """[minibatches, size] int64."""
    weights: Array | None
    """[minibatches, size] float32: importance weights of the segments; None where all are 1."""


def permuted(generator: np.random.Generator, num_segments: int, minibatches: int) -> Draw:
    """Draw every segment exactly once."""
    return Draw(generator.permutation(num_segments).reshape(minibatches, -1), None)


def probabilities(priorities: Array, alpha: float) -> Array:
    """Sampling probabilities [segments] float64, proportional to priority^alpha and never zero.

    priorities: [segments], for example the sum of |advantage| over a segment.
    """
    raised: Array = np.asarray(priorities, np.float64) ** alpha + FLOOR
    p: Array = raised / raised.sum()
    return p


def prioritised(
    generator: np.random.Generator, p: Array, minibatches: int, size: int, beta: float
) -> Draw:
    """Draw minibatches one by one with probabilities `p` [segments].

    Within a minibatch segments are drawn without replacement; several minibatches, or none, may
    contain the same segment. The importance weights (n p)^-beta correct the bias of the gradient:
    fully with beta 1, as long as a minibatch is small compared to the shard, partly with less.

    The `size` smallest of exponential noise / p are a draw without replacement (exponential race).
    """
    segments: Array = np.empty((minibatches, size), np.int64)
    for drawn in segments:
        finish = generator.standard_exponential(len(p))
        finish /= p
        # Order within a minibatch does not matter, and reading memory forwards is faster.
        drawn[:] = np.sort(np.argpartition(finish, size - 1)[:size])
    weights = (len(p) * p[segments]) ** -beta
    return Draw(segments, weights.astype(np.float32))


class Minibatch(NamedTuple):
    """The segments of one shard in a minibatch."""

    segments: torch.Tensor
    """[m] int64."""
    weights: torch.Tensor | None
    """[m] importance weights of prioritised sampling; None where all are 1."""


@dataclass
class Shard:
    """Segments [n, horizon, ...] of a rollout, with values computed before the update."""

    features: Features
    memory: Memory | None
    """None for a memoryless policy."""
    actions: torch.Tensor
    log_probs: torch.Tensor
    """[n, horizon] under the proximal policy, that is the policy at the start of the update."""
    importance: torch.Tensor | None
    """[n, horizon], at most 1: the ratio of an action's probability under the proximal policy to
    that under the older policy that collected it; None where the two policies are the same."""
    behaviour_kl: float
    """Mean KL divergence between those two policies."""
    advantages: torch.Tensor
    returns: torch.Tensor
    values: torch.Tensor
    present: torch.Tensor
    """[n, horizon] bool: the agent is present in the step."""
    all_present: bool
    priorities: Array | None
    """[n] sum of |advantage| over each segment, before normalisation; None for uniform sampling."""
    weights: torch.Tensor | None = None
    """[n, horizon] weight of each step in the loss, 1 on average over the buffer; None where all
    are 1."""
    images: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Tensors [n, ...] from above, each with that of the segments' mirror images; () without."""
    drawn: Array = field(init=False)
    """[n] bool: segments that were in a minibatch of this iteration."""

    def __post_init__(self) -> None:
        self.drawn = np.zeros(len(self.values), np.bool_)

    def swap_images(self, key: Key) -> None:
        """Exchange a random half of the segments and their mirror images, if there are any."""
        if self.images:
            chosen = key.generator().random(len(self.values)) < 0.5
            at = torch.from_numpy(chosen.nonzero()[0]).to(self.values.device)
            for own, image in self.images:
                own[at], image[at] = image[at], own[at]

    def masked(self, x: torch.Tensor) -> torch.Tensor:
        """[k]: the steps of x [n, horizon] in which an agent is present, in order."""
        return x.flatten() if self.all_present else x[self.present]

    def draw(self, key: Key, minibatches: int, size: int, alpha: float, beta: float) -> Draw:
        """Draw the minibatches, of `size` segments each, of one pass over this shard.

        alpha, beta: exponents of priorities and importance weights in prioritised sampling.
        """
        generator = key.generator()
        if self.priorities is None:
            return permuted(generator, len(self.advantages), minibatches)
        p = probabilities(self.priorities, alpha)
        return prioritised(generator, p, minibatches, size, beta)

    def minibatch(self, draw: Draw, index: int) -> Minibatch:
        """One minibatch of a draw, on the shard's device."""
        segments, device = draw.segments[index], self.advantages.device
        self.drawn[segments] = True
        weights = None if draw.weights is None else torch.from_numpy(draw.weights[index]).to(device)
        return Minibatch(torch.from_numpy(segments).to(device), weights)

    def step_weights(self, minibatch: Minibatch) -> torch.Tensor | None:
        """[m, horizon] or [m, 1]: weight of each step in the loss; None where all are 1."""
        weights = None if self.weights is None else self.weights.index_select(0, minibatch.segments)
        if minibatch.weights is None:
            return weights
        drawn = minibatch.weights.unsqueeze(1)
        return drawn if weights is None else weights * drawn

    def arrays(self, minibatch: Minibatch) -> dict[str, torch.Tensor]:
        """The minibatch's part of all tensors, to reproduce a failure."""
        named = {**vars(self)} | {f"features_{name}": x for name, x in self.features.items()}
        if self.memory is not None:
            named |= {f"state_{name}": x for name, x in self.memory.state.items()}
            named["starts"] = self.memory.starts
        tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
        return {name: x.index_select(0, minibatch.segments) for name, x in tensors.items()}
