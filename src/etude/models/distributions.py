"""Action distributions whose randomness is handed in, so that a rollout is a pure function."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from etude.core.contracts import Array

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class DiagonalGaussian:
    """Independent normals around `mean` [..., n]; `log_std` is [n], shared, or [..., n]."""

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
        """[...], or [] where the spread does not depend on the observation."""
        return self.log_std.sum(-1) + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.shape[-1]

    def excess(self) -> torch.Tensor:
        """[...] squared distance by which the mean leaves [-1, 1], where clipping hides it."""
        return functional.relu(self.mean.abs() - 1.0).square().sum(-1)
