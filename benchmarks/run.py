"""Run peers on the same tasks of this machine, one at a time and in turns; write one JSON.

    python benchmarks/prepare.py --all --environments .venv-peers
    python benchmarks/run.py --environments .venv-peers [--measures speed score kill]
        [--peers etude skrl] [--tasks walk-go1] [--rounds 3] [--seeds 3] [--cap-minutes 10]
        [--total-hours 12]

speed: --rounds seeds, each for --speed-seconds: steps/s and memory. A machine that others share is
not equally fast all the time, so all peers take their turn in a round before the next begins, and
the page has the median. score: --seeds seeds until the task's score or --cap-minutes: time and
steps to it. kill: a run that is left alone, and one that is killed with SIGKILL at half of its
steps and half a checkpoint's interval, and resumed the peer's documented way. Of peers with a task
of their own only the speed is measured.

Runs that benchmarks/results.json already has are skipped, so the command can be killed and given
again; one with other limits is repeated, and --retry repeats those that ended in an error. --here
runs peers with this interpreter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from gates.lib import fresh, report  # isort: skip
from gates.lib import machine as load  # isort: skip
from gates.lib.beginnings import doubt, kept  # isort: skip
from gates.lib.command import started  # isort: skip
from benchmarks import prepare  # isort: skip
from benchmarks.progress import LIBRARY_ENDED  # isort: skip
from benchmarks.tasks import TASKS, Task  # isort: skip

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results.json"
RUNNERS = sorted(path.stem for path in (Path(__file__).parent / "runners").glob("[a-z]*.py"))
PEERS = tuple(sorted({*RUNNERS, *(path.stem for path in prepare.REQUIREMENTS.glob("*.txt"))}))
"""A peer that never installed has versions, and no runner that could have been tried."""
MEASURES = ("speed", "score", "kill")
GRACE = 180.0
"""Seconds that a run may take beyond its cap: imports, compilation, the last update."""
ENDS_WITHIN = 10.0
"""Seconds after its last line in which a run must have left."""
IDLE, PATIENCE = 0.15, 60.0
"""Most share of the cores for other work when a run begins, and seconds to wait for that."""
MOST_POINTS = 200
Line = dict[str, Any]


class Job(NamedTuple):
    measure: str
    peer: str
    task: str
    seed: int


class Outcome(NamedTuple):
    """Output and resources of one process."""

    lines: list[Line]
    peak: int
    """Bytes: largest sum over its processes, a shared page counted once."""
    error: str | None


def jobs(options: argparse.Namespace) -> list[Job]:
    """All runs in order: peers take turns, and a seed is complete before the next begins."""
    times = {"speed": options.rounds, "score": options.seeds, "kill": 1}
    return [
        Job(measure, peer, task, seed)
        for measure in options.measures
        for seed in range(times[measure])
        for task in options.tasks
        for peer in options.peers
    ]


def command(job: Job, python: Path | str, options: argparse.Namespace, out: Path) -> list[str]:
    steps = options.steps
    if job.measure == "kill":
        steps = steps or TASKS[job.task].kill_steps
    cap = options.speed_seconds if job.measure == "speed" else 60 * options.cap_minutes
    words = [str(python), "-m", f"benchmarks.runners.{job.peer}", job.task]
    words += ["--seed", str(job.seed), "--cap", f"{cap:g}"]
    words += ["--steps", str(steps)] if steps else []
    words += ["--smallest"] if options.smallest else []
    words += ["--target"] if job.measure == "score" else []
    words += ["--all-points"] if job.measure == "kill" else []
    return [*words, "--out", str(out)]


def execute(
    words: Sequence[str],
    limit: float,
    threads: int,
    until: Callable[[Line], bool] = lambda line: False,
) -> Outcome:
    """Run a process to its end, or kill it with SIGKILL once a line says so."""
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env |= {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "MUJOCO_GL": "egl"}
    env |= {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    lines: list[Line] = []
    with tempfile.TemporaryFile("w+") as said:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": said, "cwd": ROOT}
        with started(list(words), env=env, **pipes) as process:
            watch = Watch(process.pid, limit)
            watch.start()
            killed = ended = False
            assert process.stdout is not None
            for text in process.stdout:
                line = _parsed(text)
                if line is None:
                    said.write(text)
                    continue
                lines.append(line)
                killed, ended = until(line), "end" in line
                if killed or ended:  # its children may hold the pipe open for longer
                    break
            try:
                code = process.wait(0 if killed else ENDS_WITHIN if ended else None)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = 0  # it has said all
            watch.end()
        said.seek(0)
        words_said = without_paths(said.read()[-1500:])
    error = None
    if watch.too_long:
        error = f"no end within {limit:g} s: {words_said}"
    elif code and not killed:
        error = f"exit code {code}: {words_said}"
    return Outcome(lines, watch.peak, error)


def _parsed(text: str) -> Line | None:
    if not text.startswith("{"):
        return None
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class Watch(threading.Thread):
    """Samples the memory of a process's session, and ends it after its time."""

    def __init__(self, session: int, limit: float) -> None:
        super().__init__(daemon=True)
        self.peak, self.too_long = 0, False
        self._session, self._over = session, threading.Event()
        self._until = time.monotonic() + limit

    def run(self) -> None:
        while not self._over.wait(1.0):
            self.peak = max(self.peak, memory(self._session))
            if time.monotonic() > self._until:
                self.too_long = True
                os.killpg(self._session, signal.SIGKILL)
                return

    def end(self) -> None:
        self._over.set()
        self.join()


