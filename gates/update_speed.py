"""PPO gradient steps/s, against the same arithmetic written by hand in one loop.

    python gates/update_speed.py [--rounds 7]

The hand-written side has the same network, loss, clipping and fused Adam, one loop, and
minibatches gathered beforehand. Both sides alternate in one process on the same threads. Prints
the ratios last; exits 1 when the one at minibatch 512 or 4,096 is below 0.85 (64 is
reported), or 2 when the machine was too busy to judge.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import etude
from etude.algorithms.ppo import PPO
from etude.core.clock import Clock, ClockConfig, Nest
from etude.core.contracts import Fragment
from etude.core.keys import Key
from etude.envs.catalog import make_env
from etude.experience.segments import SegmentBuffer, SegmentGeometry
from etude.models.policies import make_policy
from etude.rollout.local import LocalCollector, Workers
from machine import report_load

GOAL = 0.85
JUDGED = (512, 4096)


def prepare(minibatch: int, rows: int, steps: int) -> tuple[PPO, list[Fragment], Clock]:
    """A PPO of the `reach` recipe with a buffer of real experience."""
    recipe = etude.recipes.reach()
    config = recipe.algorithm.model_copy(
        update={"rollout_steps": steps, "minibatch_size": minibatch, "update_epochs": 1}
    )
    env, key = make_env(recipe.env, rows), Key(0)
    geometry = SegmentGeometry(rows, steps, 1, minibatch, 1, rows)
    buffer = SegmentBuffer(env.spec, rows, steps)
    policy = make_policy(recipe.policy, env.spec, key.child("policy"))
    ppo = PPO(config, policy, geometry, buffer, torch.device("cpu"))
    workers = Workers(1)
    own = make_policy(recipe.policy, env.spec, None)
    collector = LocalCollector([env], own, key, workers, [buffer.part(slice(0, rows))])
    nest = Nest.of(ClockConfig(epochs=1), rows * steps, geometry.num_minibatches)
    clock = Clock(nest)
    fragments = collector.collect(ppo.broadcast(clock), 0)
    collector.close()
    return ppo, fragments, clock


class ByHand:
    """The same learning step, as one writes it in a script."""

    def __init__(self, ppo: PPO) -> None:
        shard, self.config = ppo.shards[0], ppo.config
        inputs, outputs = shard.features["actor"].shape[-1], shard.actions.shape[-1]
        hidden = ppo.policy.config.hidden
        self.actor = self._network(inputs, hidden, outputs)
        self.critic = self._network(inputs, hidden, 1)
        self.log_std = nn.Parameter(torch.full((outputs,), -1.2))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters(), self.log_std]
        self.adam = torch.optim.Adam(self.parameters, lr=1e-5, eps=1e-5, fused=True)
        size = ppo.geometry.minibatch
        flat = [
            shard.features["actor"].flatten(0, 1),
            shard.actions.flatten(0, 1),
            shard.log_probs.flatten(),
            shard.advantages.flatten(),
            shard.returns.flatten(),
        ]
        order = torch.randperm(len(flat[2]))
        self.minibatches = [
            [x[order[i : i + size]].contiguous() for x in flat] for i in range(0, len(order), size)
        ]

    @staticmethod
    def _network(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
        first, second = hidden
        return nn.Sequential(
            nn.Linear(inputs, first),
            nn.Tanh(),
            nn.Linear(first, second),
            nn.Tanh(),
            nn.Linear(second, outputs),
        )

    def steps(self) -> Iterator[None]:
        config = self.config
        for obs, actions, old, advantages, returns in self.minibatches:
            mean = self.actor(obs)
            z = (actions - mean) * (-self.log_std).exp()
            constant = self.log_std.sum() + 0.918938533 * actions.shape[-1]
            log_probs = -0.5 * z.square().sum(-1) - constant
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
            policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
            value_loss = (self.critic(obs).squeeze(-1) - returns).square().mean()
            entropy = constant + 0.5 * actions.shape[-1]
            excess = torch.relu(mean.abs() - 1.0).square().sum(-1).mean()
            loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
            loss = loss + config.bound_coef * excess
            self.adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
            self.adam.step()
            yield


def ratio_at(minibatch: int, rounds: int, rows: int = 512, steps: int = 64) -> float:
    ppo, fragments, clock = prepare(minibatch, rows, steps)
    ppo.ingest(fragments, clock)
    hand, count = ByHand(ppo), min(ppo.geometry.num_minibatches, 128)
    ours: list[float] = []
    bare: list[float] = []
    for i in range(rounds + 1):
        for steps_of, times in ((ppo.batches(clock, Key(i)), ours), (hand.steps(), bare)):
            start = time.perf_counter()
            for _ in zip(range(count), steps_of, strict=False):
                pass
            times.append(time.perf_counter() - start)
    speed, by_hand = count / np.median(ours[1:]), count / np.median(bare[1:])
    ratio = float(speed / by_hand)
    print(f"minibatch {minibatch:5d}: {speed:7.1f} steps/s, by hand {by_hand:7.1f}: {ratio:.3f}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    judged = report_load()
    torch.set_num_threads(options.threads)
    ratios = {size: ratio_at(size, options.rounds) for size in (64, *JUDGED)}
    worst = min(ratios[size] for size in JUDGED)
    print(f"update_speed {worst:.3f} (goal {GOAL})")
    return 0 if worst >= GOAL else (1 if judged else 2)


if __name__ == "__main__":
    sys.exit(main())
