"""Checkpoints that survive kills, full disks and power cuts.

    checkpoints/000000524288/policy/     arrays.safetensors  contract.json  manifest.json
                             training/   arrays.safetensors  state.json     manifest.json
    checkpoints/latest -> 000000524288     or a file with this name, without symbolic links

The manifest of `training/` contains the hash of that of `policy/`: a checkpoint is resumed only if
both verify. A copy of `policy/` alone can be verified too.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

from etude.core.errors import Damaged, EtudeError, UsageError, describe_error, is_out_of_memory
from etude.core.metrics import Best
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


TEMPORARY = ".tmp-"
REPLACED = ".replaced"
DAMAGED = ".damaged"
ASIDE = ".aside"
LATEST = "latest"
_STEP = re.compile(r"[0-9]{12,}")
_STEP_LIKE = re.compile(r"[0-9]{12,}(\.replaced|\.(damaged|aside)(-[0-9]+)?)?")
_MARK = re.compile(r"[a-z][a-z0-9_]*")
_SAVING = re.compile(r"\.tmp-(drop-)?[0-9]{12,}[\w.-]*-[0-9]+")
_MARKING = re.compile(r"\.tmp-[a-z][a-z0-9_]*-[0-9]+")
_WHOLE = tuple(f"{part}/{name}" for part, names in FILES.items() for name in names)
"""All files of a checkpoint."""

Say = Callable[[str], None]


def step_name(step: int) -> str:
    """Folder name of a step, padded so that names sort like numbers."""
    return f"{step:012d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder, or of a link (`latest`) to one."""
    name = resolve_mark(Path(path)).resolve().name
    if not _STEP.fullmatch(name):
        raise UsageError(f"{path} is not a checkpoint; its name should be a step of 12 digits.")
    return int(name)


def save(folder: Path, step: int, policy: tuple[Tree, Tree], training: Tree | None) -> Path:
    """Save `policy` (arrays, contract) and `training` as a step; returns its folder.

    At any time, the previous or the new checkpoint is complete on disk. Without `training`, only
    the policy is saved, `latest` stays, and a resumable checkpoint of this step is not changed.
    """
    whole = policy_part(*policy), None if training is None else training_part(training)
    target = folder / step_name(step)
    if training is None and os.path.lexists(target / "training"):
        return target
    temporary = files.free_path(folder / f"{TEMPORARY}{target.name}-{os.getpid()}")
    try:
        if not folder.is_dir():
            files.make_folder(folder)
        files.new_folder(temporary)
        pins = whole[0].write(temporary / "policy", step)
        if whole[1] is not None:
            whole[1].write(temporary / "training", step, pins)
        files.fsync_folder(temporary)
        _put_in_place(temporary, target)
        if whole[1] is not None:
            files.replace_link(folder / LATEST, target.name)
        files.remove_files(_replaced(target), _WHOLE)
    except Exception as error:
        # Free the space of the incomplete checkpoint on a full disk.
        with suppress(files.DiskFault):
            files.remove_files(temporary, _WHOLE)
        if not isinstance(error, files.DiskFault):
            raise
        message = f"The checkpoint of step {step} was not saved; those before it are untouched."
        raise files.DiskFault(f"{message} {error}", error.errno) from error
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename the finished folder to its step, after moving aside an existing one.

    A folder cannot be renamed over another. Between the two renames, `newest_verified` finds the
    old checkpoint under its temporary name.
    """
    replaced = _replaced(target)
    try:
        if os.path.lexists(target):
            files.remove_files(replaced, _WHOLE)
            files.rename(target, replaced)
            files.fsync_folder(target.parent)
        files.rename(temporary, target)
        files.fsync_folder(target.parent)
    except files.DiskFault:
        if replaced.exists() and not target.exists():
            files.rename(replaced, target)
        raise


def _replaced(target: Path) -> Path:
    return target.with_name(target.name + REPLACED)


def exists(folder: Path, step: int) -> bool:
    """Whether a checkpoint of this step exists, resumable or not."""
    return (folder / step_name(step)).is_dir()


def checkpoint_bytes(policy: tuple[Tree, Tree], training: Tree) -> int:
    """Bytes on disk of a save of these trees; tensors may be on the meta device."""
    return policy_part(*policy).num_bytes() + training_part(training).num_bytes()


def header_bytes(tree: Tree) -> int:
    """Bytes of the header of a tree's arrays, at most `tensors.MAX_HEADER`."""
    return len(training_part(tree).layout.header)


def _existing(path: Path) -> Path:
    """The folder behind a path given by a user; the only place that follows symbolic links."""
    path = resolve_mark(Path(path))
    if not path.exists():
        raise UsageError(f"There is no checkpoint at {path}; check the path.")
    return path.resolve()


