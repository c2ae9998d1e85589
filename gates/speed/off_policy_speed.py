"""Gradient steps per second of SAC and TD3, against a hand-written loop of the same arithmetic.

    python -m gates.speed.off_policy_speed [--algorithm sac|td3|all] [--rounds 7] [--steps 100]

Sizes of HalfCheetah: 17 observations, 6 actions, two layers of 256, batches of 256. Etude's
side does everything of a gradient step in a run: a batch from a store on disk, noise from the run's
key, checks for non-finite numbers. The hand-written side has the same networks and losses, fused
Adam, gradients only where they are needed, and its minibatches and noise prepared. Both sides
alternate in one process on one thread; processor time is compared, which other work disturbs less
than wall-clock time. Each ratio must reach 0.85. Under a minute on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time as now
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from etude.core.clock import Clock, Loops
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.keys import Key
from etude.data.store.episodes import EpisodeStore
from etude.models.policies import PolicyConfig, make_policy
from etude.rl.off_policy import OffPolicy, ReplayGeometry
from etude.rl.rewards.given import GIVEN
from etude.rl.sac import SAC, SACConfig
from etude.rl.td3 import TD3, TD3Config
from etude.runs.files import Disk
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

GOAL = 0.85
OBS, ACTIONS, HIDDEN, BATCH, EPISODE = 17, 6, 256, 256, 1000
SPEC = EnvSpec(
    {"state": ArraySpec((OBS,))}, ActionSpec("box", (-1.0,) * ACTIONS, (1.0,) * ACTIONS), EPISODE
)


def filled_store(folder: Path, steps: int = 100_000) -> EpisodeStore:
    """Fill a replay with random numbers, in one lane with episodes of 1,000 steps."""
    geometry = ReplayGeometry(1, 100, BATCH, 1, 1).store(SPEC, 1_000_000)
    store, rng = EpisodeStore.create(folder / "replay", geometry, Disk()), np.random.default_rng(0)
    for _ in range(steps // EPISODE):
        store.append_episode(
            {"state": rng.standard_normal((EPISODE + 1, OBS), np.float32)},
            np.tanh(rng.standard_normal((EPISODE, ACTIONS), np.float32)),
            rng.standard_normal(EPISODE, np.float32),
            terminated=bool(rng.random() < 0.5),
        )
    return store


def learner(kind: str, store: EpisodeStore, steps: int) -> tuple[OffPolicy, Clock]:
    """Etude's algorithm, past its warm-up."""
    policy_kind = "squashed" if kind == "sac" else "deterministic"
    config = PolicyConfig(kind=policy_kind, hidden=(HIDDEN, HIDDEN), activation="relu")
    policy: Any = make_policy(config, SPEC, Key(0))
    parts = ([store], GIVEN, Key(1), torch.device("cpu"))
    sizes = {"train_batches": steps, "batch_size": BATCH, "warmup_steps": 0}
    agent = (
        SAC(SACConfig(**sizes), policy, *parts)
        if kind == "sac"
        else TD3(TD3Config(**sizes), policy, *parts)
    )
    return agent, Clock(Loops(1, 1, 1, 100, steps))


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, outputs),
    )


