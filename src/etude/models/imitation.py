"""How a policy imitates actions: the window of a demonstration that it learns from, and the loss.

A policy of one's own may define `imitation_window` and `imitation_loss` itself; those of PPO, SAC
and TD3 imitate as this module says.
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
    """What of a demonstration a policy learns from, around each of its steps."""

    past: int
    """Observations before that of the step."""
    ahead: int
    """Observations after that of the step."""
    actions: int
    """Actions, from the step's own on."""


class Demonstrations(NamedTuple):
    """Windows of demonstrations as tensors."""

    obs: dict[str, torch.Tensor]
    """{name: [n, past + 1 + ahead, ...]}, raw."""
    actions: torch.Tensor
    """[n, actions, dims]: those of a box in [-1, 1]."""
    valid: torch.Tensor
    """[n, actions] bool: the action is within its episode."""


@runtime_checkable
class Imitates(Protocol):
    """A policy that says itself how it imitates."""

    def imitation_window(self, horizon: int) -> Window:
        """horizon: steps that a recurrent policy is to learn from together."""

    def imitation_loss(self, shown: Demonstrations, generator: np.random.Generator) -> torch.Tensor:
        """The loss [n, actions] of each demonstrated action."""


def imitation_window(policy: BasePolicy, horizon: int) -> Window:
    """The window that a policy learns from; `horizon` steps together if it is recurrent."""
    if isinstance(policy, Imitates):
        return policy.imitation_window(horizon)
    if policy.state_specs:
        return Window(0, horizon - 1, horizon)
    return Window(0, 0, 1)


def imitation_loss(
    policy: BasePolicy, shown: Demonstrations, generator: np.random.Generator
) -> torch.Tensor:
    """The mean loss [] over the demonstrated actions that are within their episodes."""
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
            f"A policy of the kind {policy.config.kind} does not say how it imitates: give it "
            "imitation_window and imitation_loss (etude.models.imitation)."
        )
    weights = shown.valid.to(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def _of_actor_critic(policy: ActorCritic, shown: Demonstrations) -> torch.Tensor:
    """Of each demonstrated action [n, actions]; a recurrent policy begins with an empty memory."""
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
    """[...]: how far a policy is from actions [..., n] at prepared features.

    Squared errors of the most likely action in a box, or minus the log-probability of choices. The
    spread of box actions is left alone: it is for whoever explores from here.
    """
    outputs, _ = policy._forward(policy._encoded(features), memory)
    distribution = policy._distribution(outputs, features)
    if policy.action.kind == "box":
        return (distribution.mode() - actions).square().mean(-1)
    return -distribution.log_prob(actions)
