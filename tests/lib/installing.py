"""Wheels of this repository, and environments that have them and what they ask for alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    name: os.environ[name] for name in ("HOME", "PATH", "MUJOCO_GL") if name in os.environ
}
"""Of the commands that are run there: no PYTHONPATH leads back to a checkout."""


def build(package: Path, folder: Path) -> tuple[Path, Path]:
    """(wheel, source archive) of a package, built in a copy of it; the wheel is built of the
    archive, so that both hold all that is needed."""
    source = folder / "source"
    source.mkdir()
    for path in package.iterdir():
        if path.name in ("src", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
            shutil.copytree(path, source / path.name, ignore=ignored)
        elif path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    # Without a fresh environment for setuptools: the one that is here satisfies the same bound.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (archive,) = (folder.glob(f"dist/*.{kind}") for kind in ("whl", "tar.gz"))
    return wheel, archive


def install(wheel: Path, folder: Path) -> Path:
    """A new environment with a wheel and all that it asks for; the folder of its commands.

    Dependencies are links to what is installed here, chosen by what the wheel and they themselves
    ask for: torch is not downloaded again, and a dependency that is not declared is not there.
    """
    venv.create(folder, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    command += ["-q", "--no-deps", "--no-index", wheel]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (information,) = site.glob("*.dist-info")
    for each in _dependencies(Distribution.at(information)).values():
        for name in {path.parts[0] for path in each.files or () if path.parts[0] != ".."}:
            if name != "__pycache__" and not (site / name).exists():
                (site / name).symlink_to(each.locate_file(name))
    return folder / "bin"


def _dependencies(package: Distribution) -> dict[str, Distribution]:
    """{name: distribution} of all that a package asks for without its extras, and what they do."""
    found: dict[str, Distribution] = {}
    asking = [(package, "")]
    while asking:
        who, extra = asking.pop()
        for text in who.requires or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            try:
                there = distribution(wanted.name)
            except PackageNotFoundError as error:
                raise AssertionError(f"{who.name} asks for {text}, which is not here") from error
            assert wanted.specifier.contains(there.version, prereleases=True), (text, there.version)
            if there.name not in found or wanted.extras:
                found[there.name] = there
                asking += [(there, name) for name in ("", *wanted.extras)]
    return found
