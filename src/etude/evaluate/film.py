"""Films and picture strips of evaluation episodes, and of motion clips."""

from __future__ import annotations

import base64
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from etude.core.contracts import Array, BatchEnv, Pictured, ability
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.output import waiting
from etude.data.motion import library
from etude.data.motion.motions import Motion, frame_rate
from etude.envs.mujoco import rendering
from etude.envs.mujoco.decor import dressed
from etude.envs.mujoco.reference import ModelKinematics
from etude.envs.mujoco.simulation import Camera, Line
from etude.evaluate.footage import (
    Footage,
    Picture,
    Recording,
    Simulated,
    Size,
    can_film,
    footage,
    recorder,
    step_seconds,
)
from etude.evaluate.fresh import FreshEpisodes, load
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.rollout.group import evaluate

SIZE, SMALL, TINY = (1280, 720), (640, 360), (320, 180)
"""Width and height in pixels of a film, of a small one, and of one for logs."""
CAPTION = 34
"""Height of the line under the pictures of a strip, in pixels."""
COLUMNS = 4
"""Pictures in a row of a strip."""
GAP = 4
_LINGER = 1.0
"""Seconds for which a film stays at the end of an episode."""
_ENOUGH, _MOST = 6.0, 5
"""Shortest film in seconds, and largest number of episodes to get there."""
_MOVING_RATE, _MOVING_SECONDS = 15.0, 10.0
"""Frame rate, and length in seconds, of the moving picture beside a film."""
_MOVING = (".webp", ".gif")
INK, PAPER = (30, 34, 40), (255, 255, 255)
_PANEL, _FAINT = (24, 28, 36, 190), (200, 206, 214)
_GOOD, _BAD, _PLAIN = (34, 150, 84), (205, 62, 52), (84, 96, 112)


@dataclass(frozen=True)
class Scene:
    """An episode with the texts of its film."""

    footage: Footage
    title: str
    detail: str = ""
    """For example the number of the episode."""
    outcome: str = ""
    """Shown at the end."""
    success: bool | None = None
    """Decides the colour of the outcome."""


def check(recipe: Recipe) -> None:
    """Raise if episodes of a recipe cannot be filmed."""
    check_tools()
    env = recipe.task.for_film().build(recipe.task.num_agents)
    try:
        check_env(env, recipe.task.kind)
    finally:
        env.close()


def check_env(env: BatchEnv, kind: str) -> None:
    """Raise if an environment cannot be drawn."""
    if not can_film(env):
        raise UsageError(
            f"An environment of the kind '{kind}' cannot be filmed, because nothing draws it: give "
            "the task a method picture(env_id) that returns a picture [height, width, 3] of bytes."
        )
    drawing = ability(env, Pictured)
    if drawing is not None:
        env.reset(Key(0))
        drawing.picture(0)  # raises where a package that draws is missing


def check_tools() -> None:
    """Raise if pictures cannot be drawn on this machine."""
    # Read by Gymnasium, whose own choice is a screen.
    os.environ.setdefault("MUJOCO_GL", rendering.backend())


def check_file(path: Path) -> None:
    """Raise if `write_file` cannot write a file of this name."""
    if path.suffix not in (".mp4", *_MOVING):
        raise UsageError(f"{path} is not the name of a film: it must end in .mp4, .webp or .gif.")
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file for the film.")
    if path.suffix == ".mp4" and not has_mp4():
        raise UsageError(
            "An .mp4 needs imageio-ffmpeg, which is not installed: `pip install etude[video]`, or "
            "let the film's name end with .webp or .gif."
        )
    check_tools()


def has_mp4() -> bool:
    """Whether films can be written as mp4, which needs the extra `video`."""
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def formats() -> str:
    """The formats of films on this machine as a sentence, if mp4 is not among them; else ""."""
    if has_mp4():
        return ""
    return (
        f"Films are {_moving_suffix()} of {SMALL[0]} x {SMALL[1]} and at most "
        f"{_MOVING_SECONDS:.0f} s: an .mp4 needs imageio-ffmpeg, `pip install etude[video]`."
    )


def has_webp() -> bool:
    """Whether pictures can be written as webp."""
    return bool(features.check("webp"))


def _moving_suffix() -> str:
    return _MOVING[0] if has_webp() else _MOVING[1]


