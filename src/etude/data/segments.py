"""The segment buffer: all environments of an iteration in preallocated arrays, filled in place.

An environment's steps are contiguous, so `[num_envs, steps, ...]` seen as
`[num_envs * k, horizon, ...]` is the same memory: a segment never mixes two environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from etude.core.contracts import Array, ArraySpec, EnvSpec, Finals, Fragment, Observations
from etude.core.errors import NonFinite, UsageError
from etude.core.trees import Tree, copy_arrays

Sizes = Mapping[str, int]
Ratio = tuple[str, int, str, int]
"""(name, whole, name, part), of which the part must divide the whole."""
_FARTHEST = 1 << 16
"""Largest distance at which a size that works is searched."""


@dataclass(frozen=True)
class SegmentGeometry:
    """Division into environments, steps, segments, minibatches and shards; refuses other sizes."""

    num_envs: int
    steps: int
    horizon: int
    minibatch: int
    shards: int
    envs_per_group: int
    agents: int = 1
    """Agents of an environment: each counts as one of num_envs, and all are in one group."""

    def __post_init__(self) -> None:
        check_division(asdict(self), _ratios, _OPTIONS, _several_ways_out)

    @property
    def buffer_steps(self) -> int:
        return self.num_envs * self.steps

    @property
    def num_groups(self) -> int:
        return self.num_envs // self.envs_per_group

    @property
    def num_segments(self) -> int:
        return self.buffer_steps // self.horizon

    @property
    def num_minibatches(self) -> int:
        return self.buffer_steps // self.minibatch

    @property
    def segments_per_minibatch(self) -> int:
        return self.minibatch // self.horizon

    def shard_envs(self, shard: int) -> slice:
        size = self.num_envs // self.shards
        return slice(shard * size, (shard + 1) * size)


def _ratios(sizes: SimpleNamespace) -> tuple[Ratio, ...]:
    num_envs, steps, group = sizes.num_envs, sizes.steps, sizes.envs_per_group
    horizon, minibatch, shards = sizes.horizon, sizes.minibatch, sizes.shards
    groups = "the number of groups (collector.num_envs / collector.envs_per_group)"
    unit = "algorithm.horizon x learner.shards"
    buffer = "the buffer (collector.num_envs x algorithm.rollout_steps)"
    return (
        ("collector.envs_per_group", group, "the number of agents", sizes.agents),
        ("collector.num_envs", num_envs, "collector.envs_per_group", group),
        (groups, num_envs // group, "learner.shards", shards),
        ("algorithm.rollout_steps", steps, "algorithm.horizon", horizon),
        ("algorithm.minibatch_size", minibatch, unit, horizon * shards),
        (buffer, num_envs * steps, "algorithm.minibatch_size", minibatch),
    )


_OPTIONS = {
    "minibatch": "algorithm.minibatch_size",
    "num_envs": "collector.num_envs",
    "envs_per_group": "collector.envs_per_group",
    "steps": "algorithm.rollout_steps",
    "horizon": "algorithm.horizon",
    "shards": "learner.shards",
}


def _several_ways_out(sizes: Mapping[str, int]) -> str:
    """Sizes near the given ones that work together; keeps steps, and num_envs if possible."""
    steps, agents = sizes["steps"], sizes["agents"]
    environments = max(sizes["num_envs"] // agents, 1)
    num_envs = environments * agents
    group = agents * nearest_divisor(environments, sizes["envs_per_group"] // agents)
    near = {"num_envs": num_envs, "envs_per_group": group}
    near["shards"] = nearest_divisor(num_envs // near["envs_per_group"], sizes["shards"])
    near["horizon"] = nearest_divisor(steps, sizes["horizon"])
    unit = near["horizon"] * near["shards"]
    near["minibatch"] = unit * nearest_divisor(num_envs * steps // unit, sizes["minibatch"] // unit)
    changed = [f"{_OPTIONS[k]} {size:,}" for k, size in near.items() if size != sizes[k]]
    return f"No change of a single size is enough; together these work: {', '.join(changed)}."


def step_specs(env: EnvSpec) -> dict[str, ArraySpec]:
    """The fields of every step: observations under "obs/<name>", then the others."""
    specs = {f"obs/{name}": spec for name, spec in env.observations.items()}
    specs["actions"] = env.action.array
    for name in ("log_probs", "rewards"):
        specs[name] = ArraySpec((), "float32")
    for name in ("terminated", "truncated", "present"):
        specs[name] = ArraySpec((), "bool")
    return specs


_STEPS = ("actions", "log_probs", "rewards", "terminated", "truncated", "present")
_NAMED = {"obs": "obs/", "states": "state/", "last_obs": "last_obs/", "last_state": "last_state/"}
"""Arrays of a fragment, and dicts of arrays with the prefix of their names in a buffer."""
ALIGNMENT = 64
"""Alignment of arrays, in bytes."""


def aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """A zeroed array at an address of 64 bytes.

    Matrix kernels may round differently at other alignments, and numpy guarantees only 16.
    """
    kind: torch.dtype = getattr(torch, dtype)
    return torch.zeros(shape, dtype=kind).numpy()


@dataclass(frozen=True)
class BufferSpec:
    """Arrays of a buffer: [num_envs, steps] of steps, and a policy's state per segment.

    states: recurrent state of one environment, {} for a memoryless policy.
    """

    env: EnvSpec
    states: dict[str, ArraySpec]
    num_envs: int
    steps: int
    horizon: int

    def shapes(self) -> dict[str, ArraySpec]:
        """Every array with its whole shape: "obs/<name>", ..., "state/<name>", "last_obs/<name>",
        "last_state/<name>"."""

        def whole(specs: dict[str, ArraySpec], prefix: str, *lead: int) -> dict[str, ArraySpec]:
            return {f"{prefix}{n}": ArraySpec((*lead, *s.shape), s.dtype) for n, s in specs.items()}

        return {
            **whole(step_specs(self.env), "", self.num_envs, self.steps),
            **whole(self.states, "state/", self.num_envs, self.steps // self.horizon),
            **whole(self.env.observations, "last_obs/", self.num_envs),
            **whole(self.states, "last_state/", self.num_envs),
        }

    @property
    def num_bytes(self) -> int:
        """Bytes that the buffer will allocate."""
        return sum(spec.num_bytes for spec in self.shapes().values())


class SegmentBuffer:
    """Preallocated memory for one iteration; each group writes directly into its part."""

    def __init__(self, spec: BufferSpec, envs: range | None = None) -> None:
        """envs: the environments that are needed here; all by default.

        Some before them are allocated too, so that each is aligned as in a whole buffer.
        """
        envs = range(spec.num_envs) if envs is None else envs
        self._first = envs.start - envs.start % ALIGNMENT
        self.spec = replace(spec, num_envs=envs.stop - self._first)
        self.arrays = {n: aligned(s.shape, s.dtype) for n, s in self.spec.shapes().items()}

    def part(self, envs: slice) -> Fragment:
        """An empty fragment whose arrays are views of these environments."""
        held = slice(envs.start - self._first, envs.stop - self._first)
        view = {name: array[held] for name, array in self.arrays.items()}
        nothing: Array = np.zeros(0, np.int64)
        arrays: dict[str, Any] = {name: view[name] for name in _STEPS}
        return Fragment(
            **arrays | {name: _under(prefix, view) for name, prefix in _NAMED.items()},
            finals=Finals(nothing, nothing, {}, {}),
            episodes={},
            moments={},
            restarted=np.zeros(envs.stop - envs.start, np.bool_),
        )


def _under(prefix: str, arrays: dict[str, Array]) -> dict[str, Array]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def episode_starts(part: Fragment, horizon: int) -> Array:
    """[segments, horizon] bool: an episode begins at this step, *inside* its segment.

    It is False at a segment's first step, where the recurrent state of the segment is used.
    """
    starts: Array = np.zeros(part.rewards.shape, np.bool_)
    starts[:, 1:] = (part.terminated | part.truncated)[:, :-1]
    starts[:, 1:] |= part.present[:, 1:] & ~part.present[:, :-1]
    starts = starts.reshape(-1, horizon)
    starts[:, 0] = False
    return starts


def join(fragments: list[Fragment], buffer: SegmentBuffer, envs: slice) -> Fragment:
    """Join fragments of consecutive groups into one, over the environments `envs` of the buffer.

    A fragment from another machine is copied to its place in the buffer.
    """
    joined, start = buffer.part(envs), 0
    for fragment in fragments:
        end = start + len(fragment.rewards)
        for target, source in _pairs(joined, fragment):
            _place(target[start:end], source)
        start = end
    offsets = np.cumsum([0] + [len(f.rewards) for f in fragments])
    joined.finals = Finals(
        np.concatenate([f.finals.envs + o for f, o in zip(fragments, offsets, strict=False)]),
        np.concatenate([f.finals.steps for f in fragments]),
        _concatenate([f.finals.obs for f in fragments]),
        _concatenate([f.finals.state for f in fragments]),
    )
    joined.episodes = _concatenate([f.episodes for f in fragments])
    joined.restarted = np.concatenate([f.restarted for f in fragments])
    return joined


def fill(part: Fragment, fragment: Fragment) -> int:
    """Copy a fragment into its place in the buffer; returns the number of bytes.

    `part` does not share memory with `fragment` afterwards.
    """
    count = 0
    for target, source in _pairs(part, fragment):
        target[...] = source
        count += source.nbytes
    ends = fragment.finals
    part.finals = Finals(
        ends.envs.copy(), ends.steps.copy(), copy_arrays(ends.obs), copy_arrays(ends.state)
    )
    part.episodes = {name: array.copy() for name, array in fragment.episodes.items()}
    part.moments = {name: copy_arrays(moments) for name, moments in fragment.moments.items()}
    part.restarted = fragment.restarted.copy()
    part.seconds = dict(fragment.seconds)
    return count


def _pairs(target: Fragment, source: Fragment) -> Iterator[tuple[Array, Array]]:
    """Pairs of corresponding arrays of two fragments, [num_envs, ...] each."""
    for name in _STEPS:
        yield getattr(target, name), getattr(source, name)
    for name in _NAMED:
        for key, array in getattr(target, name).items():
            yield array, getattr(source, name)[key]


def _place(target: Array, source: Array) -> None:
    if target.__array_interface__["data"] != source.__array_interface__["data"]:
        target[...] = source


def _concatenate(parts: list[Observations]) -> Observations:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_finite(fragment: Fragment, first_env: int) -> None:
    """Refuse experience with a NaN or infinity, naming the first in time."""
    if fault := non_finite(fragment, first_env):
        raise fault


def non_finite(fragment: Fragment, first_env: int) -> NonFinite | None:
    """The first NaN or infinity in time, if there is one."""
    named = {f"observation '{name}'": array for name, array in fragment.obs.items()}
    named |= {"action": fragment.actions, "log-probability": fragment.log_probs}
    named |= {"reward": fragment.rewards}
    named |= {f"final observation '{n}'": array for n, array in fragment.finals.obs.items()}
    named |= {f"last observation '{n}'": array for n, array in fragment.last_obs.items()}
    found: list[tuple[int, int, str]] = []
    for name, array in named.items():
        if array.dtype.kind != "f" or np.isfinite(array.sum(dtype=np.float64)):
            continue
        where = np.argwhere(~np.isfinite(array))
        if not len(where):  # Finite numbers whose sum is infinite cannot be learned from either.
            return NonFinite(f"the sum of all {name}s of an iteration (values too large)")
        envs, steps = where[:, 0], where[:, 1] if where.shape[1] > 1 else where[:, 0]
        if name.startswith("final"):
            envs, steps = fragment.finals.envs[envs], fragment.finals.steps[envs]
        elif name.startswith("last"):
            steps = np.full(len(where), fragment.rewards.shape[1])
        first = int(np.argmin(steps))
        column = f", column {where[first][-1]}" if "observation" in name or name == "action" else ""
        text = f"{name} of environment {first_env + envs[first]}, step {steps[first]}{column}"
        found.append((int(steps[first]), int(envs[first]), text))
    if not found:
        return None
    _, env, text = min(found, key=lambda item: item[0])  # The first in time, then in `named`.
    mine = {n: fragment.finals.envs == env if n.startswith("final") else [env] for n in named}
    arrays = {n.replace("'", "").replace(" ", "_"): a[mine[n]] for n, a in named.items()}
    return NonFinite(text, arrays)


def check_division(
    sizes: Sizes,
    ratios: Callable[[SimpleNamespace], tuple[Ratio, ...]],
    options: Mapping[str, str],
    otherwise: Callable[[Sizes], str],
) -> None:
    """Raise `UsageError` at the first part that does not divide its whole.

    ratios: called with the sizes as attributes. options: command-line options of the sizes that may
    be changed. otherwise: makes the message if no change of a single size is enough.
    """

    def nearest(field: str, direction: int) -> list[int]:
        """The nearest size below or above the given one with which everything divides, if any."""
        given = sizes[field]
        for distance in range(1, min(max(given, 64), _FARTHEST) + 1):
            size = given + direction * distance
            tried = ratios(SimpleNamespace(**{**sizes, field: size})) if size > 0 else ()
            if tried and all(whole and whole % part == 0 for _, whole, _, part in tried):
                return [size]
        return []

    for whole_name, whole, part_name, part in ratios(SimpleNamespace(**sizes)):
        if whole % part:
            found = {option: nearest(n, -1) + nearest(n, 1) for n, option in options.items()}
            clauses = [f"{o} {' or '.join(map('{:,}'.format, n))}" for o, n in found.items() if n]
            works = f"Sizes that work: {'; or '.join(clauses)}." if clauses else otherwise(sizes)
            raise UsageError(
                f"{part_name} {part:,} does not divide {whole_name} {whole:,}. {works}"
            )


def nearest_divisor(whole: int, part: int) -> int:
    """The divisor of `whole` nearest to `part`, the smaller of two; for very large numbers, among
    the divisors that are found quickly."""
    least = min(math.isqrt(whole), _FARTHEST)
    divisors = {d for i in range(1, least + 1) if whole % i == 0 for d in (i, whole // i)}
    return min(sorted(divisors), key=lambda d: abs(d - part))


class StepWindows:
    """Next windows of every step of a fragment [num_envs, steps], gathered when they are needed.

    That is the observation of the next step; at the end of an episode its last observation (and
    not the first of the next episode); at the last step the observation after it.
    """

    def __init__(self, part: Fragment, name: str) -> None:
        self._obs, self._last = part.obs[name], part.last_obs[name]
        self._finals = part.finals.obs[name]
        self.shape: tuple[int, int] = part.rewards.shape
        """(rows, steps)."""
        self._final_of: Array = np.full(self.shape, -1, np.int64)
        self._final_of[part.finals.envs, part.finals.steps] = np.arange(len(part.finals.envs))

    def at(self, envs: Array, steps: Array) -> Array:
        """[n, frames, features]: a copy of the next windows of the steps (envs [n], steps [n])."""
        end = self.shape[1] - 1
        windows: Array = self._obs[envs, np.minimum(steps + 1, end)]
        after = steps == end
        windows[after] = self._last[envs[after]]
        final = self._final_of[envs, steps]
        over = final >= 0
        windows[over] = self._finals[final[over]]
        return windows

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """Draw `num` next windows, uniformly and with replacement."""
        chosen = generator.integers(0, self.shape[0] * self.shape[1], num)
        return self.at(*np.divmod(chosen, self.shape[1]))


class WindowRing:
    """A ring buffer of the last `capacity` windows.

    Its array has its full size from the start, so that the size of a checkpoint is constant.
    """

    def __init__(
        self, capacity: int, window: tuple[int, int], device: torch.device | None = None
    ) -> None:
        """device: "meta" to plan the size alone."""
        self.windows = torch.zeros((capacity, *window), device=device)
        self.count = 0
        """Windows added so far."""

    def __len__(self) -> int:
        return min(self.count, len(self.windows))

    def add(self, windows: Array) -> None:
        """Replace the oldest windows by [n, frames, features]; n is at most the capacity."""
        places = (self.count + np.arange(len(windows))) % len(self.windows)
        self.windows.numpy()[places] = windows
        self.count += len(windows)

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """Draw `num` windows, uniformly and with replacement."""
        drawn: Array = self.windows.numpy()[generator.integers(0, len(self), num)]
        return drawn

    def state_dict(self) -> Tree:
        return {"windows": self.windows, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        self.windows.copy_(torch.as_tensor(state["windows"]))
        self.count = int(state["count"])
