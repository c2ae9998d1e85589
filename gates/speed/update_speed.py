"""Gradient steps per second of PPO, against a hand-written loop of the same arithmetic.

    python -m gates.speed.update_speed [--geometry small|scale|all] [--rounds 7]

The hand-written side has the same networks, loss, clipping and fused Adam, one loop, and
minibatches gathered beforehand; its LSTM is torch's over whole segments, which ignores starts of
episodes. Both sides alternate in one process on one thread; processor time is compared, which other
work disturbs less than wall-clock time.

small  minibatches of 64, 512 and 4,096 of `reach`; 512 and 4,096 must reach 0.85.
scale  the geometry of `reach-at-scale`, 8,192 x 64 steps in 32 minibatches, its experience from
       an environment of random numbers whose episodes start every 200 steps. An MLP must reach
       0.9 and the LSTM 0.8, and bookkeeping (advantages, priorities, permutation and copying)
       must be less than 3 % of the whole update, uniform and prioritised.

About three minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from time import process_time as now
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import etude
from etude.core.clock import Clock, ClockConfig, Loops
from etude.core.contracts import Array, BatchEnv, EnvSpec, Fragment, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.data import returns as returns_module
from etude.data.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.models.actor_critic import ActorCritic
from etude.models.networks import RewardScaler
from etude.models.policies import make_policy
from etude.planning.recipes import Recipe
from etude.rl import on_policy
from etude.rl import ppo as ppo_module
from etude.rl.on_policy import Shard
from etude.rl.ppo import PPO
from etude.rollout.local import CollectorConfig, LocalCollector, Workers
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

SMALL_GOAL = 0.85
SMALL_JUDGED = (512, 4096)
SCALE_GOALS = {"mlp": 0.9, "lstm": 0.8}
SCALE_BATCHES = {"mlp": 32, "lstm": 8}
"""Gradient steps of a round, out of 32."""
OVERHEAD_GOAL = 0.03
EPISODE = 200


class RandomNumbers:
    """A `BatchEnv` of noise in the shapes of another, for experience of any size in seconds.

    Episodes end only by truncation, in different rows at different steps.
    """

    def __init__(self, spec: EnvSpec, rows: int, first_row: int) -> None:
        self.spec = replace(spec, max_episode_steps=EPISODE, statistics=())
        self.num_envs = rows
        # The episodes of neighbouring rows end far apart.
        self._elapsed = (first_row + np.arange(rows)) * 77 % EPISODE
        self._random = np.random.default_rng(first_row)

    def _observe(self, rows: int) -> Observations:
        return {
            name: self._random.standard_normal((rows, *spec.shape), np.float32)
            for name, spec in self.spec.observations.items()
        }

    def reset(self, key: Key) -> Observations:
        return self._observe(self.num_envs)

    def step(self, actions: Array) -> StepResult:
        self._elapsed += 1
        truncated = self._elapsed >= EPISODE
        self._elapsed[truncated] = 0
        ended = np.flatnonzero(truncated)
        return StepResult(
            obs=self._observe(self.num_envs),
            reward=self._random.standard_normal(self.num_envs, np.float32),
            terminated=np.zeros(self.num_envs, np.bool_),
            truncated=truncated,
            final_envs=ended,
            final_obs=self._observe(len(ended)),
        )

    def snapshot(self) -> Tree:
        return {"elapsed": self._elapsed.copy()}

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._elapsed[:] = snapshot["elapsed"]

    def close(self) -> None:
        pass


def learner(recipe: Recipe, real: bool) -> tuple[PPO, list[Fragment], Clock]:
    """The PPO of a recipe with a full buffer, from the real environment or from noise."""
    config, key, group = recipe.algorithm, Key(0), recipe.collector.envs_per_group
    rows, steps, horizon = recipe.collector.num_envs, config.rollout_steps, config.horizon
    cut = SegmentGeometry(rows, steps, horizon, config.minibatch_size, recipe.learner.shards, group)
    spec = recipe.env.make(1).spec
    envs: list[BatchEnv] = [
        recipe.env.make(group) if real else RandomNumbers(spec, group, g * group)
        for g in range(cut.num_groups)
    ]
    policy = make_policy(recipe.policy, spec, key.child("policy"))
    buffer = SegmentBuffer(BufferSpec(spec, policy.state_specs, rows, steps, horizon))
    ppo = PPO(config, policy, cut, [buffer], torch.device("cpu"))
    own = make_policy(recipe.policy, spec, None)
    groups = CollectorConfig(num_envs=cut.num_envs, envs_per_group=cut.envs_per_group)
    parts = [[buffer.part(groups.part(g)) for g in range(groups.num_groups)]]
    collector = LocalCollector(envs, own, key, Workers(2), parts)
    clock = Clock(Loops.of(ClockConfig(epochs=1), rows * steps, cut.num_minibatches))
    fragments = collector.collect(ppo.broadcast(clock), 0)
    collector.close()
    return ppo, fragments, clock


def small(minibatch: int, rows: int = 512, steps: int = 64) -> Recipe:
    """The `reach` recipe with one pass over its buffer."""
    made: Recipe = etude.recipes.reach().replace(
        collector__num_envs=rows,
        collector__envs_per_group=rows,
        algorithm__rollout_steps=steps,
        algorithm__minibatch_size=minibatch,
        algorithm__update_epochs=1,
    )
    return made


def at_scale(kind: str, rows: int = 8192, sampling: str = "prioritised") -> Recipe:
    """`reach-at-scale` with this kind of policy and a buffer of `rows` rows of 64 steps."""
    recipe = etude.recipes.reach_at_scale()
    made: Recipe = recipe.replace(
        policy__kind=kind,
        collector__num_envs=rows,
        collector__envs_per_group=min(rows // 2, recipe.collector.envs_per_group),
        algorithm__sampling=sampling,
    )
    return made


class ByHand(nn.Module):
    """The same gradient step, written as in a script."""

    def __init__(self, ppo: PPO) -> None:
        super().__init__()
        self.config, policy = ppo.config, ppo.policy.config
        inputs, outputs = (
            ppo.shards[0].features["actor"].shape[-1],
            ppo.shards[0].actions.shape[-1],
        )
        self.recurrent = policy.kind != "mlp"
        if self.recurrent:
            self.encoder = nn.Sequential(*_layers((inputs, *policy.hidden)), nn.Tanh())
            self.core = nn.LSTM(policy.hidden[-1], policy.units)
            self.actor: nn.Module = nn.Linear(policy.units, outputs)
            self.critic: nn.Module = nn.Linear(policy.units, 1)
        else:
            self.actor = nn.Sequential(*_layers((inputs, *policy.hidden, outputs)))
            self.critic = nn.Sequential(*_layers((inputs, *policy.hidden, 1)))
        self.log_std = nn.Parameter(torch.full((outputs,), -1.2))
        self.adam = torch.optim.Adam(self.parameters(), lr=1e-5, eps=1e-5, fused=True)
        self.minibatches = self._gather(ppo)

    def _gather(self, ppo: PPO) -> list[list[torch.Tensor]]:
        """Gather minibatches: [steps, segments, ...] with a memory, else [samples, ...]."""

        def whole(name: str) -> torch.Tensor:
            return torch.cat([getattr(shard, name) for shard in ppo.shards])

        names = ("actions", "log_probs", "advantages", "returns", "values")
        arrays = [torch.cat([s.features["actor"] for s in ppo.shards]), *map(whole, names)]
        weights = torch.rand(len(arrays[0]), 1) + 0.5
        arrays.append(weights.expand(arrays[1].shape[:2]))
        size = ppo.geometry.segments_per_minibatch
        order = torch.randperm(len(arrays[0]))
        minibatches = []
        for start in range(0, len(order), size):
            some = order[start : start + size]
            if self.recurrent:
                states = [torch.cat([s.memory.state[n] for s in ppo.shards]) for n in ("h", "c")]
                held = [state[some][None].contiguous() for state in states]
                minibatches.append([x[some].transpose(0, 1).contiguous() for x in arrays] + held)
            else:
                minibatches.append([x[some].flatten(0, 1).contiguous() for x in arrays])
        return minibatches

    def steps(self) -> Iterator[None]:
        config, parameters = self.config, list(self.parameters())
        for (
            obs,
            actions,
            old,
            advantages,
            returns,
            values_then,
            weights,
            *state,
        ) in self.minibatches:
            actor_sees = critic_sees = obs
            if self.recurrent:
                actor_sees, _ = self.core(self.encoder(obs), tuple(state))
                critic_sees = actor_sees
            mean = self.actor(actor_sees)
            z = (actions - mean) * (-self.log_std).exp()
            constant = self.log_std.sum() + 0.918938533 * actions.shape[-1]
            log_probs = -0.5 * z.square().sum(-1) - constant
            ratio = (log_probs - old).exp()
            clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
            gain = torch.minimum(ratio * advantages, clipped * advantages)
            values = self.critic(critic_sees).squeeze(-1)
            errors = (values - returns).square()
            if config.value_clip is not None:
                moved = (values - values_then).clamp(-config.value_clip, config.value_clip)
                errors = torch.maximum(errors, (values_then + moved - returns).square())
            excess = torch.relu(mean.abs() - 1.0).square().sum(-1)
            if config.sampling == "prioritised":
                gain, errors, excess = gain * weights, errors * weights, excess * weights
            entropy = constant + 0.5 * actions.shape[-1]
            loss = 0.5 * config.value_coef * errors.mean() - gain.mean()
            loss = loss - config.entropy_coef * entropy
            loss = loss + config.bound_coef * excess.mean()
            self.adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
            self.adam.step()
            yield


def _layers(sizes: tuple[int, ...]) -> Iterator[nn.Module]:
    """Linear layers with tanh between them."""
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        if i:
            yield nn.Tanh()
        yield nn.Linear(inputs, outputs)


def ratio_of(recipe: Recipe, label: str, rounds: int, most: int, real: bool) -> float:
    """Gradient steps per second of Etude over those of the hand-written loop, timed in turn."""
    ppo, fragments, clock = learner(recipe, real)
    ppo.ingest(fragments, clock)
    hand, count = ByHand(ppo), min(ppo.geometry.num_minibatches, most)
    ours: list[float] = []
    bare: list[float] = []
    for i in range(rounds + 1):
        for steps_of, times in ((ppo.batches(clock, Key(i)), ours), (hand.steps(), bare)):
            start = now()
            for _ in zip(range(count), steps_of, strict=False):
                pass
            times.append(now() - start)
    speed, by_hand = count / np.median(ours[1:]), count / np.median(bare[1:])
    # Ratios of each round: the speed of the machine drifts more than the sides differ.
    ratio = float(np.median(np.array(bare[1:]) / np.array(ours[1:])))
    print(f"{label}: {speed:7.1f} steps/s, by hand {by_hand:7.1f}: {ratio:.3f}", flush=True)
    return ratio


class Split:
    """Seconds by label, while functions are wrapped; nested calls count once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = now() - start
                self.seconds[label] = self.seconds.get(label, 0.0) + spent
                self._inside = False

        return wrapper


