"""A log writer: chosen columns of every log row in a CSV file in the run's folder."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from etude.plugin import LogConfig, LoggedRun, OpenLog


class CsvConfig(LogConfig):
    """Log rows as a CSV file."""

    kind: Literal["csv"] = "csv"
    columns: tuple[str, ...] = Field(
        ("timesteps", "rollout/ep_rew_mean", "rollout/success_rate"),
        min_length=1,
        description="Metrics to write, in this order; those that a row lacks are left empty.",
    )

    def open(self, run: LoggedRun) -> OpenLog:
        return OpenLog(CsvLog(run.folder / "metrics.csv", self.columns))


class CsvLog:
    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self.path, self.columns = path, columns

    def begin(self, history: Iterable[dict[str, Any]]) -> None:
        """Starts the file over with the rows that a resumed run keeps, so no row comes twice."""
        self.file = self.path.open("w", newline="")
        self.writer = csv.DictWriter(self.file, self.columns, extrasaction="ignore")
        self.writer.writeheader()
        for row in history:
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        self.writer.writerow(row)
        self.file.flush()

    def close(self) -> None:
        self.file.close()
