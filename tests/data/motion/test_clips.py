from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import CLIPS, fitted, humanoid, needs_clips

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.data.motion import clips, files, motions
from etude.data.motion import rotations as rot

RATE = 30.0


BONES: dict[str, tuple[str, tuple[float, float, float], int, int]] = {
    # name: (parent, offset in the clips' own y-up axes, first column, numbers)
    "chest": ("root", (0, 0.236151, 0), 8, 4),
    "neck": ("chest", (0, 0.223894, 0), 12, 4),
    "right_hip": ("root", (0, 0, 0.084887), 16, 4),
    "right_knee": ("right_hip", (0, -0.421546, 0), 20, 1),
    "right_ankle": ("right_knee", (0, -0.40987, 0), 21, 4),
    "right_shoulder": ("chest", (-0.02405, 0.2435, 0.18311), 25, 4),
    "right_elbow": ("right_shoulder", (0, -0.274788, 0), 29, 1),
    "right_wrist": ("right_elbow", (0, -0.258947, 0), 0, 0),
    "left_hip": ("root", (0, 0, -0.084887), 30, 4),
    "left_knee": ("left_hip", (0, -0.421546, 0), 34, 1),
    "left_ankle": ("left_knee", (0, -0.40987, 0), 35, 4),
    "left_shoulder": ("chest", (-0.02405, 0.2435, -0.18311), 39, 4),
    "left_elbow": ("left_shoulder", (0, -0.274788, 0), 43, 1),
    "left_wrist": ("left_elbow", (0, -0.258947, 0), 0, 0),
}


def rotation_matrix(quaternion: Array) -> Array:
    """[3, 3] of a quaternion of any length."""
    w, x, y, z = quaternion / np.linalg.norm(quaternion)
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * skew + 2 * skew @ skew


def in_the_files_axes(frame: Array) -> dict[str, Array]:
    """{body: position} by matrices, y up, knowing nothing of what is tested; then made z up."""
    places = {"root": (frame[1:4], rotation_matrix(frame[4:8]))}
    for name, (parent, offset, column, count) in BONES.items():
        where, turned = places[parent]
        if count == 4:
            own = rotation_matrix(frame[column : column + 4])
        elif count == 1:
            c, s = np.cos(frame[column]), np.sin(frame[column])
            own = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        else:
            own = np.eye(3)
        places[name] = (where + turned @ np.array(offset), turned @ own)
    return {name: np.array([p[0], -p[2], p[1]]) for name, (p, _) in places.items()}


@needs_clips
@pytest.mark.parametrize("name", CLIPS)
def test_two_kinematics_agree(name: str) -> None:
    frames = np.array(json.loads(clips.find()[name].read_text())["Frames"])
    (clip,) = fitted(name)
    positions, _ = humanoid().forward(clip.poses)
    for frame, position in zip(frames, positions, strict=True):
        expected = in_the_files_axes(frame)
        names = humanoid().body_names
        np.testing.assert_allclose(position, [expected[n] for n in names], atol=1e-6, rtol=0)


@needs_clips
def test_all_clips_are_found_and_people_stand_on_their_feet() -> None:
    found = fitted("all")
    assert tuple(clip.name for clip in found) == CLIPS
    for clip in found:
        assert -0.12 < humanoid().lowest(clip.poses).min() < 0.02
    walk = found[CLIPS.index("walk")]
    position, _ = humanoid().forward(walk.poses)
    names = humanoid().body_names
    head, feet = names.index("neck"), [names.index("right_ankle"), names.index("left_ankle")]
    assert (position[:, head, 2] > position[:, feet, 2].max(axis=1) + 1.0).all()
    assert walk.travel[0] > 1.0  # forwards is x


@needs_clips
@pytest.mark.parametrize(
    "name", [n for n in CLIPS if n not in ("kick", "punch") and "getup" not in n]
)
def test_a_closed_cycle_goes_on_without_a_jump(name: str) -> None:
    (raw,) = fitted(name)
    clip = motions.close(raw)
    period = motions.cycle_frames(clip, RATE)
    poses = motions.resample(clip, RATE, -period, 4 * period)
    position, quaternion = humanoid().forward(poses)
    step = np.linalg.norm(np.diff(position, axis=0), axis=2).max(axis=1)
    turn = rot.angle_between(quaternion[1:], quaternion[:-1]).max(axis=1)
    seams = np.arange(1, 4) * period - 1
    inside = np.setdiff1d(np.arange(len(step)), seams)
    assert step[seams].max() <= step[inside].max() * 1.05
    assert turn[seams].max() <= turn[inside].max() * 1.05
    # Every cycle is the one before, carried on.
    np.testing.assert_allclose(poses[period:, 2:], poses[:-period, 2:], atol=1e-12)
    moved = poses[period:, :2] - poses[:-period, :2]
    np.testing.assert_allclose(moved, np.broadcast_to(raw.travel, moved.shape), atol=1e-9)


