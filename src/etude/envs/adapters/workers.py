"""Environments in worker processes that step in parallel, with the same bits as in one process.

    python -m etude.envs.adapters.workers LINE LIFE PARENT

runs a worker, with two sockets and the id of its parent process. Each worker has a contiguous part
of the environments as a batch. A worker is a new interpreter, not a fork, because the parent may
have threads. It leads a process group and ends with its parent, together with all processes that
its environments have started.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from etude.core.config import Config
from etude.core.contracts import (
    Array,
    BatchEnv,
    EnvSpec,
    Located,
    Observations,
    StepResult,
    ability,
)
from etude.core.errors import (
    EtudeError,
    NonFinite,
    ProcessLost,
    UsageError,
    describe_error,
    exits_as_errors,
)
from etude.core.guard import location_of
from etude.core.keys import Key
from etude.core.trees import Tree

ENDING_SECONDS = 5.0
"""Timeout for closing the environments of a worker, after which it is killed, s."""
STARTING_SECONDS = 60.0
"""Minimum time for a worker to import and make its environments, s."""
REPLY_SECONDS = 2.0
"""Timeout for asking a hanging worker where it is, which fails if its code holds the GIL, s."""
LOOK = 1.0
"""Interval of checks whether the other process still exists, s."""


@cache
def starter(process: int) -> ThreadPoolExecutor:
    """A thread that starts all workers of a process and lives as long as the process, because Linux
    ends a worker with the thread that started it."""
    return ThreadPoolExecutor(1, "worker-starter")


MakePart = Callable[[Any, int, int], BatchEnv]
"""(config, number of the first environment, number of environments) -> environments."""


class EnvWorkers:
    """A `BatchEnv` whose environments are distributed over worker processes."""

    def __init__(
        self,
        make: MakePart,
        join: Callable[[list[Tree]], Tree],
        config: Config,
        spec: EnvSpec,
        num_envs: int,
        workers: int,
        exact: Callable[[], bool],
        bounds: dict[str, tuple[Array, Array]] | None = None,
    ) -> None:
        """make: function of a module, which workers import. join: joins the snapshots of the parts.
        exact: whether snapshots are exact, called for the first one. bounds: of observations, see
        `Bounded`."""
        self.num_envs, self.spec, self.bounds = num_envs, spec, bounds or {}
        self._make, self._config = make, config
        self._join, self._is_exact = join, exact
        self._exact: bool | None = None
        bounds = np.linspace(0, num_envs, min(workers, num_envs) + 1).astype(int).tolist()
        self._parts = [slice(a, b) for a, b in pairwise(bounds)]
        self._workers = [_Worker(make, config, part) for part in self._parts]
        try:
            self._answers(self._workers)
        except UsageError as error:
            self.close()
            raise UsageError(
                f"{error} This happened in a worker process, which imports packages but does not "
                "run your script: collector.engine_threads 1 runs without workers."
            ) from error

    def _all(self, method: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method in every worker, with separate arguments; returns the results."""
        for worker, arguments in zip(self._workers, given, strict=True):
            worker.ask(method, *arguments)
        return self._answers(self._workers)

    def _answers(self, workers: Sequence[_Worker]) -> list[Any]:
        """Results of the workers; raises the first error after all have answered."""
        answers = [worker.answer() for worker in workers]
        for _, failure in answers:
            if failure is not None:
                raise failure()
        return [value for value, _ in answers]

    def _revive(self) -> None:
        """Restart lost workers, before all workers get a new state."""
        gone = [i for i, worker in enumerate(self._workers) if worker.is_lost]
        for i in gone:
            self._workers[i] = _Worker(self._make, self._config, self._parts[i])
        self._answers([self._workers[i] for i in gone])

    def interrupt(self, seconds: float) -> None:
        """Kill the workers that have not answered; the waiting call raises an error with the
        reason."""
        for worker in self._workers:
            worker.interrupt(seconds)

    def reset(self, key: Key) -> Observations:
        """Reset every environment to its episode 0."""
        self._revive()
        return _stacked(self._all("reset", [(key,)] * len(self._parts)))

    def step(self, actions: Array) -> StepResult:
        """One step of every environment; finished environments are reset."""
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
        """The snapshot of all environments as one batch; {} if they are not exact."""
        if self._exact is None:
            self._exact = self._is_exact()
        if not self._exact:
            return {}
        return self._join(self._all("snapshot", [()] * len(self._parts)))

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Restore a snapshot of the same number of environments."""
        if len(snapshot["episode"]) != self.num_envs:
            raise UsageError(
                f"This snapshot has {len(snapshot['episode'])} environments, not {self.num_envs}."
            )
        self._revive()
        parts = [{name: array[p] for name, array in snapshot.items()} for p in self._parts]
        self._all("restore", [(part, key) for part in parts])

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def _stacked(parts: list[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Worker:
    """A worker process with two connections: for calls, and for its lifetime."""

    def __init__(self, make: MakePart, config: Config, part: slice) -> None:
        self._part = part
        self._why = ""
        """Reason for which it was killed."""
        self.is_lost = False
        self._asked: float | None = time.monotonic() + STARTING_SECONDS
        """Time since which an answer is due, with the first about the construction of its
        environments; None if none is due."""
        ours, theirs = socket.socketpair()
        self._life, life = socket.socketpair()
        with theirs, life:
            self._process = (
                starter(os.getpid()).submit(_start, theirs.fileno(), life.fileno()).result()
            )
        self._line: Connection[Any, Any] = Connection(ours.detach())
        self._line.send((make, config, part.start, part.stop - part.start))

    def ask(self, method: str, *arguments: Any) -> None:
        self._asked = time.monotonic()
        with suppress(BrokenPipeError):  # `answer` raises the error.
            self._line.send((method, arguments))

    def answer(self) -> tuple[Any, Callable[[], EtudeError] | None]:
        """The worker's result, and a function that makes its error if it had one."""
        try:
            while not self._line.poll(LOOK):
                # A process that the worker has started may keep the connection open.
                if self._process.poll() is not None and not self._line.poll():
                    return None, self._lost()
            answer: tuple[Any, Callable[[], EtudeError] | None] = self._line.recv()
            return answer
        except (EOFError, ConnectionError):
            return None, self._lost()
        finally:
            self._asked = None

    def _lost(self) -> Callable[[], EtudeError]:
        """A function that makes the error about how the process ended."""
        self.is_lost = True
        code = self._process.wait()
        self.end()
        how = f"with code {code} by itself"
        if code < 0:
            known = {number.value: number.name for number in signal.Signals}
            how = f"by signal {-code} ({known.get(-code, 'unknown')})"
        if code == -signal.SIGKILL:
            how += ", which the kernel sends where memory runs out"
        why = self._why or f"The worker process of {self._named()} was ended {how}"
        return partial(ProcessLost, f"{why}.")

    def _named(self) -> str:
        first, last = self._part.start, self._part.stop - 1
        return f"environment {first}" if first == last else f"environments {first} to {last}"

    def interrupt(self, seconds: float) -> None:
        """Kill a worker whose call has taken too long, and keep where it was."""
        is_late = self._asked is not None and time.monotonic() - self._asked > seconds / 2
        if not is_late or self._line.poll():
            return
        where = self._named()
        with suppress(OSError, ValueError):
            self._life.sendall(b"?")
            self._life.settimeout(REPLY_SECONDS)
            where = json.loads(self._life.recv(4096))
        self._why = (
            f"{_capital(where)} did not return within {seconds:g} s, and its worker "
            "process was killed. For calls that take longer raise --collector.deadline"
        )
        self._kill()

    def _kill(self) -> None:
        """Kill the process and all processes that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def end(self) -> None:
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self._kill()
        self._process.wait()
        self._life.close()


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _start(line: int, life: int) -> subprocess.Popen[bytes]:
    # `-P`: do not import Etude from the current folder.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(line), str(life), str(os.getpid())],
        pass_fds=[line, life],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        process_group=0,
    )


def main(line_fd: int, life_fd: int, parent: int) -> None:
    """Answer calls until the connection is closed, as by the end of the parent."""
    # The parent handles signals to all processes of a run.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    line: Connection[Any, Any] = Connection(line_fd)
    made: list[BatchEnv] = []
    _end_with(parent, life_fd, made)
    # Processes that an environment forks must not keep the connection open.
    os.register_at_fork(after_in_child=line.close)
    worker = os.getpid()
    with suppress(EOFError, OSError):
        make, *arguments = line.recv()
        env, failure = _tried(made, make, *arguments)
        made += [] if env is None else [env]
        line.send((None, failure))
        while True:
            method, arguments = line.recv()
            line.send(_tried(made, getattr(env, method), *arguments))
    if os.getpid() == worker and made:
        _tried(made, made[0].close)


def _end_with(parent: int, life_fd: int, made: list[BatchEnv]) -> None:
    """End this process when its parent ends, and answer where the environments are."""
    os.set_inheritable(life_fd, False)
    life = socket.socket(fileno=life_fd)
    main_thread = threading.get_ident()

    def watch() -> None:
        while os.getppid() == parent:
            if not select.select([life], [], [], LOOK)[0]:
                continue
            if not life.recv(64):
                break
            place = location_of(sys._current_frames()[main_thread])
            life.sendall(json.dumps(f"{_doing(made)} ({place})").encode())
        # After closing the connection, the main thread closes the environments.
        time.sleep(ENDING_SECONDS if os.getppid() == parent else 0.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="life", daemon=True).start()
    # This thread cannot run while an environment holds the GIL; Linux can end the process then.
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # The parent has already ended.
        os._exit(1)


def _doing(made: Sequence[BatchEnv]) -> str:
    """Current call, as in "environment 3 in step"."""
    located = ability(made[0], Located) if made else None
    if located is not None:
        return f"{located.where()} in {located.call}"
    return "an environment in a worker process"


def _tried(
    made: Sequence[BatchEnv], function: Any, *arguments: Any
) -> tuple[Any, Callable[[], EtudeError] | None]:
    """(result, None), or (None, function that makes the error)."""
    where = "In a worker process of the environments"
    try:
        with exits_as_errors(lambda: _capital(_doing(made))):
            return function(*arguments), None
    except NonFinite as error:
        return None, partial(NonFinite, error.where, error.arrays)
    except UsageError as error:
        return None, partial(UsageError, str(error))
    except EtudeError as error:
        return None, partial(EtudeError, str(error))
    except MemoryError as error:
        said = f"{where}, {_doing(made)}, memory ran out: {describe_error(error)}."
        return None, partial(EtudeError, said)
    except Exception as error:  # third-party code may raise anything
        return None, partial(EtudeError, f"{where}: {describe_error(error)}.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # Threads of environments must not keep this process alive.
