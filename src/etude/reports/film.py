"""Films and picture strips: of clips of motion, and of evaluation episodes, one success and one
failure of each kind.

Where a motion is imitated, it is shown beside the policy: on the left in a film, above in a strip.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from etude.core.contracts import Array, BatchEnv
from etude.core.errors import UsageError
from etude.envs.mujoco import offscreen
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.recorder import Recorder, Recording
from etude.motion import library
from etude.motion.clips import Clip
from etude.planning.recipe import Recipe
from etude.reports.fresh import FreshEpisodes, load
from etude.robots.humanoid import CAMERA, CONTROL_RATE, humanoid
from etude.rollout.group import evaluate

SIZE = (480, 360)
"""Width and height of a film."""
STRIP_SIZE = (300, 400)
"""Of each picture in a strip."""
CLIP_SIZE = (260, 320)
"""Of each picture in a strip of a clip."""
STRIP_FRAMES = 8
CAPTION = 34
"""Height of the line under a strip's pictures."""
GAP = 4
_LINGER = 1.0
"""Seconds that a film shows the end."""
INK, PAPER = (30, 34, 40), (255, 255, 255)


def check(recipe: Recipe) -> None:
    """Refuse what cannot be filmed, before any episode is played."""
    env = recipe.task.build(recipe.task.num_agents)
    simulated = isinstance(env, MujocoEnv)
    env.close()
    if not simulated:
        raise UsageError(
            "Only tasks on Etude's own MuJoCo simulation can be filmed, such as reach and "
            f"pick-place; this run's environment is of the kind '{recipe.task.kind}'. Leave out "
            "--video."
        )
    check_tools()


def check_tools() -> None:
    """Refuse to film where that is not possible, before any episode is played."""
    _ffmpeg()
    offscreen.backend()


def _ffmpeg() -> Any:
    try:
        return importlib.import_module("imageio_ffmpeg")
    except ImportError as error:
        raise UsageError(
            "Films need imageio-ffmpeg, which is not installed: `pip install etude[video]`."
        ) from error


def _writer(path: Path, rate: float, size: tuple[int, int] = SIZE) -> Any:
    """Its `send` takes the pictures [height, width, 3] of a film, one by one."""
    made = _ffmpeg().write_frames(
        str(path), size, fps=rate, codec="libx264", macro_block_size=2, ffmpeg_log_level="error"
    )
    made.send(None)
    return made


