"""TensorBoard: one scalar per metric and row.

The file is written with TensorBoard's own record writer and message types, row by row and without
a thread of its own. Its EventFileWriter would load all of TensorFlow where that is installed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from etude.core.errors import EtudeError
from etude.logs.kinds import LogConfig, LoggedRun, OpenLog
from etude.metrics.rows import ELAPSED, numbers, step_of


class TensorBoardConfig(LogConfig):
    """Curves for TensorBoard."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: LoggedRun) -> OpenLog:
        return OpenLog(TensorBoardLog(run.folder / "tensorboard"))


class TensorBoardLog:
    """Curves in a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._begun = 0.0

    def begin(self, history: list[dict[str, Any]]) -> None:
        """Start over from the rows that were kept, so curves have neither forks nor gaps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        seconds = _seconds(history)
        self._begun = time.time()
        trained = seconds[-1] if seconds else 0.0
        with self._clear_faults():
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob("events.out.tfevents.*"):
                old.unlink()
            name = f"events.out.tfevents.{int(self._begun):010d}.{os.getpid()}"
            # Closed in close(); no with block spans a run. A new file: "x" follows no link.
            self._writer = RecordWriter((self._folder / name).open("xb"))
            self._add(Event(wall_time=self._begun - trained, file_version="brain.Event:2"))
            # Tells a TensorBoard that is watching to drop what it read from the old file.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=self._begun - trained, session_log=start))
            for row, at in zip(history, seconds, strict=True):
                self._add_row(row, self._begun - trained + at)
            self._writer.flush()

    def write(self, row: dict[str, Any]) -> None:
        with self._clear_faults():
            self._add_row(row, time.time())
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            with self._clear_faults():
                self._writer.close()
            self._writer = None

    def _add_row(self, row: Mapping[str, Any], wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers(row).items()]
        self._add(Event(wall_time=wall_time, step=step_of(row), summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    @contextmanager
    def _clear_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EtudeError(
                f"Could not write {self._folder}: {error.strerror}. Make room or give access, then "
                "resume the run; its curves are written again from metrics.jsonl."
            ) from error


def _seconds(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each row came, in seconds of training; a resumed process counts from 0 again."""
    seconds, before, last = [], 0.0, 0.0
    for row in history:
        now = numbers(row).get(ELAPSED, last)
        if now < last:
            before += last
        last = now
        seconds.append(before + now)
    return seconds
