"""Compiled functions of tensors, kept in the user's cache folder.

    $XDG_CACHE_HOME/etude/compiled/<SHA-256 of what decides the code>.so      (~/.cache by default)

torch's compiler writes C++ for a traced function, and g++ (or `CXX`) compiles it: tens of seconds,
once for each key. Loading is a matter of milliseconds and neither traces nor imports the compiler.
A folder or library that another user could have written is refused. Nothing of it goes into runs,
checkpoints or bundles.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from etude.core.errors import EtudeError


class NotCompiled(EtudeError):
    """A function cannot be compiled here."""


class Traced(NamedTuple):
    """A function of tensors before it is compiled."""

    function: Callable[..., tuple[torch.Tensor]]
    """Changes its arguments in place and returns values [n]."""
    example: Sequence[torch.Tensor]
    """Arguments of the shapes that it is compiled for; their values do not matter."""
    names: list[str]
    """Names of its values, known once it has been called."""


class Compiled(NamedTuple):
    """A compiled function."""

    run: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    names: list[str]


@functools.cache
def compiler() -> str:
    """The C++ compiler and its version; "" without one."""
    path = shutil.which(os.environ.get("CXX") or "g++")
    if path is None:
        return ""
    try:
        found = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.partition("\n")[0].strip() if found.returncode == 0 else ""


def description() -> str | None:
    """The compiler of compiled functions, for a manifest; None without one."""
    return f"compiled by {compiler()}" if compiler() else None


def folder() -> Path:
    """The cache folder, which only this user can write to."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(cache) / "etude" / "compiled"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise NotCompiled(f"{path} cannot be written: {error.strerror}") from error
    _require_own(path)
    return path


def _require_own(path: Path) -> None:
    """Raise an error for a file or folder that another user could have written."""
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NotCompiled(
            f"{path} belongs to another user or can be written by others: remove it, or "
            "`chmod go-w` it"
        )


def load_or_compile(key: dict[str, Any], trace: Callable[[], Traced], threads: int) -> Compiled:
    """The compiled function of a key, which has everything that decides its code.

    trace: called if it is not in the cache. threads: torch threads that it runs on. Raises
    `NotCompiled` where there is no compiler, or compiling fails.
    """
    if not compiler():
        raise NotCompiled("no C++ compiler was found (install g++, or set CXX)")
    key = {**key, **_platform(), "threads": threads}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    library, about = folder() / f"{name}.so", folder() / f"{name}.json"
    if not (found := _loaded(library, about)):
        _compile(trace(), threads, library, about)
        found = _loaded(library, about)
    if not found:
        raise NotCompiled(f"{library} was damaged while it was written")
    return found


def _platform() -> dict[str, str]:
    flags = ""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        lines = cpu.read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return {
        "torch": torch.__version__,
        "compiler": compiler(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": flags,
    }


def _loaded(library: Path, about: Path) -> Compiled | None:
    """The library, if it is there and as it was written."""
    try:
        _require_own(library)
        _require_own(about)
        facts = json.loads(about.read_text())
        if hashlib.sha256(library.read_bytes()).hexdigest() != facts["sha256"]:
            return None
    except (OSError, ValueError, KeyError):
        return None
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)
    return Compiled(runner.run, [str(name) for name in facts["names"]])


def prepare() -> None:
    """Let torch's compiler write below the cache folder; call before other threads are running.

    By default, its files would be in a folder of /tmp with a name that all can guess.
    """
    with contextlib.suppress(NotCompiled):  # Which compiling says again.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder() / "torch")


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder for one compilation, below the one of torch's compiler.

    A process that finds that no other is compiling removes what is left there, also of processes
    that were killed.
    """
    cache = folder()
    handle = os.open(cache, os.O_RDONLY)
    try:
        _remove_unused(cache / "torch", handle)
        fcntl.flock(handle, fcntl.LOCK_SH)
        (cache / "torch").mkdir(exist_ok=True, mode=0o700)
        yield Path(tempfile.mkdtemp(dir=cache / "torch"))
    finally:
        _remove_unused(cache / "torch", handle)
        os.close(handle)


def _remove_unused(place: Path, handle: int) -> None:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place, ignore_errors=True)


def _compile(traced: Traced, threads: int, library: Path, about: Path) -> None:
    from torch._inductor import aot_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    # Torch's own, of a name that it renames; users can do nothing about it.
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
    with _scratch() as scratch:
        try:
            graph = make_fx(traced.function, tracing_mode="fake")(*traced.example)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            options = {
                "aot_inductor.output_path": f"{scratch}/step.so",
                "cpp.threads": threads,
                "compile_threads": 1,
            }
            with torch.no_grad():
                made = Path(str(aot_compile(graph, tuple(traced.example), options=options)))
            made.chmod(0o700)
            facts = {
                "names": traced.names,
                "sha256": hashlib.sha256(made.read_bytes()).hexdigest(),
            }
            described = scratch / "step.json"
            described.write_text(json.dumps(facts))
            described.chmod(0o600)
            os.replace(described, about)
            os.replace(made, library)
        except Exception as error:  # Whatever torch's compiler or g++ raise.
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise NotCompiled(f"{type(error).__name__}: {first}") from error
