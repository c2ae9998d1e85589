"""Where two runs that should be the same first differ: iteration, phase, tensor and number.

Log rows and checkpoints are compared first, which computes nothing. From the last checkpoint that
both share, or from the start, both runs are computed forward side by side, and compared after each
phase of each iteration: two resumes in all. If both then agree, what made them differ is not in
their recipes or in this code (another machine, another version, a hardware error): the checkpoints
are compared with the computation, and the phase is inferred from which state differs first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from etude.building.rewind import FREE_COLUMNS, Rewound, Watch, rewound
from etude.core.contracts import Algorithm, BatchMetrics, Fragment
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.metrics import step_of
from etude.core.output import waiting
from etude.core.trees import Tree, is_array, leaves
from etude.planning import FREE, among
from etude.planning.recipe import differing_fields
from etude.planning.recipes import load, with_changes
from etude.runs import checkpoint
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import DiskHistory
from etude.training.evaluation import EvaluationResult
from etude.training.saving import RUN

PHASES = ("start", "collect", "ingest", "update", "normaliser", "evaluation", "log")
_MOST_KEPT = 1 << 30
"""Bytes of policies of single gradient steps that are kept to be compared."""
Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which one of the runs is computed."""


class Difference(NamedTuple):
    """The first difference of two runs."""

    iteration: int
    step: int
    """Step of the run at the beginning of the iteration."""
    phase: str
    gradient_step: int | None
    """Number of the gradient step in the iteration, from 0, in the phase "update"."""
    tensor: str
    place: tuple[int, ...]
    """Index of the first number that differs; () for a single number."""
    values: tuple[Any, Any]
    differing: int
    """Numbers of this tensor that differ."""
    size: int
    others: tuple[str, ...]
    """Other tensors that differ in the same place."""
    inferred: str = ""
    """Why the phase is a conclusion from the checkpoints; "" if it was observed."""

    def sentence(self) -> str:
        where = f" {list(self.place)}" if self.place else ""
        at = "" if self.gradient_step is None else f", gradient step {self.gradient_step}"
        more = f", and in {len(self.others)} more" if self.others else ""
        of = f" ({self.differing:,} of {self.size:,} numbers differ{more})" if self.size > 1 else ""
        a, b = self.values
        return (
            f"They first differ in iteration {self.iteration:,} (from step {self.step:,}), phase "
            f"{self.phase}{at}: {self.tensor}{where} is {a!r} and {b!r}{of}."
        )


@dataclass
class Bisection:
    """The result of a comparison of two runs."""

    difference: Difference | None
    resumes: int
    iterations: int
    """Iterations that were computed again, of each run."""
    notes: list[str]


class Phases(Watch):
    """Copies of everything that each phase of an iteration made."""

    def __init__(self) -> None:
        self._collected: dict[int, Tree] = {}
        self._steps: list[tuple[Tree, bool]] = []
        self._bytes = 0
        self.phases: dict[str, list[Tree]] = {}

    def begin(self, moment: Rewound) -> None:
        """Forget the last iteration; the state before the next one is the phase "start"."""
        policy, training = moment.state()
        self.phases = {"start": [_copied({"policy": policy, **comparable(training)})]}
        self._steps, self._bytes = [], 0

    def collected(self, iteration: int, fragments: list[Fragment]) -> None:
        self._collected[iteration] = _copied(
            {f"group {g}": _fragment(fragment) for g, fragment in enumerate(fragments)}
        )

    def ingested(self, algorithm: Algorithm) -> None:
        self.phases["ingest"] = [_copied({**algorithm.state_dict(), **_working(algorithm)})]

    def stepped(self, algorithm: Algorithm, metrics: BatchMetrics) -> None:
        tree = _copied({"metrics": metrics.values})
        arrays = {"policy": algorithm.policy_parts()[0], "state": algorithm.state_dict()}
        if self._bytes < _MOST_KEPT:
            tree |= _copied(arrays)
            self._bytes += sum(x.nbytes for _, x in leaves(tree) if is_array(x))
        self.phases.setdefault("update", []).append(tree)

    def updated(self, algorithm: Algorithm) -> None:
        arrays = {"policy": algorithm.policy_parts()[0], "state": algorithm.state_dict()}
        self.phases.setdefault("update", []).append(_copied(arrays))

    def normalised(self, algorithm: Algorithm, metrics: dict[str, float]) -> None:
        arrays = {"policy": algorithm.policy_parts()[0], "metrics": metrics}
        self.phases["normaliser"] = [_copied(arrays)]

    def evaluated(self, result: EvaluationResult) -> None:
        self.phases["evaluation"] = [_copied({"metrics": result.metrics, **result.episodes})]

    def end(self, moment: Rewound, iteration: int) -> None:
        """Take in what an iteration has left in other parts than the learner."""
        self.phases["collect"] = [self._collected.pop(iteration, {})]
        _, training = moment.state()
        rest = {
            n: x for n, x in comparable(training).items() if n not in ("algorithm", "collector")
        }
        self.phases["log"] = [_copied(rest)]


