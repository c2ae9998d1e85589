"""The manifest of a run: versions, machine and code, compared at a resume.

It contains the hash of a small *standard computation*, which is the same on machines that give the
same bits: CPU models and versions of libraries do not decide about the last bit. It consists of
operations of a run: matrix products of several sizes, functions (exp, tanh, ...) of numpy, torch
and the C library, and steps of physics with contacts.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from torch.nn import functional

from etude.core import trees
from etude.core.contracts import Array
from etude.core.trees import Tree

PACKAGES = ("etude", "torch", "numpy", "mujoco", "gymnasium", "pettingzoo")
PREFIXES = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "ONEDNN_", "DNNL_", "NPY_", "ATEN_CPU_", "CUBLAS_"),
    *("CUDA_VISIBLE_", "GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONHASHSEED"),
)
"""Environment variables of threads, instruction sets, libraries, devices or the order of sets,
which may change bits."""


def collect(
    exactness: str,
    threads: dict[str, int] | None = None,
    project: Path | None = None,
    ranks: int = 1,
    recipe: str = "",
    model: str = "",
    code: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    step: str | None = "eager",
) -> Tree:
    """The manifest of a run that starts now, as a tree of JSON values.

    exactness: the plan's statement. threads: the recipe's thread counts. project: folder of the git
    repository, by default the current one. ranks: number of learner processes. recipe: its digest.
    model: hash of the simulated model. code: see `etude.core.user_code`. notes: the plan's notes
    about the environment. step: how gradient steps are computed; None if that is not known.
    """
    return {
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in PACKAGES},
        "system": {
            "os": platform.system(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
        },
        "cpu": {
            "model": _cpu_model(),
            "count": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "threads": {"torch": torch.get_num_threads()} | (threads or {}),
        "learner": {"ranks": ranks, "step": step},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
        "git": _git(project or Path.cwd()),
        "computation": standard_digest(),
        "recipe": recipe,
        "task": {"model": model or None},
        "code": dict(code or {}),
        "notes": list(notes),
        "exactness": exactness,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The CPU model and torch's instruction set on it, which affect the last bits."""
    return f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(project: Path) -> Tree:
    """{"commit"} of the repository around a folder, or {}.

    Read from its files, because git runs programs that the settings of a repository name.
    """
    for folder in (project.absolute(), *project.absolute().parents):
        try:
            commit = _commit(folder / ".git")
        except (OSError, ValueError):
            continue
        return {"commit": commit}
    return {}


def _commit(git: Path) -> str:
    """The commit that is checked out; raises without one."""
    if git.is_file():  # A worktree or submodule names its folder.
        git = git.parent / _short(git).removeprefix("gitdir: ")
    head = _short(git / "HEAD")
    if not head.startswith("ref: "):
        return _checked(head)
    name = head.removeprefix("ref: ")
    shared = git / "commondir"
    places = [git, *([git / _short(shared)] if shared.is_file() else [])]
    for place in places:
        if (place / name).is_file():
            return _checked(_short(place / name))
        packed = place / "packed-refs"
        for line in packed.read_text(errors="replace").splitlines() if packed.is_file() else ():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return _checked(commit)
    raise ValueError(f"{name} has no commit")


