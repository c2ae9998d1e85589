"""Running mean and variance in float64 (Chan), and normalisation of observations and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from etude.core.contracts import Array
from etude.core.trees import Tree

EPSILON = 1e-8
CLIP = 10.0


def merge_moments(left: Tree, right: Tree) -> Tree:
    """Merge the moments of two samples (Chan): {"count" [], "mean" [n], "m2" [n]} float64."""
    count = left["count"] + right["count"]
    if float(count) == 0.0:
        return left
    delta = right["mean"] - left["mean"]
    share = right["count"] / count
    return {
        "count": np.asarray(count),
        "mean": left["mean"] + delta * share,
        "m2": left["m2"] + right["m2"] + delta**2 * left["count"] * share,
    }


def merge_all(parts: Sequence[dict[str, Tree]]) -> dict[str, Tree]:
    """Merge the moments of several samples of named arrays, {name: moments}, in order."""
    return {name: reduce(merge_moments, [part[name] for part in parts]) for name in parts[0]}


def no_moments(size: int) -> Tree:
    """Moments of an empty sample."""
    return {"count": np.zeros(()), "mean": np.zeros(size), "m2": np.zeros(size)}


def moments(array: Array) -> Tree:
    """Count, mean [n] and sum of squared deviations [n], float64, of vectors [..., n]."""
    flat = array.reshape(-1, array.shape[-1]).astype(np.float64)
    if not len(flat):  # The mean of no vectors would be NaN.
        return no_moments(flat.shape[1])
    with np.errstate(invalid="ignore"):  # The learner reports non-finite values.
        mean = flat.mean(axis=0)
        flat -= mean
        squares = np.einsum("ij,ij->j", flat, flat)
    return {"count": np.asarray(float(len(flat))), "mean": mean, "m2": squares}


class Normaliser(nn.Module):
    """(x - mean) / std, clipped to +-10; changed only by the learner's calls of `absorb`.

    Statistics are float64, rounded to float32 when they are applied.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size), persistent=False)
        self.register_buffer("scale", torch.ones(size), persistent=False)
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, _: module._refresh()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] float32, raw."""
        return torch.addcmul(self.shift, x, self.scale).clamp_(-CLIP, CLIP)

    def absorb(self, moments: Tree) -> None:
        """Merge the moments of newly collected observations."""
        known = {name: getattr(self, name).cpu().numpy() for name in ("count", "mean", "m2")}
        for name, value in merge_moments(known, moments).items():
            getattr(self, name).copy_(torch.as_tensor(value))
        self._refresh()

    def _refresh(self) -> None:
        if float(self.count) == 0.0:
            self.shift.zero_()
            self.scale.fill_(1.0)
            return
        variance = self.m2 / self.count
        # A constant column is not scaled: its variance is rounding noise.
        scale = torch.where(variance > EPSILON, (variance + EPSILON).rsqrt(), 1.0)
        self.scale.copy_(scale)
        self.shift.copy_(-self.mean * scale)


class RewardScaler:
    """Divides rewards by the standard deviation of the discounted return, clipped to +-10.

    State: the moments of the running return and the running return of each environment.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.running = np.zeros(num_envs)
        self.moments = no_moments(1)

    def observe(
        self, envs: slice, rewards: Array, done: Array, present: Array, restarted: Array
    ) -> Tree:
        """Update the running returns by a shard's rewards [num_envs, steps]; returns their moments.

        done, present: [num_envs, steps] bool; steps without an agent are ignored.
        restarted: [num_envs] bool, a new episode began before the first step.
        """
        returns = np.empty(rewards.shape)
        running = np.where(restarted, 0.0, self.running[envs])
        for step in range(rewards.shape[1]):
            earned = np.where(present[:, step], rewards[:, step], 0.0)
            running = running * self.gamma + earned
            returns[:, step] = running
            running = np.where(done[:, step], 0.0, running)
        self.running[envs] = running
        if not present.all():
            returns = returns[present]
        if not returns.size:
            return no_moments(1)
        mean = returns.mean()
        return {
            "count": np.asarray(float(returns.size)),
            "mean": np.asarray([mean]),
            "m2": np.asarray([((returns - mean) ** 2).sum()]),
        }

    def absorb(self, moments: Tree) -> None:
        self.moments = merge_moments(self.moments, moments)

    def scale(self, rewards: Array) -> Array:
        """Scale and clip rewards [num_envs, steps], float32."""
        variance = float(self.moments["m2"][0]) / max(float(self.moments["count"]), 1.0)
        scaled: Array = np.clip(rewards / np.sqrt(variance + EPSILON), -CLIP, CLIP)
        return scaled.astype(np.float32)

    def state_dict(self) -> Tree:
        return {"running": self.running.copy(), "moments": dict(self.moments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.running = np.array(state["running"])
        self.moments = self.moments_in(state)

    @staticmethod
    def moments_in(state: dict[str, Any]) -> Tree:
        """The moments in a `state_dict`, without the running returns."""
        return {name: np.asarray(value) for name, value in state["moments"].items()}
