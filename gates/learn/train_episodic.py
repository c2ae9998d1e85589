"""Rewards from returns: RRD against SAC on the episodic reward and against IRCR.

    python -m gates.learn.train_episodic [--seeds 0 1 2] [--methods rrd given ircr] [--jobs 2]
    python -m gates.learn.train_episodic --cheetah                   # HalfCheetah-v5: not judged.

Trains on `reach` with the sum of rewards given at the end of an episode, by the real command in
fresh processes, and plays 500 fresh episodes with every trained policy:

    rrd           recipe episodic
    given         the same with SAC on the episodic reward itself
    ircr          recipe episodic-ircr, which has the settings of IRCR's reference
    ircr-shared   recipe episodic with IRCR in place of RRD, on request

With --cheetah it is HalfCheetah-v5 for 100,000 steps with half as many updates, 20 episodes.

Each training has a run and a file METHOD-SEED.json in --folder. Existing results are used, and
interrupted trainings are resumed. All results in the folder are written to results.json and
printed: each method's return and success with 95 % intervals, over a training's episodes and over
the seeds (Student's t).

RRD's return must beat that of `given` and of `ircr`: the 95 % interval of the difference over seeds
(Welch) lies above 0, and each training takes at most 10 minutes. The gate fails if results are
missing or of one seed; with --cheetah it has no bounds. Timings are of `jobs` trainings side by
side, each on one thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import etude
from gates.lib.command import etude as call
from gates.lib.compare import T95, half_width
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

SECONDS = 600.0
METHODS = ("rrd", "given", "ircr")
CHEETAH = (
    *("sac", "--env.id", "HalfCheetah-v5", "--env.episodic"),
    *("--clock.total-timesteps", "100000", "--evaluation.every", "20000 steps"),
    *("--evaluation.final-episodes", "0", "--algorithm.train-batches", "50"),
)
Result = dict[str, Any]
"""The contents of METHOD-SEED.json: "method", "seed", "command", "returns" [episodes], "success" or
None, "seconds", and "curve" [[timesteps, mean reward, success or None], ...] of its evaluations."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="0 1 2, or 0 of HalfCheetah")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=(*METHODS, "ircr-shared"))
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--cheetah", action="store_true", help="HalfCheetah-v5")
    parser.add_argument("--folder", type=Path, help="default runs/train_episodic[_cheetah]")
    parser.add_argument("--timesteps", type=int, help="shorter trainings, to try the gate itself")
    parser.add_argument("--episodes", type=int, help="fresh episodes; 500, or 20 of HalfCheetah")
    parser.add_argument("--margin", type=float, default=0.0, help="of the intervals, at least")
    with tempfile.TemporaryDirectory() as scratch:
        # Trained for seconds: only completion is judged, not learning.
        smallest = {"seeds": [0, 1], "timesteps": 5_120, "episodes": 20, "margin": -math.inf}
        smallest |= {"folder": Path(scratch), "methods": ("rrd", "given")}
        options = parse(parser, smallest, arguments)
        options.compared = options.methods if options.smallest or options.cheetah else METHODS
        options.seeds = options.seeds or ([0] if options.cheetah else [0, 1, 2])
        variant = "cheetah" if options.cheetah else ""
        needs = {"trainings": len(options.seeds) * len(options.methods)}
        with Gate("train_episodic", options, needs=needs, variant=variant) as gate:
            report_load(gate)
            measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    seeds = options.seeds
    folder = options.folder or Path("runs/train_episodic" + "_cheetah" * options.cheetah)
    folder.mkdir(parents=True, exist_ok=True)
    episodes = options.episodes or (20 if options.cheetah else 500)
    jobs = [(method, seed) for seed in seeds for method in options.methods]
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [
            pool.submit(train, gate, *job, command(*job, options), folder, episodes) for job in jobs
        ]
        for task in tasks:
            task.result()
            gate.count("trainings")
    found = collect(folder)
    for method, results in found.items():
        print(f"{method:11} {summary(list(results.values()))}")
    missing = [f"{m}-{s}" for s in seeds for m in options.compared if s not in found.get(m, {})]
    if missing:
        raise LookupError(f"nothing is compared before there are {', '.join(missing)}")
    sides = {m: [found[m][seed] for seed in seeds] for m in options.compared}
    for method, side in sides.items():
        gate.figure(f"return of {method}", float(means_of(side).mean()))
    if options.cheetah:
        return
    for method in options.compared[1:]:
        least = beats(sides["rrd"], sides[method], method) if len(seeds) > 1 else math.nan
        gate.figure(f"rrd over {method}, at least", least, at_least=options.margin)
    slowest = max(result["seconds"] for side in sides.values() for result in side)
    gate.figure("seconds of the slowest", slowest, at_most=SECONDS, timing=True)