def _short(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(4096).decode(errors="replace").strip()


def _checked(commit: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise ValueError("not a commit")
    return commit


_NAMES = {
    "system/os": "The operating system",
    "system/machine": "The machine type",
    "system/libc": "The C library",
    "cpu/model": "The CPU",
    "cpu/capability": "The instruction set torch uses",
    "git/commit": "The git commit of the project",
    "computation": "The hash of the standard computation",
    "task/model": "The hash of the simulated model",
    "learner/step": "The kind of gradient steps",
}
_HARMLESS = ("cpu/count", "learner/ranks", "recipe", "exactness", "notes", "changes")
"""Not compared: numbers of cores and ranks do not change bits; the others are compared
elsewhere."""
_DECISIVE = (
    *("computation", "cpu/capability", "learner/step"),
    *(f"versions/{package}" for package in PACKAGES),
    *("task/", "code/"),
)
"""A change of these makes a run inexact. Other changes may change bits, which the standard
computation detects."""


class Differences(NamedTuple):
    """Sentences about the differences of two manifests."""

    decisive: list[str]
    """Differences that make the run inexact."""
    possible: list[str]
    """Differences that may change bits."""


def differences(old: Tree, new: Tree) -> Differences:
    """Compare two manifests; values that one of them does not have are not decisive."""
    before, now = _comparable(old), _comparable(new)
    found = Differences([], [])
    for path in sorted(before.keys() | now.keys()):
        a, b = before.get(path), now.get(path)
        if a != b:
            if path.startswith(("task/", "code/")) and (a is None or b is None):
                continue  # an early version without it, or code that is no longer used
            decides = path.startswith(_DECISIVE) and a is not None and b is not None
            kind = found.decisive if decides else found.possible
            kind.append(
                f"{_path_in_words(path)} was {_value_in_words(a)} and is {_value_in_words(b)} now."
            )
    return found


def _comparable(manifest: Tree) -> Tree:
    """{path: leaf} without empty groups and absent values."""
    return {
        path: leaf for path, leaf in _leaves(manifest) if path not in _HARMLESS and leaf is not None
    }


def _leaves(manifest: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf; names may contain "/", for example those of files."""
    for name, value in manifest.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _path_in_words(path: str) -> str:
    group, _, name = path.partition("/")
    known = {
        "versions": f"The version of {name}",
        "threads": f"The number of {name} threads",
        "environment": f"The environment variable {name}",
        "code": f"The version of {name.removesuffix(' (version)')}"
        if name.endswith(" (version)")
        else f"The hash of the code of {name}",
    }
    return _NAMES.get(path) or known.get(group, f"'{path}'")


def _value_in_words(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text


_LAYERS = ((1, 17, 64), (16, 64, 64), (64, 25, 256), (256, 96, 7))
"""Rows, inputs and outputs; sizes may have different kernels."""
_STEPS = 60
_SCENE = """
<mujoco>
  <option timestep="0.004"/>
  <worldbody>
    <geom type="plane" size="2 2 .1"/>
    <body pos="0 0 .2" euler="20 35 10">
      <freejoint/>
      <geom type="box" size=".1 .06 .04"/>
      <body pos=".12 0 0">
        <joint axis="0 1 0" damping=".1"/>
        <geom type="capsule" size=".03 .1" pos=".1 0 0" euler="0 90 0"/>
        <body pos=".24 0 0"><joint type="ball"/><geom type="ellipsoid" size=".05 .04 .03"/></body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@cache
def standard_digest() -> str:
    """SHA-256 of the standard computation in this process.

    It uses one torch thread for any number of threads of the caller.
    """
    # The number of torch's threads is local to the thread that sets it.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(lambda: trees.digest(_results())).result()


def _results() -> Tree:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return {"numpy": _numpy(), "torch": _torch(), "libc": _libc(), "physics": _physics()}


def _numbers(*shape: int) -> Array:
    """Numbers between -1 and 1, the same on any machine: only one product is rounded."""
    count = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    mixed = count * np.uint64(6364136223846793005) >> np.uint64(40)
    return ((mixed.astype(np.float64) * 2.0**-23 - 1.0) * 0.7071067811865476).reshape(shape)


def _tensor(*shape: int) -> torch.Tensor:
    """The same as float32 in torch's memory, because kernels may depend on alignment."""
    return torch.from_numpy(_numbers(*shape)).to(torch.float32)


def _numpy() -> Tree:
    x = _numbers(1000)
    functions = (np.exp, np.tanh, np.sin, np.cos, np.arctan, np.cbrt)
    found: Tree = {f.__name__: f(3.0 * x) for f in functions}
    found |= {f"{f.__name__}32": f(np.float32(3.0) * x.astype(np.float32)) for f in functions}
    found["log"], found["power"] = np.log(x + 2.0), np.power(x + 2.0, 1.7)
    found["sum"] = np.stack([x.sum(), (x * x).mean(), x.std(), x @ x])
    for rows, inputs, outputs in _LAYERS:
        found[f"product{rows}"] = _numbers(rows, inputs) @ _numbers(inputs, outputs)
    return found


def _torch() -> Tree:
    x = _tensor(1000)
    functions = (torch.exp, torch.tanh, torch.sin, torch.erf, torch.sigmoid, torch.log1p)
    found: Tree = {f.__name__: f(0.9 * x) for f in functions}
    found["softmax"], found["elu"] = x.view(10, 100).softmax(1), functional.elu(x)
    found["sum"] = torch.stack([x.sum(), x.square().mean(), x.std(), x.norm()])
    found["convolution"] = functional.conv2d(x[:960].view(2, 3, 16, 10), x[:216].view(8, 3, 3, 3))
    for rows, inputs, outputs in _LAYERS:
        rows_in, weights = _tensor(rows, inputs), _tensor(outputs, inputs)
        found[f"layer{rows}"] = functional.linear(rows_in, weights, weights[:, 0])
        found[f"gradient{rows}"] = found[f"layer{rows}"].T @ rows_in
    return found


def _libc() -> Tree:
    functions = (math.exp, math.sin, math.cos, math.tan, math.atan, math.tanh)
    values = _numbers(200).tolist()
    return {f.__name__: np.array([f(2.0 * value) for value in values]) for f in functions}


def _physics() -> Tree:
    try:
        model = mujoco.MjModel.from_xml_string(_SCENE)
    except ValueError as error:  # the scene is valid, so memory is missing
        raise MemoryError("MuJoCo could not compile a small scene") from error
    data = mujoco.MjData(model)
    data.qvel[:] = _numbers(model.nv)
    for _ in range(_STEPS):
        mujoco.mj_step(model, data)
    return {"qpos": data.qpos.copy(), "qvel": data.qvel.copy(), "touching": data.ncon}