def memory(session: int) -> int:
    """Bytes of memory of all processes of a session; of a page that some share, each has a part."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[3]) != session:
                continue
            rollup = stat.with_name("smaps_rollup").read_text()
        except OSError:
            continue  # it has ended
        total += sum(
            1024 * int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total


def curve_of(lines: Sequence[Line]) -> list[list[Any]]:
    """[seconds, steps, return, success] of the points among lines."""
    names = ("seconds", "steps", "mean", "success")
    return [[line[name] for name in names] for line in lines if "mean" in line]


def speed_of(curve: Sequence[Sequence[Any]], task: Task) -> float | None:
    """Steps per second, without imports, warm-up and the first fifth; None if too few points."""
    points = [p for p in curve if p[1] >= task.warmup_steps]
    if len(points) < 2:
        return None
    begin = points[0][0] + 0.2 * (points[-1][0] - points[0][0])
    first = next(p for p in points if p[0] >= begin)
    if first is points[-1]:
        first = points[-2]
    seconds = points[-1][0] - first[0]
    return (points[-1][1] - first[1]) / seconds if seconds > 0 else None


def thinned(curve: list[list[Any]]) -> list[list[Any]]:
    """At most `MOST_POINTS` points of a curve, the last included."""
    every = math.ceil(len(curve) / MOST_POINTS)
    return curve if every <= 1 else [*curve[:-1][::every], curve[-1]]


def measure(job: Job, python: Path | str, options: argparse.Namespace) -> dict[str, Any]:
    """One record of results.json."""
    task = TASKS[job.task]
    with tempfile.TemporaryDirectory() as scratch:
        words = command(job, python, options, Path(scratch) / "left-alone")
        limit = float(words[words.index("--cap") + 1]) + GRACE
        busy = when_idle(options.patience)
        outcome = execute(words, limit, options.threads, lambda line: bool(why_not(job, line)))
        record = describe(job, words, outcome, busy, options.threads)
        if record.get("error") or record.get("not_offered") or job.measure != "kill":
            return record
        words = command(job, python, options, Path(scratch) / "killed")
        # Checkpoints are a tenth of the run apart: half an interval after one of them.
        middle = 0.55 * int(words[words.index("--steps") + 1])
        first = execute(words, limit, options.threads, lambda line: line.get("steps", 0) >= middle)
        second = execute([*words, "--resume"], limit, options.threads)
    record["killed"] = compare(outcome, first, second, task)
    record["error"] = record["error"] or first.error or second.error
    return record


def when_idle(patience: float) -> float:
    """The share of the cores that other work takes, as soon as it is little, or at last."""
    until = time.monotonic() + patience
    while (busy := load.busy_share()) > IDLE and time.monotonic() < until:
        time.sleep(1.0)
    return busy


def why_not(job: Job, head: Line) -> str:
    """Why a peer, of which this is the first line, is not measured so; "" if it is."""
    if "not_offered" in head:
        return str(head["not_offered"])
    if job.measure != "speed" and head.get("own_engine"):
        return "its task is its own: only its speed is measured"
    if job.measure == "kill" and "resumes" in head and head["resumes"] is None:
        return "its runner resumes nothing"
    return ""


def describe(
    job: Job, words: Sequence[str], outcome: Outcome, busy: float, threads: int
) -> dict[str, Any]:
    task, lines = TASKS[job.task], outcome.lines
    task = task.smallest() if "--smallest" in words else task
    head: Line = lines[0] if lines else {}
    record: dict[str, Any] = {
        **job._asdict(),
        "error": outcome.error,
        "command": told_command(words),
        "threads": threads,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": report.commit(),
        "machine": report.machine(),
        "busy_before": round(busy, 3),
    }
    if is_ours(job.peer) and "--smallest" not in words:
        record["begins"] = [kept(**fresh.about(job.peer, job.task))]
    if reason := why_not(job, head):
        return record | {"not_offered": reason}
    curve, last = curve_of(lines), lines[-1] if lines else {}
    speed = speed_of(curve, task)
    asked = float(words[words.index("--steps") + 1]) if "--steps" in words else math.inf
    short = last.get("steps", 0) < asked - task.rollout
    if record["error"] is None:
        if speed is None:
            record["error"] = "no figure: too few points"
        elif "end" not in last:
            record["error"] = "no figure: it did not say its end"
        elif last["end"] == LIBRARY_ENDED and short:
            record["error"] = f"it ended by itself after {last['steps']:,} steps"
    place = 3 if task.score == "success" else 2
    reached = last.get("end") == "target" or any(
        p[place] is not None and p[place] >= task.target for p in curve
    )
    return record | {
        "version": head.get("version"),
        "resumes": head.get("resumes"),
        "note": head.get("note", ""),
        "own_engine": head.get("own_engine", False),
        "steps_per_second": speed,
        "environment_share": last.get("environment_share"),
        "peak_memory": outcome.peak,
        "seconds": last.get("seconds"),
        "steps": last.get("steps"),
        "score": curve[-1][place] if curve else None,
        "reached": curve[-1][:2] if reached and last.get("end") == "target" else None,
        "curve": thinned(curve),
    }


def compare(alone: Outcome, first: Outcome, second: Outcome, task: Task) -> dict[str, Any]:
    """A run that was killed and resumed, beside the one that was left alone."""
    place = 3 if task.score == "success" else 2
    before, after = curve_of(first.lines), curve_of(second.lines)
    killed_at = before[-1][1] if before else 0
    went_on = next((line["went_on_from"] for line in second.lines if "went_on_from" in line), None)
    whole = {point[1]: point[place] for point in curve_of(alone.lines)}
    apart = [
        abs(point[place] - whole[point[1]])
        for point in after
        if point[place] is not None and whole.get(point[1]) is not None
    ]
    prints = [(o.lines[-1] if o.lines else {}).get("fingerprint") for o in (alone, second)]
    return {
        "killed_at": killed_at,
        "went_on_from": went_on,
        "curve_before": thinned(before),
        "curve_after": thinned(after),
        "largest_difference": max(apart, default=None),
        "final_difference": apart[-1] if apart else None,
        "bit_equal": None if None in prints else prints[0] == prints[1],
    }


def is_ours(peer: str) -> bool:
    """Whether a run depends on the code here."""
    return peer.startswith("etude")


def is_older(record: dict[str, Any]) -> bool:
    """Whether today's code may be faster or slower."""
    return bool(why_older(record))


