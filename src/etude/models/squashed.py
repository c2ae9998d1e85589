"""Box actions that tanh keeps inside their bounds."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from etude.models.distributions import DiagonalGaussian

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
