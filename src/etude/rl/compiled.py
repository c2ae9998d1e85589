"""An off-policy gradient step as compiled functions (`learner.step compiled`).

`OffPolicy.step` is traced as it is: a copy of the algorithm, whose tensors are the arguments of the
traced function, takes a step, with its backward pass, Adam and Polyak averaging. If a metric or the
norm of a gradient is not finite, the compiled step leaves all tensors as they were.

A step has parts that are due only every few steps (TD3's actor). There is one compiled function for
each combination that occurs; all of them are compiled, or loaded, in a thread that starts with the
run, and the first gradient step waits for it.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from etude.core.compiled import Compiled, Traced, load_or_compile, prepare
from etude.core.errors import UsageError
from etude.core.output import waiting
from etude.core.user_code import compute_hashes
from etude.rl.base import Adam, TargetNetwork
from etude.rl.sampling import Batch

Due = tuple[bool, ...]


class Steps(Protocol):
    """The part of `OffPolicy` that tracing its step needs."""

    config: Any
    policy: Any
    num_updates: int
    optimizers: list[Adam]
    targets: list[Any]
    drawn: dict[str, torch.Tensor]
    compiled: Any

    @property
    def intervals(self) -> tuple[int, ...]: ...

    @property
    def due(self) -> Due: ...

    def begin_step(self) -> None: ...

    def changing(self) -> list[torch.Tensor]: ...

    def bind(self, state: Sequence[torch.Tensor]) -> None: ...

    def read_step(
        self, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]: ...


class CompiledStep:
    """The compiled functions of one algorithm and one geometry of minibatches."""

    def __init__(
        self, learner: Steps, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> None:
        """Start to compile. batches, noises: of the shapes of all gradient steps, with features."""
        self._checked = False
        self._start(learner, batches, noises)

    def _start(
        self, learner: Steps, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> None:
        self._copy = copy_networks(learner)
        self._copy.begin_step()
        self._example = batches, noises
        self._shapes = shapes_of(batches, noises)
        self._found: dict[Due, Compiled] = {}
        self._failure: Exception | None = None
        self._threads = torch.get_num_threads()
        prepare()
        self._thread = threading.Thread(target=self._make, name="compile", daemon=True)
        self._thread.start()

    def ready(
        self, learner: Steps, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> bool:
        """Wait for the functions; says in a sentence if the step cannot be compiled."""
        if self._checked:
            return True
        with waiting("Compiling gradient steps"):
            self._thread.join()
        if shapes_of(batches, noises) != self._shapes:  # A sampler gives more than a uniform one.
            self._start(learner, batches, noises)
            self._thread.join()
        self._checked = self._failure is None
        if not self._checked:
            print(f"Gradient steps are eager, not compiled: {self._failure}.", file=sys.stderr)
        return self._checked

    def unavailable(self) -> UsageError:
        """The error of a run that was compiled and is resumed where it cannot be."""
        return UsageError(
            f"The gradient steps of this run were compiled, which is not possible here "
            f"({self._failure}): mend that, or start a new run with learner.step eager from this "
            "one (--from)."
        )

    def __call__(
        self, learner: Steps, batches: Sequence[Batch], noises: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Take a step; returns metrics and norms of gradients."""
        found = self._found[learner.due]
        given = [x.contiguous() for x in _tensors(batches, noises)]
        (values,) = found.run([*learner.changing(), *learner.drawn.values(), *given])
        return dict(zip(found.names, values.tolist(), strict=True))

    def _make(self) -> None:
        learner = self._copy
        try:
            torch.set_num_threads(self._threads)
            for number in range(1, math.lcm(*learner.intervals) + 1):
                learner.num_updates = number
                if learner.due not in self._found:
                    key = self._key(learner)
                    self._found[learner.due] = load_or_compile(key, self._traced, self._threads)
        except Exception as error:
            self._failure = error

    def _key(self, learner: Steps) -> dict[str, Any]:
        kinds = {type(learner).__module__, type(learner.policy).__module__}
        return {
            "code": compute_hashes(sorted(kinds)),
            "kind": f"{type(learner).__module__}:{type(learner).__qualname__}",
            "algorithm": learner.config.model_dump(mode="json", exclude={"dataset"}),
            "policy": learner.policy.contract(),
            "state": [list(x.shape) for x in learner.changing()],
            "shapes": self._shapes,
            "due": list(learner.due),
        }

    def _traced(self) -> Traced:
        learner, (batches, noises), names = self._copy, self._example, list[str]()
        num_state, drawn = len(learner.changing()), [*learner.drawn]

        def step(*tensors: torch.Tensor) -> tuple[torch.Tensor]:
            rest = iter(tensors)
            learner.bind([next(rest) for _ in range(num_state)])
            learner.drawn = {name: next(rest) for name in drawn}
            before = [x.clone() for x in learner.changing()]
            read = learner.read_step(*_rebuilt(batches, noises, rest))
            names[:] = read
            values = torch.stack(list(read.values()))
            taken = values.isfinite().all()
            for now, old in zip(learner.changing(), before, strict=True):
                now.copy_(torch.where(taken, now, old))
            return (values,)

        # Copies, since a tensor that is given twice would be one argument.
        given = [*learner.changing(), *learner.drawn.values(), *_tensors(batches, noises)]
        return Traced(step, [x.detach().clone() for x in given], names)


def copy_networks(learner: Steps) -> Steps:
    """A copy with networks, targets and optimizers of its own, to be traced."""
    kinds = (nn.Module, Adam, TargetNetwork)
    own: dict[str, Any] = {
        name: part for name, part in vars(learner).items() if isinstance(part, kinds)
    }
    own |= {"optimizers": learner.optimizers, "targets": learner.targets}
    made = copy.copy(learner)
    vars(made).update(copy.deepcopy(own))
    made.compiled = None
    for optimizer in made.optimizers:
        optimizer.fused = None  # Public operations, which the compiler fuses.
    return made


def shapes_of(batches: Sequence[Batch], noises: Sequence[torch.Tensor]) -> list[Any]:
    """Names, shapes and types of a minibatch's tensors, per shard."""
    found = []
    for batch, noise in zip(batches, noises, strict=True):
        names = [[*batch.obs], [*batch.next_obs], [x is None for x in batch]]
        tensors = [[list(x.shape), str(x.dtype)] for x in _tensors([batch], [noise])]
        found.append([names, tensors])
    return found


def _tensors(batches: Sequence[Batch], noises: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for batch, noise in zip(batches, noises, strict=True):
        for part in batch:
            if isinstance(part, dict):
                found += part.values()
            elif part is not None:
                found.append(part)
        found.append(noise)
    return found


def _rebuilt(
    batches: Sequence[Batch], noises: Sequence[torch.Tensor], tensors: Iterator[torch.Tensor]
) -> tuple[list[Batch], list[torch.Tensor]]:
    """Minibatches like `batches` and `noises` of other tensors, in the order of `_tensors`."""
    made, drawn = [], []
    for batch, _ in zip(batches, noises, strict=True):
        parts: list[Any] = []
        for part in batch:
            if isinstance(part, dict):
                parts.append({name: next(tensors) for name in part})
            else:
                parts.append(None if part is None else next(tensors))
        made.append(Batch(*parts))
        drawn.append(next(tensors))
    return made, drawn
