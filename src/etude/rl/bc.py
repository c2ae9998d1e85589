"""Behaviour cloning: a policy that imitates the actions of demonstrations.

An iteration, top to bottom (`batches`):

1. The first iteration fits the observation normaliser to a sample of the dataset, then frozen.
2. Each gradient step samples windows of demonstrations, uniform over steps: the observations
   around a step, and the actions from that step on. The policy defines the length of a window:
   one step for a plain network, `horizon` steps for a recurrent one, a chunk for `act` and `flow`.
3. Images are shifted at random by a few pixels, and the policy computes its loss
   (`models/imitation.py`).

Policies are the same as in other algorithms: `etude train ppo --from RUN` and `etude train sac
--from RUN` start from a cloned one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.clock import Clock, Loops
from etude.core.config import Config
from etude.core.contracts import Array, BatchMetrics, Fragment
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.metrics import Column, Curve, Metric, Metrics
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.data.store.views import EpisodesOf, Windows
from etude.models.encoders import random_shift
from etude.models.imitation import Demonstrations, imitation_loss, imitation_window
from etude.models.networks import load_arrays
from etude.models.policies import BasePolicy, make_policy
from etude.planning import memory
from etude.planning.recipe import Inputs, Learner, PlanSection, Recipe, Resolved
from etude.rl import offline
from etude.rl.base import NetworkOptimizer, PolicyAlgorithm, TargetNetwork
from etude.rl.offline import DatasetConfig
from etude.rl.sampling import ahead, fit_normaliser
from etude.runs.folder import RunFolder


class DecayingRate(Config):
    """Base config of an algorithm with a linear learning rate schedule."""

    learning_rate: float = Field(1e-3, gt=0, description="Learning rate of Adam at the start.")
    final_learning_rate: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Learning rate at the end as a fraction of learning_rate; linear in between.",
    )

    def schedules(self, progress: float) -> dict[str, float]:
        """The learning rate at a progress from 0 to 1."""
        end = self.learning_rate * self.final_learning_rate
        return {"learning_rate": self.learning_rate + (end - self.learning_rate) * progress}


LOSS, EVAL_LOSS = "train/imitation_loss", "eval/imitation_loss"
_EVALUATED = 2_048
"""Steps of held-out episodes in an evaluation without an environment, at most."""


class BCConfig(DecayingRate, DatasetConfig):
    """Behaviour cloning."""

    metrics: ClassVar[Metrics] = (
        Metric(
            LOSS, "loss", ".3g", Column(21, 10), Curve(62, "cyan", (0, None)), epoch=2, losses=True
        ),
        Metric(
            EVAL_LOSS,
            "eval loss",
            ".3g",
            Column(40, 10, "offline"),
            epoch=3,
            about="loss on the episodes held out",
            summary="loss on held-out episodes {value:.3g}",
        ),
    )
    aliases = {"learning_rate": "lr", "batch_size": "minibatch_size"}  # noqa: RUF012

    kind: Literal["bc"] = Field("bc", description="Behaviour cloning.")
    train_batches: int = Field(100, ge=1, description="Gradient steps of an iteration.")
    batch_size: int = Field(256, ge=1, description="Windows of one minibatch.")
    horizon: int = Field(
        16, ge=1, description="Consecutive steps in a window of a recurrent policy."
    )
    max_grad_norm: float = Field(10.0, gt=0, description="Norm that gradients are clipped to.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    average: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of the moving average of the weights, which is the policy that acts; "
        "0: the weights themselves act.",
    )
    random_shift: int = Field(
        4, ge=0, description="Pixels by which images are shifted at random, at most; 0: none."
    )

    def loops(self, recipe: Recipe, geometry: None) -> Loops:
        if recipe.learner.shards > 1:
            raise UsageError("bc learns in one shard: leave learner.shards at 1.")
        offline.refuse_collection(recipe)
        return Loops.of(recipe.clock, 0, self.train_batches)

    def inputs(self, recipe: Recipe) -> Inputs:
        return offline.inputs(self, recipe)

    def build(self, run: Resolved, key: Key, folder: RunFolder, ranks: Ranks) -> Learner:
        policy = make_policy(run.recipe.policy, run.spec, key.child("policy"))
        algorithm = BC(self, policy, run.data.training, run.data.held_out, run.device)
        return offline.make_learner(run, algorithm, algorithm.evaluate, EVAL_LOSS)

    def plan(self, run: Resolved) -> PlanSection:
        data, policy = run.data, run.deployed
        algorithm = BC(self, policy, data.training, data.held_out, torch.device("meta"))  # type: ignore[arg-type]
        model = sum(p.nbytes for p in policy.parameters())
        kept = run.recipe.policy.num_activations(run.spec.action.array.shape[0])
        kept += memory.image_activations(run)
        window = algorithm.window
        observed = window.past + 1 + window.ahead
        return offline.dataset_section(
            run,
            data.store,
            data.reads,
            (data.training, data.held_out),
            self.batch_size,
            {
                "train_batches": self.train_batches,
                "batch_size": self.batch_size,
                "window_observations": observed,
                "window_actions": window.actions,
            },
            notes=offline.imitation_notes(run.recipe, data),
            lines=[
                f"update: {self.train_batches:,} batches of {self.batch_size:,} windows of "
                f"{observed:,} observation(s) and {window.actions:,} action(s)"
            ],
            memory={
                "model": model,
                "gradient": model,
                "optimizer": 2 * model,
                **({"average": model} if self.average else {}),
            },
            estimates={"workspace": 4 * kept * self.batch_size * observed},
            training=algorithm.state_dict(),
        )


class BC(PolicyAlgorithm):
    """BC, as described in the module's docstring."""

    def __init__(
        self,
        config: BCConfig,
        policy: BasePolicy,
        training: EpisodesOf,
        held_out: EpisodesOf,
        device: torch.device,
    ) -> None:
        self.config, self.training, self.held_out = config, training, held_out
        self.learned, self.device = policy.to(device), device
        self.window = imitation_window(policy, config.horizon)
        self.optimizer = NetworkOptimizer("policy", self.learned, config.adam_epsilon)
        self.average = TargetNetwork(self.learned) if config.average else None
        self.policy = self.learned if self.average is None else self.average.module

    def ingest(self, fragments: Sequence[Fragment], clock: Clock) -> dict[str, float]:
        """Metrics: "dataset/passes", the mean number of times a step has been sampled after this
        iteration."""
        drawn = (clock.now.updates + self.config.train_batches) * self.config.batch_size
        return {"dataset/passes": drawn / self.training.num_transitions}

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        config = self.config
        if not clock.now.iterations:
            size = config.batch_size
            fit_normaliser(self.learned, [self.training], size, key.child("moments"))
            self.policy.normalisers.load_state_dict(self.learned.normalisers.state_dict())
        learning_rate = config.schedules(clock.progress)["learning_rate"]
        draws, chances = (key.child(name).generator() for name in ("windows", "noise"))
        drawn = (
            self.training.sample_windows(
                draws, config.batch_size, self.policy.observations, *self.window
            )
            for _ in range(config.train_batches)
        )
        for windows in ahead(drawn, config.prefetch):
            shown = self._shifted(self._put(windows), chances)
            loss = imitation_loss(self.learned, shown, chances)
            try:
                mean = float(self.optimizer.mean_gradient([loss]))
            except NonFinite as error:
                raise NonFinite(error.where, {**shown.obs, "actions": shown.actions}) from error
            norm = self.optimizer.norm
            self.optimizer.clip(norm, config.max_grad_norm)
            self.optimizer.step(learning_rate)
            if self.average is not None:
                self.average.follow(self.optimizer.flat.data, 1.0 - config.average)
            yield BatchMetrics(
                {LOSS: mean, "train/grad_norm": norm, "train/learning_rate": learning_rate}
            )

    def _put(self, windows: Windows) -> Demonstrations:
        obs = {name: self.put(array) for name, array in windows.obs.items()}
        return Demonstrations(obs, self.put(windows.actions), self.put(windows.valid))

    def _shifted(self, shown: Demonstrations, generator: np.random.Generator) -> Demonstrations:
        """Shift images at random, all images of a window by the same offset."""
        pixels, obs = self.config.random_shift, dict(shown.obs)
        for name in self.policy.image_names if pixels else ():
            images = obs[name]  # [n, steps, h, w, c]; steps become channels, shifted together
            num, steps, height, width, channels = images.shape
            joined = images.permute(0, 2, 3, 1, 4).reshape(num, height, width, steps * channels)
            moved = random_shift(joined, pixels, generator)
            parted = moved.view(num, height, width, steps, channels)
            obs[name] = parted.permute(0, 3, 1, 2, 4).contiguous()
        return shown._replace(obs=obs)

    def end_iteration(self) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The loss on evenly spaced steps of held-out episodes; {} without any."""
        lengths: Array = self.held_out.lengths[: self.held_out.num_whole]
        total = int(lengths.sum())
        if not total:
            return {}
        chosen = np.unique(np.linspace(0, total - 1, min(total, _EVALUATED)).astype(np.int64))
        ends = np.cumsum(lengths)
        places = ends.searchsorted(chosen, "right")
        offsets = chosen - (ends - lengths)[places]
        policy = self.policy
        generator, losses, weights = Key(0).child("evaluation").generator(), [], []
        for start in range(0, len(chosen), self.config.batch_size):
            part = slice(start, start + self.config.batch_size)
            windows = self.held_out.windows(
                places[part], offsets[part], policy.observations, *self.window
            )
            loss = imitation_loss(policy, self._put(windows), generator)
            losses.append(float(loss))
            weights.append(windows.valid.sum())
        return {EVAL_LOSS: float(np.average(losses, weights=weights))}

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        self.load_policy(arrays)
        load_arrays(self.learned, arrays)

    def check_unchanged(self) -> None:
        """Raise an error if a file of the dataset was changed."""
        self.training.check_unchanged()

    def state_dict(self) -> Tree:
        """All but the policy that acts, which is saved in `policy/`; if that is the average, this
        includes the trained weights."""
        learned = {} if self.average is None else {"weights": self.optimizer.flat.data.detach()}
        dataset = self.training.state_dict()
        return {"dataset": dataset, "optimizer": self.optimizer.state_dict(), **learned}

    def load_state_dict(self, state: Tree) -> None:
        self.training.load_state_dict(state["dataset"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.learned.normalisers.load_state_dict(self.policy.normalisers.state_dict())
            self.optimizer.flat.data.copy_(torch.as_tensor(state["weights"]))

    def close(self) -> None:
        self.training.close()
