"""Tables of sentences and their vectors, made by anybody's text encoder: npz, csv or parquet."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.experience.store.labels import MOST_NUMBERS

_MOST_BYTES = 1 << 30


def read_embeddings(path: Path) -> dict[str, list[float]]:
    """{sentence: vector}, float32 numbers, of a file.

    npz: arrays "sentences" [n] and "vectors" [n, size]. csv: a sentence, then its numbers, in every
    row; a first row without numbers is a heading. parquet: columns "sentence" and "vector".
    """
    readers = {".npz": _from_npz, ".csv": _from_csv, ".parquet": _from_parquet}
    if path.suffix not in readers:
        raise UsageError(f"{path} is no table of embeddings: give a .npz, .csv or .parquet file.")
    if not path.is_file():
        raise UsageError(f"There is no file {path}; check the path.")
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"{path} is larger than 1 GiB, too large for a table of sentences.")
    try:
        sentences, vectors = readers[path.suffix](path)
        return _checked([str(each) for each in sentences], np.asarray(vectors, np.float32))
    except (ValueError, KeyError, OSError, TypeError, zipfile.BadZipFile) as error:
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} cannot be read as a table of embeddings: {said}.") from error


def _checked(sentences: list[str], vectors: Array) -> dict[str, list[float]]:
    if vectors.ndim != 2 or len(vectors) != len(sentences) or not len(sentences):
        raise ValueError("it does not have one vector for every sentence, all of one size")
    if not 1 <= vectors.shape[1] <= MOST_NUMBERS or not np.isfinite(vectors).all():
        raise ValueError(f"vectors are 1 to {MOST_NUMBERS:,} finite numbers")
    if len(set(sentences)) < len(sentences):
        raise ValueError("it has a sentence twice")
    return dict(zip(sentences, vectors.tolist(), strict=True))


def _from_npz(path: Path) -> tuple[Iterable[Any], Any]:
    with np.load(path) as arrays:
        return arrays["sentences"], arrays["vectors"]


def _from_csv(path: Path) -> tuple[Iterable[Any], Any]:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.reader(stream) if row]
    if rows and not _is_number(rows[0][-1]):
        del rows[0]
    return [row[0] for row in rows], [[float(x) for x in row[1:]] for row in rows]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _from_parquet(path: Path) -> tuple[Iterable[Any], Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow to be read: pip install 'etude[data]'.") from error
    table = pyarrow.parquet.read_table(path, columns=["sentence", "vector"])
    return table["sentence"].to_pylist(), table["vector"].to_pylist()
