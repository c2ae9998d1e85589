"""Datasets written for other systems: LeRobot v3, robomimic or LIBERO HDF5, Minari.

An episode of T steps has T + 1 observations. Minari's files have them all, robomimic's have them as
`next_obs`. A frame of LeRobot is an observation and the action taken then, so the last observation
gets a frame of its own that repeats the last action: readers here leave such a step out again.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import UsageError
from etude.data.importing import Tick, check_new
from etude.data.store.geometry import is_picture
from etude.data.store.manifest import Episodes
from etude.runs import files

Format = Literal["lerobot", "robomimic", "minari"]
Pictures = Literal["video", "png"]
_DATA_BYTES, _VIDEO_BYTES, _CHUNK = 100 << 20, 200 << 20, 1000
"""Sizes at which LeRobot begins another file, and files of one of its folders."""
_CODEC = {"crf": "18", "g": "2", "preset": "veryfast"}
"""Nearly lossless, and every second picture can be sought, as in LeRobot's own files."""


def export(
    data: Episodes,
    out: Path,
    form: Format,
    fps: int = 20,
    pictures: Pictures = "video",
    tick: Tick = lambda done, total: None,
) -> list[str]:
    """Write a dataset into a new folder; what was lost on the way, in sentences.

    fps: steps of a second, which only LeRobot's layout has. tick counts episodes.
    """
    check_new(out)
    partial = files.free_path(out.resolve().with_name(f".{out.name}.partial"))
    files.make_folder(partial.parent)
    files.new_folder(partial)
    writers: dict[str, Callable[[], list[str]]] = {
        "lerobot": lambda: _LeRobotWriter(data, partial, fps, pictures).write(tick),
        "robomimic": lambda: _write_robomimic(data, partial, tick),
        "minari": lambda: _write_minari(data, partial, tick),
    }
    try:
        notes = writers[form]()
        files.rename(partial, out)
    except BaseException:
        files.remove_tree(partial)
        raise
    files.fsync_folder(partial.parent)
    return notes


class _Whole:
    """One episode: obs {name: [T + 1, ...]}, actions [T, n], rewards [T]."""

    def __init__(self, data: Episodes, number: int) -> None:
        steps, _ = data.episode(number)
        self.number, self.actions, self.rewards = number, steps.actions, steps.rewards
        self.obs = {
            name: np.concatenate([array, steps.next_obs[name][-1:]])
            for name, array in steps.obs.items()
        }
        self.terminated = bool(steps.terminated[-1])
        labels = data.labels
        self.task, self.success = labels.tasks[number], labels.successes[number]


def _episodes(data: Episodes, tick: Tick) -> Iterator[_Whole]:
    for number in range(data.num_episodes):
        yield _Whole(data, number)
        tick(number + 1, data.num_episodes)


def _write_robomimic(data: Episodes, folder: Path, tick: Tick) -> list[str]:
    """A file per task, as LIBERO has them."""
    import h5py

    tasks = list(dict.fromkeys(data.labels.tasks))
    counts = dict.fromkeys(tasks, 0)
    steps = dict.fromkeys(tasks, 0)
    with ExitStack() as stack:
        groups = {}
        for number, task in enumerate(tasks):
            words = re.sub(r"[^A-Za-z0-9]+", "_", task).strip("_")[:100] or "all"
            name = f"{words}_demo.hdf5" if len(tasks) == 1 else f"{number:03d}_{words}_demo.hdf5"
            group = stack.enter_context(h5py.File(folder / name, "w")).create_group("data")
            group.attrs["env_args"] = "{}"
            group.attrs["problem_info"] = json.dumps({"language_instruction": task})
            groups[task] = group
        for episode in _episodes(data, tick):
            demo = groups[episode.task].create_group(f"demo_{counts[episode.task]}")
            counts[episode.task] += 1
            steps[episode.task] += len(episode.actions)
            demo.attrs["num_samples"] = len(episode.actions)
            demo["actions"], demo["rewards"] = episode.actions, episode.rewards
            dones: Array = np.zeros(len(episode.actions), np.uint8)
            dones[-1] = episode.terminated
            demo["dones"] = dones
            for name, array in episode.obs.items():
                packed = {"compression": "gzip"} if array.dtype == np.uint8 else {}
                demo.create_dataset(f"obs/{name}", data=array[:-1], **packed)
                demo.create_dataset(f"next_obs/{name}", data=array[1:], **packed)
        for task, group in groups.items():
            group.attrs["total"] = steps[task]
    notes = []
    if any(success is None for success in data.labels.successes):
        notes.append("These files say nothing of success but by their rewards.")
    return notes