def command(method: str, seed: int, options: argparse.Namespace) -> list[str]:
    """The arguments of `etude train`, without the folder."""
    kind = method.removesuffix("-shared")
    if options.cheetah:
        chosen = [*CHEETAH, "--rewards.kind", kind]
        if method == "ircr":
            own = etude.recipes.find("episodic-ircr").algorithm
            for name in ("capacity", "batch_size", "polyak"):
                chosen += [f"--algorithm.{name.replace('_', '-')}", str(getattr(own, name))]
    elif method == "ircr":
        chosen = ["episodic-ircr", "--collector.threads", "1"]
    else:
        chosen = ["episodic", "--collector.threads", "1", "--rewards.kind", kind]
    if options.timesteps:
        chosen += ["--clock.total-timesteps", str(options.timesteps)]
    return [*chosen, "--seed", str(seed)]


def train(
    gate: Gate, method: str, seed: int, chosen: list[str], folder: Path, episodes: int
) -> None:
    """Train and play one seed of a method, unless the folder has the result."""
    path, run = folder / f"{method}-{seed}.json", folder / f"{method}-{seed}"
    wanted = " ".join(chosen)
    if path.exists():
        if (known := json.loads(path.read_text())["command"]) != wanted:
            raise SystemExit(f"{path} is of `{known}`: give another --folder to `{wanted}`.")
        return
    if run.exists():
        call(gate, "resume", str(run))
    else:
        call(gate, "train", *chosen, "--folder", str(run))
    call(gate, "eval", str(run), "--episodes", str(episodes))
    table = max(run.glob("evaluations/*/episodes.csv"), key=lambda file: file.stat().st_mtime)
    with table.open() as file:
        played = list(csv.DictReader(file))
    rows, names = etude.Run(run).rows(), ("timesteps", "eval/mean_reward", "eval/success_rate")
    known = [float(row["is_success"]) for row in played if "is_success" in row]
    result: Result = {
        "method": method,
        "seed": seed,
        "command": wanted,
        "returns": [float(row["return"]) for row in played],
        "success": float(np.mean(known)) if known else None,
        "seconds": rows[-1]["time/time_elapsed"],
        "curve": [[row.get(n) for n in names] for row in rows if names[1] in row],
    }
    write(path, result)
    returns = np.array(result["returns"])
    half = 1.96 * returns.std(ddof=1) / math.sqrt(len(returns))
    said = f"return {returns.mean():.2f} ± {half:.2f}{succeeded([result])}"
    print(f"{method} seed {seed}: {said}, {result['seconds']:.0f} s", flush=True)


def collect(folder: Path) -> dict[str, dict[int, Result]]:
    """Read all results in the folder, by method and seed; write them to results.json."""
    found: dict[str, dict[int, Result]] = {}
    for path in sorted(folder.glob("*-*.json")):
        result = json.loads(path.read_text())
        found.setdefault(result["method"], {})[result["seed"]] = result
    brief = {
        method: {
            seed: {
                **{name: result[name] for name in ("command", "success", "seconds", "curve")},
                "mean_return": float(np.mean(result["returns"])),
                "episodes": len(result["returns"]),
            }
            for seed, result in results.items()
        }
        for method, results in found.items()
    }
    write(folder / "results.json", brief)
    return found


def write(path: Path, document: dict[Any, Any]) -> None:
    """Write a file atomically."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(beside, path)


def means_of(results: list[Result]) -> np.ndarray:
    """Mean returns [trainings]."""
    return np.array([np.mean(result["returns"]) for result in results])


def summary(results: list[Result]) -> str:
    """Mean and interval over seeds, as text."""
    means = means_of(results)
    text = f"return {means.mean():.2f}"
    if len(means) > 1:
        half = half_width(means)
        text += f" ± {half:.2f} (95 %, {len(means)} seeds)"
    return text + succeeded(results)


def succeeded(results: list[Result]) -> str:
    """The success rate as text; "" for a task without success."""
    known = [result["success"] for result in results if result["success"] is not None]
    return f", success {np.mean(known):.1%}" if known else ""


def beats(ours: list[Result], theirs: list[Result], name: str) -> float:
    """The lower end of the 95 % interval of the difference of the means over seeds."""
    sides = [means_of(results) for results in (ours, theirs)]
    parts = [means.var(ddof=1) / len(means) for means in sides]
    spread = sum(p**2 / (len(m) - 1) for p, m in zip(parts, sides, strict=True))
    freedom = int(np.clip(sum(parts) ** 2 / spread, 1, 8)) if spread else 1
    margin, half = sides[0].mean() - sides[1].mean(), T95[freedom - 1] * math.sqrt(sum(parts))
    print(f"rrd beats {name} by {margin:.2f} ± {half:.2f}")
    return float(margin - half)


if __name__ == "__main__":
    sys.exit(main())
