"""Reward networks: what they read, in which units, and their way through a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from etude.core.contracts import ActionSpec, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.reward_networks import (
    RewardNetwork,
    RewardNetworkConfig,
    make_reward_network,
    reward_network_from_contract,
)

OBSERVATIONS = {
    "state": ArraySpec((3,)),
    "hand": ArraySpec((2,), "float64"),
    "image": ArraySpec((32, 32, 3), "uint8"),
    "wrist": ArraySpec((16, 16, 1), "uint8"),
    "grid": ArraySpec((4, 4)),
}
KEY = Key(3)
BOX = ActionSpec("box", (-1.0,) * 2, (1.0,) * 2)
CHOICES = ActionSpec("multi_discrete", sizes=(3, 4))
Named = dict[str, torch.Tensor]


def network(*reads: str, action: ActionSpec = BOX, key: Key | None = KEY) -> RewardNetwork:
    config = RewardNetworkConfig(reads=reads, hidden=(8,))
    return make_reward_network(config, OBSERVATIONS, action, key)


def steps(num: int, action: ActionSpec = BOX) -> tuple[Named, torch.Tensor, Named]:
    rng = np.random.default_rng(5)

    def observe() -> Named:
        made = {}
        for name, spec in OBSERVATIONS.items():
            shape = (num, *spec.shape)
            image = spec.dtype == "uint8"
            array = rng.integers(0, 256, shape) if image else rng.normal(size=shape)
            made[name] = torch.from_numpy(array.astype(spec.dtype))
        return made

    if action.kind == "box":
        actions = torch.from_numpy(rng.normal(size=(num, 2)).astype(np.float32))
    else:
        actions = torch.from_numpy(rng.integers(0, action.sizes, (num, len(action.sizes))))
    return observe(), actions, observe()


READS = [("state",), ("state", "hand"), ("image",), ("image", "wrist", "hand", "state")]


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("action", [BOX, CHOICES])
def test_one_number_a_step(reads: tuple[str, ...], action: ActionSpec) -> None:
    net, (obs, actions, after) = network(*reads, action=action), steps(5, action)
    rewards = net(obs, actions, after)
    assert rewards.shape == (5,)
    for i in range(5):
        one = ({n: x[i : i + 1] for n, x in o.items()} for o in (obs, after))
        alone = net(next(one), actions[i : i + 1], next(one))
        torch.testing.assert_close(alone, rewards[i : i + 1], rtol=1e-4, atol=1e-6)


def test_vectors_are_state_change_and_action() -> None:
    net, (obs, actions, after) = network("state", "hand"), steps(4)
    expected = np.concatenate(
        [
            obs["state"],
            obs["hand"],
            obs["state"] - after["state"],
            obs["hand"].float() - after["hand"].float(),
            actions,
        ],
        axis=1,
    )
    np.testing.assert_array_equal(net.vectors(obs, actions, after), expected.astype(np.float32))
    assert net.num_vectors == 12
    assert network("image", action=CHOICES).num_vectors == 0


@pytest.mark.parametrize("reads", READS)
def test_all_of_s_a_and_next_s_count(reads: tuple[str, ...]) -> None:
    net, (obs, actions, after) = network(*reads), steps(4)
    before = net(obs, actions, after)
    for name in reads:
        for side in (obs, after):
            kept, side[name] = side[name], side[name].flip(0)
            assert not torch.allclose(net(obs, actions, after), before), name
            side[name] = kept
    assert not torch.allclose(net(obs, actions.flip(0), after), before)


def test_images_stay_bytes_and_are_read_with_what_follows() -> None:
    net, (obs, actions, after) = network("image"), steps(3)
    kept = {n: x.clone() for n, x in {**obs, **{f"n{k}": v for k, v in after.items()}}.items()}
    net(obs, actions, after).sum().backward()
    assert all(torch.equal(kept[n], x) for n, x in obs.items())
    assert all(torch.equal(kept[f"n{n}"], x) for n, x in after.items())
    seen = []
    net.encoders[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net(obs, actions, after)
    assert torch.equal(seen[0], torch.cat([obs["image"], after["image"]], dim=-1))


def test_units_are_shift_and_scale() -> None:
    net, (obs, actions, after) = network("state"), steps(4)
    y = net.outputs(obs, actions, after)
    assert torch.equal(net(obs, actions, after), y)
    assert float(y.detach().abs().max()) < 0.1  # told nothing, it says nothing
    net.shift.fill_(2.0)
    net.scale.fill_(0.5)
    torch.testing.assert_close(net(obs, actions, after), 2.0 + 0.5 * y)


@pytest.mark.parametrize("action", [BOX, CHOICES])
def test_a_checkpoint_holds_all_of_it(action: ActionSpec) -> None:
    net, data = network("image", "state", action=action), steps(4, action)
    net.scale.fill_(3.0)
    size = net.num_vectors
    rng = np.random.default_rng(0)
    net.normaliser.absorb(
        {"count": np.asarray(9.0), "mean": rng.random(size), "m2": 9 * rng.random(size)}
    )
    contract = json.loads(json.dumps(net.contract()))
    assert contract["kind"] == "reward"
    arrays = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    again = reward_network_from_contract(contract, arrays)
    assert torch.equal(again(*data), net(*data))
    with pytest.raises(UsageError, match="not a reward network"):
        reward_network_from_contract({"format": 1, "policy": {}}, arrays)


def test_the_meta_device_counts_without_memory() -> None:
    with torch.device("meta"):
        net = network("image", "state", key=None)
    real = network("image", "state")
    assert all(p.is_meta for p in net.parameters())
    assert [p.shape for p in net.parameters()] == [p.shape for p in real.parameters()]


def test_what_it_cannot_read_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'nothing'.*there are grid, hand"):
        network("nothing")
    with pytest.raises(UsageError, match=r"'grid' is float32 of shape \(4, 4\)"):
        network("grid")


@pytest.mark.parametrize(
    ("there", "reads"),
    [
        # LIBERO: two cameras of different sizes, and what the arm feels.
        (
            {"agent": (64, 64, 3), "hand": (32, 32, 3), "joints": (7,), "ee": (3,)},
            {"agent", "hand", "joints", "ee"},
        ),
        # robomimic: what only the simulator knows is left out where a camera sees the task.
        ({"cam": (64, 64, 3), "object": (10,), "eef": (3,)}, {"cam", "eef"}),
        ({"object": (10,), "eef": (3,)}, {"object", "eef"}),
        # One's own recordings: progress is the answer, and the state is the simulator's.
        (
            {"image": (64, 64, 3), "state": (9,), "proprio": (4,), "progress": (1,)},
            {"image", "proprio"},
        ),
        ({"image": (64, 64, 3), "state": (9,)}, {"image", "state"}),
        ({"state": (9,), "proprio": (4,), "progress": (1,)}, {"state", "proprio"}),
        # Too small for the encoder, and no vector: nothing that is read by itself.
        ({"tactile": (8, 8, 1), "depth": (64, 64), "joints": (7,)}, {"joints"}),
        ({"joints": (7,), "done": (1,)}, {"joints"}),
    ],
)
def test_without_names_it_reads_images_and_what_a_robot_feels(
    there: dict[str, tuple[int, ...]], reads: set[str]
) -> None:
    specs = {n: ArraySpec(s, "uint8" if len(s) == 3 else "float32") for n, s in there.items()}
    found = RewardNetworkConfig(reads=()).with_reads(specs, but="done")
    assert set(found.reads) == reads
    named = RewardNetworkConfig(reads=("joints",))
    assert named.with_reads(specs) is named


def test_where_nothing_can_be_read_it_says_so() -> None:
    with pytest.raises(UsageError, match="by default among progress"):
        RewardNetworkConfig(reads=()).with_reads({"progress": ArraySpec((1,))})
