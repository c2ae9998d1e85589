"""`etude list`: recipes and kinds of this package and of others, without importing them."""

from __future__ import annotations

import json

from etude.cli.verbs import HELP, check_words
from etude.core.catalogue import KINDS, RECIPES, Catalogue, load_attribute

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
        table = dict(zip(RECIPES.names(), _table(RECIPES).splitlines(), strict=True))
        groups = [
            "\n".join([title, *(table[name] for name in names)])
            for title, names in groups_of_recipes().items()
        ]
        print("\n\n".join(groups))


def groups_of_recipes() -> dict[str, list[str]]:
    """{title: recipes}: those of a module of this package are a group, and those of others."""
    titles, known = load_attribute("etude.tasks:GROUPS"), RECIPES.built_in()
    groups: dict[str, list[str]] = {}
    for name in RECIPES.names():
        module = known.get(name, "").partition(":")[0]
        groups.setdefault(titles[module] if module else "Other packages", []).append(name)
    return groups


def _table(catalogue: Catalogue) -> str:
    """A line for each name: its purpose, and the package it is from."""
    names = catalogue.names()
    width = max(map(len, names)) + 2
    sources = {name: catalogue.source(name) for name in names}
    notes = {name: f" (from {source})" if source else "" for name, source in sources.items()}
    return "\n".join(f"  {n:<{width}}{catalogue.purpose(n)}{notes[n]}" for n in names)
