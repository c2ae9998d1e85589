"""`etude list`: recipes and kinds of this package and of others, without importing them."""

from __future__ import annotations

import json

from etude.cli.verbs import HELP, check_words
from etude.core.catalogue import KINDS, RECIPES, Catalogue

USAGE = """\
usage: etude list [--kinds] [--names] [--json]

List the recipes and their purpose.

  --kinds   List the kinds of each section of a recipe, for example --algorithm.kind ppo.
  --names   List only the names of recipes, one per line.
  --json    Print JSON, for programs.
"""


def run(arguments: list[str]) -> None:
    """Print recipes or kinds."""
    check_words("list", arguments, (*HELP, "--kinds", "--names", "--json"))
    if HELP.intersection(arguments):
        print(USAGE, end="")
    elif "--kinds" in arguments:
        sections = {section: Catalogue(*place) for section, place in KINDS.items()}
        if "--json" in arguments:
            known = {s: {n: c.source(n) or "etude" for n in c.names()} for s, c in sections.items()}
            print(json.dumps(known, indent=2))
        else:
            print("\n".join(f"{section}\n{_table(kinds)}" for section, kinds in sections.items()))
    elif "--names" in arguments:
        print("\n".join(RECIPES.names()))
    elif "--json" in arguments:
        print(json.dumps({name: RECIPES.purpose(name) for name in RECIPES.names()}, indent=2))
    else:
        print(_table(RECIPES))


def _table(catalogue: Catalogue) -> str:
    """A line for each name: its purpose, and the package it is from."""
    names = catalogue.names()
    width = max(map(len, names)) + 2
    sources = {name: catalogue.source(name) for name in names}
    notes = {name: f" (from {source})" if source else "" for name, source in sources.items()}
    return "\n".join(f"  {n:<{width}}{catalogue.purpose(n)}{notes[n]}" for n in names)
