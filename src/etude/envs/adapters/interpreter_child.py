"""Gymnasium environments in another interpreter: the program that runs there.

    PYTHON -P interpreter_child.py SOCKET MEMORY PARENT STATE.py

It needs Python 3.10, NumPy and Gymnasium, and imports nothing of Etude; STATE.py is the path of
`object_state.py`. A message is a header (`HEADER`), JSON and bytes. Actions, observations, rewards
and flags are in shared memory, whose layout the parent chooses; nothing is pickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import mmap
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from importlib.metadata import distributions
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

HEADER = struct.Struct("<4sHHIIQ")
"""Magic bytes, version, kind of the message, row, bytes of JSON, bytes of data."""
MAGIC, VERSION = b"ETUD", 1
MAKE, MAP, RESET, STEP, SAVE, LOAD, RENDER, CLOSE, DONE, FAILED = range(10)
MOST_JSON, MOST_DATA = 256 << 20, 1 << 30
"""Limits of a message, bytes."""
MOST_WORDS = 300
"""Limit of an error's text, characters."""


class Broken(Exception):
    """The other side does not speak this version of the format, or has ended."""


def send(line: socket.socket, kind: int, row: int, content: Any = None, data: bytes = b"") -> None:
    """Send a message."""
    text = b"" if content is None else json.dumps(content).encode()
    line.sendall(HEADER.pack(MAGIC, VERSION, kind, row, len(text), len(data)) + text + data)


def receive(line: socket.socket) -> tuple[int, int, Any, bytes]:
    """Receive a message: kind, row, content, data."""
    magic, version, kind, row, text, data = HEADER.unpack(_exactly(line, HEADER.size))
    if magic != MAGIC:
        raise Broken("sent a message of another format")
    if version != VERSION:
        raise Broken(f"sent a message of version {version}, and version {VERSION} is needed")
    if text > MOST_JSON or data > MOST_DATA:
        raise Broken(f"sent a message of {text + data:,} bytes")
    content = json.loads(_exactly(line, text)) if text else None
    return kind, row, content, _exactly(line, data) if data else b""


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = line.recv_into(rest)
        if not count:
            raise Broken("has ended")
        rest = rest[count:]
    return bytes(data)


class Diverged(Exception):
    """MuJoCo has reset a simulation that diverged."""


class Row:
    """The views of an environment's part of the shared memory."""

    def __init__(self, memory: Any, layout: dict[str, Any], row: int) -> None:
        """layout: {"stride", "action": array, "obs": {name: array}, "numbers": offset}, where an
        array is [offset, dtype, shape]."""
        start = row * layout["stride"]

        def view(offset: int, dtype: str, shape: list[int]) -> Any:
            count = int(np.prod(shape, dtype=np.int64))
            flat = np.frombuffer(memory, np.dtype(dtype), count, start + offset)
            return flat.reshape(shape)

        self.action = view(*layout["action"])
        self.obs = {name: view(*place) for name, place in layout["obs"].items()}
        self.numbers = view(layout["numbers"], "<f8", [4])
        """Reward, terminated, truncated and success; NaN for an unknown success."""


