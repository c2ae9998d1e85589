"""Rewards from the reward network of an earlier run, which is not trained further."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from etude.core.config import AbsolutePath
from etude.core.contracts import ActionSpec, Array, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.models.networks import load_arrays
from etude.models.reward_networks import (
    CONTRACT_KIND,
    RewardNetwork,
    compute_rewards,
    reward_network_from_contract,
)
from etude.planning.loading import policy_parts
from etude.planning.recipe import Resolved, RewardsConfig
from etude.rl.rewards.given import RewardSource
from etude.rl.sampling import Batch
from etude.runs import checkpoint


class LearnedConfig(RewardsConfig):
    """The reward that an earlier run learned."""

    kind: Literal["learned"] = Field("learned", description="A reward network of an earlier run.")
    run: AbsolutePath = Field("", description="A reward-only run, or a run that learned by rrd.")

    def reads(self, observations: dict[str, ArraySpec]) -> Collection[str]:
        return load_reward(self.run).network.config.reads if self.run else ()

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> LearnedRewards:
        if not self.run:
            raise UsageError(
                "rewards.kind learned needs a run with a reward network: --rewards.run RUN."
            )
        restored = load_reward(self.run)
        check_reads(restored.network, run.spec)
        action = None if restored.action else run.spec.action
        return LearnedRewards(restored.network, action, device)


class LearnedRewards(RewardSource):
    """A fixed reward network. Its arrays are part of the state, so training its run further does
    not change this run."""

    def __init__(
        self, network: RewardNetwork, action: ActionSpec | None, device: torch.device
    ) -> None:
        """action: the policy's action space, if the network reads actions in the environment's
        units; None if it reads a policy's actions."""
        self.network = network.to(device).requires_grad_(False)
        self._action = action

    @torch.no_grad()
    def relabel(self, batch: Batch) -> Batch:
        actions = batch.actions
        if self._action is not None:
            in_env = self._action.to_env(actions.cpu().numpy())
            actions = torch.from_numpy(in_env).to(actions.device)
        return batch._replace(rewards=self.network(batch.obs, actions, batch.next_obs))

    def state_dict(self) -> Tree:
        return {"network": dict(self.network.state_dict()), "contract": self.network.contract()}

    def load_state_dict(self, state: Tree) -> None:
        load_arrays(self.network, state["network"])


def load_reward(path: str | Path) -> LoadedReward:
    """Load the reward of a reward-only run (the best), of a run with rrd (the newest), or of one
    of their checkpoints."""
    arrays, contract = policy_parts(Path(path))
    if contract.get("kind") == CONTRACT_KIND:
        return LoadedReward(reward_network_from_contract(contract, arrays), None)
    state = _reward_state(Path(path))
    if not all(isinstance(state.get(name), dict) for name in ("contract", "network")):
        raise UsageError(
            f"{path} has no learned reward: give a reward-only run, a run with --rewards.kind rrd, "
            "or one of their checkpoints."
        )
    network = reward_network_from_contract(state["contract"], state["network"])
    return LoadedReward(network, network.action)


def _reward_state(path: Path) -> Tree:
    """The state of the reward source in a checkpoint, or in the newest checkpoint of a run."""
    newest: Path | None = path
    if (path / "checkpoints").is_dir():
        newest = checkpoint.newest_verified(path / "checkpoints", lambda text: None, repair=False)
    if newest is None or not (newest / "training").is_dir():
        return {}
    algorithm = checkpoint.load_training(newest)[2].get("algorithm")
    state = algorithm.get("rewards") if isinstance(algorithm, dict) else None
    return state if isinstance(state, dict) else {}


def check_reads(network: RewardNetwork, env: EnvSpec) -> None:
    """Raise an error if the network's observations or actions are not the environment's."""
    for name, spec in network.observations.items():
        if env.observations.get(name) != spec:
            raise UsageError(
                f"The reward of rewards.run reads '{name}' as {spec.dtype} of shape {spec.shape}, "
                "which does not match the observations here: use the reward of a run on the same "
                "data."
            )
    if network.action.array != env.action.array:
        raise UsageError(
            "The actions of the reward of rewards.run do not match those here: use the reward of a "
            "run on the same data."
        )


class LoadedReward:
    """A learned reward: `load_reward(path).rewards(obs, actions, next_obs)`."""

    def __init__(self, network: RewardNetwork, action: ActionSpec | None) -> None:
        """action: the action space for the conversion to [-1, 1], if the network reads a policy's
        actions; None if it reads actions in the environment's units."""
        self.network, self.action = network, action

    def rewards(self, obs: Any, actions: Any, next_obs: Any) -> Array:
        """The reward of each of n steps, [n] float64.

        obs, next_obs: {name: [n, ...]} before and after the step, or the array alone if one
        observation is read; actions: [n, dims] in the environment's units.
        """
        names = list(self.network.observations)
        here, after = (
            {n: _rows(o[n] if isinstance(o, dict) else o, self.network, n) for n in names}
            for o in (obs, next_obs)
        )
        taken = np.array(actions, self.network.action.array.dtype).reshape(
            -1, *self.network.action.array.shape
        )
        if self.action is not None:
            taken = self.action.from_env(taken)
        return compute_rewards(self.network, here, taken, after)


def _rows(array: Any, network: RewardNetwork, name: str) -> Array:
    """Convert an observation to the dtype that the network reads, and check its shape."""
    spec = network.observations[name]
    rows = np.ascontiguousarray(array, spec.dtype)
    if rows.shape[1:] != spec.shape:
        raise UsageError(
            f"The reward reads '{name}' of shape [n, {', '.join(map(str, spec.shape))}], not "
            f"{list(rows.shape)}."
        )
    return rows
