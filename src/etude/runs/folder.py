"""A run folder: what was asked, what it was going to do, and everything that came out of it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import traceback
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree, is_array
from etude.runs import files, tensors
from etude.runs.documents import decode_json
from etude.runs.metrics_log import MetricsLog

RECIPE, MANIFEST, METRICS, LOCK = "recipe.yaml", "manifest.json", "metrics.jsonl", ".lock"
FOLDERS = ("checkpoints", "evaluations", "failures")


def default_path(recipe: str, seed: int, now: datetime | None = None, root: str = "runs") -> Path:
    """`runs/<recipe>/<date-time>-s<seed>`, with a number after it if that is taken."""
    moment = (now or datetime.now()).strftime("%Y-%m-%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", recipe).strip(".-") or "run"
    return _free(Path(root) / name / f"{moment}-s{seed}")


class RunFolder:
    """The paths of one run, and the right to write to it while `close` has not been called."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock: Lock | None = None

    @classmethod
    def create(
        cls, path: Path, recipe: str, plan: str, plan_json: Tree, manifest: Tree
    ) -> RunFolder:
        """A new run, locked for this process. It appears whole or not at all."""
        path = Path(path)
        _refuse_existing(path)
        texts = {RECIPE: recipe, "plan.txt": plan, "plan.json": _pretty(plan_json)}
        texts[MANIFEST] = _pretty(manifest)
        files.make_folder(path.parent)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        files.remove_tree(temporary)
        lock = None
        try:
            _fill(temporary, texts)
            lock = Lock(temporary)  # held before anyone else can see the folder
            files.rename(temporary, path)
            files.fsync_folder(path.parent)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, files.DiskFault):
                with suppress(files.DiskFault):
                    files.remove_tree(temporary)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    _refuse_existing(path)
            raise
        run = cls(path)
        run._lock = lock
        return run

    @classmethod
    def open(cls, path: Path, write: bool = True) -> RunFolder:
        """An existing run; `write=True` makes this process its one writer."""
        run = cls(path)
        if not (run.path / RECIPE).is_file():
            raise UsageError(f"{run.path} is not a run: it has no {RECIPE}. Check the path.")
        if write:
            _refuse_links(run.path)
            files.make_folder(run.path)  # It is there, but its name may not be durable yet.
            run._lock = Lock(run.path)
        return run

    def check_writer(self) -> None:
        """Before a commit: this process is still the one writer of what is at this path."""
        if self._lock is not None:
            self._lock.check(self.path)

    def close(self) -> None:
        """Give up the lock; the process's end does the same."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        return self.path / "failures"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def evaluation(self, step: int) -> Path:
        """Where the evaluation at a step is kept; named like the checkpoint of that step."""
        return self.path / "evaluations" / f"{step:012d}"

    def metrics_log(self) -> MetricsLog:
        """The run's metric rows, open for appending."""
        return MetricsLog(self.metrics)

    def manifest(self) -> Tree:
        """What the run was started with."""
        path = self.path / MANIFEST
        try:
            return decode_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise EtudeError(f"Could not read {path}: {error}.") from error

    def mark_not_exact(self, reason: str) -> None:
        """Note in the manifest, for good, that the run's bits are not what its recipe promises."""
        document = self.manifest() | {"exactness": f"not exact: {reason}"}
        files.replace_file(self.path / MANIFEST, [_pretty(document).encode()])

    def write_failure(self, exception: BaseException, arrays: Tree, context: Tree) -> Path:
        """Keep what is needed to look into a failure: traceback, arrays and where it happened."""
        folder = _free(self.failures / datetime.now().strftime("%Y-%m-%d-%H%M%S"))
        files.make_folder(folder)
        report = "".join(traceback.format_exception(exception))
        files.write_file(folder / "error.txt", [report.encode(errors="replace")])
        files.write_file(folder / "context.json", [_pretty(context).encode()])
        storable = _storable(arrays)
        layout = tensors.layout(storable)
        files.write_file(folder / "reproduction.safetensors", tensors.chunks(storable, layout))
        files.fsync_folder(folder)
        return folder


class Lock:
    """One writer per run. The operating system lets go of it when the process dies.

    The folder itself is locked, which nobody can take away by removing a file; the file `.lock`
    in it only tells people who the writer is.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / LOCK
        with files.clear_faults("lock", folder):
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with files.clear_faults("lock", folder):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with files.clear_faults("write the lock", file):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                holder = os.open(file, flags, 0o666)
                with os.fdopen(holder, "w") as stream:
                    stream.write(f"{os.getpid()} on {socket.gethostname()}\n")
        except files.DiskFault as error:
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise UsageError(
                f"{folder} is being written by process {_holder(file)}; wait for it to finish, or "
                "stop it first."
            ) from error
        # A forked worker would otherwise hold the lock beyond the death of the writer.
        here = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(here))

    def check(self, folder: Path) -> None:
        """Refuse to go on where the folder at this path is not the one that is locked."""
        held = os.fstat(self._fd)
        try:
            found = os.stat(folder)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino):
            raise EtudeError(
                f"{folder} was moved, removed or replaced while this run was being written; what "
                "was saved before is where the folder is now. Resume it there."
            )

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _fill(folder: Path, texts: dict[str, str]) -> None:
    """Make the inside of a run folder, durably."""
    files.new_folder(folder)
    for name in FOLDERS:
        files.new_folder(folder / name)
    for name, text in texts.items():
        files.write_file(folder / name, [text.encode()])
    files.fsync_folder(folder)


def _forget(reference: weakref.ref[Lock]) -> None:
    lock = reference()
    if lock is not None:
        lock.release()


def _holder(file: Path) -> str:
    """Who the lock's file says is writing."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return "unknown"
    with os.fdopen(fd, "rb") as stream:
        return stream.read(256).decode(errors="replace").strip() or "unknown"


def _refuse_links(folder: Path) -> None:
    """A run folder from a stranger may lead writes elsewhere by links in place of its parts."""
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            raise UsageError(
                f"{entry} is a symbolic link, and nothing is written through one: put what it "
                "points to in its place, or remove it."
            )


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(
            f"{path} exists already and is never overwritten: continue it with "
            f"`etude resume {path}`, or choose another folder."
        )


def _free(path: Path) -> Path:
    """The path itself, or the first `<path>-<n>` that does not exist."""
    free, count = path, 1
    while os.path.lexists(free):
        count += 1
        free = path.with_name(f"{path.name}-{count}")
    return free


def _pretty(document: Tree) -> str:
    """Indented JSON for people; a report must not fail over a value JSON does not know."""
    return json.dumps(document, indent=2, default=repr) + "\n"


def _storable(arrays: Tree, prefix: str = "") -> dict[str, Any]:
    """The arrays that can be kept, by path; whatever else is in a failing tree is left out."""
    kept: dict[str, Any] = {}
    for name, leaf in arrays.items():
        if isinstance(leaf, dict):
            kept |= _storable(leaf, f"{prefix}{name}/")
        elif is_array(leaf):
            try:
                tensors.layout({f"{prefix}{name}": leaf})
            except TypeError:
                continue
            kept[f"{prefix}{name}"] = leaf
    return kept
