"""Encoders of images, and policies that read images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.actor_critic import ActorCritic
from etude.models.encoders import (
    make_encoder,
    num_activations,
    random_shift,
    spatial_softmax,
    to_pixels,
)
from etude.models.networks import EncoderConfig, make_generator
from etude.models.policies import PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.planning import recipes
from toy_envs import BOX

SPEC = EnvSpec(
    {"image": ArraySpec((64, 48, 3), "uint8"), "state": ArraySpec((5,))},
    ActionSpec("box", low=(-1.0, -1.0), high=(1.0, 1.0)),
    10,
)
BOTH = ("image", "state")
SMALL = EncoderConfig(channels=(4, 4), features=6)


def observed(num: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(seed)
    image = generator.integers(0, 256, (num, 64, 48, 3)).astype(np.uint8)
    state = generator.standard_normal((num, 5)).astype(np.float32)
    return {"image": torch.from_numpy(image), "state": torch.from_numpy(state)}


@pytest.mark.parametrize("kind", ["cnn", "keypoints", "resnet18"])
def test_an_image_s_features_do_not_depend_on_its_batch(kind: str) -> None:
    config = EncoderConfig(kind=kind, features=7)
    encoder = make_encoder((64, 48, 3), config, make_generator(Key(0)))
    images = observed(3)["image"]
    together = encoder(images)
    assert together.shape == (3, 7)
    assert float(together.detach().abs().max()) <= 1.0
    alone = torch.cat([encoder(images[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone)
    assert len(set(together.detach().flatten().tolist())) == 21
    together.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in encoder.parameters())
    assert num_activations(config, (64, 48, 3)) > 64 * 48 * 3


def test_a_resnet18_has_its_known_size() -> None:
    """torchvision's without its last layer has 11,176,512 parameters, of which 9,600 are those of
    norms, which GroupNorm has as many of."""
    with torch.device("meta"):
        encoder = make_encoder((96, 96, 3), EncoderConfig(kind="resnet18", features=1), None)
    convolutions = sum(p.numel() for name, p in encoder.named_parameters() if "." in name)
    assert convolutions == 11_176_512


def test_spatial_softmax_finds_a_bright_place() -> None:
    x = torch.zeros(1, 2, 5, 9)
    x[0, 0, 0, 8] = x[0, 1, 4, 4] = 100.0
    across, down = spatial_softmax(x).view(2, 2).tolist()
    assert across == pytest.approx([1.0, 0.0])
    assert down == pytest.approx([-1.0, 1.0])


def test_keypoints_follow_a_thing_and_nothing_else() -> None:
    """A bright square that moves by 8 of 64 pixels moves the keypoints that see it by as much."""
    config = EncoderConfig(kind="keypoints", channels=(8, 8, 8), features=4)
    encoder = make_encoder((64, 64, 3), config, make_generator(Key(1)))
    with torch.no_grad():
        encoder._parameters["filter2"].mul_(100.0)  # so that the softmax is sharp
        images = torch.full((2, 64, 64, 3), 128, dtype=torch.uint8)
        images[0, 24:32, 24:32] = images[1, 24:32, 32:40] = 255
        places = encoder._convolve(to_pixels(images).permute(0, 3, 1, 2))
    moved = (places[1] - places[0]).view(2, 8)
    step = 8 / 4 * 2 / 15  # two of 16 places, from -1 to 1
    seen = moved[0].abs() > 0.5 * step
    assert bool(seen.any())
    torch.testing.assert_close(moved[0][seen], torch.full((int(seen.sum()),), step))
    torch.testing.assert_close(moved[1][seen], torch.zeros(int(seen.sum())), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["cnn", "keypoints"])
def test_an_encoder_without_convolutions_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"policy\.encoder\.channels must have"):
        recipes.pick_place_pictures().replace(
            policy__encoder__kind=kind, policy__encoder__channels=()
        )


def test_a_random_shift_is_a_crop_of_the_padded_image() -> None:
    images = observed(20)["image"]
    moved = random_shift(images, 3, np.random.default_rng(5))
    down, right = np.random.default_rng(5).integers(-3, 4, (2, 20, 1))
    padded = np.pad(images.numpy(), ((0, 0), (3, 3), (3, 3), (0, 0)), "edge")
    for i in range(20):
        y, x = 3 + int(down[i, 0]), 3 + int(right[i, 0])
        assert np.array_equal(moved[i].numpy(), padded[i, y : y + 64, x : x + 48])
    assert len({*zip(down.flat, right.flat, strict=True)}) > 10


@pytest.mark.parametrize("kind", ["mlp", "lstm", "squashed", "deterministic"])
@pytest.mark.parametrize("reads", [("image",), BOTH])
def test_a_policy_acts_by_what_it_sees_and_is_rebuilt(kind: str, reads: tuple[str, ...]) -> None:
    config = PolicyConfig(
        kind=kind, actor_reads=reads, critic_reads=BOTH, hidden=(8,), units=8, encoder=SMALL
    )
    policy = make_policy(config, SPEC, Key(3))
    obs, state = observed(4), {n: torch.from_numpy(x) for n, x in policy.initial_state(4).items()}
    actions = policy.act(obs, state, None).actions
    assert actions.shape == (4, 2)
    dark = policy.act({**obs, "image": obs["image"] // 2}, state, None).actions
    assert not torch.equal(actions, dark)
    again = policy_from_contract(policy.contract(), dict(policy.state_dict()))
    assert torch.equal(again.act(obs, state, None).actions, actions)
    assert set(policy.normalisers) == {"state"}


def test_actor_and_critic_of_ppo_share_an_encoder_and_both_teach_it() -> None:
    config = PolicyConfig(actor_reads=("image",), critic_reads=BOTH, hidden=(8,), encoder=SMALL)
    policy = make_policy(config, SPEC, Key(3))
    assert isinstance(policy, ActorCritic)
    features = policy.prepare(observed(6))
    assert features["actor"].shape == (6, 0)
    assert features["critic"].shape == (6, 5)
    evaluated = policy.evaluate(features, torch.zeros(6, 2), None)
    torch.testing.assert_close(policy.values(features, None), evaluated.values)
    grads = []
    for part in (evaluated.values.sum(), evaluated.log_probs.sum()):
        policy.zero_grad()
        part.backward(retain_graph=True)
        grads.append(policy.encoders["image"].weight.grad.abs().sum())  # type: ignore[index]
    assert all(float(g) > 0 for g in grads)


def test_raw_observations_are_not_normalised() -> None:
    config = PolicyConfig(raw=("state",), hidden=())
    policy = make_policy(config, SPEC, Key(1))
    obs = observed(4)
    assert torch.equal(policy.prepare(obs)["actor"], obs["state"])
    policy.absorb({"state": {"count": np.ones(()), "mean": np.ones(5), "m2": np.ones(5)}})
    assert torch.equal(policy.prepare(obs)["actor"], obs["state"])
    with pytest.raises(UsageError, match=r"policy\.raw names 'image'.*state"):
        make_policy(PolicyConfig(raw=("image",)), SPEC, None)


def test_what_is_neither_vector_nor_image_is_refused() -> None:
    tiny = EnvSpec({"state": ArraySpec((8, 8, 3), "uint8")}, BOX, 10)
    with pytest.raises(UsageError, match=r"8 x 8 pixels.*16 pixels or more"):
        make_policy(PolicyConfig(), tiny, None)
    floats = EnvSpec({"state": ArraySpec((8, 8, 3))}, BOX, 10)
    with pytest.raises(UsageError, match=r"vectors of float32 and images of uint8"):
        make_policy(PolicyConfig(), floats, None)
