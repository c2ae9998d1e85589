"""Virtual environments of other interpreters, for environments that need other versions.

`env.python` names one: a folder of `venv`, an interpreter, or a name in `HOMES`, where
`etude env create NAME` makes them from the pinned lists of `PACKAGES`.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.core.errors import UsageError

_GYM = "gymnasium[mujoco]==1.4.0"
PACKAGES: dict[str, tuple[str, ...]] = {
    "metaworld": ("metaworld==3.1.1", "mujoco==3.3.0", _GYM),
    "gymnasium-robotics": ("gymnasium-robotics==1.4.2", "mujoco==3.3.7", _GYM),
    "robosuite": ("robosuite==1.5.2", "mujoco==3.3.7", _GYM),
    "aloha": ("gym-aloha==0.1.5", "mujoco==3.3.7", "dm_control==1.0.34", _GYM),
}
"""{name: requirements}: the package, and what it simulates with, in the versions tried."""


def home() -> Path:
    """The folder of the environments that `create` makes."""
    given = os.environ.get("ETUDE_ENVS")
    if given:
        return Path(given)
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(data) / "etude" / "envs"


def installed() -> dict[str, Path]:
    """{name: folder} of the environments in `home`."""
    root = home()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return {each.name: each for each in folders if python_in(each) is not None}


def python_in(folder: Path) -> Path | None:
    """The interpreter of a virtual environment; None if the folder has none."""
    found = folder / "bin" / "python"
    return found if found.exists() else None


def interpreter_of(name: str) -> Path:
    """The interpreter that `env.python` names. A link in a venv is not resolved: it is the venv."""
    given = Path(name).expanduser()
    if os.sep not in name and not given.exists():
        given = home() / name
    found = python_in(given) if given.is_dir() else given
    if found is not None and os.access(found, os.X_OK) and found.is_file():
        return found.absolute()
    if os.sep not in name and name in PACKAGES:
        raise UsageError(f"There is no environment '{name}': `etude env create {name}` makes it.")
    near = difflib.get_close_matches(name, {*installed(), *PACKAGES}, n=1)
    hint = f"Did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"env.python '{name}' is neither an interpreter nor a virtual environment. {hint}"
        "`etude env list` shows those that exist."
    )


def create(
    name: str, requirements: Sequence[str], base: str = "", say: Callable[[str], None] = print
) -> Path:
    """Make an environment and install packages; returns its folder.

    requirements: as for pip. base: the interpreter it is made from; default this one.
    """
    folder = home() / name
    if folder.exists():
        raise UsageError(f"{folder} exists: remove it first, or choose another name.")
    say(f"Making {folder} with {', '.join(requirements)}.")
    try:
        _call([base or sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
        _call([*pip, "--disable-pip-version-check", *requirements])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def packages(folder: Path) -> dict[str, str]:
    """{name: version} of what is installed in an environment."""
    code = "import json; from importlib.metadata import distributions as d"
    code += "; print(json.dumps({x.metadata['Name']: x.version for x in d()}))"
    python = python_in(folder)
    if python is None:
        raise UsageError(f"{folder} is not a virtual environment.")
    found: dict[str, str] = json.loads(_call([str(python), "-P", "-c", code]))
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def _call(command: list[str]) -> str:
    clean = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=clean)
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be run: {error.strerror}.") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = " ".join(lines or done.stderr.splitlines()[-3:])
        raise UsageError(f"`{' '.join(command)}` failed: {why}")
    return done.stdout
