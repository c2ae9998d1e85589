"""A network that tells one way of moving from another, by short windows of motion."""

from __future__ import annotations

import torch
from torch import nn

from etude.models.networks import Mlp
from etude.models.normalise import Normaliser


class Discriminator(nn.Module):
    """A logit for a window [frames, features]: above 0 it is taken for the reference's.

    A feature is normalised in the same way in every frame of a window, so that its change from
    one frame to the next keeps its meaning. At the start the logit is about 0: an untrained
    network prefers neither.
    """

    def __init__(
        self, window: tuple[int, int], hidden: tuple[int, ...], generator: torch.Generator | None
    ) -> None:
        """Without a generator the weights are about to be loaded (or on the meta device)."""
        super().__init__()
        frames, features = window
        self.normaliser = Normaliser(features)
        self.layers = Mlp((frames * features, *hidden, 1), "relu", 0.01, generator)

    def inputs(self, windows: torch.Tensor) -> torch.Tensor:
        """Raw windows [n, frames, features] as the layers read them: [n, frames * features]."""
        return self.normaliser(windows).flatten(1)  # type: ignore[no-any-return]

    def logits_of(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [n] of normalised inputs [n, frames * features]."""
        return self.layers(inputs).squeeze(-1)  # type: ignore[no-any-return]

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Logits [n] of raw windows [n, frames, features]."""
        return self.logits_of(self.inputs(windows))

    def slopes(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n] of normalised inputs, and ||d logit / d input||^2 [n], both with gradients."""
        inputs = inputs.detach().requires_grad_()
        logits = self.logits_of(inputs)
        (gradient,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        return logits, gradient.square().sum(-1)

    def weights(self) -> list[torch.Tensor]:
        """The matrices, without biases; the last one makes the logit."""
        return [p for name, p in self.layers.named_parameters() if name.startswith("weight")]
