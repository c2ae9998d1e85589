"""`etude motion`: the clips a humanoid can imitate, as a table and as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.cli.options import Json, Positional, parse
from etude.cli.verbs import Verbs, run_verb
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.motion import clips

USAGE = """\
etude motion shows the clips of recorded motion that a humanoid can imitate.

  etude motion list                            all clips: length, loop, depth in the floor, speed
  etude motion show CLIP [--mp4] [--out FILE]  a strip of pictures, or a film

Clips come with `pip install 'etude[mocap]'`, or from --folder FOLDER of DeepMimic's text files.
"""


class ListCommand(Config):
    """All clips, and what they are like."""

    folder: str | None = Field(None, description="Where clips are; None: those of pybullet.")
    json_output: Json = Field(False, description="Print JSON, for programs.")


class ShowCommand(Config):
    """A clip as it will be imitated: closed where it loops, lifted out of the floor."""

    clip: Positional[str] = Field(description="Its name, as `etude motion list` has it.")
    folder: str | None = Field(None, description="Where clips are; None: those of pybullet.")
    out: str | None = Field(None, description="The file to write; default CLIP.png or CLIP.mp4.")
    mp4: bool = Field(False, description="A film instead of a strip of pictures.")
    seconds: float | None = Field(
        None, gt=0, le=60, description="How much of it; default one cycle, 5 s in a film."
    )


def run(arguments: list[str]) -> int:
    """Run `etude motion ...`; the exit code. What goes wrong is raised as an `EtudeError`."""
    return run_verb("etude motion", USAGE, VERBS, arguments)


def facts(clip: clips.Clip) -> dict[str, Any]:
    """What a clip is like, for a table."""
    return {
        "clip": clip.name,
        "frames": len(clip.times),
        "seconds": round(clip.seconds, 3),
        "loops": clip.loops,
        "lowest": round(clip.lowest, 3),
        "speed": round(float(np.linalg.norm(clip.travel)) / clip.seconds, 2),
    }


def _list(arguments: list[str]) -> None:
    command = parse("motion list", ListCommand, arguments)
    rows = [facts(clip) for clip in clips.load(("all",), command.folder, "--folder")]
    if command.json_output:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["clip"]) for row in rows) + 2
    print(f"  {'clip':<{width}}frames  seconds  loops  lowest m  speed m/s")
    for row in rows:
        loops = "yes" if row["loops"] else "no"
        print(
            f"  {row['clip']:<{width}}{row['frames']:>6}{row['seconds']:>9.2f}{loops:>7}"
            f"{row['lowest']:>10.3f}{row['speed']:>11.2f}"
        )


def _show(arguments: list[str]) -> None:
    command = parse("motion show", ShowCommand, arguments)
    if command.clip == "all":
        raise UsageError("Clips are shown one at a time: name one that `etude motion list` has.")
    (clip,) = clips.load((command.clip,), command.folder, "--folder")
    # OpenGL is loaded only where something is drawn.
    from etude.reports import motion_view

    path = Path(command.out or f"{clip.name}.{'mp4' if command.mp4 else 'png'}")
    if command.mp4:
        motion_view.film(clip, command.seconds or (5.0 if clip.loops else clip.seconds), path)
    else:
        motion_view.strip(clip, command.seconds or clip.seconds).save(path, optimize=True)
    print(f"{clip.name} is in {path}")


VERBS: Verbs = {"list": _list, "show": _show}