def _write_minari(data: Episodes, folder: Path, tick: Tick) -> list[str]:
    import h5py

    files.new_folder(folder / "data")
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for episode in _episodes(data, tick):
            group = file.create_group(f"episode_{episode.number}")
            steps = len(episode.actions)
            group.attrs["id"], group.attrs["total_steps"] = episode.number, steps
            for name, array in episode.obs.items():
                group[f"observations/{name}"] = array
            group["actions"], group["rewards"] = episode.actions, episode.rewards
            last = np.arange(steps) == steps - 1
            group["terminations"] = last & episode.terminated
            group["truncations"] = last & (not episode.terminated)
            if episode.success is not None:
                group["infos/success"] = last & episode.success
    spaces = {name: _space(spec) for name, spec in data.geometry.observations.items()}
    document = {
        "total_episodes": data.num_episodes,
        "total_steps": data.num_transitions,
        "data_format": "hdf5",
        "observation_space": json.dumps({"type": "Dict", "subspaces": spaces}),
        "action_space": json.dumps(_space(data.geometry.specs["actions"])),
        "minari_version": "0.5.0",
        "jpeg_encoding": False,  # pictures are as they are
        "dataset_id": f"etude/{data.path.name}-v0",
    }
    text = json.dumps(document, indent=1)
    files.write_file(folder / "data" / "metadata.json", [text.encode()])
    tasks = set(data.labels.tasks) - {""}
    lost = f"Minari's files have no tasks: {len(tasks):,} sentences are left out."
    return [lost] if tasks else []


def _space(spec: ArraySpec) -> dict[str, Any]:
    """A Gymnasium space that holds every array of this kind, in Minari's words."""
    kind = np.dtype(spec.dtype)
    limits = (-np.inf, np.inf) if kind.kind == "f" else (np.iinfo(kind).min, np.iinfo(kind).max)
    low, high = (np.full(spec.shape, limit, kind).tolist() for limit in limits)
    return {
        "type": "Box",
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "low": low,
        "high": high,
    }


