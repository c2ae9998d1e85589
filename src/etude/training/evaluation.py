"""Evaluation: separate environments, separate keys, most likely actions, frozen statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from pydantic import Field, model_validator

from etude.core.clock import IntervalText
from etude.core.config import Config
from etude.core.contracts import KINDS, Array, BatchEnv, Broadcast, EnvSpec, Policy
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.trees import Tree
from etude.rollout.group import Watch, evaluate
from etude.rollout.local import GROUP, GROUPS, Tries, Workers

EPISODES = 10_000_000
"""The maximum of an evaluation: statistics of all episodes are in memory."""


class EvaluationConfig(Config):
    """When and how the policy is evaluated."""

    renamed = {"rows": "num_envs", "group_rows": "envs_per_group"}  # noqa: RUF012
    aliases = {  # noqa: RUF012
        "every": "eval_freq eval_interval",
        "episodes": "n_eval_episodes eval_episodes",
    }

    every: IntervalText = Field("1 epoch", description="How often; the run's end always counts.")
    episodes: int = Field(
        100,
        ge=1,
        le=EPISODES,
        description="Episodes of each evaluation; the same number in every environment.",
    )
    num_envs: int = Field(
        100, ge=1, le=GROUPS, description="Parallel environments; divides episodes."
    )
    envs_per_group: int = Field(
        50, ge=1, le=GROUP, description="Environments that are stepped together; divides num_envs."
    )
    stop_at_success: float | None = Field(
        None, gt=0, le=1, description="End the run after an evaluation with this success rate."
    )
    final_episodes: int = Field(
        100,
        ge=0,
        le=EPISODES,
        description="Episodes of the evaluation at the end of `etude train`; 0 for none.",
    )
    final_video: bool = Field(
        False, description="Film that evaluation; TensorBoard and W&B get pictures of it."
    )

    film_every: IntervalText = Field(
        "never",
        description="How often a film of the policy is drawn while it trains, for example '500000 "
        "steps': in evaluations/<step>-film, TensorBoard and W&B.",
    )

    @model_validator(mode="after")
    def _divides(self) -> EvaluationConfig:
        if self.episodes % self.num_envs or self.num_envs % self.envs_per_group:
            raise ValueError(
                f"evaluation.episodes {self.episodes} must be a multiple of evaluation.num_envs "
                f"{self.num_envs}, and that of evaluation.envs_per_group {self.envs_per_group}: "
                f"for {self.episodes} episodes num_envs={self.episodes} and "
                f"envs_per_group={self.episodes} always work"
            )
        return self


class EvaluationResult(NamedTuple):
    """The result of an evaluation."""

    metrics: dict[str, float]
    is_best: bool
    """Whether it is the best of the run so far."""
    episodes: dict[str, Array]
    """{name: [n] float64} of the episodes; {} where none were played."""


class AnyEvaluator(ABC):
    """Base of evaluators, with the best result so far."""

    def __init__(self) -> None:
        self.best: tuple[float, float] | None = None
        self.num_done = self.num_episodes = 0

    @abstractmethod
    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        """Evaluate the policy of a broadcast."""

    def state_dict(self) -> Tree:
        return {
            "best": list(self.best) if self.best else None,
            "num_done": self.num_done,
            "num_episodes": self.num_episodes,
        }

    def load_state_dict(self, state: Tree) -> None:
        self.best = tuple(state["best"]) if state["best"] else None
        self.num_done, self.num_episodes = int(state["num_done"]), int(state["num_episodes"])

    def close(self) -> None:  # noqa: B027 - there may be nothing to close
        """Close the environments, if any."""


class Evaluator(AnyEvaluator):
    """Evaluates by playing episodes in its own environments, with the most likely actions."""

    def __init__(
        self, envs: Sequence[BatchEnv], policy: Policy, episodes: int, key: Key, workers: Workers
    ) -> None:
        """policy: overwritten in each evaluation."""
        super().__init__()
        names = [f"group {g} of the evaluation" for g in range(len(envs))]
        self._envs = [*map(workers.guard, envs, names)]
        self._policy, self._workers, self.key = policy, workers, key
        self._episodes_per_env = episodes // sum(env.num_envs for env in envs)
        self._largest = 0.0
        """The largest mean reward of all evaluations with the best success rate."""

    @property
    def spec(self) -> EnvSpec:
        return self._envs[0].spec

    @property
    def num_per_evaluation(self) -> int:
        """Episodes of an evaluation."""
        return self._episodes_per_env * sum(env.num_envs for env in self._envs)

    def episodes(
        self,
        broadcast: Broadcast,
        label: str | int,
        stochastic: bool = False,
        tick: Callable[[float], None] = lambda done: None,
    ) -> dict[str, Array]:
        """Play episodes; returns their statistics {name: [episodes] float64}.

        label: another label gives other episodes. stochastic: sample actions as in training. tick:
        called by the playing threads with the number of episodes done, including fractions.
        """
        self._policy.load_state_dict(broadcast.policy)
        longest, done = self.spec.max_episode_steps or np.inf, [0.0] * len(self._envs)

        def watch(group: int, counted: Array, lengths: Array) -> None:
            whole = counted >= self._episodes_per_env
            done[group] = float(np.where(whole, counted, counted + lengths / longest).sum())
            wait.done = int(sum(done))
            tick(sum(done))

        with waiting("evaluating", self.num_per_evaluation, "episodes") as wait:
            parts = self._workers.run(
                [
                    partial(self._played, g, label, stochastic, partial(watch, g))
                    for g in range(len(self._envs))
                ]
            )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _played(self, g: int, label: str | int, stochastic: bool, watch: Watch) -> dict[str, Array]:
        """A group's episodes, repeated from the first if its environments are lost."""
        env, key, episodes = self._envs[g], self.key.child(label, g), self._episodes_per_env
        play = partial(evaluate, env, self._policy, episodes, key, stochastic, watch)
        return Tries(env.name, self._workers.say).call(play)

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        """Evaluate on new episodes."""
        episodes = self.episodes(broadcast, broadcast.version)
        metrics = summarise(episodes)
        self.num_done += 1
        self.num_episodes += int(metrics["eval/episodes"])
        return EvaluationResult(metrics, self._is_best(metrics, sampling_error(episodes)), episodes)

    def _is_best(self, metrics: dict[str, float], error: float) -> bool:
        """Compare by success rate, then by mean reward; of about equal ones the later is better.

        With few episodes many policies have the same success rate, and the order of their mean
        rewards is mostly chance: a mean reward that is lower by at most its standard error counts
        as equal, and that policy has trained longer. It is compared with the largest of all, so
        that it cannot drift down; `best` is the result of the policy that is kept.
        """
        success, reward = metrics.get("eval/success_rate", 0.0), metrics["eval/mean_reward"]
        known = self.best
        if known is None or success > known[0]:
            self._largest = reward
        elif success < known[0] or reward < self._largest - error:
            return False
        self.best, self._largest = (success, reward), max(reward, self._largest)
        return True

    def state_dict(self) -> Tree:
        return {**super().state_dict(), "largest": self._largest}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self._largest = float(state["largest"])

    def close(self) -> None:
        for env in self._envs:
            env.close()