def typical(fresh: FreshEpisodes, kinds: list[str]) -> dict[str, int]:
    """{kind: number of an episode}: of each kind the one of middle length; first of equals."""
    chosen = {}
    for kind in dict.fromkeys(kinds) if kinds else ("episode",):
        where = np.flatnonzero(np.array(kinds) == kind) if kinds else np.arange(fresh.num_episodes)
        order = where[np.argsort(fresh.episodes["length"][where], kind="stable")]
        chosen[kind] = int(order[(len(order) - 1) // 2])
    return chosen


def film(
    recipe: Recipe, path: Path, fresh: FreshEpisodes, kinds: list[str], folder: Path
) -> list[Path]:
    """<kind>.png and <kind>.mp4 in a folder, for each kind of episode that occurred."""
    chosen, made = typical(fresh, kinds), []
    task, recordings = replay(recipe, path, fresh, list(chosen.values()))
    for kind, number in chosen.items():
        name, title = re.sub(r"\W+", "-", kind), f"{kind}, episode {number}"
        made += write(task, recordings[number], title, folder, name)
    return made


def write(env: MujocoEnv, recording: Recording, title: str, folder: Path, name: str) -> list[Path]:
    """<name>.png, a strip of pictures, and <name>.mp4 in a folder: one episode under a title."""
    picture, moving = folder / f"{name}.png", folder / f"{name}.mp4"
    strip(env, recording, title).save(picture, optimize=True)
    _write_film(env, recording, title, moving)
    return [picture, moving]


def replay(
    recipe: Recipe, path: Path, fresh: FreshEpisodes, numbers: list[int]
) -> tuple[MujocoEnv, dict[int, Recording]]:
    """Play episodes again, each with the environments of its group, and record them."""
    policy, places = load(path), {number: fresh.place(number) for number in numbers}
    task = recipe.task.for_evaluation()
    env: BatchEnv = task.build(fresh.envs_per_group, recipe.collector.engine_threads)
    assert isinstance(env, MujocoEnv)
    recordings: dict[int, Recording] = {}
    for group in sorted({place[0] for place in places.values()}):
        wanted = {n: (env_id, episode) for n, (g, env_id, episode) in places.items() if g == group}
        recorder = Recorder(env, wanted.values())
        last = max(episode for _, episode in wanted.values())
        evaluate(recorder, policy, last + 1, fresh.group_key(group), fresh.stochastic)
        recorder.close()
        recordings |= {n: recorder.recordings[place] for n, place in wanted.items()}
    return env, recordings


def moments(recording: Recording, num_positions: int) -> list[int]:
    """Steps to show: even in time and movement, so that a long standstill is no whole strip.

    num_positions: the model's nq.
    """
    # The clock is the first number of a state, positions come after it.
    positions = np.array(recording.states)[:, 1 : 1 + num_positions]
    moved = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    share = np.full(len(moved), 0.5 / max(len(moved), 1))
    if moved.sum() > 0:
        share += 0.5 * moved / moved.sum()
    passed = np.concatenate([[0.0], np.cumsum(share)])
    steps = np.interp(np.linspace(0.0, passed[-1], STRIP_FRAMES), passed, np.arange(len(passed)))
    return [int(step) for step in steps.round()]


def figures(recording: Recording, step: int, num_positions: int) -> list[Array]:
    """What to show of a step, states [n]: the motion that is imitated, if any, and the policy."""
    state = recording.states[step]
    if not recording.references:
        return [state]
    reference = state.copy()
    reference[1 : 1 + num_positions] = recording.references[step]
    return [reference, state]


def strip(env: MujocoEnv, recording: Recording, title: str) -> Image.Image:
    """Pictures side by side over the whole episode, each with its step; the title above."""
    positions, targets = env.simulation.model.nq, recording.targets
    steps = moments(recording, positions)
    title += "; above the motion that it imitates" if recording.references else ""
    with offscreen.Renderer(decorated(env), env.task.camera, *STRIP_SIZE, fine=2) as camera:
        pictures = [
            [camera.picture(state, targets[step]) for state in figures(recording, step, positions)]
            for step in steps
        ]
    return _sheet(pictures, [f"step {step}" for step in steps], title)


def _sheet(columns: list[list[Array]], captions: list[str], title: str) -> Image.Image:
    """Columns of pictures [height, width, 3] side by side, a caption below each, a title above."""
    height, width, _ = columns[0][0].shape
    tall = height * len(columns[0])
    sheet = Image.new("RGB", (len(columns) * (width + GAP) - GAP, tall + 2 * CAPTION), color=PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=CAPTION - 10)
    pen.text((8, CAPTION // 2), title, INK, font, anchor="lm")
    for index, (column, caption) in enumerate(zip(columns, captions, strict=True)):
        left = index * (width + GAP)
        for line, picture in enumerate(column):
            sheet.paste(Image.fromarray(picture), (left, CAPTION + line * height))
        middle = (left + width // 2, CAPTION + tall + CAPTION // 2)
        pen.text(middle, caption, INK, font, anchor="mm")
    return sheet


def _write_film(env: MujocoEnv, recording: Recording, title: str, path: Path) -> None:
    """An mp4 in the speed of the simulation."""
    model = decorated(env)
    rate = 1.0 / env.dt
    last, wide = len(recording.states) - 1, len(figures(recording, 0, model.nq))
    film = _writer(path, rate, (SIZE[0] * wide, SIZE[1]))
    with offscreen.Renderer(model, env.task.camera, *SIZE) as camera:
        for step, target in enumerate(recording.targets):
            captions = ["reference", f"{title}, step {step} of {last}"][-wide:]
            pictures = [
                _captioned(camera.picture(state, target), caption)
                for state, caption in zip(figures(recording, step, model.nq), captions, strict=True)
            ]
            for _ in range(1 + int(_LINGER * rate) * (step == last)):
                film.send(np.concatenate(pictures, axis=1))
    film.close()


def _captioned(picture: Array, text: str) -> Array:
    image = Image.fromarray(picture)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    place = (8, SIZE[1] - 24)
    pen.rectangle(pen.textbbox(place, text, font), fill=PAPER)
    pen.text(place, text, INK, font)
    return np.asarray(image)


def clip_strip(clip: Clip, seconds: float) -> Image.Image:
    """Pictures of a clip side by side, even in time, each with its moment; the name above."""
    model = humanoid()
    states = _clip_states(model, clip, seconds)
    moments = np.linspace(0, len(states) - 1, STRIP_FRAMES).round().astype(int)
    title = f"{clip.name}: {clip.seconds:.2f} s, {'loops' if clip.loops else 'plays once'}"
    with offscreen.Renderer(model, CAMERA, *CLIP_SIZE, fine=2) as camera:
        pictures = [[camera.picture(states[moment])] for moment in moments]
    return _sheet(pictures, [f"{moment / CONTROL_RATE:.2f} s" for moment in moments], title)


def clip_film(clip: Clip, seconds: float, path: Path) -> None:
    """An mp4 of a clip in real time."""
    model = humanoid()
    film = _writer(path, CONTROL_RATE)
    with offscreen.Renderer(model, CAMERA, *SIZE, fine=2) as camera:
        for state in _clip_states(model, clip, seconds):
            film.send(camera.picture(state))
    film.close()


def _clip_states(model: mujoco.MjModel, clip: Clip, seconds: float) -> Array:
    """[frames, n]: the clip at the control rate, as states that a camera draws."""
    count = max(2, round(seconds * CONTROL_RATE) + 1)
    poses = library.build((clip,), CONTROL_RATE, count).frames.pose[:count]
    kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    data, states = mujoco.MjData(model), np.empty((len(poses), mujoco.mj_stateSize(model, kind)))
    for pose, state in zip(poses, states, strict=True):
        data.qpos[:] = pose
        mujoco.mj_getState(model, data, state, kind)
    return states
