"""Rewards of an earlier run, as they are: a network that says what steps are worth, not trained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, field_validator

from etude.algorithms.rewards import Batch, Experience
from etude.core.contracts import ActionSpec, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree
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


class LearnedRewards:
    """A `RewardSource` that stays as it is. Its arrays are state: the run that it comes from may
    learn on without changing this one."""

    def __init__(
        self, network: RewardNetwork, action: ActionSpec | None, device: torch.device
    ) -> None:
        """action: of the policy that learns, where the network was taught the environment's units
        and not a policy's."""
        self.network = network.to(device).requires_grad_(False)
        self._action, self._device = action, device

    def batch(self, store: Experience, generator: np.random.Generator, size: int) -> Batch:
        steps = store.sample_transitions(generator, size)
        drawn = Batch.of(steps, torch.from_numpy(steps.rewards), self._device)
        actions = drawn.actions
        if self._action is not None:
            actions = torch.from_numpy(self._action.to_env(steps.actions)).to(self._device)
        with torch.no_grad():
            return drawn._replace(rewards=self.network(drawn.obs, actions, drawn.next_obs))

    def update(self, stores: Sequence[Experience], key: Key) -> dict[str, float]:
        return {}

    def state_dict(self) -> Tree:
        return {"network": dict(self.network.state_dict()), "contract": self.network.contract()}

    def load_state_dict(self, state: Tree) -> None:
        arrays = {name: torch.as_tensor(array) for name, array in state["network"].items()}
        self.network.load_state_dict(arrays)
