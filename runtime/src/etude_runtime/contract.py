"""`policy.json`: what a policy reads, and what was checked of it before anything is run.

An export may come from a stranger: files are hashed, sizes are bounded, and every number is looked
at before memory is taken for it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FORMAT = 1
CONTRACT, ONNX, REPLAY, SCENE = "policy.json", "policy.onnx", "replay.safetensors", "scene.xml"
MOTION = "motion.safetensors"
MOST_BYTES = {CONTRACT: 1 << 22, ONNX: 1 << 30, REPLAY: 1 << 28, SCENE: 1 << 26, MOTION: 1 << 28}
"""Of each file; larger ones are refused before they are read."""
MOST_NUMBERS = 1 << 20
"""Of an observation, an action or a recurrent state."""
MOST_AXES = 4
"""Of a recurrent array."""
MOST_STEPS = 10_000
"""Of a delay or a history."""
DTYPES = {"float32", "int64"}


class ContractError(ValueError):
    """An export, or an input, is not as the contract says; one sentence says where."""


@dataclass(frozen=True)
class Term:
    """A part of an observation, as it is measured."""

    key: str
    """What `Policy.act` calls it."""
    size: int
    """Numbers of one measurement."""
    unit: str
    about: str
    clip: tuple[float, float] | None
    scale: Array
    """[] or [size]: a measurement is clipped and then multiplied by it."""
    history: int
    """The last so many measurements are read, newest first."""
    delay: tuple[int, int]
    """Control steps that measurements were late in training, at least and at most."""
    noise: Array
    """[] or [size]: uniform noise of training, of up to so much either way, in the unit."""

    @property
    def is_plain(self) -> bool:
        """Whether it is read as it is measured."""
        return self.clip is None and bool((self.scale == 1.0).all())


@dataclass(frozen=True)
class Observation:
    """What a policy reads under one name: terms side by side."""

    name: str
    size: int
    delay: tuple[int, int]
    """Of all terms together, on top of their own."""
    history: int
    terms: tuple[Term, ...]
    image: tuple[int, ...] | None = None
    """[height, width, channels] of uint8 where it is a picture, which is its only term."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the network reads."""
        return (self.size,) if self.image is None else self.image


@dataclass(frozen=True)
class Recurrent:
    """An array that a policy hands on from step to step."""

    input: str
    output: str
    shape: tuple[int, ...]
    """Without the leading axis of environments, which is 1."""


@dataclass(frozen=True)
class Output:
    """An action."""

    space: str
    size: int
    dtype: str


@dataclass(frozen=True)
class Contract:
    """`policy.json`, checked."""

    document: dict[str, Any]
    """All of it, as it was written."""
    observations: tuple[Observation, ...]
    recurrent: tuple[Recurrent, ...]
    output: Output

    @property
    def terms(self) -> tuple[Term, ...]:
        """Of all observations, in the order in which they are given."""
        return tuple(term for each in self.observations for term in each.terms)


def read_file(folder: Path, name: str) -> bytes:
    """A file of an export that is not too large."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise ContractError(f"{folder} is no whole export: {name} is missing.")
    size = path.stat().st_size
    if size > MOST_BYTES[name]:
        raise ContractError(
            f"{path} has {size:,} bytes, and at most {MOST_BYTES[name]:,} are read."
        )
    return path.read_bytes()


def load_contract(folder: Path) -> tuple[Contract, dict[str, bytes]]:
    """The contract of an export and its files, whose hashes are right."""
    document = decode(read_file(folder, CONTRACT), CONTRACT)
    if document.get("format") != FORMAT:
        raise ContractError(
            f"{folder / CONTRACT} has format {str(document.get('format'))[:40]}, and this version "
            f"of etude-runtime reads format {FORMAT}."
        )
    listed = document.get("files")
    if not isinstance(listed, dict) or ONNX not in listed or not listed.keys() <= MOST_BYTES.keys():
        raise ContractError(f"{folder / CONTRACT} does not list the files of an export.")
    files = {name: read_file(folder, name) for name in listed}
    for name, data in files.items():
        said = listed[name].get("sha256") if isinstance(listed[name], dict) else None
        if hashlib.sha256(data).hexdigest() != said:
            raise ContractError(
                f"{folder / name} is not the file that {CONTRACT} was written with: copy the "
                "export again."
            )
    return _parse(document), files


def decode(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object without numbers that are not finite."""
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{name} is not valid JSON.") from error
    if not isinstance(document, dict):
        raise ContractError(f"{name} is not a JSON object.")
    return document


