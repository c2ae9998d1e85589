"""The share of a run's time that the dashboard takes: at most 1 %.

    python -m gates.speed.dashboard_cost [--pairs 3] [--steps 98304]

Alternates runs of `reach` with and without it, at 160 x 50, the larger of its two layouts. The
figure is the time spent in the dashboard (processor time of its drawing thread, and the time that
the run waits for it) over that of the run. Runs with and without it differ by less than two runs of
one kind, so their seconds are only printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import etude
from etude.core.metrics import Health
from etude.planning import recipes
from etude.planning.recipe import metrics_of
from etude.planning.recipes import Recipe
from etude.planning.resolve import resolve
from etude.training.logs.dashboard import Dashboard, DashboardCallback, TerminalConsole
from gates.lib.machine import report_load
from gates.lib.report import Gate, parse

LIMIT = 0.01


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=98_304)
    options = parse(parser, {"pairs": 1, "steps": 16_384}, arguments)
    with Gate("dashboard_cost", options, needs={"runs": 2 * options.pairs}) as gate:
        report_load(gate)
        measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    recipe = recipes.reach().replace("clock.total_timesteps", options.steps)
    plain, shown, shares = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(options.pairs):
            plain.append(without(recipe, Path(scratch) / f"plain{pair}"))
            gate.count("runs")
            seconds, cost = within(recipe, Path(scratch) / f"shown{pair}")
            gate.count("runs")
            shown.append(seconds)
            shares.append(cost / seconds)
            print(
                f"pair {pair}: {plain[-1]:.2f} s without, {seconds:.2f} s with, {cost:.3f} s of "
                f"it in the dashboard ({shares[-1]:.2%})",
                flush=True,
            )
    ratio = statistics.median(shown) / statistics.median(plain)
    print(f"median seconds with / without: {ratio:.3f}")
    gate.figure("largest share of a run", max(shares), at_most=LIMIT, timing=True)


def without(recipe: Recipe, folder: Path) -> float:
    start = time.perf_counter()
    etude.train(recipe, folder, console=False)
    return time.perf_counter() - start


def within(recipe: Recipe, folder: Path) -> tuple[float, float]:
    """(seconds of the run, seconds of them in the dashboard)."""
    with open(os.devnull, "w") as nowhere:
        console = TerminalConsole(file=nowhere, force_terminal=True, width=160, height=50)
        health = Health(metrics_of(recipe), resolve(recipe).loops.iterations)
        dashboard = Dashboard("reach", str(folder), health, console)
        start = time.perf_counter()
        etude.train(
            recipe,
            folder,
            callbacks=[DashboardCallback(dashboard)],
            logs=[dashboard],
            on_phase=dashboard.activity,
            console=False,
        )
        return time.perf_counter() - start, dashboard.cost


if __name__ == "__main__":
    sys.exit(main())
