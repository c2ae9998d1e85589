"""`etude env`: environments with other versions of packages, in interpreters of their own."""

from __future__ import annotations

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.verbs import Verbs, run_verb
from etude.core.errors import UsageError
from etude.core.output import waiting
from etude.envs.adapters import virtual_envs

USAGE = f"""\
etude env makes Python environments for simulations that need other versions of packages than
Etude, for example an older MuJoCo. `--env.python NAME` runs Gymnasium environments in one.

  etude env list           environments on this machine, and those that can be made
  etude env create NAME    make one: {", ".join(virtual_envs.PACKAGES)};
                           or any name with --packages
"""


class ListCommand(Reporting):
    """List the environments on this machine, and those that can be made."""


class CreateCommand(Reporting):
    """Make a virtual environment with packages of its own, and list what was installed."""

    name: Positional[str] = Field(description="Its name, which env.python takes.")
    packages: tuple[str, ...] = Field(
        (), description="Requirements as for pip; default: the pinned list of this name."
    )
    base: str = Field("", description="Interpreter to make it from; default: this one.")


def run(arguments: list[str]) -> int:
    """Run `etude env VERB ...`; the exit code."""
    return run_verb("etude env", USAGE, VERBS, arguments)


def _list(arguments: list[str]) -> None:
    command = parse("env list", ListCommand, arguments)
    there = virtual_envs.installed()
    names = sorted({*there, *virtual_envs.PACKAGES})
    rows = [
        {
            "name": name,
            "folder": str(there.get(name, "")),
            "packages": virtual_envs.packages(there[name]) if name in there else {},
            "pinned": list(virtual_envs.PACKAGES.get(name, ())),
        }
        for name in names
    ]
    lines = []
    for row in rows:
        shown = row["folder"] or f"`etude env create {row['name']}`: {', '.join(row['pinned'])}"
        lines.append(f"{row['name']:20s} {shown}")
    command.show(rows, "\n".join(lines))


def _create(arguments: list[str]) -> None:
    command = parse("env create", CreateCommand, arguments)
    wanted = command.packages or virtual_envs.PACKAGES.get(command.name)
    if wanted is None:
        known = ", ".join(virtual_envs.PACKAGES)
        raise UsageError(
            f"There is no pinned list '{command.name}' ({known}): name packages with --packages."
        )
    with waiting(f"installing {', '.join(wanted)}"):
        folder = virtual_envs.create(command.name, wanted, command.base, lambda text: None)
    found = virtual_envs.packages(folder)
    versions = "\n".join(f"  {name} {version}" for name, version in found.items())
    text = f"Made {folder} with\n{versions}\nUse it with --env.python {command.name}."
    command.show({"folder": str(folder), "packages": found}, text)


VERBS: Verbs = {"list": _list, "create": _create}
