"""Checkpoints that a kill, a full disk or a power cut cannot take away.

    checkpoints/000000524288/policy/     arrays.safetensors  contract.json  manifest.json
                             training/   arrays.safetensors  state.json     manifest.json
    checkpoints/latest -> 000000524288     a file with this name in it where there are no links

The manifest of `training/` pins that of `policy/`: both verify, or the checkpoint cannot be
resumed. `policy/` alone verifies anywhere it is copied to.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from etude.core.errors import UsageError, describe_error, is_out_of_memory
from etude.core.trees import Tree
from etude.runs import files
from etude.runs.documents import Malformed, assemble
from etude.runs.parts import (
    ARRAYS,
    DOCUMENTS,
    FILES,
    CheckedPart,
    check_part,
    folder_names,
    has_seal,
    policy_part,
    training_part,
)
from etude.runs.parts import DamagedCheckpoint as DamagedCheckpoint
from etude.runs.parts import UnknownFormat as UnknownFormat

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
"""The files of a checkpoint."""

Say = Callable[[str], None]


def step_name(step: int) -> str:
    """The folder name of a step: padded, so that names sort like numbers."""
    return f"{step:012d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder; a link such as `latest` is followed."""
    name = resolve_mark(Path(path)).resolve().name
    if not _STEP.fullmatch(name):
        raise UsageError(f"{path} is not a checkpoint; its name should be a step of 12 digits.")
    return int(name)


def save(folder: Path, step: int, policy: tuple[Tree, Tree], training: Tree | None) -> Path:
    """Save `policy` (arrays, contract) and `training` as step `step`; returns its folder.

    At every instant a checkpoint that was there before, or the new one, is whole on disk.
    Without `training` the policy alone is kept, `latest` stays, and a resumable checkpoint of
    this step is left as it is.
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
        # Space taken by half a checkpoint would keep a full disk full.
        with suppress(files.DiskFault):
            files.remove_files(temporary, _WHOLE)
        if not isinstance(error, files.DiskFault):
            raise
        message = f"The checkpoint of step {step} was not saved; those before it are untouched."
        raise files.DiskFault(f"{message} {error}", error.errno) from error
    return target


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename the finished folder to its step; one that is already there waits beside it.

    A folder cannot be renamed over another. Between the two renames the old checkpoint is found
    by `newest_verified` under its waiting name.
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
    """Whether there is a checkpoint of this step, resumable or not."""
    return (folder / step_name(step)).is_dir()


def checkpoint_bytes(policy: tuple[Tree, Tree], training: Tree) -> int:
    """Bytes a save of these trees will take on disk; tensors may be on the meta device."""
    return policy_part(*policy).num_bytes() + training_part(training).num_bytes()


def header_bytes(tree: Tree) -> int:
    """Bytes of the table of a tree's arrays: `tensors.MAX_HEADER` at most in a checkpoint."""
    return len(training_part(tree).layout.header)


def _existing(path: Path) -> Path:
    """The real folder behind a path a person gave; only here a symlink is followed."""
    path = resolve_mark(Path(path))
    if not path.exists():
        raise UsageError(f"There is no checkpoint at {path}; check the path.")
    return path.resolve()


def load_policy_parts(path: Path) -> tuple[Tree, Tree]:
    """(arrays, contract) of a checkpoint, or of a copied `policy/` folder; verified first."""
    path = _existing(path)
    inside = path / "policy"
    return _read_policy(check_part(inside if os.path.lexists(inside) else path, "policy"))


def policy_step(path: Path) -> int:
    """The step that a checkpoint or a copied `policy/` folder says it is of, whatever its name."""
    path = _existing(path)
    inside = path / "policy"
    return check_part(inside if os.path.lexists(inside) else path, "policy").step


def policies(folder: Path) -> dict[int, Path]:
    """{step: checkpoint} of every policy in a folder of checkpoints, the oldest first."""
    return {
        step_of(path): path for path in reversed(_folders(folder)) if (path / "policy").is_dir()
    }


def best_step(folder: Path) -> int | None:
    """The step that training found the best, as the newest checkpoint remembers it."""
    newest = newest_verified(folder, lambda text: None, repair=False)
    saver = {} if newest is None else load_document(newest).get("saver", {})
    return saver.get("best") if isinstance(saver, dict) else None


