"""LeRobot's datasets, layout v3.0, without LeRobot: parquet by pyarrow, video by av.

    meta/info.json                           features with dtype and shape, frames per second
    meta/tasks.parquet                       task_index and the sentence of each task
    meta/episodes/chunk-000/file-000.parquet one row per episode: length, tasks, place of its frames
    data/chunk-000/file-000.parquet          one row per frame; images in it are PNG
    videos/<feature>/chunk-000/file-000.mp4  frames of many episodes, one after the other

A frame is an observation and the action taken then, so an episode has no observation after its last
action. When one is written, its last observation gets a frame that repeats the last action.
`observation.images.top` becomes `top`, and `observation.state` becomes `state`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from etude.core.contracts import Array, ArraySpec
from etude.core.errors import UsageError
from etude.data.formats.base import (
    DataError,
    DatasetFormat,
    DatasetReader,
    Episode,
    ExportedDataset,
    FileEpisode,
    LazyArray,
    error_line,
)
from etude.data.store.geometry import is_picture
from etude.runs import files

_INFO = Path("meta") / "info.json"
_MAX_JSON, _MAX_EPISODES = 64 << 20, 1 << 24
_ACTION, _REWARD, _DONE, _SUCCESS = "action", "next.reward", "next.done", "next.success"
_PICTURES = ("image", "video")
_PREFIXES = ("observation.images.", "observation.")
_NEEDS = "is LeRobot's, which is read with pyarrow and av: pip install 'etude[data]'"
_DATA_BYTES, _VIDEO_BYTES, _CHUNK = 100 << 20, 200 << 20, 1000
"""Sizes at which LeRobot begins another file, and the number of files in one of its folders."""
_TOGETHER = 4 << 20
"""Bytes of successive row groups that are read together."""
_CODEC = {"crf": "18", "g": "2", "preset": "veryfast"}
"""Nearly lossless, with a key frame at every second picture, as in LeRobot's own files."""


class LeRobotFormat(DatasetFormat):
    """LeRobot v3: a folder with meta/info.json, parquet and video files."""

    kind: Literal["lerobot"] = "lerobot"
    fps: int = Field(20, ge=1, description="Steps per second, which LeRobot's layout states.")
    pictures: Literal["video", "png"] = Field(
        "video", description="How pictures are kept: mp4, or PNG without any loss."
    )

    def recognise(self, path: Path) -> bool:
        return (path / _INFO).is_file()

    def read(self, path: Path) -> DatasetReader:
        return LeRobotReader(path)

    def write(self, data: ExportedDataset, folder: Path) -> list[str]:
        return _Writer(data, folder, self).write()


@dataclass(frozen=True)
class _Feature:
    """A feature of `info.json`."""

    key: str
    dtype: str
    shape: tuple[int, ...]


