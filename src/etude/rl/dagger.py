"""DAgger (Ross et al. 2011): a student learns to act as a teacher would, where the student goes.

The teacher is the policy of any run. It may read what the student cannot: contacts, terrain, its
velocity. An iteration, top to bottom:

1. The student acts, with its exploration noise, so that its own mistakes are among what is seen.
2. `ingest`: the teacher says what it would have done in every step.
3. `batches`: the student's most likely actions are drawn to the teacher's, by the squared error; of
   discrete choices, by their log-probability. A recurrent student learns along its segments.
4. `end_iteration`: the student's normaliser takes in what was collected; steps are dropped.

Dropping them is what rsl_rl's distillation does, too: the student that comes next visits its own
states, and an iteration has thousands of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import Field

from etude.core.clock import Clock
from etude.core.config import AbsolutePath
from etude.core.contracts import BatchMetrics, EnvSpec, Fragment, Observations
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.metrics.declared import Column, Curve, Metric, Metrics
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.data.segments import SegmentBuffer, SegmentGeometry, episode_starts, join, non_finite
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.imitation import action_errors
from etude.models.normalise import merge_all
from etude.models.policies import BasePolicy, Features, map_features
from etude.models.rebuilding import policy_from_contract
from etude.planning.loading import policy_parts
from etude.planning.recipe import PlanSection, Recipe, Resolved
from etude.rl.base import PolicyAlgorithm
from etude.rl.bc import DecayingRate
from etude.rl.on_policy import OnPolicyConfig
from etude.rl.optimizer import NetworkOptimizer
from etude.rl.rewards.given import RewardSource
from etude.rl.shard import permuted

LOSS = "train/imitation_loss"
_AT_ONCE = 4_096
"""Steps that the teacher labels together."""


class DAggerConfig(DecayingRate, OnPolicyConfig):
    """A student that a teacher corrects."""

    takes_ranks: ClassVar[bool] = False
    rewards_from: ClassVar[str] = ""
    metrics: ClassVar[Metrics] = (
        Metric(
            LOSS, "loss", ".3g", Column(21, 10), Curve(62, "cyan", (0, None)), epoch=2, losses=True
        ),
    )
    aliases = {"learning_rate": "lr", "minibatch_size": "batch_size"}  # noqa: RUF012

    kind: Literal["dagger"] = Field("dagger", description="Imitation of a teacher (DAgger).")
    teacher: AbsolutePath = Field(
        "", description="Run, checkpoint or policy folder of the policy to imitate."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Norm that gradients are clipped to.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        if not self.teacher:
            raise UsageError(
                "dagger imitates a teacher: name its run with --algorithm.teacher RUN."
            )
        if recipe.learner.shards > 1 or recipe.collector.lag:
            raise UsageError(
                "dagger learns in one shard from what its own policy has just visited: leave "
                "learner.shards at 1 and collector.lag at 0."
            )
        if recipe.rewards.kind != "given":
            raise UsageError(
                f"dagger learns from no reward, and rewards.kind is {recipe.rewards.kind}: leave "
                "it at given."
            )
        return super().geometry(recipe)

    def plan(self, run: Resolved) -> PlanSection:
        teacher = Teacher(Path(self.teacher), torch.device("cpu"))
        teacher.check(run.spec)
        section = super().plan(run)
        reads = ", ".join(teacher.policy.actor_observations)
        section.notes.append(f"The teacher, {self.teacher}, reads {reads}.")
        return section

    def make(
        self,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: RewardSource,
        ranks: Ranks,
    ) -> DAgger:
        return DAgger(self, policy, geometry, buffers, device)


@dataclass
class Lesson:
    """Segments [n, horizon, ...] that the student visited."""

    features: Features
    memory: Memory | None
    """None for a memoryless student."""
    wanted: torch.Tensor
    """[n, horizon, dims]: the teacher's actions."""
    present: torch.Tensor
    """[n, horizon] bool: the step is an agent's."""


