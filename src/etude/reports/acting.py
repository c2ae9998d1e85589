"""Policies that act: what a run has learned, for one's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.models.policies import BasePolicy
from etude.reports import fresh
from etude.rollout.group import Inference, restart


class LoadedPolicy:
    """A policy that acts: `load_policy(path).act(obs)`.

    A recurrent one remembers from call to call: `reset` it where an episode begins.
    """

    def __init__(self, policy: BasePolicy) -> None:
        self.policy = policy
        self._state: dict[str, Array] = {}

    def reset(self, rows: Array | Sequence[int] | None = None) -> None:
        """An episode begins: in the given rows, or in all of them."""
        if rows is None:
            self._state = {}
        else:
            restart(self._state, self.policy, np.asarray(rows))

    def act(self, obs: Any) -> Array:
        """The most likely action, as the environment takes it.

        `obs`: {name: array} with what the actor reads (what only a critic reads may be left out),
        or the array alone where the actor reads one observation; a single observation or rows of
        them.
        """
        arrays, single = self._rows(obs)
        rows = len(next(iter(arrays.values())))
        if any(len(array) != rows for array in self._state.values()):
            raise UsageError(
                f"This policy has a memory of other rows than the {rows} it is given: call "
                "reset() where episodes begin."
            )
        state = self._state or self.policy.initial_state(rows)
        answer, _, self._state = Inference(self.policy)(arrays, state, None)
        actions = self.policy.action.to_env(answer)
        return np.asarray(actions[0]) if single else actions

    def _rows(self, obs: Any) -> tuple[dict[str, Array], bool]:
        """{name: [rows, n] float32} of what the actor reads; and whether it was a single one."""
        specs = self.policy.actor_observations
        if not isinstance(obs, dict):
            if len(specs) > 1:
                raise UsageError(
                    f"This policy acts on {len(specs)} observations: give "
                    f"{{{', '.join(f'{name!r}: ...' for name in specs)}}} instead of one array."
                )
            obs = dict.fromkeys(specs, obs)
        if missing := [name for name in specs if name not in obs]:
            raise UsageError(
                f"This policy acts on {', '.join(map(repr, specs))}; '{missing[0]}' is missing "
                f"from {', '.join(map(repr, obs)) or 'an empty observation'}."
            )
        arrays = {name: np.asarray(obs[name], np.float32) for name in specs}
        single = all(array.shape == specs[name].shape for name, array in arrays.items())
        if single:
            arrays = {name: array[None] for name, array in arrays.items()}
        rows = {len(array) if array.ndim else 0 for array in arrays.values()}
        for name, array in arrays.items():
            if array.shape[1:] != specs[name].shape or len(rows) > 1:
                raise UsageError(
                    f"This policy reads '{name}' as {specs[name].shape}, or as rows of that, the "
                    f"same number of every observation; it was given "
                    f"{', '.join(f'{n!r} {a.shape}' for n, a in arrays.items())}."
                )
        return arrays, single


def load_policy(path: str | Path) -> LoadedPolicy:
    """The policy of a run (its best), of a checkpoint, or of a copied `policy/` folder."""
    return LoadedPolicy(fresh.load(Path(path)))