def load_policy_parts(path: Path) -> tuple[Tree, Tree]:
    """Verify and load (arrays, contract) of a checkpoint, or of a copied `policy/` folder."""
    path = _existing(path)
    inside = path / "policy"
    return _read_policy(check_part(inside if os.path.lexists(inside) else path, "policy"))


def policy_step(path: Path) -> int:
    """The step in the manifest of a checkpoint or a copied `policy/` folder."""
    path = _existing(path)
    inside = path / "policy"
    return check_part(inside if os.path.lexists(inside) else path, "policy").step


def policies(folder: Path) -> dict[int, Path]:
    """{step: checkpoint} of all policies in a folder of checkpoints, oldest first."""
    return {
        step_of(path): path for path in reversed(_folders(folder)) if (path / "policy").is_dir()
    }


def best(folder: Path) -> Best | None:
    """The best by the evaluations of training, from the newest checkpoint; None without one."""
    newest = newest_verified(folder, lambda text: None, repair=False)
    return None if newest is None else best_in(load_document(newest))


def best_in(training: Tree) -> Best | None:
    """The best in a training state; None without one."""
    parts = [training.get(name) for name in ("evaluator", "saver")]
    score, step = (part.get("best") if isinstance(part, dict) else None for part in parts)
    if not isinstance(score, list) or not isinstance(step, int):
        return None
    is_pair = len(score) == 2 and all(isinstance(each, int | float) for each in score)
    return Best(float(score[0]), float(score[1]), step) if is_pair else None


def load_training(path: Path) -> tuple[Tree, Tree, Tree]:
    """Verify and load (policy arrays, contract, training) of a resumable checkpoint."""
    policy, training = _check_both(_existing(path))
    arrays, contract = _read_policy(policy)
    flat, leaves = training.read()
    state_file = training.folder / DOCUMENTS["training"]
    if both := flat.keys() & leaves.keys():
        raise DamagedCheckpoint(state_file, f"holds {min(both)!r}, which is an array already")
    return arrays, contract, _assembled({**flat, **leaves}, state_file)


def load_document(path: Path) -> Tree:
    """Verify and load the training state of a resumable checkpoint, without its arrays."""
    _, training = _check_both(_existing(path))
    return _assembled(training.read_document(), training.folder / DOCUMENTS["training"])


