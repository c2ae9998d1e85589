"""Files of motions: what was written is read, other systems' layouts, and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import needs_clips

from etude.core.errors import UsageError
from etude.data.motion import files, motions
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion

JOINTS = {"shoulder": 4, "elbow": 1, "hip": 4, "rail": 1}


def wave(loops: bool = False) -> Motion:
    """A robot with two ball joints, a hinge and a slide."""
    times = np.arange(21) / 25.0
    turns = rot.exp(np.stack([np.sin(times), 0.3 * times, 0.1 + 0 * times], axis=1))
    root = np.stack([times, 0.1 * times, 1.0 + 0 * times], axis=1)
    columns = [root, turns, turns[::-1], times, turns, -times]
    return Motion("wave", times, np.column_stack(columns), loops, JOINTS)


@pytest.mark.parametrize("suffix", [".npz", ".csv"])
@pytest.mark.parametrize("loops", [True, False])
def test_what_is_written_is_read(tmp_path: Path, suffix: str, loops: bool) -> None:
    motion, path = wave(loops), tmp_path / f"wave{suffix}"
    files.write(motion, path)
    found = files.read(path)
    assert (found.name, found.loops, dict(found.joints)) == ("wave", loops, JOINTS)
    np.testing.assert_allclose(found.times, motion.times, atol=1e-12)
    for name, columns in motion.columns.items():
        both = found.poses[:, found.columns[name]], motion.poses[:, columns]
        np.testing.assert_allclose(*both, atol=1e-12)
    np.testing.assert_allclose(found.poses[:, :7], motion.poses[:, :7], atol=1e-12)


def test_uneven_frames_are_written_at_a_constant_rate(tmp_path: Path) -> None:
    motion = wave()
    uneven = Motion(
        "wave",
        motion.times**2 / motion.times[-1] + 1e-3 * np.arange(21),
        motion.poses,
        False,
        JOINTS,
    )
    files.write(uneven, tmp_path / "wave.npz")
    found = files.read(tmp_path / "wave.npz")
    assert np.ptp(np.diff(found.times)) < 1e-12
    np.testing.assert_allclose(found.poses[:, :3], motions.sample(uneven, found.times)[:, :3])


def test_holosoma_s_layout_has_the_root_before_the_joints(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 9))
    rows[:, 3:7] = rot.normalise(rows[:, 3:7])
    names = np.array(["knee", "hip"])
    np.savez(tmp_path / "box.npz", fps=np.array([50]), joint_pos=rows, joint_names=names)
    found = files.read(tmp_path / "box.npz")
    assert dict(found.joints) == {"knee": 1, "hip": 1}
    np.testing.assert_allclose(found.poses, rows)
    np.testing.assert_allclose(found.times, np.arange(5) / 50)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fps": 0.0}, "its fps is 0"),
        ({"joint_names": None}, "it has no array 'joint_names'"),
        ({"root_quat": np.ones((21, 3))}, r"has the shape \[21, 3\], not \[21, 4\]"),
        ({"root_pos": np.zeros((20, 3))}, r"'root_pos' has the shape \[20, 3\]"),
        ({"root_quat": np.zeros((21, 4))}, "frame 0: a quaternion's length is not 1"),
        ({"root_pos": np.full((21, 3), np.nan)}, "frame 0: a number is not finite"),
        ({"root_pos": np.full((21, 3), 1e9)}, "frame 0: a number is beyond 1000"),
        ({"joint_names": np.array(["elbow", "elbow"])}, "two of its joints have one name"),
        ({"joint_names": np.array([{}], object)}, "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    path = tmp_path / "wave.npz"
    files.write(wave(), path)
    with np.load(path) as arrays:
        content = {**arrays, **changes}
    np.savez(path, **{name: array for name, array in content.items() if array is not None})
    with pytest.raises(UsageError, match=told):
        files.read(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "must begin with time, root_x"),
        ("time,a\n0,1\n", "must begin with time"),
        ("time,root_x,root_y,root_z,root_qw,root_qx,root_qy,root_qz\n0,1\n", "row 1 has 2 of 8"),
        ("time,root_x,root_y,root_z,root_qw,root_qx,root_qy,root_qz,a.w\n", "JOINT.w"),
        ("time,root_x,root_y,root_z,root_qw,root_qx,root_qy,root_qz\n0,0,0,x,1,0,0,0\n", "'x'"),
        ("time,root_x,root_y,root_z,root_qw,root_qx,root_qy,root_qz\n", "it has 0 frames"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wave.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        files.read(path)


def test_times_that_go_back_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "wave.csv"
    files.write(wave(), path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[2], *lines[4:]]))
    with pytest.raises(UsageError, match="frame 3: its time is not soon after"):
        files.read(path)


def test_files_are_found_in_folders_and_packages(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    files.write(wave(), tmp_path / "some" / "one.npz")
    files.write(wave(), tmp_path / "some" / "two.csv")
    names = [m.name for m in files.load(("some",), str(tmp_path))]
    assert names == ["one", "two"]
    assert files.installed("numpy/version.py").is_file()
    for given, told in (
        ("nowhere.npz", "There is no file nowhere.npz; check the path"),
        ("no_such_package/a.npz", "pip download --no-deps no_such_package"),
        (str(tmp_path / "x.npz"), "check the path"),
    ):
        with pytest.raises(UsageError, match=told):
            files.load((given,))
    with pytest.raises(UsageError, match=r"There is no file .*: check --env.folder"):
        files.load(("a/b.npz",), str(tmp_path))
    files.write(wave(), tmp_path / "one.npz")
    with pytest.raises(UsageError, match="Two motions have the name one"):
        files.load(("some", "one.npz"), str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="There are no motions"):
        files.load(("empty",), str(tmp_path))


def test_a_loop_is_closed_whatever_its_joints_are() -> None:
    closed = motions.close(wave(loops=True))
    for columns in closed.quaternions:
        first, last = closed.poses[0, columns], closed.poses[-1, columns]
        assert rot.angle_between(first, last) < 1e-6
    for name in ("elbow", "rail"):
        column = closed.columns[name]
        np.testing.assert_allclose(closed.poses[0, column], closed.poses[-1, column])


@needs_clips
def test_a_clip_is_meant_although_a_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    (clip,) = files.load(("run",))
    assert (clip.name, clip.loops) == ("run", True)
    with pytest.raises(UsageError, match="is not a motion clip"):
        files.load(("./run",))
