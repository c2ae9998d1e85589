"""PPO as the app sees it: segment geometry, buffers, and its part of a plan."""

from __future__ import annotations

from typing import Any

import torch

from etude.algorithms import on_policy_rewards
from etude.algorithms.ppo import PPO, PPOConfig
from etude.algorithms.rewards import OnPolicyRewards
from etude.building import collecting
from etude.building.collecting import Learning
from etude.core.clock import Clock, Nest
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.ranks import Ranks
from etude.core.trees import Tree, num_bytes
from etude.experience.segments import BufferSpec, SegmentBuffer, SegmentGeometry
from etude.learning.adam import Adam
from etude.models.normalise import RewardScaler
from etude.models.policies import ActorCritic, BasePolicy, make_policy
from etude.planning import memory
from etude.planning.kinds import Assembly, Sketch, World, device
from etude.planning.recipe import Recipe
from etude.runs.folder import RunFolder


def _config(recipe: Recipe) -> PPOConfig:
    assert isinstance(recipe.algorithm, PPOConfig)
    return recipe.algorithm


def geometry(recipe: Recipe) -> SegmentGeometry:
    """How the buffer divides; refuses what does not, and what would not learn."""
    config = _config(recipe)
    on_policy_rewards.check(recipe)
    if recipe.policy.kind != "mlp" and config.horizon == 1:
        raise UsageError(
            f"A policy with memory ({recipe.policy.kind}) learns along its segments, and "
            "algorithm.horizon 1 makes them one step long: give it a longer one, such as "
            f"--algorithm.horizon {config.rollout_steps}, a whole rollout."
        )
    return SegmentGeometry(
        rows=recipe.collector.rows,
        steps=config.rollout_steps,
        horizon=config.horizon,
        minibatch=config.minibatch_size,
        shards=recipe.learner.shards,
        group_rows=recipe.collector.group_rows,
        agents=recipe.task.num_agents,
    )


class OnPolicy:
    """A `Method`: a buffer is filled, learned from, and given up."""

    takes_ranks = True

    def nest(self, recipe: Recipe) -> Nest:
        collecting.check_policy(recipe, ("mlp", "lstm", "gru"))
        cut = geometry(recipe)
        batches = cut.num_minibatches * _config(recipe).update_epochs
        batches += on_policy_rewards.num_updates(recipe)
        return Nest.of(recipe.clock, cut.buffer_steps, batches, _idle_iterations(recipe))

    def look(self, recipe: Recipe) -> World:
        return collecting.look(recipe)

    def assemble(
        self, recipe: Recipe, key: Key, folder: RunFolder, clock: Clock, ranks: Ranks
    ) -> Assembly:
        env = collecting.env_spec(recipe)
        learning = self._learner(recipe, env, key, ranks)
        return collecting.assemble(recipe, learning, key, clock, env, ranks)

    def _learned_steps(self, recipe: Recipe) -> int:
        """Environment steps of the iterations that learn."""
        loops = self.nest(recipe)
        return max(loops.iterations - loops.idle_iterations, 0) * loops.steps_per_iteration

    def _learner(self, recipe: Recipe, env: EnvSpec, key: Key, ranks: Ranks) -> Learning:
        policy = make_policy(recipe.policy, env, key.child("policy"))
        assert isinstance(policy, ActorCritic)
        contents = _contents(recipe, env, policy)
        cut, own = geometry(recipe), ranks.part(contents.rows)
        buffers = [SegmentBuffer(contents, own) for _ in range(1 + recipe.collector.lag)]
        where = device(recipe)
        rewards = on_policy_rewards.make(recipe, env, key.child("rewards"), where, ranks)
        algorithm = PPO(_config(recipe), policy, cut, buffers, where, rewards, ranks)
        return Learning(algorithm, buffers)

    def sketch(self, recipe: Recipe, world: World) -> Sketch:
        env, snapshot, policy = world.spec, world.snapshot, world.deployed
        assert isinstance(policy, BasePolicy)
        cut, config = geometry(recipe), _config(recipe)
        model = sum(p.nbytes for p in policy.parameters())
        rewards = on_policy_rewards.make(recipe, env, None, torch.device("meta"))
        training = _state(recipe, cut, policy, rewards)
        estimates = memory.on_policy(recipe, cut, env, policy, snapshot)
        estimates["workspace"] += on_policy_rewards.workspace(rewards)
        passes, coverage = config.update_epochs, _coverage(recipe, cut)
        used = "every step is used" if coverage == 1.0 else "a step is used, on average,"
        return Sketch(
            geometry=_geometry(recipe, cut) | on_policy_rewards.geometry(rewards),
            lines=[_update_line(recipe, cut), *on_policy_rewards.lines(rewards)],
            shapes=_shapes(cut, env, policy),
            title="Buffer: [segments, horizon, ...]",
            usage=f"{used} {passes:g} times; {cut.shards} shard(s)",
            data={
                "passes_per_iteration": passes,
                "gradient_samples_per_step": float(passes),
                "coverage": coverage,
                "gradient_samples": float(self._learned_steps(recipe) * passes),
            },
            memory={
                "buffer": _contents(recipe, env, policy).num_bytes * (1 + recipe.collector.lag),
                "model": model,
                "gradient": model,
                "optimizer": num_bytes(training["optimizer"]),
                **on_policy_rewards.memory(rewards),
            },
            estimates=estimates,
            training=training,
            at_most=None if config.target_kl is None else "target_kl may end an update early",
            notes=_notes(recipe, coverage),
        )


