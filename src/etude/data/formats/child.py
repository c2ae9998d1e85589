"""The subprocess that opens untrusted datasets.

    python -P -m etude.data.formats.child '{"path": ..., "job": "scan" | "check" | "read"}'

`etude.core.limited` says how it answers, and with which limits.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.core.limited import FrameWriter, limit_seconds, serve
from etude.data.formats.hdf5 import flat
from etude.data.formats.lerobot import LeRobot
from etude.data.formats.readers import Source, open_source
from etude.data.formats.summary import Array, DataError, Episode, ReadOptions


def send_episode(writer: FrameWriter, episode: Episode) -> None:
    """An episode: what its arrays are, then their bytes in that order."""
    arrays: dict[str, Array] = {"actions": episode.actions, "rewards": episode.rewards}
    arrays |= {f"obs/{name}": array for name, array in episode.obs.items()}
    shapes = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    data = (array.reshape(-1).view("uint8").data for array in arrays.values())
    writer.send("arrays", data, episode=episode.name, arrays=shapes, terminated=episode.terminated)


def run(order: dict[str, Any], writer: FrameWriter) -> None:
    """Do what the parent asks for; whatever goes wrong becomes one sentence."""
    path, seconds = Path(order["path"]), float(order["seconds"])
    source: Source | LeRobot | None = None
    try:
        limit_seconds(seconds)
        options = {**order["options"], "obs": tuple(order["options"]["obs"])}
        source = open_source(path, ReadOptions(**options))
        source.max_bytes = int(order["memory"]) // 2  # of an episode
        writer.send("source", format=source.format, task=source.task, masks=source.masks)
        for name in source.names:
            limit_seconds(seconds)
            writer.send("begin", episode=name)
            writer.send("described", episode=asdict(source.describe(name)))
        writer.send("all described")
        for name in source.names[order["skip"] :] if order["job"] != "scan" else ():
            limit_seconds(seconds)
            writer.send("begin", episode=name)
            episode = source.read(name)
            if order["job"] == "read":
                send_episode(writer, episode)
        writer.send("end")
    except DataError as error:
        writer.send("error", episode=error.episode, what=error.what)
    except MemoryError:
        writer.send("error", episode=_place(source), what="needs too much memory; raise --memory")
    except Exception as error:  # HDF5 may fail in any way on a damaged file
        what = f"cannot be read ({flat(error)}); get a whole copy of the file"
        writer.send("error", episode=_place(source), what=what)


def _place(source: Source | LeRobot | None) -> str | None:
    return None if source is None else source.episode


if __name__ == "__main__":
    serve(run)
