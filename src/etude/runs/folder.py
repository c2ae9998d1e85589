"""A run folder: recipe, plan, manifest, metrics, checkpoints and reports, and its lock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from etude.core.errors import Damaged, EtudeError, UsageError
from etude.core.seals import sealed, unsealed
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.metrics_log import MetricsLog, Say

RECIPE, MANIFEST, METRICS, LOCK = "recipe.yaml", "manifest.json", "metrics.jsonl", ".lock"
PLAN, PLAN_JSON = "plan.txt", "plan.json"
REPORTING = "reporting.log"
"""What was told of logs and screens that failed; a run without such has no such file."""
FOLDERS = ("checkpoints", "evaluations", "failures")
NOT_EXACT = "not exact"
"""How a manifest's statement begins where a run is not."""
_HASHES = "files"
"""Where the manifest names the SHA-256 of the other texts of a run."""
_ASKED = 0.1
"""Seconds after which a lock is tried again."""
_MOST_TEXT = 1 << 20
"""Bytes of a recipe, manifest or plan; those of runs have some thousands."""


def default_path(recipe: str, seed: int, now: datetime | None = None, root: str = "runs") -> Path:
    """`runs/<recipe>/<date-time>-s<seed>`, with a number after it if that is taken."""
    moment = (now or datetime.now()).strftime("%Y-%m-%d-%H%M%S")
    name = re.sub(r"[^\w.-]+", "-", recipe).strip(".-") or "run"
    return files.free_path(Path(root) / name / f"{moment}-s{seed}")


class RunFolder:
    """The paths of one run, and the right to write to it while `close` has not been called."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.recipe, self.metrics = self.path / RECIPE, self.path / METRICS
        self.checkpoints, self.failures = self.path / "checkpoints", self.path / "failures"
        self._lock: Lock | None = None
        self._copies: Tree | None = None

    @classmethod
    def create(
        cls, path: Path, recipe: str, plan: str, plan_json: Tree, manifest: Tree
    ) -> RunFolder:
        """A new run, locked for this process. It appears whole or not at all."""
        path = Path(path)
        _refuse_existing(path)
        texts = {RECIPE: recipe, PLAN: plan, PLAN_JSON: pretty(plan_json)}
        texts[MANIFEST] = sealed({**manifest, _HASHES: _hashes_of(texts)}).decode()
        files.make_folder(path.parent)
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        files.remove_tree(temporary)
        lock = None
        try:
            for folder in (temporary, *(temporary / name for name in FOLDERS)):
                files.new_folder(folder)
            for name, text in texts.items():
                files.write_file(temporary / name, [text.encode()])
            files.fsync_folder(temporary)
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
        run._copies = {"recipe": recipe, "manifest": texts[MANIFEST]}
        return run

    @classmethod
    def open(cls, path: Path, write: bool = True) -> RunFolder:
        """An existing run; `write=True` makes this process its one writer."""
        run = cls(path)
        if not (run.recipe.is_file() or run.checkpoints.is_dir()):
            inside = max(run.path.glob(f"*/{RECIPE}"), default=None)
            hint = f"It holds runs, such as {inside.parent}" if inside else "Check the path"
            raise UsageError(f"{run.path} is not a run: it has no {RECIPE}. {hint}.")
        _refuse_links(run.path)
        if write:
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

    def evaluation(self, step: int) -> Path:
        """Where the evaluation at a step is kept; named like the checkpoint of that step."""
        return self.path / "evaluations" / f"{step:012d}"

    def metrics_log(self, say: Say = lambda text: None) -> MetricsLog:
        """The run's metric rows, open for appending."""
        return MetricsLog(self.metrics, say, self.check_writer)

    def manifest(self) -> Tree:
        """What the run was started with."""
        path = self.path / MANIFEST
        try:
            document = unsealed(self.copies()["manifest"].encode())
        except ValueError as error:
            raise Damaged(path, f"{path} {error}.") from error
        return {name: value for name, value in document.items() if name != _HASHES}

    def mark_not_exact(self, reason: str) -> None:
        """Note in the manifest, for good, that the run's bits are not what its recipe promises."""
        manifest = self.manifest()
        said = str(manifest.get("exactness", ""))
        if reason not in said:
            known = f"{said}; " if said.startswith(NOT_EXACT) else f"{NOT_EXACT}: "
            self.rewrite(manifest | {"exactness": known + reason}, {})

    def rewrite(self, manifest: Tree, texts: dict[str, str]) -> None:
        """Give some of a run's texts new contents, and the manifest, which names their hashes."""
        self.check_writer()
        for name, text in texts.items():
            files.replace_file(self.path / name, [text.encode()])
        hashes = _hashes(self.copies()["manifest"]) | _hashes_of(texts)
        text = sealed({**manifest, _HASHES: hashes}).decode()
        files.replace_file(self.path / MANIFEST, [text.encode()])
        self._copies = {"recipe": self._copies_of(RECIPE), "manifest": text}

    def put_back(self, name: str, text: str) -> None:
        """Give back to the recipe or the manifest a text that it had before."""
        files.replace_file(self.path / name, [text.encode()])
        self._copies = None

    def copies(self) -> Tree:
        """What every checkpoint holds a copy of: {"recipe", "manifest"}, the texts of the two.

        Read once: a run goes on from what it was opened with.
        """
        if self._copies is None:
            texts = {"recipe": RECIPE, "manifest": MANIFEST}
            self._copies = {name: self._copies_of(file) for name, file in texts.items()}
        return dict(self._copies)

    def _copies_of(self, name: str) -> str:
        return _read(self.path / name).decode(errors="replace")

    def changed_texts(self, copy: str = "") -> list[str]:
        """Names of texts that are missing or not as the manifest names them, itself included.

        `copy`: a text of the manifest, to go by where the file is damaged.
        """
        text = self._copies_of(MANIFEST)
        damaged = [] if _is_whole(text) else [MANIFEST]
        hashes = _hashes(copy if damaged else text)
        return damaged + [n for n in sorted(hashes) if _sha256(_read(self.path / n)) != hashes[n]]

    def last_failure(self) -> Path | None:
        """The newest report of a failure."""
        return max(self.failures.iterdir(), default=None) if self.failures.is_dir() else None

    @property
    def current_path(self) -> Path:
        """Where the run is now: it may have been moved, and something else may be in its place."""
        return self.path if self._lock is None else self._lock.find(self.path)


