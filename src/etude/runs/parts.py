"""One half of a checkpoint: arrays, a JSON document, and a sealed manifest that names both.

`policy/` is all that is needed to act, `training/` all that is needed to go on. A part is read
only after every size and SHA-256 has been checked, and holds nothing but the files listed here.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from etude.core.errors import Damaged, EtudeError
from etude.core.trees import Tree, is_array, leaves
from etude.runs import files
from etude.runs.documents import Malformed, assemble, decode_json, encode_json, plain

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.safetensors"
DOCUMENTS = {"policy": "contract.json", "training": "state.json"}
FILES = {part: (ARRAYS, document, MANIFEST) for part, document in DOCUMENTS.items()}
"""The files of each part."""
MAX_MANIFEST = 1 << 16
MAX_DOCUMENT = {"policy": 1 << 20, "training": 1 << 24}
"""Bytes of JSON: a thousand times what there is, and parsed within seconds."""

PartName = Literal["policy", "training"]


class DamagedCheckpoint(Damaged):
    """A checkpoint that is not what was saved; says which file and what is wrong with it."""

    def __init__(self, path: Path, wrong: str) -> None:
        super().__init__(path, f"Damaged checkpoint: {path} {wrong}.")
        self.wrong = wrong


class UnknownFormat(DamagedCheckpoint):
    """An intact checkpoint of another format version: refused, but not set aside."""


@dataclass(frozen=True)
class Part:
    """What goes into one half, ready to be written; everything that can be refused has been."""

    name: PartName
    arrays: dict[str, Any]
    document: bytes

    @cached_property
    def layout(self) -> Any:
        from etude.runs import tensors

        return tensors.layout(self.arrays)

    def num_bytes(self, step: int = 10**10) -> int:
        """Bytes on disk, known without writing: hashes have a fixed length."""
        sizes = (self.layout.size, len(self.document))
        names = (ARRAYS, DOCUMENTS[self.name])
        listed = {n: files.Written(s, "0" * 64) for n, s in zip(names, sizes, strict=True)}
        pins = "0" * 64 if self.name == "training" else None
        return sum(sizes) + len(_manifest(self.name, step, listed, pins))

    def write(self, folder: Path, step: int, pins: str | None = None) -> str:
        """Write every file, the manifest last, all fsynced; returns the manifest's SHA-256."""
        from etude.runs import tensors

        files.new_folder(folder)
        document = DOCUMENTS[self.name]
        listed = {
            ARRAYS: files.write_file(folder / ARRAYS, tensors.chunks(self.arrays, self.layout)),
            document: files.write_file(folder / document, [self.document]),
        }
        manifest = _manifest(self.name, step, listed, pins)
        written = files.write_file(folder / MANIFEST, [manifest])
        files.fsync_folder(folder)
        return written.sha256


def policy_part(arrays: Tree, contract: Tree) -> Part:
    """The deployable half. The first tree holds arrays only; all else is the contract's."""
    flat = dict(leaves(arrays))
    for path, leaf in flat.items():
        if not is_array(leaf) and leaf != {}:
            raise TypeError(f"'{path}' is not an array; it belongs into the policy's contract")
    return _ready(Part("policy", flat, encode_json(plain(contract, "contract"))))


def training_part(state: Tree) -> Part:
    """The half that only a resume needs: arrays by path, all other leaves as JSON by path."""
    flat = dict(leaves(state))
    arrays = {path: leaf for path, leaf in flat.items() if is_array(leaf)}
    rest = {path: plain(leaf, path) for path, leaf in flat.items() if path not in arrays}
    return _ready(Part("training", arrays, encode_json(rest)))


def _ready(part: Part) -> Part:
    assemble(dict.fromkeys(part.arrays))  # a tree too deep to be read back is refused here
    part.layout  # noqa: B018  types that cannot be stored are refused before the disk is touched
    if len(part.document) > MAX_DOCUMENT[part.name]:
        raise TypeError(f"{len(part.document):,} bytes of JSON are more than a checkpoint can hold")
    return part


def _manifest(
    part: str, step: int, listed: dict[str, files.Written], pins: str | None = None
) -> bytes:
    content: Tree = {
        "format": FORMAT,
        "part": part,
        "step": step,
        "files": {name: file._asdict() for name, file in listed.items()},
    }
    if pins is not None:
        content["policy_manifest_sha256"] = pins
    return encode_json({**content, "seal": _seal(content)})


def _seal(content: Tree) -> str:
    """Makes any changed bit of a manifest visible, also where no other file pins it."""
    return hashlib.sha256(encode_json(content)).hexdigest()


