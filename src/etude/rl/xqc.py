"""SAC with normalised critics that predict distributions, after XQC (Palenicek et al. 2025).

The loss of these critics is better conditioned than that of SAC's, so they learn from fewer
transitions and gradient steps:

- *Distributions.* A critic gives each of `atoms` values a probability; its estimate is their mean.
  It is trained by cross-entropy with the target, divided between the two atoms beside it. The atoms
  span the returns of the run so far, so no range has to be set.
- *Batch normalisation* of the critics' inputs and hidden layers. Replayed transitions and the next
  actions of the policy are normalised together, in one pass (CrossQ, Bhatt et al. 2024). The loss
  of the actor and evaluation use running statistics.
- *Weights of length 1.* After each step, the weights of every hidden unit are scaled to length 1,
  which batch normalisation makes harmless: otherwise they would grow, and learn ever more slowly.

One gradient step is that of `sac.py` with the target (`XQC.step`). With several shards, each one
normalises its own part of a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import nn

from etude.core.clock import Clock
from etude.core.contracts import Fragment
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.models.actors import EVERY, Critics
from etude.models.networks import RewardScaler, moments
from etude.models.policies import Features
from etude.planning.recipe import Recipe
from etude.rl.off_policy import ReplayGeometry
from etude.rl.sac import SAC, SACConfig
from etude.rl.sampling import Batch

EPSILON = 1e-5
MOMENTUM = 0.05
"""Share of a minibatch in the running statistics."""
STDS = 5.0
"""The atoms span this number of standard deviations of returns, at least."""


class XQCConfig(SACConfig):
    """SAC with normalised critics that predict distributions."""

    kind: Literal["xqc"] = Field(  # type: ignore[assignment]
        "xqc", description="SAC with normalised critics that predict distributions."
    )
    atoms: int = Field(
        51,
        ge=3,
        le=1_001,
        description="Values to which a critic gives probabilities, from minus to plus the largest "
        "return.",
    )

    def make(self, *parts: Any, **named: Any) -> XQC:
        return XQC(self, *parts, **named)

    def read_at_start(self) -> Collection[str]:
        return (*super().read_at_start(), "atoms")

    def geometry(self, recipe: Recipe) -> ReplayGeometry | None:
        if self.offline or recipe.env is None:
            raise UsageError(
                "xqc learns in an environment, whose returns its critics span: give one with "
                "--env.kind, --env.id or --env.task; `etude train iql` learns from a dataset."
            )
        if getattr(recipe.policy, "layer_norm", "off") != "off":
            raise UsageError(
                "The critics of xqc have batch normalisation in place of layer norm: leave "
                "policy.layer_norm at off."
            )
        return super().geometry(recipe)


def two_hot(atoms: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Distributions [n, k] over evenly spaced atoms [k] with the means `values` [n].

    The probability is divided between the two atoms beside a value. A value beyond the last atom
    has that of the last atom.
    """
    width = atoms[1] - atoms[0]
    values = values.clamp(atoms[0], atoms[-1]).unsqueeze(1)
    return (1.0 - (values - atoms).abs() / width).clamp_min(0.0)