def _refuse_constant(text: str) -> float:
    raise ValueError(text)


def _parse(document: dict[str, Any]) -> Contract:
    try:
        observations = tuple(
            _observation(name, each) for name, each in document["observations"].items()
        )
        output, recurrent = document["output"], document["recurrent"]
        contract = Contract(
            document,
            observations,
            tuple(
                Recurrent(str(r["input"]), str(r["output"]), _shape(r["shape"])) for r in recurrent
            ),
            Output(
                str(output["space"]), _count(output["size"], MOST_NUMBERS), str(output["dtype"])
            ),
        )
    except ContractError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ContractError(f"{CONTRACT} is not a contract of Etude's: {error!r}.") from error
    keys = [term.key for term in contract.terms]
    if not keys or len(keys) != len(set(keys)) or contract.output.dtype not in DTYPES:
        raise ContractError(f"{CONTRACT} has no terms, two of one name, or an unknown action.")
    return contract


def _observation(name: str, said: dict[str, Any]) -> Observation:
    history = _count(said["history"], MOST_STEPS)
    terms = tuple(_term(term) for term in said["terms"])
    size = _count(said["size"], MOST_NUMBERS)
    if sum(term.size * term.history for term in terms) * history != size:
        raise ContractError(f"{CONTRACT}: the terms of '{name}' do not add up to {size} numbers.")
    image = None
    if "image" in said:
        image = _shape(said["image"])
        whole = len(image) == 3 and math.prod(image) == size and len(terms) == history == 1
        if not (whole and terms[0].is_plain and terms[0].history == 1):
            raise ContractError(f"{CONTRACT} gives the image '{name}' an impossible shape.")
    return Observation(name, size, _delay(said["delay"]), history, terms, image)


def _term(said: dict[str, Any]) -> Term:
    size, clip = _count(said["size"], MOST_NUMBERS), said["clip"]
    return Term(
        str(said["key"]),
        size,
        str(said["unit"]),
        str(said["about"]),
        None if clip is None else (float(clip[0]), float(clip[1])),
        _numbers(said["scale"], size),
        _count(said["history"], MOST_STEPS),
        _delay(said["delay"]),
        _numbers(said["noise"], size),
    )


def _numbers(value: Any, size: int) -> Array:
    array = np.asarray(value, np.float64)
    if array.shape not in ((), (size,)) or not np.isfinite(array).all():
        raise ContractError(f"{CONTRACT} has a scale or noise that does not fit its term.")
    return array


def _shape(given: Any) -> tuple[int, ...]:
    """Axes whose product is bounded."""
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_AXES:
        raise ContractError(f"{CONTRACT} gives an array an impossible shape.")
    shape = tuple(_count(size, MOST_NUMBERS) for size in given)
    _count(math.prod(shape), MOST_NUMBERS)
    return shape


def _count(value: Any, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ContractError(f"{CONTRACT} has the number {str(value)[:40]} where 1 to {most} fit.")
    return value


def _delay(value: Any) -> tuple[int, int]:
    low, high = value
    if type(low) is not int or type(high) is not int or not 0 <= low <= high <= MOST_STEPS:
        raise ContractError(f"{CONTRACT} has an impossible delay.")
    return low, high


def read_arrays(data: bytes, name: str) -> dict[str, Array]:
    """{name: array} of a safetensors file."""
    types = {"F32": "<f4", "I64": "<i8", "BOOL": "|b1", "U8": "|u1"}
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, 1 << 20):
        raise ContractError(f"{name} is no safetensors file.")
    header, body = decode(data[8 : 8 + length], name), memoryview(data)[8 + length :]
    header.pop("__metadata__", None)
    found = {}
    try:
        for key, entry in header.items():
            dtype, (begin, end) = np.dtype(types[entry["dtype"]]), entry["data_offsets"]
            shape = tuple(_count(n, MOST_NUMBERS) for n in entry["shape"])
            if (
                not 0 <= begin <= end <= len(body)
                or math.prod(shape) * dtype.itemsize != end - begin
            ):
                raise ContractError(
                    f"{name} has an array '{key[:40]}' that does not fit its bytes."
                )
            found[key] = np.frombuffer(body[begin:end], dtype).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"{name} is no safetensors file that Etude wrote.") from error
    return found
