"""A run in an object store whose machine is taken away again and again.

    python preempt_driver.py RECIPE.yaml URL SERVER RELAY FOLDER PREEMPTIONS SEED

A process forks a child for every machine; the child trains or resumes through RELAY with a cache of
its own, gets SIGKILL or a notice (SIGTERM) at a random time, and its cache is deleted. Every tenth
time two machines start at once. The libraries are loaded once, before the first fork.

Prints one JSON document: what `Machines` has counted.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import etude
import etude.building.build
import etude.building.resuming
from etude.core.errors import RESUMABLE, EtudeError
from etude.planning import recipes
from etude.runs import stored
from object_store import environment

LONGEST = 120.0
"""Seconds after which a machine counts as hanging."""


class Machine:
    """A child that trains or resumes."""

    def __init__(self, recipe: Path, url: str, relay: str, cache: Path) -> None:
        self.cache, self.begin = cache, time.monotonic()
        self.trains_after: float | None = None
        """Seconds from the start to the first rollout."""
        self.said = ""
        self.saved_at = self.begin
        """When it had last saved, or began to train."""
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            os.setsid()
            with environment(relay, cache):
                self._live(recipe, url, write)
        os.close(write)
        self.pipe = read

    def _live(self, recipe: Path, url: str, pipe: int) -> None:
        def on_phase(phase: str) -> None:
            os.write(pipe, f"phase {phase or 'between'}\n".encode())

        code = 0
        try:
            if stored.exists(url):
                etude.resume(url, on_phase=on_phase)
            else:
                etude.train(recipes.load(recipe, trust=True), url, on_phase=on_phase)
        except EtudeError as error:
            os.write(pipe, f"error {error}\n".encode())
            code = error.exit_code
        except BaseException as error:
            os.write(pipe, f"error {error!r}\n".encode())
            code = 99
        os._exit(code)

    def look(self, seconds: float) -> bool:
        """Read what it says for some seconds; False when it has ended."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.pipe], [], [], left)[0]:
                return True
            text = os.read(self.pipe, 65536).decode()
            self.said += text
            if self.trains_after is None and "phase collect" in text:
                self.saved_at = time.monotonic()
                self.trains_after = self.saved_at - self.begin
            elif "phase save\nphase between" in self.said[-len(text) - 20 :]:
                self.saved_at = time.monotonic()
            if not text:
                return False
        return True

    def end(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        if self.look(LONGEST):
            os.kill(self.pid, signal.SIGKILL)
            self.said += "error hangs\n"
        while self.look(1.0):
            pass
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        shutil.rmtree(self.cache, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)

    @property
    def error(self) -> str:
        return self.said.partition("error ")[2].strip()


class Machines:
    """Counts of everything that must hold."""

    def __init__(self, recipe: Path, server: str, relay: str, folder: Path, seed: int) -> None:
        self.recipe, self.server, self.relay, self.folder = recipe, server, relay, folder
        self.random = random.Random(seed)
        self.counts = Counter[str]()
        self.faults: list[str] = []
        self.starts: dict[str, list[float]] = {"SIGKILL": [], "SIGTERM": []}
        """Seconds until a replacement trains, by the end of the machine before it."""
        self.repeated: list[float] = []
        """Seconds of work since the last save that are lost with a machine."""
        self.notices: list[float] = []
        """Seconds from a notice to the end of the process."""
        self.number, self.before = 0, ""

    def state(self, url: str) -> tuple[int, str]:
        """(newest committed step, holder), read without faults."""
        read, write = os.pipe()
        if (child := os.fork()) == 0:  # this process has no connections, which a fork would break
            with environment(self.server):
                found = stored.read_index(stored.Objects(url))
            index = stored.Index() if found is None else found[0]
            saved = [p for p in index.files if re.fullmatch(r"checkpoints/\d+/training", p)]
            steps = [int(path.split("/")[1]) for path in saved]
            os.write(write, json.dumps([max(steps, default=-1), index.holder]).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            step, holder = json.loads(stream.read())
        os.waitpid(child, 0)
        return step, holder

    def start(self, url: str) -> Machine:
        self.number += 1
        return Machine(self.recipe, url, self.relay, self.folder / f"cache-{self.number}")

    @property
    def struck(self) -> int:
        return self.counts["kills"] + self.counts["notices"]

    def live_once(self, url: str, preemptions: int) -> bool:
        """Start a machine, or two, and end them; whether the run has finished. After the last
        preemption a machine may live to the end of the run."""
        machines = [self.start(url)]
        if self.number % 10 == 3:
            machines.append(self.start(url))
            self.counts["starts of two at once"] += 1
        saved, _ = self.state(url)
        begun = [] if self.struck >= preemptions else self.wait(machines)
        kind = self.random.choice([signal.SIGKILL, signal.SIGTERM])
        at, finished = time.monotonic(), False
        for machine in begun:
            os.kill(machine.pid, kind)
        last = ""
        for machine in machines:
            code = machine.end()
            was_struck = machine in begun
            if machine.trains_after is not None and self.before:
                self.starts[self.before].append(machine.trains_after)
            if code == 0:
                finished = True
            elif was_struck and kind == signal.SIGTERM and code in (RESUMABLE, -15, 143):
                self.counts["notices"] += 1
                self.counts["notices that were saved"] += code == RESUMABLE
                self.notices.append(time.monotonic() - at)
                last = last or ("SIGTERM" if code == RESUMABLE else "SIGKILL")
            elif was_struck and code == -kind:
                self.counts["kills"] += 1
                last = "SIGKILL"
                if machine.trains_after is not None:
                    self.repeated.append(at - machine.saved_at)
            elif "is being written by process" in machine.error:
                self.counts["writers that gave way"] += 1
            else:
                self.faults.append(f"exit code {code}: {machine.error or machine.said[-300:]}")
        self.before = last
        now, holder = self.state(url)
        if now < saved:
            self.faults.append(f"the newest checkpoint was {saved:,}, and is {now:,}")
        trained = machines[0].trains_after is not None  # it had not begun otherwise
        if len(machines) == 1 and last == "SIGTERM" and trained and holder:
            self.faults.append(f"a run that was saved after a notice is held by {holder}")
        return finished

    def wait(self, machines: list[Machine]) -> list[Machine]:
        """Wait for a random time after one of them trains, or, sometimes, while they start; those
        that have not ended."""
        limit = time.monotonic() + LONGEST
        if self.random.random() < 0.15:
            limit = time.monotonic() + self.random.uniform(0.0, 3.0)
        longer, living, trains = self.random.uniform(0.0, 3.0), machines, False
        while living and time.monotonic() < limit:
            living = [each for each in living if each.look(0.05)]
            if not trains and any(each.trains_after for each in living):
                trains, limit = True, time.monotonic() + longer
        return living


def main() -> None:
    recipe, url, server, relay, folder = (sys.argv[1], *sys.argv[2:6])
    preemptions, seed = map(int, sys.argv[6:8])
    machines = Machines(Path(recipe), server, relay, Path(folder), seed)
    recipes.load(Path(recipe), trust=True)
    runs: list[str] = []
    while machines.struck < preemptions and not machines.faults:
        runs.append(f"{url}-{len(runs)}")
        while not machines.faults and not machines.live_once(runs[-1], preemptions):
            print(f"{machines.struck} of {preemptions}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"runs": runs, "counts": machines.counts, "faults": machines.faults}
    found["starts"] = machines.starts
    found |= {"notices": machines.notices, "repeated": machines.repeated}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
