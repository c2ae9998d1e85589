"""Screenshots of docs/comparing.md and docs/sweeps.md, by Chromium without a network:

    python docs/images/draw_pages.py RUN SWEEP

RUN is a run with films (`etude train reach --evaluation.film-every "30000 steps"`), SWEEP the
folder of a sweep.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from etude.cli.main import main

HERE = Path(__file__).parent
WIDTH = 1200
HEIGHTS = {"report.webp": 1250, "sweep.webp": 900}


def screenshot(page: Path, to: Path, height: int) -> None:
    """Write a picture of the upper part of a page."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    png = page.with_suffix(".png")
    flags += ["--hide-scrollbars", "--virtual-time-budget=3000", f"--screenshot={png}"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'profile'}"]
    flags += [f"--window-size={WIDTH},{height}", page.as_uri()]
    subprocess.run(["chromium", *flags], check=True, capture_output=True)
    with Image.open(png) as opened:
        opened.convert("RGB").save(to, quality=80, method=6)
    print(f"{to.name}: {to.stat().st_size // 1024} KiB")


def draw(*targets: str) -> None:
    """Screenshots of the pages of a run and of a sweep."""
    with tempfile.TemporaryDirectory() as scratch:
        for target, (name, height) in zip(targets, HEIGHTS.items(), strict=True):
            page = Path(scratch) / "page.html"
            if code := main(["report", target, "-o", str(page)]):
                raise SystemExit(code)
            screenshot(page, HERE / name, height)


if __name__ == "__main__":
    draw(*sys.argv[1:])