@contextmanager
def explain_mismatch(path: Path, what: str) -> Iterator[None]:
    """Turn errors of loading a checkpoint's state into a run into a `UsageError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"{path} was saved by another version of Etude, or by something else: its {what} does "
            f"not fit this run ({describe_error(error)[:300]}). Resume it with that version, or "
            "start a new run from its policy with --from."
        ) from error


def _read_policy(part: CheckedPart) -> tuple[Tree, Tree]:
    flat, contract = part.read()
    return _assembled(flat, part.folder / ARRAYS), contract


def _assembled(flat: Tree, file: Path) -> Tree:
    try:
        return assemble(flat)
    except Malformed as error:
        raise DamagedCheckpoint(file, str(error)) from error


def _check_both(path: Path) -> tuple[CheckedPart, CheckedPart]:
    names = folder_names(path)
    if "training" not in names:
        raise DamagedCheckpoint(path / "training", "is missing: only the policy was kept")
    for name in sorted(names - {"policy", "training"}):
        raise DamagedCheckpoint(path / name, "should not be there")
    policy = check_part(path / "policy", "policy")
    training = check_part(path / "training", "training")
    if training.manifest["policy_manifest_sha256"] != policy.manifest_sha256:
        raise DamagedCheckpoint(path, "joins a policy and a training state of different saves")
    if training.step != policy.step:
        raise DamagedCheckpoint(path, "joins a policy and a training state of different steps")
    return policy, training


def verify(path: Path) -> int:
    """Verify every byte of a resumable checkpoint; returns its step."""
    policy, training = _check_both(path)
    policy.verify()
    training.verify()
    return training.step


def newest_verified(
    folder: Path, say: Say = print, repair: bool = True, before: int | None = None
) -> Path | None:
    """The newest resumable checkpoint whose every byte verifies, or None.

    before: consider earlier steps only. repair: rename damaged ones to `<step>.damaged` and report
    them to `say`, remove leftovers of killed writers, and correct `latest`; for the holder of the
    run's lock.
    """
    if not folder.is_dir():
        return None
    if repair:
        _clean_up(folder)
    for step in sorted(steps(folder), reverse=True):
        if before is not None and step >= before:
            continue
        main = folder / step_name(step)
        for path in (main, _replaced(main)):
            if not _looks_resumable(path):
                continue
            try:
                if verify(path) != step:
                    raise DamagedCheckpoint(path, "holds another step than its name says")
            except UnknownFormat:
                raise
            except DamagedCheckpoint as error:
                say(str(error))
                if repair:
                    say(f"Set aside as {_set_aside(path)}; trying the one before.")
                continue
            return _settle(path, main) if repair else path
    return None


def steps(folder: Path) -> set[int]:
    """Steps of all checkpoints in a folder, complete or not, replaced ones included."""
    names = (name.removesuffix(REPLACED) for name in os.listdir(folder))
    return {int(name) for name in names if _STEP.fullmatch(name)}


def _looks_resumable(path: Path) -> bool:
    """Whether a path exists and is not a policy-only checkpoint."""
    if path.is_dir() and not path.is_symlink():
        return os.path.lexists(path / "training") or not os.path.lexists(path / "policy")
    return os.path.lexists(path)


def _clean_up(folder: Path) -> None:
    """Remove leftovers of killed writers; restore the name of a checkpoint that was moved aside."""
    for name in sorted(os.listdir(folder)):
        path, main = folder / name, folder / name.removesuffix(REPLACED)
        if is_leftover(path):
            _remove_leftover(path)
        elif path == main or not _STEP.fullmatch(main.name):
            continue
        elif not os.path.lexists(main):
            files.rename(path, main)
            files.fsync_folder(folder)
        elif not os.path.lexists(path / "training"):
            files.remove_files(path, _WHOLE)  # a resumable one stays until `main` is verified


def check_step(folder: Path, step: int) -> None:
    """Raise if the checkpoint of a step cannot be resumed; the message lists others."""
    found = resumable(folder) if folder.is_dir() else []
    if folder / step_name(step) not in found:
        there = ", ".join(str(step_of(path)) for path in found)
        raise UsageError(
            f"{folder} has no checkpoint of step {step} that can be resumed"
            f"{': choose one of ' + there if there else ', nor of any other'}."
        )
    verify(folder / step_name(step))


def roll_back(folder: Path, step: int, say: Say = print) -> None:
    """Make the checkpoint of a step the newest by renaming later ones to `<step>.aside`."""
    plain = {name: name.removesuffix(REPLACED) for name in sorted(os.listdir(folder))}
    later = [name for name, it in plain.items() if _STEP.fullmatch(it) and int(it) > step]
    for name in later:
        say(f"The checkpoint {name} is set aside as {_set_aside(folder / name, ASIDE)}.")
    for name, target in marks(folder).items():
        if target in later:
            files.remove_tree(folder / name)


def _set_aside(path: Path, suffix: str = DAMAGED) -> str:
    aside = files.free_path(path.with_name(path.name + suffix))
    files.rename(path, aside)
    files.fsync_folder(path.parent)
    return aside.name


def _settle(path: Path, main: Path) -> Path:
    """Give a verified checkpoint its proper name and `latest`, and remove replaced ones."""
    if path != main:
        if os.path.lexists(main):  # policy-only, and older than `path`
            _set_aside(main)
        files.rename(path, main)
        files.fsync_folder(main.parent)
    files.remove_files(_replaced(main), _WHOLE)
    if marks(main.parent).get(LATEST) != main.name:
        files.replace_link(main.parent / LATEST, main.name)
    return main


def mark(folder: Path, name: str, step: int) -> None:
    """Mark the checkpoint of a step as "best" or "final"; `retain` then keeps its policy."""
    if not _MARK.fullmatch(name):
        raise UsageError(f"A checkpoint cannot be called {name!r}; use lower-case letters.")
    if not (folder / step_name(step)).is_dir():
        raise UsageError(f"There is no checkpoint of step {step} in {folder} to call {name!r}.")
    files.replace_link(folder / name, step_name(step))


def marks(folder: Path) -> dict[str, str]:
    """{mark: folder name of its checkpoint}, `latest` included."""
    names = [name for name in sorted(os.listdir(folder)) if _MARK.fullmatch(name)]
    found = {name: files.read_link(folder / name) for name in names}
    return {name: target for name, target in found.items() if target and _STEP.fullmatch(target)}


def marked_checkpoint(folder: Path, name: str) -> Path | None:
    """The checkpoint marked as "best", "final" or "latest", or None."""
    target = files.read_link(folder / name) or ""
    path = folder / target
    return path if _STEP.fullmatch(target) and path.is_dir() else None


def resolve_mark(path: Path) -> Path:
    """The checkpoint behind a mark that is a file; other paths are returned unchanged."""
    is_file = _MARK.fullmatch(path.name) and path.is_file()
    return (marked_checkpoint(path.parent, path.name) or path) if is_file else path


def resumable(folder: Path) -> list[Path]:
    """Checkpoints with training state, newest first."""
    return [path for path in _folders(folder) if _looks_resumable(path)]


def _folders(folder: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    found = [folder / step_name(step) for step in sorted(steps(folder), reverse=True)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def retain(folder: Path, keep_last: int = 3, every: int | None = None) -> list[Path]:
    """Delete old checkpoints; returns the removed ones.

    The last `keep_last` stay resumable, and at least one that verifies. Marked ones and, with
    `every`, the first one of each interval of `every` steps keep their policy.
    """
    demoted, removed = surplus(folder, keep_last, every)
    drop(folder, [path / "training" for path in demoted] + removed)
    return removed


def surplus(
    folder: Path,
    keep_last: int,
    every: int | None,
    also: Collection[int] = (),
    verified: Path | None = None,
) -> tuple[list[Path], list[Path]]:
    """(checkpoints that keep only their policy, checkpoints to delete) of `retain`.

    also: further steps whose policy stays. verified: the newest complete one, if the caller knows
    it. Checkpoints without `is_own` stay.
    """
    present = _folders(folder)
    resumable = [path for path in present if _looks_resumable(path)]
    whole = set(resumable[: max(keep_last, 1)])
    anchor = verified or next((path for path in resumable if _verifies(path)), None)
    if anchor is None:
        return [], []  # none is known to be complete, so all stay
    whole.add(anchor)
    policies = {target for name, target in marks(folder).items() if name != LATEST}
    policies.update(map(step_name, also))
    if every:  # The first of each interval, a choice that later checkpoints do not change.
        policies.update({step_of(path) // every: path.name for path in present}.values())
    demoted = [p for p in resumable if p not in whole and p.name in policies and is_own(p)]
    return demoted, [p for p in present if p not in whole and p.name not in policies and is_own(p)]


def is_own(path: Path) -> bool:
    """Whether a checkpoint's folder has only files of a save, and a seal."""
    return is_plain(path) and any(has_seal(path / part) for part in FILES)


