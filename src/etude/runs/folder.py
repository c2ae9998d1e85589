"""A run folder: recipe, plan, manifest, metrics, checkpoints and reports, and its lock."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from etude.core.errors import Damaged, UsageError
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.documents import decode_sealed, encode_sealed
from etude.runs.file_system import Lock, Published
from etude.runs.files import store_url
from etude.runs.metrics_log import MetricsLog, Say

RECIPE, MANIFEST, METRICS = "recipe.yaml", "manifest.json", "metrics.jsonl"
PLAN, PLAN_JSON = "plan.txt", "plan.json"
REPORTING = "reporting.log"
"""Notices about logs and terminals that failed; missing in a run without any."""
FILM = "film.gif"
"""A film of the policy while it trained, in evaluations/<step>-film; a webp is beside it."""
FOLDERS = ("checkpoints", "evaluations", "failures")
NOT_EXACT = "not exact"
"""Beginning of the manifest's statement about a run that is not exact."""
HASHES = "files"
"""Field of the manifest with the SHA-256 of the other texts of a run."""
MOST_TEXT = 1 << 20
"""Most bytes of a recipe, manifest or plan, which have some thousands."""


def default_path(recipe: str, seed: int, now: datetime | None = None, root: str = "runs") -> Path:
    """`runs/<recipe>/<date-time>-s<seed>`, with a number if it exists already."""
    moment = (now or datetime.now()).strftime("%Y-%m-%d-%H%M%S")
    return files.free_path(Path(root) / file_name(recipe) / f"{moment}-s{seed}")


def file_name(recipe: str) -> str:
    """The name of a recipe without characters that file names should not have."""
    return re.sub(r"[^\w.-]+", "-", recipe).strip(".-") or "run"


def films(run: Path) -> dict[int, Path]:
    """{step: gif} of the films that were drawn while a run trained, the oldest first."""
    found = sorted(run.glob(f"evaluations/*-film/{FILM}"))
    return {int(path.parent.name.partition("-")[0]): path for path in found}