def _writer(path: Path, rate: float, size: Size) -> Any:
    """A generator whose `send` takes the pictures [height, width, 3] of a film, one by one."""
    if not has_mp4():
        raise UsageError(
            "An .mp4 needs imageio-ffmpeg, which is not installed: `pip install etude[video]`."
        )
    made = importlib.import_module("imageio_ffmpeg").write_frames(
        str(path),
        size,
        fps=rate,
        codec="libx264",
        quality=7,
        macro_block_size=2,
        ffmpeg_log_level="error",
    )
    made.send(None)
    return made


def typical(fresh: FreshEpisodes, kinds: list[str]) -> dict[str, list[int]]:
    """{outcome: episode numbers}: of each outcome some of median length, the most typical first."""
    chosen = {}
    for kind in dict.fromkeys(kinds) if kinds else ("episode",):
        where = np.flatnonzero(np.array(kinds) == kind) if kinds else np.arange(fresh.num_episodes)
        order = where[np.argsort(fresh.episodes["length"][where], kind="stable")]
        middle = (len(order) - 1) // 2
        near = np.argsort(np.abs(np.arange(len(order)) - middle), kind="stable")[:_MOST]
        chosen[kind] = [int(number) for number in order[near]]
    return chosen


class Films(list[Path]):
    """The paths of films and pictures; a notebook shows a film of each outcome."""

    def _repr_html_(self) -> str:
        """The moving picture of each outcome, else its film, else its strip; text is escaped."""
        chosen: dict[Path, Path] = {}
        for path in sorted(self, key=lambda path: _SHOWN.get(path.suffix, len(_SHOWN))):
            if path.suffix in _SHOWN and path.is_file() and path.stat().st_size <= _MOST_SHOWN:
                chosen.setdefault(path.with_suffix(""), path)
        shown = [
            f"<figure style='display: inline-block; margin: 0 1em 1em 0'>{_tag(path)}"
            f"<figcaption>{escape(str(path))}</figcaption></figure>"
            for _, path in sorted(chosen.items())
        ]
        rest = [path for path in self if path.with_suffix("") not in chosen]
        return "".join([*shown, *(f"<div>{escape(str(path))}</div>" for path in rest)])


_SHOWN = {".webp": 0, ".gif": 0, ".mp4": 1, ".png": 2}
"""Files that a browser shows; of those with one name, the one with the lowest number is shown."""
_MOST_SHOWN = 16 << 20
"""Most bytes of a file that is put into a notebook."""


def _tag(path: Path) -> str:
    """An HTML element that has the file in it."""
    data = base64.b64encode(path.read_bytes()).decode()
    if path.suffix == ".mp4":
        return f"<video controls loop width='480' src='data:video/mp4;base64,{data}'></video>"
    return f"<img style='max-width: 100%' src='data:image/{path.suffix[1:]};base64,{data}'>"


def film(
    recipe: Recipe,
    path: Path,
    fresh: FreshEpisodes,
    kinds: list[str],
    folder: Path,
    size: Size = SIZE,
    title: str = "",
) -> list[Path]:
    """Write <outcome>.png, .webp and, with the extra `video`, .mp4 for each outcome that occurred.

    path: the policy. kinds: the outcome of each episode. title: default the names of task, recipe
    and run, each once.
    """
    env, made = environments(recipe, fresh, size if has_mp4() else SMALL), []
    chosen = {
        kind: _enough(numbers, fresh.episodes["length"] * step_seconds(env))
        for kind, numbers in typical(fresh, kinds).items()
    }
    recordings = replay(env, path, fresh, [n for group in chosen.values() for n in group])
    succeeded = fresh.episodes.get("is_success")
    names = dict.fromkeys((recipes.title(recipe), folder.parent.parent.name))
    title = title or ", ".join(names)
    for kind, numbers in chosen.items():
        scenes, outcome = [], kind if kinds else ""
        for number in numbers:
            good = None if succeeded is None else bool(succeeded[number])
            shown = footage(env, recordings[number])
            scenes.append(Scene(shown, title, f"episode {number}", outcome, good))
        made += write(scenes, folder, re.sub(r"\W+", "-", kind), size)
    return made


