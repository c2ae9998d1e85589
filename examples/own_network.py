"""Train a network of your own: an `nn.Module` as actor and as critic.

    python examples/own_network.py [--steps 24576] [--folder runs/own-network]
    etude train reach --policy.kind examples/own_network.py:GatedConfig --policy.width 128

Etude adds the action distribution and the normalisation of observations. Checkpoints and exports
work as with a built-in policy, and fields of the config are options of the command line.
"""

import argparse

import torch
from pydantic import Field
from torch import nn

import etude
from etude.plugin import ModulePolicyConfig


class GatedNetwork(nn.Module):
    """Two layers whose outputs are multiplied by a gate that is computed from the input."""

    def __init__(self, num_inputs: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(num_inputs, width), nn.Linear(num_inputs, width)
        self.hidden, self.output = nn.Linear(width, width), nn.Linear(width, num_outputs)
        nn.init.zeros_(self.output.weight)  # at first, the mean action and the value are 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., num_inputs], normalised; returns [..., num_outputs]."""
        x = torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x))
        x = self.output(torch.tanh(self.hidden(x)))
        return x


class GatedConfig(ModulePolicyConfig):
    """Gated networks as actor and as critic."""

    width: int = Field(64, ge=1, description="Units of each layer.")

    def network(self, num_inputs: int, num_outputs: int) -> nn.Module:
        return GatedNetwork(num_inputs, num_outputs, self.width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24_576)
    parser.add_argument("--folder", default="runs/own-network")
    options = parser.parse_args()

    recipe = etude.recipes.reach_short().replace(
        name="own-network",
        policy__kind=f"{__file__}:GatedConfig",  # a class by its file, or as module:GatedConfig
        policy__width=48,
        policy__init_std=0.3,
        clock__total_timesteps=options.steps,
    )
    run = etude.train(recipe, options.folder)
    print(f"Trained in {run.path}: {run.policy()}")
    metrics = run.evaluate(episodes=50)
    print(f"50 fresh episodes: {metrics['eval/success_rate']:.0%} succeed")


if __name__ == "__main__":
    main()
