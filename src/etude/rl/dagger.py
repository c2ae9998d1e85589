"""DAgger (Ross et al. 2011): a student imitates a teacher in the states that the student visits.

The teacher is the policy of any run. It may read observations that the student cannot: contacts,
terrain, its velocity. An iteration, top to bottom:

1. The student collects a rollout with its exploration noise.
2. `ingest`: the teacher labels every step with its own action.
3. `batches`: gradient steps on the squared error between the student's most likely actions and the
   teacher's, or on their negative log-probability if they are discrete. A recurrent student learns
   along segments.
4. `end_iteration`: the student's normaliser is updated with the rollout, which is then discarded.

Like rsl_rl's distillation, and unlike the original DAgger, there is no aggregated dataset: each
iteration has thousands of states of the current student.
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
from etude.core.metrics import Column, Curve, Metric, Metrics
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.data.segments import SegmentBuffer, SegmentGeometry, join, non_finite
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.imitation import action_errors
from etude.models.networks import merge_all
from etude.models.policies import BasePolicy, Features, map_features
from etude.models.rebuilding import policy_from_contract
from etude.planning.loading import policy_parts
from etude.planning.recipe import PlanSection, Recipe, Resolved
from etude.rl.base import NetworkOptimizer, PolicyAlgorithm
from etude.rl.bc import DecayingRate
from etude.rl.on_policy import OnPolicyConfig, permuted, policy_inputs, to_segments
from etude.rl.rewards.given import RewardSource

LOSS = "train/imitation_loss"
_AT_ONCE = 4_096
"""Steps that the teacher labels together."""


class DAggerConfig(DecayingRate, OnPolicyConfig):
    """Imitation of a teacher in the student's own states."""

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

    def learns_from(self, recipe: Recipe) -> str:
        return "teacher"

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        if not self.teacher:
            raise UsageError(
                "dagger imitates a teacher: give its run with --algorithm.teacher RUN."
            )
        if recipe.learner.shards > 1 or recipe.collector.lag:
            raise UsageError(
                "dagger learns in one shard and from the current policy's states: leave "
                "learner.shards at 1 and collector.lag at 0."
            )
        if recipe.rewards.kind != "given":
            raise UsageError(
                f"dagger uses no rewards, and rewards.kind is {recipe.rewards.kind}: leave it at "
                "given."
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
    """Segments [n, horizon, ...] of the student's rollout, with the teacher's actions."""

    features: Features
    memory: Memory | None
    """None for a memoryless student."""
    labels: torch.Tensor
    """[n, horizon, dims]: the teacher's actions."""
    present: torch.Tensor
    """[n, horizon] bool: the agent is present in the step."""


class Teacher:
    """A trained policy that labels observations with its most likely actions."""

    def __init__(self, path: Path, device: torch.device) -> None:
        arrays, contract = policy_parts(path)
        self.path = path
        self.policy: BasePolicy = policy_from_contract(contract, arrays, path)
        if self.policy.state_specs:
            raise UsageError(
                f"The policy of {path} is recurrent, and a teacher must be memoryless: use one of "
                "policy.kind mlp."
            )
        digest = hashlib.sha256()
        for name, array in sorted(self.policy.state_dict().items()):
            digest.update(name.encode() + array.numpy().tobytes())
        self.sha256 = digest.hexdigest()
        self.policy.to(device)
        self.device = device

    def check(self, env: EnvSpec) -> None:
        """Raise an error if the teacher's observations or actions are not the environment's."""
        for name, spec in self.policy.actor_observations.items():
            if env.observations.get(name) != spec:
                raise UsageError(
                    f"The teacher of {self.path} reads '{name}' of shape {spec.shape}, which this "
                    f"environment does not have: it has {', '.join(sorted(env.observations))}."
                )
        if self.policy.action != env.action:
            raise UsageError(
                f"Action spaces do not match: the teacher of {self.path} has {self.policy.action}, "
                f"the environment {env.action}."
            )

    @torch.no_grad()
    def actions(self, obs: Observations) -> torch.Tensor:
        """Actions [num_envs, steps, dims] for observations {name: [num_envs, steps, ...]}."""
        read = {name: obs[name] for name in self.policy.actor_observations}
        num, steps = next(iter(read.values())).shape[:2]
        flat = {name: x.reshape(num * steps, *x.shape[2:]) for name, x in read.items()}
        parts = []
        for start in range(0, num * steps, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            shown = {name: torch.from_numpy(x[part]).to(self.device) for name, x in flat.items()}
            parts.append(self.policy.act(shown, {}, None).actions)
        actions = torch.cat(parts).view(num, steps, -1)
        # The environment clips actions beyond the box.
        return actions.clamp(-1.0, 1.0) if self.policy.action.kind == "box" else actions


class DAgger(PolicyAlgorithm):
    """DAgger, as described in the module's docstring."""

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
        """Label the rollout with the teacher's actions."""
        envs = self.geometry.shard_envs(0)
        rollout = join(fragments, self.buffers[0], envs)
        if fault := non_finite(rollout, envs.start):
            raise fault
        self._moments = merge_all([fragment.moments for fragment in fragments])
        horizon = self.geometry.horizon
        labels = to_segments(self.teacher.actions(rollout.obs), horizon)
        present = to_segments(self.put(rollout.present), horizon)
        self.lesson = Lesson(*policy_inputs(self, rollout, horizon), labels, present)
        return {}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        config, lesson = self.config, self.lesson
        assert lesson is not None
        learning_rate = config.schedules(clock.progress)["learning_rate"]
        for epoch in range(config.update_epochs):
            generator = key.child("permutation", epoch).generator()
            count = self.geometry.num_minibatches
            for chosen in permuted(generator, len(lesson.labels), count).segments:
                drawn = torch.from_numpy(chosen).to(self.device)
                try:
                    mean = float(self.optimizer.mean_gradient([self.loss(lesson, drawn)]))
                except NonFinite as error:
                    raise NonFinite(error.where, {"labels": lesson.labels[drawn]}) from error
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
        """The mean imitation error [] over segments [m]."""
        at = itemgetter(segments)
        memory = lesson.memory and lesson.memory.at(segments)
        features = map_features(lesson.features, at)
        errors = action_errors(self.policy, features, memory, at(lesson.labels))
        weights = at(lesson.present).to(errors.dtype)
        mean: torch.Tensor = (errors * weights).sum() / weights.sum().clamp(min=1.0)
        return mean

    def end_iteration(self) -> dict[str, float]:
        self.policy.absorb(self._moments)
        self._moments, self.lesson = {}, None
        return {}

    def gather(self) -> None:
        """Nothing to gather: one process has all shards."""

    def state_dict(self) -> Tree:
        return {"optimizer": self.optimizer.state_dict(), "teacher_sha256": self.teacher.sha256}

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if state["teacher_sha256"] != self.teacher.sha256:
            raise UsageError(
                f"The teacher in {self.teacher.path} is not the one this run began with: restore "
                "it, or start a new run with --from."
            )
