"""Twin critics: two estimates of an action's value Q, and how such networks start out."""

from __future__ import annotations

import math

import torch
from torch import nn

from etude.models.networks import Mlp


def fan_in_mlp(sizes: tuple[int, ...], activation: str, generator: torch.Generator | None) -> Mlp:
    """Weights and biases uniform in +-1/sqrt(inputs) of their layer.

    What SAC and TD3 were tuned with: outputs near zero at the start, whatever the input.
    """
    network = Mlp(sizes, activation, 1.0, None)
    if generator is not None:
        with torch.no_grad():
            for i, inputs in enumerate(sizes[:-1]):
                bound = 1.0 / math.sqrt(inputs)
                for part in ("weight", "bias"):
                    network.get_parameter(f"{part}{i}").uniform_(-bound, bound, generator=generator)
    return network


class TwinCritics(nn.Module):
    """Two networks over features and action; the smaller estimate is the one to believe.

    Two plain networks and not one batched product: on a processor the latter is slower.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        hidden: tuple[int, ...],
        activation: str,
        generator: torch.Generator | None,
    ) -> None:
        """Without a generator the weights are about to be loaded (or on the meta device)."""
        super().__init__()
        sizes = (num_features + num_actions, *hidden, 1)
        self.first = fan_in_mlp(sizes, activation, generator)
        self.second = fan_in_mlp(sizes, activation, generator)

    def forward(
        self, features: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both estimates [n] of actions [n, dims] at features [n, num_features]."""
        x = torch.cat([features, actions], dim=-1)
        return self.first(x).squeeze(-1), self.second(x).squeeze(-1)

    def first_q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The first estimate alone, [n]."""
        estimate: torch.Tensor = self.first(torch.cat([features, actions], dim=-1)).squeeze(-1)
        return estimate

    def min_q(self, features: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """The smaller of both estimates, [n]."""
        return torch.minimum(*self(features, actions))
