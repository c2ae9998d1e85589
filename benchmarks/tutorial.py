"""The PPO of examples/tutorial_ppo.py beside the built-in one: same tasks, settings and seeds.

    python benchmarks/tutorial.py [--seeds 3]     # trains what is missing; minutes
    python benchmarks/tutorial.py --table         # writes docs/tutorial-ppo.md from the results

Each training is a command in a process of its own. Its best policy is then evaluated in 200 fresh
episodes. Results are kept in benchmarks/tutorial.json with the hash of the trained weights: runs
are exact, so another training of the same code gives the same hash. Exits with 1 where the tutorial
falls short: on reach below 99 % success, on CartPole below a return of 475, or where it learns more
than 10 % more slowly than the built-in PPO on average.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "examples" / "tutorial_ppo.py"
RESULTS = ROOT / "benchmarks" / "tutorial.json"
PAGE = ROOT / "docs" / "tutorial-ppo.md"
BEGIN, END = "<!-- benchmarks/tutorial.py -->\n", "<!-- end -->"
TASKS = {"reach": ("reach", "reach"), "CartPole-v1": ("ppo", "cartpole")}
"""{task: (recipe of the built-in PPO, recipe in the tutorial's file)}."""
ENOUGH = {"reach": ("eval/success_rate", 0.99), "CartPole-v1": ("eval/mean_reward", 475.0)}
"""{task: (metric of fresh episodes, at least)}."""
SLOWER = 0.9
"""Least ratio of the returns while learning, the tutorial's over the built-in PPO's."""
Results = dict[str, dict[str, Any]]
"""{"task algorithm seed": what was measured}."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="train nothing, write the page")
    options = parser.parse_args(arguments)
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not options.table:
        for task, (built_in, function) in TASKS.items():
            for seed in range(options.seeds):
                for algorithm, recipe in (("ppo", built_in), ("tutorial", f"{FILE}:{function}")):
                    name = f"{task} {algorithm} {seed}"
                    if results.get(name, {}).get("file") not in (None, code_hash(algorithm)):
                        del results[name]
                    if name not in results:
                        results[name] = train(task, recipe, seed) | {"file": code_hash(algorithm)}
                        print(name, results[name], flush=True)
                        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)
    return judge(results)


def code_hash(algorithm: str) -> str:
    """The hash of the tutorial's file; "" of the built-in algorithm."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()[:12] if algorithm == "tutorial" else ""


def train(task: str, recipe: str, seed: int) -> dict[str, Any]:
    """Train in a new process, then evaluate; what is kept of it."""
    import etude

    etude_command = [sys.executable, "-m", "etude"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/run"
        command = [*etude_command, "train", recipe, "--seed", str(seed), "--folder", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        command = [*etude_command, "eval", folder, "--episodes", "200", "--json", "--trust"]
        fresh = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        run = etude.Run(folder, trust=True)
        _, returns = run.curves("rollout/ep_rew_mean")["rollout/ep_rew_mean"]
        return {
            "score": fresh[ENOUGH[task][0]],
            "return while learning": statistics.fmean(returns),
            "steps": run.rows()[-1]["timesteps"],
            "weights": run.fingerprint()["policy"][:12],
        }


def of(results: Results, task: str, algorithm: str, what: str) -> list[float]:
    """A figure of every seed."""
    chosen = f"{task} {algorithm} "
    return [entry[what] for name, entry in sorted(results.items()) if name.startswith(chosen)]


def table(results: Results) -> str:
    """The table of the tutorial's page; a cell has the figure of each seed."""
    lines = [
        "| task | algorithm | seeds | score of 200 fresh episodes | mean return while learning |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS:
        for algorithm, title in (("ppo", "built-in `ppo`"), ("tutorial", "`tutorial_ppo.py`")):
            scores = of(results, task, algorithm, "score")
            returns = of(results, task, algorithm, "return while learning")
            share = task == "reach"
            score = " / ".join(f"{100 * x:g} %" if share else f"{x:.1f}" for x in scores)
            learning = " / ".join(f"{x:.2f}" if share else f"{x:.0f}" for x in returns)
            lines.append(f"| {task} | {title} | {len(scores)} | {score} | {learning} |")
    return "\n".join(lines) + "\n"


def write_page(results: Results) -> None:
    """Put the table on the tutorial's page."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + table(results) + END + rest.partition(END)[2])


def judge(results: Results) -> int:
    """Print where the tutorial falls short; the exit code."""
    short = []
    for task, (metric, least) in ENOUGH.items():
        scores = of(results, task, "tutorial", "score")
        if not scores or min(scores) < least:
            short.append(f"{task}: {metric} of the seeds is {scores}, must be at least {least}")
        sides = [of(results, task, a, "return while learning") for a in ("tutorial", "ppo")]
        if all(sides) and (ratio := statistics.fmean(sides[0]) / statistics.fmean(sides[1])):
            print(f"{task}: return while learning, tutorial over built-in: {ratio:.3f}")
            if ratio < SLOWER:
                short.append(f"{task}: it learns more slowly, {ratio:.3f} of the built-in's return")
    print("\n".join(short) if short else "the tutorial reaches the score of the built-in PPO")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