def is_plain(path: Path) -> bool:
    """Whether a folder has only files with the names that a save writes."""
    return _holds_only(path, FILES)


def is_leftover(path: Path) -> bool:
    """Whether a path is a leftover of a killed save, by its name and those of its files."""
    if _MARKING.fullmatch(path.name):
        return files.read_link(path) is not None
    parts = {**FILES, **{name: None for names in FILES.values() for name in names}}
    return bool(_SAVING.fullmatch(path.name)) and _holds_only(path, parts)


def is_written_by_save(path: Path) -> bool:
    """Whether saves write this path: a checkpoint, a mark, or a leftover."""
    if _STEP_LIKE.fullmatch(path.name):
        return is_plain(path)
    if _MARK.fullmatch(path.name):
        return bool(_STEP.fullmatch(files.read_link(path) or ""))
    return is_leftover(path)


def looks_whole(path: Path) -> bool:
    """Whether seals and sizes of a resumable checkpoint are right, without hashing its files."""
    try:
        parts = _check_both(path)
        return parts[0].step == step_of(path) and all(part.has_sizes() for part in parts)
    except DamagedCheckpoint:
        return False


def _holds_only(folder: Path, names: Mapping[str, Collection[str] | None]) -> bool:
    """Whether a folder has no other entries; names: {folder: its files, file: None}."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return False
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name not in names:
                    return False
                if (inside := names[entry.name]) is None:
                    if not entry.is_file(follow_symlinks=False):
                        return False
                elif not _holds_only(folder / entry.name, dict.fromkeys(inside)):
                    return False
    except OSError:  # removed, or unreadable
        return False
    return True


def _remove_leftover(path: Path) -> None:
    """Delete a leftover of a killed save."""
    if path.is_dir() and not path.is_symlink():
        files.remove_files(path, (*_WHOLE, *(name for names in FILES.values() for name in names)))
    else:
        files.remove_tree(path)


def _verifies(path: Path) -> bool:
    try:
        return verify(path) == step_of(path)
    except DamagedCheckpoint:
        return False


def drop(folder: Path, paths: list[Path]) -> None:
    """Delete checkpoints, parts of them or leftovers: rename them durably, then delete their files.

    For the holder of the run's lock.
    """
    gone = []
    for path in paths:
        label = path.name if path.parent == folder else f"{path.parent.name}-{path.name}"
        if label.startswith(TEMPORARY):
            gone.append(path)
            continue
        gone.append(files.free_path(folder / f"{TEMPORARY}drop-{label}-{os.getpid()}"))
        files.rename(path, gone[-1])
    for parent in dict.fromkeys([path.parent for path in paths] + [folder]) if paths else ():
        files.fsync_folder(parent)
    for path in gone:
        _remove_leftover(path)
