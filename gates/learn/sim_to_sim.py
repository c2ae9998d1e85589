"""Run exported policies without torch, in plain MuJoCo with half the time step.

    python -m gates.learn.sim_to_sim [--episodes 400] [--recipes walk-go1 pick-place]
    python -m gates.learn.sim_to_sim --runs RUN RUN

Trains each recipe by the real command, or copies `--runs`, exports their policies by `etude
export`, and runs them by `runtime/examples/drive.py`: a scene from an XML file, the
contract of the export, numpy, onnxruntime and `mujoco`, with a different integrator.
The success rate must be within 3 points of `etude eval`. In a process that cannot import torch the
recorded steps must give the same actions within 1e-5; the median and the 99.9 % quantile of the
milliseconds of a step are figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from gates import ROOT
from gates.lib.command import etude, run
from gates.lib.report import Gate, parse

RUNTIME = ROOT / "runtime"
POINTS = 0.03
"""Largest difference of the two success rates."""
DIFFERENCE = 1e-5
"""Largest difference of an action between torch and ONNX."""
REPLAY = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "etude", "mujoco")))
from etude_runtime import Policy
from etude_runtime.__main__ import measure
policy = Policy.load(sys.argv[1])
steps, largest = policy.replay()
timing = measure(policy, 5000)
print(json.dumps([steps, largest, timing.percentile(50) * 1e3, timing.percentile(99.9) * 1e3]))
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", default=["walk-go1", "pick-place"])
    parser.add_argument("--runs", nargs="+", type=Path, default=[], help="instead of training")
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--timesteps", type=int, help="default the recipe's own")
    # Trained for a second: the policy fails in both simulations.
    smallest = {"recipes": ["pick-place"], "episodes": 4, "timesteps": 1024}
    options = parse(parser, smallest, arguments)
    wanted = options.runs or options.recipes
    needs = {"policies": len(wanted), "episodes": 2 * len(wanted) * options.episodes}
    gate = Gate("sim_to_sim", options, needs=needs)
    with tempfile.TemporaryDirectory() as scratch, gate:
        for number, name in enumerate(wanted):
            folder = Path(scratch) / str(number)
            if options.runs:  # an evaluation writes into the run
                shutil.copytree(name, folder, symlinks=True)
            else:
                train(gate, name, folder, options.timesteps)
            trial(gate, folder, Path(scratch) / f"{number}-policy", options.episodes)
    return gate.code


def train(gate: Gate, recipe: str, folder: Path, timesteps: int | None) -> None:
    chosen = [recipe, "--folder", str(folder)]
    if timesteps:
        chosen += ["--clock.total-timesteps", str(timesteps), "--clock.cycles", "1"]
        chosen += ["--clock.iterations", "1"]
    etude(gate, "train", *chosen)


def trial(gate: Gate, folder: Path, to: Path, episodes: int) -> None:
    """Export the policy of a run, and compare it with the evaluation of the run."""
    found = json.loads(etude(gate, "eval", str(folder), "--episodes", str(episodes), "--json"))
    gate.count("episodes", int(found["eval/episodes"]))
    etude(gate, "export", str(folder), "--to", str(to))
    name = json.loads((to / "policy.json").read_text())["name"]
    steps, largest, median, slowest = replay(gate, to)
    rate = driven(to, episodes)
    gate.count("episodes", episodes)
    gate.count("policies")
    evaluated = found["eval/success_rate"]
    print(
        f"{name}: success {evaluated:.1%} in training's simulation, {rate:.1%} in plain MuJoCo; "
        f"{steps:,} steps replayed, largest difference {largest:.1e}",
        flush=True,
    )
    gate.figure(f"success of {name} in plain MuJoCo", rate)
    gate.figure(f"success of {name} in etude eval", evaluated)
    gate.figure(f"points apart of {name}", abs(rate - evaluated), at_most=POINTS)
    gate.figure(f"largest difference of {name}", largest, at_most=DIFFERENCE)
    gate.figure(f"median ms of a step of {name}", median)
    gate.figure(f"99.9 % ms of a step of {name}", slowest)


def replay(gate: Gate, folder: Path) -> tuple[int, float, float, float]:
    """Replay recorded steps without torch: (steps, largest difference, median ms, 99.9 % ms)."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(RUNTIME / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    said = run(gate, [sys.executable, "-c", REPLAY, str(folder)])
    steps, largest, median, slowest = json.loads(said)
    return int(steps), largest, median, slowest


def driven(folder: Path, episodes: int) -> float:
    """The success rate in plain MuJoCo."""
    for path in (RUNTIME / "src", RUNTIME / "examples"):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    from drive import make, success_rate

    return success_rate(make(folder), episodes, 0)


if __name__ == "__main__":
    sys.exit(main())
