"""`etude motion`: motions that robots can track, as tables, pictures and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.verbs import Verbs, run_verb
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.data.motion import files
from etude.data.motion.clips import JOINTS
from etude.data.motion.motions import Motion, frame_rate

USAGE = """\
etude motion shows, converts and checks motions that a robot can track.

  etude motion list [FILE ...]                   list motions: length, loop, joints, speed
  etude motion show CLIP [--mp4] [--out FILE]    draw a strip of pictures or a film
  etude motion check FILE ... --robot ROBOT.xml  find what the robot's body could not do
  etude motion import FILE --out FILE.npz        convert a .npz, .csv or DeepMimic's .txt
  etude motion retarget CLIP --to ROBOT.xml      move a motion to another robot

Without FILE the clips of DeepMimic are listed, which come with `pip install 'etude[mocap]'`, or
from --folder FOLDER. FILE may be a folder, or PACKAGE/PATH in an installed package.
"""
_FOLDER = "Folder of clips (default: those of pybullet), or of extracted packages."
_ROBOT = "MJCF file of the robot, PACKAGE/PATH of one, or a name in MuJoCo Menagerie; default for "
_ROBOT += "DeepMimic's clips: our humanoid."


class ListCommand(Reporting):
    """List motions with their length, frame rate, loop and speed."""

    files: Positional[tuple[str, ...]] = Field(
        (), description="Files or folders of motions; default DeepMimic's clips."
    )
    folder: str | None = Field(None, description=_FOLDER)


class ShowCommand(Config):
    """Draw a motion as it is tracked: closed if it loops, lifted out of the floor."""

    clip: Positional[str] = Field(
        description="A file, or the name of a clip from `etude motion list`."
    )
    folder: str | None = Field(None, description=_FOLDER)
    robot: str = Field("", description=_ROBOT)
    out: str | None = Field(None, description="The file to write; default CLIP.png or CLIP.mp4.")
    mp4: bool = Field(False, description="Make a film instead of a strip of pictures.")
    seconds: float | None = Field(
        None,
        gt=0,
        le=60,
        description="Duration, s; default: one cycle, in a film 5 s.",
    )


class CheckCommand(Reporting):
    """Find what a robot's body could not do: self-penetration, joints beyond their ranges, fast
    joints, shapes below the ground. The exit code is 1 if anything is beyond its bound."""

    files: Positional[tuple[str, ...]] = Field(
        (), description="Files or folders of motions; default DeepMimic's clips."
    )
    folder: str | None = Field(None, description=_FOLDER)
    robot: str = Field("", description=_ROBOT)
    penetration: float = Field(0.02, ge=0, description="Bound of the depth of penetration, m.")
    limit: float = Field(0.01, ge=0, description="Bound of the distance beyond a range, rad or m.")
    speed: float = Field(20.0, ge=0, description="Bound of the speed of joints, rad/s or m/s.")
    below: float = Field(0.03, ge=0, description="Bound of the depth below the ground, m.")


class ImportCommand(Config):
    """Convert a motion to .npz or .csv."""

    file: Positional[str] = Field(description="The motion, .npz, .csv, .txt or .json.")
    folder: str | None = Field(None, description="Folder of extracted packages.")
    out: str = Field(description="The file to write, .npz or .csv.")
    loops: bool | None = Field(
        None, description="Whether the motion continues from its start; default as in the file."
    )


class RetargetCommand(Reporting):
    """Move a motion to another robot, and report the distance of each keypoint in mm.

    Base and feet are scaled by leg length, limbs have the source's directions, joints stay within
    their ranges, and the lowest point is on the ground where the source's is.
    """

    clip: Positional[str] = Field(
        description="A file, or the name of a clip from `etude motion list`."
    )
    to: str = Field(
        description="MJCF file of the robot, PACKAGE/PATH of one, or a name in MuJoCo Menagerie."
    )
    source: str = Field("", description=f"The motion's robot. {_ROBOT}")
    folder: str | None = Field(None, description=_FOLDER)
    home: str = Field("", description="Keyframe of the robot that stands; default its qpos0.")
    source_home: str = Field("", description="The same of the motion's robot.")
    map: dict[str, str] = Field(
        {},
        description="Bodies of the robot and those of the motion's robot that they follow, in "
        "turn; bodies with the same name or a role such as left foot need none.",
    )
    smoothness: float = Field(
        0.02, ge=0, le=10, description="Weight of changes of joints between frames, m/rad."
    )
    out: str | None = Field(None, description="The file to write; default CLIP-ROBOT.npz.")


def run(arguments: list[str]) -> int:
    """Run `etude motion VERB ...`; the exit code."""
    return run_verb("etude motion", USAGE, VERBS, arguments)


def facts(motion: Motion) -> dict[str, Any]:
    """The row of a motion in the table."""
    return {
        "clip": motion.name,
        "frames": len(motion.times),
        "seconds": round(motion.seconds, 3),
        "loops": motion.loops,
        "speed": round(float(np.linalg.norm(motion.travel)) / motion.seconds, 2),
    }


def _list(arguments: list[str]) -> None:
    command = parse("motion list", ListCommand, arguments)
    found = files.load(command.files or ("all",), command.folder, "--folder")
    rows = [{**facts(m), "fps": round(frame_rate(m), 1), "joints": list(m.joints)} for m in found]
    titles = {"frames": "", "seconds": ".2f", "fps": ".0f", "loops": "", "speed": ".2f"}
    width = max(len(row["clip"]) for row in rows) + 2
    head = "".join(f"{'speed m/s' if title == 'speed' else title:>11}" for title in titles)
    text = f"  {'clip':<{width}}{head}\n"
    for row in rows:
        cells = {**row, "loops": "yes" if row["loops"] else "no"}
        line = "".join(f"{format(cells[title], form):>11}" for title, form in titles.items())
        text += f"  {row['clip']:<{width}}{line}\n"
    command.show(rows, text)


def _robot(
    name: str, folder: str | None, motions: Sequence[Motion], option: str = "--robot"
) -> Any:
    """The robot of a name; without one our humanoid."""
    from etude.envs.mujoco.reference import load_robot
    from etude.envs.robots.humanoid import MODEL

    if name:
        return load_robot(name, folder, "--folder")
    for motion in motions:
        if not motion.joints.keys() <= JOINTS.keys():
            raise UsageError(
                f"{motion.name} is not a motion of our humanoid: name its robot, {option} "
                "ROBOT.xml."
            )
    return load_robot(MODEL)


def _show(arguments: list[str]) -> None:
    command = parse("motion show", ShowCommand, arguments)
    if command.clip == "all":
        raise UsageError("One clip is shown at a time: name one of `etude motion list`.")
    (motion,) = files.load((command.clip,), command.folder, "--folder")
    # Only this command loads OpenGL.
    from etude.evaluate import film

    robot = _robot(command.robot, command.folder, (motion,))
    path = Path(command.out or f"{motion.name}.{'mp4' if command.mp4 else 'png'}")
    if command.mp4:
        seconds = command.seconds or (5.0 if motion.loops else motion.seconds)
        film.motion_film(motion, seconds, robot, path)
    else:
        strip = film.motion_strip(motion, command.seconds or motion.seconds, robot)
        strip.save(path, optimize=True)
    print(f"{motion.name} is in {path}")


def _check(arguments: list[str]) -> int:
    command = parse("motion check", CheckCommand, arguments)
    from etude.envs.mujoco.motion_check import check_motion

    motions = files.load(command.files or ("all",), command.folder, "--folder")
    model = _robot(command.robot, command.folder, motions).compile()
    rows: list[dict[str, Any]] = []
    text = ""
    bad = 0
    units = {"penetration": "m deep", "limit": "beyond its range", "speed": "per s", "below": "m"}
    for motion in motions:
        found = check_motion(model, motion, model.qpos0)
        beyond = [kind for kind, worst in found.items() if worst.size > getattr(command, kind)]
        bad += bool(beyond)
        rows.append(
            {
                "motion": motion.name,
                "beyond": beyond,
                **{kind: vars(worst) for kind, worst in found.items()},
            }
        )
        text += f"{motion.name}: {'beyond ' + ', '.join(beyond) if beyond else 'nothing beyond'}\n"
        for kind, worst in found.items():
            if worst.size:
                mark = "!" if kind in beyond else " "
                text += f"  {mark} {kind:<12}{worst.size:8.3f} {units[kind]}, {worst.where}, "
                text += f"at {worst.second:.2f} s\n"
    command.show(rows, text)
    return int(bad > 0)


def _import(arguments: list[str]) -> None:
    from dataclasses import replace

    command = parse("motion import", ImportCommand, arguments)
    (motion,) = files.load((command.file,), command.folder, "--folder")
    if command.loops is not None:
        motion = replace(motion, loops=command.loops)
    path = Path(command.out)
    files.write(motion, path)
    row = facts(motion)
    print(f"{path}: {row['frames']} frames, {row['seconds']:.2f} s, {len(motion.joints)} joints")


def _retarget(arguments: list[str]) -> None:
    command = parse("motion retarget", RetargetCommand, arguments)
    from etude.envs.mujoco.reference import load_robot
    from etude.envs.mujoco.retarget import retarget

    clip = Path(command.clip).suffix in files.SUFFIXES
    (motion,) = files.load((command.clip,), command.folder if clip else None, "--folder")
    given = _robot(command.source, command.folder, (motion,), "--source")
    source = _standing(given, command.source_home, "--source-home")
    target = _standing(load_robot(command.to, command.folder, "--folder"), command.home, "--home")
    found = retarget(motion, source, target, command.map, command.smoothness)
    path = Path(command.out or f"{motion.name}-{Path(command.to).stem}.npz")
    files.write(found.motion, path)
    rows: list[dict[str, Any]] = [
        {
            "keypoint": point.target,
            "follows": point.source,
            "mean": round(float(errors.mean()) * 1000, 1),
            "largest": round(float(errors.max()) * 1000, 1),
        }
        for point, errors in zip(found.keypoints, found.errors.T, strict=True)
    ]
    width = max(len(row["keypoint"]) for row in rows) + 2
    text = f"  {'keypoint':<{width}}{'follows':<{width}}{'mean mm':>9}{'largest mm':>12}\n"
    for row in rows:
        text += f"  {row['keypoint']:<{width}}{row['follows']:<{width}}"
        text += f"{row['mean']:>9.1f}{row['largest']:>12.1f}\n"
    text += f"{path}: {len(found.motion.times)} frames, scaled by {found.scale:.3f}\n"
    command.show({"file": str(path), "scale": found.scale, "keypoints": rows}, text)


def _standing(spec: Any, home: str, option: str) -> Any:
    """The body of a robot at a keyframe."""
    from etude.envs.mujoco.retarget import Body

    model = spec.compile()
    keys = [model.key(i).name for i in range(model.nkey)]
    if home and home not in keys:
        raise UsageError(f"{option} {home}: the keyframes are {', '.join(keys) or 'none'}.")
    return Body(model, model.key(home).qpos if home else None)


VERBS: Verbs = {
    "list": _list,
    "show": _show,
    "check": _check,
    "import": _import,
    "retarget": _retarget,
}
