"""A run with a million log rows costs what one with a thousand costs, plus seconds.

Rows are made, not waited for: a short run is paused, and rows like its own are put before its last
ones, in metrics.jsonl and in what its checkpoint knows of that file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from etude import api
from etude.planning.resolve import resolve
from etude.runs import checkpoint
from etude.runs.metrics_log import MetricsLog
from toys import tiny_reach

ROW = 30
UNIT = "log rows"
FULL, IN_CI = 1_100_000, 1
SECONDS = 900.0
FEW, SIZES = 1_000, (100_000, 1_000_000)
SECONDS_MORE, MIB_MORE, BYTES_MORE = 10.0, 50.0, 8192
"""What many rows may cost more than few: processor time and memory of each command, and bytes of a
checkpoint, whose marks of rows grow up to a fixed number."""
PAUSE = 4

COMMANDS = {
    "plan": ["plan", "{run}/recipe.yaml"],
    "report": ["report", "{run}", "--out", "{run}-report.html"],
    "bundle": [
        "bundle",
        "{run}",
        "--to",
        "{run}-bundle",
        "--episodes",
        "2",
        "--no-film",
        "--no-onnx",
    ],
    "fsck": ["fsck", "{run}"],
    "runs": ["runs", "{run}"],
    "resume": ["resume", "{run}", "--pause-after", str(PAUSE + 1)],
}
CHILD = """
import json, resource, sys, time
from etude.cli.main import main
from etude.api import resume
spent = {}
for name, words in json.loads(sys.argv[1]).items():
    start = time.process_time()
    if name == "resume":
        resume(words[1], pause_after=int(words[3]), console=True)
    code = 0 if name == "resume" else main(words)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent[name] = [code or 0, seconds, peak]
print("SPENT", json.dumps(spent))
"""


def case(number: int, seed: int, folder: Path) -> int:
    rows = SIZES[number % len(SIZES)]
    paused = pause(folder / "paused", max(SIZES))
    few, many = (made(paused, folder / f"{count}", count) for count in (FEW, rows))
    state = [size_of(run) for run in (few, many)]
    grown = state[1] - state[0]
    assert abs(grown) <= BYTES_MORE, f"a checkpoint grew by {grown} bytes"
    apart = number > 0  # in CI, one process has to do for all commands
    spent = [measured(run, apart) for run in (few, many)]
    for name in COMMANDS:
        (_, seconds, mib), (code, seconds_of_many, mib_of_many) = (each[name] for each in spent)
        print(
            f"{rows:,} rows, {name}: {seconds_of_many - seconds:+.1f} s and "
            f"{mib_of_many - mib:+.0f} MiB, of {seconds:.1f} s and {mib:.0f} MiB"
        )
        assert code == 0, f"{name} ended with {code}"
        assert seconds_of_many - seconds < SECONDS_MORE, f"{name} took {seconds_of_many:.1f} s"
        assert mib_of_many - mib < MIB_MORE, f"{name} took {mib_of_many:.0f} MiB"
    with (many / "metrics.jsonl").open("rb") as stream:
        assert sum(1 for _ in stream) == rows + 1
    return rows


def pause(path: Path, rows: int) -> Path:
    """A run that is paused after some iterations, of a recipe with that many log rows and more."""
    recipe = tiny_reach(
        rows + 2 * PAUSE,
        clock={"iterations": 1},
        evaluation={"every": "3 cycles", "final_episodes": 2},
        checkpoint={"every": "1000 cycles"},
    )
    api.create(resolve(recipe), path)
    api.resume(path, pause_after=PAUSE)
    return path


def made(paused: Path, path: Path, rows: int) -> Path:
    """A copy of a paused run that has so many rows behind it, with all columns."""
    subprocess.run(["cp", "-r", paused, path], check=True)
    log = path / "metrics.jsonl"
    own = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    usual = max((row for row in own if "eval/mean_reward" not in row), key=len)
    tested = max(own, key=len)
    writer = MetricsLog(log)
    known = writer._so_far
    with log.open("ab", buffering=1 << 20) as stream:
        for start in range(0, rows - len(own), 1000):
            for i in range(start, min(start + 1000, rows - len(own))):
                row = dict(tested if i % 50 == 49 else usual)
                row["cycle"] = row["iterations"] = i
                row["timesteps"] = i * own[0]["timesteps"] // rows
                line = (json.dumps(row) + "\n").encode()
                stream.write(line)
                known.add(line, row)
        for row in own:
            line = (json.dumps(row) + "\n").encode()
            stream.write(line)
            known.add(line, row)
    saved = checkpoint.newest_verified(path / "checkpoints")
    assert saved is not None
    arrays, contract, training = checkpoint.load_training(saved)
    training["metrics"] = writer.position()
    writer.close()
    step = checkpoint.step_of(saved)
    checkpoint.save(path / "checkpoints", step, (arrays, contract), training)
    return path


def size_of(run: Path) -> int:
    saved = checkpoint.newest_verified(run / "checkpoints", repair=False)
    assert saved is not None
    return sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())


def measured(run: Path, apart: bool) -> dict[str, tuple[int, float, float]]:
    """{command: (exit code, processor seconds, peak MiB)}, each `apart` in a process of its own."""
    words = {name: [w.format(run=run) for w in each] for name, each in COMMANDS.items()}
    found: dict[str, tuple[int, float, float]] = {}
    for part in [{name: each} for name, each in words.items()] if apart else [words]:
        command = [sys.executable, "-c", CHILD, json.dumps(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith("SPENT")), None)
        assert line is not None, done.stderr[-2000:] or done.stdout[-2000:]
        found |= {name: tuple(each) for name, each in json.loads(line[6:]).items()}
    return found