class NormalisedCritics(Critics):
    """Critics with batch normalisation that give `atoms` logits each.

    Layers of all networks are computed by one batched product, as in `Critics`. Running statistics
    and the span of the atoms are parameters without gradient: target networks follow them, and they
    are in checkpoints and in what a compiled step changes.
    """

    span: torch.Tensor
    """[1] the largest atom; the smallest is its negative."""
    units: torch.Tensor
    """[k] the atoms, divided by the span."""

    def __init__(
        self, plain: Critics, layers: Sequence[int], atoms: int, generator: torch.Generator | None
    ) -> None:
        """plain: critics whose inputs and activation these have. layers: their inputs, units of
        hidden layers. generator: as for `Critics`."""
        nn.Module.__init__(self)
        self.num, self.reads, self.encoders = plain.num, plain.reads, plain.encoders
        self._activation, self._hidden = plain._activation, len(layers) - 1
        self.seen: dict[str, torch.Tensor] = {}
        """Moments of the last minibatch, until `end_step`."""
        num, fixed = self.num, {"requires_grad": False}
        for i, (inputs, outputs) in enumerate(pairwise((*layers, atoms))):
            weight = torch.zeros(num, inputs, outputs)
            if generator is not None and i < self._hidden:
                weight.normal_(generator=generator)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))
            self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(num, 1, outputs)))
        for i, units in enumerate(layers):
            own = num if i else 1  # All networks read the same inputs.
            if i:
                scale = nn.Parameter(torch.ones(num, 1, units))
                self.register_parameter(f"norm_weight{i}", scale)
            for name, start in (("mean", torch.zeros), ("variance", torch.ones)):
                moment = nn.Parameter(start(own, 1, units), **fixed)
                self.register_parameter(f"{name}{i}", moment)
        self.span = nn.Parameter(torch.ones(1), **fixed)
        self.units = nn.Parameter(torch.linspace(-1.0, 1.0, atoms), **fixed)
        if generator is not None:
            self.end_step()

    def _part(self, name: str, among: slice | torch.Tensor = EVERY) -> torch.Tensor:
        part: Any = self._parameters[name]
        chosen: torch.Tensor = part[among]
        return chosen

    @property
    def atoms(self) -> torch.Tensor:
        """[k] values to which the networks give probabilities."""
        return self.units * self.span

    def _normal(
        self, i: int, x: torch.Tensor, training: bool, among: slice | torch.Tensor
    ) -> torch.Tensor:
        """Batch normalisation of the inputs [networks, n, units] of layer i, without its scale."""
        if training:
            mean = x.mean(1, keepdim=True)
            variance = (x - mean).square().mean(1, keepdim=True)
            self.seen |= {f"mean{i}": mean.detach(), f"variance{i}": variance.detach()}
        else:
            own = among if i else EVERY
            mean, variance = self._part(f"mean{i}", own), self._part(f"variance{i}", own)
        return (x - mean) * (variance + EPSILON).rsqrt()

    def logits(
        self,
        features: Features,
        actions: torch.Tensor,
        training: bool,
        among: slice | torch.Tensor = EVERY,
    ) -> torch.Tensor:
        """Logits [networks, n, atoms] of actions [n, dims] at prepared features.

        training: normalise by the moments of these n rows, which are then in `seen`; otherwise by
        the running ones.
        """
        x = self._normal(0, self._inputs(features, actions).unsqueeze(0), training, among)
        x = x.expand(len(self._part("bias0", among)), -1, -1)
        for i in range(self._hidden):
            x = torch.bmm(x, self._part(f"weight{i}", among))
            x = self._normal(i + 1, x, training, among)
            scale, shift = self._part(f"norm_weight{i + 1}", among), self._part(f"bias{i}", among)
            x = self._activation(torch.addcmul(shift, x, scale))
        weight, bias = (self._part(f"{name}{self._hidden}", among) for name in ("weight", "bias"))
        return torch.baddbmm(bias, x, weight)

    def values(self, logits: torch.Tensor) -> torch.Tensor:
        """Mean values [...] of logits [..., atoms]."""
        return logits.softmax(-1) @ self.atoms

    def forward(
        self, features: Features, actions: torch.Tensor, among: slice | torch.Tensor = EVERY
    ) -> torch.Tensor:
        """Estimates [networks, n], as those of `Critics`."""
        return self.values(self.logits(features, actions, False, among))

    @torch.no_grad()
    def end_step(self) -> None:
        """Update the running statistics and scale the weights of hidden units to length 1."""
        for name, moment in self.seen.items():
            self._part(name).lerp_(moment, MOMENTUM)
        self.seen = {}
        for i in range(self._hidden):
            weight = self._part(f"weight{i}")
            weight.div_(weight.norm(dim=1, keepdim=True))

    def saved_order(self) -> torch.Tensor:
        """[parameters] indices of a flat vector of the parameters: their own order."""
        every = list(self.parameters())
        return torch.arange(sum(p.numel() for p in every), device=every[0].device)


