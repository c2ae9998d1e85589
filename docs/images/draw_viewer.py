"""The pictures of `etude data view` in docs/datasets.md: `python docs/images/draw_viewer.py [D]`.

They show the dataset D, or record one of pick-and-place with pictures. Needs Chromium. With `--out
FOLDER` they are written there, with those of a telephone's width.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lib"))

from chromium import Browser
from etude.cli.main import main as etude
from etude.core.limited import Limits
from etude.core.local_web import PageServer
from etude.evaluate.viewer.serving import Viewer
from etude.evaluate.viewer.sources import open_sources

EPISODES, SIZE, NARROW = 40, 84, 420
SHOWN = "episode=4&step=12"
LOADED = (
    "document.querySelectorAll('.curve path').length && "
    "[...document.images].every((image) => image.complete && image.naturalWidth)"
)
PICTURES = {
    "viewer": (1400, 1000, SHOWN, LOADED),
    "viewer-420": (NARROW, 1500, SHOWN, LOADED),
    "viewer-statistics": (1400, 1000, "tab=statistics", "document.querySelector('.histogram')"),
    "viewer-statistics-420": (
        NARROW,
        1200,
        "tab=statistics",
        "document.querySelector('.histogram')",
    ),
}
"""{name: width, height, what is shown, condition that it is drawn}."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", nargs="?", type=Path)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    out = chosen.out or Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        dataset = chosen.dataset
        if dataset is None:
            dataset = Path(folder) / "demonstrations"
            size = ["--image-size", str(SIZE), "--pictures", "png", "--episodes", str(EPISODES)]
            etude(["data", "record", "pick-place-pictures", str(dataset), *size])
            etude(["data", "exclude", str(dataset), "5", "9"])
        viewer = Viewer(dataset.name, open_sources(dataset, None, Limits()))
        with (
            PageServer(viewer.get, viewer.send, None) as server,
            Browser(Path(folder) / "profile") as browser,
        ):
            for name, (width, height, shown, drawn) in PICTURES.items():
                if width == NARROW and chosen.out is None:
                    continue
                browser.resize(width, height)
                browser.open(f"{server.url}#{shown}")
                browser.wait(drawn)
                wide = browser.run("document.documentElement.scrollWidth")
                assert wide <= width, f"{name} is cut: {wide} of {width} pixels"
                browser.picture(out / f"{name}.png")
                print(out / f"{name}.png")


if __name__ == "__main__":
    main()
