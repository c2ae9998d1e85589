"""Motions that are moved to another robot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli import main as cli
from etude.core.errors import UsageError
from etude.data.motion import files
from etude.data.motion import rotations as rot
from etude.data.motion.motions import Motion, sample
from etude.envs.mujoco.motion_check import check_motion
from etude.envs.mujoco.reference import load_robot
from etude.envs.mujoco.retarget import Body, keypoints, retarget
from etude.envs.robots import g1
from etude.envs.robots.humanoid import MODEL as HUMANOID

LEG = """
<body name="{side}_{hip}" pos="0 {y} 0"><joint name="{side}_hip_roll" axis="1 0 0" {out}/>
 <joint name="{side}_hip_pitch" axis="0 1 0" {swing}/>
 <geom type="capsule" size=".04" fromto="0 0 0 0 0 -{thigh}"/>
 <body name="{side}_{knee}" pos="0 0 -{thigh}"><joint name="{side}_knee" axis="0 1 0" {bend}/>
  <geom type="capsule" size=".04" fromto="0 0 0 0 0 -{shin}"/>
  <body name="{side}_{foot}" pos="0 0 -{shin}"><joint name="{side}_ankle" axis="0 1 0" {tip}/>
   <joint name="{side}_ankle_roll" axis="1 0 0" {out}/>
   <geom type="box" size=".1 .04 .02" pos=".03 0 -.04"/></body></body></body>
