"""Loaded policies, to act with in a loop of one's own."""

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

    A recurrent policy keeps its state from call to call: `reset` it where an episode begins.
    """

    def __init__(self, policy: BasePolicy) -> None:
        self.policy = policy
        self._state: dict[str, Array] = {}

    def reset(self, env_ids: Array | Sequence[int] | None = None) -> None:
        """An episode begins: in the given environments, or in all of them."""
        if env_ids is None:
            self._state = {}
        else:
            restart(self._state, self.policy, np.asarray(env_ids))

    def act(self, obs: Any) -> Array:
        """The most likely action, as the environment takes it.

        `obs`: {name: array} with what the actor reads (what only a critic reads may be left out),
        or the array alone where the actor reads one observation. Arrays are of one environment,
        or [num_envs, ...].
        """
        arrays, single = self._batch(obs)
        num_envs = len(next(iter(arrays.values())))
        if any(len(array) != num_envs for array in self._state.values()):
            raise UsageError(
                "This policy is recurrent and its state is of another number of environments than "
                f"the {num_envs} it is given: call reset() where episodes begin."
            )
        state = self._state or self.policy.initial_state(num_envs)
        answer, _, self._state = Inference(self.policy)(arrays, state, None)
        actions = self.policy.action.to_env(answer)
        return np.asarray(actions[0]) if single else actions

    def _batch(self, obs: Any) -> tuple[dict[str, Array], bool]:
        """{name: [num_envs, n] float32} of what the actor reads; and whether it had no num_envs."""
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
        lengths = {len(array) if array.ndim else 0 for array in arrays.values()}
        for name, array in arrays.items():
            if array.shape[1:] != specs[name].shape or len(lengths) > 1:
                raise UsageError(
                    f"This policy reads '{name}' as {specs[name].shape}, or as [num_envs, ...] of "
                    f"that with the same num_envs for every observation; it was given "
                    f"{', '.join(f'{n!r} {a.shape}' for n, a in arrays.items())}."
                )
        return arrays, single


def load_policy(path: str | Path, trust: bool = False) -> LoadedPolicy:
    """The policy of a run (its best), of a checkpoint, or of a copied `policy/` folder.

    trust: code that the policy names, such as a kind `module:Class`, may run, now and later.
    """
    return LoadedPolicy(fresh.load(Path(path), trust))
