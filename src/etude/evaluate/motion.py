"""Reports of imitation: statistics per motion. Loaded only for tasks that imitate motions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from etude.core.output import csv_text, new_table
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
    "saturated": "full",
    "reversals": "reversed",
    "beyond_range": "beyond",
    "penetration": "inside",
}
"""{statistic of imitation: column title}, in the order of the table."""
_CAPTION = "g, l, pa: mean distance of joints in mm, in the world, from the root, at best fit"
_STRAIN = ("saturated", "reversals", "beyond_range", "penetration")
_STRAIN_CAPTION = (
    "full: share of saturated torques; reversed: of full torques that turned round, worst joint;\n"
    "beyond: largest distance beyond a joint's range, rad or m; inside: self-penetration, mm"
)
_RATES = ("is_success", "success_25", "once", "once_25", "progress", "saturated")
_FORMS = {**dict.fromkeys(_RATES, ".0%"), "reversals": ".1%", "beyond_range": ".2f"}


class MotionReport:
    """Statistics of imitation: means per motion, and over motions."""

    def __init__(self, fresh: FreshEpisodes) -> None:
        self.statistics = [name for name in _TITLES if name in fresh.episodes]
        """Statistics that the environment reports."""
        self._names = fresh.spec.motions
        successes = only_successes(fresh.episodes)
        self._means = {
            ALL: by_motion(fresh.episodes),
            SUCCESSES: by_motion(successes) if successes["motion"].size else None,
        }
        self._num_episodes = np.bincount(fresh.episodes["motion"].astype(np.int64))

    def motions(self) -> dict[str, dict[str, float]]:
        """{motion: {statistic: mean over its episodes}}, in the environment's order."""
        means = self._means[ALL]
        assert means is not None
        return {
            self._names[int(number)]: {name: float(means[name][i]) for name in self.statistics}
            for i, number in enumerate(means["motion"])
        }

    def averages(self) -> dict[str, dict[str, float | None]]:
        """Means over the means of motions; None without an episode."""
        return {
            average: {n: None if means is None else float(means[n].mean()) for n in self.statistics}
            for average, means in self._means.items()
        }

    def metrics(self) -> dict[str, Any]:
        """Metrics for programs."""
        return {"motions": self.motions(), "motion_averages": self.averages()}

    def csv(self) -> str:
        """A row per motion, then the averages; a cell without an episode is empty."""
        rows: list[list[Any]] = [["motion", "episodes", *self.statistics]]
        for name, means in self.motions().items():
            count = self._num_episodes[self._names.index(name)]
            rows.append([name, count, *(f"{value:.9g}" for value in means.values())])
        for name, values in self.averages().items():
            cells = ("" if value is None else f"{value:.9g}" for value in values.values())
            rows.append([self._title(name), "", *cells])
        return csv_text(rows)

    def _title(self, average: str) -> str:
        """The name of an average with its number of motions."""
        means = self._means[average]
        return f"{average} ({0 if means is None else len(means['motion'])})"

    def table(self) -> Group:
        """Errors in mm, of velocities and accelerations per frame and per frame squared; and what
        the motions asked of the body, if it was measured."""
        strain = [name for name in self.statistics if name in _STRAIN]
        errors = [name for name in self.statistics if name not in _STRAIN]
        tables = [self._columns(errors, _CAPTION)]
        return Group(*tables, *([self._columns(strain, _STRAIN_CAPTION)] if strain else []))

    def _columns(self, names: list[str], caption: str) -> Table:
        """A table with these statistics, per motion and averaged."""
        titles = (_TITLES[name] for name in names)
        table: Table = new_table("motion", *titles, caption=caption, caption_justify="left")
        for motion, means in self.motions().items():
            table.add_row(motion, *_cells({name: means[name] for name in names}))
        for average, values in self.averages().items():
            cells = _cells({name: values[name] for name in names})
            table.add_row(f"[bold]{self._title(average)}[/]", *cells)
        return table


def _cells(values: Mapping[str, float | None]) -> list[str]:
    return [
        "-" if value is None else format(value, _FORMS.get(name, ",.1f"))
        for name, value in values.items()
    ]
