"""A group of environments: the unit of determinism, of parallelism and of recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from math import isfinite
from time import perf_counter
from typing import Any

import numpy as np
import torch

from etude.core.contracts import (
    AbsentAgents,
    Array,
    BatchEnv,
    Bounded,
    EnvSpec,
    Finals,
    FollowsCurriculum,
    Fragment,
    Observations,
    Policy,
    Restarts,
    Snapshot,
    StepResult,
    TimedPhysics,
    ability,
)
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays
from etude.models.networks import moments


class Inference:
    """Policy inference on whole groups of environments, from numpy to numpy.

    Inputs are copied to memory allocated by torch, so that alignment, and with it every bit of the
    result, does not depend on the environment's arrays.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._names = tuple(policy.actor_observations)
        self._obs, self._state = _Stage(), _Stage()
        self._without_gradients = torch.inference_mode()

    def __call__(
        self, obs: Observations, state: dict[str, Array], noise: torch.Tensor | None
    ) -> tuple[Array, Array | None, dict[str, Array]]:
        """New arrays: actions [num_envs, n], log-probabilities [num_envs], next recurrent state.

        Log-probabilities are None if `policy.log_probs` computes them for the whole rollout.
        """
        for name in self._names:
            self._obs.write(name, obs[name])
        for name, array in state.items():
            self._state.write(name, array)
        with self._without_gradients:
            actions, log_probs, after = self.policy.act(
                self._obs.tensors, self._state.tensors, noise
            )
            following = {name: tensor.numpy() for name, tensor in after.items()}
            return actions.numpy(), None if log_probs is None else log_probs.numpy(), following


