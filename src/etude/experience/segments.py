"""The segment buffer: all rows of an iteration in preallocated arrays, filled in place.

A row's steps are contiguous, so `[rows, steps, ...]` seen as `[rows * k, horizon, ...]` is the
same memory: a segment never mixes two rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from etude.core.contracts import Array, ArraySpec, EnvSpec, Finals, Fragment, Observations
from etude.core.errors import NonFinite, UsageError


@dataclass(frozen=True)
class SegmentGeometry:
    """How rows, steps, segments, minibatches and shards divide; illegal sizes are refused."""

    rows: int
    steps: int
    horizon: int
    minibatch: int
    shards: int
    group_rows: int

    def __post_init__(self) -> None:
        _must_divide("collector.rows", self.rows, "collector.group_rows", self.group_rows)
        _must_divide(
            "the number of groups (collector.rows / collector.group_rows)",
            self.rows // self.group_rows,
            "learner.shards",
            self.shards,
        )
        _must_divide("algorithm.rollout_steps", self.steps, "algorithm.horizon", self.horizon)
        _must_divide(
            "algorithm.minibatch_size",
            self.minibatch,
            "algorithm.horizon x learner.shards",
            self.horizon * self.shards,
        )
        _must_divide(
            "the buffer (collector.rows x algorithm.rollout_steps)",
            self.rows * self.steps,
            "algorithm.minibatch_size",
            self.minibatch,
        )

    @property
    def buffer_steps(self) -> int:
        return self.rows * self.steps

    @property
    def num_groups(self) -> int:
        return self.rows // self.group_rows

    @property
    def num_segments(self) -> int:
        return self.buffer_steps // self.horizon

    @property
    def num_minibatches(self) -> int:
        return self.buffer_steps // self.minibatch

    @property
    def segments_per_minibatch(self) -> int:
        return self.minibatch // self.horizon

    def shard_rows(self, shard: int) -> slice:
        size = self.rows // self.shards
        return slice(shard * size, (shard + 1) * size)


def nearest_divisors(whole: int, part: int, count: int = 4) -> list[int]:
    """The divisors of `whole` nearest to `part`."""
    divisors = {d for i in range(1, int(whole**0.5) + 1) if whole % i == 0 for d in (i, whole // i)}
    return sorted(sorted(divisors, key=lambda d: abs(d - part))[:count])


def _must_divide(whole_name: str, whole: int, part_name: str, part: int) -> None:
    if whole % part == 0:
        return
    below, above = whole // part * part, (whole // part + 1) * part
    wholes = " or ".join(f"{size:,}" for size in (below, above) if size > 0)
    parts = ", ".join(f"{size:,}" for size in nearest_divisors(whole, part))
    raise UsageError(
        f"{part_name} {part:,} does not divide {whole_name} {whole:,}. "
        f"Sizes that work: {whole_name} {wholes}; or {part_name} {parts}."
    )


def buffer_specs(env: EnvSpec) -> dict[str, ArraySpec]:
    """What is stored for every step: observations under "obs/<name>", then the rest."""
    specs = {f"obs/{name}": spec for name, spec in env.observations.items()}
    specs["actions"] = env.action.array
    for name in ("log_probs", "rewards"):
        specs[name] = ArraySpec((), "float32")
    for name in ("terminated", "truncated"):
        specs[name] = ArraySpec((), "bool")
    return specs


def aligned(shape: tuple[int, ...], dtype: str) -> Array:
    """A zeroed array at an address of 64 bytes.

    Matrix kernels may round differently at other alignments, and numpy promises only 16.
    """
    kind: torch.dtype = getattr(torch, dtype)
    return torch.zeros(shape, dtype=kind).numpy()


class SegmentBuffer:
    """Preallocated memory for one iteration; a group writes straight into its own part."""

    def __init__(self, env: EnvSpec, rows: int, steps: int) -> None:
        self.arrays = {
            name: aligned((rows, steps, *spec.shape), spec.dtype)
            for name, spec in buffer_specs(env).items()
        }
        self.last_obs = {
            name: aligned((rows, *spec.shape), spec.dtype)
            for name, spec in env.observations.items()
        }

    @staticmethod
    def num_bytes(env: EnvSpec, rows: int, steps: int) -> int:
        """What the constructor will allocate."""
        per_step = sum(spec.num_bytes for spec in buffer_specs(env).values())
        per_row = sum(spec.num_bytes for spec in env.observations.values())
        return rows * (steps * per_step + per_row)

    def part(self, rows: slice) -> Fragment:
        """An empty fragment whose arrays are views of these rows."""
        view = {name: array[rows] for name, array in self.arrays.items()}
        nothing: Array = np.zeros(0, np.int64)
        return Fragment(
            obs={n.removeprefix("obs/"): a for n, a in view.items() if n.startswith("obs/")},
            actions=view["actions"],
            log_probs=view["log_probs"],
            rewards=view["rewards"],
            terminated=view["terminated"],
            truncated=view["truncated"],
            last_obs={name: array[rows] for name, array in self.last_obs.items()},
            finals=Finals(nothing, nothing, {}),
            episodes={},
            moments={},
        )


def join(fragments: list[Fragment], buffer: SegmentBuffer, rows: slice) -> Fragment:
    """Consecutive groups' fragments as one, over the buffer rows they fill.

    A fragment that was written elsewhere (on another machine) is copied to its place.
    """
    joined, start = buffer.part(rows), 0
    for fragment in fragments:
        end = start + len(fragment.rewards)
        for name in ("actions", "log_probs", "rewards", "terminated", "truncated"):
            _place(getattr(joined, name)[start:end], getattr(fragment, name))
        for name in joined.obs:
            _place(joined.obs[name][start:end], fragment.obs[name])
            _place(joined.last_obs[name][start:end], fragment.last_obs[name])
        start = end
    offsets = np.cumsum([0] + [len(f.rewards) for f in fragments])
    joined.finals = Finals(
        np.concatenate([f.finals.rows + o for f, o in zip(fragments, offsets, strict=False)]),
        np.concatenate([f.finals.steps for f in fragments]),
        _concatenate([f.finals.obs for f in fragments]),
    )
    joined.episodes = _concatenate([f.episodes for f in fragments])
    return joined


def _place(target: Array, source: Array) -> None:
    if target.__array_interface__["data"] != source.__array_interface__["data"]:
        target[...] = source


def _concatenate(parts: list[Observations]) -> Observations:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def check_finite(fragment: Fragment, first_row: int) -> None:
    """Refuse experience with a NaN or infinity in it, naming the first."""
    named = {f"observation '{name}'": array for name, array in fragment.obs.items()}
    named |= {f"final observation '{n}'": array for n, array in fragment.finals.obs.items()}
    named |= {"action": fragment.actions, "log-probability": fragment.log_probs}
    named |= {"reward": fragment.rewards}
    for name, array in named.items():
        if array.dtype.kind != "f" or np.isfinite(array.sum(dtype=np.float64)):
            continue
        bad = np.argwhere(~np.isfinite(array))
        if not len(bad):  # Finite numbers whose sum is not: still no basis for an update.
            raise NonFinite(f"the sum of all {name}s of an iteration (values too large)")
        first = bad[0]
        if name.startswith("final"):
            row, step = int(fragment.finals.rows[first[0]]), int(fragment.finals.steps[first[0]])
        else:
            row, step = int(first[0]), int(first[1])
        column = f", column {first[-1]}" if array.ndim == 3 or name.startswith("final") else ""
        arrays = {n.replace("'", "").replace(" ", "_"): a[row : row + 1] for n, a in named.items()}
        raise NonFinite(f"{name} of row {first_row + row}, step {step}{column}", arrays)
