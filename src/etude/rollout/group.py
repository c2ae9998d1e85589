"""A group of environment rows: the unit of determinism, of parallelism and of recovery."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np
import torch

from etude.core.contracts import (
    Array,
    BatchEnv,
    EnvSpec,
    Finals,
    Fragment,
    Observations,
    Policy,
    Snapshot,
    StepResult,
)
from etude.core.errors import NonFinite
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays


class Inference:
    """A policy called on whole groups of rows, numpy in and numpy out.

    Observations are staged in torch's own memory, so that alignment, and with it every bit,
    does not depend on where an environment keeps its arrays.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._stage: dict[str, torch.Tensor] = {}

    def __call__(
        self, obs: Observations, state: Tree, noise: torch.Tensor | None
    ) -> tuple[Array, Array, Tree]:
        """Actions [rows, n], log-probabilities [rows] and the next recurrent state."""
        for name, array in obs.items():
            if name not in self._stage:
                self._stage[name] = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype)
            self._stage[name].numpy()[...] = array
        with torch.inference_mode():
            answer = self.policy.act(self._stage, state, noise)
            return answer.actions.numpy(), answer.log_probs.numpy(), answer.state


class OpenEpisodes:
    """Return and length of the episodes in progress, [rows] each."""

    def __init__(self, rows: int) -> None:
        self.returns = np.zeros(rows)
        self.lengths = np.zeros(rows, np.int64)

    def add(self, result: StepResult) -> dict[str, Array]:
        """Count one step; statistics {name: [k] float64} of the episodes that it finished."""
        self.returns += result.reward
        self.lengths += 1
        rows = result.final_rows
        finished = {
            "return": self.returns[rows],
            "length": self.lengths[rows].astype(np.float64),
            **result.episodes,
        }
        self.returns[rows] = 0.0
        self.lengths[rows] = 0
        return finished


class Group:
    """`rollout(policy, snapshot, key) -> (fragment, snapshot')` over one set of rows.

    Nothing here outlives a call but the environment instance, which is put into the given
    snapshot unless it already stands there.
    """

    def __init__(self, env: BatchEnv) -> None:
        self.env = env
        # The snapshot the environment stands in, if it stands in any.
        self._held: Snapshot | None = None

    def follow(self, curriculum: Tree) -> None:
        """Ease the environment, where it can be, for the rollouts to come; {} is the whole task."""
        if hasattr(self.env, "follow"):
            self.env.follow(curriculum)

    @property
    def snapshot(self) -> Snapshot:
        """Where the last rollout ended."""
        if self._held is None:
            raise RuntimeError("the rollout has not ended")
        return self._held

    def begin(self, policy: Policy, key: Key) -> Snapshot:
        """The snapshot of a group whose rows all start their first episode."""
        rows = self.env.num_rows
        obs = self.env.reset(key.child("env"))
        return self._keep(obs, policy.initial_state(rows), OpenEpisodes(rows))

    def rollout(
        self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int, out: Fragment
    ) -> tuple[Fragment, Snapshot]:
        """Fill `out` with the next steps of every row; `key` is the group's."""
        for _ in self.steps(policy, snapshot, key, iteration, out):
            pass
        return out, self.snapshot

    def steps(
        self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int, out: Fragment
    ) -> Iterator[None]:
        """A rollout that pauses after every step, and may be continued by another thread.

        Few threads can so share many groups evenly. At its end `snapshot` is the new one.
        """
        if snapshot is not self._held:
            snapshot = self._continue(policy, snapshot, key, iteration)
        self._held = None
        rows, steps = out.rewards.shape
        obs: Observations = snapshot["obs"]
        state: Tree = snapshot["policy"]
        open_episodes = OpenEpisodes(rows)
        open_episodes.returns = snapshot["open"]["returns"].copy()
        open_episodes.lengths = snapshot["open"]["lengths"].copy()
        generator = key.child("act", iteration).generator()
        noise = torch.from_numpy(policy.noise(generator, steps, rows))
        infer, to_env = Inference(policy), self.env.spec.action.to_env
        results: list[tuple[int, StepResult, dict[str, Array]]] = []
        seconds = dict.fromkeys(("physics", "environment", "inference"), 0.0)
        for step in range(steps):
            start = perf_counter()
            for name, array in obs.items():
                out.obs[name][:, step] = array
            actions, log_probs, state = infer(obs, state, noise[step])
            _check_actions(actions, obs, f"step {step}")
            acted = perf_counter()
            result = self.env.step(to_env(actions))
            seconds["inference"] += acted - start
            physics = getattr(self.env, "physics_seconds", 0.0)
            seconds["physics"] += physics
            seconds["environment"] += perf_counter() - acted - physics
            out.actions[:, step] = actions
            out.log_probs[:, step] = log_probs
            out.rewards[:, step] = result.reward
            out.terminated[:, step] = result.terminated
            out.truncated[:, step] = result.truncated
            finished = open_episodes.add(result)
            if len(result.final_rows):
                results.append((step, result, finished))
                state = restart(state, policy, result.final_rows)
            obs = result.obs
            yield
        for name, array in obs.items():
            out.last_obs[name][...] = array
        out.finals, out.episodes = _gather(results, self.env.spec)
        out.moments = {
            name: moments(array) for name, array in out.obs.items() if array.dtype.kind == "f"
        }
        out.seconds = seconds
        self._keep(obs, state, open_episodes)

    def _continue(self, policy: Policy, snapshot: Snapshot, key: Key, iteration: int) -> Snapshot:
        """Put the environment into a snapshot; one that has none starts new episodes."""
        if not snapshot["env"]:
            return self.begin(policy, key.child("again", iteration))
        self.env.restore(snapshot["env"], key.child("env"))
        return snapshot

    def _keep(self, obs: Observations, state: Tree, open_episodes: OpenEpisodes) -> Snapshot:
        snapshot: Snapshot = {
            "env": self.env.snapshot(),
            "obs": copy_arrays(obs),
            "policy": copy_arrays(state),
            "open": {"returns": open_episodes.returns, "lengths": open_episodes.lengths},
        }
        self._held = snapshot
        return snapshot


