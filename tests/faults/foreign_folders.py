"""Folders and files of other programs and of people, beside runs and inside of them: `etude prune
--yes`, `etude fsck` and a resume's cleaning delete and change none of them, and runs beside them
are pruned. The last case at full size has 2,000 runs, which are listed within 10 s of processor
time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from etude.api import train
from etude.cli.main import main
from etude.runs import checkpoint
from etude.runs.folder import RunFolder
from toys import tiny_reach

ROW, UNIT = 25, "foreign folders"
FULL, IN_CI, SECONDS = 1000, 1, 900.0
FEW, MANY = (20, 12), (980, 2000)
"""Foreign folders and runs, of the first case and of the others."""
LISTED = 10.0
"""Seconds of processor time in which a process lists what can be freed."""
LONG_AGO = 7200.0


def case(number: int, seed: int, folder: Path) -> int:
    strangers, runs = MANY if number else FEW
    rng, root = random.Random(f"{seed} {number}"), folder / "runs"
    run = train(
        tiny_reach(4).replace(checkpoint__every="1 iteration", evaluation__final_episodes=0),
        folder / "made",
    ).path
    own = [copied(run, root / f"sweep-{i % 7}" / f"{i}") for i in range(runs)]
    half = begun(root / ".tmp-2026-01-01-000000-s1-99")
    kinds = [*KINDS]
    foreign = []
    for i in range(strangers):
        path = root / f"sweep-{rng.randrange(7)}" / f"{rng.choice(NAMES)}-{i}"
        foreign.append(kinds[i % len(kinds)](run, path, rng))
    age(root)
    before = [fingerprint(path) for path in foreign]
    names = {path: listing(path) for path in own}

    for path in foreign[: len(kinds)]:
        quiet("fsck", str(path))
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    dry = subprocess.run(
        [sys.executable, "-m", "etude", "prune", str(root)], capture_output=True, text=True
    )
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    took = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    assert dry.returncode == 0, dry.stderr
    assert "Nothing was removed: --yes removes it." in dry.stdout
    assert {path: listing(path) for path in own} == names, "listing what can go removed something"
    if number:
        print(f"{runs:,} runs beside {strangers:,} foreign folders listed in {took:.1f} s")

    code, said = quiet("prune", str(root), "--yes")
    assert code == 0, said
    wrong = [path for path, was in zip(foreign, before, strict=True) if fingerprint(path) != was]
    assert not wrong, f"{len(wrong)} foreign folders were changed, such as {wrong[0]}"
    assert not half.exists()
    for path in own:
        kept = [one.name for one in checkpoint.resumable(path / "checkpoints")]
        assert kept == [checkpoint.step_name(1024)]
    checkpoint.verify(own[0] / "checkpoints" / checkpoint.step_name(1024))
    cleaned(folder / "cleaned")
    assert took < LISTED, f"listing took {took:.1f} s of processor time"
    return strangers


def copied(run: Path, to: Path) -> Path:
    """The same run again: its large files are hard links."""
    shutil.copytree(run, to, symlinks=True, copy_function=os.link)
    return to


def own_copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def begun(path: Path) -> Path:
    """A run whose creation was killed, as it is left."""
    RunFolder.create(path.with_name("half"), "seed: 1\n", "plan\n", {}, {}).close()
    path.with_name("half").rename(path)
    (path / "plan.txt").unlink()
    return path


def write(path: Path, text: str = "precious") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def with_sources(run: Path, path: Path, rng: random.Random) -> Path:
    """Another tool's: a recipe.yaml, empty checkpoints/, data, sources and history."""
    write(path / "recipe.yaml", "flour: 500 g\n")
    (path / "checkpoints").mkdir()
    for name in ("data/1.csv", ".git/HEAD", "src/main.py"):
        write(path / name)
    return path


def temporary(run: Path, path: Path, rng: random.Random) -> Path:
    path = path.with_name(f".tmp-{path.name}-{rng.randrange(99999)}")
    write(path / "draft" / "thesis.tex")
    return path


def temporary_like_a_run(run: Path, path: Path, rng: random.Random) -> Path:
    return with_sources(run, path.with_name(f".tmp-{path.name}-{rng.randrange(99999)}"), rng)


def with_checkpoints(run: Path, path: Path, rng: random.Random) -> Path:
    """Checkpoints of the same names, without seals."""
    write(path / "recipe.yaml", "name: another\ncheckpoint: {keep_every: null}\n")
    write(path / "manifest.json", '{"files": {"recipe.yaml": ""}}')
    for step in (256, 512):
        for file in ("policy/arrays.safetensors", "training/state.json", "training/manifest.json"):
            write(path / "checkpoints" / checkpoint.step_name(step) / file)
    return path