class _LeRobotWriter:
    """LeRobot's layout v3.0; see `lerobot.py`."""

    def __init__(self, data: Episodes, folder: Path, fps: int, pictures: Pictures) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UsageError(
                "LeRobot's layout is written with pyarrow and av: pip install 'etude[data]'"
            ) from error
        self._arrow, self._parquet = pyarrow, parquet
        self._data, self._folder, self._fps = data, folder, fps
        self._keys = {name: _key(name, s) for name, s in data.geometry.observations.items()}
        self._seen = {n: s for n, s in data.geometry.observations.items() if is_picture(s)}
        self._pictures = pictures
        labels = data.labels
        self._tasks = {task: i for i, task in enumerate(dict.fromkeys(labels.tasks))}
        self._rewarded = any(labels.rewarded)
        self._successes = None not in labels.successes
        self._rows: list[dict[str, Any]] = []
        self._sums: dict[str, _Sums] = {}
        self._videos: dict[str, _Videos] = {}

    def write(self, tick: Tick) -> list[str]:
        files.make_folder(self._folder / "meta")
        if self._pictures == "video":
            self._videos = {
                n: _Videos(self._folder / "videos" / self._keys[n], s, self._fps)
                for n, s in self._seen.items()
            }
        rows, number, written, writer = 0, 0, 0, None
        with ExitStack() as stack:
            for videos in self._videos.values():
                stack.callback(videos.close)
            for episode in _episodes(self._data, tick):
                table = self._frames(episode, rows)
                if writer is None or written > _DATA_BYTES:
                    if writer is not None:
                        writer.close()
                        number, written = number + 1, 0
                    file = self._file("data", number)
                    writer = self._parquet.ParquetWriter(file, table.schema)
                    stack.callback(writer.close)
                writer.write_table(table)
                written += table.nbytes
                self._describe(episode, table.num_rows, rows, number)
                rows += table.num_rows
        self._write_meta(rows)
        return self._lost()

    def _lost(self) -> list[str]:
        labels, notes = self._data.labels, []
        if not self._successes:
            notes.append("Not every success is known: LeRobot's frames then say nothing of it.")
        if self._rewarded and labels.num_unrewarded:
            notes.append(f"{labels.num_unrewarded:,} episodes have no rewards; theirs are now 0.")
        if self._videos:
            notes.append("Video changes pictures a little; --pictures png does not.")
        return notes

    def _file(self, kind: str, number: int, suffix: str = "parquet") -> Path:
        folder = self._folder / kind / f"chunk-{number // _CHUNK:03d}"
        files.make_folder(folder)
        return folder / f"file-{number % _CHUNK:03d}.{suffix}"

    def _frames(self, episode: _Whole, rows: int) -> Any:
        """The T + 1 frames of an episode as a table; their pictures may go into videos."""
        frames = len(episode.actions) + 1
        last = np.arange(frames) >= frames - 2
        columns: dict[str, Any] = {}
        for name, array in episode.obs.items():
            if name in self._seen:
                self._count(self._keys[name], array[:: max(1, frames // 32)] / 255.0, (0, 1, 2))
            if name in self._videos:
                self._videos[name].append(array)
            elif name in self._seen:
                columns[self._keys[name]] = self._embedded(array)
            else:
                columns[self._keys[name]] = self._numbers(self._keys[name], array)
        actions = np.concatenate([episode.actions, episode.actions[-1:]])
        columns["action"] = self._numbers("action", actions)
        if self._rewarded:
            rewards = np.append(episode.rewards, np.float32(0))[:, None]
            columns["next.reward"] = self._numbers("next.reward", rewards)
        columns["next.done"] = self._arrow.array(last & episode.terminated)
        if self._successes:
            columns["next.success"] = self._arrow.array(last & bool(episode.success))
        counted: dict[str, Array] = {
            "timestamp": (np.arange(frames) / self._fps).astype(np.float32),
            "frame_index": np.arange(frames),
            "episode_index": np.full(frames, episode.number),
            "index": rows + np.arange(frames),
            "task_index": np.full(frames, self._tasks[episode.task]),
        }
        for name, column in counted.items():
            columns[name] = self._numbers(name, column[:, None])
        return self._arrow.table(columns)

    def _numbers(self, key: str, array: Array) -> Any:
        """A column: plain numbers, or lists of them."""
        self._count(key, array.astype(np.float64), (0,))
        found = self._arrow.array(array.reshape(-1))
        for size in reversed(array.shape[1:] if array.shape[1:] != (1,) else ()):
            found = self._arrow.FixedSizeListArray.from_arrays(found, size)
        return found

    def _embedded(self, array: Array) -> Any:
        from PIL import Image

        kept = []
        for picture in array:
            stream = io.BytesIO()
            Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(
                stream, "PNG"
            )
            kept.append({"bytes": stream.getvalue(), "path": None})
        pair = [("bytes", self._arrow.binary()), ("path", self._arrow.string())]
        return self._arrow.array(kept, self._arrow.struct(pair))

    def _count(self, key: str, array: Array, axes: tuple[int, ...]) -> None:
        self._sums.setdefault(key, _Sums()).add(array, axes)

    def _describe(self, episode: _Whole, frames: int, rows: int, number: int) -> None:
        row: dict[str, Any] = {
            "episode_index": episode.number,
            "tasks": [episode.task],
            "length": frames,
            "data/chunk_index": number // _CHUNK,
            "data/file_index": number % _CHUNK,
            "dataset_from_index": rows,
            "dataset_to_index": rows + frames,
        }
        for name, videos in self._videos.items():
            key, place = f"videos/{self._keys[name]}", videos.number
            row[f"{key}/chunk_index"], row[f"{key}/file_index"] = divmod(place, _CHUNK)
            row[f"{key}/from_timestamp"] = (videos.frames - frames) / self._fps
            row[f"{key}/to_timestamp"] = videos.frames / self._fps
        self._rows.append(row | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})

    def _write_meta(self, rows: int) -> None:
        table = self._arrow.Table.from_pylist(self._rows)
        self._parquet.write_table(table, self._file("meta/episodes", 0))
        index = "__index_level_0__"
        tasks = self._arrow.table({"task_index": [*self._tasks.values()], index: [*self._tasks]})
        # So that pandas takes the sentences for the index, as LeRobot expects.
        columns = [
            {"name": n, "field_name": f, "pandas_type": p, "numpy_type": t, "metadata": None}
            for n, f, p, t in (
                ("task_index", "task_index", "int64", "int64"),
                (None, index, "unicode", "object"),
            )
        ]
        pandas = {"index_columns": [index], "column_indexes": [], "columns": columns}
        pandas |= {"creator": {"library": "pyarrow", "version": "15"}, "pandas_version": "2.0.0"}
        tasks = tasks.replace_schema_metadata({"pandas": json.dumps(pandas)})
        self._parquet.write_table(tasks, self._folder / "meta" / "tasks.parquet")
        info = {
            "codebase_version": "v3.0",
            "robot_type": None,
            "total_episodes": len(self._rows),
            "total_frames": rows,
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNK,
            "data_files_size_in_mb": _DATA_BYTES >> 20,
            "video_files_size_in_mb": _VIDEO_BYTES >> 20,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
            "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
            if self._videos
            else None,
            "features": self._features(),
        }
        stats = {key: sums.stats() for key, sums in self._sums.items()}
        for name, document in (("info", info), ("stats", stats)):
            text = json.dumps(document, indent=4)
            files.write_file(self._folder / "meta" / f"{name}.json", [text.encode()])

    def _features(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, spec in self._data.geometry.observations.items():
            found[self._keys[name]] = _feature(spec.dtype, spec.shape)
            if name in self._seen:
                kind = "video" if name in self._videos else "image"
                found[self._keys[name]] |= {"dtype": kind, "names": ["height", "width", "channels"]}
            if name in self._videos:
                found[self._keys[name]]["info"] = self._videos[name].info()
        actions = self._data.geometry.specs["actions"]
        found["action"] = _feature(actions.dtype, actions.shape)
        flags = {"next.reward": "float32"} if self._rewarded else {}
        flags |= {"next.done": "bool"} | ({"next.success": "bool"} if self._successes else {})
        flags |= {"timestamp": "float32"}
        flags |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
        return found | {key: _feature(dtype, (1,)) for key, dtype in flags.items()}


def _feature(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) or [1], "names": None}


def _key(name: str, spec: ArraySpec) -> str:
    """What an observation is called in LeRobot's layout."""
    return f"observation.images.{name}" if is_picture(spec) else f"observation.{name}"


class _Sums:
    """Smallest, largest, mean and spread of a feature, over what it has seen."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, np.zeros(()), np.zeros(())
        self._low, self._high = np.array(np.inf), np.array(-np.inf)

    def add(self, array: Array, axes: tuple[int, ...]) -> None:
        """`array` with the axes that are summed over; pictures keep their channels."""
        self._count += len(array)
        each = len(axes) > 1  # of a picture, the mean of its pixels
        reduce = np.mean if each else np.sum
        weight = len(array) if each else 1
        self._sum = self._sum + weight * reduce(array, axes)
        self._squares = self._squares + weight * reduce(array**2, axes)
        self._low = np.minimum(self._low, array.min(axes))
        self._high = np.maximum(self._high, array.max(axes))
        self._picture = each

    def stats(self) -> dict[str, Any]:
        mean = self._sum / self._count
        std = np.sqrt(np.maximum(self._squares / self._count - mean**2, 0))
        found = {"min": self._low, "max": self._high, "mean": mean, "std": std}
        shape = (-1, 1, 1) if self._picture else mean.shape  # channels come first in LeRobot
        listed = {name: array.reshape(shape).tolist() for name, array in found.items()}
        return {**listed, "count": [self._count]}


class _Videos:
    """The pictures of one observation in mp4 files, one after the other."""

    def __init__(self, folder: Path, spec: ArraySpec, fps: int) -> None:
        try:
            import av
        except ImportError as error:
            raise UsageError(
                "Video is written with av: pip install 'etude[data]', or use --pictures png."
            ) from error
        self._av, self._folder, self._shape, self._fps = av, folder, spec.shape, fps
        self.number, self.frames = -1, 0
        """Of the file that is being written, and the pictures in it."""
        self._container: Any = None
        # Colour at half the resolution needs even sides.
        self._form = "yuv444p" if spec.shape[0] % 2 or spec.shape[1] % 2 else "yuv420p"
        self._path = folder

    def append(self, pictures: Array) -> None:
        """All pictures [frames, height, width, channels] of an episode, into one file."""
        if self._container is None or self._path.stat().st_size > _VIDEO_BYTES:
            self.close()
            self.number, self.frames = self.number + 1, 0
            folder = self._folder / f"chunk-{self.number // _CHUNK:03d}"
            files.make_folder(folder)
            self._path = folder / f"file-{self.number % _CHUNK:03d}.mp4"
            self._container = self._av.open(str(self._path), "w")
            stream = self._container.add_stream("libx264", rate=self._fps, options=dict(_CODEC))
            stream.height, stream.width = self._shape[:2]
            stream.pix_fmt = self._form
            self._stream = stream
        for picture in pictures:
            coloured = np.ascontiguousarray(np.broadcast_to(picture, (*self._shape[:2], 3)))
            frame = self._av.VideoFrame.from_ndarray(coloured, format="rgb24")
            frame.pts, self.frames = self.frames, self.frames + 1
            frame.time_base = 1 / self._stream.codec_context.framerate
            for packet in self._stream.encode(frame):
                self._container.mux(packet)

    def info(self) -> dict[str, Any]:
        return {
            "video.height": self._shape[0],
            "video.width": self._shape[1],
            "video.codec": "h264",
            "video.pix_fmt": self._form,
            "video.is_depth_map": False,
            "video.fps": self._fps,
            "video.channels": self._shape[2],
            "has_audio": False,
        }

    def close(self) -> None:
        """Finish the file that is being written; nothing happens the second time."""
        if self._container is None:
            return
        container, self._container = self._container, None
        with suppress(self._av.error.EOFError):
            for packet in self._stream.encode():
                container.mux(packet)
        container.close()
