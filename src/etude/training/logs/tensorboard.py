"""TensorBoard: a scalar per metric and row, the recipe as text and as hyperparameters.

Files are in the run's folder itself, whose name TensorBoard then gives to the run. They are
written with TensorBoard's own record writer, one event per row. Importing torch's
`SummaryWriter` would load TensorFlow where that is installed.
"""

from __future__ import annotations

import os
import re
import struct
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from etude.core.errors import EtudeError
from etude.core.history import Row, history_of
from etude.core.metrics import ELAPSED, chart_values, numbers, step_of
from etude.runs import files
from etude.runs.folder import films
from etude.training.logs.outputs import LogConfig, LoggedRun, OpenLog

_OWN = re.compile(r"events\.out\.tfevents\.[0-9]{10,}\.[0-9]+(\.final)?(-[0-9]+)?")
"""File names of this writer; those of other writers contain the name of the host."""


class TensorBoardConfig(LogConfig):
    """Curves for TensorBoard."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, run: LoggedRun) -> OpenLog:
        return OpenLog(TensorBoardLog(run.folder, run.recipe))

    def add_final(
        self, run: LoggedRun, step: int, metrics: dict[str, float], pictures: dict[str, Path]
    ) -> None:
        TensorBoardLog(run.folder).add_final(step, metrics, pictures)


class TensorBoardLog:
    """Curves in a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any] | None = None) -> None:
        """recipe: as plain data, for TensorBoard's page of hyperparameters."""
        self._folder, self._recipe = folder, recipe or {}
        self._writer: Any = None
        self._begun = 0.0
        self._filmed = set[int]()
        """Steps whose films are in the open file."""

    def begin(self, history: Iterable[Row]) -> None:
        """Start over from the rows that were kept, so curves have neither forks nor gaps.

        Of a long history, an evenly spaced part is written: TensorBoard itself loads 1,000 points
        of a curve, and metrics.jsonl has all of them.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        rows = [*history_of(history).thinned()]
        seconds = _seconds(rows)
        self._begun = time.time()
        trained = seconds[-1] if seconds else 0.0
        with self._clear_faults():
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in self._folder.glob("events.out.tfevents.*"):
                if _OWN.fullmatch(old.name):
                    old.unlink()
            self._open(self._begun - trained)
            # A running TensorBoard discards what it has read from the old file.
            start = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=self._begun - trained, session_log=start))
            self._add(_about(self._folder, self._recipe, self._begun - trained))
            for row, at in zip(rows, seconds, strict=True):
                self._add_row(row, self._begun - trained + at)
            self._filmed = set()
            self._add_films()
            self._writer.flush()

    def write(self, row: dict[str, Any]) -> None:
        with self._clear_faults():
            self._add_row(row, time.time())
            self._add_films()
            self._writer.flush()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._clear_faults():
                self._writer = writer
                self._add_films()
                self._writer = None
                writer.close()

    def add_final(
        self, step: int, metrics: Mapping[str, float], pictures: Mapping[str, Path]
    ) -> None:
        """Write the evaluation after the end of the run to a separate file beside the closed log.

        pictures: {"final/success": file}, each a PNG.
        """
        now = time.time()
        with self._clear_faults():
            self._open(now, ".final")
            self._add_row({**metrics, "timesteps": step}, now)
            self._add_pictures(step, pictures, now)
            writer, self._writer = self._writer, None
            writer.close()

    def _add_films(self) -> None:
        """Add the films that were drawn since the last row."""
        for step, file in films(self._folder).items():
            if step not in self._filmed:
                self._add_pictures(step, {"film": file}, time.time())
                self._filmed.add(step)

    def _add_pictures(self, step: int, pictures: Mapping[str, Path], wall_time: float) -> None:
        """Add an event with PNG or GIF files."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = []
        for name, file in pictures.items():
            data = file.read_bytes()
            # At the beginning of every GIF and PNG.
            is_gif = data.startswith(b"GIF8")
            at = struct.unpack("<HH", data[6:10]) if is_gif else struct.unpack(">II", data[16:24])
            width, height = at
            image = Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=data
            )
            values.append(Summary.Value(tag=name, image=image))
        self._add(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def _open(self, wall_time: float, suffix: str = "") -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}{suffix}"
        # Closed in close(); no with block spans a run. A new file: "x" follows no link.
        self._writer = RecordWriter(files.free_path(self._folder / name).open("xb"))
        self._add(Event(wall_time=wall_time, file_version="brain.Event:2"))

    def _add_row(self, row: Mapping[str, Any], wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=k, simple_value=v) for k, v in chart_values(row).items()]
        self._add(Event(wall_time=wall_time, step=step_of(row), summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    @contextmanager
    def _clear_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EtudeError(
                f"Could not write curves to {self._folder}: {error.strerror}. Make room or give "
                "access."
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


def _about(folder: Path, recipe: Mapping[str, Any], wall_time: float) -> Any:
    """The event with the text of recipe and plan, and the hyperparameters."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    summary = Summary()
    for name, file in (("recipe", folder / "recipe.yaml"), ("plan", folder / "plan.txt")):
        if file.is_file():
            value = summary.value.add(tag=f"{name}/text_summary")
            value.metadata.plugin_data.plugin_name = "text"
            value.tensor.dtype = 7  # DT_STRING
            value.tensor.tensor_shape.dim.add(size=1)
            # Indented, Markdown shows a text as it is.
            text = textwrap.indent(file.read_text().rstrip("\n"), "    ")
            value.tensor.string_val.append(text.encode())
    if recipe:
        summary.MergeFrom(hparams_pb(hyperparameters(recipe), start_time_secs=wall_time))
    return Event(wall_time=wall_time, summary=summary)


_COMPARED = (
    *("seed", "env", "policy", "algorithm", "rewards", "collector.num_envs"),
    *("clock.total_timesteps", "curriculum.enabled", "learner.shards"),
)


def hyperparameters(recipe: Mapping[str, Any]) -> dict[str, float | str | bool]:
    """Settings for the comparison of runs, by their names in a recipe; without paths and logs."""
    found: dict[str, float | str | bool] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        elif value is not None and any(f"{name}.".startswith(f"{s}.") for s in _COMPARED):
            found[name] = value if isinstance(value, bool | int | float | str) else str(value)

    add("", recipe)
    return found
