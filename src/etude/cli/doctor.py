"""`etude doctor`: examine this machine, and what its findings mean for a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from etude.cli.options import Reporting, parse, terminal_width
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.core.output import duration, rendered, size
from etude.planning.memory import machine_memory
from etude.planning.recipes import reach
from etude.runs import file_system, files

RENDERERS = ("egl", "osmesa")
RENDER_SECONDS = 4.0
PHYSICS_SECONDS = 0.4
DISK_BYTES = 8 << 20
SLOW_DISK = 20e6
"""Bytes per second below which saves slow a run down."""
PACKAGES = ("etude", "torch", "mujoco", "gymnasium", "numpy", "pydantic")

_RENDER = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data)
    renderer.render()
"""


class DoctorCommand(Reporting):
    """Examine this machine: versions, cores, memory, disk, physics, rendering."""


def run(arguments: list[str]) -> None:
    """Print the findings."""
    command = parse("doctor", DoctorCommand, arguments)
    findings = examine(Path.cwd())
    width = terminal_width()
    text = render(findings, width, color=sys.stdout.isatty())
    command.show([asdict(finding) for finding in findings], text)


@dataclass(frozen=True)
class Finding:
    """The result for one part of the machine, and its consequence for a run."""

    name: str
    found: str
    means: str
    state: Literal["good", "note", "bad", "optional"] = "good"
    """optional: not installed, and needed only by what `means` names."""


def examine(folder: Path) -> list[Finding]:
    """Findings for a run whose folder will be inside `folder`."""
    # The renderers are other processes: they are started first and read last.
    renderers = _start_renderers()
    findings = [_versions(), *_missing(), _cores(), _memory(), _gpu(), _threads(), *_extras()]
    findings += [_guarded("disk", lambda: _disk(folder))]
    findings += [_guarded("file system", lambda: _file_system(folder))]
    findings += [_guarded("physics", _physics)]
    return [*findings, _rendering(renderers)]


def _guarded(name: str, measure: Callable[[], Finding]) -> Finding:
    """The result of a measurement, or its error as a finding."""
    try:
        return measure()
    except (EtudeError, OSError, RuntimeError) as error:
        return Finding(name, "failed", str(error), "bad")