def comparable(training: Tree) -> Tree:
    """A training state without what may differ between equal runs."""
    kept = {n: x for n, x in training.items() if n not in (RUN, "metrics")}
    kept["saver"] = {n: x for n, x in training["saver"].items() if n != "num_saved"}
    return kept


def _fragment(fragment: Fragment) -> Tree:
    named = {f.name: getattr(fragment, f.name) for f in fields(fragment)}
    named["finals"] = fragment.finals._asdict()
    return {name: value for name, value in named.items() if name != "seconds"}


def _working(algorithm: Algorithm) -> Tree:
    """The tensors of a rollout that an algorithm keeps until its update has ended."""
    inner = vars(algorithm)
    found: Tree = {}
    for name, value in inner.items():
        each = value if isinstance(value, list) else [value]
        for number, part in enumerate(each):
            if is_dataclass(part) and not isinstance(part, type):
                found |= {f"{name} {number}": tree} if (tree := _tensors(vars(part))) else {}
    return found


def _tensors(values: Mapping[str, Any]) -> Tree:
    found: Tree = {}
    for name, value in values.items():
        if is_array(value):
            found[name] = value
        elif isinstance(value, Mapping) and value and all(map(is_array, value.values())):
            found[name] = dict(value)
    return found


def _copied(tree: Tree) -> Tree:
    """Arrays as copies in numpy; other leaves as they are."""
    found: Tree = {}
    for name, value in tree.items():
        name = name.replace("/", ".")
        if isinstance(value, Mapping):
            found[name] = _copied(dict(value))
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach().cpu().numpy().copy()
        else:
            found[name] = value.copy() if isinstance(value, np.ndarray) else value
    return found


class _Found(NamedTuple):
    tensor: str
    place: tuple[int, ...]
    values: tuple[Any, Any]
    differing: int
    size: int


def different_leaves(a: Tree, b: Tree) -> Iterator[_Found]:
    """The leaves of two trees whose bits differ."""
    left, right = dict(leaves(a)), dict(leaves(b))
    for name in sorted(left.keys() | right.keys()):
        x, y = left.get(name), right.get(name)
        if not (is_array(x) and is_array(y)):
            if repr(x) != repr(y):
                yield _Found(name, (), (x, y), 1, 1)
            continue
        p, q = np.asarray(x), np.asarray(y)
        if p.shape != q.shape or p.dtype != q.dtype:
            yield _Found(name, (), (_about(p), _about(q)), 1, 1)
        elif p.tobytes() != q.tobytes():
            bits = [np.frombuffer(z.tobytes(), np.uint8).reshape(z.size, -1) for z in (p, q)]
            (flat,) = (bits[0] != bits[1]).any(1).nonzero()
            at = tuple(int(i) for i in np.unravel_index(flat[0], p.shape))
            yield _Found(name, at, (p[at].item(), q[at].item()), len(flat), p.size)