def _idle_iterations(recipe: Recipe) -> int:
    """The first iterations, which only collect: a normaliser without statistics needs some.

    With lag 1 the second iteration, too, is collected before the normaliser has seen any.
    """
    return 0 if recipe.start_from is not None else 1 + recipe.collector.lag


def _contents(recipe: Recipe, env: EnvSpec, policy: BasePolicy) -> BufferSpec:
    cut = geometry(recipe)
    return BufferSpec(env, policy.state_specs, cut.rows, cut.steps, cut.horizon)


def _geometry(recipe: Recipe, cut: SegmentGeometry) -> dict[str, int]:
    return {
        "rollout_steps": cut.steps,
        "horizon": cut.horizon,
        "buffer_steps": cut.buffer_steps,
        "segments": cut.num_segments,
        "minibatch_steps": cut.minibatch,
        "segments_per_minibatch": cut.segments_per_minibatch,
        "minibatches": cut.num_minibatches,
        "update_epochs": _config(recipe).update_epochs,
    }


def _update_line(recipe: Recipe, cut: SegmentGeometry) -> str:
    passes, limit = _config(recipe).update_epochs, _config(recipe).target_kl
    segments = (
        f" ({cut.segments_per_minibatch:,} segments of {cut.horizon:,})" if cut.horizon > 1 else ""
    )
    return (
        f"update: {passes:,} {'pass' if passes == 1 else 'passes'} x {cut.num_minibatches:,} "
        f"minibatches of {cut.minibatch:,} steps{segments} = {'at most ' if limit else ''}"
        f"{passes * cut.num_minibatches:,} batches"
        f"{'; target_kl may end an update early' if limit else ''}"
    )


def _shapes(cut: SegmentGeometry, env: EnvSpec, policy: BasePolicy) -> dict[str, Any]:
    """Buffer and minibatch shapes of every stored array."""
    arrays = {f"obs/{name}": (o, [cut.horizon]) for name, o in env.observations.items()}
    arrays["actions"] = (env.action.array, [cut.horizon])
    arrays |= {f"state/{name}": (state, []) for name, state in policy.state_specs.items()}
    return {
        name: {
            "dtype": array.dtype,
            "buffer": [cut.num_segments, *steps, *array.shape],
            "minibatch": [cut.segments_per_minibatch, *steps, *array.shape],
        }
        for name, (array, steps) in arrays.items()
    }


def _coverage(recipe: Recipe, cut: SegmentGeometry) -> float:
    """The share of segments an iteration trains on; for prioritised draws, at the most.

    Equal priorities cover most: every minibatch then leaves out a segment with 1 - 1/minibatches.
    """
    if _config(recipe).sampling == "uniform":
        return 1.0
    draws = cut.num_minibatches * _config(recipe).update_epochs
    return 1.0 - (1.0 - 1.0 / cut.num_minibatches) ** draws


def _state(
    recipe: Recipe, cut: SegmentGeometry, policy: BasePolicy, rewards: OnPolicyRewards
) -> Tree:
    """PPO's state in a checkpoint: shapes without memory, whatever the model's size."""
    one, size = torch.zeros(1), sum(p.numel() for p in policy.parameters())
    optimizer = Adam(one, one, _config(recipe).adam_epsilon).state_dict()
    return {
        "optimizer": {k: v.expand(size) if v.ndim else v for k, v in optimizer.items()},
        "initial": one.expand(size),
        "rewards": RewardScaler(cut.rows, _config(recipe).gamma).state_dict(),
        "reward_source": rewards.state_dict(),
    }


def _notes(recipe: Recipe, coverage: float) -> list[str]:
    idle, notes = _idle_iterations(recipe), []
    if idle:
        first = "iteration only collects" if idle == 1 else f"{idle} iterations only collect"
        notes = [f"The first {first}: the normaliser needs statistics before anything is learned."]
    if _config(recipe).sampling == "uniform":
        return notes
    return [
        *notes,
        f"Prioritised draws leave segments out: an iteration trains on {coverage:.0%} of them if "
        "all are alike and on fewer otherwise (train/coverage).",
    ]