"""
NAMES = {"hip": "hip", "knee": "knee", "foot": "foot"}
OTHER = {"hip": "upper_leg", "knee": "shin", "foot": "ankle_link"}


def walker_text(
    scale: float = 1.0,
    names: dict[str, str] = NAMES,
    bend: str = "",
    swing: str = "",
    out: str = "",
    tip: str = "",
    thigh: float = 0.4,
) -> str:
    """MJCF of two legs below a trunk; bend, swing, out and tip are attributes of joints."""
    sizes = {"thigh": thigh, "shin": 0.4, "bend": bend, "swing": swing, "out": out, "tip": tip}
    legs = [LEG.format(side=s, y=y, **sizes, **names) for s, y in (("left", 0.1), ("right", -0.1))]
    text = f"""<mujoco><compiler angle="radian"/><worldbody><body name="trunk" pos="0 0 .86">
    <freejoint/><geom type="box" size=".1 .12 .2" pos="0 0 .2"/>{"".join(legs)}</body></worldbody>
    </mujoco>"""

    def bigger(found: re.Match[str]) -> str:
        numbers = " ".join(f"{scale * float(x):.10g}" for x in found[2].split())
        return f'{found[1]}="{numbers}"'

    return re.sub(r'(pos|size|fromto)="([^"]*)"', bigger, text)


def walker(*options: Any, **named: Any) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(walker_text(*options, **named))


def steps(model: mujoco.MjModel, frames: int = 41, lifted: float = 0.15) -> Motion:
    """Legs that swing in turn while the trunk travels, turns and sways above the ground."""
    times = np.arange(frames) / 40
    poses = np.tile(model.qpos0, (frames, 1))
    poses[:, 0], poses[:, 1] = 0.5 * times, 0.05 * np.sin(4 * times)
    poses[:, 2] += lifted
    poses[:, 3:7] = rot.exp(np.stack([0.1 * np.sin(3 * times), 0 * times, 0.5 * times], axis=1))
    joints = {model.joint(j).name: 1 for j in range(1, model.njnt)}
    for column, name in enumerate(joints, 7):
        phase = 5 * times + np.pi * name.startswith("right")
        size = {"knee": 0.4, "ankle": 0.2}.get(
            name.partition("_")[2], 0.3 if "pitch" in name else 0.1
        )
        poses[:, column] = size * (np.sin(phase) + 1.1 * ("knee" in name))
    return Motion("steps", times, poses, False, joints)


def test_a_robot_retargeted_to_itself_gives_the_motion_back() -> None:
    model = walker()
    motion = steps(model)
    found = retarget(motion, Body(model), Body(model), smoothness=0.0)
    np.testing.assert_allclose(found.motion.poses, motion.poses, atol=1e-5)
    assert found.scale == 1.0
    assert found.errors.max() < 1e-5


def test_smoothness_lags_little_where_keypoints_determine_the_joints() -> None:
    model = walker()
    motion = steps(model)
    found = retarget(motion, Body(model), Body(model))
    assert np.abs(found.motion.poses - motion.poses).max() < 0.02


def test_our_humanoid_s_ball_joints_come_back() -> None:
    pytest.importorskip("pybullet_data", reason="it holds the clips (the extra 'mocap')")
    model = load_robot(HUMANOID).compile()
    (clip,) = files.load(("kick",))
    body = Body(model)
    found = retarget(clip, body, body, smoothness=0.0)
    assert found.errors.max() < 1e-4
    ours = body.kinematics.forward(found.motion.poses)[1]
    given = body.kinematics.fit(clip, body.home)
    times = found.motion.times
    wanted = body.kinematics.forward(sample(given, times))[1]
    assert rot.angle_between(ours, wanted).max() < 1e-3


@pytest.mark.parametrize("scale", [0.5, 1.7])
def test_a_scaled_robot_gets_scaled_root_motion_and_the_same_joints(scale: float) -> None:
    model = walker()
    motion = steps(model)
    found = retarget(motion, Body(model), Body(walker(scale)), smoothness=0.0)
    assert found.scale == pytest.approx(scale)
    np.testing.assert_allclose(found.motion.poses[:, :3], scale * motion.poses[:, :3], atol=1e-4)
    np.testing.assert_allclose(found.motion.poses[:, 3:], motion.poses[:, 3:], atol=1e-4)


def test_roles_pair_bodies_of_other_names_and_feet_that_stand_keep_standing() -> None:
    """The other robot has longer thighs; one foot of the source stands still."""
    source, target = Body(walker()), Body(walker(names=OTHER, thigh=0.5))
    pairs = keypoints(target, source)
    assert {(p.role, p.target, p.source) for p in pairs} >= {
        ("base", "trunk", "trunk"),
        ("foot", "left_ankle_link", "left_foot"),
        ("knee", "right_shin", "right_knee"),
        ("hip", "right_upper_leg", "right_hip"),
    }
    # The source bends its knees and sinks, with both feet flat on the ground.
    bend = np.linspace(0, 0.8, 30)
    poses = np.tile(source.home, (30, 1))
    names = [source.model.joint(j).name for j in range(1, source.model.njnt)]
    for column, name in enumerate(names, 7):
        part = name.partition("_")[2]
        poses[:, column] = bend * {"hip_pitch": -1, "knee": 2, "ankle": -1}.get(part, 0)
    poses[:, 2] = 0.06 + 0.8 * np.cos(bend)
    motion = Motion("sinks", np.arange(30) / 30, poses, False, dict.fromkeys(names, 1))
    found = retarget(motion, source, target)
    assert found.scale == pytest.approx(0.96 / 0.86)
    assert np.abs(target.kinematics.lowest(found.motion.poses)).max() < 1e-9
    position, quaternion = target.kinematics.forward(found.motion.poses)
    for side in ("left", "right"):
        foot = position[:, target.at(f"{side}_ankle_link")]
        assert np.ptp(foot[:, :2], axis=0).max() < 2e-3
        assert np.abs(foot[:, 2] - 0.06).max() < 2e-3
        turned = rot.angle_between(quaternion[:, target.at(f"{side}_ankle_link")], np.eye(4)[0])
        assert turned.max() < 0.02
    # The hips are as far above the ground as the source's, scaled.
    np.testing.assert_allclose(found.motion.poses[:, 2], found.scale * poses[:, 2], atol=0.01)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_joints_stay_within_their_ranges(seed: int) -> None:
    rng = np.random.default_rng(seed)
    low, high = -rng.uniform(0, 0.4, 4), rng.uniform(0, 0.4, 4)
    bounds = [f'range="{a} {b}" limited="true"' for a, b in zip(low, high, strict=True)]
    target = walker(1.0, OTHER, *bounds)
    source = walker()
    found = retarget(steps(source, 15, 0.3 * rng.uniform()), Body(source), Body(target))
    assert check_motion(target, found.motion, target.qpos0)["limit"].size <= 1e-12
    assert np.isfinite(found.errors).all()


def test_what_does_not_fit_is_refused() -> None:
    walking = Body(walker())
    names = {"hip": "a", "knee": "b", "foot": "c"}
    other = Body(walker(names=names))
    with pytest.raises(UsageError, match=r"names in common.*--map TARGET SOURCE.*left_a"):
        keypoints(other, walking)
    with pytest.raises(UsageError, match="The robot of --to has no body nose"):
        keypoints(other, walking, {"nose": "trunk"})
    with pytest.raises(UsageError, match="The robot of --source has no body nose"):
        keypoints(other, walking, {"left_c": "nose"})
    chosen = {"left_c": "left_foot", "right_c": "right_foot"}
    pairs = keypoints(other, walking, chosen)
    assert [p.role for p in pairs] == ["base", "foot", "foot"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.xml").write_text(walker_text())
    (tmp_path / "two.xml").write_text(walker_text(1.2, OTHER))
    files.write(steps(walker()), tmp_path / "steps.npz")
    one, two = str(tmp_path / "one.xml"), str(tmp_path / "two.xml")
    asked = ["motion", "retarget", str(tmp_path / "steps.npz"), "--to", two]
    assert cli.main(asked) == 2
    assert "--source ROBOT.xml" in capsys.readouterr().err
    asked += ["--source", one, "--out", str(tmp_path / "out.npz")]
    assert cli.main([*asked, "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["scale"] == pytest.approx(1.2)
    assert {"keypoint": "left_shin", "follows": "left_knee"}.items() <= told["keypoints"][2].items()
    assert cli.main(["motion", "check", told["file"], "--robot", two, "--penetration", "1"]) == 0
    assert cli.main([*asked, "--home", "stand"]) == 2
    assert "--home stand: the keyframes are none" in capsys.readouterr().err


@pytest.mark.parametrize("clip", ["walk", "kick"])
def test_clips_fit_the_g1(clip: str) -> None:
    pytest.importorskip("pybullet_data", reason="it holds the clips (the extra 'mocap')")
    try:
        model = load_robot(g1.MODEL).compile()
    except UsageError as error:
        pytest.skip(str(error))
    (motion,) = files.load((clip,))
    found = retarget(motion, Body(load_robot(HUMANOID).compile()), Body(model))
    assert found.errors.mean() < 0.02
    worst = check_motion(model, found.motion, model.qpos0)
    assert worst["limit"].size <= 1e-12
    assert worst["below"].size < 1e-6
