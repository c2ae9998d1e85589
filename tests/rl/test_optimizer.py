"""Parameters as one vector, and the gradient step that all algorithms share."""

from __future__ import annotations

import math

import pytest
import torch

from etude.core.errors import NonFinite
from etude.models.networks import Mlp
from etude.rl.base import Finding, FlatParameters, NetworkOptimizer, TargetNetwork


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


def test_a_target_goes_part_of_the_way() -> None:
    module, start = net(), torch.cat([p.detach().reshape(-1) for p in net().parameters()])
    target = TargetNetwork(module)
    flat = FlatParameters(module)
    flat.data.add_(1.0)
    target.follow(flat.data, 0.25)
    torch.testing.assert_close(target.data, start + 0.25)
    assert not any(p.requires_grad for p in target.module.parameters())
    assert torch.equal(next(target.module.parameters()).reshape(-1), target.data[:32])


def losses(module: Mlp, num: int) -> list[torch.Tensor]:
    x = torch.randn(num, 5, 4, generator=torch.Generator().manual_seed(3))
    return [module(part).square().mean() for part in x]


def test_the_mean_of_the_shards_losses_and_its_gradient() -> None:
    module, plain = net(), net()
    optimizer = NetworkOptimizer("network", module, 1e-8)
    optimizer.flat.grad.fill_(7.0)  # What an earlier step left is not added to.
    mean = optimizer.mean_gradient(losses(module, 3))
    expected = torch.stack(losses(plain, 3)).mean()
    expected.backward()
    torch.testing.assert_close(mean, expected.detach())
    grads = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(optimizer.flat.grad, grads)


def test_totals_are_summed_beside_the_gradient() -> None:
    optimizer, total = NetworkOptimizer("network", net(), 1e-8), torch.full((2,), 9.0)
    for part in optimizer.in_shard_order([1.0, 2.0], total):
        total += part
        optimizer.flat.grad[0] += part
    assert total.tolist() == [3.0, 3.0]
    assert float(optimizer.flat.grad[0]) == 3.0
    assert float(optimizer.flat.grad.abs().sum()) == 3.0


def test_only_long_gradients_are_clipped() -> None:
    optimizer = NetworkOptimizer("network", net(), 1e-8)
    optimizer.flat.grad[:2] = torch.tensor([3.0, 4.0])
    norm = optimizer.checked_norm(0.0, [], lambda shard: ("", {}))
    assert norm == 5.0
    optimizer.clip(norm, 6.0)
    assert optimizer.flat.grad[:2].tolist() == [3.0, 4.0]
    optimizer.clip(norm, 1.0)
    torch.testing.assert_close(optimizer.flat.grad[:2], torch.tensor([0.6, 0.8]))


def test_what_is_not_finite_names_its_shard_and_brings_its_arrays() -> None:
    optimizer = NetworkOptimizer("network", net(), 1e-8)

    def inspect(shard: int) -> Finding:
        optimizer.flat.grad.zero_()
        return ("the action" if shard == 1 else ""), {"x": shard}

    with pytest.raises(NonFinite) as caught:
        optimizer.checked_norm(math.nan, [0, 1, 2], inspect)
    assert caught.value.where == "the action (shard 1)"
    assert caught.value.arrays == {"shard0_x": 0, "shard1_x": 1}
    name, parameter = list(optimizer.flat.named.items())[1]
    assert parameter.grad is not None
    parameter.grad[0] = math.inf
    with pytest.raises(NonFinite) as caught:
        optimizer.checked_norm(0.0, [0], inspect)
    assert caught.value.where == f"the gradient of '{name}' of the network"
    with pytest.raises(NonFinite, match="the norm of the gradient of the network"):
        optimizer.checked_norm(math.inf, [0], inspect)
