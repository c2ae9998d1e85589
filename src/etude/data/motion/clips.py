"""Clips of recorded motion: DeepMimic's JSON files, converted to our humanoid.

A file has "Loop" ("wrap" or "none") and "Frames" of 44 numbers: seconds, the root's position and
quaternion, then the joints in `_COLUMNS`; y up, x forward, z right. Poses here are z up; knees and
elbows turn about -y, and all joints are 0 with arms and legs straight down.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion, columns_of

PREFIX = "humanoid3d_"
NAMES = (
    *("backflip", "cartwheel", "crawl", "dance_a", "dance_b", "getup_facedown", "getup_faceup"),
    *("jump", "kick", "punch", "roll", "run", "spin", "spinkick", "walk", "all"),
)
"""Names of the published clips, and that of all of them."""
NUM_NUMBERS = 44
_COLUMNS = {
    "chest": 8,
    "neck": 12,
    "right_hip": 16,
    "right_knee": 20,
    "right_ankle": 21,
    "right_shoulder": 25,
    "right_elbow": 29,
    "left_hip": 30,
    "left_knee": 34,
    "left_ankle": 35,
    "left_shoulder": 39,
    "left_elbow": 43,
}
"""First column of each joint in a frame."""
JOINTS = {name: 1 if name.endswith(("knee", "elbow")) else 4 for name in _COLUMNS}
"""{joint: numbers in a pose}: knees and elbows are hinges, the others ball joints."""
_MAX_FRAMES, _MAX_BYTES = 100_000, 2**28
_FAR, _LONG = 1e3, 10.0
"""m and s; larger numbers are damage."""
_UNIT_ERROR = 0.5
"""Largest difference of a quaternion's length from 1; published clips have up to 0.42."""


def find(folder: str | None = None, option: str = "--env.folder") -> dict[str, Path]:
    """{name: file} of the clips in a folder, or of those that come with `pybullet_data`.

    option: the command-line option that names a folder, for the error message.
    """
    if folder is not None:
        place = Path(folder).expanduser()
    else:
        try:
            package: Any = importlib.import_module("pybullet_data")
        except ImportError as error:
            raise UsageError(
                "The motion clips come with pybullet, which is not installed: pip install "
                f"'etude[mocap]', or name a folder of clips ({option} FOLDER)."
            ) from error
        place = Path(package.getDataPath()) / "data" / "motions"
    if not place.is_dir():
        raise UsageError(f"There is no folder {place} with motion clips; check the path.")
    files = sorted([*place.glob("*.txt"), *place.glob("*.json")])
    # The published folder has clips of other figures too.
    named = [file for file in files if folder is not None or file.stem.startswith(PREFIX)]
    if not named:
        raise UsageError(f"There are no motion clips (.txt or .json) in {place}.")
    return {file.stem.removeprefix(PREFIX): file for file in named}


def named(name: str, folder: str | None = None, option: str = "--env.folder") -> list[Path]:
    """The file of a clip, or those of all clips for "all"; other arguments as for `find`."""
    known = find(folder, option)
    if name == "all":
        return list(known.values())
    if name not in known:
        raise UsageError(f"There is no clip '{name}'; there are {', '.join(known)}, and all.")
    return [known[name]]


def read(path: Path) -> Motion:
    """Read a clip from its file; a damaged one is refused with its fault."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is not a motion clip: it has more than {_MAX_BYTES} bytes.")
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as a motion clip: {error}.") from error
    loop = data.get("Loop") if isinstance(data, dict) else None
    if loop not in ("wrap", "none"):
        raise UsageError(
            f'{path} is not a motion clip: "Loop" must be "wrap" or "none", not {loop!r:.40}.'
        )
    frames = _frames(path, data.get("Frames"))
    times = np.concatenate([[0.0], np.cumsum(frames[:-1, 0])])
    poses = _convert(frames)
    return Motion(path.stem.removeprefix(PREFIX), times, poses, loop == "wrap", JOINTS)


def _frames(path: Path, rows: Any) -> Array:
    """[frames, 44] float64, each one checked."""
    if not isinstance(rows, list) or not 2 <= len(rows) <= _MAX_FRAMES:
        raise UsageError(f'{path} is not a motion clip: "Frames" must be a list of at least 2.')
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != NUM_NUMBERS:
            found = f"{len(row)}" if isinstance(row, list) else "something else"
            raise UsageError(
                f"{path}, frame {index}: {NUM_NUMBERS} numbers are needed, not {found}."
            )
        for number in row:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise UsageError(f"{path}, frame {index}: {number!r:.40} is not a number.")
    try:
        frames = np.array(rows, np.float64)
    except OverflowError as error:
        raise UsageError(f"{path}: a number is too large.") from error
    with np.errstate(over="ignore"):
        quaternions = [frames[:, 4:8], *(_joint(frames, n) for n, k in JOINTS.items() if k == 4)]
        off = np.max([np.abs(np.linalg.norm(q, axis=1) - 1.0) for q in quaternions], axis=0)
    for wrong, problem in (
        (~np.isfinite(frames).all(axis=1), "a number is not finite"),
        (np.abs(frames).max(axis=1) > _FAR, f"a number is beyond {_FAR:g}"),
        (off > _UNIT_ERROR, "a quaternion's length is not 1"),
        ((frames[:, 0] < 0) | (frames[:, 0] > _LONG), "its duration is negative or too long"),
        ((frames[:, 0] == 0) & (np.arange(len(frames)) < len(frames) - 1), "it lasts 0 seconds"),
    ):
        if wrong.any():
            raise UsageError(f"{path}, frame {int(np.argmax(wrong))}: {problem}.")
    return frames


def _joint(frames: Array, name: str) -> Array:
    """[frames, 1 or 4]: the angle or quaternion of a joint in the file."""
    return frames[:, _COLUMNS[name] : _COLUMNS[name] + JOINTS[name]]


def _z_up(quaternion: Array) -> Array:
    """Unit quaternions [..., 4] from y up to z up."""
    w, x, y, z = (quaternion[..., i] for i in range(4))
    return rot.normalise(np.stack([w, x, -z, y], axis=-1))


def _convert(frames: Array) -> Array:
    """Poses [frames, 43] of a file's numbers [frames, 44]."""
    poses = np.empty((len(frames), 7 + sum(JOINTS.values())))
    x, y, z = frames[:, 1], frames[:, 2], frames[:, 3]
    poses[:, :3] = np.stack([x, -z, y], axis=1)
    poses[:, 3:7] = _z_up(frames[:, 4:8])
    for name, columns in columns_of(JOINTS).items():
        joint = _joint(frames, name)
        poses[:, columns] = joint if len(columns) == 1 else _z_up(joint)
    return poses