def _enough(numbers: list[int], seconds: Array) -> list[int]:
    """The first episodes that together make a film; seconds: [episodes] that each one takes."""
    ends = np.cumsum(seconds[numbers] + _LINGER)
    return numbers[: int(np.searchsorted(ends, _ENOUGH)) + 1]


def write(scenes: Sequence[Scene], folder: Path, name: str, size: Size = SIZE) -> list[Path]:
    """Write <name>.png, a strip of the first episode, and <name>.mp4 and <name>.webp of all; no
    mp4 without the extra `video`."""
    picture, moving = folder / f"{name}.png", folder / f"{name}{_moving_suffix()}"
    strip(scenes[0]).save(picture, optimize=True)
    if not has_mp4():
        rate, every = _rates(scenes[0].footage)
        pictures = chain.from_iterable(_frames(scene, SMALL, every) for scene in scenes)
        most = round(_MOVING_SECONDS * rate / every)
        with waiting("drawing", most, "pictures"):
            _save_moving([*islice(pictures, most)], moving, rate / every)
        return [picture, moving]
    film = folder / f"{name}.mp4"
    _write_films(scenes, film, moving, size)
    return [picture, film, moving]


def environments(recipe: Recipe, fresh: FreshEpisodes, size: Size = SIZE) -> BatchEnv:
    """Environments in which episodes are played again and drawn."""
    task = recipe.task.for_evaluation().for_film(size)
    return task.make(fresh.envs_per_group, recipe.collector.engine_threads)


def replay(env: BatchEnv, path: Path, fresh: FreshEpisodes, numbers: list[int]) -> dict[int, Any]:
    """Play episodes again, each in its group, and record them; closes the environments."""
    policy, places = load(path), {number: fresh.place(number) for number in numbers}
    recordings: dict[int, Any] = {}
    for group in sorted({place[0] for place in places.values()}):
        wanted = {n: (env_id, episode) for n, (g, env_id, episode) in places.items() if g == group}
        lengths = fresh.episodes["length"][[*wanted]].tolist()
        recording = recorder(env, wanted.values(), map(int, lengths))
        last = max(episode for _, episode in wanted.values())
        evaluate(recording, policy, last + 1, fresh.group_key(group), fresh.stochastic)
        recordings |= {n: recording.recordings[place] for n, place in wanted.items()}
    env.close()
    return recordings


def strip(scene: Scene) -> Image.Image:
    """Pictures over the whole episode, `COLUMNS` in a row, each with its step, under a title."""
    steps, pictures = scene.footage.strip()
    title = ", ".join(filter(None, (scene.title, scene.outcome, scene.detail)))
    seconds = scene.footage.substeps / scene.footage.moment_rate
    return _sheet(pictures, [f"step {step}, {step * seconds:.1f} s" for step in steps], title)


