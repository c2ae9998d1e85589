"""Distributions of discrete actions, and masks of the choices that are allowed."""

from __future__ import annotations

import numpy as np
import torch

from etude.core.contracts import ActionSpec, Array, ArraySpec
from etude.core.errors import UsageError

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
