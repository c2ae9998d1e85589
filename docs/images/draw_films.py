"""Moving pictures of README and gallery: `python docs/images/draw_films.py RUNS [RECIPE ...]`.

RUNS is a folder with a run of each recipe in `TRAINED`, RUNS/hopper and so on; a run that is not
there is trained, which takes between two and twenty minutes. The policies of `DEMOS`
come with the package. Each film is cut to a few seconds and made small.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageSequence

from etude.cli.main import main

HERE = Path(__file__).parent
SIZE, SECONDS, FRAMES_PER_SECOND = (400, 225), 5.0, 15
DEMOS = {"walk-go1": ["--command", "0.8", "0", "0.3"], "pick-place": [], "reach": []}
TRAINED = (
    *("walk-go1-rough", "imitate-walk", "imitate-backflip", "amp-walk"),
    *("pick-place-anywhere", "reach-memory", "spread"),
    *("hopper", "halfcheetah", "walker2d", "ant", "seek-pictures"),
    *("cartpole", "pendulum", "reacher", "swimmer", "lunarlander", "bipedalwalker", "humanoid"),
)


def etude(*words: str) -> None:
    """Run a command; where it fails, it has said why."""
    if code := main(words):
        raise SystemExit(code)


def small(film: Path, to: Path) -> None:
    """A film of `SIZE` that repeats for ever."""
    frames, times, now = [], [], 0.0
    with Image.open(film) as opened:
        for frame in ImageSequence.Iterator(opened):
            frame.load()
            times.append(now)
            frames.append(frame.convert("RGB").resize(SIZE, Image.Resampling.LANCZOS))
            now += frame.info["duration"] / 1000.0
    shown = [
        frames[max(i for i, time in enumerate(times) if time <= moment + 1e-6)]
        for moment in (k / FRAMES_PER_SECOND for k in range(int(SECONDS * FRAMES_PER_SECOND)))
        if moment <= times[-1]
    ]
    rest = {"append_images": shown[1:], "duration": 1000 // FRAMES_PER_SECOND, "loop": 0}
    shown[0].save(to, save_all=True, quality=55, method=6, **rest)
    print(f"{to.name}: {len(shown)} frames, {to.stat().st_size // 1024} KiB")


def demo(recipe: str) -> None:
    """The film of a policy that comes with the package."""
    with tempfile.TemporaryDirectory() as scratch:
        film = Path(scratch) / f"{recipe}.webp"
        seconds = ["--seconds", str(SECONDS)]
        etude("demo", recipe, "--film", str(film), *seconds, *DEMOS[recipe])
        small(film, HERE / f"{recipe}.webp")


def trained(recipe: str, run: Path) -> None:
    """The film of a run's best policy: of a success, where the task knows one."""
    if not run.exists():
        etude("train", recipe, "--folder", str(run))
    etude("eval", str(run), "--episodes", "6", "--video", "--small")
    films = [*run.glob("evaluations/*/*.webp")]
    best = [film for film in films if "success" in film.name] or films
    small(max(best, key=lambda film: film.stat().st_mtime), HERE / f"{recipe}.webp")


def draw(runs: str, *recipes: str) -> None:
    for recipe in recipes or (*DEMOS, *TRAINED):
        if recipe in DEMOS:
            demo(recipe)
        else:
            trained(recipe, Path(runs) / recipe)


if __name__ == "__main__":
    draw(*sys.argv[1:])
