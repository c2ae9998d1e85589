"""Pictures of a clip of motion on the humanoid that will imitate it."""

from __future__ import annotations

from pathlib import Path

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from etude.core.contracts import Array
from etude.envs.mujoco import offscreen
from etude.motion import library
from etude.motion.clips import Clip
from etude.reports import film as films
from etude.robots.humanoid import CAMERA, CONTROL_RATE, humanoid

PICTURES = 8
SIZE = (260, 320)
"""Width and height of a picture in a strip."""


def states(model: mujoco.MjModel, clip: Clip, seconds: float) -> Array:
    """[frames, n]: the clip at the control rate, as states a camera draws."""
    count = max(2, round(seconds * CONTROL_RATE) + 1)
    poses = library.build((clip,), CONTROL_RATE, count).frames.pose[:count]
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    data, rows = mujoco.MjData(model), np.empty((len(poses), mujoco.mj_stateSize(model, kind)))
    for pose, row in zip(poses, rows, strict=True):
        data.qpos[:] = pose
        mujoco.mj_getState(model, data, row, kind)
    return rows


def strip(clip: Clip, seconds: float) -> Image.Image:
    """Pictures side by side, even in time, each with its moment; the name above."""
    model, (width, height), gap = humanoid(), SIZE, films.GAP
    drawn = states(model, clip, seconds)
    moments = np.linspace(0, len(drawn) - 1, PICTURES).round().astype(int)
    line = films.CAPTION
    sheet = Image.new("RGB", (PICTURES * (width + gap) - gap, height + 2 * line), films.PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=line - 12)
    told = f"{clip.name}: {clip.seconds:.2f} s, {'loops' if clip.loops else 'plays once'}"
    pen.text((8, line // 2), told, films.INK, font, anchor="lm")
    with offscreen.Renderer(model, CAMERA, width, height, fine=2) as camera:
        for index, moment in enumerate(moments):
            left = index * (width + gap)
            sheet.paste(Image.fromarray(camera.picture(drawn[moment])), (left, line))
            middle = (left + width // 2, line + height + line // 2)
            pen.text(middle, f"{moment / CONTROL_RATE:.2f} s", films.INK, font, anchor="mm")
    return sheet


def film(clip: Clip, seconds: float, path: Path) -> None:
    """An mp4 in real time."""
    model = humanoid()
    writer = films.writer(path, CONTROL_RATE)
    with offscreen.Renderer(model, CAMERA, *films.SIZE, fine=2) as camera:
        for state in states(model, clip, seconds):
            writer.send(camera.picture(state))
    writer.close()
