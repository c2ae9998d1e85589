"""Networks, and their parameters as one vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from etude.models.networks import ACTIVATIONS, FlatParameters, Mlp


def net(seed: int = 0) -> Mlp:
    return Mlp((4, 8, 6, 2), "tanh", 0.01, torch.Generator().manual_seed(seed))


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
    name, parameter = list(module.named_parameters())[2]
    assert parameter.grad is not None
    parameter.grad[1, 1] = float("nan")
    assert flat.first_bad_gradient() == name


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