FORWARD = "forward (networks)"
"""Seconds of the gradients, including copies inside networks."""
BOOKKEEPING = ("advantages", "draws", "gather", "join")
WRAPPED: tuple[tuple[str, Any, str], ...] = (
    ("join", ppo_module, "join"),
    ("join", on_policy, "episode_starts"),
    ("advantages", returns_module, "next_values"),
    ("advantages", returns_module, "advantages_and_targets"),
    ("advantages", PPO, "_normalise_advantages"),
    ("advantages", PPO, "_explained_variance"),
    ("draws", Shard, "draw"),
    ("draws", Shard, "minibatch"),
    ("values (networks)", PPO, "_evaluate"),
    (FORWARD, ActorCritic, "evaluate"),
    ("normalise observations", ActorCritic, "prepare"),
    ("check finite", ppo_module, "non_finite"),
    ("scale rewards", RewardScaler, "observe"),
    ("scale rewards", RewardScaler, "scale"),
)


@contextmanager
def wrapped() -> Iterator[Split]:
    """Time the functions above and every gathering of tensors by segments."""
    split, index = Split(), torch.Tensor.__getitem__
    gather = split.timed("gather", index)

    def pick(tensor: torch.Tensor, where: Any) -> torch.Tensor:
        by_segments = isinstance(where, torch.Tensor) and where.dtype == torch.int64
        return gather(tensor, where) if by_segments else index(tensor, where)

    select = split.timed("gather", torch.Tensor.index_select)
    with ExitStack() as stack:
        for label, owner, name in WRAPPED:
            timed = split.timed(label, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        stack.enter_context(patch.object(torch.Tensor, "__getitem__", pick))
        stack.enter_context(patch.object(torch.Tensor, "index_select", select))
        yield split


def overhead_of(kind: str, sampling: str, rounds: int, rows: int) -> float:
    """The bookkeeping share of a whole update in the median round, printed with its parts."""
    ppo, fragments, clock = learner(at_scale(kind, rows, sampling), real=False)
    taken: list[tuple[float, float, dict[str, float]]] = []
    for i in range(rounds + 1):
        with wrapped() as split:
            start = now()
            ppo.ingest(fragments, clock)
            ingested = now() - start
            batches = sum(1 for _ in ppo.batches(clock, Key(i)))
            total = now() - start
        split.seconds["rest of ingest"] = ingested - sum(
            s for label, s in split.seconds.items() if label not in ("draws", "gather", FORWARD)
        )
        taken.append((sum(split.seconds[b] for b in BOOKKEEPING) / total, total, split.seconds))
        assert batches == ppo.geometry.num_minibatches
    share, total, seconds = sorted(taken[1:], key=lambda item: item[0])[rounds // 2]
    print(f"bookkeeping, {kind}, {sampling}: {share:.2%} of {total:.2f} s")
    for group in (BOOKKEEPING, tuple(label for label in seconds if label not in BOOKKEEPING)):
        parts = (f"{label} {seconds[label] / total:.2%}" for label in group)
        print(f"    {'besides' if group is not BOOKKEEPING else 'of it'}: {', '.join(parts)}")
    sys.stdout.flush()
    return share


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--geometry", choices=("small", "scale", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=128, help="of a round in a small geometry")
    parser.add_argument("--rows", type=int, default=8192, help="of the geometry at scale")
    options = parse(parser, {"rounds": 1, "batches": 8, "rows": 256}, arguments)
    small_sizes = (64, *SMALL_JUDGED) if options.geometry != "scale" else ()
    kinds = tuple(SCALE_GOALS) if options.geometry != "small" else ()
    torch.set_num_threads(1)
    needs = {"geometries": len(small_sizes) + 3 * len(kinds)}
    with Gate("update_speed", options, needs=needs) as gate:
        report_load(gate)
        for size in small_sizes:
            label = f"minibatch {size:6d}"
            ratio = ratio_of(small(size), label, options.rounds, options.batches, real=True)
            gate.count("geometries")
            goal = SMALL_GOAL if size in SMALL_JUDGED else None
            gate.figure(f"minibatch {size} over by hand", ratio, at_least=goal, timing=True)
        for kind in kinds:
            recipe, most = at_scale(kind, options.rows), SCALE_BATCHES[kind]
            ratio = ratio_of(recipe, f"scale, {kind}", options.rounds, most, real=False)
            gate.count("geometries")
            goal = SCALE_GOALS[kind]
            gate.figure(f"{kind} at scale over by hand", ratio, at_least=goal, timing=True)
            for sampling in ("uniform", "prioritised"):
                rounds = min(options.rounds, 3 if kind == "mlp" else 1)
                share = overhead_of(kind, sampling, rounds, options.rows)
                gate.count("geometries")
                name = f"bookkeeping, {kind}, {sampling}"
                gate.figure(name, share, at_most=OVERHEAD_GOAL, timing=True)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
