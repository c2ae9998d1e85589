"""Pages of the reference, made of the code when the site is built: fields, commands, Python names.

Every page is Markdown. Kinds of other installed packages are left out: the site is Etude's own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import etude
import etude.plugin
from etude.cli.main import VERBS, main
from etude.core.catalogue import KINDS, RECIPES, Catalogue, load_attribute
from etude.core.config import Config
from etude.planning.recipe import FREE, LATER, REGISTRIES, Recipe
from etude.planning.recipes import made_by

BOUNDS = {
    annotated_types.Ge: ("ge", "≥"),
    annotated_types.Gt: ("gt", ">"),
    annotated_types.Le: ("le", "≤"),
    annotated_types.Lt: ("lt", "<"),
}
ABOUT = {
    "algorithm": "How the policy learns.",
    "env": "The task. `--env.id`, `--env.task` and `--env.parallel` choose the kind by themselves.",
    "policy": "Networks. Which kinds fit depends on the algorithm.",
    "rewards": "Where the rewards that are learned from come from.",
    "collector": "How environments are stepped.",
    "logs": "Writers of logs, named by `--logs.writers`.",
}
COLUMNS = "88"
"""Width of a page of help."""


def pages() -> dict[str, str]:
    """{page: Markdown} of the whole reference."""
    sections = {f"reference/{name}.md": kinds_page(name) for name in ABOUT}
    return {
        "reference/index.md": index_page(),
        "reference/recipe.md": recipe_page(),
        "reference/recipes.md": recipes_page(),
        "reference/command-line.md": command_line_page(),
        "reference/python.md": python_page(),
        "reference/plugin.md": plugin_page(),
        **sections,
    }


def index_page() -> str:
    """What there is to look up."""
    return """# Reference

These pages are made of the code when the site is built, so they say what this version does.

- [Recipe fields](recipe.md): every field of every section, with type, default and meaning.
  Sections that can be of several kinds have a page each: [algorithm](algorithm.md),
  [env](env.md), [policy](policy.md), [rewards](rewards.md), [collector](collector.md),
  [logs](logs.md).
- [Recipes](recipes.md): the recipes that come with Etude.
- [Command line](command-line.md): every command with its options.
- [Python API](python.md): what `import etude` gives.
- [Plugin API](plugin.md): what a package of your own imports from `etude.plugin`.
- [Glossary](../glossary.md): Etude's words beside those of other libraries.
"""


_RECIPE = """\
A recipe is everything a run is. A field is written `--section.field value` on the command line,
`section: {field: value}` in a recipe.yaml, and `recipe.replace("section.field", value)` in Python.
`etude train RECIPE --help-all` prints the fields of one recipe with its values.

Where a type ends with `...`, the field takes several values: `--policy.hidden 128,128`. A field
that is marked *free* changes no bit of the result and may be changed at any resume. One that is
marked *later* may be changed at a resume, which then says so. All others are fixed for a run
([why](../exactness.md)).
"""


def recipe_page() -> str:
    """The fields of a recipe itself and of the sections that are of one kind."""
    lines = [
        "# Recipe fields\n",
        _RECIPE,
        "## The recipe\n",
        table(
            (n, f, Recipe)
            for n, f in Recipe.model_fields.items()
            if n not in REGISTRIES and _section_of(f) is None
        ),
    ]
    for name, field in Recipe.model_fields.items():
        if name in REGISTRIES:
            kinds = ", ".join(
                f"[{kind}]({name}.md#{_slug(name, kind)})" for kind in _built_in(name)
            )
            about = field.description or ""
            lines.append(
                f"## {name}\n\n{about} It is of a kind, each with its own fields: {kinds}.\n"
            )
        elif section := _section_of(field):
            lines.append(f"## {name}\n\n{field.description}\n\n{table(_fields(section, name))}")
    return "\n".join(lines)


def kinds_page(section: str) -> str:
    """Every kind of one section; kinds that share a config share a table."""
    catalogue, known = Catalogue(*KINDS[section]), _built_in(section)
    by_class: dict[str, list[str]] = {}
    for kind, place in known.items():
        by_class.setdefault(place, []).append(kind)
    lines = [f"# {section}\n\n{ABOUT[section]}\n", "| kind | what it is |\n|---|---|"]
    lines += [f"| `{k}` | {_cell(catalogue.purpose(k))} |" for k in known]
    for place, kinds in by_class.items():
        config = load_attribute(place)
        lines.append(f"\n## {', '.join(kinds)} {{: #{_slug(section, kinds[0])} }}\n")
        lines += [f'<span id="{_slug(section, kind)}"></span>' for kind in kinds[1:]]
        lines.append(" ".join((config.__doc__ or "").split()) + "\n")
        lines.append(table(_fields(config, section)))
    return "\n".join(lines)


def recipes_page() -> str:
    """The recipes that come with Etude."""
    rows = []
    for name in RECIPES.built_in():
        recipe = made_by(name)()
        env = "a dataset" if recipe.env is None else f"`{recipe.env.kind}`"
        steps = recipe.clock.total_timesteps
        length = f"{steps:,}" if steps else "by updates"
        algorithm, policy = recipe.algorithm.kind, recipe.policy.kind
        kind = f"[{algorithm}](algorithm.md#{_slug('algorithm', algorithm)})"
        about = _cell(RECIPES.purpose(name))
        rows.append(f"| `{name}` | {about} | {kind} | {env} | {policy} | {length} |")
    return _RECIPES + "\n".join(rows) + "\n"


_RECIPES = """\
# Recipes

