"""Adam on one vector, against torch's."""

from __future__ import annotations

import pytest
import torch

from etude.core.trees import copy_arrays
from etude.rl import base as optimizer
from etude.rl.base import Adam

SIZE, EPSILON = 50, 1e-5


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator) * 10.0 ** (i % 5 - 3) for i in range(count)]


@pytest.mark.parametrize("fused", [True, False])
def test_steps_equal_those_of_torch(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the private kernel takes the same steps, to within rounding."""
    assert optimizer.FUSED is not None
    if not fused:
        monkeypatch.setattr(optimizer, "FUSED", None)
    start = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    data, grad = start.clone(), torch.zeros(SIZE)
    ours = Adam(data, grad, EPSILON)
    theirs_data = start.clone().requires_grad_()
    theirs = torch.optim.Adam([theirs_data], eps=EPSILON)
    for i, gradient in enumerate(gradients(30)):
        rate = 0.1 / (1 + i)
        grad.copy_(gradient)
        ours.step(rate)
        theirs_data.grad = gradient.clone()
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
    torch.testing.assert_close(data, theirs_data.detach(), atol=1e-6, rtol=1e-5)
    (known,) = theirs.state.values()
    torch.testing.assert_close(ours.mean, known["exp_avg"], atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(ours.square, known["exp_avg_sq"], atol=1e-7, rtol=1e-5)
    assert float(ours.count) == 30


def test_a_state_round_trip_changes_no_bit() -> None:
    data, grad = torch.zeros(SIZE), torch.zeros(SIZE)
    one = Adam(data, grad, EPSILON)
    given = gradients(10)
    for gradient in given[:5]:
        grad.copy_(gradient)
        one.step(0.1)
    other_data, other_grad = data.clone(), torch.zeros(SIZE)
    other = Adam(other_data, other_grad, EPSILON)
    saved = {name: value.numpy() for name, value in copy_arrays(one.state_dict()).items()}
    other.load_state_dict(saved)
    for gradient in given[5:]:
        grad.copy_(gradient)
        other_grad.copy_(gradient)
        one.step(0.1)
        other.step(0.1)
    assert torch.equal(data, other_data)
    assert not torch.equal(data, torch.zeros(SIZE))
