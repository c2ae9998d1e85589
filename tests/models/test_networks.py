"""Networks, and their parameters as one vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etude.models.networks import ACTIVATIONS, FlatParameters, mlp


def net(seed: int = 0) -> nn.Sequential:
    return mlp((4, 8, 6, 2), "tanh", 0.01, torch.Generator().manual_seed(seed))


def test_gradients_through_the_flat_vector_are_the_ordinary_ones() -> None:
    plain, flat_net = net(), net()
    flat = FlatParameters(flat_net)
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # gradients add up in both
        plain(x).square().mean().backward()
        flat_net(x).square().mean().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    assert torch.equal(flat.grad, expected)
    assert flat.num_tensors == 6


def test_a_step_of_the_flat_vector_moves_the_module() -> None:
    module = net()
    flat = FlatParameters(module)
    flat.data.mul_(2.0)
    expected = [2.0 * p for p in net().parameters()]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected, strict=True))


def test_loading_a_state_keeps_the_views() -> None:
    module = net()
    flat = FlatParameters(module)
    module.load_state_dict(net(seed=7).state_dict())
    assert torch.equal(flat.data, torch.cat([p.reshape(-1) for p in net(seed=7).parameters()]))
    flat.data.zero_()
    assert all(float(p.detach().abs().sum()) == 0.0 for p in module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    assert float(flat.grad.abs().sum()) > 0.0


def test_the_first_bad_gradient_is_named() -> None:
    module = net()
    flat = FlatParameters(module)
    assert flat.first_bad_gradient() is None
    module[2].weight.grad[1, 1] = float("nan")
    assert flat.first_bad_gradient() == "2.weight"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layers_are_orthogonal_with_their_gain(activation: str) -> None:
    module = mlp((8, 8, 8), activation, 0.01, torch.Generator().manual_seed(0))
    first, last = module[0].weight, module[2].weight
    torch.testing.assert_close(first @ first.T, 2.0 * torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(8), atol=1e-8, rtol=0)
    assert float(module[0].bias.detach().abs().sum()) == 0.0


def test_initial_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    one = net()
    torch.manual_seed(2)
    assert all(
        torch.equal(a, b) for a, b in zip(one.parameters(), net().parameters(), strict=True)
    )
