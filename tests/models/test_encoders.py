"""Images to features: shapes, bytes, and that what is in the picture matters."""

from __future__ import annotations

import pytest
import torch

from etude.core.errors import UsageError
from etude.models.encoders import EncoderConfig, ImageEncoder, stack_channels, to_pixels


def encoder(shape: tuple[int, int, int], seed: int | None = 0) -> ImageEncoder:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return ImageEncoder(shape, EncoderConfig(), generator)


def images(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("size", [(64, 64), (84, 84), (97, 65), (128, 128), (256, 256), (16, 31)])
def test_any_size_becomes_features(size: tuple[int, int]) -> None:
    features = encoder((*size, 3))(images(2, *size, 3))
    assert features.shape == (2, 64)
    assert features.dtype == torch.float32
    assert bool((features.abs() <= 1).all())


def test_pixels_are_between_minus_one_and_one_and_bytes_stay_as_they_are() -> None:
    stored = images(2, 16, 16, 3)
    before = stored.clone()
    pixels = to_pixels(stored)
    assert torch.equal(stored, before)
    torch.testing.assert_close(pixels, stored.double().mul(2 / 255).sub(1).float())


def test_it_is_torchs_convolutions_in_another_memory_order() -> None:
    net, stored = encoder((32, 48, 3)), images(3, 32, 48, 3)
    x = to_pixels(stored).permute(0, 3, 1, 2).contiguous()
    for i in range(4):
        weight, bias = net._parameters[f"filter{i}"], net._parameters[f"bias{i}"]
        assert weight is not None
        x = torch.nn.functional.conv2d(x, weight, bias, stride=2, padding=1).relu()
    x = x.permute(0, 2, 3, 1).reshape(3, -1) @ net.weight.T
    expected = torch.nn.functional.layer_norm(x, (64,)).tanh()
    torch.testing.assert_close(net(stored), expected, rtol=1e-4, atol=1e-5)


def test_every_parameter_and_every_region_moves_the_features() -> None:
    net, stored = encoder((64, 64, 3)), images(2, 64, 64, 3)
    weights = torch.randn(64, generator=torch.Generator().manual_seed(2))
    before = net(stored)
    (before @ weights).sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().max() > 0), name
    for row in range(0, 64, 16):
        for column in range(0, 64, 16):
            other = stored.clone()
            other[:, row : row + 16, column : column + 16] ^= 255
            assert not torch.allclose(net(other), before)


def test_channels_are_stacked_as_cat_does() -> None:
    parts = [images(2, 5, 7, 3), images(2, 5, 7, 1), images(2, 5, 7, 3)]
    stacked = stack_channels(parts)
    assert torch.equal(stacked, torch.cat(parts, -1))
    assert stacked.is_contiguous()


def test_weights_come_from_the_generator_alone() -> None:
    torch.manual_seed(1)
    one = encoder((32, 32, 3)).state_dict()
    torch.manual_seed(2)
    again, other = encoder((32, 32, 3)).state_dict(), encoder((32, 32, 3), seed=5).state_dict()
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["filter0"], other["filter0"])


def test_the_meta_device_counts_without_memory() -> None:
    with torch.device("meta"):
        net = encoder((256, 256, 6), seed=None)
    assert all(p.is_meta for p in net.parameters())
    real = encoder((256, 256, 6))
    assert [p.shape for p in net.parameters()] == [p.shape for p in real.parameters()]
    assert sum(p.numel() for p in net.parameters()) == (
        (6 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + 2 * (32 * 9 + 1) * 32 + 16 * 16 * 32 * 64 + 2 * 64
    )


def test_images_too_small_to_halve_are_refused() -> None:
    with pytest.raises(UsageError, match="16 pixels or more"):
        encoder((12, 64, 3))