class LeRobotReader(DatasetReader):
    """An open LeRobot dataset."""

    title = "LeRobot"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parquet = _parquet(path)
        info = self._info()
        self._fps = float(info["fps"])
        features = {key: self._feature(key, f) for key, f in info["features"].items()}
        self._features = {key: f for key, f in features.items() if f is not None}
        if _ACTION not in self._features:
            raise DataError(path, "has no feature 'action', and an episode needs actions")
        self._obs = self._observations()
        rows = self._read_episodes()
        self._rows = {f"episode_{row['episode_index']}": row for row in rows}
        super().__init__(path, [*self._rows])
        self._first: dict[tuple[int, int], int] = {}
        """The first frame of each data file, by chunk and number."""
        for row in rows:
            file = row["data/chunk_index"], row["data/file_index"]
            at = row["dataset_from_index"]
            self._first[file] = min(self._first.get(file, at), at)
        self._file: _DataFile | None = None
        self._groups = range(0)
        self._columns_read: dict[str, Any] = {}
        """Columns of `_groups`, the row groups of `_file` that were read last."""

    def _fail(self, what: str) -> DataError:
        return DataError(self.path, what)

    def _info(self) -> dict[str, Any]:
        file = self.path / _INFO
        if not file.is_file() or file.stat().st_size > _MAX_JSON:
            raise self._fail(f"has no {_INFO} of a plausible size; is it a LeRobot dataset?")
        try:
            info = json.loads(file.read_bytes())
            version = str(info["codebase_version"])
            known = isinstance(info["features"], dict) and float(info["fps"]) > 0
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._fail(f"{_INFO} does not describe a LeRobot dataset ({error})") from error
        if not version.startswith("v3.") or not known:
            raise self._fail(
                f"has LeRobot's layout {version!r}, not v3: convert it with LeRobot's own "
                "`convert_dataset_v21_to_v30`"
            )
        found: dict[str, Any] = info
        return found

    def _feature(self, key: str, found: Any) -> _Feature | None:
        """A feature that is a picture or numbers; None for others, such as text."""
        try:
            dtype, shape = str(found["dtype"]), tuple(int(n) for n in found["shape"])
            names = found.get("names")
            if dtype in _PICTURES:
                if names and str(names[0]).startswith("channel"):
                    shape = (*shape[1:], shape[0])
            elif np.dtype(dtype).kind not in "fiub":
                return None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        shape = shape or (1,)
        if any(n < 1 for n in shape) or len(shape) > 5 or (dtype in _PICTURES and len(shape) != 3):
            raise self._fail(f"{_INFO} gives '{key}' the shape {shape}")
        return _Feature(key, dtype, shape)

    def _observations(self) -> dict[str, _Feature]:
        """{name in a dataset: feature}."""
        known: dict[str, _Feature] = {}
        for key, feature in self._features.items():
            prefix = next((p for p in _PREFIXES if key.startswith(p)), None)
            if prefix is not None:
                short = key.removeprefix(prefix)
                known[key if short in known else short] = feature
        return known

    def _read_episodes(self) -> list[dict[str, Any]]:
        """A row per episode, in order, checked as far as reading depends on it."""
        videos = [f.key for f in self._obs.values() if f.dtype == "video"]
        names = ["episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index"]
        names += ["data/chunk_index", "data/file_index"]
        for key in videos:
            parts = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
            names += [f"videos/{key}/{part}" for part in parts]
        rows: list[dict[str, Any]] = []
        for file in sorted((self.path / "meta" / "episodes").glob("*/*.parquet")):
            table = self._table(file, names)
            if len(rows) + table.num_rows > _MAX_EPISODES:
                raise self._fail(f"has more than {_MAX_EPISODES:,} episodes, which is too many")
            rows += table.to_pylist()
        rows.sort(key=lambda row: row["episode_index"])
        for row in rows:
            numbers = [v for k, v in row.items() if k != "tasks"]
            length = row["dataset_to_index"] - row["dataset_from_index"]
            whole = all(isinstance(n, int | float) and n >= 0 for n in numbers)
            if not whole or not 1 < row["length"] == length:
                raise DataError(
                    self.path,
                    "is described wrongly in meta/episodes, or has fewer than two frames",
                    f"episode_{row['episode_index']}",
                )
        return rows

    def _table(self, file: Path, columns: list[str]) -> Any:
        try:
            return self._parquet.ParquetFile(file).read(columns=columns, use_threads=False)
        except Exception as error:
            raise self._fail(f"{file.name} cannot be read ({error_line(error)})") from error

    def episode(self, name: str) -> FileEpisode:
        row = self._rows[name]
        ends = [key for key in (_REWARD, _DONE, _SUCCESS) if key in self._features]
        columns = self._columns(row, [_ACTION, *ends])
        obs = {}
        for short, feature in self._obs.items():
            kind = "uint8" if feature.dtype in _PICTURES else feature.dtype
            load = partial(self._load, row, feature)
            obs[short] = LazyArray((row["length"], *feature.shape), np.dtype(kind), load)
        return FileEpisode(
            obs,
            columns[_ACTION],
            columns.get(_REWARD),
            terminated=bool(columns[_DONE][-1].any()) if _DONE in columns else None,
            success=bool(columns[_SUCCESS].any()) if _SUCCESS in columns else None,
            task="; ".join(map(str, row["tasks"] or ())),
        )

    def _load(self, row: dict[str, Any], feature: _Feature) -> Array:
        """[frames, ...] of one observation."""
        if feature.dtype == "video":
            return self._video(row, feature)
        return self._columns(row, [feature.key])[feature.key]

    def _columns(self, row: dict[str, Any], keys: Collection[str]) -> dict[str, Array]:
        """{key: [frames, ...]} of an episode from its data file."""
        chunk, number = row["data/chunk_index"], row["data/file_index"]
        file = self.path / "data" / f"chunk-{chunk:03d}" / f"file-{number:03d}.parquet"
        begin = row["dataset_from_index"] - self._first[chunk, number]
        names = ("episode_index", *keys)
        columns = self._rows_of(file, begin, begin + row["length"], names)
        if columns["episode_index"].to_pylist() != [row["episode_index"]] * row["length"]:
            raise self._fail(f"{file.name} does not have the frames that meta/episodes names")
        return {key: self._array(columns[key], self._features[key]) for key in keys}

    def _rows_of(self, file: Path, start: int, stop: int, names: Collection[str]) -> dict[str, Any]:
        """Rows start to stop of some columns; columns of the last row groups are kept."""
        try:
            if self._file is None or self._file.path != file:
                self._file = _DataFile.of(file, self._parquet.ParquetFile(file))
                self._groups, self._columns_read = range(0), {}
            opened = self._file
            needed = opened.groups(start, stop)
            size = int(opened.sizes[needed].sum())
            if size > self.max_bytes:
                raise self._fail(f"{file.name} needs {size:,} bytes of memory; raise --memory")
            if needed.start not in self._groups or needed.stop - 1 not in self._groups:
                self._groups, self._columns_read = opened.with_next(needed), {}
            missing = [name for name in names if name not in self._columns_read]
            if missing:
                table = opened.parquet.read_row_groups(
                    [*self._groups], columns=missing, use_threads=False
                )
                self._columns_read |= {name: table[name] for name in missing}
        except DataError:
            raise
        except Exception as error:
            raise self._fail(f"{file.name} cannot be read ({error_line(error)})") from error
        before = int(opened.ends[self._groups.start - 1]) if self._groups.start else 0
        read = self._columns_read
        return {name: read[name].slice(start - before, stop - start) for name in names}

    def _array(self, column: Any, feature: _Feature) -> Array:
        if column.null_count:
            raise self._fail(f"'{feature.key}' has frames without a value")
        if feature.dtype == "image":
            return np.stack([self._picture(value, feature) for value in column.to_pylist()])
        found = column.combine_chunks()
        while hasattr(found, "storage") or hasattr(found, "flatten"):
            if hasattr(found, "storage"):
                found = found.storage
            elif str(found.type).startswith(("list", "large_list", "fixed_size_list")):
                found = found.flatten()
            else:
                break
        array = np.asarray(found.to_numpy(zero_copy_only=False))
        shape = (len(column), *feature.shape)
        if array.size != np.prod(shape, dtype=np.float64) or array.dtype.kind not in "fiub":
            raise self._fail(f"'{feature.key}' does not have the shape {feature.shape}")
        return array.astype(feature.dtype, copy=False).reshape(shape)

    def _picture(self, value: Any, feature: _Feature) -> Array:
        from PIL import Image

        data = value.get("bytes") if isinstance(value, dict) else None
        if not isinstance(data, bytes):
            raise self._fail(f"'{feature.key}' keeps its pictures in other files: embed them")
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            if image.size != (feature.shape[1], feature.shape[0]):
                raise self._fail(f"'{feature.key}' has a picture of {image.size} pixels")
            return np.asarray(image.convert("L" if feature.shape[2] == 1 else "RGB")).reshape(
                feature.shape
            )

    def _video(self, row: dict[str, Any], feature: _Feature) -> Array:
        """[frames, height, width, channels] uint8 of an episode."""
        try:
            import av
        except ImportError as error:
            raise self._fail(_NEEDS) from error
        prefix, length = f"videos/{feature.key}", row["length"]
        chunk, number = row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]
        begin = float(row[f"{prefix}/from_timestamp"])
        place = f"chunk-{chunk:03d}/file-{number:03d}.mp4"
        file = self.path / "videos" / feature.key / place
        pictures = np.empty((length, *feature.shape), np.uint8)
        found, form = 0, "gray" if feature.shape[2] == 1 else "rgb24"
        try:
            with av.open(str(file)) as container:
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1
                container.seek(round(begin / stream.time_base), stream=stream)
                for frame in container.decode(stream):
                    # Half a frame's time: a time stamp is never exact.
                    if frame.time is None or frame.time < begin - 0.5 / self._fps:
                        continue
                    if (frame.height, frame.width) != feature.shape[:2]:
                        raise self._fail(f"{place} has frames of {frame.width} x {frame.height}")
                    pictures[found] = frame.to_ndarray(format=form).reshape(feature.shape)
                    found += 1
                    if found == length:
                        return pictures
        except (av.FFmpegError, OSError, IndexError, ValueError) as error:
            raise self._fail(f"{place} cannot be read ({error_line(error)})") from error
        raise self._fail(f"{place} ends after {found:,} of {length:,} frames")


