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
"""How far from what was asked a size that works is looked for."""


@dataclass(frozen=True)
class SegmentGeometry:
    """How environments, steps, segments, minibatches and shards divide; other sizes are refused."""

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
    """Sizes near those given that work together; steps stay, and num_envs where it can."""
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
    """What is stored for every step: observations under "obs/<name>", then the rest."""
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
"""Bytes; and so many of anything are a multiple of it."""


def aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """A zeroed array at an address of 64 bytes.

    Matrix kernels may round differently at other alignments, and numpy promises only 16.
    """
    kind: torch.dtype = getattr(torch, dtype)
    return torch.zeros(shape, dtype=kind).numpy()


@dataclass(frozen=True)
class BufferSpec:
    """What a buffer holds: [num_envs, steps] of steps, and a policy's state per segment.

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
        """What the buffer will allocate."""
        return sum(spec.num_bytes for spec in self.shapes().values())


class SegmentBuffer:
    """Preallocated memory for one iteration; a group writes straight into its own part."""

    def __init__(self, spec: BufferSpec, envs: range | None = None) -> None:
        """envs: those of the buffer that are needed here; all if left out.

        Some before them are held as well, so that each is aligned as in a whole buffer.
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

    At a segment's first step it is not asked for: the state kept with the segment knows.
    """
    starts: Array = np.zeros(part.rewards.shape, np.bool_)
    starts[:, 1:] = (part.terminated | part.truncated)[:, :-1]
    starts[:, 1:] |= part.present[:, 1:] & ~part.present[:, :-1]
    starts = starts.reshape(-1, horizon)
    starts[:, 0] = False
    return starts


def join(fragments: list[Fragment], buffer: SegmentBuffer, envs: slice) -> Fragment:
    """Consecutive groups' fragments as one, over the environments of the buffer that they fill.

    A fragment that was written elsewhere (on another machine) is copied to its place.
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
    """Put a fragment that was written elsewhere into its place; the bytes that were copied.

    Nothing of `part` shares memory with `fragment` afterwards.
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
    """The arrays of two fragments that hold the same, [num_envs, ...] each."""
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
    """Refuse experience with a NaN or infinity in it, naming the first in time."""
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
        if not len(where):  # Finite numbers whose sum is not: still no basis for an update.
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

    ratios: called with the sizes as attributes. options: what a person calls the sizes that may be
    changed. otherwise: what to say where no change of a single one is enough.
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
    """The divisor of `whole` nearest to `part`, the smaller one of two; of very large ones, among
    those that are quickly found."""
    least = min(math.isqrt(whole), _FARTHEST)
    divisors = {d for i in range(1, least + 1) if whole % i == 0 for d in (i, whole // i)}
    return min(sorted(divisors), key=lambda d: abs(d - part))


class StepWindows:
    """For every step of a fragment [num_envs, steps] the window it led to, gathered when asked for.

    That is the observation of the next step; where the episode ended, what it ended on (and not
    the window of the episode that began); after the last step, what comes after it.
    """

    def __init__(self, part: Fragment, name: str) -> None:
        self._obs, self._last = part.obs[name], part.last_obs[name]
        self._finals = part.finals.obs[name]
        self.shape: tuple[int, int] = part.rewards.shape
        """(rows, steps)."""
        self._final_of: Array = np.full(self.shape, -1, np.int64)
        self._final_of[part.finals.envs, part.finals.steps] = np.arange(len(part.finals.envs))

    def at(self, envs: Array, steps: Array) -> Array:
        """[n, frames, features], a copy: what the steps (envs [n], steps [n]) led to."""
        end = self.shape[1] - 1
        windows: Array = self._obs[envs, np.minimum(steps + 1, end)]
        after = steps == end
        windows[after] = self._last[envs[after]]
        final = self._final_of[envs, steps]
        over = final >= 0
        windows[over] = self._finals[final[over]]
        return windows

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """`num` of them, each step as likely as any other, with replacement."""
        chosen = generator.integers(0, self.shape[0] * self.shape[1], num)
        return self.at(*np.divmod(chosen, self.shape[1]))


class WindowRing:
    """The last `capacity` windows it was given.

    Its array has its full size from the start, so a checkpoint's size is known and does not
    drift.
    """

    def __init__(
        self, capacity: int, window: tuple[int, int], device: torch.device | None = None
    ) -> None:
        """On the meta device it is only planned."""
        self.windows = torch.zeros((capacity, *window), device=device)
        self.count = 0
        """Windows given so far."""

    def __len__(self) -> int:
        return min(self.count, len(self.windows))

    def add(self, windows: Array) -> None:
        """[n, frames, features], n at most the capacity: they replace the oldest."""
        places = (self.count + np.arange(len(windows))) % len(self.windows)
        self.windows.numpy()[places] = windows
        self.count += len(windows)

    def draw(self, generator: np.random.Generator, num: int) -> Array:
        """`num` of those held, each as likely as any other, with replacement."""
        drawn: Array = self.windows.numpy()[generator.integers(0, len(self), num)]
        return drawn

    def state_dict(self) -> Tree:
        return {"windows": self.windows, "count": self.count}

    def load_state_dict(self, state: Tree) -> None:
        self.windows.copy_(torch.as_tensor(state["windows"]))
        self.count = int(state["count"])
