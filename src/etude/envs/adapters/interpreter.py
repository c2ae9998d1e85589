"""Gymnasium environments that run in another interpreter, with packages of its own.

`env.python` names a virtual environment. A process of its interpreter runs `interpreter_child.py`,
which has the environments of a batch; here each of them is a `RemoteEnv`, so that `GymEnv` steps
them like its own. The format of the messages is in `interpreter_child.py`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from etude.core.errors import EtudeError, NonFinite, ProcessLost, UsageError
from etude.core.user_code import check_trust
from etude.envs.adapters import gym_spaces, object_state
from etude.envs.adapters import interpreter_child as child
from etude.envs.adapters.virtual_envs import interpreter_of
from etude.envs.adapters.workers import STARTING_SECONDS, starter

MOST_BYTES = 1 << 30
"""Limit of the shared memory of an environment."""
_ALIGN = 64


class Interpreter:
    """A process of another interpreter with the environments of a batch."""

    def __init__(
        self,
        python: str,
        env_id: str,
        kwargs: dict[str, Any],
        success_key: str | None,
        num_envs: int,
    ) -> None:
        """python: as `env.python`. success_key: key in `info` of whether an episode succeeded."""
        self._python = interpreter_of(python)
        check_trust(python, f"run {self._python}", self._python)
        self._id, self._num_envs = env_id, num_envs
        order = {"id": env_id, "kwargs": kwargs, "success_key": success_key}
        self._order = {**order, "fields": gym_spaces.FIELDS}
        self._why = ""
        """Reason for which it was killed."""
        self.is_lost = False
        self.rows: list[child.Row] = []
        self.start()

    def start(self) -> None:
        """Start the process, make its environments and map the shared memory."""
        self._memory = os.open(_memory_folder(), os.O_RDWR | os.O_TMPFILE)
        self._line, theirs = socket.socketpair()
        with theirs:
            given = (str(self._python), theirs.fileno(), self._memory)
            self._process = starter(os.getpid()).submit(_start, *given).result()
        self.is_lost, self._why = False, ""
        order = self._order
        # For each: nothing else ends a constructor that hangs, since no environment is guarded yet.
        self._line.settimeout(STARTING_SECONDS)
        self.facts, *_ = [self.call(child.MAKE, row, order)[0] for row in range(self._num_envs)]
        self._line.settimeout(None)
        self.observation = _space(self.facts["observation"])
        self.action = _space(self.facts["action"])
        layout = _layout(self.observation, self.action)
        size = layout["stride"] * self._num_envs
        if layout["stride"] > MOST_BYTES:
            self.end()
            raise UsageError(
                f"'{self._id}' observes {layout['stride']:,} bytes, and at most {MOST_BYTES:,} "
                "are possible."
            )
        os.ftruncate(self._memory, size)
        mapped = mmap.mmap(self._memory, size)
        self.rows = [child.Row(mapped, layout, row) for row in range(self._num_envs)]
        self.call(child.MAP, 0, layout)

    def call(
        self, kind: int, row: int, content: Any = None, data: bytes = b""
    ) -> tuple[Any, bytes]:
        """Send a message and wait for its answer: (content, data)."""
        try:
            child.send(self._line, kind, row, content, data)
            answer, _, given, out = child.receive(self._line)
        except TimeoutError:
            self.kill(f"did not make an environment within {STARTING_SECONDS:g} s")
            raise self._lost("") from None
        except (child.Broken, OSError, ValueError) as error:
            raise self._lost(str(error)) from error
        if answer == child.DONE:
            return given, out
        raise self._error(row, given)

    def _lost(self, what: str) -> EtudeError:
        """The error about how the process ended; what: the end of a sentence about its message."""
        self.is_lost = True
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        self.end()
        how = what if code is None or code == 0 else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return ProcessLost(f"The process of {self._python} {self._why or how}.")

    def _error(self, row: int, given: dict[str, Any]) -> EtudeError:
        """The error of an environment, or of its constructor."""
        text, kinds, where = str(given["error"]), given["is"], f"'{self._id}'"
        if "Diverged" in kinds:
            return NonFinite(f"physics of environment {row} in {where}")
        if not self.rows:
            self.end()
            return UsageError(f"{self._python} cannot make {where}: {text}.")
        return EtudeError(f"Environment {row} ({where}) in {self._python}: {text}.")

    @property
    def success_key(self) -> str:
        return str(self._order["success_key"])

    def describe(self) -> tuple[str, str]:
        """Hash of its packages and of the simulated model, and a sentence for the plan."""
        facts = self.facts
        what = {name: facts[name] for name in ("python", "packages", "model")}
        known = {name.lower(): version for name, version in facts["packages"].items()}
        shown = [f"{n} {known[n]}" for n in ("gymnasium", "mujoco", "numpy") if n in known]
        words = ", ".join([f"Python {facts['python']}", *shown])
        words = f"The environments run in {self._python}: {words}."
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest(), words

    def kill(self, why: str) -> None:
        """Kill the process and those that its environments started; why: end of the sentence."""
        self._why = why
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def end(self) -> None:
        """Close the environments and end the process."""
        with suppress(OSError):
            child.send(self._line, child.CLOSE, 0)
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self.kill(self._why)
        self._process.wait()
        os.close(self._memory)


class RemoteEnv(gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """An environment in another interpreter."""

    def __init__(self, interpreter: Interpreter, row: int) -> None:
        self.interpreter, self._row = interpreter, row
        facts = interpreter.facts
        self.observation_space, self.action_space = interpreter.observation, interpreter.action
        self.metadata = {"render_fps": facts["render_fps"]}
        self.spec: Any = SimpleNamespace(max_episode_steps=facts["max_episode_steps"])

    def _observation(self) -> Any:
        obs = self.interpreter.rows[self._row].obs
        return obs if isinstance(self.observation_space, spaces.Dict) else obs[_SINGLE]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.interpreter.call(child.RESET, self._row, {"seed": seed})
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        place = self.interpreter.rows[self._row]
        place.action[...] = action
        self.interpreter.call(child.STEP, self._row)
        reward, terminated, truncated, success = place.numbers.tolist()
        # NaN: the environment's info does not have it.
        info = {} if success != success else {self.interpreter.success_key: success}
        return self._observation(), reward, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        shape, data = self.interpreter.call(child.RENDER, self._row)
        return np.frombuffer(data, np.uint8).reshape(shape["shape"])

    def save(self) -> str:
        """The environment's state as one line of JSON."""
        content, physics = self.interpreter.call(child.SAVE, self._row)
        return json.dumps({**content, "physics": physics.hex()}, separators=(",", ":"))

    def load(self, text: str) -> None:
        """Restore a text of `save`."""
        content = json.loads(text)
        physics = bytes.fromhex(content.pop("physics"))
        self.interpreter.call(child.LOAD, self._row, content, physics)

    def close(self) -> None:
        """Its process closes it."""