`etude train RECIPE` trains one, and `etude plan RECIPE` says what it would do. The last column
counts steps of environments.

| recipe | what it is for | algorithm | env | policy | steps |
|---|---|---|---|---|---|
"""


def command_line_page() -> str:
    """What every command prints with --help."""
    lines = ["# Command line\n", "What `etude` and each of its commands print with `--help`.\n"]
    lines.append(f"```text\n{_printed(['--help'])}```\n")
    for verb in VERBS:
        page = _printed([verb, "--help"])
        lines.append(f"## etude {verb}\n\n```text\n{page}```\n")
        if verb in ("data", "motion"):
            inside = load_attribute(f"etude.cli.{verb}:VERBS")
            for each in inside:
                lines.append(
                    f"### etude {verb} {each}\n\n```text\n{_printed([verb, each, '--help'])}```\n"
                )
    return "\n".join(lines)


_PYTHON = """\
`import etude` gives these names; each is loaded when it is first used. `etude.recipes` has a
function for every [recipe](recipes.md), such as `etude.recipes.reach_short()`, and `etude.mj` has
what [tasks for robots](../robots.md) are made of.
"""


def python_page() -> str:
    """The public names of `etude`, by mkdocstrings."""
    exports = etude._EXPORTS
    mj = load_attribute("etude.mj:__all__")
    groups = {
        "Runs": ["plan", "train", "resume", "Run", "Recipe"],
        "Policies and rewards": ["load_policy", "load_reward", "export"],
        "Environments": ["make", "make_vec"],
        "Tasks in numpy": ["ArrayTask", "State", "Outcome", "ActionSpec", "ArraySpec"],
        "While training": ["Callback"],
        "Datasets": ["import_dataset"],
    }
    told = {name for names in groups.values() for name in names}
    if told != set(exports):
        raise ValueError(f"names that the page of Python lacks: {sorted(told ^ set(exports))}")
    lines = ["# Python API\n", _PYTHON]
    for group, names in groups.items():
        lines.append(f"## {group}\n")
        for name in names:
            module, inside = exports[name]
            module = "etude.planning.recipe" if name == "Recipe" else module
            options = "    options:\n      inherited_members: [replace]\n" * (name == "Recipe")
            lines.append(f"::: {module}.{inside}\n{options}")
    lines.append("## etude.mj\n")
    for name in mj:
        thing = load_attribute(f"etude.mj:{name}")
        if isinstance(thing, types.ModuleType):
            lines.append(f"::: {thing.__name__}\n")
        elif getattr(thing, "__module__", "").startswith("etude."):
            lines.append(f"::: {thing.__module__}.{thing.__qualname__}\n")
    return "\n".join(lines)


_PLUGIN = """\
# Plugin API