@dataclass(frozen=True)
class CheckedPart:
    """A part on disk whose manifest is sound; its files are verified when they are opened."""

    folder: Path
    manifest: Tree
    manifest_sha256: str

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def verify(self) -> None:
        """Check size and SHA-256 of every file."""
        for name in self.manifest["files"]:
            with self._verified(name):
                pass

    def has_sizes(self) -> bool:
        """Whether every file is there and has its size."""
        try:
            found = {n: (self.folder / n).lstat().st_size for n in self.manifest["files"]}
        except OSError:
            return False
        return all(size == self._size(name) for name, size in found.items())

    def examine(self) -> dict[Path, str]:
        """What is wrong with each file, "" for one that is whole."""
        found = {self.folder / MANIFEST: ""}
        for name in self.manifest["files"]:
            try:
                with self._verified(name):
                    found[self.folder / name] = ""
            except DamagedCheckpoint as error:
                found[error.path] = error.wrong
        return found

    def read(self) -> tuple[dict[str, Any], Tree]:
        """({path: array}, document), parsed only after all hashes were found right."""
        from etude.runs import tensors

        with self._verified(ARRAYS) as arrays_file:
            document = self.read_document()
            with _blamed(self.folder / ARRAYS):
                arrays = tensors.read(arrays_file, self._size(ARRAYS))
                assemble(dict.fromkeys(arrays))
        return arrays, document

    def read_document(self) -> Tree:
        """The document alone, parsed after its hash was found right."""
        name = DOCUMENTS[str(self.manifest["part"])]
        with self._verified(name) as document_file, _blamed(self.folder / name):
            if self._size(name) > (most := MAX_DOCUMENT[str(self.manifest["part"])]):
                raise Malformed(f"is larger than {most:,} bytes")
            return decode_json(document_file.read(self._size(name)))

    def _size(self, name: str) -> int:
        return int(self.manifest["files"][name]["size"])

    @contextmanager
    def _verified(self, name: str) -> Iterator[BinaryIO]:
        """The file, rewound, once its bytes are the ones the manifest names."""
        path, sha = self.folder / name, hashlib.sha256()
        with _open(path) as stream:
            found, expected = os.fstat(stream.fileno()).st_size, self._size(name)
            if found != expected:
                raise DamagedCheckpoint(path, f"has {found} bytes instead of {expected}")
            with _blamed(path):
                while block := stream.read(files.BLOCK):
                    sha.update(block)
                stream.seek(0)
            if sha.hexdigest() != self.manifest["files"][name]["sha256"]:
                raise DamagedCheckpoint(path, "does not have the SHA-256 it was saved with")
            yield stream


def check_part(folder: Path, part: PartName) -> CheckedPart:
    """Look at a part's file list and manifest, without opening anything the manifest names."""
    path = folder / MANIFEST
    names = folder_names(folder)
    wanted = {MANIFEST, ARRAYS, DOCUMENTS[part]}
    if names != wanted:
        wrong = sorted(names - wanted) or sorted(wanted - names)
        verb = "should not be there" if names - wanted else "is missing"
        raise DamagedCheckpoint(folder / wrong[0], verb)
    manifest, data = _sealed_manifest(path)
    content = {name: value for name, value in manifest.items() if name != "seal"}
    if content.get("format") != FORMAT:
        version = content.get("format")
        raise UnknownFormat(path, f"has format {version!r}; this Etude reads format {FORMAT}")
    _check_content(path, content, part)
    return CheckedPart(folder, manifest, hashlib.sha256(data).hexdigest())


def has_seal(folder: Path) -> bool:
    """Whether a part's manifest is one that a save has sealed, whatever became of its files."""
    try:
        manifest, _ = _sealed_manifest(folder / MANIFEST)
    except EtudeError:
        return False
    return manifest.get("part") in DOCUMENTS


def _sealed_manifest(path: Path) -> tuple[Tree, bytes]:
    """A manifest whose seal is right, and its bytes."""
    with _open(path) as stream, _blamed(path):
        data = stream.read(MAX_MANIFEST + 1)
        if len(data) > MAX_MANIFEST:
            raise Malformed("is too large for a manifest")
        manifest = decode_json(data)
    content = {name: value for name, value in manifest.items() if name != "seal"}
    if manifest.get("seal") != _seal(content) or data != encode_json(manifest):
        raise DamagedCheckpoint(path, "was changed after it was written")
    return manifest, data


def folder_names(folder: Path) -> set[str]:
    """The names in a real folder; a symlink is refused, since it could lead anywhere."""
    with _blamed(folder):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise Malformed("is not a folder")
        return set(os.listdir(folder))


def _check_content(path: Path, content: Tree, part: PartName) -> None:
    expected = {"format", "part", "step", "files"}
    if part == "training":
        expected.add("policy_manifest_sha256")
    if set(content) != expected or content["part"] != part:
        raise DamagedCheckpoint(path, f"is not the manifest of a {part} part")
    if type(content["step"]) is not int or content["step"] < 0:
        raise DamagedCheckpoint(path, "names no step")
    listed = content["files"]
    if not isinstance(listed, dict) or set(listed) != {ARRAYS, DOCUMENTS[part]}:
        raise DamagedCheckpoint(path, "lists other files than a checkpoint has")
    for name, file in listed.items():
        if not isinstance(file, dict) or set(file) != {"size", "sha256"}:
            raise DamagedCheckpoint(path, f"describes {name} wrongly")
        if type(file["size"]) is not int or file["size"] < 0 or not isinstance(file["sha256"], str):
            raise DamagedCheckpoint(path, f"describes {name} wrongly")


def _open(path: Path) -> BinaryIO:
    """Open a regular file for reading; not a symlink, and not a pipe that would block forever."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedCheckpoint(path, "is not a regular file")
    return os.fdopen(fd, "rb")


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Name the file in whatever goes wrong while it is read."""
    try:
        yield
    except Malformed as error:
        raise DamagedCheckpoint(path, str(error)) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> EtudeError:
    """Damage, unless it is about rights: those must not get a sound checkpoint set aside."""
    wrongs = {
        errno.ENOENT: "is missing",
        errno.ENOTDIR: "is missing",
        errno.ELOOP: "is a symlink",
        errno.EIO: "cannot be read from the disk",
        errno.ENXIO: "is not a regular file",
        errno.EISDIR: "is not a regular file",
    }
    if error.errno in wrongs:
        return DamagedCheckpoint(path, wrongs[error.errno])
    return files.DiskFault(f"Could not read {path}: {error.strerror}.", error.errno)
