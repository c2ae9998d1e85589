"""Peak memory of full iterations in a fresh process, against what the plan says.

    python gates/memory.py [--recipe reach-at-scale] [--iterations 1] [--set policy.kind=mlp]

The child imports all that a run imports and reads its resident memory: the baseline. Then it
builds the run and takes whole iterations, as `etude train` would; the highest resident memory
since the baseline, minus the baseline, is the figure. Every phase is printed with what was
resident at its end and the most there was inside it. Exits 1 when the figure is more than 20 %
away from the plan's `bytes["peak"]`. How busy the machine is does not matter; two or three minutes
at 8,192 rows.
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

if TYPE_CHECKING:  # The child reads its baseline before anything else is imported.
    from etude.app.recipes import Recipe

GOAL = 0.20
MIB = 1 << 20


def changed(name: str, changes: list[str]) -> Recipe:
    """A recipe with fields set as on the command line of `etude`: "policy.kind=mlp"."""
    from etude.app import recipes

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
    import etude.app.run  # noqa: F401  all that `etude train` imports
    from etude.app.build import build
    from etude.app.recipes import dump
    from etude.runs.folder import RunFolder

    recipe = changed(recipe_name, changes)
    resident, begin = Resident(), time.perf_counter()
    print(f"{'imports':<16} {resident.baseline / MIB:8.1f} MiB: the baseline")

    def report(phase: str) -> None:
        nonlocal begin
        resident.report(phase, time.perf_counter() - begin)
        begin = time.perf_counter()

    parts = build(recipe, RunFolder.create(folder, dump(recipe), "", {}, {}))
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
        loop.clock.advance(updates, sum(len(f.finals.rows) for f in fragments))
    report("end")
    parts.close()
    report("close")
    print(resident.highest - resident.baseline)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="reach-at-scale")
    parser.add_argument("--iterations", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="fields, such as policy.kind=mlp")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.recipe, options.set, options.iterations, options.child)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, *sys.argv[1:], "--child", f"{scratch}/run"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = ""
        for line in process.stdout:
            print(line, end="", flush=True)
        if process.wait():
            return process.returncode
    return judge(int(line), changed(options.recipe, options.set))


def judge(measured: int, recipe: Recipe) -> int:
    """Print the plan's parts and the figure against it."""
    from etude.app.plan import make_plan

    planned = make_plan(recipe).bytes
    print("plan: " + ", ".join(f"{name} {size / MIB:,.1f}" for name, size in planned.items()))
    peak = planned.get("peak")
    if peak is None:
        print(f"memory {measured / MIB:,.1f} MiB (the plan has no figure for it)")
        return 1
    off = measured / peak - 1.0
    print(f"memory {measured / MIB:,.1f} MiB, plan {peak / MIB:,.1f}: {off:+.1%} (goal {GOAL:.0%})")
    return 0 if abs(off) <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
