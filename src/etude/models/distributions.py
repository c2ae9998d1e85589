"""Action distributions with explicit noise, so that a rollout is a pure function."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from etude.core.contracts import ActionSpec, Array, ArraySpec
from etude.core.errors import UsageError

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class DiagonalGaussian:
    """Independent Gaussians; `mean` [..., n], `log_std` [n] or [..., n]."""

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, size: int) -> Array:
        return generator.standard_normal((steps, num_envs, size), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [..., n] and their log-probabilities [...]."""
        # The noise is the standardised action, which saves the inverse.
        return self.actions(noise), self.log_density(noise, self.log_std)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        """Actions [..., n] of standard normal noise [..., n]."""
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def mode(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [...] of actions [..., n]."""
        return self.log_density((actions - self.mean) * (-self.log_std).exp(), self.log_std)

    @staticmethod
    def log_density(z: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        """Log density [...] of standardised actions [..., n], with few kernels."""
        exponents = torch.addcmul(log_std, z, z, value=0.5).sum(-1)
        return -_HALF_LOG_TWO_PI * z.shape[-1] - exponents

    def entropy(self) -> torch.Tensor:
        """[...], or [] if `log_std` is [n]."""
        return self.log_std.sum(-1) + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.shape[-1]

    def excess(self) -> torch.Tensor:
        """Squared distance [...] of the mean beyond [-1, 1], which clipping hides."""
        return functional.relu(self.mean.abs() - 1.0).square().sum(-1)


_MOST_SQUASHED = 1.0 - 1e-6
"""Largest squashed action: beyond it, the inverse of tanh is infinite in float32."""


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian squashed by tanh to (-1, 1).

    Densities are computed from the squashed action in rollouts and in training, so that the
    probability ratio of new actions is exactly 1.
    """

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = self.actions(noise)
        return actions, self.log_prob(actions)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        return super().actions(noise).tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def mode(self) -> torch.Tensor:
        return self.mean.tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [...]; divided by the derivative of tanh, 1 - tanh^2."""
        stretch = (1.0 - actions.square()).log().sum(-1)
        return super().log_prob(actions.atanh()) - stretch

    def entropy(self) -> torch.Tensor:
        """Approximate entropy [...]: of the Gaussian, corrected by the derivative of tanh at the
        mean."""
        # log(1 - tanh^2 x) = 2 (log 2 - x - softplus(-2 x)), without rounding to log 0.
        stretch = 2.0 * (math.log(2.0) - self.mean - functional.softplus(-2.0 * self.mean))
        return super().entropy() + stretch.sum(-1)

    def excess(self) -> torch.Tensor:
        """0 []: actions never leave their bounds."""
        return torch.zeros((), device=self.mean.device)


_FORBIDDEN = -1e9
"""Logit of a masked choice; its probability is exactly 0."""


class Categoricals:
    """Independent categoricals; `logits` [..., sum(sizes)], actions [..., choices].

    mask: [..., sum(sizes)], 0 for forbidden choices; None allows all.
    """

    def __init__(
        self, logits: torch.Tensor, sizes: tuple[int, ...], mask: torch.Tensor | None = None
    ) -> None:
        if mask is not None:
            logits = logits.masked_fill(mask == 0, _FORBIDDEN)
        self.log_probs = [part.log_softmax(-1) for part in torch.split(logits, list(sizes), dim=-1)]

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, choices: int) -> Array:
        return generator.random((steps, num_envs, choices), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and log-probabilities by the inverse cumulative distribution at uniform noise
        [..., choices]."""
        picks = []
        for i, part in enumerate(self.log_probs):
            sums = part.exp().cumsum(-1)
            # Rounded probabilities do not sum to exactly 1: without this scale, noise close to 1
            # could select a last choice of probability 0.
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
        """0 []: discrete actions have no bounds."""
        return torch.zeros((), device=self.log_probs[0].device)


def mask_spec(name: str, observations: dict[str, ArraySpec], action: ActionSpec) -> ArraySpec:
    """Spec of the observation that masks the choices; raises if it has no fitting shape."""
    size, spec = sum(action.sizes), observations.get(name)
    if not size:
        raise UsageError(f"policy.action_mask {name} is for discrete actions; these are a box.")
    if spec is None or spec.shape != (size,):
        found = "is not there" if spec is None else f"has the shape {spec.shape}"
        raise UsageError(
            f"policy.action_mask {name} must be an observation with a number for each of the "
            f"{size} choices; it {found}, among {', '.join(sorted(observations))}."
        )
    return spec
