"""Pictures that environments of other packages draw of themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.imports import describe

FILM_RATE = 30.0
"""Steps of a second, of an environment that does not say its `render_fps`."""


def rendered(render: Callable[[], Any], name: str) -> Array:
    """[height, width, 3] uint8 from a `render`, or one sentence about why there is none."""
    # Pictures need no window: SDL, which many draw with, would look for a screen.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    try:
        picture: Array = np.asarray(render())
    except Exception as error:  # someone else's code may fail in any way
        raise UsageError(f"'{name}' cannot be drawn: {describe(error)}.") from error
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise UsageError(
            f"'{name}' cannot be drawn: its render gives no picture [height, width, 3] of bytes "
            "in the mode rgb_array."
        )
    return picture
