"""Building blocks of policies: perceptrons, action distributions, normalisation, encoder config.

Distributions take explicit noise, so that a rollout is a pure function. Normalisation keeps a
running mean and variance in float64 (Chan).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from etude.core.config import Config
from etude.core.contracts import ActionSpec, Array, ArraySpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree

MOST_UNITS = 1 << 16
Units = Annotated[int, Field(ge=1, le=MOST_UNITS)]
"""Units of one layer."""
Layers = Annotated[tuple[Units, ...], Field(max_length=64)]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "silu": functional.silu,
}


class EncoderConfig(Config):
    """Convolutions over images."""

    kind: Literal["cnn", "keypoints", "resnet18"] = Field(
        "cnn",
        description="cnn: 3x3 convolutions, each of which halves the image. keypoints: only the "
        "first two halve it, and spatial softmax gives the place where each of the last filters "
        "responds. resnet18: a ResNet-18 with GroupNorm and spatial softmax, not pretrained.",
    )
    channels: Layers = Field((16, 32, 32, 32), min_length=1, description="Filters of each layer.")
    features: Units = Field(64, description="Features of an image.")


def is_image(spec: ArraySpec) -> bool:
    """Whether an observation is an image, uint8 [height, width, channels]."""
    return len(spec.shape) == 3 and spec.dtype == "uint8"


def make_generator(key: Key | None) -> torch.Generator | None:
    """A generator for initial weights; None if they are loaded, or only counted."""
    return None if key is None else torch.Generator().manual_seed(key.integer())


def load_arrays(module: nn.Module, arrays: Tree) -> None:
    """Load arrays {name: array or tensor} of a module's `state_dict`."""
    module.load_state_dict({name: torch.as_tensor(array) for name, array in arrays.items()})


class Mlp(nn.Module):
    """Linear layers `sizes[0] -> ... -> sizes[-1]` with orthogonal weights and activations between.

    One module instead of `nn.Sequential`: at a rollout's batch sizes, calls of modules take as long
    as the arithmetic.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        activation: str,
        out_gain: float,
        generator: torch.Generator | None,
        layer_norm: bool = False,
    ) -> None:
        """generator: None if the weights are loaded afterwards (or on the meta device).

        out_gain: gain of the last layer's weights. layer_norm: normalise every hidden layer before
        its activation function.
        """
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self._layer_norm = layer_norm
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            weight = nn.Parameter(torch.zeros(outputs, inputs))
            bias = nn.Parameter(torch.zeros(outputs))
            if generator is not None:
                gain = out_gain if i == len(sizes) - 2 else math.sqrt(2.0)
                nn.init.orthogonal_(weight, gain, generator=generator)
            self.register_parameter(f"weight{i}", weight)
            self.register_parameter(f"bias{i}", bias)
            if layer_norm and i < len(sizes) - 2:
                self.register_parameter(f"norm_weight{i}", nn.Parameter(torch.ones(outputs)))
                self.register_parameter(f"norm_bias{i}", nn.Parameter(torch.zeros(outputs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., sizes[0]] -> [..., sizes[-1]]."""
        *hidden, weight, bias = cast(Iterable[torch.Tensor], self._parameters.values())
        if self._layer_norm:
            for i in range(0, len(hidden), 4):
                x = functional.linear(x, hidden[i], hidden[i + 1])
                x = functional.layer_norm(x, x.shape[-1:], hidden[i + 2], hidden[i + 3])
                x = self._activation(x)
        else:
            for i in range(0, len(hidden), 2):
                x = self._activation(functional.linear(x, hidden[i], hidden[i + 1]))
        return functional.linear(x, weight, bias)


