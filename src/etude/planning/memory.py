"""Memory of a run: estimates of its peak, and the check that it fits before it starts.

Buffers and model are counted exactly elsewhere. The factors of the other estimates were fitted to
measured runs (`gates/speed/memory.py`): simulators, rollout threads, activations of a gradient.
Imported libraries are not included.

A plan that cannot fit into memory or on the disk is refused, and one that may not fit gives a
warning: the system kills a process that takes too much memory without a message, and a growing
replay would fill the disk days after the start.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from etude.core.errors import EtudeError, UsageError, is_out_of_memory
from etude.core.output import size
from etude.core.trees import num_bytes
from etude.models.networks import is_image
from etude.planning.recipe import Resolved
from etude.runs.folder import PLAN_JSON

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


FIX = (
    "`etude plan` shows the parts: fewer collector.num_envs, a shorter rollout, a smaller "
    "minibatch or network need less."
)
DISK_FIX = (
    "Free some space or choose another folder; a smaller algorithm.capacity, fewer "
    "checkpoint.keep_last or a shorter checkpoint.every need less."
)
_ERROR = 4
"""Largest error of the estimates: a plan with this multiple of the memory cannot fit."""


def machine_memory() -> tuple[int, int]:
    """(bytes of memory of this machine or container, bytes that are free); (0, 0) if unknown."""
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    total, free = (int(fields.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = read("/sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        total, free = min(total, int(limit)), min(free, int(limit))
    return total, free


def check_plan(expected: Mapping[str, int], folder: Path, say: Callable[[str], None]) -> None:
    """Refuse a plan that cannot fit into memory or on the disk of its folder; warn of one that may
    not fit."""
    refused, doubtful = misfits(expected, folder)
    for sentence in refused:
        raise UsageError(sentence)
    for sentence in doubtful:
        say(sentence)


def check_policy_size(num_bytes: int) -> None:
    """Refuse a policy that does not fit into memory with its gradient and Adam's two moments."""
    total, _ = machine_memory()
    if total and 4 * num_bytes > total:
        raise UsageError(
            f"The policy has parameters of {size(num_bytes)}, {size(4 * num_bytes)} with gradient "
            f"and optimizer, and this machine has {size(total)} of memory: make its layers "
            "(policy.hidden, policy.units) smaller."
        )


def misfits(expected: Mapping[str, int], folder: Path) -> tuple[list[str], list[str]]:
    """(sentences on parts of a plan that cannot fit, sentences on parts that may not fit)."""
    refused, doubtful = list[str](), list[str]()
    (total, free), peak = machine_memory(), expected["peak"]
    there = f"this machine has {size(total)} of memory, {size(free)} of it free"
    buffer = expected.get("buffer", 0)
    if total and buffer > total:
        refused.append(f"The plan has a buffer of {size(buffer)}, and {there}. {FIX}")
    elif total and peak > _ERROR * total:
        refused.append(f"The plan expects {size(peak)} at the peak, and {there}. {FIX}")
    elif total and peak > free:
        doubtful.append(f"The plan expects {size(peak)} at the peak, and {there}. {FIX}")
    space = free_space(folder)
    live, kept = expected.get("replay", 0), expected["checkpoints_kept"]
    whole = live + expected.get("replay_held", 0) + kept
    on_disk = f"and {_existing(folder)} has {size(space)} of free space"
    if max(live, expected["checkpoint"]) > space:
        what = "a replay" if live > space else "a checkpoint"
        least = size(max(live, expected["checkpoint"]))
        refused.append(f"The plan has {what} of {least} on disk, {on_disk}. {DISK_FIX}")
    elif whole > space:
        held = f"{size(live)} of replay, {size(whole - live - kept)} of old replay that "
        held += "checkpoints keep, and " if live else ""
        doubtful.append(
            f"The plan expects up to {size(whole)} on disk ({held if live else ''}{size(kept)} of "
            f"checkpoints), {on_disk}. {DISK_FIX}"
        )
    return refused, doubtful


def free_space(folder: Path) -> int:
    """Free bytes on the file system of a folder, which need not exist; `sys.maxsize` if unknown, as
    on some file systems of FUSE."""
    total, _, free = shutil.disk_usage(_existing(folder))
    return free if total else sys.maxsize


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


@contextmanager
def explain_out_of_memory(run: Path | None = None) -> Iterator[None]:
    """Raise failed allocations as `OutOfMemory`; run: the folder with the plan."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, run) from error


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


class OutOfMemory(EtudeError):
    """An allocation failed."""


def _out_of_memory(error: BaseException, run: Path | None) -> OutOfMemory:
    """The error with the memory of this machine and the peak in the run's plan."""
    total, free = machine_memory()
    words = " ".join(str(error).split()) or "an allocation failed"
    peak = "" if run is None else f"The plan expects {_planned(run)} at the peak. {FIX} "
    return OutOfMemory(
        f"Out of memory: {words.rstrip('.')}. This machine has {size(total)}, {size(free)} of it "
        f"free. {peak}Nothing that was saved is lost."
    )


def _planned(run: Path) -> str:
    try:
        return size(json.loads(read(str(run / PLAN_JSON)))["bytes"]["peak"])
    except (ValueError, KeyError, TypeError):
        return "an unknown size"
