"""Functions and commands, each in a process of its own that starts at once and may be limited.

    with Forks() as forks:
        done = forks.run("etude.cli.main:main", ["plan", "reach"], seconds=10)

The libraries are loaded once, in a process that does nothing else; each call is a fork of it, so
that it costs only its work.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self


class Done(NamedTuple):
    """How a call ended."""

    code: int
    """The exit code, or minus the signal."""
    out: str
    err: str
    seconds: float
    """Of processor time: a busy machine is no slower call."""


class Forks:
    """A process with the libraries loaded, and calls in forks of it."""

    def __init__(
        self, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=dict(os.environ if environment is None else environment),
        )

    def run(
        self,
        function: str,
        *arguments: Any,
        seconds: float = 300,
        memory: int | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Done:
        """A call of module:function, whose result is the exit code.

        seconds: after which SIGALRM ends it. memory: bytes that it may take beyond what it begins
        with. folder, environment: instead of those of the process that forks; of PYTHONPATH, the
        folders that are new.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps(
                [
                    function,
                    arguments,
                    Limits(seconds, memory),
                    None if folder is None else str(folder),
                    None if environment is None else dict(environment),
                ]
            ),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return Done(*json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Limits(NamedTuple):
    """Of a call, as of `Forks.run`."""

    seconds: float
    memory: int | None

    def apply(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        if self.memory is not None:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + self.memory
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _move(folder: str | None, environment: dict[str, str] | None) -> None:
    """Work in another folder, and with other variables of the environment."""
    if folder is not None:
        os.chdir(folder)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [path for path in paths if path and path not in sys.path]


def _call(
    function: str,
    arguments: list[Any],
    limits: Limits,
    folder: str | None,
    environment: dict[str, str] | None,
) -> Done:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 70
            try:
                _move(folder, environment)
                module, _, name = function.partition(":")
                called = getattr(importlib.import_module(module), name)
                limits.apply()
                code = called(*arguments) or 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 70
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status, used = os.wait4(child, 0)
        out.seek(0)
        err.seek(0)
        code, taken = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
        return Done(code, out.read(), err.read(), taken)


def _serve() -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    # What most commands load.
    for module in ("etude.building.build", "etude.envs.mujoco.env", "etude.cli.plan"):
        importlib.import_module(module)
    for line in sys.stdin:
        function, arguments, limits, *place = json.loads(line)
        print(json.dumps(_call(function, arguments, Limits(*limits), *place)), flush=True)


if __name__ == "__main__":
    _serve()
