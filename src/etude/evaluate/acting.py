"""Loaded policies that act in your own loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.output import html_table
from etude.evaluate import fresh
from etude.models.policies import BasePolicy
from etude.rollout.group import Inference, restart


@dataclass(frozen=True)
class Episode:
    """One episode of a policy in an environment."""

    observations: list[Any]
    """Raw observations of the environment; one more than actions."""
    actions: Array
    """[length, ...]"""
    rewards: Array
    """[length] float64"""
    terminated: bool
    """Whether the task ended it, and not a limit of steps."""
    info: dict[str, Any]
    """The info of the last step, with statistics of Etude's own tasks: is_success and others."""

    @property
    def total_reward(self) -> float:
        """The return: the sum of the rewards."""
        return float(self.rewards.sum())

    @property
    def length(self) -> int:
        """The number of steps."""
        return len(self.rewards)


class LoadedPolicy:
    """A policy that acts: `load_policy(path).act(obs)`, or a whole `episode(env)`.

    A recurrent policy keeps its state between calls: call `reset` at the start of an episode.
    """

    def __init__(self, policy: BasePolicy) -> None:
        self.policy = policy
        self._state: dict[str, Array] = {}
        self._infer = Inference(policy)
        self._num_envs = 0

    def __repr__(self) -> str:
        reads = ", ".join(f"{n} {s.shape}" for n, s in self.policy.actor_observations.items())
        kind = getattr(self.policy.config, "kind", type(self.policy).__name__)
        memory = ", with memory" if self.is_recurrent else ""
        return f"<policy {kind}{memory}: reads {reads}; acts {self.policy.action.kind}>"

    def _repr_html_(self) -> str:
        """A table of its observations and actions, for a notebook."""
        policy = self.policy
        kind = getattr(policy.config, "kind", type(policy).__name__)
        reads = {f"reads {name}": spec.shape for name, spec in policy.actor_observations.items()}
        memory = {"memory": "yes: call reset() where episodes begin"} if self.is_recurrent else {}
        action = policy.action
        acts = f"{action.kind} {action.sizes or action.array.shape}"
        weights = f"{sum(each.numel() for each in policy.parameters()):,}"
        return html_table(f"Policy {kind}", {**reads, "acts": acts, **memory, "weights": weights})

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a state, which `reset` clears at the start of an episode."""
        return bool(self.policy.state_specs)

    def reset(self, env_ids: Array | Sequence[int] | None = None) -> None:
        """Reset the recurrent state of the given environments, or of all.

        env_ids: indices of environments, or a mask [num_envs] bool, for example
        terminated | truncated.
        """
        if env_ids is None:
            self._state = {}
            return
        chosen = np.asarray(env_ids)
        if chosen.dtype == np.bool_:
            chosen = np.flatnonzero(chosen)
        restart(self._state, self.policy, chosen.astype(np.int64))

    def act(
        self, obs: Any, deterministic: bool = True, rng: np.random.Generator | None = None
    ) -> Array:
        """The most likely action, in the units of the environment.

        `obs`: {name: array} with what the actor reads (what only a critic reads may be left out),
        or the array alone where the actor reads one observation. Arrays are of one environment,
        or [num_envs, ...]. deterministic: False samples the action as in training, from `rng`.
        """
        arrays, single = self._batch(obs)
        num_envs = len(next(iter(arrays.values())))
        if any(len(array) != num_envs for array in self._state.values()):
            raise UsageError(
                "This policy is recurrent and its state is of another number of environments than "
                f"the {num_envs} it is given: call reset() where episodes begin."
            )
        state = self._state or self.policy.initial_state(num_envs)
        noise = None
        if not deterministic:
            drawn = self.policy.noise(rng or np.random.default_rng(), 1, num_envs)
            noise = torch.from_numpy(drawn)[0]
        if num_envs != self._num_envs:  # Inference keeps arrays of one size.
            self._infer, self._num_envs = Inference(self.policy), num_envs
        answer, _, self._state = self._infer(arrays, state, noise)
        actions = self.policy.action.to_env(answer)
        return np.asarray(actions[0]) if single else actions

    def episode(
        self,
        env: Any,
        seed: int | None = None,
        deterministic: bool = True,
        max_steps: int | None = None,
    ) -> Episode:
        """Play one episode in a `gymnasium.Env`, for example `etude.make("reach")`.

        seed: of the environment's reset and of sampled actions. max_steps: limit of steps, for
        environments without one.
        """
        if hasattr(env, "single_action_space"):
            raise UsageError(
                "An episode is played in one environment: make it with etude.make or "
                "gymnasium.make, not with make_vec."
            )
        rng = np.random.default_rng(seed)
        self.reset()
        obs, info = env.reset(seed=seed)
        observations: list[Any] = [obs]
        actions: list[Array] = []
        rewards: list[float] = []
        terminated = truncated = False
        while not (terminated or truncated) and (max_steps is None or len(actions) < max_steps):
            actions.append(self.act(obs, deterministic, rng))
            obs, reward, terminated, truncated, info = env.step(actions[-1])
            observations.append(obs)
            rewards.append(float(reward))
        self.reset()
        return Episode(observations, np.stack(actions), np.array(rewards), bool(terminated), info)

    def _batch(self, obs: Any) -> tuple[dict[str, Array], bool]:
        """({name: [num_envs, n] float32} of the actor, whether `obs` is of one environment)."""
        specs = self.policy.actor_observations
        if isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict):
            raise UsageError(
                "act() takes the observation alone, and this is what env.reset() returns, "
                "(observation, info): write obs, info = env.reset()."
            )
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
        arrays = {name: _array(name, obs[name]) for name in specs}
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


def _array(name: str, value: Any) -> Array:
    """An observation as float32; raises if it is not made of numbers."""
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The observation '{name}' must be an array of numbers, not {type(value).__name__}: "
            f"{' '.join(str(error).split()).rstrip('.')}."
        ) from error


def load_policy(path: str | Path, trust: bool = False) -> LoadedPolicy:
    """Load the best policy of a run, the policy of a checkpoint, or a copied `policy/` folder.

    trust: code that the policy names, such as a kind `module:Class`, may run, now and later.
    """
    return LoadedPolicy(fresh.load(Path(path), trust))
