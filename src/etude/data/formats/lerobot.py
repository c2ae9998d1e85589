"""LeRobot's datasets, layout v3.0, read without LeRobot: parquet by pyarrow, video by av.

    meta/info.json                           features with dtype and shape, frames per second
    meta/tasks.parquet                       task_index and the sentence of each task
    meta/episodes/chunk-000/file-000.parquet one row per episode: length, tasks, place of its frames
    data/chunk-000/file-000.parquet          one row per frame; images in it are PNG
    videos/<feature>/chunk-000/file-000.mp4  frames of many episodes, one after the other

A frame is what was observed and the action that was taken then. Nothing follows the last one, which
is treated as in LIBERO's files: see `readers.py`. `observation.images.top` becomes `top`, and
`observation.state` becomes `state`. Like HDF5 these files are opened in a process that may die.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from etude.data.formats.hdf5 import NAME, flat, stored_dtype, to_stored
from etude.data.formats.summary import (
    Array,
    DataError,
    Described,
    Episode,
    Field,
    ReadOptions,
    plain,
    settled_rewards,
    sparse_success,
)

INFO = Path("meta") / "info.json"
_MOST_JSON, _MOST_EPISODES = 64 << 20, 1 << 24
_ACTION, _REWARD, _DONE, _SUCCESS = "action", "next.reward", "next.done", "next.success"
_PICTURES = ("image", "video")
_PREFIXES = ("observation.images.", "observation.")
_NEEDS = "is LeRobot's, which is read with pyarrow and av: pip install 'etude[data]'"


@dataclass(frozen=True)
class Feature:
    """A feature of `info.json`."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def field(self) -> Field:
        """As it is stored here."""
        if self.dtype in _PICTURES:
            return Field(self.shape, "uint8")
        return Field(self.shape, stored_dtype(np.dtype(self.dtype)))


