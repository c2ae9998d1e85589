"""Action distributions whose randomness is handed in, so that a rollout is a pure function."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn import functional

from etude.core.contracts import ActionSpec, Array, ArraySpec
from etude.core.errors import UsageError

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


_MOST_SQUASHED = 1.0 - 1e-6
"""The largest action that tanh gives: beyond it the way back is infinite in float32."""


class SquashedGaussian(DiagonalGaussian):
    """A normal action squashed by tanh: actions stay inside (-1, 1).

    Densities are computed from the squashed action, in training as in a rollout, so that the
    probability ratio of an action that was just taken is 1.
    """

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = self.actions(noise)
        return actions, self.log_prob(actions)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        return super().actions(noise).tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def mode(self) -> torch.Tensor:
        return self.mean.tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """[...]: tanh stretches space by 1 - tanh^2, and a density shrinks by it."""
        stretch = (1.0 - actions.square()).log().sum(-1)
        return super().log_prob(actions.atanh()) - stretch

    def entropy(self) -> torch.Tensor:
        """[...]: that of the normal, and what tanh changes at the mean; there is no closed form."""
        # log(1 - tanh^2 x) = 2 (log 2 - x - softplus(-2 x)), without rounding to log 0.
        stretch = 2.0 * (math.log(2.0) - self.mean - functional.softplus(-2.0 * self.mean))
        return super().entropy() + stretch.sum(-1)

    def excess(self) -> torch.Tensor:
        """[] nothing: actions never leave their bounds."""
        return torch.zeros((), device=self.mean.device)


_FORBIDDEN = -1e9
"""The logit of a choice that a mask forbids; its probability is exactly 0."""


class Categoricals:
    """One or several independent choices; `logits` [..., sum(sizes)], actions [..., choices].

    mask: [..., sum(sizes)], 0 where a choice is forbidden; None allows all.
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


def mask_spec(name: str, observations: dict[str, ArraySpec], action: ActionSpec) -> ArraySpec:
    """What an environment observes as the mask of its choices; refused where that is none."""
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