class XQC(SAC):
    """XQC, as described in the module's docstring."""

    config: XQCConfig
    critics: NormalisedCritics

    def make_critics(self, generator: torch.Generator | None) -> NormalisedCritics:
        plain, config = super().make_critics(generator), self.policy.config
        first = plain.get_parameter("weight0").shape[1]
        layers = (first, *config.critic_layers)
        return NormalisedCritics(plain, layers, self.config.atoms, generator)

    @property
    def following(self) -> NormalisedCritics:
        """The target critics."""
        return cast(NormalisedCritics, self.critic_target.module)

    def setup(self) -> None:
        super().setup()
        self.returns, self.largest = RewardScaler(0, self.config.gamma), 0.0

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        metrics = super().ingest(fragments, clock)
        num_envs = [len(fragment.rewards) for fragment in fragments]
        if not self.returns.running.size:
            self.returns.running = np.zeros(sum(num_envs))
        first = 0
        for fragment, num in zip(fragments, num_envs, strict=True):
            done = fragment.terminated | fragment.truncated
            envs, first = slice(first, first + num), first + num
            returns = self.returns.returns(
                envs, fragment.rewards, done, fragment.present, fragment.restarted
            )
            self.returns.absorb(moments(returns.reshape(-1, 1)))
            self.largest = max(self.largest, float(np.abs(returns).max(initial=0.0)))
        return metrics

    def begin_step(self) -> None:
        """Also let the atoms span the returns so far."""
        super().begin_step()
        seen = self.returns.moments
        variance = float(seen["m2"][0]) / max(float(seen["count"]), 1.0)
        span = max(STDS * math.sqrt(variance), self.largest) or 1.0
        for critics in (self.critics, self.following):
            critics.span.fill_(span)

    def step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        alpha, losses, values = self.log_alpha.exp(), [], []
        for batch, noise in zip(batches, noises, strict=True):
            size = len(batch.rewards)
            with torch.no_grad():
                next_actions, log_probs = self.policy.sample(batch.next_obs, noise[1])
            both = {n: torch.cat([x, batch.next_obs[n]]) for n, x in batch.obs.items()}
            actions = torch.cat([batch.actions, next_actions])
            logits = self.critics.logits(both, actions, training=True)
            with torch.no_grad():
                after = self.following.logits(both, actions, training=True)[:, size:]
                among = self.drawn.get("among", EVERY)
                next_values = self.following.values(after)[among].amin(0) - alpha * log_probs
                targets = self.td_targets(batch, next_values) / self.critics.span
                distribution = two_hot(self.critics.units, targets)
            errors = -(distribution * logits[:, :size].log_softmax(-1)).sum(-1)
            errors = errors if batch.weights is None else batch.weights * errors
            losses.append(errors.mean(-1).sum() / self.config.num_critics)
            values.append(self.critics.values(logits[:, :size].detach()).mean())
        loss = self.minimise(self.critic_optimizer, losses)
        metrics = {"train/critic_loss": loss, "train/q_mean": torch.stack(values).mean()}
        self.critics.end_step()
        if self.num_updates % self.config.actor_interval == 0:
            metrics |= self._update_actor(batches, noises, alpha)
        self.update_targets()
        return metrics

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        super().start_from(arrays, training)
        if training is not None:
            self.returns.moments = self.returns.moments_in(training["returns"])
            self.largest = float(training["largest_return"])

    def state_dict(self) -> Tree:
        seen = {"returns": self.returns.state_dict(), "largest_return": self.largest}
        return {**super().state_dict(), **seen}

    def load_state_dict(self, state: Tree) -> None:
        super().load_state_dict(state)
        self.returns.load_state_dict(state["returns"])
        self.largest = float(state["largest_return"])
