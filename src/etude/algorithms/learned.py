"""Rewards of an earlier run, as they are: a network that says what steps are worth, not trained."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, field_validator

from etude.algorithms.rewards import RewardSource
from etude.core.contracts import ActionSpec, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.learning.sampling import Batch
from etude.models.reward_networks import RewardNetwork
from etude.planning.kinds import RewardsConfig
from etude.planning.loading import check_reads, load_taught
from etude.planning.resolve import Resolved


class LearnedConfig(RewardsConfig):
    """The reward that an earlier run learned."""

    kind: Literal["learned"] = Field("learned", description="By a reward network that is there.")
    run: str = Field("", description="A reward-only run, or a run that learned rewards by rrd.")

    @field_validator("run")
    @classmethod
    def _whole_path(cls, run: str) -> str:
        """The run is found again from another folder, and so must be this one."""
        return str(Path(run).absolute()) if run else run

    def reads(self, observations: dict[str, ArraySpec]) -> Collection[str]:
        return load_taught(Path(self.run)).network.config.reads if self.run else ()

    def for_replay(self, run: Resolved, key: Key | None, device: torch.device) -> LearnedRewards:
        if not self.run:
            raise UsageError(
                "rewards.kind learned needs a run that learned them: --rewards.run RUN."
            )
        taught = load_taught(Path(self.run))
        check_reads(taught.network, run.spec)
        return LearnedRewards(taught.network, None if taught.action else run.spec.action, device)


class LearnedRewards(RewardSource):
    """A reward network that stays as it is. Its arrays are state: the run that it comes from may
    learn on without changing this one."""

    def __init__(
        self, network: RewardNetwork, action: ActionSpec | None, device: torch.device
    ) -> None:
        """action: of the policy that learns, where the network was taught the environment's units
        and not a policy's."""
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
        arrays = {name: torch.as_tensor(array) for name, array in state["network"].items()}
        self.network.load_state_dict(arrays)