def load_training(path: Path) -> tuple[Tree, Tree, Tree]:
    """(policy arrays, contract, training) of a resumable checkpoint; verified first."""
    policy, training = _check_both(_existing(path))
    arrays, contract = _read_policy(policy)
    flat, leaves = training.read()
    state_file = training.folder / DOCUMENTS["training"]
    if both := flat.keys() & leaves.keys():
        raise DamagedCheckpoint(state_file, f"holds {min(both)!r}, which is an array already")
    return arrays, contract, _assembled({**flat, **leaves}, state_file)


def load_document(path: Path) -> Tree:
    """What is no array in the training state of a resumable checkpoint, verified first."""
    _, training = _check_both(_existing(path))
    return _assembled(training.read_document(), training.folder / DOCUMENTS["training"])


@contextmanager
def explain_mismatch(path: Path, what: str) -> Iterator[None]:
    """While a run takes in what a checkpoint holds: what does not fit it ends in one sentence."""
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
    """Check every byte of a resumable checkpoint and return its step."""
    policy, training = _check_both(path)
    policy.verify()
    training.verify()
    return training.step


def newest_verified(
    folder: Path, say: Say = print, repair: bool = True, before: int | None = None
) -> Path | None:
    """The newest checkpoint that can be resumed, every byte checked; None if there is none.

    With `before`, only those of an earlier step are looked at.

    A damaged one is set aside as `<step>.damaged` and `say` is told; what a killed writer left
    behind is cleaned up, and `latest` is put right. That is for the holder of the run's lock:
    with `repair=False` nothing on disk is changed.
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
    """Steps of which the folder holds a checkpoint, whole or not, or one that was replaced."""
    names = (name.removesuffix(REPLACED) for name in os.listdir(folder))
    return {int(name) for name in names if _STEP.fullmatch(name)}


def _looks_resumable(path: Path) -> bool:
    """Whether there is something to verify: a policy-only checkpoint is whole without training."""
    if path.is_dir() and not path.is_symlink():
        return os.path.lexists(path / "training") or not os.path.lexists(path / "policy")
    return os.path.lexists(path)


def _clean_up(folder: Path) -> None:
    """Remove what a killed writer left; a checkpoint it had put aside gets its name back."""
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
            files.remove_files(
                path, _WHOLE
            )  # one that can be resumed stays until `main` has verified


def check_step(folder: Path, step: int) -> None:
    """Refuse a step whose checkpoint cannot be resumed, with those that are there."""
    found = resumable(folder) if folder.is_dir() else []
    if folder / step_name(step) not in found:
        there = ", ".join(str(step_of(path)) for path in found)
        raise UsageError(
            f"{folder} has no checkpoint of step {step} that can be resumed"
            f"{': choose one of ' + there if there else ', nor of any other'}."
        )
    verify(folder / step_name(step))


def roll_back(folder: Path, step: int, say: Say = print) -> None:
    """Make the checkpoint of a step the newest: later ones are set aside as `<step>.aside`."""
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
    """Give the verified checkpoint its own name and `latest`; nothing else may claim the step."""
    if path != main:
        if os.path.lexists(main):  # policy-only or set aside by now, and older than `path`
            _set_aside(main)
        files.rename(path, main)
        files.fsync_folder(main.parent)
    files.remove_files(_replaced(main), _WHOLE)
    if marks(main.parent).get(LATEST) != main.name:
        files.replace_link(main.parent / LATEST, main.name)
    return main


def mark(folder: Path, name: str, step: int) -> None:
    """Call the checkpoint of a step "best" or "final"; `retain` then keeps its policy."""
    if not _MARK.fullmatch(name):
        raise UsageError(f"A checkpoint cannot be called {name!r}; use lower-case letters.")
    if not (folder / step_name(step)).is_dir():
        raise UsageError(f"There is no checkpoint of step {step} in {folder} to call {name!r}.")
    files.replace_link(folder / name, step_name(step))


def marks(folder: Path) -> dict[str, str]:
    """{"best": the folder name of its checkpoint} of all marks, `latest` included."""
    names = [name for name in sorted(os.listdir(folder)) if _MARK.fullmatch(name)]
    found = {name: files.read_link(folder / name) for name in names}
    return {name: target for name, target in found.items() if target and _STEP.fullmatch(target)}


def marked_checkpoint(folder: Path, name: str) -> Path | None:
    """The checkpoint that is called "best", "final" or "latest"; None where there is none."""
    target = files.read_link(folder / name) or ""
    path = folder / target
    return path if _STEP.fullmatch(target) and path.is_dir() else None


def resolve_mark(path: Path) -> Path:
    """The checkpoint behind the path of a mark that is a file; any other path as it is."""
    is_file = _MARK.fullmatch(path.name) and path.is_file()
    return (marked_checkpoint(path.parent, path.name) or path) if is_file else path


def resumable(folder: Path) -> list[Path]:
    """Checkpoints that have training state, the newest first."""
    return [path for path in _folders(folder) if _looks_resumable(path)]


def _folders(folder: Path) -> list[Path]:
    """The folders of checkpoints, the newest first."""
    found = [folder / step_name(step) for step in sorted(steps(folder), reverse=True)]
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def retain(folder: Path, keep_last: int = 3, every: int | None = None) -> list[Path]:
    """Keep the last few resumable, marked and regular ones as policies; returns what was removed.

    With `every`, the first checkpoint of each stretch of that many steps keeps its policy. At
    least one checkpoint that verifies stays resumable, however old it is.
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
    """Checkpoints that `retain` gives up: those whose policy stays, and those that go whole.

    also: steps whose policy stays besides those that are marked. verified: the newest that is
    known to be whole, where the caller has found it. What `is_own` does not hold of stays.
    """
    present = _folders(folder)
    resumable = [path for path in present if _looks_resumable(path)]
    whole = set(resumable[: max(keep_last, 1)])
    anchor = verified or next((path for path in resumable if _verifies(path)), None)
    if anchor is None:
        return [], []  # nothing is known to be good, so nothing is given up
    whole.add(anchor)
    policies = {target for name, target in marks(folder).items() if name != LATEST}
    policies.update(map(step_name, also))
    if every:  # The first of each stretch: those after it go, so that the choice stays the same.
        policies.update({step_of(path) // every: path.name for path in present}.values())
    demoted = [p for p in resumable if p not in whole and p.name in policies and is_own(p)]
    return demoted, [p for p in present if p not in whole and p.name not in policies and is_own(p)]


def is_own(path: Path) -> bool:
    """Whether a save has written all that is in a checkpoint's folder: its names, and a seal."""
    return is_plain(path) and any(has_seal(path / part) for part in FILES)


def is_plain(path: Path) -> bool:
    """Whether nothing but files of the names that a save writes is in a folder."""
    return _holds_only(path, FILES)


def is_leftover(path: Path) -> bool:
    """Whether a killed save has left this: by its name, and by those of all that is in it."""
    if _MARKING.fullmatch(path.name):
        return files.read_link(path) is not None
    parts = {**FILES, **{name: None for names in FILES.values() for name in names}}
    return bool(_SAVING.fullmatch(path.name)) and _holds_only(path, parts)


def is_written_by_save(path: Path) -> bool:
    """Whether saves write this into a folder of checkpoints: one, a mark, or half of one."""
    if _STEP_LIKE.fullmatch(path.name):
        return is_plain(path)
    if _MARK.fullmatch(path.name):
        return bool(_STEP.fullmatch(files.read_link(path) or ""))
    return is_leftover(path)


def looks_whole(path: Path) -> bool:
    """Whether the seals and sizes of a resumable checkpoint are right; no hash is computed."""
    try:
        parts = _check_both(path)
        return parts[0].step == step_of(path) and all(part.has_sizes() for part in parts)
    except DamagedCheckpoint:
        return False


def _holds_only(folder: Path, names: Mapping[str, Collection[str] | None]) -> bool:
    """Whether a real folder holds nothing else; {folder: its files, file: None}."""
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
    except OSError:  # gone by now, or not ours to read
        return False
    return True


def _remove_leftover(path: Path) -> None:
    """Delete what `is_leftover` holds of."""
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
    """Take checkpoints, parts of them or leftovers away by a rename, make that durable, and only
    then delete their files. For the holder of the run's lock."""
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
