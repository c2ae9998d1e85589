"""The picture of docs/comparing.md: `python docs/images/draw_comparison.py [RUN ...]`.

It shows the given runs, or trains what the page shows: two learning rates, five seeds of each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from etude.cli.main import main as etude

RATES = ("1e-3", "2e-4")


def main(runs: list[str]) -> None:
    """Draw runs; train them first where none are given."""
    with tempfile.TemporaryDirectory() as folder:
        for rate in () if runs else RATES:
            learning = ["--algorithm.learning-rate", rate, "--folder", f"{folder}/{rate}"]
            etude(["train", "reach-short", "--seeds", "5", *learning])
        shown = runs or [f"{folder}/{rate}" for rate in RATES]
        etude(["compare", *shown, "-o", str(Path(__file__).with_name("comparison.png"))])


if __name__ == "__main__":
    main(sys.argv[1:])