class LeRobot:
    """An open LeRobot dataset; offers what `Source` offers."""

    format = "LeRobot"

    def __init__(self, path: Path, options: ReadOptions) -> None:
        self.path, self.options = path, options
        self.episode: str | None = None
        """The episode that is being read, for messages."""
        self.max_bytes = 2 << 30
        self.masks: dict[str, int] = {}
        self.task = ""
        if options.mask is not None:
            raise DataError(path, "has no masks, being LeRobot's; leave out --mask")
        self._parquet = _parquet(path)
        info = self._info()
        self._fps = float(info["fps"])
        features = {key: self._feature(key, f) for key, f in info["features"].items()}
        self._features = {key: f for key, f in features.items() if f is not None}
        if _ACTION not in self._features:
            raise DataError(path, "has no feature 'action': without actions there is no episode")
        self._obs = self._chosen()
        self._rows = self._read_episodes()
        self.names = [f"episode_{row['episode_index']}" for row in self._rows]
        self._by_name = dict(zip(self.names, self._rows, strict=True))
        self._first: dict[tuple[int, int], int] = {}
        for row in self._rows:
            file = row["data/chunk_index"], row["data/file_index"]
            at = row["dataset_from_index"]
            self._first[file] = min(self._first.get(file, at), at)
        self._open_file: tuple[Path, Any] | None = None
        self._last_read: tuple[Any, Any] | None = None

    def _fail(self, what: str) -> DataError:
        return DataError(self.path, what, self.episode)

    def _info(self) -> dict[str, Any]:
        file = self.path / INFO
        if file.stat().st_size > _MOST_JSON:
            raise self._fail(f"{INFO} is absurdly large")
        try:
            info = json.loads(file.read_bytes())
            version = str(info["codebase_version"])
            known = isinstance(info["features"], dict) and float(info["fps"]) > 0
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._fail(f"{INFO} does not describe a LeRobot dataset ({error})") from error
        if not version.startswith("v3.") or not known:
            raise self._fail(
                f"has LeRobot's layout {version!r}, not v3: convert it with LeRobot's own "
                "`convert_dataset_v21_to_v30`"
            )
        found: dict[str, Any] = info
        return found

    def _feature(self, key: str, found: Any) -> Feature | None:
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
            raise self._fail(f"{INFO} gives '{key}' the shape {shape}")
        return Feature(key, dtype, shape)

    def _chosen(self) -> dict[str, Feature]:
        """{name here: feature} of the observations that are read."""
        known: dict[str, Feature] = {}
        for key, feature in self._features.items():
            prefix = next((p for p in _PREFIXES if key.startswith(p)), None)
            if prefix is None:
                continue
            short = key.removeprefix(prefix)
            name = key if short in known else short
            if not NAME.fullmatch(name):
                raise self._fail(f"'{key}' is no name for an observation; rename it")
            known[name] = feature
        wanted = self.options.obs or tuple(known)
        if not wanted:
            raise self._fail("has no feature observation.*")
        if missing := [name for name in wanted if name not in known]:
            raise self._fail(f"has no observation '{missing[0]}'; it has {', '.join(known)}")
        return {name: known[name] for name in wanted}

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
            if len(rows) + table.num_rows > _MOST_EPISODES:
                raise self._fail(f"has more than {_MOST_EPISODES:,} episodes, which is absurd")
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
            raise self._fail(f"{file.name} cannot be read ({flat(error)})") from error

    def describe(self, name: str) -> Described:
        """An episode from its small columns."""
        self.episode, row = name, self._by_name[name]
        columns = self._columns(row, [_ACTION, *self._end_features()])
        rewards, rewarded, success, terminated = self._end(row, columns)
        fields = {n: feature.field for n, feature in self._obs.items()}
        action = self._features[_ACTION].field
        kind = "float32" if action.dtype.startswith("float") else "int64"
        fields["actions"] = Field(action.shape, kind)
        size = row["length"] * sum(
            int(np.prod(f.shape, dtype=np.float64)) * np.dtype(f.dtype).itemsize
            for f in fields.values()
        )
        if size > self.max_bytes:
            raise self._fail(
                f"needs {size:,} bytes of memory; raise --memory, or read fewer arrays (--obs)"
            )
        return Described(
            name=name,
            steps=row["length"] - 1,
            file_steps=row["length"],
            fields=fields,
            total=float(rewards.sum(dtype=np.float64)),
            success=success,
            terminated=terminated,
            rewarded=rewarded,
            largest_action=float(np.abs(columns[_ACTION].astype(np.float64)).max(initial=0.0)),
            task=_sentence(row["tasks"]),
        )

    def read(self, name: str) -> Episode:
        """A whole episode; a number that is not finite is refused with its place."""
        self.episode, row = name, self._by_name[name]
        keys = [f.key for f in self._obs.values() if f.dtype != "video"]
        columns = self._columns(row, [_ACTION, *self._end_features(), *keys])
        rewards, _, _, terminated = self._end(row, columns)
        action = self._finite(columns[_ACTION], _ACTION)
        action = action.astype("float32" if action.dtype.kind == "f" else "int64")
        obs = {}
        for short, feature in self._obs.items():
            if feature.dtype == "video":
                obs[short] = self._video(row, feature)
            else:
                obs[short] = self._finite(columns[feature.key], feature.key)
        return Episode(name, obs, action[:-1], rewards, terminated)

    def _finite(self, array: Array, label: str) -> Array:
        made = to_stored(array)
        if made.dtype.kind == "f" and not np.isfinite(made).all():
            step = int(np.argmin(np.isfinite(made).reshape(len(made), -1).all(axis=1)))
            raise self._fail(f"'{label}' is not a finite number at step {step:,}")
        return made

    def _end_features(self) -> list[str]:
        return [key for key in (_REWARD, _DONE, _SUCCESS) if key in self._features]

    def _end(
        self, row: dict[str, Any], columns: dict[str, Array]
    ) -> tuple[Array, bool, bool | None, bool]:
        """Rewards [T] as imported, whether they are known, success, and termination."""
        given = columns.get(_REWARD)
        given = None if given is None else self._finite(given, _REWARD)[:, 0]
        success = sparse_success(given)
        if _SUCCESS in columns:
            success = bool(columns[_SUCCESS].any())
        done = _DONE in columns and bool(columns[_DONE][-1].any())
        steps = row["length"]
        rewards, known, success = settled_rewards(given, success, steps - 1, steps, self.options)
        return rewards, known, success, done

    def _columns(self, row: dict[str, Any], keys: Collection[str]) -> dict[str, Array]:
        """{key: [frames, ...]} of an episode from its data file."""
        chunk, number = row["data/chunk_index"], row["data/file_index"]
        file = self.path / "data" / f"chunk-{chunk:03d}" / f"file-{number:03d}.parquet"
        begin = row["dataset_from_index"] - self._first[chunk, number]
        table = self._rows_of(file, begin, begin + row["length"], (*keys, "episode_index"))
        if table.num_rows != row["length"] or set(table["episode_index"].to_pylist()) != {
            row["episode_index"]
        }:
            raise self._fail(f"{file.name} does not have the frames that meta/episodes names")
        return {key: self._array(table[key], self._features[key]) for key in keys}

    def _rows_of(self, file: Path, start: int, stop: int, columns: tuple[str, ...]) -> Any:
        """Rows start to stop; of the row groups that hold them nothing else is kept for long."""
        if self._open_file is None or self._open_file[0] != file:
            try:
                self._open_file = file, self._parquet.ParquetFile(file)
            except Exception as error:
                raise self._fail(f"{file.name} cannot be read ({flat(error)})") from error
        opened = self._open_file[1]
        meta = opened.metadata
        ends = np.cumsum([meta.row_group(g).num_rows for g in range(meta.num_row_groups)])
        groups = np.flatnonzero((ends > start) & (np.append(0, ends[:-1]) < stop)).tolist()
        size = sum(meta.row_group(g).total_byte_size for g in groups)
        if size > self.max_bytes:
            raise self._fail(f"{file.name} needs {size:,} bytes of memory; raise --memory")
        key = (file, tuple(groups), columns)
        if self._last_read is None or self._last_read[0] != key:
            try:
                table = opened.read_row_groups(groups, columns=[*columns], use_threads=False)
            except Exception as error:
                raise self._fail(f"{file.name} cannot be read ({flat(error)})") from error
            self._last_read = key, table
        before = int(ends[groups[0]] - meta.row_group(groups[0]).num_rows) if groups else 0
        return self._last_read[1].slice(start - before, stop - start)

    def _array(self, column: Any, feature: Feature) -> Array:
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

    def _picture(self, value: Any, feature: Feature) -> Array:
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

    def _video(self, row: dict[str, Any], feature: Feature) -> Array:
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
            raise self._fail(f"{place} cannot be read ({flat(error)})") from error
        raise self._fail(f"{place} ends after {found:,} of {length:,} frames")


def _parquet(path: Path) -> Any:
    """pyarrow's module for parquet files, in one thread and with plain memory."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(path, _NEEDS) from error
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    return pyarrow.parquet


def _sentence(tasks: Any) -> str:
    """The tasks of an episode on one printable line."""
    return plain("; ".join(map(str, tasks or ())))