class _Stage:
    """Named tensors that are written through numpy views."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: dict[str, Array] = {}

    def write(self, name: str, array: Array) -> None:
        if name not in self.tensors:
            self.tensors[name] = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype)
            self._arrays[name] = self.tensors[name].numpy()
        self._arrays[name][...] = array


class OpenEpisodes:
    """Return and length of the episodes in progress, [num_envs] each."""

    def __init__(
        self, num_envs: int, returns: Array | None = None, lengths: Array | None = None
    ) -> None:
        """returns, lengths: [num_envs] from a snapshot; None if all episodes begin."""
        self.returns = np.zeros(num_envs) if returns is None else returns.copy()
        self.lengths = np.zeros(num_envs, np.int64) if lengths is None else lengths.copy()

    def add(self, result: StepResult, present: Array | None) -> dict[str, Array]:
        """Add one step; returns statistics {name: [k] float64} of the episodes that it finished.

        present: [num_envs] bool, environments with an agent in this step; None for all.
        """
        self.returns += result.reward
        self.lengths += 1 if present is None else present
        env_ids = result.final_envs
        if not len(env_ids):
            return {}
        finished = {
            "return": self.returns[env_ids],
            "length": self.lengths[env_ids].astype(np.float64),
            **result.episodes,
        }
        self.returns[env_ids] = 0.0
        self.lengths[env_ids] = 0
        return finished


class Group:
    """`rollout(policy, snapshot, key) -> (fragment, snapshot')` over one set of environments.

    The only state between calls is the environment instance, which is restored from the given
    snapshot unless it is already in that state, and the curriculum of the broadcast.
    """

    def __init__(self, env: BatchEnv) -> None:
        self.env = env
        self._round = 0
        # The snapshot that equals the environment's present state, if there is one.
        self._held: Snapshot | None = None

    def follow(self, curriculum: Tree) -> None:
        """Apply a curriculum to the next rollouts, if the environment supports it; {} is the whole
        task.

        Environments of a snapshot from another round of the curriculum are restarted.
        """
        self._round = int(curriculum.get("round", 0))
        if (env := ability(self.env, FollowsCurriculum)) is not None:
            env.follow(curriculum)

    @property
    def snapshot(self) -> Snapshot:
        """The state at the end of the last rollout."""
        if self._held is None:
            raise RuntimeError("the rollout has not ended")
        return self._held

    def begin(self, policy: Policy, key: Key) -> Snapshot:
        """Reset all environments; returns the first snapshot."""
        num_envs = self.env.num_envs
        obs = self.env.reset(key.child("env"))
        return self._keep(obs, policy.initial_state(num_envs), OpenEpisodes(num_envs))

    def rollout(
        self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int, out: Fragment
    ) -> tuple[Fragment, Snapshot]:
        """Fill `out` with the next steps of every environment. key: of the group."""
        for _ in self.steps(policy, snapshot, key, iteration, out):
            pass
        return out, self.snapshot

    def steps(
        self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int, out: Fragment
    ) -> Iterator[None]:
        """A rollout as a generator that yields after every step; any thread may continue it.

        So a few threads share many groups evenly. At the end, `self.snapshot` is the new one.
        """
        given, snapshot = snapshot, self._continue(policy, snapshot, key, iteration)
        out.restarted[...] = snapshot is not given
        self._held = None
        num_envs, steps = out.rewards.shape
        # Recurrent states are stored once per segment.
        horizon = steps // next(iter(out.states.values())).shape[1] if out.states else steps
        obs: Observations = snapshot["obs"]
        state: dict[str, Array] = snapshot["policy"]
        absent, timed = ability(self.env, AbsentAgents), ability(self.env, TimedPhysics)
        present = _present(absent)
        open_episodes = OpenEpisodes(num_envs, **snapshot["open"])
        generator = key.child("act", iteration).generator()
        noise = torch.from_numpy(policy.noise(generator, steps, num_envs))
        # [steps, num_envs], transposed at the end: writing columns of [num_envs, steps] is slow.
        rewards, terminated, truncated = (
            np.empty((steps, num_envs), array.dtype)
            for array in (out.rewards, out.terminated, out.truncated)
        )
        # Arrays that are known before the first step are written once.
        out.present[...] = True
        with torch.inference_mode():
            if (known := policy.log_probs(noise)) is not None:
                out.log_probs[...] = known.numpy().T
        infer, to_env = Inference(policy), self.env.spec.action.to_env
        results: list[tuple[Finals, dict[str, Array]]] = []
        physics = in_step = inference = 0.0
        for step, draw in enumerate(noise.unbind()):
            start = perf_counter()
            _put(out.obs, obs, step)
            if step % horizon == 0:
                _put(out.states, state, step // horizon)
            if present is not None:
                out.present[:, step] = present
            actions, log_probs, state = infer(obs, state, draw)
            _check_actions(actions, obs, f"step {step}")
            acted = perf_counter()
            result = self.env.step(to_env(actions))
            inference += acted - start
            in_step += perf_counter() - acted
            physics += 0.0 if timed is None else timed.physics_seconds
            out.actions[:, step] = actions
            if log_probs is not None:
                out.log_probs[:, step] = log_probs
            rewards[step] = result.reward
            terminated[step] = result.terminated
            truncated[step] = result.truncated
            finished = open_episodes.add(result, present)
            if len(result.final_envs):
                ending = {name: array[result.final_envs] for name, array in state.items()}
                at = np.full(len(result.final_envs), step, np.int64)
                results.append((Finals(result.final_envs, at, result.final_obs, ending), finished))
            before, present = present, _present(absent)
            restart(state, policy, _beginning(result, before, present))
            obs = result.obs
            yield
        out.rewards[...] = rewards.T
        out.terminated[...] = terminated.T
        out.truncated[...] = truncated.T
        _put(out.last_obs, obs)
        _put(out.last_state, state)
        out.finals, out.episodes = _gather(results, self.env.spec, policy)
        _check_bounds(out, ability(self.env, Bounded))
        out.moments = _moments(out, policy, ... if present is None else out.present)
        environment = in_step - physics
        out.seconds = {"physics": physics, "environment": environment, "inference": inference}
        self._keep(obs, state, open_episodes)

    def _continue(self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int) -> Snapshot:
        """Restore the environment from a snapshot. Without an environment state, or in another
        round of the curriculum, new episodes begin. Returns the snapshot to start from."""
        if snapshot is not self._held:
            if not snapshot["env"]:
                return self.begin(policy, key.child("again", iteration))
            self.env.restore(snapshot["env"], key.child("env"))
        # Snapshots of earlier versions have no round: they are in the first one.
        return snapshot if snapshot.get("round", 0) == self._round else self._restart(policy)

    def _restart(self, policy: Policy) -> Snapshot:
        """Abandon the episodes in progress; all environments begin new ones."""
        restarting = ability(self.env, Restarts)
        if restarting is None:
            raise UsageError(
                "This environment cannot restart its episodes, as a curriculum in rounds requires: "
                "give it a method restart() -> observations."
            )
        num_envs = self.env.num_envs
        return self._keep(
            restarting.restart(), policy.initial_state(num_envs), OpenEpisodes(num_envs)
        )

    def _keep(
        self, obs: Observations, state: dict[str, Array], open_episodes: OpenEpisodes
    ) -> Snapshot:
        snapshot: Snapshot = {
            "env": self.env.snapshot(),
            "obs": copy_arrays(obs),
            "policy": copy_arrays(state),
            "open": {"returns": open_episodes.returns, "lengths": open_episodes.lengths},
            "round": self._round,
        }
        self._held = snapshot
        return snapshot


def _put(out: dict[str, Array], arrays: dict[str, Array], column: int | None = None) -> None:
    """Copy arrays {name: [num_envs, ...]} into a column of {name: [num_envs, columns, ...]}; with
    `column` None, into arrays of the same shape."""
    for name, array in arrays.items():
        if column is None:
            out[name][...] = array
        else:
            out[name][:, column] = array


def restart(state: dict[str, Array], policy: Policy, env_ids: Array) -> None:
    """Reset the recurrent state of environments in which an episode begins."""
    if state and len(env_ids):
        for name, fresh in policy.initial_state(len(env_ids)).items():
            state[name][env_ids] = fresh


def _present(env: AbsentAgents | None) -> Array | None:
    """A copy of the presence [num_envs] bool of agents; None if agents cannot be absent."""
    return None if env is None else env.present.copy()


def _beginning(result: StepResult, before: Array | None, present: Array | None) -> Array:
    """[k] env_ids whose next observation begins an episode: one ended, or the agent appeared."""
    if before is None or present is None:
        return result.final_envs
    came: Array = np.flatnonzero(present & ~before)
    return np.union1d(result.final_envs, came)


def _gather(
    finished: list[tuple[Finals, dict[str, Array]]], spec: EnvSpec, policy: Policy
) -> tuple[Finals, dict[str, Array]]:
    """Finished episodes of a whole rollout, in (step, environment) order."""
    names = ("return", "length", *spec.statistics)
    if not finished:
        nothing: Array = np.zeros(0, np.int64)
        empty = {
            name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in spec.observations.items()
        }
        finals = Finals(nothing, nothing, empty, policy.initial_state(0))
        return finals, {name: np.zeros(0) for name in names}
    ends = [ends for ends, _ in finished]
    finals = Finals(
        np.concatenate([end.envs for end in ends]),
        np.concatenate([end.steps for end in ends]),
        {n: np.concatenate([end.obs[n] for end in ends]) for n in spec.observations},
        {n: np.concatenate([end.state[n] for end in ends]) for n in ends[0].state},
    )
    return finals, {name: np.concatenate([s[name] for _, s in finished]) for name in names}


def _moments(out: Fragment, policy: Policy, mask: Any) -> dict[str, Tree]:
    """Moments of every vector that the policy reads, over the steps of a mask [num_envs, steps]."""
    read = {name: out.obs[name] for name in policy.observations}
    return {name: moments(x[mask]) for name, x in read.items() if x.dtype.kind == "f"}


FAR = 1000.0
"""By this factor an observation may exceed its declared bounds, which are often rough; a value
beyond is an error of units, of memory or of the simulation."""


def _check_bounds(out: Fragment, bounded: Bounded | None) -> None:
    """Raise an error for observations outside the declared bounds by orders of magnitude."""
    for name, (low, high) in bounded.bounds.items() if bounded is not None else ():
        seen = out.obs[name]
        reach = np.nan_to_num(np.maximum(np.abs(low), np.abs(high)).astype(np.float64), posinf=0.0)
        margin = FAR * np.maximum(reach, 1.0)
        least, most = low - margin, high + margin
        if (seen.min(axis=(0, 1)) >= least).all() and (seen.max(axis=(0, 1)) <= most).all():
            continue
        far = np.argwhere((seen < least) | (seen > most))
        if len(far):  # otherwise there is a NaN, which the learner reports
            env, step, *place = far[0].tolist()
            low, high = low[tuple(place)], high[tuple(place)]
            raise UsageError(
                f"Observation '{name}' is {seen[tuple(far[0])]:g} in environment {env} of its "
                f"group, step {step}, column {place[-1] if place else 0}, and its space is from "
                f"{low:g} to {high:g}: correct the value or the space."
            )


def _check_actions(actions: Array, obs: Observations, when: str) -> None:
    """Raise `NonFinite` before actions that are not finite reach the simulator; it names the
    observation that is not finite, if there is one."""
    if isfinite(np.add.reduce(actions, axis=None)):
        return
    named = {f"observation '{name}'": array for name, array in obs.items()} | {"action": actions}
    for name, array in named.items():
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            env, column = int(bad[0][0]), int(bad[0][-1])
            one = {n: a[env : env + 1] for n, a in {**obs, "action": actions}.items()}
            raise NonFinite(f"{name} of row {env} of its group, {when}, column {column}", one)


Watch = Callable[[Array, Array], None]
"""Called after every step of an evaluation with arrays [num_envs]: the number of finished episodes,
and the steps of the episode in progress."""


def evaluate(
    env: BatchEnv,
    policy: Policy,
    episodes: int,
    key: Key,
    stochastic: bool = False,
    watch: Watch = lambda counted, lengths: None,
) -> dict[str, Array]:
    """Play `episodes` episodes in every environment; returns statistics {name: [n] float64}.

    Each environment counts the same number of episodes, so that short episodes are not
    over-represented; agents that were absent have fewer. Ordered by episode, then environment.
    stochastic: sample actions as in training, instead of the most likely ones.
    """
    num_envs, obs = env.num_envs, env.reset(key)
    noise = _draws(policy, key, num_envs) if stochastic else repeat(None)
    state = policy.initial_state(num_envs)
    open_episodes, infer = OpenEpisodes(num_envs), Inference(policy)
    counted = np.zeros(num_envs, np.int64)
    kept: dict[str, Array] = {
        name: np.zeros((episodes, num_envs)) for name in ("return", "length", *env.spec.statistics)
    }
    absent, steps = ability(env, AbsentAgents), 0
    present = _present(absent)
    longest = episodes * (env.spec.max_episode_steps or 0) if present is not None else np.inf
    while counted.min() < episodes and steps < longest:
        steps += 1
        actions, _, state = infer(obs, state, next(noise))
        _check_actions(actions, obs, "in evaluation")
        result = env.step(env.spec.action.to_env(actions))
        finished = open_episodes.add(result, present)
        wanted = counted[result.final_envs] < episodes
        at = result.final_envs[wanted]
        for name, values in finished.items():
            kept[name][counted[at], at] = values[wanted]
        counted[at] += 1
        watch(counted, open_episodes.lengths)
        before, present = present, _present(absent)
        restart(state, policy, _beginning(result, before, present))
        obs = result.obs
    played = np.arange(episodes)[:, None] < counted
    return {name: values[played] for name, values in kept.items()}


def _draws(policy: Policy, key: Key, num_envs: int) -> Iterator[torch.Tensor]:
    """An endless iterator over the policy's noise [num_envs, n] of each step."""
    generator = key.child("act").generator()
    while True:
        yield torch.from_numpy(policy.noise(generator, 1, num_envs))[0]
