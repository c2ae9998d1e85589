"""The picture in docs/first-run.md: the dashboard of a run.

    python docs/images/draw_dashboard.py RUN

All in it is what the run logged, up to its last row but five.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.segment import Segments

from etude.api import Run
from etude.core.clock import Clock
from etude.core.metrics import ELAPSED, Health
from etude.planning import recipes
from etude.planning.recipe import metrics_of
from etude.planning.resolve import resolve
from etude.training.logs.dashboard import Dashboard
from etude.training.logs.dashboard_view import draw

WIDTH, HEIGHT = 140, 44


def main(run: Run) -> None:
    """Draw a run that has ended as it was in the middle."""
    rows, loops = run.rows()[:-5], resolve(run.recipe).loops
    clock = Clock(loops)
    while clock.now.iterations < rows[-1]["iterations"]:
        clock.advance(loops.batches_per_iteration, 0)
    facts = [("seed", str(run.recipe.seed)), ("changed", recipes.changed(run.recipe) or "nothing")]
    health = Health(metrics_of(run.recipe), loops.iterations)
    console = Console(file=io.StringIO(), width=WIDTH, record=True, color_system="truecolor")
    dashboard = Dashboard(run.recipe.name, "runs/first", health, console, facts)
    for row in rows:
        dashboard.write(row)
    dashboard.follow(clock)
    dashboard.activity("collect")
    dashboard._begun_at, dashboard._start = 0, time.perf_counter() - rows[-1][ELAPSED]
    for line in draw(dashboard._view(), WIDTH, HEIGHT):
        console.print(Segments(line))
    picture = Path(__file__).with_name("dashboard.svg")
    picture.write_text(console.export_svg(title=f"etude train {run.recipe.name}"))


if __name__ == "__main__":
    main(Run(sys.argv[1]))
