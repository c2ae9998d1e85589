"""What algorithms that train one policy have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.core.clock import Clock
from etude.core.contracts import Array, Broadcast, Observations
from etude.core.trees import Tree, copy_arrays
from etude.models.networks import load_arrays
from etude.models.policies import BasePolicy, Features


class PolicyAlgorithm:
    """An `Algorithm` whose policy is what acts, and what a checkpoint's `policy/` holds."""

    policy: BasePolicy
    device: torch.device

    def put(self, array: Array) -> torch.Tensor:
        """An array on the learner's device."""
        return torch.from_numpy(array).to(self.device)

    def prepare(self, obs: Observations) -> Features:
        """Those of the observations {name: [..., n]} that the policy reads, normalised."""
        return self.policy.prepare({name: self.put(obs[name]) for name in self.policy.observations})

    def broadcast(self, clock: Clock) -> Broadcast:
        state = {name: tensor.cpu() for name, tensor in self.policy.state_dict().items()}
        return Broadcast(clock.now.iterations, copy_arrays(state))

    def policy_parts(self) -> tuple[Tree, Tree]:
        return dict(self.policy.state_dict()), self.policy.contract()

    def load_policy(self, arrays: Tree) -> None:
        load_arrays(self.policy, arrays)

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Begins with another run's policy; an algorithm may take over more of its state."""
        self.load_policy(arrays)

    def retire(self, states: Sequence[Tree]) -> None:
        """Deletes files that none of these states needs; here, there are none."""

    def close(self) -> None:
        """Lets go of open files; here, there are none."""