class ByHand:
    """The same gradient step, written as in a script."""

    def __init__(self, kind: str, store: EpisodeStore, steps: int) -> None:
        self.kind = kind
        self.actor = network(OBS, ACTIONS * (2 if kind == "sac" else 1))
        self.critics = [network(OBS + ACTIONS, 1) for _ in range(2)]
        self.targets = [network(OBS + ACTIONS, 1) for _ in range(2)]
        self.actor_target = network(OBS, ACTIONS)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.of_critics = [p for critic in self.critics for p in critic.parameters()]
        self.of_targets = [p for target in self.targets for p in target.parameters()]
        self.adams = [
            torch.optim.Adam(parameters, lr=3e-4, fused=True)
            for parameters in (self.of_critics, list(self.actor.parameters()), [self.log_alpha])
        ]
        rng = np.random.default_rng(1)
        self.minibatches = []
        for _ in range(steps):
            drawn = store.sample_transitions(rng, BATCH)
            arrays = (drawn.obs["state"], drawn.actions, drawn.rewards, drawn.next_obs["state"])
            keep = torch.from_numpy(1.0 - drawn.terminated.astype(np.float32))
            noise = torch.randn(2, BATCH, ACTIONS)
            self.minibatches.append((*(torch.from_numpy(a.copy()) for a in arrays), keep, *noise))

    def steps(self) -> Iterator[None]:
        return self.sac() if self.kind == "sac" else self.td3()

    def sample(self, obs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        actions = (mean + log_std.exp() * noise).tanh()
        log_prob = (-0.5 * noise.square() - log_std - 0.918938533).sum(-1)
        return actions, log_prob - (1 - actions.square() + 1e-6).log().sum(-1)

    def fit(self, obs: torch.Tensor, actions: torch.Tensor, wanted: torch.Tensor) -> None:
        x = torch.cat([obs, actions], -1)
        loss = sum(functional.mse_loss(q(x).squeeze(-1), wanted) for q in self.critics)
        self.adams[0].zero_grad()
        loss.backward()
        self.adams[0].step()

    def move_targets(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.of_targets, self.of_critics, 0.005)

    def least(self, networks: list[nn.Sequential], x: torch.Tensor) -> torch.Tensor:
        return torch.minimum(networks[0](x), networks[1](x)).squeeze(-1)

    def sac(self) -> Iterator[None]:
        for obs, actions, rewards, following, keep, noise, other in self.minibatches:
            own, log_prob = self.sample(obs, noise)
            alpha = self.log_alpha.detach().exp()
            alpha_loss = -(self.log_alpha * (log_prob - ACTIONS).detach()).mean()
            self.adams[2].zero_grad()
            alpha_loss.backward()
            self.adams[2].step()
            with torch.no_grad():
                then, chance = self.sample(following, other)
                value = self.least(self.targets, torch.cat([following, then], -1))
                wanted = rewards + 0.99 * keep * (value - alpha * chance)
            self.fit(obs, actions, wanted)
            for p in self.of_critics:
                p.requires_grad_(False)
            value = self.least(self.critics, torch.cat([obs, own], -1))
            loss = (alpha * log_prob - value).mean()
            self.adams[1].zero_grad()
            loss.backward()
            self.adams[1].step()
            for p in self.of_critics:
                p.requires_grad_(True)
            self.move_targets()
            yield

    def td3(self) -> Iterator[None]:
        of_target = list(self.actor_target.parameters())
        for i, (obs, actions, rewards, following, keep, noise, _) in enumerate(self.minibatches):
            with torch.no_grad():
                blur = (0.2 * noise).clamp(-0.5, 0.5)
                then = (self.actor_target(following).tanh() + blur).clamp(-1, 1)
                value = self.least(self.targets, torch.cat([following, then], -1))
                wanted = rewards + 0.99 * keep * value
            self.fit(obs, actions, wanted)
            if i % 2:
                for p in self.of_critics:
                    p.requires_grad_(False)
                loss = -self.critics[0](torch.cat([obs, self.actor(obs).tanh()], -1)).mean()
                self.adams[1].zero_grad()
                loss.backward()
                self.adams[1].step()
                for p in self.of_critics:
                    p.requires_grad_(True)
                self.move_targets()
                with torch.no_grad():
                    torch._foreach_lerp_(of_target, list(self.actor.parameters()), 0.005)
            yield


def ratio_of(kind: str, rounds: int, steps: int) -> float:
    """Gradient steps per second of Etude over those of the hand-written loop, timed in turn."""
    with TemporaryDirectory() as folder:
        store = filled_store(Path(folder))
        agent, clock = learner(kind, store, steps)
        hand = ByHand(kind, store, steps)
        times = SimpleNamespace(ours=[], bare=[])
        for i in range(rounds + 1):
            for taken, batches in (
                (times.ours, agent.batches(clock, Key(i))),
                (times.bare, hand.steps()),
            ):
                start = now()
                assert sum(1 for _ in batches) == steps
                taken.append(now() - start)
    ours, bare = np.array(times.ours[1:]), np.array(times.bare[1:])
    # Ratios of each round: the speed of the machine drifts more than the sides differ.
    ratio = float(np.median(bare / ours))
    speed, by_hand = steps / np.median(ours), steps / np.median(bare)
    print(f"{kind}: {speed:7.1f} steps/s, by hand {by_hand:7.1f}: {ratio:.3f}", flush=True)
    return ratio


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=("sac", "td3", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    options = parse(parser, {"rounds": 2, "steps": 20}, arguments)
    torch.set_num_threads(1)
    kinds = ("sac", "td3") if options.algorithm == "all" else (options.algorithm,)
    needs = {"rounds": len(kinds) * options.rounds}
    with Gate("off_policy_speed", options, needs=needs) as gate:
        report_load(gate)
        for kind in kinds:
            ratio = ratio_of(kind, options.rounds, options.steps)
            gate.count("rounds", options.rounds)
            gate.figure(f"{kind} over by hand", ratio, at_least=GOAL, timing=True)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
