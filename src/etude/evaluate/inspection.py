"""The learner in one iteration of a run: its minibatch, gradients, normaliser and activations.

The run is computed forward to the iteration (`etude.building.rewind`), and its gradient steps are
watched. Contributions of samples are gradients of single samples of the first minibatch, computed
beside the step, which stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from etude.building.rewind import Watch, find_start, iteration_at, plan_text, rewound
from etude.core.contracts import Algorithm, Array, BatchMetrics, Fragment
from etude.core.trees import Tree
from etude.planning import recipes
from etude.rl.base import NetworkOptimizer
from etude.rl.off_policy import OffPolicy
from etude.runs.folder import RunFolder

Say = Callable[[str], None]
LARGEST = 8
"""Number of samples with the largest contributions that are shown."""
_MOST_SAMPLES = 512
"""Most samples of a minibatch whose gradients are computed one by one."""
_ACTIVATIONS = {
    torch.tanh: "tanh",
    torch.Tensor.tanh: "tanh",
    torch.relu: "relu",
    functional.relu: "relu",
    functional.elu: "elu",
    functional.silu: "silu",
    functional.gelu: "gelu",
}
_LAYERS = {functional.linear, functional.layer_norm, torch.baddbmm, torch.nn.functional.conv2d}
"""Functions whose results activations follow."""
_SATURATED = 0.99
"""Magnitude of tanh from which it is saturated."""


class Inspection(Watch):
    """Watches the learner in one iteration."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.layers: dict[str, list[float]] = {}
        self.clipped: dict[str, Any] = {}
        self.actions: Array | None = None
        self.minibatch: Tree = {}
        self.contributions: list[dict[str, Any]] = []
        self.activations: list[dict[str, Any]] = []
        self.normaliser: Tree = {}
        self.notes: list[str] = []

    def collected(self, iteration: int, fragments: list[Fragment]) -> None:
        self.actions = np.concatenate([f.actions[f.present].copy() for f in fragments])

    def stepped(self, algorithm: Algorithm, metrics: BatchMetrics) -> None:
        self.metrics.append(dict(metrics.values))

    def normalised(self, algorithm: Any, metrics: dict[str, float]) -> None:
        for name, each in algorithm.policy.normalisers.items():
            count = max(float(each.count), 1.0)
            std = (each.m2 / count).sqrt().cpu().numpy()
            mean = each.mean.cpu().numpy()
            self.normaliser[name] = {"count": count, "mean": mean.tolist(), "std": std.tolist()}

    @contextmanager
    def attached(self, algorithm: Any) -> Iterator[None]:
        """Watch the optimizers and the first minibatch of an algorithm."""
        if getattr(algorithm, "compiled", None) is not None:
            algorithm.compiled = None
            self.notes.append("Gradient steps of this iteration are eager, to be watched.")
        owners = [algorithm, getattr(algorithm, "rewards", None)]
        found = [x for owner in owners for x in vars(owner or object.__class__).values()]
        for optimizer in (x for x in found if isinstance(x, NetworkOptimizer)):
            self._watch_optimizer(optimizer)
        if isinstance(algorithm, OffPolicy):
            self._watch_transitions(algorithm)
        elif hasattr(algorithm, "loss"):
            self._watch_segments(algorithm)
        yield

    def _watch_optimizer(self, optimizer: Any) -> None:
        step = optimizer.step

        def watched(learning_rate: float) -> None:
            for name, parameter in optimizer.flat.named.items():
                norm = 0.0 if parameter.grad is None else float(parameter.grad.norm())
                self.layers.setdefault(f"{optimizer.name}/{name}", []).append(norm)
            step(learning_rate)

        optimizer.step = watched

    def _watch_segments(self, algorithm: Any) -> None:
        """The first minibatch of an algorithm with `loss(rollout, minibatch)`, as PPO's."""
        loss, flat = algorithm.loss, algorithm.optimizer.flat

        def value(of: Any) -> torch.Tensor:
            result: torch.Tensor = of[0] if isinstance(of, tuple) else of
            return result

        def watched(rollout: Any, minibatch: Any) -> Any:
            if self.minibatch:
                return loss(rollout, minibatch)
            with _Activations(self.activations):
                result = loss(rollout, minibatch)
            segments = getattr(minibatch, "segments", minibatch)
            self.minibatch = {"segments": segments.tolist(), **_summaries(rollout, segments)}
            grads = [_gradient(flat, value(result))]
            for i in range(min(len(segments), _MOST_SAMPLES)):
                one = segments[i : i + 1]
                if hasattr(minibatch, "_replace"):
                    weights = minibatch.weights
                    one = minibatch._replace(
                        segments=one, weights=None if weights is None else weights[i : i + 1]
                    )
                grads.append(_gradient(flat, value(loss(rollout, one))))
            names = [_place(algorithm, each) for each in segments.tolist()]
            self._contribute(names, grads[0], torch.stack(grads[1:]) / len(segments))
            return loss(rollout, minibatch)

        algorithm.loss = watched

    def _watch_transitions(self, algorithm: Any) -> None:
        """The first minibatch of an off-policy algorithm."""
        step = algorithm.step

        def watched(batches: Sequence[Any], noises: Sequence[torch.Tensor]) -> Any:
            if self.minibatch:
                return step(batches, noises)
            batch, noise = batches[0], noises[0]
            self.minibatch = {"transitions": len(batch.rewards), "rewards": _spread(batch.rewards)}
            before = [x.clone() for x in algorithm.changing()]
            optimizer = algorithm.critic_optimizer
            grads = list[torch.Tensor]()

            def kept(learning_rate: float) -> None:
                grads.append(optimizer.flat.grad.clone())

            held, optimizer.step = optimizer.step, kept
            try:
                for i in [None, *range(min(len(batch.rewards), _MOST_SAMPLES))]:
                    part = slice(None) if i is None else slice(i, i + 1)
                    step([_part(batch, part)], [noise[:, part]])
                    torch._foreach_copy_(algorithm.changing(), before)
            finally:
                optimizer.step = held
                for values in self.layers.values():
                    values.clear()
            names = [f"transition {i}" for i in range(len(grads) - 1)]
            self._contribute(names, grads[0], torch.stack(grads[1:]) / len(batch.rewards))
            with _Activations(self.activations):
                return step(batches, noises)

        algorithm.step = watched

    def _contribute(self, names: list[str], whole: torch.Tensor, parts: torch.Tensor) -> None:
        """Keep the samples whose gradients have the largest parts of the minibatch's."""
        shares = (parts @ whole) / whole.square().sum().clamp(min=1e-30)
        norms = parts.norm(dim=1)
        order = norms.argsort(descending=True)[:LARGEST].tolist()
        self.contributions = [
            {"sample": names[i], "norm": float(norms[i]), "share": float(shares[i])} for i in order
        ]

    def document(self) -> Tree:
        """Everything that was seen, as JSON."""
        steps = len(self.metrics)
        names = dict.fromkeys(name for each in self.metrics for name in each)
        actions = self.actions
        saturated = []
        if actions is not None and actions.dtype.kind == "f" and len(actions):
            saturated = (np.abs(actions) >= 1.0).mean(0).tolist()
        metrics = {
            name: {"first": values[0], "last": values[-1], "mean": float(np.mean(values))}
            for name in names
            if (values := [each[name] for each in self.metrics if name in each])
        }
        return {
            "gradient_steps": steps,
            "metrics": metrics,
            "gradient_norms": {n: float(np.mean(x)) for n, x in self.layers.items() if x},
            "minibatch": self.minibatch,
            "contributions": self.contributions,
            "activations": self.activations,
            "saturated_actions": saturated,
            "normaliser": self.normaliser,
            "notes": self.notes,
        }


