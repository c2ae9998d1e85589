"""Rewards from returns: RRD against SAC on the episodic reward and against IRCR.

    python gates/train_episodic.py [--seeds 3] [--jobs 2] [--cheetah]

Trains the recipe `episodic` (reach, whose rewards are summed and told only when an episode is over)
with `--rewards.kind` rrd, given and ircr, by the real command in a fresh process each, and plays
500 fresh episodes with every trained policy. Prints each method's return and success with 95 %
intervals: over a training's episodes, and over the seeds (Student's t). With --cheetah instead
HalfCheetah-v5, 100,000 steps with half as many updates, one seed of each, 20 episodes: reported,
not judged.

Exits 1 unless RRD's return beats both others': the 95 % interval of the difference over seeds
(Welch) lies above 0, and each training took 10 minutes at most; 2 when only that failed and the
machine was busy. Timings are of `jobs` trainings beside each other, each on one thread.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from machine import report_load

SECONDS = 600.0
KINDS = ("rrd", "given", "ircr")
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306}
"""Student's t, 97.5 %, by degrees of freedom."""
REACH = ("episodic", "--collector.threads", "1")
CHEETAH = (
    *("sac", "--env.id", "HalfCheetah-v5", "--env.episodic"),
    *("--clock.total-timesteps", "100000", "--evaluation.every", "20000 steps"),
    *("--evaluation.final-episodes", "0", "--algorithm.train-batches", "50"),
)


class Trained(NamedTuple):
    returns: np.ndarray
    """[episodes]."""
    success: float
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, a core each")
    parser.add_argument("--cheetah", action="store_true", help="HalfCheetah-v5, one seed")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    options = parser.parse_args()
    judged = report_load()
    seeds = 1 if options.cheetah else options.seeds
    jobs = [(kind, seed) for seed in range(seeds) for kind in options.kinds]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda job: train(*job, options.cheetah, Path(scratch)), jobs)
        found = dict(zip(jobs, runs, strict=True))
    by_kind = {kind: [found[kind, seed] for seed in range(seeds)] for kind in options.kinds}
    for kind, trained in by_kind.items():
        print(f"{kind:5} {summary(trained)}")
    if options.cheetah:
        return 0
    better = [beats(by_kind["rrd"], by_kind[kind], kind) for kind in KINDS[1:] if kind in by_kind]
    quick = all(run.seconds <= SECONDS for run in found.values())
    print(f"train_episodic: better {sum(better)} of {len(better)}, within 10 minutes: {quick}")
    return 1 if not all(better) else (0 if quick else (1 if judged else 2))


def train(kind: str, seed: int, cheetah: bool, scratch: Path) -> Trained:
    """Seconds are from command to exit, evaluation of the run included."""
    folder, start = scratch / f"{kind}-{seed}", time.perf_counter()
    recipe = CHEETAH if cheetah else REACH
    command("train", *recipe, "--rewards.kind", kind, "--seed", str(seed), "--folder", str(folder))
    seconds = time.perf_counter() - start
    command("eval", str(folder), "--episodes", "20" if cheetah else "500")
    table = max(folder.glob("evaluations/*/episodes.csv"), key=lambda path: path.stat().st_mtime)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    returns = np.array([float(row["return"]) for row in rows])
    success = float(np.mean([float(row.get("is_success", "nan")) for row in rows]))
    print(
        f"{kind} seed {seed}: return {returns.mean():.2f} ± "
        f"{1.96 * returns.std(ddof=1) / math.sqrt(len(returns)):.2f}{succeeded(success)}, "
        f"{seconds:.0f} s",
        flush=True,
    )
    return Trained(returns, success, seconds)


def summary(runs: list[Trained]) -> str:
    """Over seeds."""
    means = np.array([run.returns.mean() for run in runs])
    text = f"return {means.mean():.2f}"
    if len(runs) > 1:
        half = T95[len(runs) - 1] * means.std(ddof=1) / math.sqrt(len(runs))
        text += f" ± {half:.2f} (95 %, {len(runs)} seeds)"
    return text + succeeded(float(np.mean([run.success for run in runs])))


def succeeded(share: float) -> str:
    """In words, where the task knows what success is."""
    return "" if math.isnan(share) else f", success {share:.1%}"


def beats(ours: list[Trained], theirs: list[Trained], name: str) -> bool:
    """Whether the difference of the means over seeds is above 0 with 95 % confidence."""
    sides = [np.array([run.returns.mean() for run in runs]) for runs in (ours, theirs)]
    parts = [means.var(ddof=1) / len(means) if len(means) > 1 else 0.0 for means in sides]
    spread = sum(
        (p**2 / (len(m) - 1) for p, m in zip(parts, sides, strict=True) if len(m) > 1), 0.0
    )
    freedom = int(np.clip(sum(parts) ** 2 / spread, 1, 8)) if spread else 1
    margin, half = sides[0].mean() - sides[1].mean(), T95[freedom] * math.sqrt(sum(parts))
    print(f"rrd beats {name} by {margin:.2f} ± {half:.2f}")
    return bool(margin - half > 0)


def command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude", *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"etude {' '.join(arguments)}: {done.stderr or done.stdout}")


if __name__ == "__main__":
    sys.exit(main())
