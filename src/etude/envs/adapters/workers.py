"""Environments in worker processes, which step side by side: the same bits as in one process.

    python -m etude.envs.adapters.workers FD

is such a process. Each has some of the environments, one after the other, as a batch of its own. A
worker is a new interpreter and not a fork, because the process that starts it may have threads.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from etude.core.config import Config
from etude.core.contracts import Array, BatchEnv, EnvSpec, Observations, StepResult
from etude.core.errors import EtudeError, NonFinite, UsageError
from etude.core.imports import describe
from etude.core.keys import Key
from etude.core.trees import Tree

ENDING_SECONDS = 5.0
"""A worker whose environments do not close within these is killed."""


MakePart = Callable[[Any, int, int], BatchEnv]
"""(config, number of the first environment, how many) -> those environments, in a worker."""


class EnvWorkers:
    """A `BatchEnv` whose environments are spread over worker processes in contiguous parts."""

    def __init__(
        self,
        make: MakePart,
        join: Callable[[list[Tree]], Tree],
        config: Config,
        spec: EnvSpec,
        num_envs: int,
        workers: int,
        exact: Callable[[], bool],
    ) -> None:
        """make: a function of a module, which workers import. join: the snapshot of all from those
        of parts. exact: whether there are snapshots, asked when the first is taken."""
        self.num_envs, self.spec = num_envs, spec
        self._join, self._is_exact = join, exact
        self._exact: bool | None = None
        bounds = np.linspace(0, num_envs, min(workers, num_envs) + 1).astype(int).tolist()
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        self._workers = [_Worker(make, config, part) for part in self._parts]
        try:
            for worker in self._workers:
                worker.answer()
        except UsageError as error:
            self.close()
            raise UsageError(
                f"{error} So says a worker process, which knows what packages register and not "
                "what a script did: with collector.engine_threads 1 there are no workers."
            ) from error

    def _all(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a method gives in every worker, with arguments for each."""
        for worker, arguments in zip(self._workers, given, strict=True):
            worker.ask(method, *arguments)
        return [worker.answer() for worker in self._workers]

    def reset(self, key: Key) -> Observations:
        """Every environment at the start of its episode 0."""
        return _stacked(self._all("reset", [(key,)] * len(self._parts)))

    def step(self, actions: Array) -> StepResult:
        """One step of every environment; finished ones are reset in it."""
        results: list[StepResult] = self._all("step", [(actions[part],) for part in self._parts])
        ended = [result for result in results if result.final_envs.size]
        finals = [
            result.final_envs + part.start
            for result, part in zip(results, self._parts, strict=True)
        ]
        return StepResult(
            _stacked([result.obs for result in results]),
            np.concatenate([result.reward for result in results]),
            np.concatenate([result.terminated for result in results]),
            np.concatenate([result.truncated for result in results]),
            np.concatenate(finals),
            _stacked([result.final_obs for result in results]),
            _stacked([result.episodes for result in ended]) if ended else {},
        )

    def snapshot(self) -> Tree:
        """That of one batch with all the environments; {} where there are none."""
        if self._exact is None:
            self._exact = self._is_exact()
        if not self._exact:
            return {}
        return self._join(self._all("snapshot", [()] * len(self._parts)))

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on as many environments."""
        if len(snapshot["episode"]) != self.num_envs:
            raise UsageError(
                f"This snapshot has {len(snapshot['episode'])} environments, not {self.num_envs}."
            )
        parts = [{name: array[p] for name, array in snapshot.items()} for p in self._parts]
        self._all("restore", [(part, key) for part in parts])

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def _stacked(parts: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Worker:
    """A process and the line to it."""

    def __init__(self, make: MakePart, config: Config, part: slice) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # `-P`: Etude is not looked for in the current folder first.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._line: Connection[Any, Any] = Connection(ours.detach())
        self._line.send((make, config, part.start, part.stop - part.start))

    def ask(self, method: str, *arguments: Any) -> None:
        with suppress(BrokenPipeError):  # The answer, which does not come, says it.
            self._line.send((method, arguments))

    def answer(self) -> Any:
        """What the worker gives, or the error it met."""
        try:
            value, failure = self._line.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"code {code}"
            raise EtudeError(f"A worker process of the environments ended with {how}.") from None
        if failure is not None:
            raise failure()
        return value

    def end(self) -> None:
        self._line.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(fd: int) -> None:
    """Answer until the line is closed, which the end of the other process does too."""
    # A signal to all processes of a run is for the one that saves.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    line: Connection[Any, Any] = Connection(fd)
    with suppress(EOFError, ConnectionError):
        make, *arguments = line.recv()
        env, failure = _tried(make, *arguments)
        line.send((None, failure))
        while True:
            method, arguments = line.recv()
            line.send(_tried(getattr(env, method), *arguments))


def _tried(function: Any, *arguments: Any) -> tuple[Any, Callable[[], EtudeError] | None]:
    """(what it gives, None), or (None, what makes the error)."""
    try:
        return function(*arguments), None
    except NonFinite as error:
        return None, partial(NonFinite, error.where, error.arrays)
    except UsageError as error:
        return None, partial(UsageError, str(error))
    except Exception as error:  # foreign code may fail in any way
        said = f"In a worker process of the environments: {describe(error)}."
        return None, partial(EtudeError, said)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # Whatever threads an environment has left must not keep this process.