class HeldOutEvaluator(AnyEvaluator):
    """Evaluates on held-out episodes of a dataset.

    The episodes are the same in every evaluation, without randomness: the higher score is better,
    without a tolerance.
    """

    def __init__(
        self,
        metrics_of: Callable[[], dict[str, float]],
        episodes: int,
        score: str | None = None,
        loss: str = "",
        low: str = "",
        chance: float = -np.inf,
    ) -> None:
        """metrics_of: computes the metrics of an evaluation; episodes: their number.

        score: the metric whose highest value is the best; None if the newest is the best. loss: the
        metric whose lowest value is the best among equal scores. low: a metric that must be above
        `chance` for an evaluation to be the best.
        """
        super().__init__()
        self._metrics_of, self._episodes = metrics_of, episodes
        self._score, self._loss, self._low, self._chance = score, loss, low, chance

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        metrics = self._metrics_of()
        self.num_done += 1
        self.num_episodes += self._episodes
        unscored = self._score is None or self._score not in metrics
        found = (metrics.get(self._score or "", -1.0), -metrics.get(self._loss, 0.0))
        by_chance = metrics.get(self._low, np.inf) <= self._chance
        is_best = unscored or (not by_chance and (self.best is None or found >= self.best))
        if is_best:
            self.best = found
        return EvaluationResult(metrics, is_best, {})

    def state_dict(self) -> Tree:
        return {**super().state_dict(), "score": self._score}

    def load_state_dict(self, state: Tree) -> None:
        """A best result by another score, of an earlier version for example, is discarded."""
        super().load_state_dict(state)
        if state.get("score") != self._score:
            self.best = None


def sampling_error(episodes: dict[str, Array]) -> float:
    """The standard error of the mean reward of evaluation episodes {name: [n]}.

    All evaluations play the same motions, so differences between motions are not sampling error:
    only the variance of returns within motions counts. It is 0 if every episode of a motion starts
    at a fixed frame.
    """
    returns = episodes["return"]
    motions = episodes.get("motion", np.zeros(len(returns)))
    _, place, counts = np.unique(motions, return_inverse=True, return_counts=True)
    means = np.bincount(place, returns) / counts
    variances = np.bincount(place, np.square(returns - means[place])) / counts
    return float(np.sqrt((variances / counts).sum()) / len(counts))


def summarise(episodes: dict[str, Array]) -> dict[str, float]:
    """Mean, standard deviation, success rate, length and number of evaluation episodes {name: [n]}.

    For motions, means are per motion first, and errors are also given for successes alone.
    """
    moving = "motion" in episodes
    if moving:
        from etude.data.motion.metrics import ERRORS, by_motion, only_successes
    means = _means(by_motion(episodes) if moving else episodes)
    metrics = {
        "eval/mean_reward": means.pop("return"),
        "eval/std_reward": float(episodes["return"].std()),
        "eval/mean_ep_length": means.pop("length"),
        "eval/episodes": float(len(episodes["return"])),
    }
    if "is_success" in means:
        metrics["eval/success_rate"] = means.pop("is_success")
    metrics |= {f"eval/{name}": value for name, value in means.items()}
    if moving and episodes["is_success"].any():
        won = _means(by_motion(only_successes(episodes)))
        metrics |= {f"eval/{name}_of_successes": won[name] for name in ERRORS if name in won}
    return metrics


def _means(episodes: dict[str, Array]) -> dict[str, float]:
    """Means of all statistics except categories and reward terms."""
    return {
        name: float(values.mean())
        for name, values in episodes.items()
        if name not in KINDS and not name.startswith("reward/")
    }