class Teacher:
    """A trained policy, asked for its most likely actions."""

    def __init__(self, path: Path, device: torch.device) -> None:
        arrays, contract = policy_parts(path)
        self.path = path
        self.policy: BasePolicy = policy_from_contract(contract, arrays, path)
        if self.policy.state_specs:
            raise UsageError(
                f"The policy of {path} has a memory of what it did itself, and a teacher watches: "
                "take one without (policy.kind mlp)."
            )
        digest = hashlib.sha256()
        for name, array in sorted(self.policy.state_dict().items()):
            digest.update(name.encode() + array.numpy().tobytes())
        self.sha256 = digest.hexdigest()
        self.policy.to(device)
        self.device = device

    def check(self, env: EnvSpec) -> None:
        """Refuse a task in which the teacher could not act, or would act otherwise."""
        for name, spec in self.policy.actor_observations.items():
            if env.observations.get(name) != spec:
                there = f"has {', '.join(sorted(env.observations))}, and none"
                raise UsageError(
                    f"The teacher of {self.path} reads '{name}' of shape {spec.shape}; this "
                    f"environment {there} of them is that."
                )
        if self.policy.action != env.action:
            raise UsageError(
                f"The teacher of {self.path} acts otherwise than this task is acted on."
            )

    @torch.no_grad()
    def actions(self, obs: Observations) -> torch.Tensor:
        """[num_envs, steps, dims]: what it would do at {name: [num_envs, steps, ...]}."""
        read = {name: obs[name] for name in self.policy.actor_observations}
        num, steps = next(iter(read.values())).shape[:2]
        flat = {name: x.reshape(num * steps, *x.shape[2:]) for name, x in read.items()}
        parts = []
        for start in range(0, num * steps, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            shown = {name: torch.from_numpy(x[part]).to(self.device) for name, x in flat.items()}
            parts.append(self.policy.act(shown, {}, None).actions)
        actions = torch.cat(parts).view(num, steps, -1)
        # What is beyond the box is not carried out.
        return actions.clamp(-1.0, 1.0) if self.policy.action.kind == "box" else actions


class DAgger(PolicyAlgorithm):
    """See the module's text."""

    policy: ActorCritic

    def __init__(
        self,
        config: DAggerConfig,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
    ) -> None:
        self.config, self.geometry, self.buffers = config, geometry, buffers
        self.policy, self.device = policy.to(device), device
        planned = device.type == "meta"
        self.teacher = Teacher(Path(config.teacher), torch.device("cpu") if planned else device)
        self.optimizer = NetworkOptimizer("policy", self.policy, config.adam_epsilon)
        self.lesson: Lesson | None = None
        self._moments: dict[str, Tree] = {}

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """The teacher says what it would have done."""
        envs = self.geometry.shard_envs(0)
        rollout = join(fragments, self.buffers[0], envs)
        if fault := non_finite(rollout, envs.start):
            raise fault
        self._moments = merge_all([fragment.moments for fragment in fragments])
        self.lesson = self._lesson(rollout)
        return {}

    def _lesson(self, rollout: Fragment) -> Lesson:
        horizon = self.geometry.horizon

        def segments(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(x.shape[0] * x.shape[1] // horizon, horizon, *x.shape[2:])

        memory = None
        if self.policy.state_specs:
            state = {name: self.put(x).flatten(0, 1) for name, x in rollout.states.items()}
            memory = Memory(state, self.put(episode_starts(rollout, horizon)))
        with torch.no_grad():
            features = map_features(self.prepare(rollout.obs), segments)
        wanted = segments(self.teacher.actions(rollout.obs))
        return Lesson(features, memory, wanted, segments(self.put(rollout.present)))

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        config, lesson = self.config, self.lesson
        assert lesson is not None
        learning_rate = config.schedules(clock.progress)["learning_rate"]
        for epoch in range(config.update_epochs):
            generator = key.child("permutation", epoch).generator()
            count = self.geometry.num_minibatches
            for chosen in permuted(generator, len(lesson.wanted), count).segments:
                drawn = torch.from_numpy(chosen).to(self.device)
                try:
                    mean = float(self.optimizer.mean_gradient([self.loss(lesson, drawn)]))
                except NonFinite as error:
                    raise NonFinite(error.where, {"wanted": lesson.wanted[drawn]}) from error
                self.optimizer.clip(self.optimizer.norm, config.max_grad_norm)
                self.optimizer.step(learning_rate)
                yield BatchMetrics(
                    {
                        LOSS: mean,
                        "train/grad_norm": self.optimizer.norm,
                        "train/learning_rate": learning_rate,
                    }
                )

    def loss(self, lesson: Lesson, segments: torch.Tensor) -> torch.Tensor:
        """The mean error [] of the student's actions in these segments [m]."""
        at = itemgetter(segments)
        memory = lesson.memory and lesson.memory.at(segments)
        features = map_features(lesson.features, at)
        errors = action_errors(self.policy, features, memory, at(lesson.wanted))
        weights = at(lesson.present).to(errors.dtype)
        mean: torch.Tensor = (errors * weights).sum() / weights.sum().clamp(min=1.0)
        return mean

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        self._moments, self.lesson = {}, None
        return {}

    def gather(self) -> None:
        """One process has everything."""

    def state_dict(self) -> Tree:
        return {"optimizer": self.optimizer.state_dict(), "teacher_sha256": self.teacher.sha256}

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if state["teacher_sha256"] != self.teacher.sha256:
            raise UsageError(
                f"This run learned from another policy than {self.teacher.path} now holds: put the "
                "teacher back, or begin a new run with --from."
            )
