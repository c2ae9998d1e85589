"""Bundles: the shared files of a run in a folder or a tar, with a sealed index.

    README.md         the card: results, versions, licence, how to repeat it
    bundle.json       size and SHA-256 of every other file, the run's fingerprint, and a seal
    recipe.yaml  manifest.json  metrics.jsonl
    policy/           arrays.safetensors  contract.json  manifest.json
    onnx/             what `etude export` writes
    evaluation/       episodes.csv  report.txt  summary.json, films

Bundles are read as untrusted data: links and unlisted files are not opened, and every file must
have the format of its name.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.runs import files, onnx_files, tensors
from etude.runs.documents import SEAL, Malformed, decode_json, encode_sealed

FORMAT = 1
INDEX, CARD, RECIPE, MANIFEST, METRICS = (
    *("bundle.json", "README.md", "recipe.yaml", "manifest.json", "metrics.jsonl"),
)
POLICY, ONNX, EVALUATION = "policy", "onnx", "evaluation"
TAR = ".tar"
_NAMES = re.compile(
    r"README\.md|recipe\.yaml|manifest\.json|metrics\.jsonl"
    r"|policy/(arrays\.safetensors|contract\.json|manifest\.json)"
    r"|onnx/(policy\.onnx|policy\.json|replay\.safetensors|scene\.xml)"
    r"|evaluation/(episodes\.csv|motions\.csv|report\.txt|summary\.json"
    r"|[\w-]{1,80}\.(png|mp4|webp|gif))"
)
"""All possible files of a bundle except its index."""
_NOT_OURS = {".git", ".gitattributes", ".cache"}
"""Files of git and the hub in a repository, which are never opened."""
_BEGINNINGS = {
    ".onnx": (0, b"\x08"),
    ".png": (0, b"\x89PNG\r\n\x1a\n"),
    ".mp4": (4, b"ftyp"),
    ".webp": (8, b"WEBP"),
    ".gif": (0, b"GIF8"),
}
_TEXTS = {".md", ".json", ".jsonl", ".yaml", ".csv", ".txt", ".xml"}
MAX_TEXT = 1 << 26
_MAX_INDEX, _MAX_ENTRIES, _MAX_HEADER = 1 << 18, 1024, 1 << 16
_MAX_TOTAL = 1 << 31
"""Most bytes of all files: a policy of 10^8 parameters, its ONNX file and films."""
_MAX_BYTES = {".safetensors": 1 << 29, ".onnx": onnx_files.MAX_BYTES, ".json": 1 << 22}
"""Most bytes of a file by its suffix; texts have MAX_TEXT, other files _MAX_TOTAL."""


@dataclass(frozen=True)
class Examined:
    """Result of reading all files of a bundle."""

    index: Tree = field(default_factory=dict)
    """Contents of bundle.json without its seal; {} if it is damaged."""
    sha256: str = ""
    """SHA-256 of bundle.json, and so of the whole bundle."""
    wrong: dict[str, str] = field(default_factory=dict)
    """{file: its fault}, as the end of the sentence "<file> ..."."""

    @property
    def num_bytes(self) -> int:
        return sum(file["bytes"] for file in self.index["files"].values())


def seal(folder: Path, about: Tree) -> Examined:
    """Write the index of the files in a folder; about: further fields of it."""
    listed = {}
    found, wrong = _found(folder)
    for name, words in wrong.items():
        raise EtudeError(f"{name} {words}: it cannot be part of a bundle.")
    for name in sorted(found):
        try:
            size, sha256 = _described(folder / name)
        except (Malformed, OSError) as error:
            raise EtudeError(f"{name} {_words(error)}: it cannot be part of a bundle.") from error
        listed[name] = {"bytes": size, "sha256": sha256}
    content = {"format": FORMAT, **about, "files": listed}
    written = files.write_file(folder / INDEX, [encode_sealed(content)])
    try:
        index = _index(_read(folder / INDEX, _MAX_INDEX))
    except Malformed as error:
        raise EtudeError(f"{INDEX} {error}: this cannot be bundled.") from error
    return Examined(index, written.sha256)


def is_bundle(path: Path) -> bool:
    """Whether a path is a bundle, intact or not."""
    return os.path.lexists(path / INDEX) or (path.suffix == TAR and path.is_file())


@contextmanager
def opened(path: Path, scratch: Path) -> Iterator[Path]:
    """Open the bundle at a path as a folder; a tar is unpacked into the new folder `scratch`."""
    if not path.exists():
        raise UsageError(f"There is no bundle at {path}; check the path.")
    if path.is_dir():
        if not is_bundle(path):
            raise UsageError(
                f"{path} is not a bundle: it has no {INDEX}. `etude bundle RUN` makes one of a run."
            )
        yield path
        return
    unpack(path, scratch)
    yield scratch


def examine(folder: Path) -> Examined:
    """Read every byte of a bundle's folder, and compare it with the index."""
    found, wrong = _found(folder)
    if INDEX not in found:
        return Examined(wrong={INDEX: "is missing", **wrong})
    try:
        data = _read(folder / INDEX, _MAX_INDEX)
        index = _index(data)
    except (Malformed, OSError) as error:
        return Examined(wrong={INDEX: _words(error), **wrong})
    for name, file in index["files"].items():
        if name not in found and name not in wrong:
            wrong[name] = "is missing"
        elif name in found:
            try:
                _check(folder / name, file)
            except (Malformed, OSError) as error:
                wrong[name] = _words(error)
    for name in found - index["files"].keys() - {INDEX}:
        wrong[name] = "is not part of the bundle; remove it"
    return Examined(index, hashlib.sha256(data).hexdigest(), dict(sorted(wrong.items())))