def why_older(record: dict[str, Any]) -> str:
    """Why today's code may be faster or slower; "" where it is not, or where it is not our code."""
    if not is_ours(record["peer"]):
        return ""
    return doubt(record | fresh.about(record["peer"], record["task"])).timed


def job_of(record: dict[str, Any]) -> Job:
    return Job(*(record[field] for field in Job._fields))


def without_paths(text: str) -> str:
    """A traceback's text that names files from their package on, and no folder of this machine."""
    return re.sub(r"/\S*?/lib/python[\d.]+/(site-packages/)?", "", text)


def told_command(words: Sequence[str]) -> str:
    """A command without paths of this machine."""
    return shlex.join(["python", *words[1 : words.index("--out")]])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"installs": {}, "runs": []}


def write(path: Path, results: dict[str, Any]) -> None:
    """In one rename, so that a kill leaves the file before or after."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    new.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=3, help="of speed")
    parser.add_argument("--seeds", type=int, default=3, help="of score")
    parser.add_argument("--steps", type=int, help="of every run, at most; of kill its length")
    parser.add_argument("--cap-minutes", type=float, default=10.0, help="of score and kill")
    parser.add_argument("--speed-seconds", type=float, default=60.0)
    parser.add_argument("--total-hours", type=float, default=12.0, help="no run begins after")
    parser.add_argument("--threads", type=int, default=1, help="of torch and OpenMP")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds to wait for idle")
    parser.add_argument("--environments", type=Path, default=prepare.DEFAULT)
    parser.add_argument("--here", action="store_true", help="with this interpreter")
    parser.add_argument("--smallest", action="store_true", help="the size at which CI runs this")
    parser.add_argument("--retry", action="store_true", help="what ended in an error")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    environments = options.environments.resolve()
    if options.smallest and options.out == RESULTS:
        parser.error("--smallest needs an --out of its own")
    if not options.here:
        faults = {peer: prepare.error_of(peer, environments) for peer in options.peers}
        missing = [peer for peer, fault in faults.items() if fault == prepare.NOT_THERE]
        if missing:
            parser.error(f"first: python benchmarks/prepare.py {' '.join(missing)}")
    results, begin = read(options.out), time.monotonic()
    if options.retry:
        asked_for = set(jobs(options))
        results["runs"] = [
            r for r in results["runs"] if not r.get("error") or job_of(r) not in asked_for
        ]
    known = {job_of(record): record for record in results["runs"]}
    errors = 0
    for job in jobs(options):
        words = command(job, "", options, Path())
        asked = {"command": told_command(words), "threads": options.threads}
        if job in known and asked.items() <= known[job].items():
            continue
        if time.monotonic() - begin > 3600 * options.total_hours:
            print("the hours are over: the same command goes on")
            break
        fault = None if options.here else prepare.error_of(job.peer, environments)
        results["installs"][job.peer] = fault and without_paths(fault)
        if fault is None:
            python = sys.executable if options.here else prepare.python_of(job.peer, environments)
            record = measure(job, python, options)
            others = [other for other in results["runs"] if job_of(other) != job]
            results["runs"] = [*others, record]
            errors += record["error"] is not None
            print(told(record), flush=True)
        write(options.out, results)
    return 1 if errors else 0


def told(record: dict[str, Any]) -> str:
    name = " ".join(str(record[field]) for field in Job._fields)
    if record.get("not_offered"):
        return f"{name}: not offered: {record['not_offered']}"
    if record["error"]:
        return f"{name}: FAILED: {record['error']}"
    score = "-" if record["score"] is None else f"{record['score']:.3g}"
    return (
        f"{name}: {record['steps_per_second']:,.0f} steps/s, {record['steps']:,} steps in "
        f"{record['seconds']:.0f} s, score {score}, {record['peak_memory'] / 2**20:,.0f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