_SINGLE = "value"
"""Name of a single observation in the layout."""


def _space(described: dict[str, Any]) -> spaces.Space[Any]:
    """The space that `interpreter_child.describe` has described."""
    kind = described["kind"]
    if kind == "box":
        shape, dtype = tuple(map(int, described["shape"])), np.dtype(described["dtype"])
        low, high = (
            np.broadcast_to(np.asarray(described[end], dtype), shape) for end in ("low", "high")
        )
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "discrete":
        return spaces.Discrete(int(described["n"]), start=int(described["start"]))
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(described["nvec"])
    if kind == "dict":
        return spaces.Dict({name: _space(part) for name, part in described["parts"].items()})
    return _Unknown(described["text"])


class _Unknown(spaces.Space[Any]):  # type: ignore[misc]
    """A space that Etude cannot train on, for the error that names it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _layout(observation: spaces.Space[Any], action: spaces.Space[Any]) -> dict[str, Any]:
    """Places of an environment's arrays in the shared memory, see `interpreter_child.Row`."""
    parts = observation if isinstance(observation, spaces.Dict) else {_SINGLE: observation}
    offset = 0

    def place(space: Any) -> list[Any]:
        nonlocal offset
        dtype, shape = np.dtype(space.dtype or np.uint8), list(space.shape or ())
        found = [offset, dtype.str, shape]
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        offset += -(-size // _ALIGN) * _ALIGN
        return found

    where = {"action": place(action), "obs": {str(n): place(part) for n, part in parts.items()}}
    return {**where, "numbers": offset, "stride": offset + _ALIGN}


def _memory_folder() -> str:
    """A folder in memory, or the one of temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _start(python: str, line: int, memory: int) -> subprocess.Popen[bytes]:
    files = (Path(child.__file__), Path(object_state.__file__))
    numbers = map(str, (line, memory, os.getpid()))
    return subprocess.Popen(
        [python, "-P", str(files[0]), *numbers, str(files[1])],
        pass_fds=[line, memory],
        stdin=subprocess.DEVNULL,
        env={n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")},
        process_group=0,
    )