def _found(folder: Path) -> tuple[set[str], dict[str, str]]:
    """(names of the regular files in a folder, {other entry: its fault})."""
    found: set[str] = set()
    wrong: dict[str, str] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(folder / inside) as entries:
            for entry in entries:
                name = f"{inside}{entry.name}"
                if name in _NOT_OURS:
                    continue
                if entry.is_symlink():
                    wrong[name] = "is a link, and nothing is opened through one"
                elif entry.is_dir(follow_symlinks=False):
                    if name in (POLICY, ONNX, EVALUATION):
                        waiting.append(f"{name}/")
                    else:
                        wrong[name] = "is not part of the bundle; remove it"
                elif entry.is_file(follow_symlinks=False):
                    found.add(name)
                else:
                    wrong[name] = "is not a regular file"
                if len(found) + len(wrong) > _MAX_ENTRIES:
                    raise EtudeError(
                        f"{folder} has more than {_MAX_ENTRIES:,} files: it is not a bundle of "
                        "Etude."
                    )
    return found, wrong


def _index(data: bytes) -> Tree:
    """Decode bundle.json and verify its seal."""
    document = decode_json(data)
    content = {name: value for name, value in document.items() if name != SEAL}
    if data != encode_sealed(content):
        raise Malformed("was changed after it was written")
    if content.get("format") != FORMAT:
        raise Malformed(f"has another format than {FORMAT}, which this version of Etude reads")
    listed = content.get("files")
    if not isinstance(listed, dict) or not all(map(_is_file, listed.values())):
        raise Malformed("lists no files with their sizes and hashes")
    for name in sorted(listed):
        if not _NAMES.fullmatch(name):
            raise Malformed(f"lists {name[:100]!r}, which is not a file of a bundle")
    if sum(file["bytes"] for file in listed.values()) > _MAX_TOTAL:
        raise Malformed(f"lists files of more than {_MAX_TOTAL >> 30} GiB")
    for name in (CARD, RECIPE, MANIFEST, f"{POLICY}/manifest.json"):
        if name not in listed:
            raise Malformed(f"does not list {name}")
    return content


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"bytes", "sha256"}
        and type(entry["bytes"]) is int
        and entry["bytes"] >= 0
        and isinstance(entry["sha256"], str)
    )


def _check(path: Path, listed: Tree) -> None:
    """Raise `Malformed` if a file is not the listed one, or not of the format of its name."""
    size = path.lstat().st_size
    if size != listed["bytes"]:
        raise Malformed(f"has {size:,} bytes instead of {listed['bytes']:,}")
    _described(path, listed["sha256"])