`etude.plugin` is the one module that a [package of your own](../plugins.md) imports. Each name is
loaded when it is first used.
"""


def plugin_page() -> str:
    """The names of `etude.plugin` by purpose, each with the first sentence of its docstring."""
    lines, told = [_PLUGIN], set()
    for line in (etude.plugin.__doc__ or "").splitlines()[4:]:
        if line and not line.startswith(" "):
            lines.append(f"\n## {line}\n\n| name | what it is |\n|---|---|")
        for name in re.findall(r"\w+", line):
            if name in etude.plugin.__all__ and name not in told:
                told.add(name)
                lines.append(f"| `{name}` | {_cell(_purpose(getattr(etude.plugin, name)))} |")
    if told != set(etude.plugin.__all__):
        raise ValueError(f"names that the docstring of etude.plugin lacks: {told}")
    return "\n".join(lines) + "\n"


def _purpose(thing: Any) -> str:
    """The first paragraph of a class's, function's or module's own docstring."""
    own = isinstance(thing, type | types.FunctionType | types.ModuleType)
    return (thing.__doc__ or "").partition("\n\n")[0].rstrip(":") if own else "a type or a constant"


def table(rows: Iterator[tuple[str, FieldInfo, type[Config]]]) -> str:
    """A row for each (dotted name, field, config class that has it)."""
    lines = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for name, field, config in rows:
        about = field.description or ""
        inside = name.rpartition(".")[2]
        if elsewhere := config.aliases.get(inside):
            about += f" Elsewhere: {', '.join(f'`{each}`' for each in elsewhere.split())}."
        marks = {"free": FREE, "later": LATER}
        about += "".join(f" *{mark}*" for mark, names in marks.items() if _among(name, names))
        lines.append(f"| `{name}` | {_cell(_type(field))} | {_default(field)} | {_cell(about)} |")
    return "\n".join(lines) + "\n"


def _fields(config: type[Config], prefix: str) -> Iterator[tuple[str, FieldInfo, type[Config]]]:
    """Every field of a config, those of configs inside it too; which kind it is has no row."""
    for name, field in config.model_fields.items():
        inner = _section_of(field)
        if inner is not None:
            yield from _fields(inner, f"{prefix}.{name}")
        elif name != "kind":
            yield f"{prefix}.{name}", field, config


def _section_of(field: FieldInfo) -> type[Config] | None:
    """The config class of a field that is a section of its own."""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Config):
        return type(default)
    member = next((m for m in _members(field.annotation) if isinstance(m, type)), None)
    return member if member is not None and issubclass(member, Config) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(m for each in typing.get_args(annotation) for m in _members(each))
    return (annotation,)


def _type(field: FieldInfo) -> str:
    """The type of a field with its bounds: "int ≥ 1", "a, b or none", "int ..."."""
    bounds = [
        f"{sign} {getattr(mark, name):g}"
        for mark in field.metadata
        for kind, (name, sign) in BOUNDS.items()
        if isinstance(mark, kind)
    ]
    return " ".join([_named(field.annotation), ", ".join(bounds)]).strip()


def _named(annotation: Any) -> str:
    names = []
    for member in _members(annotation):
        inside = [each for each in typing.get_args(member) if each is not ...]
        origin = typing.get_origin(member)
        if origin is Literal:
            names += [f"`{value}`" for value in inside]
        elif origin in (tuple, list):
            names.append(f"{_named(inside[0])} ...")
        elif origin is dict:
            names.append(f"{_named(inside[0])}: {_named(inside[1])} ...")
        elif member is type(None):
            names.append("none")
        else:
            names.append(getattr(member, "__name__", str(member)))
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} or {last}" if most else last


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "*needed*"
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return f"`{','.join(map(str, value))}`" if value else "empty"
    if isinstance(value, dict | str) and not value:
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:_}`" if isinstance(value, int) else f"`{value}`"


def _built_in(section: str) -> dict[str, str]:
    return Catalogue(*KINDS[section]).built_in()


def _among(name: str, fields: tuple[str, ...]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in fields)


def _slug(section: str, kind: str) -> str:
    return f"{section}-{kind}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "&#124;")


def _printed(arguments: list[str]) -> str:
    """What a command prints on a page of a fixed width."""
    before, out = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(arguments)
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return out.getvalue()
