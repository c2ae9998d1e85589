"""`etude motion`: motion clips that a humanoid can imitate, as a table and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.verbs import Verbs, run_verb
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.data.motion import clips, library
from etude.data.motion.motions import Motion

USAGE = """\
etude motion shows motion clips that a humanoid can imitate.

  etude motion list                            list clips: length, loop, depth in the floor, speed
  etude motion show CLIP [--mp4] [--out FILE]  draw a strip of pictures or a film

Clips come with `pip install 'etude[mocap]'`, or from --folder FOLDER with DeepMimic's text files.
"""


class ListCommand(Reporting):
    """List all clips with their length, loop, depth in the floor and speed."""

    folder: str | None = Field(None, description="Folder of clips; default: those of pybullet.")


class ShowCommand(Config):
    """Draw a clip as it is imitated: closed if it loops, lifted out of the floor."""

    clip: Positional[str] = Field(description="Name of a clip, from `etude motion list`.")
    folder: str | None = Field(None, description="Folder of clips; default: those of pybullet.")
    out: str | None = Field(None, description="The file to write; default CLIP.png or CLIP.mp4.")
    mp4: bool = Field(False, description="Make a film instead of a strip of pictures.")
    seconds: float | None = Field(
        None,
        gt=0,
        le=60,
        description="Duration, s; default: one cycle, in a film 5 s.",
    )


def run(arguments: list[str]) -> int:
    """Run `etude motion VERB ...`; the exit code."""
    return run_verb("etude motion", USAGE, VERBS, arguments)


def facts(clip: Motion) -> dict[str, Any]:
    """The row of a clip in the table."""
    return {
        "clip": clip.name,
        "frames": len(clip.times),
        "seconds": round(clip.seconds, 3),
        "loops": clip.loops,
        "lowest": round(float(library.HUMANOID.lowest(clip.poses).min()), 3),
        "speed": round(float(np.linalg.norm(clip.travel)) / clip.seconds, 2),
    }


def _list(arguments: list[str]) -> None:
    command = parse("motion list", ListCommand, arguments)
    rows = [facts(clip) for clip in clips.load(("all",), command.folder, "--folder")]
    width = max(len(row["clip"]) for row in rows) + 2
    text = f"  {'clip':<{width}}frames  seconds  loops  lowest m  speed m/s\n"
    for row in rows:
        loops = "yes" if row["loops"] else "no"
        text += (
            f"  {row['clip']:<{width}}{row['frames']:>6}{row['seconds']:>9.2f}{loops:>7}"
            f"{row['lowest']:>10.3f}{row['speed']:>11.2f}\n"
        )
    command.show(rows, text)


def _show(arguments: list[str]) -> None:
    command = parse("motion show", ShowCommand, arguments)
    if command.clip == "all":
        raise UsageError("One clip is shown at a time: name one of `etude motion list`.")
    (clip,) = clips.load((command.clip,), command.folder, "--folder")
    # Only this command loads OpenGL.
    from etude.evaluate import film

    path = Path(command.out or f"{clip.name}.{'mp4' if command.mp4 else 'png'}")
    if command.mp4:
        film.clip_film(clip, command.seconds or (5.0 if clip.loops else clip.seconds), path)
    else:
        film.clip_strip(clip, command.seconds or clip.seconds).save(path, optimize=True)
    print(f"{clip.name} is in {path}")


VERBS: Verbs = {"list": _list, "show": _show}
