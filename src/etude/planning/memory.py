"""How much memory a run takes at its peak, beyond what importing the libraries takes.

Buffers and model are exact and counted elsewhere. The rest is an estimate whose factors were
fitted to measured runs (`gates/memory.py`): a simulator's own memory, what the threads of a rollout
hold, and what a gradient keeps for its way back.
"""

from __future__ import annotations

from etude.core.trees import num_bytes
from etude.models.networks import is_image
from etude.planning.recipe import Resolved

_SIMULATOR = 6
"""A simulation's memory over that of its snapshot: state, last state, and all derived arrays."""
_LEARNED_NUMBERS = 10
"""float32 numbers per step beside the features: values, advantages, returns and steps to them."""
_GAPS = 1.1
"""What an allocator holds over what is in use."""
_THREADS = 50 << 20
"""Threads and libraries that are only loaded on the way."""


def collection(run: Resolved, steps: int) -> dict[str, int]:
    """Bytes of environments and of a rollout of so many steps in all."""
    config, spec = run.recipe.collector, run.spec
    per_env = num_bytes(run.snapshot["env"]) / config.envs_per_group
    num_envs = config.num_envs + run.recipe.evaluation.num_envs
    states = run.deployed.state_specs.values()  # type: ignore[attr-defined]
    observed = sum(s.num_bytes for s in spec.observations.values())
    ended = steps // (spec.max_episode_steps or steps)
    noise = steps * spec.action.array.shape[0] * 4
    snapshots = 2 * num_bytes(run.snapshot) * config.num_groups
    return {
        "environments": int(per_env * num_envs * _SIMULATOR),
        "rollouts": snapshots + noise + 3 * ended * (sum(s.num_bytes for s in states) + observed),
    }


def on_policy(run: Resolved) -> dict[str, int]:
    """Bytes by what they are for, of a learner with a segment buffer."""
    geometry, spec, policy = run.geometry, run.spec, run.recipe.policy
    actor, critic = policy.actor_reads, policy.critic_reads
    read = actor if actor == critic else (*actor, *critic)
    shapes = [spec.observations[name].shape for name in read]
    width = sum(shape[0] for shape in shapes if len(shape) == 1)
    kept = policy.num_activations(spec.action.array.shape[0])
    kept += image_activations(run)
    return {
        **collection(run, geometry.buffer_steps),
        "learner": geometry.buffer_steps * 4 * (width + _LEARNED_NUMBERS),
        "workspace": 4 * kept * geometry.minibatch // geometry.shards,
    }


def image_activations(run: Resolved) -> int:
    """About how many float32 numbers a gradient keeps per step of the images that are read."""
    policy = run.recipe.policy
    read = {run.spec.observations[name] for name in (*policy.actor_reads, *policy.critic_reads)}
    shapes = [spec.shape for spec in read if is_image(spec)]
    if not shapes:
        return 0
    from etude.models.encoders import num_activations

    return sum(num_activations(policy.encoder, shape) for shape in shapes)


def peak(parts: dict[str, int], exact: int) -> int:
    """All of it at once; `exact` is what was counted exactly."""
    return int(_GAPS * (sum(parts.values()) + exact)) + _THREADS