def _gradient(flat: Any, loss: torch.Tensor) -> torch.Tensor:
    """The gradient [n] of a loss, without a change of the one that is summed."""
    named = [p for p in flat.named.values() if p.requires_grad]
    parts = torch.autograd.grad(loss, named, allow_unused=True)
    pairs = zip(parts, named, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def _place(algorithm: Any, segment: int) -> str:
    """Environment and step of the iteration of a segment of the first shard."""
    geometry = algorithm.geometry
    env, step = divmod(segment * geometry.horizon, geometry.steps)
    return f"env {env}, step {step}"


def _part(batch: Any, part: slice) -> Any:
    """Some transitions of a batch."""

    def at(value: Any) -> Any:
        if isinstance(value, dict):
            shared = dict[int, Any]()  # features of actor and critic may be one tensor
            return {n: shared.setdefault(id(x), x[part]) for n, x in value.items()}
        return None if value is None else value[part]

    return batch._make(at(value) for value in batch)


def _summaries(rollout: Any, segments: torch.Tensor) -> Tree:
    """Spread of the tensors of a minibatch that are one number per step."""
    named = {n: x for n, x in vars(rollout).items() if isinstance(x, torch.Tensor)}
    wanted = ("advantages", "returns", "values", "log_probs")
    return {n: _spread(named[n][segments]) for n in wanted if n in named}


def _spread(x: torch.Tensor) -> dict[str, float]:
    values = x.detach().double()
    found = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {name: float(value) for name, value in found.items()}


class _Activations(TorchFunctionMode):
    """Counts units whose activation is constant over a minibatch, or saturated."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        super().__init__()
        self._found = found
        self._layer: Any = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        kind = _ACTIVATIONS.get(function)
        follows = bool(args) and args[0] is self._layer
        self._layer = result if function in _LAYERS else None
        if kind is not None and follows and len(self._found) < 64:
            units = result.detach().reshape(-1, result.shape[-1])
            constant = (units.amax(0) - units.amin(0)) < 1e-6
            far = (units.abs() > _SATURATED).float().mean(0) if kind == "tanh" else constant * 0.0
            self._found.append(
                {
                    "activation": kind,
                    "units": units.shape[1],
                    "dead": int(constant.sum()),
                    "saturated": float(far.mean()),
                }
            )
        return result


def inspect(
    path: Path,
    step: int,
    say: Say = lambda text: None,
    trust: bool = False,
    threads: int | None = None,
) -> Tree:
    """The learner in the iteration of a step, as JSON."""
    folder = RunFolder.open(path, write=False)
    recipe = recipes.with_changes(recipes.load(folder.recipe, trust), folder, trust)
    loops = recipe.algorithm.loops(recipe, recipe.algorithm.geometry(recipe))
    iteration = iteration_at(step, loops)
    at = loops.at(iteration)
    start = find_start(folder, at.timesteps if loops.steps_per_iteration else at.updates)
    say(plan_text(folder, start, iteration))
    watch = Inspection()
    with rewound(path, iteration, watch, trust, threads) as moment:
        moment.forward()
        watch.metrics, watch.normaliser = [], {}
        algorithm = moment.loop.algorithm.inner  # type: ignore[attr-defined]
        with watch.attached(algorithm):
            moment.forward(1)
        watch.notes += moment.notes
    return {"run": str(path), "iteration": iteration, "step": step, **watch.document()}


def rows(document: Tree) -> dict[str, str]:
    """{name: text} of what is compared side by side."""
    found = {"gradient steps": str(document["gradient_steps"])}
    for name, value in document["metrics"].items():
        found[name] = f"{value['mean']:.4g} (first {value['first']:.4g}, last {value['last']:.4g})"
    for name, norm in document["gradient_norms"].items():
        found[f"gradient {name}"] = f"{norm:.3g}"
    for name, spread in document["minibatch"].items():
        if isinstance(spread, dict):
            found[f"minibatch {name}"] = (
                f"{spread['mean']:.3g} +- {spread['std']:.3g}, {spread['min']:.3g} to "
                f"{spread['max']:.3g}"
            )
    for rank, each in enumerate(document["contributions"], 1):
        text = f"{each['sample']}: norm {each['norm']:.3g}, {each['share']:.1%} of the gradient"
        found[f"contribution {rank}"] = text
    for number, layer in enumerate(document["activations"]):
        saturated = f", {layer['saturated']:.1%} saturated" if layer["activation"] == "tanh" else ""
        found[f"activation {number} ({layer['activation']})"] = (
            f"{layer['dead']} of {layer['units']} units dead{saturated}"
        )
    if document["saturated_actions"]:
        shares = document["saturated_actions"]
        found["saturated actions"] = (
            f"{np.mean(shares):.1%}, most {max(shares):.1%} in dimension {int(np.argmax(shares))}"
        )
    for name, each in document["normaliser"].items():
        std = np.array(each["std"])
        found[f"normaliser {name}"] = (
            f"{each['count']:.0f} samples, std {std.min():.3g} to {std.max():.3g}"
        )
    return found


def text(documents: Sequence[Tree]) -> str:
    """One moment, or several side by side."""
    columns = [rows(each) for each in documents]
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = [f"{Path(d['run']).name}, iteration {d['iteration']}" for d in documents]
    wide = max(map(len, names))
    widths = [max([len(h), *map(len, c.values())]) for h, c in zip(heads, columns, strict=True)]
    lines = [" " * wide + "".join(f"  {h:<{w}}" for h, w in zip(heads, widths, strict=True))]
    for name in names:
        cells = [column.get(name, "-") for column in columns]
        lines.append(
            f"{name:<{wide}}" + "".join(f"  {c:<{w}}" for c, w in zip(cells, widths, strict=True))
        )
    notes = [note for each in documents for note in each["notes"]]
    return "\n".join([*(line.rstrip() for line in lines), *dict.fromkeys(notes)]) + "\n"
