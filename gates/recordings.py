"""Demonstrations of pick-and-place, successes and failures, for gates that learn from them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def record(folder: Path, episodes: int, image_size: int = 0) -> None:
    """Make a dataset by the real command; a size of 0 pixels records no pictures."""
    command = ["data", "record", "pick-place", str(folder), "--episodes", str(episodes)]
    command += ["--image-size", str(image_size)]
    subprocess.run([sys.executable, "-m", "etude", *command], check=True)
