"""What runs leave behind, loaded: the arrays of a policy, and the reward that was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.core.contracts import ActionSpec, Array, EnvSpec
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.models.reward_networks import (
    CONTRACT_KIND,
    RewardNetwork,
    reward_network_from_contract,
    rewards_of,
)
from etude.runs import checkpoint


def policy_parts(path: Path) -> tuple[Tree, Tree]:
    """(arrays, contract) of a run (its best, final or latest), a checkpoint or a policy folder."""
    chosen = policy_path(path)
    try:
        return checkpoint.load_policy_parts(chosen)
    except checkpoint.DamagedCheckpoint as error:
        fix = f"Remove {chosen} to use the next one" if chosen != path else "Use another one"
        raise EtudeError(f"{error} {fix}.") from error


def policy_path(path: Path) -> Path:
    """The checkpoint whose policy stands for a run, or the path itself."""
    if (path / "checkpoints").is_dir():
        for name in ("best", "final", "latest"):
            if (path / "checkpoints" / name).exists():
                return path / "checkpoints" / name
        raise UsageError(f"{path} has no checkpoint yet; `etude resume {path}` continues it.")
    own = ("policy", "manifest.json", "contract.json", "arrays.safetensors")
    if path.exists() and not any((path / name).exists() for name in own):
        raise UsageError(
            f"{path} is not a policy of Etude's: give a run's folder, one of its checkpoints, or a "
            "copy of a policy/ folder."
        )
    return path


class Start(NamedTuple):
    """What a new run begins with."""

    path: Path
    arrays: Tree
    contract: Tree
    training: Tree | None
    """The algorithm's state; None where only the policy was kept."""


def start_path(path: Path) -> Path:
    """A run's newest checkpoint that can be resumed, or the path itself."""
    if not (path / "checkpoints").is_dir():
        return path
    newest = checkpoint.newest_verified(path / "checkpoints", lambda text: None, repair=False)
    return policy_path(path) if newest is None else newest


def load_start(path: Path) -> Start:
    """What a new run takes from the run, checkpoint or policy folder at `path`."""
    chosen = start_path(path)
    if (chosen / "training").is_dir():
        try:
            arrays, contract, training = checkpoint.load_training(chosen)
        except checkpoint.DamagedCheckpoint as error:
            raise EtudeError(f"{error} Use another one.") from error
        return Start(chosen, arrays, contract, training.get("algorithm", {}))
    return Start(chosen, *policy_parts(chosen), None)


class Taught(NamedTuple):
    """A reward network, and what it was taught."""

    network: RewardNetwork
    action: ActionSpec | None
    """What its actions are a policy's of, in [-1, 1]; None where they are a dataset's own."""


def load_taught(path: Path) -> Taught:
    """The reward network of a reward-only run or of one that learned rewards by rrd."""
    arrays, contract = policy_parts(path)
    if contract.get("kind") == CONTRACT_KIND:
        return Taught(reward_network_from_contract(contract, arrays), None)
    state = _reward_state(path)
    if not all(isinstance(state.get(name), dict) for name in ("contract", "network")):
        raise UsageError(
            f"{path} learned no reward: give a reward-only run, a run with --rewards.kind rrd, or "
            "one of their checkpoints."
        )
    network = reward_network_from_contract(state["contract"], state["network"])
    return Taught(network, network.action)


def _reward_state(path: Path) -> Tree:
    """What a run's newest checkpoint, or a checkpoint, holds of its reward source."""
    newest: Path | None = path
    if (path / "checkpoints").is_dir():
        newest = checkpoint.newest_verified(path / "checkpoints", lambda text: None, repair=False)
    if newest is None or not (newest / "training").is_dir():
        return {}
    algorithm = checkpoint.load_training(newest)[2].get("algorithm")
    state = algorithm.get("rewards") if isinstance(algorithm, dict) else None
    return state if isinstance(state, dict) else {}


def check_reads(network: RewardNetwork, env: EnvSpec) -> None:
    """Refuse a reward that was taught other observations than there are."""
    for name, spec in network.observations.items():
        if env.observations.get(name) != spec:
            raise UsageError(
                f"The reward of rewards.run reads '{name}' as {spec.dtype} of shape {spec.shape}, "
                "which is not what there is to learn from here: use the reward of a run on the "
                "same data."
            )
    if network.action.array != env.action.array:
        raise UsageError(
            "The reward of rewards.run was taught other actions than there are to learn from here: "
            "use the reward of a run on the same data."
        )


class LoadedReward:
    """A learned reward: `load_reward(path).rewards(obs, actions, next_obs)`."""

    def __init__(self, taught: Taught) -> None:
        self.network, self._action = taught

    def rewards(self, obs: Any, actions: Any, next_obs: Any) -> Array:
        """What each of n steps is worth, [n] float64.

        obs, next_obs: {name: [n, ...]} before and after the step, or the array alone where one
        observation is read; actions: [n, dims] as the environment takes them.
        """
        names = list(self.network.observations)
        here, after = (
            {n: _rows(o[n] if isinstance(o, dict) else o, self.network, n) for n in names}
            for o in (obs, next_obs)
        )
        taken = np.array(actions, self.network.action.array.dtype).reshape(
            -1, *self.network.action.array.shape
        )
        if self._action is not None:
            taken = self._action.from_env(taken)
        return rewards_of(self.network, here, taken, after)


def _rows(array: Any, network: RewardNetwork, name: str) -> Array:
    """[n, ...] of what the network reads under a name."""
    spec = network.observations[name]
    rows = np.ascontiguousarray(array, spec.dtype)
    if rows.shape[1:] != spec.shape:
        raise UsageError(f"The reward reads '{name}' as rows of {spec.shape}, not {rows.shape}.")
    return rows


def load_reward(path: str | Path) -> LoadedReward:
    """The reward of a reward-only run (its best), of a run with rrd (its newest), or of one of
    their checkpoints."""
    return LoadedReward(load_taught(Path(path)))
