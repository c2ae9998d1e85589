"""Conversion of new steps into records of an episode store: checks, order, layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from etude.core.contracts import Array, ArraySpec, Finals, Fragment, Observations
from etude.core.errors import UsageError
from etude.data.store.geometry import INDEX, OBS, StoreGeometry

_FIELDS = ("actions", "rewards", "terminated", "truncated")
_STAGING = 4 << 20
"""Bytes of records that are built at a time; images of many steps are much larger."""


@dataclass(frozen=True)
class Intake:
    """The next steps of all lanes, [lanes, steps], in parts of consecutive lanes."""

    geometry: StoreGeometry
    parts: list[Observations]
    """Every field of the geometry: {"obs/<name>": [num_envs, steps, ...], "actions": ...}."""
    ends: Finals
    """With observations {"obs/<name>": [k, ...]}; `envs` are lanes."""
    last: list[Observations] | None
    """{"obs/<name>": [num_envs, ...]} after the last step; None if no episode is open then."""
    restarted: Array
    """[lanes] bool: the first step begins a new episode, even if one was open before."""

    @classmethod
    def of_fragments(cls, geometry: StoreGeometry, fragments: Sequence[Fragment]) -> Intake:
        """An intake whose lanes are the environments of the fragments, in order."""
        if not all(f.present.all() for f in fragments):
            raise UsageError("An episode store takes no steps without an agent: use algorithm ppo.")
        parts = [_prefixed(f.obs) | {n: getattr(f, n) for n in _FIELDS} for f in fragments]
        offsets = np.cumsum([0] + [len(f.rewards) for f in fragments])
        ended = [_prefixed(f.finals.obs) for f in fragments if len(f.finals.envs)]
        ends = Finals(
            np.concatenate([f.finals.envs + o for f, o in zip(fragments, offsets, strict=False)]),
            np.concatenate([f.finals.steps for f in fragments]),
            {name: np.concatenate([obs[name] for obs in ended]) for name in (*ended, {})[0]},
            {},
        )
        restarted = np.concatenate([f.restarted for f in fragments])
        return cls(geometry, parts, ends, [_prefixed(f.last_obs) for f in fragments], restarted)

    @classmethod
    def of_episode(
        cls,
        geometry: StoreGeometry,
        obs: Observations,
        actions: Array,
        rewards: Array,
        terminated: bool,
    ) -> Intake:
        """An intake of one whole episode, obs [T + 1, ...] and the rest [T, ...], for one lane."""
        steps = len(rewards)
        last: Array = np.zeros((1, steps), bool)
        last[:, -1:] = True
        part = _prefixed({name: array[None, :-1] for name, array in obs.items()})
        part |= {"actions": actions[None], "rewards": rewards[None]}
        part |= {"terminated": last & terminated, "truncated": last & (not terminated)}
        end = _prefixed({name: array[-1:] for name, array in obs.items()})
        ends = Finals(np.array([0]), np.array([steps - 1]), end, {})
        return cls(geometry, [part], ends, None, np.zeros(1, bool))

    @property
    def num_steps(self) -> int:
        return int(self.parts[0]["rewards"].shape[1])

    def check(self) -> None:
        """Refuse arrays that do not match the store's geometry."""
        sizes = [len(part["rewards"]) for part in self.parts]
        steps, lanes, specs = self.num_steps, self.geometry.lanes, self.geometry.stored
        if sum(sizes) != lanes or steps < 1:
            raise ValueError(
                f"{sum(sizes)} environments of {steps} steps for a store of {lanes} lanes"
            )
        observed = {name: spec for name, spec in specs.items() if name.startswith(OBS)}
        for num, part in zip(sizes, self.parts, strict=True):
            _check_arrays(part, dict(specs), (num, steps))
        for num, obs in zip(sizes, self.last or [], strict=self.last is not None):
            _check_arrays(obs, observed, (num,))
        if len(self.ends.envs):
            _check_arrays(self.ends.obs, observed, (len(self.ends.envs),))

    def first(self, name: str) -> Array:
        """A field at the first step, [lanes, ...]."""
        return np.concatenate([part[name][:, 0] for part in self.parts])

    def done(self) -> Array:
        """[lanes, steps] bool: the last steps of episodes."""
        return np.concatenate([part["terminated"] | part["truncated"] for part in self.parts])

    def finish_episodes(
        self, time: int, starts: Array, returns: Array
    ) -> tuple[Array, Array, Array]:
        """`INDEX` records of the episodes that end here, in that order; new starts and returns.

        time: of the first step; starts [lanes] int64 and returns [lanes] float64: of the open
        episodes. Rewards are added step by step, so that a return does not depend on how the steps
        were divided into fragments.
        """
        rewards, done = np.concatenate([part["rewards"] for part in self.parts]), self.done()
        starts, returns, tables = starts.copy(), returns.copy(), [np.empty(0, INDEX)]
        for step in range(self.num_steps):
            returns += rewards[:, step]
            (lanes,) = done[:, step].nonzero()
            if not len(lanes):
                continue
            after = time + step + 1
            table = np.empty(len(lanes), INDEX)
            table["start"] = starts[lanes] * self.geometry.lanes + lanes
            table["length"], table["return"] = after - starts[lanes], returns[lanes]
            tables.append(table)
            starts[lanes], returns[lanes] = after, 0.0
        return np.concatenate(tables), starts, returns

    def final_records(self) -> Array:
        """The last observations of the episodes that end here, in that order."""
        envs, steps, obs, _ = self.ends
        order = np.lexsort((envs, steps))
        expected = np.stack(self.done().T.nonzero())
        if not np.array_equal(np.stack((steps[order], envs[order])), expected):
            raise ValueError("final observations do not belong to the steps that ended an episode")
        records = np.zeros(len(order), self.geometry.final_record)
        for name, array in obs.items():
            records[name] = array[order]
        return records

    def step_records(self) -> Iterator[tuple[Array, int]]:
        """Step records in time order, a few at a time: (records [m], number that are ahead).

        Records ahead have only the observations after the last step.
        """
        lanes, record = self.geometry.lanes, self.geometry.step_record
        piece = max(1, _STAGING // (lanes * record.itemsize))
        for start in range(0, self.num_steps, piece):
            stop = min(start + piece, self.num_steps)
            ahead = int(self.last is not None and stop == self.num_steps)
            # Zeros, since unused bytes are hashed too.
            staged = np.zeros((stop - start + ahead, lanes), record)
            first = 0
            for i, part in enumerate(self.parts):
                lane = slice(first, first + len(part["rewards"]))
                for name, array in part.items():
                    staged[name][: stop - start, lane] = array[:, start:stop].swapaxes(0, 1)
                for name, array in self.last[i].items() if self.last and ahead else ():
                    staged[name][-1, lane] = array
                first = lane.stop
            yield staged.reshape(-1), ahead * lanes


def _prefixed(obs: Observations) -> Observations:
    return {OBS + name: array for name, array in obs.items()}


def _check_arrays(arrays: Observations, specs: dict[str, ArraySpec], lead: tuple[int, ...]) -> None:
    if arrays.keys() != specs.keys():
        raise ValueError(f"fields {sorted(arrays)} for a store of {sorted(specs)}")
    for name, spec in specs.items():
        array, shape = arrays[name], lead + spec.shape
        if array.shape != shape or array.dtype != np.dtype(spec.dtype):
            raise ValueError(
                f"{name!r} is {array.dtype} {array.shape}; the store holds {spec.dtype} {shape}"
            )
