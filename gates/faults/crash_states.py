"""Resume runs from every state on disk that a crash may leave.

    python -m gates.faults.crash_states

Short runs (PPO; SAC with its replay) write through a file system (FUSE) that records writes, names
and flushes; `tests/lib/crash_model.py` defines which of them a crash may lose, tear or reorder. For
every prefix of every recording, and every way to lose unflushed writes, the run must exist once it
was created; the newest checkpoint whose save had returned, or a newer one, must verify and hold the
saved state; metrics.jsonl and the replay must hold the rows that it names; and no file may be
reported as damaged. Some states are resumed to the end, which must equal an untouched run.

Each run is killed once and resumed within the recording: two runs in the middle of an iteration,
and `--calls` runs after 0, 1, ... calls that change the disk, so that one process continues from
unflushed writes of another. Exits 1 on any miss. Needs root, /dev/fuse and libfuse.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import etude
from crash_model import Folders
from crashed_runs import LIVES, Crash, Recording, crashes, ends_equal, judge, record
from gates.lib.report import Gate, parse
from recording_fs import why_not


def recordings(folder: Path, calls: int) -> Iterator[tuple[Recording, bool]]:
    """(recording, whether its run was killed at a call)."""
    for recording in record(folder / "killed", LIVES):
        yield recording, False
    for first in range(0, calls, 10):  # mounts and recordings take disk space
        some = range(first, min(first + 10, calls))
        lives = {f"ppo call {n}": (f"call={n}", "end") for n in some}
        for recording in record(folder / f"calls-{first}", lives):
            yield recording, True


def chosen(found: Iterator[Crash], most: int, chance: random.Random) -> Iterator[Crash]:
    """All states of a recording, or a random sample of them."""
    return found if not most else iter(chance.sample(all_ := list(found), min(most, len(all_))))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=4, help="random states of each kind a prefix")
    parser.add_argument("--calls", type=int, default=70, help="runs killed after 0, 1, ... calls")
    parser.add_argument("--states", type=int, default=0, help="of each recipe; 0 for all")
    parser.add_argument("--call-states", type=int, default=50, help="of each run so killed")
    parser.add_argument("--resumes", type=int, default=20, help="of each recipe, to its end")
    options = parse(
        parser, smallest={"draws": 1, "calls": 0, "states": 40, "resumes": 1}, arguments=arguments
    )
    least = len(LIVES) * (options.states or 1000)
    least += options.calls * options.call_states
    needs = {"states": least, "resumed": len(LIVES) * options.resumes}
    needs["recordings"] = len(LIVES) + options.calls
    if not options.states:
        needs["prefixes in all their states"] = 600
    chance, wrong = random.Random(0), 0
    with Gate("crash_states", options, needs=needs, rows=(24,)) as gate:
        reason = why_not()
        if reason is not None:
            raise RuntimeError(f"nothing can be recorded: {reason}")
        with tempfile.TemporaryDirectory() as scratch:
            where, folders = Path(scratch), Folders(Path(scratch) / "pool")
            for recording, at_call in recordings(where, options.calls):
                gate.count("recordings")
                kept = []
                most = options.call_states if at_call else options.states
                if not most:
                    gate.count("prefixes in all their states", len(recording.entries) + 1)
                for crash in chosen(crashes(recording, options.draws), most, chance):
                    gate.count("states")
                    gate.count("states after a save", crash.step is not None)
                    sentence = judge(crash, recording, where / "state", folders)
                    if sentence is not None:
                        wrong += 1
                        gate.fail(f"{crash.label}: {sentence}")
                    elif not at_call:
                        kept.append(crash)
                if not at_call:
                    untouched = etude.train(recording.recipe, where / f"{recording.name}-whole")
                    for crash in chance.sample(kept, min(options.resumes, len(kept))):
                        gate.count("resumed")
                        if not ends_equal(crash, where / "state", folders, untouched):
                            wrong += 1
                            gate.fail(f"{crash.label}: resumed, and not as the untouched run")
                print(f"{recording.name}: {gate.counts['states']:,} states so far", flush=True)
        gate.figure("states that are not as they must be", wrong, at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
