"""Coverage-guided fuzzing of every reader of untrusted files.

    python -m gates.faults.fuzz --inputs 1000000

libFuzzer (atheris) feeds each reader of tests/fuzz/readers.py in its own process: it changes bytes
and nodes of JSON, and continues from inputs that reach new code. A finding is an exception other
than the reader's own, an input that takes more than 20 s or 4 GiB, a file written outside of the
folder, a process, a connection, or the import of a package. HDF5's library may crash on a damaged
file: Etude reads such files in a subprocess, and here the process is restarted. Inputs of findings
go to --findings; keep them in tests/fuzz/corpus.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import math
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from gates import ROOT
from gates.lib.report import Gate, parse

SHARES = {
    "hdf5": 0.01,
    "recipe": 0.03,
    "dataset": 0.04,
    "checkpoint": 0.08,
    "clip": 0.42,
    "contract": 0.42,
}
"""Shares of all inputs, with which each reader gets about the same time."""
SECONDS, MEGABYTES = 20, 4096
COUNT = struct.Struct("<Q")
DEATHS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGXCPU, signal.SIGABRT, signal.SIGFPE}
"""Signals by which HDF5's library may end, and that of its time limit."""


atheris: Any = None
readers: Any = None
"""Modules that `load` imports."""


def load() -> None:
    """Import the fuzzer and the instrumented readers; only in a gate's own process."""
    global atheris, readers
    import atheris

    sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
    with (
        contextlib.redirect_stderr(io.StringIO()),  # it prints every module
        atheris.instrument_imports(include=["etude"], enable_loader_override=False),
    ):
        import readers


def child(name: str, runs: int, seed: int, folder: Path) -> None:
    """Fuzz one reader and end the process; writes counts and findings into the folder."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    reader = readers.READERS[name](scratch)
    for data in reader.seeds:
        reader.read(data)  # load lazy imports now
    watch = readers.Watch(scratch)
    counter = mmap.mmap(os.open(folder / "count", os.O_RDWR), COUNT.size)
    known: set[tuple[str, str]] = set()

    def one(data: bytes) -> None:
        COUNT.pack_into(counter, 0, COUNT.unpack_from(counter)[0] + 1)
        watch.active = True
        try:
            reader.read(data)
        except Exception as error:
            watch.active = False
            frame = traceback.extract_tb(error.__traceback__)[-1]
            note(type(error).__name__, f"{frame.filename}:{frame.lineno}", data)
        finally:
            watch.active = False
        for what in watch.seen:
            note("did", what, data)
        watch.seen.clear()

    def note(kind: str, where: str, data: bytes) -> None:
        if (kind, where) in known or len(known) > 50:
            return
        known.add((kind, where))
        stem = f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
        (folder / "findings" / stem).write_bytes(data)
        trace = traceback.format_exc() if kind != "did" else where
        (folder / "findings" / f"{stem}.txt").write_text(f"{kind} {where}\n{trace}")

    def mutate(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        new = readers.change(data, chance) if chance.random() < 0.6 else None
        return atheris.Mutate(data, most) if new is None or len(new) > most else new

    arguments = [
        sys.argv[0],
        f"-runs={runs}",
        f"-seed={seed}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-max_len={reader.max_bytes}",
        f"-artifact_prefix={folder}/findings/{name}-",
        "-verbosity=0",
        "-print_final_stats=0",
        *(
            [f"-handle_{s}=0" for s in ("segv", "bus", "abrt", "ill", "fpe")]
            if reader.native
            else []
        ),
        str(folder / "corpus"),
    ]
    if reader.native:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (2 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    (folder / "corpus").mkdir(exist_ok=True)
    for number, data in enumerate(reader.seeds):
        (folder / "corpus" / f"seed-{number}").write_bytes(data)
    kept = readers.CORPUS / name
    for file in kept.iterdir() if kept.is_dir() else ():
        (folder / "corpus" / file.name).write_bytes(file.read_bytes())
    atheris.Setup(arguments, one, custom_mutator=mutate)
    atheris.Fuzz()


def forked(name: str, runs: int, seed: int, folder: Path) -> int:
    """Fuzz one reader in a fork; return its exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    stream = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    try:
        child(name, runs, seed, folder)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def fuzz(name: str, runs: int, seed: int, gate: Gate, findings: Path) -> None:
    """Feed `runs` inputs to one reader; restart it if its library crashes."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    begin, restarts = time.monotonic(), 0
    with tempfile.TemporaryDirectory(dir=shared, prefix="fuzz-") as place:
        folder = Path(place)
        (folder / "findings").mkdir()
        (folder / "count").write_bytes(COUNT.pack(0))
        done = 0
        while done < runs and restarts < max(20, runs // 20):
            code = forked(name, runs - done, seed + restarts, folder)
            (before, done) = done, COUNT.unpack((folder / "count").read_bytes())[0]
            if code == 0 and done > before:
                break
            restarts += 1
            if name == "hdf5" and -code in DEATHS and done > before:
                gate.count("readers of HDF5 that died and were started again")
                continue
            words = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-12:]
            gate.fail(f"{name}: the process ended with {code}: {' / '.join(words)}")
        seconds = time.monotonic() - begin
        print(f"{name}: {done:,} inputs in {seconds:.0f} s", flush=True)
        gate.count("inputs", done)
        gate.details[name] = {"inputs": done, "seconds": round(seconds), "restarts": restarts}
        gate.details[name]["corpus"] = len(os.listdir(folder / "corpus"))
        for file in sorted((folder / "findings").glob("*")):
            findings.mkdir(parents=True, exist_ok=True)
            (findings / file.name).write_bytes(file.read_bytes())
            if file.suffix != ".txt":
                gate.count("findings")
                text = file.with_suffix(".txt")
                why = text.read_text().splitlines()[0] if text.exists() else "slow or large"
                gate.fail(f"{name}: {file.name}: {why}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--readers", nargs="+", default=list(SHARES), help="only these")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    options = parse(parser, smallest={"inputs": 600}, arguments=arguments)
    chosen = {name: SHARES[name] for name in options.readers}
    whole = sum(chosen.values())
    needs = {"inputs": options.inputs, "readers": len(chosen)}
    with Gate("fuzz", options, needs=needs, rows=(12, 21)) as gate:
        load()
        for name, share in chosen.items():
            runs = math.ceil(options.inputs * share / whole)
            fuzz(name, runs, options.seed, gate, options.findings)
            gate.count("readers", int(gate.details[name]["inputs"] > 0))
        gate.figure("findings", float(gate.counts["findings"]), at_most=0)
    return gate.code


if __name__ == "__main__":
    sys.exit(main())
