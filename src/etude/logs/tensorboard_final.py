"""What TensorBoard gets after a run's end: the final evaluation, in figures and pictures."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path

from etude.logs.tensorboard import TensorBoardLog


class FinalLog(TensorBoardLog):
    """A file of its own beside the log of the run, which has been closed."""

    def add(self, step: int, metrics: Mapping[str, float], pictures: Mapping[str, Path]) -> None:
        """pictures: {"final/success": file}, each a PNG."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        now, values = time.time(), []
        for name, file in pictures.items():
            png = file.read_bytes()
            width, height = struct.unpack(">II", png[16:24])  # at the beginning of every PNG
            image = Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=png
            )
            values.append(Summary.Value(tag=name, image=image))
        with self._clear_faults():
            self._open(now, ".final")
            self._add_row({**metrics, "timesteps": step}, now)
            self._add(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self.close()
