"""The base of off-policy algorithms: replay on disk or a dataset, and their part of a plan."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from pydantic import Field

from etude.core.clock import Interval, Loops
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.metrics.declared import Column, Curve, Metric, Metrics, Warning
from etude.core.ranks import Ranks
from etude.core.trees import Tree, num_bytes
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.models.policies import make_policy
from etude.planning import memory
from etude.planning.recipe import Inputs, Learner, PlanSection, Recipe, RewardsSection, array_shapes
from etude.planning.resolve import Resolved, check_policy
from etude.rl import offline
from etude.rl.off_policy import OffPolicy, ReplayGeometry
from etude.rl.offline import DatasetConfig
from etude.rl.rewards.given import RewardSource
from etude.rl.sampling import Experience
from etude.runs import files
from etude.runs.folder import RunFolder

if TYPE_CHECKING:
    from etude.core.metrics.declared import Health

_MOST_BLOCKS = 1 << 17
"""Files of a replay, of up to 1 GiB each: a checkpoint names each with its hash."""


def _q_diverges(health: Health) -> Warning | None:
    """Q values may be several times the returns where episodes are cut short; not much more, and
    not more and more."""
    values = [abs(value) for value in health.recent("train/q_mean")]
    returns = max(map(abs, health.series("rollout/ep_rew_mean")), default=math.inf)
    if not values or min(values) < 10 * returns:
        return None
    grows = values == sorted(values) and values[-1] > 1.05 * values[0]
    if not grows and min(values) < 30 * returns:
        return None
    return Warning(
        "Q values diverge",
        f"they are at {health.recent('train/q_mean')[-1]:.3g}, and no return beyond {returns:.3g} "
        "was seen: lower algorithm.learning_rate or algorithm.gamma, or raise algorithm.polyak",
    )


METRICS: Metrics = (
    Metric(
        "train/q_mean", "Q", ".2f", Column(20, 8, "online"), Curve(61, "magenta"), check=_q_diverges
    ),
    Metric("train/q_mean", "Q", ".3g", Column(20, 9, "offline")),
    Metric(
        "train/critic_loss", "Q loss", ".3g", Column(21, 9, "online"), Curve(62, "cyan", (0, None))
    ),
    Metric("train/critic_loss", "Q loss", ".3g", Column(21, 10, "offline")),
    Metric(
        "eval/action_error",
        "eval actions",
        ".3g",
        Column(40, 13, "offline"),
        about="squared error of actions, per dimension",
        summary="squared error of actions {value:.3g}",
    ),
    Metric("eval/q_mean", "eval Q", about="Q of the policy's actions, by its critics"),
    Metric("eval/q_data", "data Q", about="Q of the dataset's actions, by the same critics"),
)


class OffPolicyConfig(DatasetConfig):
    """What SAC and TD3 have in common. A subclass defines `make` and the policies it trains."""

    metrics: ClassVar[Metrics] = METRICS
    aliases = {  # noqa: RUF012
        "learning_rate": "lr",
        "capacity": "buffer_size replay_size",
        "warmup_steps": "learning_starts start_steps",
        "train_batches": "gradient_steps",
        "rollout_steps": "train_freq n_steps",
        "polyak": "tau",
        "batch_size": "minibatch_size",
        "target_interval": "target_update_interval",
    }
    rewards_from: ClassVar[str] = "replay"

    rollout_steps: int = Field(100, ge=1, description="Steps of every environment in an iteration.")
    train_batches: int = Field(100, ge=1, description="Gradient steps of an iteration.")
    batch_size: int = Field(256, ge=1, description="Transitions of one minibatch, over all shards.")
    warmup_steps: int = Field(
        10_000, ge=0, description="Environment steps of random actions before the first gradient."
    )
    capacity: int = Field(
        1_000_000,
        ge=1,
        le=1 << 50,
        description="Observations that the replay buffer holds; the oldest episodes are evicted.",
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    polyak: float = Field(0.995, ge=0, le=1, description="1 - tau of the target networks' updates.")
    target_interval: int = Field(
        1, ge=1, description="Gradient steps between updates of the target networks."
    )
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    random_shift: int = Field(
        4,
        ge=0,
        description="Images that the policy reads are shifted at random by up to so many pixels, "
        "before each gradient step; 0 leaves them.",
    )
    normalise_observations: bool = Field(
        False, description="Normalise observations by their running mean and standard deviation."
    )

    @abstractmethod
    def make(
        self,
        policy: Any,
        stores: Sequence[Experience],
        rewards: RewardSource,
        key: Key,
        device: torch.device,
    ) -> OffPolicy:
        """The algorithm; for a plan it is made on the meta device."""

    @property
    def offline(self) -> bool:
        """Whether a dataset stands in for the replay."""
        return bool(self.dataset)

    @property
    def replayed(self) -> int:
        """Transitions of a minibatch that are drawn from the replay."""
        return self.batch_size

    @property
    def imitates(self) -> bool:
        """Whether something holds the policy to the actions of a dataset."""
        return False

    def idle_iterations(self, steps_per_iteration: int) -> int:
        """The first iterations of a run, whose steps do not yet complete the warm-up."""
        return max(-(-self.warmup_steps // steps_per_iteration) - 1, 0)

    def is_warming_up(self, timesteps: int) -> bool:
        """Whether so many steps are too few to learn from. A dataset is there from the start."""
        return not self.offline and timesteps < self.warmup_steps

    def geometry(self, recipe: Recipe) -> ReplayGeometry | None:
        """How groups and batches divide over shards; refuses what does not."""
        check_policy(recipe, self.policies)
        if recipe.learner.reduce != "exact":
            raise UsageError(
                f"{self.kind} learns in one process and has no ranks whose gradients "
                f"learner.reduce {recipe.learner.reduce} would add up: leave it at exact."
            )
        shards = recipe.learner.shards
        if self.offline or recipe.env is None:
            offline.check(recipe, self.batch_size)
            return None
        recipe.rewards.require_replay(self.kind)
        recipe.rewards.check(shards)
        geometry = ReplayGeometry(
            num_envs=recipe.collector.num_envs,
            steps=self.rollout_steps,
            batch_size=self.batch_size,
            shards=shards,
            envs_per_group=recipe.collector.envs_per_group,
        )
        if self.imitates:
            raise UsageError(
                "algorithm.behaviour_coef imitates the actions of a dataset, and there is none: "
                "name one with --algorithm.dataset FOLDER, or set behaviour_coef to None."
            )
        return geometry

    def loops(self, recipe: Recipe, geometry: ReplayGeometry | None) -> Loops:
        if geometry is None:
            return Loops.of(recipe.clock, 0, self.train_batches)
        steps = geometry.steps_per_iteration
        return Loops.of(recipe.clock, steps, self.train_batches, self.idle_iterations(steps))

    def inputs(self, recipe: Recipe) -> Inputs | None:
        return offline.inputs(self, recipe) if self.offline or recipe.env is None else None

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        policy = make_policy(run.recipe.policy, run.spec, key.child("policy"))
        shards = run.recipe.learner.shards
        if run.data is not None:
            algorithm = self._made(run, policy, run.data.shards(shards), key, run.device)
            return offline.learner(run, algorithm)
        geometry, place = run.geometry, folder.path / "replay"
        files.make_folder(place)
        shape = geometry.store(run.spec, self.capacity)
        stores = [
            EpisodeStore.create(place / f"shard-{s}", shape, files.current()) for s in range(shards)
        ]
        algorithm = self._made(run, policy, stores, key, run.device)
        staging = BufferSpec(run.spec, {}, geometry.num_envs, geometry.steps, geometry.steps)
        buffers = [SegmentBuffer(staging) for _ in range(1 + run.recipe.collector.lag)]
        return Learner(algorithm, buffers)

    def _made(
        self,
        run: Resolved,
        policy: Any,
        stores: Sequence[Experience],
        key: Key | None,
        device: torch.device,
    ) -> OffPolicy:
        """A new learner with its reward source; without a key on the meta device, to be counted."""
        rewards_key = None if key is None else key.child("rewards")
        rewards = run.recipe.rewards.for_replay(run, rewards_key, device)
        return self.make(policy, stores, rewards, (key or Key(0)).child("critics"), device)

    def plan(self, run: Resolved) -> PlanSection:
        if run.data is not None:
            return offline.plan(self, run)
        geometry, total, env = run.geometry, run.loops.total, run.spec
        if run.recipe.motions.enabled:
            raise UsageError(
                f"{self.kind} keeps whole episodes, and motions.enabled ends them at every epoch's "
                "end: use algorithm ppo, or practise all motions evenly with --motions.no-enabled."
            )
        if run.spec.agents > 1:
            raise UsageError(
                f"{self.kind} keeps whole episodes, and agents of this environment come and go: "
                "use algorithm ppo."
            )
        shape = geometry.store(env, self.capacity)
        steps = total.timesteps // geometry.shards
        planned = [PlannedStore(shape, steps) for _ in range(geometry.shards)]
        training, rewards = self.planned(run, cast(list[EpisodeStore], planned))
        staging = BufferSpec(env, {}, geometry.num_envs, geometry.steps, geometry.steps).num_bytes
        arrays = {f"obs/{name}": spec for name, spec in env.observations.items()}
        arrays["actions"] = env.action.array
        samples = self.train_batches * self.replayed / geometry.steps_per_iteration
        return PlanSection(
            geometry={
                "rollout_steps": geometry.steps,
                "batch_size": geometry.batch_size,
                "train_batches": self.train_batches,
                "warmup_steps": self.warmup_steps,
                "capacity": self.capacity,
                **rewards.geometry,
            },
            lines=self.update_lines(rewards),
            shapes=array_shapes(arrays, [self.capacity], [self.batch_size]),
            title="Replay: [transitions, ...]",
            usage=f"every step is used {samples:g} times, on average; {geometry.shards} shard(s)",
            data={
                "gradient_samples_per_step": samples,
                "gradient_samples": float(total.updates * self.batch_size),
            },
            memory={
                "buffer": staging * (1 + run.recipe.collector.lag),
                **self.learner_bytes(run, training),
            },
            estimates={
                **memory.collection(run, geometry.steps_per_iteration),
                **self.estimates(run, training),
            },
            training=training,
            disk=self._disk(run, shape),
            notes=self._notes(run),
        )

    def _disk(self, run: Resolved, shape: StoreGeometry) -> dict[str, int]:
        """Bytes of the replay on disk: live data, and what the checkpoints that are kept hold back.

        Just before a save, the oldest of them is `keep_last` saves old, and all that was collected
        since is still there. Blocks are sparse files: what was not written takes no space.
        """
        recipe, loops, shards = run.recipe, run.loops, run.geometry.shards
        waited = loops.longest_wait(Interval.parse(recipe.checkpoint.every))
        since = min(waited * recipe.checkpoint.keep_last, loops.iterations)
        steps = [n * loops.steps_per_iteration // shards for n in (since, loops.iterations)]
        held, everything = map(shape.bytes_of, steps)
        everything += shape.lanes * shape.step_record.itemsize  # the observations ahead
        live = min(shape.num_bytes, everything)
        return {
            "replay": live * shards,
            "replay_held": min(held, everything - live) * shards,
        }

    def planned(self, run: Resolved, stores: Sequence[Experience]) -> tuple[Tree, RewardsSection]:
        """The shape of the learner's state in a checkpoint, and the reward source's plan."""
        algorithm = self._made(run, run.deployed, stores, None, torch.device("meta"))
        return algorithm.state_dict(), run.recipe.rewards.plan(algorithm.rewards)

    def update_lines(self, rewards: RewardsSection) -> list[str]:
        """What the updates of an iteration are."""
        batches = f"update: {self.train_batches:,} batches of {self.batch_size:,} transitions"
        return [batches, *rewards.lines]

    def learner_bytes(self, run: Resolved, training: Tree) -> dict[str, int]:
        """What a learner of such a state takes in memory."""
        learned = {k: v for k, v in training.items() if k not in ("stores", "rewards")}
        model = {k: v for k, v in training["rewards"].items() if k != "best"}
        return {
            "model": sum(p.nbytes for p in run.deployed.parameters()),
            "learner_state": num_bytes(learned),
            "reward_model": 2 * num_bytes(model),
        }

    def estimates(self, run: Resolved, training: Tree) -> dict[str, int]:
        """About what a gradient step keeps for its backward pass, and the most of IRCR's best
        episodes."""
        layers = 32 * self.batch_size * sum(run.deployed.config.hidden) * 4  # type: ignore[attr-defined]
        # Of an image, the actor's gradient and the critics' keep activations, and targets some.
        layers += 3 * self.batch_size * memory.image_activations(run) * 4
        best = num_bytes(training["rewards"].get("best", {}))
        return {"workspace": layers, **({"best_episodes": best} if best else {})}

    def _notes(self, run: Resolved) -> list[str]:
        notes = [
            "The replay is on disk and memory-mapped. The checkpoints that are kept (--checkpoint."
            "keep-last, --checkpoint.every) hold back what was evicted since the oldest of them: "
            "replay held."
        ]
        if not run.recipe.task.exactness().exact:
            notes.append(
                "A resume closes the episodes in progress as truncated, with the rewards they had "
                "so far as their returns, and begins new ones: the environment cannot be restored."
            )
        if idle := run.loops.idle_iterations:
            started = run.recipe.start_from is not None
            by = "by the policy it starts from" if started else "with random actions"
            notes.append(
                f"The first {idle:,} iterations only collect, {by}: the warm-up is "
                f"{self.warmup_steps:,} steps."
            )
        return notes


@dataclass(frozen=True)
class PlannedStore:
    """A store that is only planned: the shape of its state at the end of a run."""

    shape: StoreGeometry
    steps: int

    def state_dict(self) -> Tree:
        held = min(self.steps, self.shape.capacity or self.steps)
        episodes = held // self.shape.max_episode_steps
        return {
            "steps": _log_state(self.steps, held, self.shape.block_slots),
            "finals": _log_state(episodes, episodes, self.shape.block_episodes),
            "episodes": _log_state(episodes, episodes, self.shape.block_episodes),
            "open_starts": torch.zeros(self.shape.lanes, dtype=torch.int64),
            "open_returns": torch.zeros(self.shape.lanes, dtype=torch.float64),
            "ahead": {
                name: np.empty((self.shape.lanes, *spec.shape), spec.dtype)
                for name, spec in self.shape.observations.items()
            },
        }


def _log_state(count: int, held: int, block: int) -> Tree:
    blocks = held // block + 1
    if blocks > _MOST_BLOCKS:
        raise UsageError(
            f"The replay would be {blocks:,} files, and a checkpoint can name at most "
            f"{_MOST_BLOCKS:,}: lower algorithm.capacity."
        )
    return {"first": count - held, "count": count, "sha256": ["0" * 64] * blocks}
