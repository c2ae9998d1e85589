"""Train the first iterations of a recipe with the code of any version, and hash what they compute.

    python probe.py RECIPE ITERATIONS OUTPUT [--section.field value ...]

A script of its own: it uses only those names of Etude that versions share, because the version that
is found first on the path is the one that is examined.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

IDLE = 40
"""Most first iterations without gradient steps, which are not counted."""


def _hashes(tree: Any, prefix: str = "") -> dict[str, str]:
    """{path: hash} of arrays and numbers in nested dicts, lists, tuples and objects."""
    if hasattr(tree, "detach"):
        tree = tree.detach().cpu().numpy()
    if isinstance(tree, np.ndarray):
        content = f"{tree.dtype}{tree.shape}".encode() + np.ascontiguousarray(tree).tobytes()
        return {prefix: hashlib.sha256(content).hexdigest()[:16]}
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, dict):
        items = [(str(n), x) for n, x in tree.items() if n not in ("seconds", "sha256")]
        found: dict[str, str] = {}
        for name, value in sorted(items, key=lambda item: item[0]):
            found |= _hashes(value, f"{prefix}/{name}" if prefix else name)
        return found
    if isinstance(tree, list | tuple):
        return _hashes({f"{i:03d}": x for i, x in enumerate(tree)}, prefix)
    if isinstance(tree, bool | int | float | str) or tree is None:
        return {prefix: repr(tree)}
    return {}


class Probe:
    """A callback with hooks of every version; also wraps two methods of the algorithm."""

    def __init__(self, iterations: int) -> None:
        self.left, self.idle, self.steps = iterations, IDLE, 0
        self.log: list[list[Any]] = []

    def add(self, phase: str, tree: Any) -> None:
        self.log.append([phase, _hashes(tree)])

    def run_start(self, context: Any) -> None:
        algorithm = context.algorithm
        ingest, end = algorithm.ingest, algorithm.end_iteration

        def state() -> dict[str, Any]:
            return {"policy": algorithm.policy_parts()[0], "state": algorithm.state_dict()}

        def ingested(fragments: Any, *rest: Any) -> Any:
            self.add("collect", [vars(fragment) for fragment in fragments])
            metrics = ingest(fragments, *rest)
            shards = [vars(each) for each in getattr(algorithm, "shards", []) or []]
            self.add("ingest", {"metrics": metrics, "shards": shards, **state()})
            return metrics

        def ended() -> Any:
            self.add("update", state())
            metrics = end()
            self.add("normaliser", {"metrics": metrics, "policy": algorithm.policy_parts()[0]})
            return metrics

        algorithm.ingest, algorithm.end_iteration = ingested, ended

    def batch_end(self, context: Any, metrics: Any) -> None:
        self.steps += 1
        self.add("update", {"metrics": metrics.values})

    def iteration_end(self, context: Any, fragments: Any) -> None:
        if self.steps:
            self.left -= 1
        else:
            self.idle -= 1
        self.log.append(["iteration", {}])
        if not self.left or not self.idle:
            context.stop()

    def evaluation_end(self, context: Any, metrics: Any) -> None:
        self.add("evaluation", metrics)

    def cycle_end(self, context: Any, row: Any) -> None: ...

    def epoch_end(self, context: Any, summary: Any) -> None: ...

    def run_end(self, context: Any) -> None: ...


def main(name: str, iterations: str, output: str, *options: str) -> None:
    from etude import api
    from etude.cli.options import parse
    from etude.cli.target import find_target
    from etude.cli.train import TrainCommand

    recipe, rest = find_target([name, *options])
    recipe = parse("train", TrainCommand, rest, TrainCommand(recipe=recipe)).recipe
    probe: Any = Probe(int(iterations))
    with tempfile.TemporaryDirectory() as scratch:
        api.train(recipe, Path(scratch) / "run", callbacks=[probe])
    Path(output).write_text(json.dumps({"source": api.__file__, "log": probe.log}))


if __name__ == "__main__":
    main(*sys.argv[1:])
