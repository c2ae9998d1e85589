"""Action distributions whose randomness is handed in, so that a rollout is a pure function."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from etude.core.contracts import Array

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class DiagonalGaussian:
    """Independent normals around `mean` [..., n] with shared `log_std` [n]."""

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, size: int) -> Array:
        return generator.standard_normal((steps, num_envs, size), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [..., n] and their log-probabilities [...]."""
        # The noise is the standardised action: the density needs no way back from the action.
        return self.actions(noise), self.log_density(noise, self.log_std)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        """[..., n]: those that standard normal noise [..., n] leads to."""
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def mode(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """[...]: log density of actions [..., n]."""
        return self.log_density((actions - self.mean) * (-self.log_std).exp(), self.log_std)

    @staticmethod
    def log_density(z: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        """[...] of standardised actions [..., n], in as few kernels as it takes."""
        exponents = torch.addcmul(log_std, z, z, value=0.5).sum(-1)
        return -_HALF_LOG_TWO_PI * z.shape[-1] - exponents

    def entropy(self) -> torch.Tensor:
        """[] the same everywhere: the spread does not depend on the observation."""
        return self.log_std.sum() + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.numel()

    def excess(self) -> torch.Tensor:
        """[...] squared distance by which the mean leaves [-1, 1], where clipping hides it."""
        return functional.relu(self.mean.abs() - 1.0).square().sum(-1)


class Categoricals:
    """One or several independent choices; `logits` [..., sum(sizes)], actions [..., choices]."""

    def __init__(self, logits: torch.Tensor, sizes: tuple[int, ...]) -> None:
        self.log_probs = [part.log_softmax(-1) for part in torch.split(logits, list(sizes), dim=-1)]

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, choices: int) -> Array:
        return generator.random((steps, num_envs, choices), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and their log-probabilities, by the inverse cumulative distribution at uniform
        noise [..., choices]."""
        picks = []
        for i, part in enumerate(self.log_probs):
            sums = part.exp().cumsum(-1)
            # Rounded probabilities sum to just beside 1: without their sum as the scale, noise
            # close to 1 could pick a last choice of probability 0.
            picks.append((sums[..., :-1] <= noise[..., i : i + 1] * sums[..., -1:]).sum(-1))
        actions = torch.stack(picks, dim=-1)
        return actions, self.log_prob(actions)

    def mode(self) -> torch.Tensor:
        return torch.stack([part.argmax(-1) for part in self.log_probs], dim=-1)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=actions.device)
        for i, part in enumerate(self.log_probs):
            total = total + part.gather(-1, actions[..., i : i + 1]).squeeze(-1)
        return total

    def entropy(self) -> torch.Tensor:
        """[...]"""
        total = torch.zeros((), device=self.log_probs[0].device)
        for part in self.log_probs:
            total = total - (part.exp() * part).sum(-1)
        return total

    def excess(self) -> torch.Tensor:
        """[] nothing: a choice has no bounds to leave."""
        return torch.zeros((), device=self.log_probs[0].device)


Distribution = DiagonalGaussian | Categoricals
"""Actions [..., n] given parameters; batch shapes are whatever the parameters have."""