def unsealed(run: Path, path: Path, rng: random.Random) -> Path:
    """A run of a version before seals, or one whose manifest is damaged."""
    path = own_copy(run, path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"seal": "', '"seal": "0'))
    return path


def holding(*names: str) -> Callable[[Path, Path, random.Random], Path]:
    """A run with files of a person in it."""

    def make(run: Path, path: Path, rng: random.Random) -> Path:
        path = own_copy(run, path)
        for name in names:
            write(path / name)
        return path

    return make


def with_a_link(run: Path, path: Path, rng: random.Random) -> Path:
    path = own_copy(run, path)
    write(path.with_name(f"{path.name}-data") / "1.csv")
    (path / "data").symlink_to(path.with_name(f"{path.name}-data"))
    return path


def failed(run: Path, path: Path, *names: str) -> Path:
    """A run that saved nothing, with these files of somebody else."""
    RunFolder.create(path, "seed: 1\n", "plan\n", {}, {}).close()
    for name in names:
        write(path / name)
    return path


def failed_with_notes(run: Path, path: Path, rng: random.Random) -> Path:
    return failed(run, path, rng.choice(("notes.txt", "failures/why.md", "evaluations/mine/1")))


def failed_with_another_recipe(run: Path, path: Path, rng: random.Random) -> Path:
    return failed(run, path, "recipe.yaml")


def failed_with_wandb(run: Path, path: Path, rng: random.Random) -> Path:
    return failed(run, path, "wandb/offline-run-1/run.wandb")


def half_with_sources(run: Path, path: Path, rng: random.Random) -> Path:
    made = path.with_name(f".tmp-{path.name}-{rng.randrange(99999)}")
    return failed(run, made, "src/main.py")


KINDS = (
    with_sources,
    temporary,
    temporary_like_a_run,
    with_checkpoints,
    unsealed,
    holding("notes.txt"),
    holding("data/1.csv", ".git/HEAD"),
    holding("checkpoints/000000000256/notes.txt"),
    holding("checkpoints/.tmp-000000000512-77/model.pt"),
    holding("checkpoints/000000000001.damaged/policy/model.pt"),
    holding("checkpoints/000000000002.aside/policy/arrays.safetensors", "checkpoints/my-model"),
    holding(".tmp-work-1/thesis.tex"),
    holding("replay/shard-0/precious.bin", "events.out.tfevents.1700000000.host.1.0"),
    with_a_link,
    failed_with_notes,
    failed_with_another_recipe,
    failed_with_wandb,
    half_with_sources,
)
NAMES = ("run", "backup", "2026-01-01-000000-s1", "paper", "old run")


def cleaned(folder: Path) -> None:
    """What a resume and a save clean up between checkpoints is theirs alone."""
    for step in (1, 2, 3, 4):
        saved(folder, step)
    for name in (".tmp-000000000005-7", "000000000001", "000000000009.replaced"):
        write(folder / name / "notes.txt")
    write(folder / ".tmp-000000000006-8" / "policy" / "arrays.safetensors", "half a save")
    write(folder / ".tmp-mine")
    precious = [*folder.rglob("notes.txt"), folder / ".tmp-mine"]
    assert checkpoint.newest_verified(folder, lambda text: None) is not None
    assert not (folder / ".tmp-000000000006-8").exists()
    saved(folder, 5)
    checkpoint.retain(folder, 1)
    assert sorted(checkpoint.steps(folder)) == [1, 5]
    left = {path.name for path in folder.rglob("*")}
    assert {path.name for path in precious} <= left
    assert len([*folder.rglob("notes.txt")]) == 3


def saved(folder: Path, step: int) -> Path:
    return checkpoint.save(folder, step, ({"w": np.zeros(3)}, {"tag": step}), {"step": step})


def quiet(*arguments: str) -> tuple[int, str]:
    """A command's exit code, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([*arguments])
    return code, said.getvalue()


def age(root: Path) -> None:
    """Make everything look as if nobody had written it for hours."""
    then = time.time() - LONG_AGO
    for here, folders, names in os.walk(root):
        for name in [*folders, *names]:
            os.utime(os.path.join(here, name), (then, then), follow_symlinks=False)


def fingerprint(path: Path) -> str:
    """All that is in a folder: names, kinds, contents and times of change."""
    sha = hashlib.sha256()
    for each in (path, *sorted(path.rglob("*"))):
        stat = each.lstat()
        sha.update(f"{each} {stat.st_mode} {stat.st_mtime_ns}".encode())
        if each.is_symlink():
            sha.update(os.readlink(each).encode())
        elif each.is_file():
            sha.update(each.read_bytes())
    return sha.hexdigest()


def listing(path: Path) -> list[str]:
    return sorted(os.path.join(here, *names) for here, _, names in os.walk(path))
