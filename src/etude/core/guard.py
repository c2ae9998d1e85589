"""Guards around environments, whose code may hang, exit, or return arrays of wrong shapes.

A guarded environment cannot end its process, and its results match its spec. A `Supervisor` waits
for threads that call guarded environments, and ends the wait when a call hangs.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import inf
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from etude.core.contracts import (
    Array,
    BatchEnv,
    EnvWrapper,
    Interruptible,
    Located,
    Observations,
    Restarts,
    StepResult,
    ability,
)
from etude.core.errors import EtudeError, Exit, UsageError, raise_exited, refuse_exits
from etude.core.keys import Key
from etude.core.trees import Tree

T = TypeVar("T")
A = TypeVar("A")
DEADLINE = 100.0
"""Default time limit of one call of an environment, in seconds."""
TICK = 0.5
"""Seconds between checks for hanging calls."""


class Hung(EtudeError):
    """A call hangs in this process, where it cannot be ended."""


class Guard(EnvWrapper):
    """An environment whose calls are timed and whose results are checked."""

    def __init__(self, inner: BatchEnv, name: str = "") -> None:
        """name: the owner of the environments for messages, for example "group 3"."""
        super().__init__(inner)
        self.name = name
        self.call = ""
        """Name of the running call; "" between calls."""
        self.since = 0.0
        rows = (inner.num_envs,)
        self._expected = [
            (name, (*rows, *spec.shape), np.dtype(spec.dtype))
            for name, spec in inner.spec.observations.items()
        ]
        self._rows = rows

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        # A call through the guard, so that it is guarded too.
        return self if found is not None and kind is Restarts else found  # type: ignore[return-value]

    def reset(self, key: Key) -> Observations:
        obs = self._guarded("reset", lambda: self.inner.reset(key))
        self._check_observations(obs, "reset")
        return obs

    def restart(self) -> Observations:
        inner = ability(self.inner, Restarts)
        assert inner is not None
        return self._guarded("restart", inner.restart)

    def snapshot(self) -> Tree:
        try:  # Without a deadline: the first call may probe the environment for long.
            return self.inner.snapshot()
        except (SystemExit, KeyboardInterrupt, GeneratorExit, Exit) as error:
            raise_exited(error, self._subject())

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._guarded("restore", lambda: self.inner.restore(snapshot, key))

    def close(self) -> None:
        if not self.call:  # A hanging environment is left alone.
            self.inner.close()

    def step(self, actions: Array) -> StepResult:
        self.call, self.since = "step", perf_counter()
        try:
            result = self.inner.step(actions)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, Exit) as error:
            raise_exited(error, self._subject())
        finally:
            self.call = ""
        reward = result.reward
        try:
            if (
                reward.shape != self._rows
                or result.terminated.shape != self._rows
                or result.truncated.shape != self._rows
                or reward.dtype.kind not in "fiub"
                or result.terminated.dtype.kind != "b"
                or result.truncated.dtype.kind != "b"
            ):
                self._refuse_result(result)
        except AttributeError:
            self._refuse_result(result)
        self._check_observations(result.obs, "step")
        return result

    def _guarded(self, call: str, function: Callable[[], T]) -> T:
        self.call, self.since = call, perf_counter()
        try:
            return function()
        except (SystemExit, KeyboardInterrupt, GeneratorExit, Exit) as error:
            raise_exited(error, self._subject())
        finally:
            self.call = ""

    def _check_observations(self, obs: Observations, call: str) -> None:
        for name, shape, dtype in self._expected:
            try:
                given = obs[name]
                if given.shape == shape and given.dtype is dtype:
                    continue
            except (AttributeError, KeyError, TypeError):
                given = obs.get(name) if isinstance(obs, dict) else None  # type: ignore[assignment]
            check_array(given, shape, dtype, f"{self._subject()} gives '{name}' in {call}")

    def _refuse_result(self, result: StepResult) -> None:
        flags = {"terminated": result.terminated, "truncated": result.truncated}
        arrays: dict[str, tuple[Array, np.dtype[Any]]] = {
            "the reward": (result.reward, np.dtype(np.float32))
        }
        arrays |= {name: (array, np.dtype(np.bool_)) for name, array in flags.items()}
        for name, (array, dtype) in arrays.items():
            check_array(array, self._rows, dtype, f"{self._subject()} gives {name} in step")

    def _subject(self) -> str:
        """The environments, as the subject of a sentence."""
        located = ability(self.inner, Located)
        where = located.where() if located is not None else "an environment"
        where += f" of {self.name}" if self.name else ""
        return where[0].upper() + where[1:]

    def end_late_call(self, deadline: float) -> None:
        """End a call that has exceeded the deadline; if that is impossible, raise `Hung`."""
        interruptible = ability(self.inner, Interruptible)
        if interruptible is not None:
            self.since = perf_counter()
            interruptible.interrupt(deadline)
            return
        place, located = self._place(), ability(self.inner, Located)
        resets = self.call == "step" and located is not None and located.call == "reset"
        raise Hung(
            f"{self._subject()} has not come back from {'reset' if resets else self.call} for "
            f"{deadline:g} s"
            f"{f' ({place})' if place else ''}: it hangs. For calls that take longer raise "
            "--collector.deadline; Gymnasium environments that hang in worker processes "
            "(--collector.engine-threads 2) are restarted."
        )

    def _place(self) -> str:
        """File and line of the running call."""
        for thread, frame in sys._current_frames().items():
            found: FrameType | None = None if thread == threading.get_ident() else frame
            while found is not None and found.f_locals.get("self") is not self:
                found = found.f_back
            if found is not None:
                return location_of(frame)
        return ""


def location_of(frame: FrameType) -> str:
    """File and line of a frame, for example "my_env.py, line 12"."""
    last = traceback.extract_stack(frame, limit=1)[0]
    return f"{Path(last.filename).name}, line {last.lineno}"


def check_array(given: Any, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> Array:
    """Check shape and dtype of a result of an environment; returns an array, or raises."""
    if given.__class__ is np.ndarray and given.shape == shape and given.dtype == dtype:
        return given
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unequal length
        array = np.asarray(None)
    if array.shape == shape and np.can_cast(array.dtype, dtype, "same_kind"):
        return array
    found = f"{array.dtype} {list(array.shape)}"
    if array.ndim == 0 or array.dtype == object:
        found = f"{str(given)[:40]!r}" if isinstance(given, str) else f"{str(given)[:40]}"
        found += f" of the type {type(given).__name__}"
    single = "True or False" if dtype.kind == "b" else "one number"
    needed = f"{dtype} {list(shape)}" if shape else single
    raise UsageError(f"{what} as {found}, and {needed} is needed.")


class Supervisor:
    """Waits for threads that call environments, with a deadline for each call."""

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = DEADLINE if deadline is None else deadline
        self._guards: WeakSet[Guard] = WeakSet()

    def guard(self, env: BatchEnv, name: str = "") -> Guard:
        """A guard around an environment; name: its owner, for example "group 3"."""
        made = Guard(env, name)
        self._guards.add(made)
        return made

    @property
    def late(self) -> Guard | None:
        """A guard whose call has exceeded the deadline."""
        if self.deadline == inf:
            return None
        now = perf_counter()
        late = (g for g in self._guards if g.call and now - g.since > self.deadline)
        return next(late, None)

    def wait(self, futures: list[Future[T]]) -> list[T]:
        """Wait for the results of other threads, in order; raises the first error."""
        while wait(futures, TICK).not_done:
            if (late := self.late) is not None:
                late.end_late_call(self.deadline)
        return [future.result() for future in futures]


def supervised(function: Callable[[Supervisor], T], deadline: float | None = None) -> T:
    """Run user code in a thread, which is abandoned if a call of an environment hangs.

    function: called with the supervisor of its environments.
    """
    supervisor: Supervisor = Supervisor(deadline)
    future: Future[T] = Future()

    def run() -> None:
        refuse_exits()
        try:
            future.set_result(function(supervisor))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="supervised", daemon=True).start()
    (result,) = supervisor.wait([future])
    return result