_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class DiagonalGaussian:
    """Independent Gaussians; `mean` [..., n], `log_std` [n] or [..., n]."""

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor) -> None:
        self.mean, self.log_std = mean, log_std

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, size: int) -> Array:
        return generator.standard_normal((steps, num_envs, size), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [..., n] and their log-probabilities [...]."""
        # The noise is the standardised action, which saves the inverse.
        return self.actions(noise), self.log_density(noise, self.log_std)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        """Actions [..., n] of standard normal noise [..., n]."""
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def mode(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [...] of actions [..., n]."""
        return self.log_density((actions - self.mean) * (-self.log_std).exp(), self.log_std)

    @staticmethod
    def log_density(z: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        """Log density [...] of standardised actions [..., n], with few kernels."""
        exponents = torch.addcmul(log_std, z, z, value=0.5).sum(-1)
        return -_HALF_LOG_TWO_PI * z.shape[-1] - exponents

    def entropy(self) -> torch.Tensor:
        """[...], or [] if `log_std` is [n]."""
        return self.log_std.sum(-1) + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.shape[-1]

    def excess(self) -> torch.Tensor:
        """Squared distance [...] of the mean beyond [-1, 1], which clipping hides."""
        return functional.relu(self.mean.abs() - 1.0).square().sum(-1)


_MOST_SQUASHED = 1.0 - 1e-6
"""Largest squashed action: beyond it, the inverse of tanh is infinite in float32."""


class SquashedGaussian(DiagonalGaussian):
    """A Gaussian squashed by tanh to (-1, 1).

    Densities are computed from the squashed action in rollouts and in training, so that the
    probability ratio of new actions is exactly 1.
    """

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        actions = self.actions(noise)
        return actions, self.log_prob(actions)

    def actions(self, noise: torch.Tensor) -> torch.Tensor:
        return super().actions(noise).tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def mode(self) -> torch.Tensor:
        return self.mean.tanh().clamp(-_MOST_SQUASHED, _MOST_SQUASHED)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        """Log density [...]; divided by the derivative of tanh, 1 - tanh^2."""
        stretch = (1.0 - actions.square()).log().sum(-1)
        return super().log_prob(actions.atanh()) - stretch

    def entropy(self) -> torch.Tensor:
        """Approximate entropy [...]: of the Gaussian, corrected by the derivative of tanh at the
        mean."""
        # log(1 - tanh^2 x) = 2 (log 2 - x - softplus(-2 x)), without rounding to log 0.
        stretch = 2.0 * (math.log(2.0) - self.mean - functional.softplus(-2.0 * self.mean))
        return super().entropy() + stretch.sum(-1)

    def excess(self) -> torch.Tensor:
        """0 []: actions never leave their bounds."""
        return torch.zeros((), device=self.mean.device)


_FORBIDDEN = -1e9
"""Logit of a masked choice; its probability is exactly 0."""


class Categoricals:
    """Independent categoricals; `logits` [..., sum(sizes)], actions [..., choices].

    mask: [..., sum(sizes)], 0 for forbidden choices; None allows all.
    """

    def __init__(
        self, logits: torch.Tensor, sizes: tuple[int, ...], mask: torch.Tensor | None = None
    ) -> None:
        if mask is not None:
            logits = logits.masked_fill(mask == 0, _FORBIDDEN)
        self.log_probs = [part.log_softmax(-1) for part in torch.split(logits, list(sizes), dim=-1)]

    @staticmethod
    def noise(generator: np.random.Generator, steps: int, num_envs: int, choices: int) -> Array:
        return generator.random((steps, num_envs, choices), dtype=np.float32)

    def sample(self, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and log-probabilities by the inverse cumulative distribution at uniform noise
        [..., choices]."""
        picks = []
        for i, part in enumerate(self.log_probs):
            sums = part.exp().cumsum(-1)
            # Rounded probabilities do not sum to exactly 1: without this scale, noise close to 1
            # could select a last choice of probability 0.
            picks.append((sums[..., :-1] <= noise[..., i : i + 1] * sums[..., -1:]).sum(-1))
        actions = torch.stack(picks, dim=-1)
        return actions, self.log_prob(actions)

    def mode(self) -> torch.Tensor:
        return torch.stack([part.argmax(-1) for part in self.log_probs], dim=-1)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=actions.device)
        for i, part in enumerate(self.log_probs):
            total = total + part.gather(-1, actions[..., i : i + 1]).squeeze(-1)
        return total

    def entropy(self) -> torch.Tensor:
        """[...]"""
        total = torch.zeros((), device=self.log_probs[0].device)
        for part in self.log_probs:
            total = total - (part.exp() * part).sum(-1)
        return total

    def excess(self) -> torch.Tensor:
        """0 []: discrete actions have no bounds."""
        return torch.zeros((), device=self.log_probs[0].device)


def mask_spec(name: str, observations: dict[str, ArraySpec], action: ActionSpec) -> ArraySpec:
    """Spec of the observation that masks the choices; raises if it has no fitting shape."""
    size, spec = sum(action.sizes), observations.get(name)
    if not size:
        raise UsageError(f"policy.action_mask {name} is for discrete actions; these are a box.")
    if spec is None or spec.shape != (size,):
        found = "is not there" if spec is None else f"has the shape {spec.shape}"
        raise UsageError(
            f"policy.action_mask {name} must be an observation with a number for each of the "
            f"{size} choices; it {found}, among {', '.join(sorted(observations))}."
        )
    return spec


EPSILON = 1e-8
CLIP = 10.0


def merge_moments(left: Tree, right: Tree) -> Tree:
    """Merge the moments of two samples (Chan): {"count" [], "mean" [n], "m2" [n]} float64."""
    count = left["count"] + right["count"]
    if float(count) == 0.0:
        return left
    delta = right["mean"] - left["mean"]
    share = right["count"] / count
    return {
        "count": np.asarray(count),
        "mean": left["mean"] + delta * share,
        "m2": left["m2"] + right["m2"] + delta**2 * left["count"] * share,
    }


def merge_all(parts: Sequence[dict[str, Tree]]) -> dict[str, Tree]:
    """Merge the moments of several samples of named arrays, {name: moments}, in order."""
    return {name: reduce(merge_moments, [part[name] for part in parts]) for name in parts[0]}


def no_moments(size: int) -> Tree:
    """Moments of an empty sample."""
    return {"count": np.zeros(()), "mean": np.zeros(size), "m2": np.zeros(size)}


def moments(array: Array) -> Tree:
    """Count, mean [n] and sum of squared deviations [n], float64, of vectors [..., n]."""
    flat = array.reshape(-1, array.shape[-1]).astype(np.float64)
    if not len(flat):  # The mean of no vectors would be NaN.
        return no_moments(flat.shape[1])
    with np.errstate(invalid="ignore"):  # The learner reports non-finite values.
        mean = flat.mean(axis=0)
        flat -= mean
        squares = np.einsum("ij,ij->j", flat, flat)
    return {"count": np.asarray(float(len(flat))), "mean": mean, "m2": squares}


class Normaliser(nn.Module):
    """(x - mean) / std, clipped to +-10; changed only by the learner's calls of `absorb`.

    Statistics are float64, rounded to float32 when they are applied.
    """

    count: torch.Tensor
    mean: torch.Tensor
    m2: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size), persistent=False)
        self.register_buffer("scale", torch.ones(size), persistent=False)
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, _: module._refresh()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] float32, raw."""
        return torch.addcmul(self.shift, x, self.scale).clamp_(-CLIP, CLIP)

    def absorb(self, moments: Tree) -> None:
        """Merge the moments of newly collected observations."""
        known = {name: getattr(self, name).cpu().numpy() for name in ("count", "mean", "m2")}
        for name, value in merge_moments(known, moments).items():
            getattr(self, name).copy_(torch.as_tensor(value))
        self._refresh()

    def _refresh(self) -> None:
        if float(self.count) == 0.0:
            self.shift.zero_()
            self.scale.fill_(1.0)
            return
        variance = self.m2 / self.count
        # A constant column is not scaled: its variance is rounding noise.
        scale = torch.where(variance > EPSILON, (variance + EPSILON).rsqrt(), 1.0)
        self.scale.copy_(scale)
        self.shift.copy_(-self.mean * scale)


class RewardScaler:
    """Divides rewards by the standard deviation of the discounted return, clipped to +-10.

    State: the moments of the running return and the running return of each environment.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        self.gamma = gamma
        self.running = np.zeros(num_envs)
        self.moments = no_moments(1)

    def observe(
        self, envs: slice, rewards: Array, done: Array, present: Array, restarted: Array
    ) -> Tree:
        """Update the running returns by a shard's rewards, as `returns`; returns their moments."""
        returns = self.returns(envs, rewards, done, present, restarted)
        if not returns.size:
            return no_moments(1)
        mean = returns.mean()
        return {
            "count": np.asarray(float(returns.size)),
            "mean": np.asarray([mean]),
            "m2": np.asarray([((returns - mean) ** 2).sum()]),
        }

    def returns(
        self, envs: slice, rewards: Array, done: Array, present: Array, restarted: Array
    ) -> Array:
        """Update the running returns by a shard's rewards [num_envs, steps]; returns them after
        each step, of all steps with an agent.

        done, present: [num_envs, steps] bool; steps without an agent are ignored.
        restarted: [num_envs] bool, a new episode began before the first step.
        """
        returns = np.empty(rewards.shape)
        running = np.where(restarted, 0.0, self.running[envs])
        for step in range(rewards.shape[1]):
            earned = np.where(present[:, step], rewards[:, step], 0.0)
            running = running * self.gamma + earned
            returns[:, step] = running
            running = np.where(done[:, step], 0.0, running)
        self.running[envs] = running
        return returns if present.all() else returns[present]

    def absorb(self, moments: Tree) -> None:
        self.moments = merge_moments(self.moments, moments)

    def scale(self, rewards: Array) -> Array:
        """Scale and clip rewards [num_envs, steps], float32."""
        variance = float(self.moments["m2"][0]) / max(float(self.moments["count"]), 1.0)
        scaled: Array = np.clip(rewards / np.sqrt(variance + EPSILON), -CLIP, CLIP)
        return scaled.astype(np.float32)

    def state_dict(self) -> Tree:
        return {"running": self.running.copy(), "moments": dict(self.moments)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.running = np.array(state["running"])
        self.moments = self.moments_in(state)

    @staticmethod
    def moments_in(state: dict[str, Any]) -> Tree:
        """The moments in a `state_dict`, without the running returns."""
        return {name: np.asarray(value) for name, value in state["moments"].items()}
