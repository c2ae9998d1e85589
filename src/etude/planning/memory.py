"""How much memory a run takes at its peak, beyond what importing the libraries takes.

Buffers and model are exact and counted elsewhere. The rest is an estimate whose factors were
fitted to measured runs (`gates/memory.py`): a simulator's own memory, what the threads of a rollout
hold, and what a gradient keeps for its way back.
"""

from __future__ import annotations

from etude.core.contracts import EnvSpec
from etude.core.trees import Tree, num_bytes
from etude.experience.segments import SegmentGeometry
from etude.models.policies import BasePolicy
from etude.planning.recipe import Recipe

ESTIMATES = ("environments", "rollouts", "learner", "workspace", "best_episodes", "peak")
"""Of a plan's bytes, those that are not exact."""
_SIMULATOR = 6
"""A simulation's memory over that of its snapshot: state, last state, and all derived arrays."""
_LEARNED_NUMBERS = 10
"""float32 numbers per step beside the features: values, advantages, returns and steps to them."""
_RECURRENT = 24
"""float32 numbers a recurrent layer keeps per step and unit: gates, states, their gradients."""
_GAPS = 1.1
"""What an allocator holds over what is in use."""
_THREADS = 50 << 20
"""Threads and libraries that are only loaded on the way."""


def collection(
    recipe: Recipe, spec: EnvSpec, policy: BasePolicy, snapshot: Tree, steps: int
) -> dict[str, int]:
    """Bytes of environments and of a rollout of so many steps in all; `snapshot` is one group's."""
    config = recipe.collector
    per_row = num_bytes(snapshot["env"]) / config.group_rows
    rows = config.rows + recipe.evaluation.rows
    state = sum(s.num_bytes for s in policy.state_specs.values())
    observed = sum(s.num_bytes for s in spec.observations.values())
    ended = steps // (spec.max_episode_steps or steps)
    noise = steps * spec.action.array.shape[0] * 4
    snapshots = 2 * num_bytes(snapshot) * config.num_groups
    return {
        "environments": int(per_row * rows * _SIMULATOR),
        "rollouts": snapshots + noise + 3 * ended * (state + observed),
    }


def on_policy(
    recipe: Recipe, cut: SegmentGeometry, spec: EnvSpec, policy: BasePolicy, snapshot: Tree
) -> dict[str, int]:
    """Bytes by what they are for, of a learner with a buffer."""
    return {
        **collection(recipe, spec, policy, snapshot, cut.buffer_steps),
        "learner": cut.buffer_steps * 4 * (_width(recipe, spec) + _LEARNED_NUMBERS),
        "workspace": 4 * _activations(recipe, spec) * cut.minibatch // cut.shards,
    }


def peak(parts: dict[str, int], exact: int) -> int:
    """All of it at once; `exact` is what was counted exactly."""
    return int(_GAPS * (sum(parts.values()) + exact)) + _THREADS


def _width(recipe: Recipe, spec: EnvSpec) -> int:
    """Numbers per step that the networks read."""
    actor, critic = recipe.policy.actor_reads, recipe.policy.critic_reads
    both = actor if actor == critic else (*actor, *critic)
    return sum(spec.observations[name].shape[0] for name in both)


def _activations(recipe: Recipe, spec: EnvSpec) -> int:
    """Numbers per step that a gradient keeps."""
    config = recipe.policy
    layers = 2 * sum(config.hidden) + 2 * spec.action.array.shape[0]
    if config.kind == "mlp":
        return 2 * layers
    return layers + _RECURRENT * config.units