@needs_clips
def test_closing_takes_half_of_a_gap_from_each_end() -> None:
    (raw,) = fitted("walk")
    clip = motions.close(raw)
    for columns in raw.quaternions[1:]:
        before, after = raw.poses[:, columns], clip.poses[:, columns]
        gap = rot.angle_between(before[0], before[-1])
        np.testing.assert_allclose(rot.angle_between(before, after).max(), gap / 2, atol=1e-6)
        assert rot.angle_between(after[0], after[-1]) < 1e-6
    hinges = [columns[0] for columns in raw.columns.values() if len(columns) == 1]
    np.testing.assert_allclose(clip.poses[0, hinges], clip.poses[-1, hinges])


@needs_clips
@pytest.mark.parametrize("name", ["walk", "run", "roll", "spinkick"])
def test_the_speed_of_the_root_closes_too(name: str) -> None:
    (raw,) = fitted(name)
    gaps = []
    for clip in (raw, motions.close(raw)):
        path, step = clip.poses[:, :3], np.diff(clip.times)
        speed = np.diff(path, axis=0) / step[:, None]
        gaps.append(np.linalg.norm(speed[-1] - speed[0]))
    assert gaps[1] < 0.35 * gaps[0]
    shift = motions.close(raw).poses[:, :2] - raw.poses[:, :2]
    assert 0.01 < np.linalg.norm(shift, axis=1).max() <= 0.0501
    np.testing.assert_allclose(shift[[0, -1]], 0, atol=1e-12)


def file_of(folder: Path, **changes: Any) -> Path:
    """A clip of a figure that stands still for three frames, with something changed."""
    frame = [0.1, 0.0, 0.9, 0.0, 1.0, 0.0, 0.0, 0.0]
    for _, _, _, count in sorted((b for b in BONES.values() if b[3]), key=lambda bone: bone[2]):
        frame += [1.0, 0.0, 0.0, 0.0] if count == 4 else [0.0]
    data = {"Loop": "wrap", "Frames": [list(frame) for _ in range(3)], **changes}
    for index, (column, value) in changes.pop("frame", {}).items():
        data["Frames"][index][column] = value
    data.pop("frame", None)
    path = folder / "still.txt"
    path.write_text(json.dumps(data))
    return path


def test_a_file_that_is_right_is_read(tmp_path: Path) -> None:
    clip = clips.read(file_of(tmp_path))
    assert (clip.name, clip.loops, clip.seconds) == ("still", True, pytest.approx(0.2))
    assert files.load(("all",), str(tmp_path))[0].poses.shape == (3, 43)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"Loop": "maybe"}, '"Loop" must be'),
        ({"Loop": None}, '"Loop" must be'),
        ({"Frames": []}, "a list of at least 2"),
        ({"Frames": "none"}, "a list of at least 2"),
        ({"Frames": [[0.0] * 44, [0.0] * 43]}, "frame 1: 44 numbers are needed, not 43"),
        ({"Frames": [[0.0] * 44, 7]}, "frame 1: 44 numbers are needed, not something else"),
        ({"frame": {1: (3, float("nan"))}}, "frame 1: a number is not finite"),
        ({"frame": {2: (3, float("inf"))}}, "frame 2: a number is not finite"),
        ({"frame": {2: (3, 1e9)}}, "frame 2: a number is beyond"),
        ({"frame": {0: (3, "far")}}, "frame 0: 'far' is not a number"),
        ({"frame": {0: (3, True)}}, "frame 0: True is not a number"),
        ({"frame": {0: (3, 10**400)}}, "too large"),
        ({"frame": {1: (8, 9.0)}}, "frame 1: a quaternion's length"),
        ({"frame": {1: (4, 0.0)}}, "frame 1: a quaternion's length"),
        ({"frame": {1: (0, -0.1)}}, "frame 1: its duration"),
        ({"frame": {1: (0, 0.0)}}, "frame 1: it lasts 0 seconds"),
    ],
)
def test_a_damaged_file_is_named_with_its_frame(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    path = file_of(tmp_path, **changes)
    with pytest.raises(UsageError) as refused:
        clips.read(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"[1, 2]", b"3"])
def test_what_is_no_clip_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"motion clip"):
        clips.read(path)


def test_names_and_folders_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        clips.find(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no motion clips"):
        clips.find(str(tmp_path))
    file_of(tmp_path)
    with pytest.raises(UsageError, match="There is no clip 'run'; there are still"):
        files.load(("run",), str(tmp_path))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pybullet_data", None)
    with pytest.raises(UsageError, match=r"pip install 'etude\[mocap\]', .* \(--env.folder F"):
        clips.find()
