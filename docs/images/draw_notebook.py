"""The picture of docs/notebooks.md: `python docs/images/draw_notebook.py [NOTEBOOK [PICTURE]]`.

It executes a notebook in a temporary folder, by default the first of docs/notebooks, and takes a
picture of its page in chromium. `--keep FOLDER` keeps the run and the page.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from PIL import Image, ImageChops

HERE = Path(__file__).parent
WIDTH, TALLEST, MARGIN = 1000, 8000, 24
"""Pixels of the page: its width, the most of its height, and what stays below its last line."""
CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--virtual-time-budget=4000"),
)


def page_of(notebook: Path, folder: Path) -> Path:
    """Execute a notebook in a folder; the page with its outputs."""
    content = nbformat.read(notebook, 4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=600, kernel_name="python3", resources=where).execute()
    exporter = HTMLExporter(template_name="lab", embed_images=True)
    exporter.mathjax_url = exporter.require_js_url = exporter.jquery_url = ""
    page = folder / f"{notebook.stem}.html"
    page.write_text(exporter.from_notebook_node(content)[0])
    return page


def photograph(page: Path, picture: Path) -> None:
    """A picture of a whole page, without the empty part below it."""
    with tempfile.TemporaryDirectory() as scratch:
        shot = Path(scratch) / "page.png"
        size = f"--window-size={WIDTH},{TALLEST}"
        options = (size, f"--user-data-dir={scratch}/chromium", f"--screenshot={shot}")
        subprocess.run([*CHROMIUM, *options, page.as_uri()], check=True, capture_output=True)
        with Image.open(shot) as opened:
            whole = opened.convert("RGB")
    empty = Image.new("RGB", whole.size, whole.getpixel((0, whole.height - 1)))
    box = ImageChops.difference(whole, empty).getbbox() or (0, 0, WIDTH, TALLEST)
    whole.crop((0, 0, WIDTH, min(box[3] + MARGIN, TALLEST))).save(picture, quality=82, method=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path, nargs="?")
    parser.add_argument("picture", type=Path, nargs="?", default=HERE / "notebook.webp")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    notebook = given.notebook or HERE.parent / "notebooks/1-train.ipynb"
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        photograph(page_of(notebook, folder.absolute()), given.picture)


if __name__ == "__main__":
    main()