def _described(path: Path, expected: str | None = None) -> tuple[int, str]:
    """Read a file once; returns size and SHA-256.

    Raises `Malformed` if its hash is not the expected one, or its format not that of its name.
    """
    sha, text = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    is_text = path.suffix in _TEXTS
    with files.open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        most = _MAX_BYTES.get(path.suffix, MAX_TEXT if is_text else _MAX_TOTAL)
        # Rows are read one by one, so their file may have any size.
        if size > most and path.name != METRICS:
            raise Malformed(f"is larger than {most:,} bytes")
        head = stream.read(16)
        stream.seek(0)
        plain = not head.startswith(b"#!")
        while block := stream.read(files.BLOCK):
            sha.update(block)
            if is_text and plain:
                plain = b"\0" not in block
                try:
                    if not block.isascii() or text.getstate()[0]:
                        text.decode(block)
                except UnicodeDecodeError:
                    plain = False
        if expected is not None and sha.hexdigest() != expected:
            raise Malformed("does not have the SHA-256 it was bundled with")
        if path.suffix == ".safetensors":
            stream.seek(0)
            tensors.read(stream, size)
        elif path.suffix in _BEGINNINGS:
            start, mark = _BEGINNINGS[path.suffix]
            plain = head[start : start + len(mark)] == mark
        if not plain:
            raise Malformed("is not the kind of data that its name says")
        return size, sha.hexdigest()


def read_text(folder: Path, name: str) -> str:
    """Read a text of a verified bundle."""
    return _read(folder / name, MAX_TEXT).decode()


def _read(path: Path, most: int) -> bytes:
    with files.open_regular(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise Malformed(f"is larger than {most:,} bytes")
    return data


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return str(error)


def pack(folder: Path, to: Path) -> None:
    """Write a bundle's folder as a tar: deterministic, without names of users."""
    names = sorted(_found(folder)[0], key=lambda name: (name != CARD, name))
    beside = to.with_name(f".tmp-{to.name}-{os.getpid()}")
    try:
        with tarfile.open(beside, "x", format=tarfile.USTAR_FORMAT) as tar:
            for name in names:
                entry = tarfile.TarInfo(f"{to.stem[:60]}/{name}")
                entry.size = (folder / name).stat().st_size
                with (folder / name).open("rb") as stream:
                    tar.addfile(entry, stream)
        os.replace(beside, to)
    finally:
        files.remove_tree(beside)


class _Member(tarfile.TarInfo):
    """A member of an untrusted tar, whose headers are read after a check of their size."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        extended = self.type not in (*tarfile.REGULAR_TYPES, tarfile.DIRTYPE)
        if self.type == tarfile.GNUTYPE_SPARSE or (extended and self.size > _MAX_HEADER):
            raise Malformed(f"holds {self.name[:100]!r}, which is not a regular file")
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise Malformed("holds a file with holes")


def unpack(path: Path, to: Path) -> None:
    """Unpack a bundle's tar into the new folder `to`.

    The tar is read as a stream; it may contain only regular files with the names of a bundle, in
    one folder.
    """
    files.new_folder(to)
    try:
        if path.stat().st_size > _MAX_TOTAL + (_MAX_ENTRIES << 16):
            raise Malformed(f"has more than {_MAX_TOTAL >> 30} GiB")
        # As a stream: a wrong size of an entry cannot lead back to an earlier one.
        with tarfile.open(path, "r|", tarinfo=_Member) as tar:
            _unpack(tar, to)
    except (tarfile.TarError, Malformed, EOFError, OSError, ValueError, RecursionError) as error:
        wrong = str(error) if isinstance(error, Malformed) else "cannot be read as a tar"
        raise EtudeError(f"{path} {wrong}: it is damaged, or not a bundle of Etude.") from error


def _unpack(tar: tarfile.TarFile, to: Path) -> None:
    seen: set[str] = set()
    for number, member in enumerate(tar):
        if number >= _MAX_ENTRIES:
            raise Malformed(f"holds more than {_MAX_ENTRIES:,} files and folders")
        if member.isdir():
            continue
        name = member.name.removeprefix("./").partition("/")[2]
        if not member.isreg() or member.issparse() or member.size < 0:
            raise Malformed(f"holds {member.name[:100]!r}, which is not a regular file")
        if name != INDEX and not _NAMES.fullmatch(name):
            raise Malformed(
                f"holds {member.name[:100]!r}, which is not a file of a bundle in one folder"
            )
        if name in seen:
            raise Malformed(f"holds {member.name[:100]!r} twice")
        seen.add(name)
        stream = tar.extractfile(member)
        assert stream is not None
        (to / name).parent.mkdir(exist_ok=True)
        files.write_file(to / name, iter(partial(stream.read, files.BLOCK), b""))