class Lock:
    """One writer per run. The operating system lets go of it when the process dies.

    The folder itself is locked, which nobody can take away by removing a file. The file `.lock` in
    it says who the writer is: host, process and inode. Some network file systems let two hosts
    lock one folder; there the two see each other in that file, and the later one gives way.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / LOCK
        with files.clear_faults("lock", folder):
            self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with files.clear_faults("lock", folder):
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # one who only asks, as `etude runs` does, has it briefly
                    time.sleep(_ASKED)
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            inode = os.fstat(self._fd).st_ino
            self._name = f"{os.getpid()} on {socket.gethostname()} (inode {inode})"
            self._before = _holder(file)
            _sign(file, self._name)
        except files.DiskFault as error:
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise UsageError(
                f"{folder} is being written by process {_holder(file) or 'unknown'}; wait for it "
                "to finish, or stop it first."
            ) from error
        # A forked worker would otherwise hold the lock beyond the death of the writer.
        here = weakref.ref(self)

        def forget() -> None:
            if (lock := here()) is not None:
                lock.release()

        os.register_at_fork(after_in_child=forget)

    def check(self, folder: Path) -> None:
        """Refuse to go on where this process is not the one writer of the folder at this path."""
        if not self._is_at(folder):
            there = self._now_at()
            fix = f"It is at {there} now: resume it there" if there else "It cannot be found"
            raise EtudeError(
                f"{folder} was moved, removed or replaced while this run was being written. {fix}; "
                "nothing was written since."
            )
        named = _holder(folder / LOCK)
        if named == self._name:
            return
        if named and named == self._before:  # It was there first, and has signed again since.
            raise EtudeError(
                f"{folder} is also being written by process {named}, which came first: this one "
                "has stopped, and has saved nothing since."
            )
        _sign(folder / LOCK, self._name)

    def find(self, folder: Path) -> Path:
        """Where the locked folder is: at the path it was opened by, or wherever it was moved."""
        if self._is_at(folder):
            return folder
        found = self._now_at()
        if found is None:
            raise EtudeError(f"{folder} is gone.")
        return found

    def _is_at(self, folder: Path) -> bool:
        held = os.fstat(self._fd)
        try:
            found = os.stat(folder)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def _now_at(self) -> Path | None:
        """Where the folder was moved, as far as the system tells; None where it was removed."""
        try:
            found = Path(os.readlink(f"/proc/self/fd/{self._fd}"))
        except OSError:
            return None
        return found if self._is_at(found) else None

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _sign(file: Path, name: str) -> None:
    """Write into the lock's file who holds it."""
    with files.clear_faults("write the lock", file):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(file, flags, 0o666), "w") as stream:
            stream.write(f"{name}\n")


def _holder(file: Path) -> str:
    """Who the lock's file says is writing."""
    return _read(file)[:256].decode(errors="replace").strip()


def _refuse_links(folder: Path) -> None:
    """A run folder from a stranger may lead writes elsewhere by links in place of its parts.

    Links of its own, such as `checkpoints/latest`, stay below the folder they are in. W&B links the
    logs of each of its runs to a folder of its own; it never writes to those of an earlier run.
    """
    logs = re.compile(re.escape(str(folder / "wandb")) + r"/(offline-)?run-[^/]+/logs")
    for here, folders, names in os.walk(folder):
        if logs.fullmatch(here):
            continue
        for path in (os.path.join(here, name) for name in sorted([*folders, *names])):
            if not os.path.islink(path):
                continue
            inside = os.path.realpath(path).startswith(os.path.realpath(here) + os.sep)
            if here == str(folder) or not inside:
                raise UsageError(
                    f"{path} is a symbolic link, and nothing is opened or written through one: put "
                    "what it points to in its place, or remove it."
                )


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise UsageError(
            f"{path} exists already and is never overwritten: continue it with "
            f"`etude resume {path}`, or choose another folder."
        )


def _is_whole(manifest: str) -> bool:
    try:
        unsealed(manifest.encode())
    except ValueError:
        return False
    return True


def _hashes(manifest: str) -> dict[str, str]:
    """What a text of manifest.json names of the texts beside it; {} where it is damaged."""
    return dict(unsealed(manifest.encode()).get(_HASHES, {})) if _is_whole(manifest) else {}


def _hashes_of(texts: dict[str, str]) -> dict[str, str]:
    return {name: _sha256(text.encode()) for name, text in texts.items()}


def _read(path: Path) -> bytes:
    """What is in a small file; nothing where it is missing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as stream:
            return stream.read(_MOST_TEXT)
    except OSError:
        return b""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pretty(document: Tree) -> str:
    """Indented JSON for people; a report must not fail over a value JSON does not know."""
    return json.dumps(document, indent=2, default=repr) + "\n"
