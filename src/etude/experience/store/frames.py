"""Pictures kept compressed: PNG without loss, or JPEG.

Their bytes are one after the other in a log of their own, `frames-<n>.bin`. In place of a picture a
step has where its bytes begin and how many there are, so that records keep one size.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from etude.core.contracts import Array, ArraySpec, Observations
from etude.experience.store.geometry import OBS
from etude.experience.store.log import DamagedStore, RecordLog

BYTE = np.dtype("u1")
_QUALITY = 95
_MOST = 1 << 28
"""Bytes of one picture: more is a damaged pointer."""


class Frames:
    """The compressed pictures of a store."""

    def __init__(
        self, log: RecordLog, encoded: Mapping[str, str], specs: Mapping[str, ArraySpec]
    ) -> None:
        """encoded: {"obs/<name>": "png" or "jpeg"}."""
        from PIL import Image

        self._image, self._log, self.encoded, self._specs = Image, log, encoded, specs

    def store(self, obs: Observations) -> Observations:
        """obs {name: [T + 1, ...]} with pointers [T + 1, 2] int64 in place of pictures."""
        kept = dict(obs)
        for field, kind in self.encoded.items():
            name, shape = field.removeprefix(OBS), self._specs[field].shape
            pictures = obs[name]
            if pictures.shape[1:] != shape or pictures.dtype != np.uint8:
                raise ValueError(f"{name!r} is {pictures.dtype} {pictures.shape}, not {shape}")
            pointers: Array = np.empty((len(pictures), 2), np.int64)
            for i, picture in enumerate(pictures):
                data = self._encode(picture, kind)
                pointers[i] = self._log.count, len(data)
                self._log.append(np.frombuffer(data, BYTE))
            kept[name] = pointers
        return kept

    def _encode(self, picture: Array, kind: str) -> bytes:
        stream = io.BytesIO()
        image = self._image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture)
        options = {"quality": _QUALITY, "subsampling": 0} if kind == "jpeg" else {}
        image.save(stream, kind.upper(), **options)
        return stream.getvalue()

    def fetch(self, pointers: Array, out: Array) -> None:
        """Put the pictures at `pointers` [n, 2] into `out` [n, height, width, channels]."""
        height, width, channels = out.shape[1:]
        for i, (start, size) in enumerate(pointers.tolist()):
            if not (start >= 0 and 0 < size <= _MOST and start + size <= self._log.count):
                raise self._wrong(f"names a picture at {start:,} that is not there")
            data = self._log.read(start, start + size).tobytes()
            try:
                with self._image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
                    if image.size != (width, height):
                        raise self._wrong(f"has a picture of {image.size} pixels")
                    found = np.asarray(image.convert("L" if channels == 1 else "RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise self._wrong(f"has a picture at {start:,} that cannot be read") from error
            out[i] = found.reshape(out.shape[1:])

    def _wrong(self, what: str) -> DamagedStore:
        return DamagedStore(self._log.folder, what)
