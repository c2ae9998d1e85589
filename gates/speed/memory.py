"""Peak memory of full iterations in a fresh process, compared with the plan.

    python -m gates.speed.memory [--recipe reach-at-scale] [--iterations 1] [--set policy.kind=mlp]

The child imports the modules of a run and reads its resident memory: the baseline. Then it builds
the run and does whole iterations, like `etude train`. Its peak above the baseline must be within
20 % of the plan's `bytes["peak"]`. For every phase the resident memory at its end and its peak are
printed. Other load does not matter; two or three minutes at 8,192 rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from gates.lib.command import CommandFailed, changed, started
from gates.lib.report import Gate, parse

GOAL = 0.20
MIB = 1 << 20


class Resident:
    """The resident memory of this process, and its peak since the last report."""

    def __init__(self) -> None:
        self.baseline = self._read()["VmRSS"]
        self.highest = self.baseline
        self._forget()

    @staticmethod
    def _read() -> dict[str, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        pairs = (line.split(":") for line in lines if line.startswith(("VmRSS", "VmHWM")))
        return {name: int(size.split()[0]) * 1024 for name, size in pairs}

    @staticmethod
    def _forget() -> None:
        """Reset VmHWM to the current resident memory."""
        Path("/proc/self/clear_refs").write_text("5")

    def report(self, phase: str, seconds: float) -> None:
        now = self._read()
        self._forget()
        self.highest = max(self.highest, now["VmHWM"])
        at_end, most = (now[name] - self.baseline for name in ("VmRSS", "VmHWM"))
        print(
            f"{phase:<16} {at_end / MIB:8.1f} MiB at its end  {most / MIB:8.1f} at most  "
            f"{seconds:6.1f} s",
            flush=True,
        )


def child(recipe_name: str, changes: list[str], iterations: int, folder: Path) -> None:
    """Do the iterations and report each phase; the last line is the peak in bytes."""
    from etude.building.build import build
    from etude.planning.recipes import dump
    from etude.runs.folder import RunFolder

    recipe = changed(recipe_name, changes)
    resident, begin = Resident(), time.perf_counter()
    print(f"{'imports':<16} {resident.baseline / MIB:8.1f} MiB: the baseline")

    def report(phase: str) -> None:
        nonlocal begin
        resident.report(phase, time.perf_counter() - begin)
        begin = time.perf_counter()

    parts = build(resolve(recipe), RunFolder.create(folder, dump(recipe), "", {}, {}))
    report("build")
    loop = parts.loop
    loop.clock.skip_idle()
    for i in range(loop.clock.now.iterations, loop.clock.now.iterations + iterations):
        fragments = loop.collector.collect(loop.algorithm.broadcast(loop.clock), i)
        report(f"collect {i}")
        loop.algorithm.ingest(fragments, loop.clock)
        report(f"ingest {i}")
        updates = 0
        for _ in loop.algorithm.batches(loop.clock, loop.key.child("update", i)):
            updates += 1
            if updates == 1:
                report(f"first batch {i}")
        report(f"batches {i}")
        loop.algorithm.end_iteration()
        loop.clock.advance(updates, sum(len(f.finals.envs) for f in fragments))
    report("end")
    parts.close()
    report("close")
    print(resident.highest - resident.baseline)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale")
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="fields, for example policy.kind=mlp")
    parser.add_argument("--off", type=float, default=GOAL, help="share of the plan's, at most")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    # Small buffers are lost in the libraries' own memory.
    smallest = {"set": ["collector.num_envs=256", "collector.envs_per_group=64"], "off": 0.5}
    options = parse(parser, smallest, arguments)
    if options.child:
        child(options.recipe, options.set, options.iterations, options.child)
        return 0
    needs = {"iterations": options.iterations}
    with Gate("memory", options, needs=needs, variant=options.recipe) as gate:
        with tempfile.TemporaryDirectory() as scratch:
            measured = measure(gate, options, f"{scratch}/run")
        planned = plan_bytes(changed(options.recipe, options.set))
        gate.details = {"measured": measured, "planned": planned}
        gate.figure("measured off the plan", abs(measured / planned - 1.0), at_most=options.off)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace, folder: str) -> int:
    """Run the child; return its peak above the baseline in bytes."""
    command = [
        sys.executable,
        "-m",
        "gates.speed.memory",
        "--recipe",
        options.recipe,
        "--set",
        *options.set,
    ]
    command += ["--iterations", str(options.iterations), "--child", folder]
    line = ""
    with started(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            gate.count("iterations", line.startswith("batches"))
        if process.wait():
            raise CommandFailed(f"the run ended with {process.returncode}")
    return int(line)


def plan_bytes(recipe: Recipe) -> int:
    """The plan's peak in bytes; prints its parts."""
    import etude

    planned = etude.plan(recipe).bytes
    print("plan: " + ", ".join(f"{name} {size / MIB:,.1f}" for name, size in planned.items()))
    return int(planned["peak"])


if __name__ == "__main__":
    sys.exit(main())
