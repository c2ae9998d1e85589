"""Proximal policy optimisation in one file: a tutorial, and a file to copy for your own algorithm.

    etude plan  examples/tutorial_ppo.py:cartpole    # what it will do, before it does it
    etude train examples/tutorial_ppo.py:cartpole    # half a minute
    etude train reach --algorithm.kind examples/tutorial_ppo.py:TutorialPPOConfig

An iteration, top to bottom:

1. The training loop collects a rollout of `rollout_steps` steps in each environment.
2. `ingest` scales rewards, predicts values, and computes advantages by GAE.
3. `batches` makes `update_epochs` passes over the rollout, a gradient step per minibatch.
4. `end_iteration` updates the running statistics that normalise observations.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field

import etude
from etude.plugin import (
    ActorCritic,
    BatchMetrics,
    Clock,
    Column,
    Curve,
    Fragment,
    Key,
    Metric,
    Metrics,
    NetworkOptimizer,
    OnPolicyConfig,
    PolicyAlgorithm,
    Ranks,
    Recipe,
    RewardScaler,
    RewardSource,
    SegmentBuffer,
    SegmentGeometry,
    Tree,
    UsageError,
    check_finite,
    join,
    merge_all,
    values_after,
)


class TutorialPPOConfig(OnPolicyConfig):
    """Proximal policy optimisation, from one file."""

    metrics: ClassVar[Metrics] = (
        Metric("train/approx_kl", "kl", ".4f", Column(20, 8), Curve(61, "magenta", (0, None))),
        Metric("train/clip_fraction", "clip", ".0%", Column(21, 7)),
        Metric("train/explained_variance", "explained", ".2f", Column(22, 10), Curve(62)),
    )
    takes_ranks: ClassVar[bool] = False  # a run in several processes is refused

    kind: str = "tutorial-ppo"
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate of Adam at the start.")
    final_learning_rate: float = Field(
        1.0, ge=0, le=1, description="Learning rate at the end as a fraction of learning_rate."
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount factor.")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of GAE.")
    clip: float = Field(0.2, gt=0, description="Clip range of the probability ratio around 1.")
    value_coef: float = Field(1.0, ge=0, description="Weight of half the squared value error.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    bound_coef: float = Field(
        0.1, ge=0, description="Weight of the loss that keeps a box policy's mean inside [-1, 1]."
    )
    max_grad_norm: float = Field(0.5, gt=0, description="Norm that gradients are clipped to.")

    def geometry(self, recipe: Recipe) -> SegmentGeometry:
        """How the rollout divides into minibatches; refuses what this file does not handle."""
        if recipe.policy.is_recurrent or recipe.collector.lag or recipe.task.num_agents > 1:
            raise UsageError(
                "The tutorial's PPO trains a policy without memory, of one agent, on what that "
                "policy has just done: use --policy.kind mlp and --collector.lag 0, or "
                "--algorithm.kind ppo."
            )
        return super().geometry(recipe)

    def make(self, *parts: Any) -> "TutorialPPO":
        return TutorialPPO(self, *parts)


class TutorialPPO(PolicyAlgorithm):
    """The learner: policy, optimizer and reward statistics. The training loop owns the rest."""

    policy: ActorCritic

    def __init__(
        self,
        config: TutorialPPOConfig,
        policy: ActorCritic,
        geometry: SegmentGeometry,
        buffers: Sequence[SegmentBuffer],
        device: torch.device,
        rewards: RewardSource,
        ranks: Ranks,
    ) -> None:
        self.config, self.geometry, self.buffers, self.rewards = config, geometry, buffers, rewards
        self.policy, self.device = policy.to(device), device
        self.optimizer = NetworkOptimizer("policy", self.policy, epsilon=1e-5)
        self.scaler = RewardScaler(geometry.num_envs, config.gamma)

    @torch.no_grad()
    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Turn what was collected into one batch of steps with advantages and returns."""
        config, envs = self.config, slice(0, self.geometry.num_envs)
        self.moments = merge_all([fragment.moments for fragment in fragments])
        rollout = join(fragments, self.buffers[0], envs)  # arrays [num_envs, steps, ...]
        check_finite(rollout, first_env=0)

        # Rewards of the environment, or of a reward source, over the std of discounted returns.
        (rewards,), metrics = self.rewards.relabel_rollouts([rollout])
        done = rollout.terminated | rollout.truncated
        self.scaler.absorb(
            self.scaler.observe(envs, rewards, done, rollout.present, rollout.restarted)
        )
        rewards = self.scaler.scale(rewards)

        features = self.prepare(rollout.obs)  # observations, normalised
        values = self.policy.values(features, None)
        advantages = gae(
            self.put(rewards),
            values,
            # V of what each step led to. Where a time limit cut the episode, that is the final
            # observation before the reset, not the first one of the next episode.
            values_after(
                rollout, values, lambda obs, _: self.policy.values(self.prepare(obs), None)
            ),
            self.put(rollout.terminated),
            self.put(done),
            config.gamma,
            config.gae_lambda,
        )
        returns = advantages + values
        metrics["train/explained_variance"] = float(1 - advantages.var() / (returns.var() + 1e-8))

        self.features = {name: x.flatten(0, 1) for name, x in features.items()}
        self.actions = self.put(rollout.actions).flatten(0, 1)
        self.log_probs = self.put(rollout.log_probs).flatten()
        self.returns = returns.flatten()
        self.advantages = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        return metrics

    def schedule(self, progress: float) -> float:
        """The learning rate at a progress from 0 (start of the run) to 1 (its end)."""
        return self.config.learning_rate * (1 + progress * (self.config.final_learning_rate - 1))

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """The gradient steps of an iteration; each yields its metrics."""
        yield from self.rewards.batches(key.child("rewards"))
        learning_rate = self.schedule(clock.progress)
        for epoch in range(self.config.update_epochs):
            order = key.child("permutation", epoch).generator().permutation(len(self.returns))
            for steps in self.put(order.reshape(-1, self.geometry.minibatch)):
                loss, metrics = self.loss(steps)
                self.optimizer.mean_gradient([loss])  # raises where it is not finite
                self.optimizer.clip(self.optimizer.norm, self.config.max_grad_norm)
                self.optimizer.step(learning_rate)
                yield BatchMetrics({**metrics, "train/learning_rate": learning_rate})

    def loss(self, steps: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss [] on a minibatch, steps [minibatch] of the rollout, and its metrics."""
        config, advantages = self.config, self.advantages[steps]
        features = {name: x[steps] for name, x in self.features.items()}
        now = self.policy.evaluate(features, self.actions[steps], None)

        log_ratio = now.log_probs - self.log_probs[steps]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        value_loss = 0.5 * (now.values - self.returns[steps]).square().mean()
        entropy = now.entropy.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        loss = loss + config.bound_coef * now.excess.mean()

        metrics = {
            "policy_gradient_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": -entropy,
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clip_fraction": (ratio != clipped).float().mean(),
        }
        return loss, {f"train/{name}": x.item() for name, x in metrics.items()}

    def end_iteration(self) -> dict[str, float]:
        """Only now: during the update, observations are normalised as they were for acting."""
        self.policy.absorb(self.moments)
        return {}

    def state_dict(self) -> Tree:
        """All that the next iteration needs, but for the policy, which is saved anyway."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "reward_scale": self.scaler.state_dict(),
            "reward_source": self.rewards.state_dict(),
        }

    def load_state_dict(self, state: Tree) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["reward_scale"])
        self.rewards.load_state_dict(state["reward_source"])


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    done: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Generalised advantage estimation; all arrays are [num_envs, steps]."""
    errors = rewards + gamma * next_values * ~terminated - values
    advantages, following = torch.zeros_like(errors), torch.zeros_like(errors[:, 0])
    for step in reversed(range(errors.shape[1])):
        following = errors[:, step] + gamma * gae_lambda * ~done[:, step] * following
        advantages[:, step] = following
    return advantages


def use_tutorial_ppo(recipe: Recipe) -> Recipe:
    """A recipe of the built-in PPO with the algorithm of this file, and the same settings."""
    shared = set(TutorialPPOConfig.model_fields) & set(type(recipe.algorithm).model_fields)
    settings = {f"algorithm__{name}": getattr(recipe.algorithm, name) for name in shared - {"kind"}}
    settings["algorithm__kind"] = f"{__file__}:TutorialPPOConfig"
    return recipe.replace(name=f"tutorial-{recipe.name}", **settings)


def cartpole() -> Recipe:
    """Gymnasium's CartPole-v1, by the PPO in this file."""
    return use_tutorial_ppo(etude.recipes.ppo())


def reach() -> Recipe:
    """A Kuka arm holds its hand at a random point, by the PPO in this file."""
    return use_tutorial_ppo(etude.recipes.reach())
