"""Imitation of demonstrated actions: windows of demonstrations and the loss of a policy.

A policy may define `imitation_window` and `imitation_loss` itself; this module defines them for the
policies of PPO, SAC and TD3.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from etude.core.errors import UsageError
from etude.models.actor_critic import ActorCritic, Memory
from etude.models.actors import Actor
from etude.models.policies import BasePolicy, Features


class Window(NamedTuple):
    """Part of a demonstration that a policy reads for each of its steps."""

    past: int
    """Number of observations before the step."""
    ahead: int
    """Number of observations after the step."""
    actions: int
    """Number of actions, beginning at the step."""


class Demonstrations(NamedTuple):
    """Windows of demonstrations as tensors."""

    obs: dict[str, torch.Tensor]
    """{name: [n, past + 1 + ahead, ...]}, raw."""
    actions: torch.Tensor
    """[n, actions, dims]; of a box, in [-1, 1]."""
    valid: torch.Tensor
    """[n, actions] bool: the action is within its episode."""


@runtime_checkable
class Imitates(Protocol):
    """A policy that defines its own imitation."""

    def imitation_window(self, horizon: int) -> Window:
        """The window; horizon: steps of a sequence for a recurrent policy."""

    def imitation_loss(self, shown: Demonstrations, generator: np.random.Generator) -> torch.Tensor:
        """Loss [n, actions] of the demonstrated actions."""


def imitation_window(policy: BasePolicy, horizon: int) -> Window:
    """The window of a policy; for a recurrent one, sequences of `horizon` steps."""
    if isinstance(policy, Imitates):
        return policy.imitation_window(horizon)
    if policy.state_specs:
        return Window(0, horizon - 1, horizon)
    return Window(0, 0, 1)


def imitation_loss(
    policy: BasePolicy, shown: Demonstrations, generator: np.random.Generator
) -> torch.Tensor:
    """Mean loss [] over the demonstrated actions within their episodes."""
    if isinstance(policy, Imitates):
        losses = policy.imitation_loss(shown, generator)
    elif isinstance(policy, ActorCritic):
        losses = _of_actor_critic(policy, shown)
    elif isinstance(policy, Actor):
        features = policy.prepare(shown.obs)
        actions, _ = policy._choose(features, None)
        losses = (actions - shown.actions).square().mean(-1)
    else:
        raise UsageError(
            f"A policy of the kind {policy.config.kind} cannot imitate: define "
            "imitation_window and imitation_loss (etude.models.imitation)."
        )
    weights = shown.valid.to(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def _of_actor_critic(policy: ActorCritic, shown: Demonstrations) -> torch.Tensor:
    """Loss [n, actions] of the demonstrated actions; a recurrent policy begins with zero state."""
    memory = None
    if policy.state_specs:
        num, steps = shown.valid.shape
        starts = torch.zeros(num, steps, dtype=torch.bool, device=shown.valid.device)
        starts[:, 0] = True
        zeros = policy.initial_state(num)
        state = {name: torch.from_numpy(x).to(starts.device) for name, x in zeros.items()}
        memory = Memory(state, starts)
    return action_errors(policy, policy.prepare(shown.obs), memory, shown.actions)


def action_errors(
    policy: ActorCritic, features: Features, memory: Memory | None, actions: torch.Tensor
) -> torch.Tensor:
    """Errors [...] of a policy against actions [..., n] at prepared features.

    Mean squared error of the most likely box action, or the negative log-probability of discrete
    ones. The standard deviation is not trained.
    """
    outputs, _ = policy._forward(policy._encoded(features), memory)
    distribution = policy._distribution(outputs, features)
    if policy.action.kind == "box":
        return (distribution.mode() - actions).square().mean(-1)
    return -distribution.log_prob(actions)