def restart(state: Tree, policy: Policy, rows: Array) -> Tree:
    """Recurrent state with the given rows put back to an episode's start."""
    if not state:
        return state
    fresh = policy.initial_state(len(rows))
    changed = copy_arrays(state)
    for name, array in changed.items():
        array[rows] = fresh[name]
    return changed


def _gather(
    results: list[tuple[int, StepResult, dict[str, Array]]], spec: EnvSpec
) -> tuple[Finals, dict[str, Array]]:
    """Finished episodes of a whole rollout, in (step, row) order."""
    names = ("return", "length", *spec.statistics)
    if not results:
        nothing: Array = np.zeros(0, np.int64)
        empty = {
            name: np.zeros((0, *spec.shape), spec.dtype) for name, spec in spec.observations.items()
        }
        return Finals(nothing, nothing, empty), {name: np.zeros(0) for name in names}
    finals = Finals(
        np.concatenate([result.final_rows for _, result, _ in results]),
        np.concatenate([np.full(len(r.final_rows), step, np.int64) for step, r, _ in results]),
        {
            name: np.concatenate([result.final_obs[name] for _, result, _ in results])
            for name in spec.observations
        },
    )
    return finals, {name: np.concatenate([f[name] for _, _, f in results]) for name in names}


def _check_actions(actions: Array, obs: Observations, when: str) -> None:
    """Stop a NaN before it reaches the simulator; the observation it came from is named first."""
    if np.isfinite(np.add.reduce(actions, axis=None)):
        return
    named = {f"observation '{name}'": array for name, array in obs.items()} | {"action": actions}
    for name, array in named.items():
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            row, column = int(bad[0][0]), int(bad[0][-1])
            one = {n: a[row : row + 1] for n, a in {**obs, "action": actions}.items()}
            raise NonFinite(f"{name} of row {row} of its group, {when}, column {column}", one)


def moments(array: Array) -> Tree:
    """Count, mean [n] and sum of squared deviations [n], float64, of vectors [rows, steps, n]."""
    flat = array.reshape(-1, array.shape[-1]).astype(np.float64)
    with np.errstate(invalid="ignore"):  # The learner refuses what is not finite, and names it.
        mean = flat.mean(axis=0)
        flat -= mean
        squares = np.einsum("ij,ij->j", flat, flat)
    return {"count": np.asarray(float(len(flat))), "mean": mean, "m2": squares}


def evaluate(env: BatchEnv, policy: Policy, episodes: int, key: Key) -> dict[str, Array]:
    """The first `episodes` episodes of every row, most likely actions: {name: [n] float64}.

    Each row counts the same number of episodes, so short ones are not over-represented.
    Ordered by episode, then row.
    """
    rows = env.num_rows
    obs = env.reset(key)
    state = policy.initial_state(rows)
    open_episodes, infer = OpenEpisodes(rows), Inference(policy)
    counted = np.zeros(rows, np.int64)
    kept: dict[str, Array] = {
        name: np.zeros((episodes, rows)) for name in ("return", "length", *env.spec.statistics)
    }
    while counted.min() < episodes:
        actions, _, state = infer(obs, state, None)
        _check_actions(actions, obs, "in evaluation")
        result = env.step(env.spec.action.to_env(actions))
        finished = open_episodes.add(result)
        wanted = counted[result.final_rows] < episodes
        at = result.final_rows[wanted]
        for name, values in finished.items():
            kept[name][counted[at], at] = values[wanted]
        counted[at] += 1
        if len(result.final_rows):
            state = restart(state, policy, result.final_rows)
        obs = result.obs
    return {name: values.reshape(-1) for name, values in kept.items()}