class Server:
    """The environments, and the answers to the parent's messages."""

    def __init__(self, line: socket.socket, memory: int, state: str) -> None:
        self._line, self._memory, self._state = line, memory, state
        self._envs: list[Any] = []
        self._rows: list[Row] = []
        self._success: str | None = None
        self._fields: list[str] = []
        self._models: list[dict[str, Any]] = []
        """The values of each environment's MjModel after its construction."""

    def run(self) -> None:
        """Answer messages until the parent ends."""
        while True:
            kind, row, content, data = receive(self._line)
            if kind == CLOSE:
                break
            try:
                given, out = self._answer(kind, row, content, data)
            except Exception as error:
                send(self._line, FAILED, row, {"error": _words(error), "is": _names(error)})
            else:
                send(self._line, DONE, row, given, out)
        for env in self._envs:
            with suppress(Exception):
                env.close()

    def _answer(self, kind: int, row: int, content: Any, data: bytes) -> tuple[Any, bytes]:
        if kind == MAKE:
            return self._make(content), b""
        if kind == MAP:
            size = content["stride"] * len(self._envs)
            memory = mmap.mmap(self._memory, size)
            self._rows = [Row(memory, content, i) for i in range(len(self._envs))]
            return None, b""
        env = self._envs[row]
        if kind == RESET:
            # Wrappers may draw from it before they reset it: Meta-World's draw a task.
            env.unwrapped.np_random = np.random.default_rng(content["seed"])
            obs, _ = env.reset(seed=content["seed"])
            self._store(row, obs)
            return None, b""
        if kind == STEP:
            self._step(row, env)
            return None, b""
        if kind == SAVE:
            state = self._object_state().save(env)
            return {"state": state, "model": self._changed(row, env)}, _save_physics(
                env, self._fields
            )
        if kind == LOAD:
            self._object_state().load(env, content["state"])
            self._change(row, env, content["model"])
            _load_physics(env, data, self._fields)
            return None, b""
        if kind == RENDER:
            picture = np.ascontiguousarray(env.render(), np.uint8)
            return {"shape": list(picture.shape)}, picture.tobytes()
        raise ValueError(f"unknown message {kind}")

    def _make(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make one more environment, and describe it."""
        self._success, self._fields = order["success_key"], order["fields"]
        env = gymnasium.make(order["id"], disable_env_checker=True, **order["kwargs"])
        self._envs.append(env)
        self._models.append(_model_arrays(env, copies=True))
        if len(self._envs) > 1:
            return {}
        rate = (env.metadata or {}).get("render_fps")
        return {
            "python": platform.python_version(),
            "packages": {d.metadata["Name"]: d.version for d in distributions()},
            "model": _model_hash(env),
            "observation": describe(env.observation_space),
            "action": describe(env.action_space),
            "max_episode_steps": env.spec.max_episode_steps if env.spec else None,
            "render_fps": None if rate is None else float(rate),
        }

    def _step(self, row: int, env: Any) -> None:
        place = self._rows[row]
        # A copy, because an environment may keep or change its action.
        action = place.action.copy() if place.action.ndim else int(place.action)
        obs, reward, terminated, truncated, info = env.step(action)
        self._store(row, obs)
        success = info.get(self._success) if self._success is not None else None
        values = {"the reward": reward, "terminated": terminated, "truncated": truncated}
        for i, (name, value) in enumerate(values.items()):
            if np.ndim(value):
                raise ValueError(f"it gives {name} as an array of the shape {np.shape(value)}")
            place.numbers[i] = float(value)
        place.numbers[3] = np.nan if success is None else float(success)
        found = _physics(env)
        if found is not None and any(found[1].warning[code].number for code in _diverged()):
            raise Diverged

    def _store(self, row: int, obs: Any) -> None:
        arrays = self._rows[row].obs
        parts = obs if isinstance(obs, dict) else dict.fromkeys(arrays, obs)
        for name, place in arrays.items():
            part = np.asarray(parts[name])
            if part.shape != place.shape or not np.can_cast(part.dtype, place.dtype, "same_kind"):
                given = f"{part.dtype} {list(part.shape)}"
                needed = f"{place.dtype} {list(place.shape)}"
                raise ValueError(f"it observes {given} in '{name}', and its space is {needed}")
            place[...] = part

    def _changed(self, row: int, env: Any) -> dict[str, str]:
        """{name: bytes as hex} of the model's values that resets have changed, such as goals."""
        before = self._models[row]
        now = _model_arrays(env)
        return {n: a.tobytes().hex() for n, a in now.items() if not np.array_equal(a, before[n])}

    def _change(self, row: int, env: Any, changed: dict[str, str]) -> None:
        """Set the model's values to those of the constructor, and these `changed` ones."""
        for name, array in _model_arrays(env).items():
            array[...] = self._models[row][name]
            if name in changed:
                raw = np.frombuffer(bytes.fromhex(changed[name]), array.dtype)
                array[...] = raw.reshape(array.shape)

    def _object_state(self) -> Any:
        """The module of `object_state.py`, loaded from its file."""
        if "object_state" not in sys.modules:
            spec = importlib.util.spec_from_file_location("object_state", self._state)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["object_state"] = module
            spec.loader.exec_module(module)
        return sys.modules["object_state"]


def describe(space: Any) -> dict[str, Any]:
    """A space as JSON; {"other": its text} for kinds that Etude does not train on."""
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"kind": "box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "multi_discrete", "nvec": space.nvec.tolist()}
    if isinstance(space, spaces.Dict):
        parts = {str(name): describe(part) for name, part in space.spaces.items()}
        return {"kind": "dict", "parts": parts}
    return {"kind": "other", "text": str(space)}


def _bound(bound: Any) -> Any:
    """A bound as nested lists, or as one number if all are equal."""
    flat = np.asarray(bound).ravel()
    same = flat.size > 0 and bool((flat == flat[0]).all())
    return flat[0].item() if same else np.asarray(bound).tolist()


def _physics(env: Any) -> Any:
    """Model and data of a MuJoCo environment; None for others."""
    mujoco = sys.modules.get("mujoco")
    model, data = (getattr(env.unwrapped, name, None) for name in ("model", "data"))
    has = mujoco is not None and isinstance(model, mujoco.MjModel)
    return (model, data) if has and mujoco and isinstance(data, mujoco.MjData) else None


def _diverged() -> list[int]:
    kinds = sys.modules["mujoco"].mjtWarning
    names = ("BADQPOS", "BADQVEL", "BADQACC", "BADCTRL")
    return [int(getattr(kinds, f"mjWARN_{name}")) for name in names]


def _arrays(struct: Any) -> dict[str, Any]:
    """{name: array} of an MjModel or MjData, without empty ones."""
    found = {n: getattr(struct, n) for n in sorted(dir(struct)) if not n.startswith("_")}
    arrays = {n: a for n, a in found.items() if isinstance(a, np.ndarray)}
    return {n: a for n, a in arrays.items() if a.size and a.flags.writeable}


def _derived(data: Any, fields: list[str]) -> list[Any]:
    """The arrays of MjData with these names that this version of MuJoCo has."""
    arrays = _arrays(data)
    return [arrays[name] for name in fields if name in arrays]


def _model_arrays(env: Any, copies: bool = False) -> dict[str, Any]:
    """{name: array of floats} of an environment's MjModel; {} without one."""
    found = _physics(env)
    arrays = {} if found is None else _arrays(found[0])
    real = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
    return {name: array.copy() if copies else array for name, array in real.items()}


def _save_physics(env: Any, fields: list[str]) -> bytes:
    """The integration state, then the derived arrays `fields`, which some rewards read before a
    step."""
    found = _physics(env)
    if found is None:
        return b""
    model, data = found
    mujoco = sys.modules["mujoco"]
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return b"".join([state.tobytes(), *(array.tobytes() for array in _derived(data, fields))])


def _load_physics(env: Any, raw: bytes, fields: list[str]) -> None:
    found = _physics(env)
    if found is None:
        return
    model, data = found
    mujoco = sys.modules["mujoco"]
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.frombuffer(raw, np.float64, mujoco.mj_stateSize(model, kind))
    mujoco.mj_setState(model, data, state.copy(), kind)  # Older versions refuse read-only arrays.
    mujoco.mj_forward(model, data)  # Finds contacts, whose number decides the size of arrays.
    offset = state.nbytes
    for array in _derived(data, fields):
        part = np.frombuffer(raw, array.dtype, array.size, offset)
        array[...] = part.reshape(array.shape)
        offset += array.nbytes


def _model_hash(env: Any) -> str:
    found = _physics(env)
    if found is None:
        return ""
    mujoco = sys.modules["mujoco"]
    size = mujoco.mj_sizeModel(found[0])
    buffer = np.empty(size, np.uint8)
    mujoco.mj_saveModel(found[0], None, buffer)
    return hashlib.sha256(buffer.tobytes()).hexdigest()


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    text = text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _names(error: BaseException) -> list[str]:
    """Names of the classes of an error."""
    return [kind.__name__ for kind in type(error).__mro__]


def _end_with(parent: int) -> None:
    """End this process, and those that its environments started, when its parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="life", daemon=True).start()
    # The thread cannot run while an environment holds the GIL; Linux can end the process then.
    with suppress(Exception):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main(line: int, memory: int, parent: int, state: str) -> None:
    """Answer the parent's messages until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # The parent handles signals to a run.
    os.dup2(2, 1)  # What environments print is not the result of a command.
    _end_with(parent)
    parent_line = socket.socket(fileno=line)
    with suppress(OSError):
        try:
            Server(parent_line, memory, state).run()
        except Broken as error:
            send(parent_line, FAILED, 0, {"error": f"Etude {error}", "is": []})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    os._exit(0)  # Threads of environments must not keep this process alive.