def _about(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"


def first_difference(
    a: Mapping[str, list[Tree]], b: Mapping[str, list[Tree]]
) -> tuple[str, int | None, list[_Found]] | None:
    """(phase, gradient step, differing leaves) of two iterations; None if all bits are equal."""
    for phase in PHASES:
        for number, pair in enumerate(zip(a.get(phase, []), b.get(phase, []), strict=False)):
            if found := [*different_leaves(*pair)]:
                return phase, number if phase == "update" else None, found
        sizes = [len(each.get(phase, [])) for each in (a, b)]
        if sizes[0] != sizes[1]:
            what = "gradient steps" if phase == "update" else "results"
            return phase, None, [_Found(f"number of {what}", (), (sizes[0], sizes[1]), 1, 1)]
    return None


def bisect(
    a: Path,
    b: Path,
    say: Callable[[str], None] = lambda text: None,
    trust: bool = False,
    contexts: tuple[Context, Context] = (nullcontext, nullcontext),
) -> Bisection:
    """Find where two runs first differ. contexts: entered while each of them is computed."""
    folders = [RunFolder.open(Path(path), write=False) for path in (a, b)]
    notes = _recipe_notes(folders, trust)
    row = _first_row(folders)
    last, differs = _last_equal(folders, row)
    bound = min(x for x in (row and row[0], differs, _end(folders)) if x is not None)
    if row is None and differs is None:
        say("All log rows and checkpoints that both runs have are equal.")
        return Bisection(None, 0, 0, notes)
    begin = (
        "the start" if last is None else f"the checkpoint of iteration {last:,}, which both share"
    )
    say(f"Known to differ after iteration {bound:,}. Computing both from {begin}.")
    iterations = 0
    with ExitStack() as stack:
        watches = [Phases(), Phases()]
        moments = []
        for folder, watch, context in zip(folders, watches, contexts, strict=True):
            with context():
                opened = rewound(folder.path, last or 0, watch, trust)
                moments.append(stack.enter_context(opened))
        known = [_Checkpoints(folder) for folder in folders]
        with waiting("computing both", bound - (last or 0), "iterations") as wait:
            while moments[0].now < bound and moments[1].now < bound:
                iteration, step = moments[0].now, moments[0].loop.clock.now
                for moment, watch, context in zip(moments, watches, contexts, strict=True):
                    with context():
                        _compute(moment, watch, iteration)
                iterations += 1
                wait.done += 1
                found = first_difference(*(watch.phases for watch in watches))
                at = step.timesteps or step.updates
                if found is not None:
                    return Bisection(_difference(iteration, at, *found), 2, iterations, notes)
                for folder, of, moment in zip(folders, known, moments, strict=True):
                    if inferred := of.compare(moment, iteration, at, folder.path.name):
                        return Bisection(inferred, 2, iterations, notes)
        for moment in moments:
            notes += [note for note in moment.notes if note not in notes]
    notes.append(
        f"Computed again, both runs agree up to iteration {bound:,}: the cause is not in "
        "their recipes, nor in this code on this machine. Checkpoints at each iteration "
        "(--checkpoint.every '1 iteration' --checkpoint.keep-last 10000) say where."
    )
    return Bisection(None, 2, iterations, notes)


def _compute(moment: Rewound, watch: Phases, iteration: int) -> None:
    watch.begin(moment)
    try:
        moment.forward(1)
    except NonFinite as error:
        watch.phases["log"] = [{"failure": str(error)}]
        raise EtudeError(
            f"{moment.folder.path} fails in iteration {iteration:,}: {error}"
        ) from error
    watch.end(moment, iteration)


def _difference(
    iteration: int, step: int, phase: str, number: int | None, found: list[_Found], why: str = ""
) -> Difference:
    first, *rest = found
    others = tuple(each.tensor for each in rest)
    return Difference(iteration, step, phase, number, *first, others, why)


def _recipe_notes(folders: list[RunFolder], trust: bool) -> list[str]:
    """Differing fields of the recipes; refuses runs that cannot be compared."""
    pair = [with_changes(load(f.recipe, trust), f, trust) for f in folders]
    found = differing_fields(*pair)
    found = {n: v for n, v in found.items() if not among(n, FREE) and n != "name"}
    shapes = [recipe.algorithm.geometry(recipe) for recipe in pair]
    if pair[0].algorithm.kind != pair[1].algorithm.kind or shapes[0] != shapes[1]:
        raise UsageError(
            "The runs have different algorithms or sizes, so they cannot be compared number by "
            f"number: {', '.join(sorted(found))}."
        )
    return [f"The recipes differ in {n}: {x!r} and {y!r}." for n, (x, y) in found.items()]


def _first_row(folders: list[RunFolder]) -> tuple[int, int] | None:
    """(iteration, step) of the first log rows that differ; None if those in both agree."""
    for x, y in zip(*(DiskHistory(folder.metrics) for folder in folders), strict=False):
        names = [n for n in x.keys() & y.keys() if not n.startswith(FREE_COLUMNS)]
        if any(repr(x[n]) != repr(y[n]) for n in names):
            return int(x["iterations"]), step_of(x)
    return None


def _end(folders: list[RunFolder]) -> int:
    """The last iteration that both runs have logged."""
    return min(int(DiskHistory(folder.metrics).last.get("iterations") or 0) for folder in folders)


def _last_equal(
    folders: list[RunFolder], row: tuple[int, int] | None
) -> tuple[int | None, int | None]:
    """Iterations of the last checkpoint that both share, and of the first that differs, found by
    bisection; None without any. row: the first that differs, before which the last is."""
    paths = [{p.name: p for p in checkpoint.resumable(f.checkpoints)} for f in folders]
    names = sorted(paths[0].keys() & paths[1].keys())
    names = [name for name in names if row is None or int(name) < row[1]]
    low, high = -1, len(names)
    found: dict[int, int] = {}

    def equal(number: int) -> bool:
        states = []
        for of in paths:
            policy, _, training = checkpoint.load_training(of[names[number]])
            states.append({"policy": policy, **comparable(training)})
            found[number] = int(training["clock"]["now"]["iterations"])
        return next(different_leaves(*map(_copied, states)), None) is None

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if equal(middle) else (low, middle)
    return found.get(low), found.get(high)


class _Checkpoints:
    """The checkpoints of a run, compared with what is computed again."""

    _PARTS = (
        ("collect", ("collector/",)),
        ("ingest", ("algorithm/rewards/", "algorithm/stores/")),
        ("update", ("algorithm/", "policy/")),
        ("normaliser", ("normaliser/",)),
        ("evaluation", ("evaluator/",)),
    )
    """Phases, and the state that each of them writes."""

    def __init__(self, folder: RunFolder) -> None:
        self._paths = {int(p.name): p for p in checkpoint.resumable(folder.checkpoints)}

    def compare(self, moment: Rewound, iteration: int, step: int, name: str) -> Difference | None:
        """The first difference of a checkpoint at this moment from what was computed."""
        now = moment.loop.clock.now
        path = self._paths.get(now.timesteps or now.updates)
        if path is None:
            return None
        policy, _, training = checkpoint.load_training(path)
        states = []
        for arrays, state in ((policy, training), moment.state()):
            tree = _copied({"policy": arrays, **comparable(state)})
            tree["normaliser"] = {n: x for n, x in tree["policy"].items() if "normalis" in n}
            tree["policy"] = {n: x for n, x in tree["policy"].items() if "normalis" not in n}
            states.append(tree)
        found = [*different_leaves(*states)]
        if not found:
            return None
        why = (
            f"Computed again, both runs agree here; {name} has other numbers in its checkpoint of "
            f"step {int(path.name):,} than this computation. The phase is concluded from the state "
            "that differs."
        )
        for phase, prefixes in self._PARTS:
            mine = [each for each in found if each.tensor.startswith(prefixes)]
            if mine:
                return _difference(iteration, step, phase, None, mine, why)
        return _difference(iteration, step, "log", None, found, why)
