"""Multi-layer perceptrons."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etude.models.networks import ACTIVATIONS, Mlp


def net(seed: int = 0) -> Mlp:
    return Mlp((4, 8, 6, 2), "tanh", 0.01, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_against_a_chain_of_torch_modules(activation: str) -> None:
    module = Mlp((8, 8, 8), activation, 0.01, torch.Generator().manual_seed(0))
    first, first_bias, last, last_bias = module.parameters()
    torch.testing.assert_close(first @ first.T, 2.0 * torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(8), atol=1e-8, rtol=0)
    assert float(first_bias.detach().abs().sum()) == float(last_bias.detach().abs().sum()) == 0.0
    kinds = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
    chain = nn.Sequential(nn.Linear(8, 8), kinds[activation](), nn.Linear(8, 8))
    chain.load_state_dict(
        {"0.weight": first, "0.bias": first_bias + 0.1, "2.weight": last, "2.bias": last_bias + 1.0}
    )
    with torch.no_grad():
        first_bias += 0.1
        last_bias += 1.0
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module(x), chain(x))


def test_initial_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    one = net()
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), net().parameters(), strict=True))
