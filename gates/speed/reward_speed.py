"""Gradient steps per second of reward-only on images of 128 pixels, against bare torch.

    python -m gates.speed.reward_speed [--rounds 9] [--batches 20]

Etude: `RewardOnly.batches` on a sealed dataset, one subset of 32 steps per batch, with drawing,
reading from memory-mapped files, checks and metrics. Bare: the same network in torch's modules, the
same loss and torch's fused Adam in one loop, over 32 batches that are uint8 tensors in memory. Both
alternate in one process on one thread; processor time is compared, which other work disturbs less
than wall-clock time. The ratio must reach 0.85. About a minute on an idle machine; 200 MB of
temporary files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time as now

import numpy as np
import torch
from torch import nn

from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.data.store.episodes import EpisodeStore, StoreGeometry, Subsets
from etude.data.store.geometry import store_specs
from etude.rl.reward_only import RewardOnly, RewardOnlyConfig, make_reward_only
from etude.rl.rewards.rrd import RRDConfig
from etude.runs.files import Disk
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GOAL = 0.85
PIXELS, STATE, ACTIONS, STEPS = 128, 9, 7, 32
LENGTH = 100
"""Steps per episode."""


def make_dataset(path: Path, episodes: int) -> EpisodeStore:
    """Make a dataset of noise in the shapes of demonstrations, with successes and failures."""
    observations = {
        "image": ArraySpec((PIXELS, PIXELS, 3), "uint8"),
        "state": ArraySpec((STATE,)),
    }
    action = ActionSpec("box", (-1.0,) * ACTIONS, (1.0,) * ACTIONS)
    specs = store_specs(EnvSpec(observations, action, max_episode_steps=None))
    store = EpisodeStore.create(path, StoreGeometry(specs, 1, LENGTH), Disk())
    rng = np.random.default_rng(0)
    for number in range(episodes):
        obs = {
            "image": rng.integers(0, 256, (LENGTH + 1, PIXELS, PIXELS, 3), np.uint8),
            "state": rng.standard_normal((LENGTH + 1, STATE), np.float32),
        }
        rewards = np.zeros(LENGTH, np.float32)
        rewards[-1] = number % 2
        actions = rng.uniform(-1, 1, (LENGTH, ACTIONS)).astype(np.float32)
        store.append_episode(obs, actions, rewards, True)
    return store.seal()


class Bare(nn.Module):
    """The same arithmetic in torch's modules."""

    def __init__(self, shift: torch.Tensor, scale: torch.Tensor) -> None:
        """`shift` and `scale` normalise the vectors."""
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((6, 16), (16, 32), (32, 32), (32, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.ReLU(inplace=True)]
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.project = nn.Linear((PIXELS // 16) ** 2 * 32, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        sizes = (64 + 2 * STATE + ACTIONS, 256, 256)
        self.layers = nn.Sequential(
            nn.Linear(sizes[0], sizes[1]),
            nn.ReLU(inplace=True),
            nn.Linear(sizes[1], sizes[2]),
            nn.ReLU(inplace=True),
            nn.Linear(sizes[2], 1),
        )
        self._shift, self._scale = shift, scale

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        both = torch.cat([batch["image"], batch["next_image"]], -1).float().mul_(2 / 255).sub_(1)
        x = self.convolutions(both.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1)
        x = self.norm(self.project(x)).tanh()
        state = batch["state"]
        vectors = torch.cat([state, state - batch["next_state"], batch["actions"]], -1)
        vectors = torch.addcmul(self._shift, vectors, self._scale).clamp_(-10, 10)
        found: torch.Tensor = self.layers(torch.cat([vectors, x], -1))
        return found.squeeze(-1)


def tensors(subsets: Subsets) -> dict[str, torch.Tensor]:
    """One batch in memory for the bare side."""
    steps = subsets.steps
    named = {"image": steps.obs["image"], "next_image": steps.next_obs["image"]}
    named |= {"state": steps.obs["state"], "next_state": steps.next_obs["state"]}
    named |= {"actions": steps.actions}
    batch = {n: torch.from_numpy(array.reshape(-1, *array.shape[2:])) for n, array in named.items()}
    batch["target"] = torch.from_numpy(subsets.returns / subsets.lengths).float()
    return batch


def bare_side(store: EpisodeStore, ours: RewardOnly) -> Callable[[int, int], None]:
    torch.manual_seed(0)
    normaliser = ours.rrd.network.normaliser
    net = Bare(normaliser.shift.clone(), normaliser.scale.clone())
    optimizer = torch.optim.Adam(net.parameters(), 3e-4, fused=True)
    drawn = [store.sample_subsets(Key(1).child(i).generator(), 1, STEPS) for i in range(32)]
    batches = [tensors(subsets) for subsets in drawn]

    def run(start: int, num: int) -> None:
        for i in range(start, start + num):
            batch = batches[i % len(batches)]
            y = net(batch).view(1, STEPS)
            correction = (1 - STEPS / LENGTH) * y.var(1) / STEPS
            loss = ((y.mean(1) - batch["target"]).square() - correction).mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()

    return run


def our_side(model: RewardOnly, batches: int) -> Callable[[int, int], None]:
    clock = Clock(Loops(1 << 20, 1, 1, 0, batches))

    def run(start: int, num: int) -> None:
        taken = sum(1 for _ in model.batches(clock, Key(2).child("update", start)))
        assert taken == num

    return run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="Alternations that are timed.")
    parser.add_argument("--batches", type=int, default=20, help="Gradient steps of a round.")
    parser.add_argument("--episodes", type=int, default=40, help="of the dataset")
    options = parse(parser, {"rounds": 2, "batches": 5, "episodes": 8}, arguments)
    torch.set_num_threads(1)
    with Gate("reward_speed", options, needs={"rounds": options.rounds}) as gate:
        report_load(gate)
        ratios = measure(options)
        gate.count("rounds", len(ratios))
        gate.figure("ours over bare torch", median(ratios), at_least=GOAL, timing=True)
    return gate.code


def measure(args: argparse.Namespace) -> list[float]:
    """Train both sides in turn; return the ratios of the rounds."""
    with TemporaryDirectory() as folder:
        store = make_dataset(Path(folder) / "data", args.episodes)
        config = RewardOnlyConfig(
            dataset=str(store.path), rrd=RRDConfig.image(), train_batches=args.batches
        )
        ours = make_reward_only(config, store, torch.device("cpu"), Key(0))
        sides = {"ours": our_side(ours, args.batches), "bare": bare_side(store, ours)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for r in range(args.rounds + 1):
            for name, run in sides.items():
                begin = now()
                run(r * args.batches, args.batches)
                if r:  # the first round is a warm-up and computes the normaliser
                    seconds[name].append(now() - begin)
    rates = {name: args.batches / median(times) for name, times in seconds.items()}
    ratios = [bare / own for own, bare in zip(seconds["ours"], seconds["bare"], strict=True)]
    print(f"gradient steps/s: ours {rates['ours']:.1f}, bare {rates['bare']:.1f}")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