def _sheet(pictures: list[Picture], captions: list[str], title: str) -> Image.Image:
    """Pictures with captions, in rows under a title and the legend of the first."""
    height, width, _ = pictures[0].pixels.shape
    columns, legend = min(COLUMNS, len(pictures)), pictures[0].legend
    head, rows = CAPTION * (1 + bool(legend)), -(-len(pictures) // columns)
    across = columns * (width + GAP) - GAP
    sheet = Image.new("RGB", (across, head + rows * (height + CAPTION)), color=PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=CAPTION - 12)
    pen.text((8, CAPTION // 2), title, INK, font, anchor="lm")
    left = 8
    for text, color in legend:
        name = text.partition(":")[0]  # the rest is of one moment
        pen.text((left, 1.5 * CAPTION), name, _bytes(color), font, anchor="lm")
        left += round(font.getlength(name)) + CAPTION
    for index, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(index, columns)
        left, top = column * (width + GAP), head + row * (height + CAPTION)
        sheet.paste(Image.fromarray(picture.pixels), (left, top))
        middle = (left + width // 2, top + height + CAPTION // 2)
        pen.text(middle, caption, INK, font, anchor="mm")
    return sheet


def _bytes(color: tuple[float, float, float]) -> tuple[int, int, int]:
    """A colour in [0, 1] as bytes."""
    red, green, blue = (round(255 * part) for part in color)
    return red, green, blue


def _write_films(scenes: Sequence[Scene], film: Path, moving: Path, size: Size) -> None:
    """Write an mp4 in real time, and its first seconds as a small moving picture."""
    rate, every = _rates(scenes[0].footage)
    most = round(_MOVING_SECONDS * rate / every)
    writer, kept = _writer(film, rate, size), list[Image.Image]()
    filmed = [scene.footage for scene in scenes]
    total = sum(len(range(each.begin, each.moments, each.stride)) for each in filmed)
    pictures = chain.from_iterable(_frames(scene, size) for scene in scenes)
    try:
        with waiting("drawing", total, "pictures") as wait:
            for number, picture in enumerate(pictures):
                writer.send(np.asarray(picture))
                if number % every == 0 and len(kept) < most:
                    kept.append(picture.resize(SMALL, Image.Resampling.BOX))
                wait.done = min(number + 1, total)
        writer.close()
    except BaseException:
        with suppress(Exception):  # ffmpeg may not have had a picture
            writer.close()
        film.unlink(missing_ok=True)
        raise
    _save_moving(kept, moving, rate / every)


def write_file(scenes: Sequence[Scene], path: Path) -> None:
    """Write episodes to one file: an mp4, or a small webp or gif."""
    rate, every = _rates(scenes[0].footage)
    if path.suffix in _MOVING:
        kept = [picture for scene in scenes for picture in _frames(scene, SMALL, every)]
        _save_moving(kept, path, rate / every)
        return
    writer = _writer(path, rate, SIZE)
    for picture in chain.from_iterable(_frames(scene, SIZE) for scene in scenes):
        writer.send(np.asarray(picture))
    writer.close()


def write_small(scenes: Sequence[Scene], webp: Path, gif: Path) -> None:
    """Write episodes as a small webp, and as a smaller gif for logs, from the same pictures."""
    rate, every = _rates(scenes[0].footage)
    kept = [picture for scene in scenes for picture in _frames(scene, SMALL, every)]
    if webp.suffix == _moving_suffix():
        _save_moving(kept, webp, rate / every)
    smaller = [each.resize(TINY, Image.Resampling.BOX) for each in kept[::2]]
    _save_moving(smaller, gif, rate / every / 2)


def _rates(footage: Footage) -> tuple[float, int]:
    """(frame rate of a film, its pictures per picture of the moving picture)."""
    rate = footage.moment_rate / footage.stride
    return rate, max(1, round(rate / _MOVING_RATE))


def _save_moving(pictures: list[Image.Image], path: Path, rate: float) -> None:
    """Write a webp or gif; rate: pictures per second."""
    options: dict[str, Any] = {"quality": 70, "method": 3} if path.suffix == ".webp" else {}
    options |= {"append_images": pictures[1:], "duration": round(1000 / rate), "loop": 0}
    pictures[0].save(path, save_all=True, **options)


def _frames(scene: Scene, size: Size, every: int = 1) -> Iterator[Image.Image]:
    """Every `every`-th picture of the film of one episode, which stays at its end for a second."""
    shown = scene.footage
    stride = shown.stride
    moments = [*range(shown.begin, shown.moments - 1, stride * every), shown.moments - 1]
    for moment, drawn in zip(moments, shown.draw(moments, size), strict=True):
        picture = Image.fromarray(drawn.pixels)
        pen, end = Pen(picture), moment == moments[-1]
        pen.legend(drawn.legend)
        right = pen.panel(scene.title, _line(scene, moment), _line(scene, moments[-1]))
        if end and scene.outcome:
            color = {True: _GOOD, False: _BAD, None: _PLAIN}[scene.success]
            pen.badge(right, scene.outcome, color)
        stay = round(_LINGER * shown.moment_rate / (stride * every)) if end else 0
        yield from repeat(picture, 1 + stay)


def _line(scene: Scene, moment: int) -> str:
    shown = scene.footage
    step = f"step {moment // shown.substeps} of {shown.steps}"
    return ", ".join(filter(None, (scene.detail, step, f"{moment / shown.moment_rate:.1f} s")))


class Pen:
    """Writes on a picture, in place, in sizes relative to its height."""

    def __init__(self, picture: Image.Image) -> None:
        self._unit, self._height = picture.height / 720, picture.height
        self._draw = ImageDraw.Draw(picture, "RGBA")

    def legend(self, lines: Sequence[Line]) -> None:
        """Write lines with their colours in the upper left corner."""
        if not lines:
            return
        unit, font = self._unit, self._font(22)
        # As wide as the longest line can be, so that it does not change from picture to picture.
        wide = max(font.getlength(re.sub(r"\d", "0", line.text)) for line in lines)
        corner = 20 * unit
        self._box(corner, corner, wide + 72 * unit, (len(lines) * 32 + 16) * unit, _PANEL)
        for number, (text, color) in enumerate(lines):
            middle = corner + (24 + 32 * number) * unit
            swatch = (corner + 14 * unit, middle - 5 * unit, corner + 40 * unit, middle + 5 * unit)
            self._draw.rounded_rectangle(swatch, 3 * unit, _bytes(color))
            self._draw.text((corner + 52 * unit, middle), text, PAPER, font, anchor="lm")

    def panel(self, title: str, line: str, longest: str) -> float:
        """Write a title and a line in the lower left corner; return the right end.

        longest: the longest line, which decides the width.
        """
        unit, large, small = self._unit, self._font(27), self._font(20)
        wide: float = max(large.getlength(title), small.getlength(longest)) + 32 * unit
        tall, left = 76 * unit, 20 * unit
        top = self._height - tall - 20 * unit
        self._box(left, top, wide, tall, _PANEL)
        self._draw.text((left + 16 * unit, top + 25 * unit), title, PAPER, large, anchor="lm")
        self._draw.text((left + 16 * unit, top + 54 * unit), line, _FAINT, small, anchor="lm")
        return left + wide

    def badge(self, left: float, text: str, color: tuple[int, int, int]) -> None:
        """Write a word in a colour, beside a panel that ends at `left`."""
        unit, font = self._unit, self._font(27)
        wide, left = font.getlength(text) + 36 * unit, left + 12 * unit
        top = self._height - 96 * unit
        self._box(left, top, wide, 76 * unit, (*color, 235))
        self._draw.text((left + 18 * unit, top + 38 * unit), text, PAPER, font, anchor="lm")

    def _font(self, size: float) -> Any:
        return ImageFont.load_default(size=size * self._unit)

    def _box(self, left: float, top: float, wide: float, tall: float, color: Any) -> None:
        corner = 10 * self._unit
        self._draw.rounded_rectangle((left, top, left + wide, top + tall), corner, color)


def motion_strip(motion: Motion, seconds: float, robot: mujoco.MjSpec) -> Image.Image:
    """Pictures of a motion side by side, evenly spaced in time, under its name."""
    shown, rate = _motion_footage(motion, seconds, robot)
    steps, pictures = Footage.strip(shown)
    return _sheet(pictures, [f"{step / rate:.2f} s" for step in steps], _motion_title(motion))


def motion_film(motion: Motion, seconds: float, robot: mujoco.MjSpec, path: Path) -> None:
    """Write an mp4 of a motion in real time."""
    shown, rate = _motion_footage(motion, seconds, robot)
    writer = _writer(path, rate, SIZE)
    for picture in _frames(Scene(shown, _motion_title(motion)), SIZE):
        writer.send(np.asarray(picture))
    writer.close()


def _motion_title(motion: Motion) -> str:
    return f"{motion.name}: {motion.seconds:.2f} s, {'loops' if motion.loops else 'plays once'}"


def _motion_footage(motion: Motion, seconds: float, robot: mujoco.MjSpec) -> tuple[Simulated, int]:
    """The motion as it is tracked, and its frames per second."""
    model = dressed(robot)
    rate = round(min(frame_rate(motion), 60.0))
    count = max(2, round(seconds * rate) + 1)
    kinematics = ModelKinematics(model)
    fitted = kinematics.fit(motion, model.qpos0)
    poses = library.build((fitted,), rate, count, kinematics).frames.pose[:count]
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    data, states = mujoco.MjData(model), np.empty((len(poses), mujoco.mj_stateSize(model, kind)))
    for pose, state in zip(poses, states, strict=True):
        data.qpos[:] = pose
        mujoco.mj_getState(model, data, state, kind)
    recording = Recording(list(states), list(states), [()] * len(states))
    base = Camera(follow=model.body(int(model.jnt_bodyid[0])).name, azimuth=120.0, elevation=-12.0)
    return Simulated(model, base, recording, 1, 1.0 / rate), rate
