"""Peak memory of full iterations in a fresh process, against what the plan says.

    python gates/memory.py [--recipe reach-at-scale] [--iterations 1] [--set policy.kind=mlp]

The child imports all that a run imports and reads its resident memory: the baseline. Then it
builds the run and takes whole iterations, as `etude train` would; the highest resident memory
since the baseline, minus the baseline, is held against the plan's `bytes["peak"]`: it must be
within 20 % of it. Every phase is printed with what was resident at its end and the most there was
inside it. How busy the machine is does not matter; two or three minutes at 8,192 rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command import CommandFailed, started
from etude.planning.resolve import resolve
from report import Gate, parse

if TYPE_CHECKING:  # The child reads its baseline before anything else is imported.
    from etude.planning.recipes import Recipe

GOAL = 0.20
MIB = 1 << 20


def changed(name: str, changes: list[str]) -> Recipe:
    """A recipe with fields set as on the command line of `etude`: "policy.kind=mlp"."""
    from etude.planning import recipes

    content: dict[str, Any] = recipes.find(name).model_dump(mode="json")
    for change in changes:
        path, _, value = change.partition("=")
        *parents, field = path.split(".")
        node = content
        for parent in parents:
            node = node[parent]
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
        node[field] = value
    return recipes.validated(content, "--set")


class Resident:
    """This process's resident memory, and the most there was since the last look."""

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
        """Let VmHWM start again from what is resident now."""
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
    """Take the iterations, reporting each phase; the last line is the figure in bytes."""
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
    parser.add_argument("--set", nargs="*", default=[], help="fields, such as policy.kind=mlp")
    parser.add_argument("--off", type=float, default=GOAL, help="share of the plan's, at most")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    # What is small beside the libraries' own memory cannot be told from it.
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
    """The most bytes the child had."""
    command = [sys.executable, __file__, "--recipe", options.recipe, "--set", *options.set]
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
    """The plan's figure for the same; prints its parts."""
    import etude

    planned = etude.plan(recipe).bytes
    print("plan: " + ", ".join(f"{name} {size / MIB:,.1f}" for name, size in planned.items()))
    return int(planned["peak"])


if __name__ == "__main__":
    sys.exit(main())