@dataclass(frozen=True)
class _DataFile:
    """An open parquet file, with the last rows [groups] and bytes [groups] of its row groups."""

    path: Path
    parquet: Any
    ends: Array
    sizes: Array

    @classmethod
    def of(cls, path: Path, parquet: Any) -> _DataFile:
        groups = [parquet.metadata.row_group(g) for g in range(parquet.metadata.num_row_groups)]
        ends = np.cumsum([group.num_rows for group in groups], dtype=np.int64)
        sizes = np.array([group.total_byte_size for group in groups], np.int64)
        return cls(path, parquet, ends, sizes)

    def groups(self, start: int, stop: int) -> range:
        """The row groups of some rows."""
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right").tolist()
        return range(first, min(last + 1, len(self.ends)))

    def with_next(self, groups: range) -> range:
        """Row groups and those after them, up to `_TOGETHER` bytes: a file may have one for each
        episode, and most episodes are read one after the other."""
        total = np.cumsum(self.sizes[groups.start :])
        ahead = groups.start + int(np.searchsorted(total, _TOGETHER, side="right"))
        return range(groups.start, max(groups.stop, ahead))


def _parquet(path: Path) -> Any:
    """pyarrow's module for parquet files, in one thread and with plain memory."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(path, _NEEDS) from error
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow.parquet


class _Writer:
    """Writes LeRobot's layout v3.0."""

    def __init__(self, data: ExportedDataset, folder: Path, config: LeRobotFormat) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UsageError(
                "LeRobot's layout is written with pyarrow and av: pip install 'etude[data]'"
            ) from error
        self._arrow, self._parquet = pyarrow, parquet
        self._data, self._folder, self._fps = data, folder, config.fps
        self._keys = {name: _key(name, spec) for name, spec in data.observations.items()}
        self._images = {n: s for n, s in data.observations.items() if is_picture(s)}
        self._tasks = {task: i for i, task in enumerate(dict.fromkeys(data.tasks))}
        self._rewarded = any(data.rewarded)
        self._successes = None not in data.successes
        self._rows: list[dict[str, Any]] = []
        """A row of meta/episodes for each episode so far."""
        self._sums: dict[str, _Sums] = {}
        self._videos = {
            n: _Videos(folder / "videos" / self._keys[n], s, config.fps)
            for n, s in self._images.items()
            if config.pictures == "video"
        }

    def write(self) -> list[str]:
        """Write all files; returns a sentence for everything that is lost."""
        files.make_folder(self._folder / "meta")
        rows, number, written, writer = 0, 0, 0, None
        with ExitStack() as stack:
            for videos in self._videos.values():
                stack.callback(videos.close)
            for episode in self._data.episodes():
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
        unrewarded, notes = self._data.rewarded.count(False), []
        if not self._successes:
            notes.append("Not every success is known, so LeRobot's frames do not state success.")
        if self._rewarded and unrewarded:
            notes.append(f"{unrewarded:,} episodes have no rewards; theirs are now 0.")
        if self._videos:
            notes.append("Video changes pictures a little; --pictures png does not.")
        return notes

    def _file(self, kind: str, number: int) -> Path:
        folder = self._folder / kind / f"chunk-{number // _CHUNK:03d}"
        files.make_folder(folder)
        return folder / f"file-{number % _CHUNK:03d}.parquet"

    def _frames(self, episode: Episode, rows: int) -> Any:
        """The T + 1 frames of an episode as a table; their pictures may go into videos."""
        frames = len(episode.actions) + 1
        last = np.arange(frames) >= frames - 2
        columns: dict[str, Any] = {}
        for name, array in episode.obs.items():
            if name in self._images:
                self._count(self._keys[name], array[:: max(1, frames // 32)] / 255.0, (0, 1, 2))
            if name in self._videos:
                self._videos[name].append(array)
            elif name in self._images:
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
            "episode_index": np.full(frames, len(self._rows)),
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

    def _describe(self, episode: Episode, frames: int, rows: int, number: int) -> None:
        row: dict[str, Any] = {
            "episode_index": len(self._rows),
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
        for name, spec in self._data.observations.items():
            found[self._keys[name]] = _feature(spec.dtype, spec.shape)
            if name in self._images:
                kind = "video" if name in self._videos else "image"
                found[self._keys[name]] |= {"dtype": kind, "names": ["height", "width", "channels"]}
            if name in self._videos:
                found[self._keys[name]]["info"] = self._videos[name].info()
        found["action"] = _feature(self._data.actions.dtype, self._data.actions.shape)
        flags = {"next.reward": "float32"} if self._rewarded else {}
        flags |= {"next.done": "bool"} | ({"next.success": "bool"} if self._successes else {})
        flags |= {"timestamp": "float32"}
        flags |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")
        return found | {key: _feature(dtype, (1,)) for key, dtype in flags.items()}


def _feature(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) or [1], "names": None}


def _key(name: str, spec: ArraySpec) -> str:
    """The feature name of an observation in LeRobot's layout."""
    return f"observation.images.{name}" if is_picture(spec) else f"observation.{name}"


class _Sums:
    """Running minimum, maximum, mean and standard deviation of a feature."""

    def __init__(self) -> None:
        self._count, self._sum, self._squares = 0, np.zeros(()), np.zeros(())
        self._low, self._high = np.array(np.inf), np.array(-np.inf)

    def add(self, array: Array, axes: tuple[int, ...]) -> None:
        """Add an array; axes: those that are reduced. Pictures keep their channels."""
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
        """The number of the file that is written, and the pictures in it."""
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
