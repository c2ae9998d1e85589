"""Moving pictures of README and gallery: `python docs/images/draw_films.py [RUN of imitate-walk]`.

The quadruped's and the arm's policies come with the package. The humanoid's is trained where
no run is given, which takes minutes. Each film is cut to a few seconds and made small.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageSequence

from etude.cli.main import main as etude

HERE = Path(__file__).parent
SIZE, SECONDS, FRAMES_PER_SECOND = (400, 225), 5.0, 15
DEMOS = {"walk-go1": ["--command", "0.8", "0", "0.3"], "pick-place": [], "reach": []}


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


def main(runs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, options in DEMOS.items():
            film = Path(scratch) / f"{name}.webp"
            etude(["demo", name, "--film", str(film), "--seconds", str(SECONDS), *options])
            small(film, HERE / f"{name}.webp")
        run = Path(runs[0] if runs else f"{scratch}/run")
        if not runs:
            etude(["train", "imitate-walk", "--folder", str(run)])
        etude(["eval", str(run), "--episodes", "4", "--video", "--small"])
        films = sorted(run.glob("evaluations/*/*success*.webp"), key=lambda p: p.stat().st_mtime)
        small(films[-1], HERE / "imitate-walk.webp")


if __name__ == "__main__":
    main(sys.argv[1:])
