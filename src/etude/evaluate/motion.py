"""How well each motion was imitated: a table for people, a file, and numbers for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from etude.data.motion.metrics import ERRORS, by_motion, only_successes
from etude.evaluate.fresh import FreshEpisodes

ALL, SUCCESSES = "all", "successes only"
_TITLES = {
    "is_success": "success",
    "success_25": "at .25 m",
    "once": "once",
    "once_25": "at .25 m",
    **{name: name.removesuffix("_dist").removeprefix("mpjpe_") for name in ERRORS},
    "progress": "progress",
}
"""Statistics of the table in its order, by what they are called there."""
_CAPTION = "g, l, pa: mean distance of joints in mm, in the world, from the root, at best fit"
_RATES = ("is_success", "success_25", "once", "once_25", "progress")


class MotionReport:
    """Averages per motion, and over motions: of all of them, and of successes alone."""

    def __init__(self, fresh: FreshEpisodes) -> None:
        self.statistics = [name for name in _TITLES if name in fresh.episodes]
        """Those of `_TITLES` that the environment reports."""
        self._names = fresh.spec.motions
        won = only_successes(fresh.episodes)
        self._all = by_motion(fresh.episodes)
        self._won = by_motion(won) if won["motion"].size else None
        self._played = np.bincount(fresh.episodes["motion"].astype(np.int64))

    def motions(self) -> dict[str, dict[str, float]]:
        """{motion: {statistic: mean over its episodes}}, in the environment's order."""
        return {
            self._names[int(number)]: {name: float(self._all[name][i]) for name in self.statistics}
            for i, number in enumerate(self._all["motion"])
        }

    def averages(self) -> dict[str, dict[str, float | None]]:
        """Means over motions of the mean of each; None where there is nothing to average."""
        return {
            ALL: {name: float(self._all[name].mean()) for name in self.statistics},
            SUCCESSES: {
                name: None if self._won is None else float(self._won[name].mean())
                for name in self.statistics
            },
        }

    def metrics(self) -> dict[str, Any]:
        """For programs."""
        return {"motions": self.motions(), "motion_averages": self.averages()}

    def csv(self) -> str:
        """A line per motion, and the two averages; empty where there is nothing to average."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["motion", "episodes", *self.statistics])
        for name, means in self.motions().items():
            played = self._played[self._names.index(name)]
            writer.writerow([name, played, *(f"{value:.9g}" for value in means.values())])
        for name, values in self.averages().items():
            written = ("" if value is None else f"{value:.9g}" for value in values.values())
            writer.writerow([self._title(name), "", *written])
        return stream.getvalue()

    def _title(self, average: str) -> str:
        """Of an average, with the number of motions in it."""
        motions = self._all if average == ALL else self._won
        return f"{average} ({0 if motions is None else len(motions['motion'])})"

    def table(self) -> Table:
        """Errors in mm; velocities and accelerations in mm per frame and per frame squared."""
        table = Table(box=None, pad_edge=False, header_style="dim", caption=_CAPTION)
        table.caption_justify = "left"
        table.add_column("motion")
        for name in self.statistics:
            table.add_column(_TITLES[name], justify="right", no_wrap=True)
        for name, means in self.motions().items():
            table.add_row(name, *_cells(means))
        for name, values in self.averages().items():
            table.add_row(f"[bold]{self._title(name)}[/]", *_cells(values))
        return table


def _cells(values: Mapping[str, float | None]) -> list[str]:
    return [
        "-" if value is None else f"{value:.0%}" if name in _RATES else f"{value:,.1f}"
        for name, value in values.items()
    ]
