"""A save, a re-save and a clean-up, killed at every system call and by every power loss."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_faults import Died, Failing, Mortal, Volatile, Watched, make_state, save, tag_of

from etude.core.errors import EtudeError
from etude.runs import checkpoint, files

Act = Callable[[Path], object]


def before_first(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)


def before_save(folder: Path) -> None:
    save(folder, 1)


def before_resave(folder: Path) -> None:
    save(folder, 1)
    save(folder, 2)


def before_retain(folder: Path) -> None:
    for step in range(1, 7):
        save(folder, step)
    checkpoint.mark(folder, "best", 2)


def before_policy(folder: Path) -> None:
    save(folder, 2)
    save_policy(folder, 1)


def save_policy(folder: Path, tag: int) -> None:
    checkpoint.save(folder, 3, make_state(tag)[0], None)


SCENES: dict[str, tuple[Callable[[Path], None], Act, set[int | None], int]] = {
    "first save": (before_first, lambda f: save(f, 1), {None, 1}, 1),
    "save": (before_save, lambda f: save(f, 2), {1, 2}, 2),
    "save again": (before_resave, lambda f: save(f, 2, tag=20), {2, 20}, 20),
    "save a policy": (before_policy, lambda f: save_policy(f, 2), {2}, 2),
    "retain": (before_retain, lambda f: checkpoint.retain(f), {6}, 6),
    "mark": (before_resave, lambda f: checkpoint.mark(f, "best", 1), {2}, 2),
}


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Act, set[int | None], int]:
    prepare, act, allowed, final = SCENES[request.param]
    base = tmp_path / "base"
    with files.using(Watched()):
        base.mkdir()
        prepare(base / "checkpoints")
    return base, act, allowed, final


def count_calls(base: Path, act: Act) -> list[str]:
    """The system calls of an undisturbed act, on a copy."""
    disk, copy = Mortal(), base.with_name("counted")
    shutil.copytree(base, copy, symlinks=True)
    with files.using(disk):
        act(copy / "checkpoints")
    return disk.calls


def found_tag(folder: Path) -> int | None:
    """What a resume finds, checked to the last bit; nothing of a dead writer may be left."""
    said: list[str] = []
    with files.using(Watched()):
        path = checkpoint.newest_verified(folder, said.append)
    assert said == []
    if path is None:
        return None
    assert os.readlink(folder / "latest") == path.name
    assert not [n for n in os.listdir(folder) if n.startswith(".tmp") or "replaced" in n]
    return tag_of(path)


def check_all(folder: Path, at_least: set[str]) -> None:
    """Every checkpoint there is can act, and be resumed unless it is policy-only by design."""
    present = list(folder.iterdir()) if folder.exists() else []
    assert at_least <= {path.name for path in present}
    for path in present:
        if path.name.startswith(".tmp-") or path.name.endswith(".replaced"):
            continue
        checkpoint.load_policy_parts(path)
        if (path / "training").exists():
            checkpoint.verify(path.resolve())


def lasting_names(base: Path) -> set[str]:
    """What no accident may take away: whatever was there, but for what `retain` removes."""
    names = set(os.listdir(base / "checkpoints")) if (base / "checkpoints").exists() else set()
    return names - {"000000000001", "000000000003"} if "000000000006" in names else names


@pytest.mark.rotated
def test_death_at_every_call(scene: tuple[Path, Act, set[int | None], int]) -> None:
    base, act, allowed, final = scene
    calls = count_calls(base, act)
    assert len(calls) >= 4
    for number, name in enumerate(calls):
        for moment in ("before", "after", "torn") if name == "write" else ("before", "after"):
            copy = base.with_name(f"{number}-{moment}")
            shutil.copytree(base, copy, symlinks=True)
            with files.using(Mortal(number, moment)), pytest.raises(Died):
                act(copy / "checkpoints")
            tag = found_tag(copy / "checkpoints")
            assert tag in allowed, (number, name, moment)
            check_all(copy / "checkpoints", lasting_names(base))
    assert tag == final


@pytest.mark.rotated
def test_death_of_the_recovery_too(tmp_path: Path) -> None:
    """A re-save dies, and then the resume that would have put things right dies as well."""
    base = tmp_path / "base"
    with files.using(Watched()):
        before_resave(base / "checkpoints")
    calls = count_calls(base, lambda f: save(f, 2, tag=20))
    for number in range(calls.index("rename") - 1, len(calls)):  # before, only writing was going on
        dead = tmp_path / f"{number}"
        shutil.copytree(base, dead, symlinks=True)
        with files.using(Mortal(number, "after")), pytest.raises(Died):
            save(dead / "checkpoints", 2, tag=20)
        died, again = True, 0
        while died:
            copy = tmp_path / f"{number}-{again}"
            shutil.copytree(dead, copy, symlinks=True)
            with files.using(Mortal(again, "after")):
                try:
                    checkpoint.newest_verified(copy / "checkpoints")
                    died = False
                except Died:
                    again += 1
            assert found_tag(copy / "checkpoints") in {2, 20}
            shutil.rmtree(copy)


@pytest.mark.rotated
def test_power_loss_at_every_call(scene: tuple[Path, Act, set[int | None], int]) -> None:
    base, act, allowed, final = scene
    calls = count_calls(base, act)
    for number in [*range(len(calls)), None]:
        copy = base.with_name(f"{number}")
        shutil.copytree(base, copy, symlinks=True)
        disk = Volatile(copy, number)
        with files.using(disk):
            try:
                act(copy / "checkpoints")
            except Died:
                assert number is not None
        for variant in ("lost", "named", "zeroed", "mixed"):
            left = base.with_name(f"{number}-{variant}")
            disk.after_power_loss(left, variant, seed=(number or 0) * 2 + len(variant))
            tag = found_tag(left / "checkpoints")
            assert tag in allowed, (number, variant)
            assert number is not None or tag == final
            check_all(left / "checkpoints", lasting_names(base))
    assert final in allowed


@pytest.mark.rotated
@pytest.mark.parametrize(("code", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_disk_error_at_every_call(
    scene: tuple[Path, Act, set[int | None], int], code: int, lasting: bool
) -> None:
    base, act, allowed, _ = scene
    words = {errno.ENOSPC: "disk is full", errno.EIO: "I/O error"}
    for number in range(len(count_calls(base, act))):
        copy = base.with_name(f"{number}")
        shutil.copytree(base, copy, symlinks=True)
        with files.using(Failing(number, code, lasting)), pytest.raises(EtudeError) as caught:
            act(copy / "checkpoints")
        assert words[code] in str(caught.value)
        if not lasting:  # one refused call is put right at once, not only by the next resume
            check_all(copy / "checkpoints", lasting_names(base))
        assert found_tag(copy / "checkpoints") in allowed


def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with files.using(Failing(0, errno.EROFS, True)), pytest.raises(EtudeError) as caught:
        save(tmp_path, 2)
    assert str(tmp_path) in str(caught.value)
    assert "read-only" in str(caught.value)
    assert found_tag(tmp_path) == 1


def test_a_failed_save_gives_its_space_back(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with files.using(Failing(8, errno.ENOSPC, False)), pytest.raises(EtudeError, match="step 2"):
        save(tmp_path, 2)
    assert sorted(os.listdir(tmp_path)) == ["000000000001", "latest"]
