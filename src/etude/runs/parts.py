"""The two parts of a checkpoint: arrays, a JSON document, and a sealed manifest of both.

`policy/` is needed to act, `training/` to resume. A part is loaded only after the sizes and hashes
of its files are verified, and contains no other files.
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
"""Most bytes of JSON: a thousand times the usual size, and parsed within seconds."""

PartName = Literal["policy", "training"]


class DamagedCheckpoint(Damaged):
    """A damaged checkpoint; names the file and its fault."""

    def __init__(self, path: Path, wrong: str) -> None:
        super().__init__(path, f"Damaged checkpoint: {path} {wrong}.")
        self.wrong = wrong


class UnknownFormat(DamagedCheckpoint):
    """A checkpoint of another format version, which is not set aside as damaged."""


@dataclass(frozen=True)
class Part:
    """Validated contents of a part, ready to be written."""

    name: PartName
    arrays: dict[str, Any]
    document: bytes

    @cached_property
    def layout(self) -> Any:
        from etude.runs import tensors

        return tensors.layout(self.arrays)

    def num_bytes(self, step: int = 10**10) -> int:
        """Bytes on disk, computed without writing: hashes have a constant length."""
        sizes = (self.layout.size, len(self.document))
        names = (ARRAYS, DOCUMENTS[self.name])
        listed = {n: files.Written(s, "0" * 64) for n, s in zip(names, sizes, strict=True)}
        pins = "0" * 64 if self.name == "training" else None
        return sum(sizes) + len(_manifest(self.name, step, listed, pins))

    def write(self, folder: Path, step: int, pins: str | None = None) -> str:
        """Write and fsync all files, the manifest last; returns the manifest's SHA-256."""
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
    """The part `policy/`; `arrays` has only arrays as leaves."""
    flat = dict(leaves(arrays))
    for path, leaf in flat.items():
        if not is_array(leaf) and leaf != {}:
            raise TypeError(f"'{path}' is not an array; put it into the policy's contract")
    return _ready(Part("policy", flat, encode_json(plain(contract, "contract"))))


def training_part(state: Tree) -> Part:
    """The part `training/`: arrays by path, all other leaves as JSON by path."""
    flat = dict(leaves(state))
    arrays = {path: leaf for path, leaf in flat.items() if is_array(leaf)}
    rest = {path: plain(leaf, path) for path, leaf in flat.items() if path not in arrays}
    return _ready(Part("training", arrays, encode_json(rest)))


def _ready(part: Part) -> Part:
    assemble(dict.fromkeys(part.arrays))  # raises for a tree too deep to be read back
    part.layout  # noqa: B018  raises for types that cannot be stored, before anything is written
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
    """Hash of a manifest's content, which detects any changed bit."""
    return hashlib.sha256(encode_json(content)).hexdigest()


@dataclass(frozen=True)
class CheckedPart:
    """A part on disk with a valid manifest; its files are verified when they are opened."""

    folder: Path
    manifest: Tree
    manifest_sha256: str

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    def verify(self) -> None:
        """Verify size and SHA-256 of all files."""
        for name in self.manifest["files"]:
            with self._verified(name):
                pass

    def has_sizes(self) -> bool:
        """Whether all files exist and have their sizes."""
        try:
            found = {n: (self.folder / n).lstat().st_size for n in self.manifest["files"]}
        except OSError:
            return False
        return all(size == self._size(name) for name, size in found.items())

    def examine(self) -> dict[Path, str]:
        """{file: its fault}, "" for intact files."""
        found = {self.folder / MANIFEST: ""}
        for name in self.manifest["files"]:
            try:
                with self._verified(name):
                    found[self.folder / name] = ""
            except DamagedCheckpoint as error:
                found[error.path] = error.wrong
        return found

    def read(self) -> tuple[dict[str, Any], Tree]:
        """Load ({path: array}, document), after all hashes are verified."""
        from etude.runs import tensors

        with self._verified(ARRAYS) as arrays_file:
            document = self.read_document()
            with _named_in_errors(self.folder / ARRAYS):
                arrays = tensors.read(arrays_file, self._size(ARRAYS))
                assemble(dict.fromkeys(arrays))
        return arrays, document

    def read_document(self) -> Tree:
        """Load the document, after its hash is verified."""
        name = DOCUMENTS[str(self.manifest["part"])]
        with self._verified(name) as document_file, _named_in_errors(self.folder / name):
            if self._size(name) > (most := MAX_DOCUMENT[str(self.manifest["part"])]):
                raise Malformed(f"is larger than {most:,} bytes")
            return decode_json(document_file.read(self._size(name)))

    def _size(self, name: str) -> int:
        return int(self.manifest["files"][name]["size"])

    @contextmanager
    def _verified(self, name: str) -> Iterator[BinaryIO]:
        """Open a file and verify its size and hash."""
        path, sha = self.folder / name, hashlib.sha256()
        with _open(path) as stream:
            found, expected = os.fstat(stream.fileno()).st_size, self._size(name)
            if found != expected:
                raise DamagedCheckpoint(path, f"has {found} bytes instead of {expected}")
            with _named_in_errors(path):
                while block := stream.read(files.BLOCK):
                    sha.update(block)
                stream.seek(0)
            if sha.hexdigest() != self.manifest["files"][name]["sha256"]:
                raise DamagedCheckpoint(path, "does not have the SHA-256 it was saved with")
            yield stream


def check_part(folder: Path, part: PartName) -> CheckedPart:
    """Check the file names and the manifest of a part, without opening its other files."""
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
    """Whether the manifest of a part has a valid seal; its files are not checked."""
    try:
        manifest, _ = _sealed_manifest(folder / MANIFEST)
    except EtudeError:
        return False
    return manifest.get("part") in DOCUMENTS


def _sealed_manifest(path: Path) -> tuple[Tree, bytes]:
    """Load a manifest and verify its seal; returns its bytes too."""
    with _open(path) as stream, _named_in_errors(path):
        data = stream.read(MAX_MANIFEST + 1)
        if len(data) > MAX_MANIFEST:
            raise Malformed("is too large for a manifest")
        manifest = decode_json(data)
    content = {name: value for name, value in manifest.items() if name != "seal"}
    if manifest.get("seal") != _seal(content) or data != encode_json(manifest):
        raise DamagedCheckpoint(path, "was changed after it was written")
    return manifest, data


def folder_names(folder: Path) -> set[str]:
    """The names in a folder; raises for symbolic links."""
    with _named_in_errors(folder):
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
    """Open a regular file; raises for symbolic links, and pipes, which would block."""
    with _named_in_errors(path):
        return files.open_regular(path)


@contextmanager
def _named_in_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as `DamagedCheckpoint` with its name."""
    try:
        yield
    except Malformed as error:
        raise DamagedCheckpoint(path, str(error)) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> EtudeError:
    """A `DamagedCheckpoint`; for missing permissions a `DiskFault`, which sets nothing aside."""
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
