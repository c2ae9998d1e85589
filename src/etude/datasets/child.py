"""The process that opens strangers' files: it may die, and takes nothing with it.

    python -P -m etude.datasets.child '{"path": ..., "job": "scan" | "check" | "read"}'

It speaks to its parent through its standard output in frames: the length of a JSON header, the
header, and for an episode the bytes of its arrays. Never more than numbers and text, so that a
parent need not trust it. Memory and computing time are limited before the file is opened, it can
write no file, and it loads neither torch nor anything else that is large.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.datasets.hdf5 import flat
from etude.datasets.lerobot import LeRobot
from etude.datasets.readers import Source, open_source
from etude.datasets.summary import Array, DataError, Episode, ReadOptions

LENGTH = struct.Struct("<I")
"""Of the header that follows."""


class Speaker:
    """Sends frames to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "wb", buffering=1 << 16)

    def say(self, kind: str, **content: Any) -> None:
        header = json.dumps({"say": kind, **content}).encode()
        self._stream.write(LENGTH.pack(len(header)))
        self._stream.write(header)
        self._stream.flush()

    def send(self, episode: Episode) -> None:
        """An episode: what its arrays are, then their bytes in that order."""
        arrays: dict[str, Array] = {"actions": episode.actions, "rewards": episode.rewards}
        arrays |= {f"obs/{name}": array for name, array in episode.obs.items()}
        shapes = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
        self.say("arrays", episode=episode.name, arrays=shapes, terminated=episode.terminated)
        for array in arrays.values():
            self._stream.write(array.reshape(-1).view("uint8").data)
        self._stream.flush()


def limit_memory(num_bytes: int) -> None:
    """At most so much more memory than now; no core dumps, and no files written."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc") else 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + num_bytes
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def allow_seconds(seconds: float) -> None:
    """So much more computing time from now on; then the system ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted, hard))


def run(order: dict[str, Any], speaker: Speaker) -> None:
    """Do what the parent asks for; whatever goes wrong becomes one sentence."""
    path, seconds = Path(order["path"]), float(order["seconds"])
    source: Source | LeRobot | None = None
    try:
        allow_seconds(seconds)
        options = {**order["options"], "obs": tuple(order["options"]["obs"])}
        source = open_source(path, ReadOptions(**options))
        source.max_bytes = int(order["memory"]) // 2
        about = {"format": source.format, "task": source.task, "masks": source.masks}
        speaker.say("source", **about)
        for name in source.names:
            allow_seconds(seconds)
            speaker.say("begin", episode=name)
            speaker.say("described", episode=asdict(source.describe(name)))
        speaker.say("all described")
        for name in source.names[order["skip"] :] if order["job"] != "scan" else ():
            allow_seconds(seconds)
            speaker.say("begin", episode=name)
            episode = source.read(name)
            if order["job"] == "read":
                speaker.send(episode)
        speaker.say("end")
    except DataError as error:
        speaker.say("error", episode=error.episode, what=error.what)
    except MemoryError:
        speaker.say("error", episode=_place(source), what="needs too much memory; raise --memory")
    except Exception as error:  # HDF5 may fail in any way on a damaged file
        what = f"cannot be read ({flat(error)}); get a whole copy of the file"
        speaker.say("error", episode=_place(source), what=what)


def _place(source: Source | LeRobot | None) -> str | None:
    return None if source is None else source.episode


def main() -> None:
    order = json.loads(sys.argv[1])
    # A descriptor of its own, so that nothing a library prints gets between the frames.
    speaker = Speaker(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit_memory(int(order["memory"]))
    run(order, speaker)


if __name__ == "__main__":
    main()