class RunFolder:
    """The paths of one run, and its lock until `close` is called."""

    def __init__(self, path: Path, published: Published | None = None) -> None:
        self.path, self.published = Path(path), published or Published()
        self.recipe, self.metrics = self.path / RECIPE, self.path / METRICS
        self.checkpoints, self.failures = self.path / "checkpoints", self.path / "failures"
        self._lock: Lock | None = None
        self._copies: Tree | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: str,
        plan: str,
        plan_json: Tree,
        manifest: Tree,
        published: Published | None = None,
    ) -> RunFolder:
        """Create a run atomically, locked for this process. published: see `publish_to`."""
        path = Path(path)
        _refuse_existing(path)
        texts = {RECIPE: recipe, PLAN: plan, PLAN_JSON: pretty(plan_json)}
        texts[MANIFEST] = encode_sealed({**manifest, HASHES: _hashes_of(texts)}).decode()
        files.make_folder(path.parent)
        temporary = files.free_path(path.with_name(f".tmp-{path.name}-{os.getpid()}"))
        lock, made = None, False
        try:
            files.new_folder(temporary)
            made = True
            # The sealed manifest first: by it `etude prune` recognises leftovers of a kill.
            for name in (MANIFEST, RECIPE, PLAN, PLAN_JSON):
                files.write_file(temporary / name, [texts[name].encode()])
            for name in FOLDERS:
                files.new_folder(temporary / name)
            files.fsync_folder(temporary)
            lock = Lock(temporary)  # held before other processes can see the folder
            files.rename(temporary, path)
            files.fsync_folder(path.parent)
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, files.DiskFault):
                with suppress(files.DiskFault):
                    if made:
                        files.remove_tree(temporary)
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    _refuse_existing(path)
            raise
        run = cls(path, published)
        run._lock = lock
        run._copies = {"recipe": recipe, "manifest": texts[MANIFEST]}
        run.publish()
        return run

    @classmethod
    def open(cls, path: str | Path, write: bool = True) -> RunFolder:
        """Open an existing run; `write=True` locks it for this process. One in an object store is
        downloaded."""
        if url := store_url(path):
            from etude.runs import stored

            if not write:
                return cls.open(stored.mirror(url), write=False)
            published = stored.StoredRun.claim(url)
            return cls._opened(published.folder, True, published)
        return cls._opened(Path(path), write, _copy_of(Path(path)))

    @classmethod
    def _opened(cls, path: Path, write: bool, published: Published) -> RunFolder:
        run = cls(path, published)
        if not (run.recipe.is_file() or run.checkpoints.is_dir()):
            if not run.path.exists():
                raise UsageError(f"There is no run {run.path}. Check the path.")
            inside = max(run.path.glob(f"*/{RECIPE}"), default=None)
            hint = f"It contains runs, for example {inside.parent}" if inside else "Check the path"
            raise UsageError(f"{run.path} is not a run: it has no {RECIPE}. {hint}.")
        _refuse_links(run.path)
        if write:
            files.make_folder(run.path)  # It exists, but its name may not be durable yet.
            run._lock = Lock(run.path)
        return run

    def check_writer(self) -> None:
        """Raise unless this process is still the only writer of the folder at this path."""
        if self._lock is not None:
            self._lock.check(self.path)
        self.published.check()

    def publish(self) -> None:
        """Commit the folder to the object store that the run is in; without one, do nothing."""
        self.published.publish()

    @property
    def name(self) -> str:
        """The URL or path by which people name the run."""
        return self.published.url or str(self.path)

    def named(self, text: str) -> str:
        """A text with the run's name in place of its path on this machine."""
        return text.replace(str(self.path), self.name)

    def close(self) -> None:
        """Release the lock, as the end of the process does."""
        try:
            self.published.close()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def evaluation(self, step: int) -> Path:
        """Folder of the evaluation at a step, named like the checkpoint of that step."""
        return self.path / "evaluations" / f"{step:012d}"

    def metrics_log(self, say: Say = lambda text: None) -> MetricsLog:
        """The run's metric rows, open for appending."""
        return MetricsLog(self.metrics, say, self.check_writer)

    def manifest(self) -> Tree:
        """The manifest, verified by its seal."""
        path = self.path / MANIFEST
        try:
            document = decode_sealed(self.copies()["manifest"].encode())
        except ValueError as error:
            raise Damaged(path, f"{path} {error}.") from error
        return {name: value for name, value in document.items() if name != HASHES}

    def mark_not_exact(self, reason: str) -> None:
        """Note in the manifest, permanently, why the run is no longer exact."""
        manifest = self.manifest()
        statement = str(manifest.get("exactness", ""))
        if reason not in statement:
            known = f"{statement}; " if statement.startswith(NOT_EXACT) else f"{NOT_EXACT}: "
            self.rewrite(manifest | {"exactness": known + reason}, {})

    def rewrite(self, manifest: Tree, texts: dict[str, str]) -> None:
        """Replace some of a run's texts, and the manifest with their hashes."""
        self.check_writer()
        for name, text in texts.items():
            files.replace_file(self.path / name, [text.encode()])
        hashes = _hashes(self.copies()["manifest"]) | _hashes_of(texts)
        text = encode_sealed({**manifest, HASHES: hashes}).decode()
        files.replace_file(self.path / MANIFEST, [text.encode()])
        self._copies = {"recipe": self._copies_of(RECIPE), "manifest": text}

    def restore_text(self, name: str, text: str) -> None:
        """Restore an earlier text of the recipe or the manifest."""
        files.replace_file(self.path / name, [text.encode()])
        self._copies = None

    def copies(self) -> Tree:
        """{"recipe", "manifest"}: the texts that every checkpoint contains a copy of.

        Read only once: a run continues with the texts it was opened with.
        """
        if self._copies is None:
            texts = {"recipe": RECIPE, "manifest": MANIFEST}
            self._copies = {name: self._copies_of(file) for name, file in texts.items()}
        return dict(self._copies)

    def _copies_of(self, name: str) -> str:
        return _read(self.path / name).decode(errors="replace")

    def changed_texts(self, copy: str = "") -> list[str]:
        """Names of missing or changed texts by the hashes in the manifest, itself included.

        `copy`: a copy of the manifest, used if the file is damaged.
        """
        text = self._copies_of(MANIFEST)
        damaged = [] if _is_whole(text) else [MANIFEST]
        hashes = _hashes(copy if damaged else text)
        return damaged + [n for n in sorted(hashes) if _sha256(_read(self.path / n)) != hashes[n]]

    def last_failure(self) -> Path | None:
        """The newest failure report."""
        return max(self.failures.iterdir(), default=None) if self.failures.is_dir() else None

    @property
    def current_path(self) -> Path:
        """The current path of the locked folder, which may have been moved."""
        return self.path if self._lock is None else self._lock.find(self.path)


def publish_to(path: str | Path | None, lease: float) -> Published:
    """Claim the place of a new run: nowhere else than its folder, or an object store.

    lease: seconds of silence after which another process may write the run.
    """
    if not (url := store_url(path or "")):
        return Published()
    from etude.runs import stored

    return stored.StoredRun.claim(url, new=True, lease=lease)


def _copy_of(path: Path) -> Published:
    """Where a folder is published that was downloaded from an object store."""
    if not (path.absolute().parent / "origin.json").is_file():
        return Published()
    from etude.runs import stored

    return stored.copy_of(path)


def _refuse_links(folder: Path) -> None:
    """Raise for symbolic links in an untrusted run folder, which could redirect writes.

    Links that stay below their folder (`checkpoints/latest`) are allowed, and so are W&B's links
    of the logs of its runs, to which only that run writes.
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
        decode_sealed(manifest.encode())
    except ValueError:
        return False
    return True


def _hashes(manifest: str) -> dict[str, str]:
    """{name: SHA-256} of the texts in a manifest; {} if it is damaged."""
    return dict(decode_sealed(manifest.encode()).get(HASHES, {})) if _is_whole(manifest) else {}


def _hashes_of(texts: dict[str, str]) -> dict[str, str]:
    return {name: _sha256(text.encode()) for name, text in texts.items()}


def _read(path: Path) -> bytes:
    return files.read_start(path, MOST_TEXT)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pretty(document: Tree) -> str:
    """Indented JSON; values of other types are written by `repr`."""
    return json.dumps(document, indent=2, default=repr) + "\n"
