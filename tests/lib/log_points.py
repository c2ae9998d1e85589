"""The points in TensorBoard and W&B files, and rows to make them from."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from etude.core.metrics import COUNTERS, EPISODES
from etude.rl.ppo import PPOConfig
from etude.rl.rewards.rrd import RRDConfig
from run_hash import FREE

COUNTED = {"epoch", "cycle", "iterations", "timesteps", "updates", "episodes", "eval/episodes"}
COUNTED |= {"time/total_timesteps", "time/iterations", "train/n_updates"}
"""What no chart shows."""
Point = tuple[str, int, float]
METRICS = (*PPOConfig.metrics, *COUNTERS, *EPISODES, *RRDConfig.metrics)
"""The declarations of the rows below, and of a learned reward."""


def tensorboard_events(folder: Path) -> list[Event]:
    """Every event of every file, in the order they are read."""
    return [
        Event.FromString(record)
        for file in sorted(folder.glob("events.out.tfevents.*"))
        for record in RawEventFileLoader(str(file)).Load()
    ]


def tensorboard_points(folder: Path, free: tuple[str, ...] = FREE) -> list[Point]:
    """(tag, step, value) without what may differ between exact runs."""
    return [
        (value.tag, event.step, value.simple_value)
        for event in tensorboard_events(folder)
        for value in event.summary.value
        if value.HasField("simple_value") and not value.tag.startswith(free)
    ]


def wandb_points(folder: Path, free: tuple[str, ...] = FREE) -> list[Point]:
    """(name, step, value) of the history in all .wandb files of a run folder, as W&B keeps it."""
    points = []
    for file in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for record in read_records(file):
            if record.WhichOneof("record_type") != "history":
                continue
            step = record.history.step.num
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith((*free, "_")):
                    points.append((name, step, float(json.loads(item.value_json))))
    return sorted(points)


BLOCK, HEADER, FULL, LAST = 32_768, 7, 1, 4


def read_records(file: Path) -> Iterator[Any]:
    """The messages in a .wandb file, up to where a kill cut it off.

    The format is LevelDB's log: blocks of 32 KiB, in them pieces of (checksum, length, kind), after
    a header that happens to be as long as that of a piece.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    message, at = b"", HEADER
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            while BLOCK - at >= HEADER:
                if at + HEADER > len(block):
                    return
                _, length, kind = struct.unpack_from("<IHB", block, at)
                piece = block[at + HEADER : at + HEADER + length]
                if kind == 0 or len(piece) < length:
                    return
                message, at = message + piece, at + HEADER + length
                if kind in (FULL, LAST):
                    yield Record.FromString(message)
                    message = b""
            at = 0


def row_points(rows: list[dict[str, Any]], free: tuple[str, ...] = FREE) -> list[Point]:
    """The points that rows of metrics.jsonl stand for."""
    return [
        (name.replace("epoch/", "train/per_epoch/"), row["timesteps"] or row["updates"], value)
        for row in rows
        for name, value in (row | {"time/episodes": row.get("episodes")}).items()
        if value is not None and name not in COUNTED and not name.startswith(free)
    ]


def single(points: list[Point]) -> list[Point]:
    """As TensorBoard keeps numbers: in single precision."""
    return [(name, step, struct.unpack("f", struct.pack("f", v))[0]) for name, step, v in points]


def rows_like_a_run(count: int) -> list[dict[str, Any]]:
    return list(_rows(count))


def _rows(count: int) -> Iterator[dict[str, Any]]:
    for i in range(1, count + 1):
        row: dict[str, Any] = {
            "epoch": i // 2,
            "cycle": i,
            "iterations": 2 * i,
            "timesteps": 512 * i,
            "updates": 16 * i,
            "episodes": 3 * i,
            "rollout/ep_rew_mean": i / 3,
            "rollout/success_rate": min(i / count, 1.0),
            "reward/progress": i / 7,
            "reward/effort": -0.01 * i,
            "train/approx_kl": 0.01 / i,
            "train/explained_variance": 1 - 1 / i,
            "train/std": 0.5,
            "time/fps": 1000.0 + i,
            "time/time_elapsed": 0.5 * i,
            "time/collect": 0.3,
            "time/physics": 0.2,
            "time/inference": 0.06,
            "time/environment": 0.04,
            "time/train": 0.1,
            "time/test": 0.05,
            "time/save": 0.01,
            "system/cpu_cores": 1.5,
            "system/memory_mib": 300.0,
        }
        if i % 3 == 0:
            row |= {"eval/success_rate": i / count, "eval/mean_reward": i / 2}
        yield row