def _versions() -> Finding:
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    found = f"Python {platform.python_version()}, {versions}"
    return Finding("versions", found, "recorded in the run's manifest; a resume warns of changes")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def usable_cores() -> float:
    """Cores that this process can use, by affinity and by the container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota = limit.read_text().split() if os.access(limit, os.R_OK) else []
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, int(quota[0]) / int(quota[1]))
    return cores


def _cores() -> Finding:
    cores, load = usable_cores(), os.getloadavg()[0]
    found = f"{cores:g} usable of {os.cpu_count()}, load {load:.1f}"
    threads, busy = reach().collector.threads, load > 0.5 * cores
    means = f"collector.threads up to {max(1, int(cores))} is faster (default {threads})"
    means += "; other programs are running, so times vary" if busy else ""
    return Finding("cores", found, means, "note" if busy else "good")


def _memory() -> Finding:
    total, free = machine_memory()
    found = f"{size(free)} free of {size(total)}" if total else "unknown"
    means = "compare with the peak that `etude plan` prints"
    return Finding("memory", found, means, "note" if total and free < 2 << 30 else "good")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding("GPU", "none", "learning on the CPU; runs are exact")
    properties = torch.cuda.get_device_properties(0)
    found = f"{torch.cuda.device_count()} x {properties.name}, {size(properties.total_memory)}"
    return Finding("GPU", found, "--learner.device cuda uses it; such runs are not exact", "note")


def _threads() -> Finding:
    policy = os.environ.get("OMP_WAIT_POLICY", "unset")
    tick = time.get_clock_info("perf_counter").resolution
    found = f"torch {torch.get_num_threads()}, OMP_WAIT_POLICY {policy}, clock {tick * 1e9:.0f} ns"
    if policy.upper() != "PASSIVE":
        means = "idle torch threads slow the physics down: set OMP_WAIT_POLICY=PASSIVE"
        return Finding("threads", found, means, "bad")
    return Finding("threads", found, "a run uses learner.threads (default 1), inference 1 thread")


def _extras() -> list[Finding]:
    """Extras of the installed distribution."""
    wanted: dict[str, list[str]] = {}
    for requirement in metadata.requires("etude") or []:
        if found := re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement):
            wanted.setdefault(found[2], []).append(found[1])

    def finding(extra: str, packages: list[str]) -> Finding:
        missing = ", ".join(name for name in packages if _version(name) == "missing")
        if not missing:
            return Finding(f"extra {extra}", "installed", ", ".join(packages))
        means = f"pip install 'etude[{extra}]' adds {missing}"
        return Finding(f"extra {extra}", "not installed", means, "optional")

    return [finding(extra, packages) for extra, packages in wanted.items()]


def _missing() -> list[Finding]:
    """A finding if required packages are missing."""
    required = (
        re.match(r"[\w.-]+", each)
        for each in metadata.requires("etude") or []
        if "extra ==" not in each
    )
    missing = [name[0] for name in required if name and _version(name[0]) == "missing"]
    if not missing:
        return []
    means = f"required by every run: pip install {' '.join(missing)}"
    return [Finding("packages", f"missing: {', '.join(missing)}", means, "bad")]


def _disk(folder: Path) -> Finding:
    """Speed of writes with fsync in a folder."""
    block, path = os.urandom(1 << 20), folder / f".etude-doctor-{os.getpid()}"
    try:
        start = time.perf_counter()
        files.write_file(path, [block] * (DISK_BYTES >> 20))
        speed = DISK_BYTES / (time.perf_counter() - start)
    finally:
        files.remove_tree(path)
    start = time.perf_counter()
    files.fsync_folder(folder)
    flush = time.perf_counter() - start
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    found = f"{speed / 1e6:,.0f} MB/s with fsync, flush {flush * 1e3:.1f} ms, {size(free)} free"
    if free < 1 << 30:
        return Finding("disk", found, "free some space: checkpoints may not fit", "bad")
    if speed < SLOW_DISK:
        means = "saving is slow here: raise checkpoint.every, or choose another folder"
        return Finding("disk", found, means, "note")
    return Finding("disk", found, f"a checkpoint of 10 MB takes {10e6 / speed + 8 * flush:.2f} s")


def _file_system(folder: Path) -> Finding:
    """Operations that the file system of a folder supports."""
    has = file_system.examine(folder)
    abilities = {
        "symbolic links": has.links,
        "hard links": has.hard_links,
        "flushed folders": has.flushes,
        "locks": has.locks,
        "renamed folders": has.renames,
    }
    lacking = [name for name, there in abilities.items() if not there]
    supported = f"without {', '.join(lacking)}" if lacking else "complete"
    found = f"{has.kind or 'unknown'}, {supported}"
    if not has.renames:
        means = "runs cannot be saved safely here: choose a folder on another file system"
        return Finding("file system", found, means, "bad")
    means = " ".join(has.notes()) or "saves survive kills and power cuts"
    if not has.hard_links:
        means += "; `etude data add`, merge, filter and clip need hard links"
    return Finding("file system", found, means, "note" if lacking or has.notes() else "good")


def _physics() -> Finding:
    """Control steps per second of the reach simulation alone, on all cores."""
    num_envs, threads = 128, max(1, int(usable_cores()))
    env = reach().task.build(num_envs, threads)
    env.reset(Key(0))
    simulation, substeps = env.simulation, env.spec.substeps
    simulation.step(substeps)
    rates: list[float] = []
    end = time.perf_counter() + PHYSICS_SECONDS
    while time.perf_counter() < end:
        rates.append(num_envs / simulation.step(substeps))
    rate, steps = float(np.median(rates)), reach().clock.total_timesteps or 0
    found = f"{rate:,.0f} control steps/s of reach on {threads} threads"
    means = (
        f"the {steps:,} steps of `etude train reach` take {duration(steps / rate)} of simulation"
    )
    return Finding("physics", found, means)


def _start_renderers() -> dict[str, subprocess.Popen[bytes]]:
    return {
        name: subprocess.Popen(
            [sys.executable, "-c", _RENDER],
            env={**os.environ, "MUJOCO_GL": name, "PYOPENGL_PLATFORM": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in RENDERERS
    }


def _rendering(started: dict[str, subprocess.Popen[bytes]]) -> Finding:
    working, end = [], time.monotonic() + RENDER_SECONDS
    for name, process in started.items():
        try:
            if process.wait(max(0.1, end - time.monotonic())) == 0:
                working.append(name)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if working:
        chosen = os.environ.get("MUJOCO_GL", "unset")
        means = f"videos and image observations work with MUJOCO_GL={working[0]} (now {chosen})"
        return Finding("rendering", " and ".join(working), means)
    means = "no videos or image observations; install libegl1 or libosmesa6"
    return Finding("rendering", "neither egl nor osmesa", means, "optional")


def verdict(findings: list[Finding]) -> str:
    """The findings in one sentence."""
    bad = [finding.name for finding in findings if finding.state == "bad"]
    notes = [finding.name for finding in findings if finding.state == "note"]
    if bad:
        return f"Missing or broken, repair first: {', '.join(bad)}."
    rest = f"; see the notes on: {', '.join(notes)}" if notes else ""
    return f"This machine can train{rest}."


def render(findings: list[Finding], width: int = 100, color: bool = False) -> str:
    """Tables of the findings and of optional packages that are missing, and the verdict."""
    marks = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]BAD[/]"}
    optional = [finding for finding in findings if finding.state == "optional"]

    def table(some: list[Finding], heading: str) -> Table:
        made = Table(box=None, pad_edge=False)
        for title in ("", "what", "found", heading):
            made.add_column(title, vertical="top")
        for finding in some:
            cells = (finding.name, finding.found, finding.means)
            made.add_row(marks.get(finding.state, "-"), *(escape(cell) for cell in cells))
        return made

    needed = [finding for finding in findings if finding not in optional]
    parts: list[RenderableType] = [table(needed, "what it means for a run")]
    if optional:
        parts += ["\nOptional and not installed:", table(optional, "how to add it")]
    return rendered([*parts, f"\n[bold]{escape(verdict(findings))}[/]"], width, color)
