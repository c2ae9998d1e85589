"""Estimates of a run's peak memory, beyond the imported libraries.

Buffers and model are counted exactly elsewhere. The factors of the other estimates were fitted to
measured runs (`gates/memory.py`): simulators, rollout threads, activations of a gradient.
"""

from __future__ import annotations

from etude.core.trees import num_bytes
from etude.models.networks import is_image
from etude.planning.recipe import Resolved

_SIMULATOR = 6
"""Memory of a simulation relative to its snapshot: state, last state, all derived arrays."""
_LEARNED_NUMBERS = 10
"""float32 numbers per step besides observations: values, advantages, returns, intermediates."""
_GAPS = 1.1
"""Memory that an allocator holds, relative to the memory in use."""
_THREADS = 50 << 20
"""Bytes of threads and of libraries that are imported during the run."""


def collection(run: Resolved, steps: int) -> dict[str, int]:
    """Bytes of environments and of a rollout of `steps` steps in all environments."""
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
    """Bytes of collection, learner and workspace for a learner with a segment buffer."""
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
    """Estimated float32 activations of the image encoders per step."""
    policy = run.recipe.policy
    read = {run.spec.observations[name] for name in (*policy.actor_reads, *policy.critic_reads)}
    shapes = [spec.shape for spec in read if is_image(spec)]
    if not shapes:
        return 0
    from etude.models.encoders import num_activations

    return sum(num_activations(policy.encoder, shape) for shape in shapes)


def peak(parts: dict[str, int], exact: int) -> int:
    """Estimated peak in bytes; exact: the bytes that are counted exactly."""
    return int(_GAPS * (sum(parts.values()) + exact)) + _THREADS
