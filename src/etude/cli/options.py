"""Options of a command: parse `--section.field value` into a config, and print its help."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, ValidationError
from pydantic_core import PydanticUndefined

from etude.cli.verbs import HELP, HELP_ALL, OFTEN
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.explain import explain, nearest

C = TypeVar("C", bound=Config)
T = TypeVar("T")


@dataclass(frozen=True)
class Called:
    """Mark a field whose option has another name; "" omits the name of a section."""

    name: str


_INTERVAL = re.compile(r"\d[\d_,]* (step|update|iteration|cycle|epoch)s?")
_POSITIONAL = object()
Positional = Annotated[T, _POSITIONAL]
"""Mark a field that is given by its position, before or between options."""


class Trusting(Config):
    """A command that may run code which a file names."""

    trust: bool = Field(
        False,
        description="Run the code that the recipe file names. The answer is kept, so that it is "
        "needed once.",
    )


class Reporting(Config):
    """A command that prints text, or JSON for programs."""

    # `json` would hide a method of pydantic's.
    json_output: Annotated[bool, Called("json")] = Field(
        False, description="Print JSON, for programs."
    )

    def show(self, document: Any, text: str) -> None:
        """Print the document as JSON, or the text."""
        print(json.dumps(document, indent=2) + "\n" if self.json_output else text, end="")


def terminal_width() -> int:
    """Columns of the terminal; 100 without one."""
    return shutil.get_terminal_size((100, 24)).columns


def parse(verb: str, command: type[C], arguments: list[str], default: C | None = None) -> C:
    """A command from its options; fields without an option keep their value in `default`.

    --help prints the options that are changed most often and --help-all all of them; both exit.
    Pydantic converts the values and checks them.
    """
    options = dict(_options(command, default))
    positionals = [n for n, f in command.model_fields.items() if _POSITIONAL in f.metadata]
    if HELP.intersection(arguments):
        first = _first(default, options)
        print(_help(verb, command, options, positionals, HELP_ALL in arguments, first), end="")
        raise SystemExit(0)
    content: dict[str, Any] = {} if default is None else default.model_dump()
    unused: list[tuple[str, str]] = []  # (text, the flag before it or "")
    for name, texts in _split(arguments):
        if name is None:
            unused += [(text, "") for text in texts]
            continue
        option = _find(verb, name, options)
        # Values that an option does not take are left for positionals.
        count = len(texts) if option.container else option.num_values(texts)
        section = content
        for part in option.path[:-1]:
            section = section.setdefault(part, {})
        value = option.value(name, texts[:count])
        negated = option.is_flag and name not in options
        section[option.path[-1]] = not value if negated else value
        flag = name if option.is_flag else ""
        unused += [(text, flag if i == 0 else "") for i, text in enumerate(texts[count:])]
    _take_positionals(verb, command, positionals, unused, content)
    if unused:
        text, flag = unused[0]
        raise UsageError(
            f"--{flag} takes no value, not '{text}': write it alone, or leave it out."
            if flag
            else f"'{text}' belongs to no option: options are written --section.field value."
        )
    try:
        return command.model_validate(content)
    except ValidationError as error:
        raise UsageError(_as_options(explain(error, command, option=True))) from None


def _take_positionals(
    verb: str,
    command: type[Config],
    names: list[str],
    unused: list[tuple[str, str]],
    content: dict[str, Any],
) -> None:
    """Move texts from `unused` to the positional fields in `content`."""
    for name in names:
        field = command.model_fields[name]
        if not unused and field.is_required():
            usage = _positional_usage(command, name).removesuffix("...")
            raise UsageError(f"Name the {name} first: etude {verb} {usage} ...")
        if unused and _origin(field.annotation) is tuple:
            content[name] = [text for text, _ in unused]
            unused.clear()
        elif unused:
            content[name] = unused.pop(0)[0]


def without_options(arguments: list[str], names: Collection[str]) -> list[str]:
    """The arguments without the options of these names and their values."""
    kept: list[str] = []
    skips_value = False
    for argument in arguments:
        if re.match(r"--?[a-zA-Z]", argument):
            name, equals, _ = argument.lstrip("-").partition("=")
            is_dropped = _SHORT.get(name, name) in names
            skips_value = is_dropped and not equals
            if is_dropped:
                continue
        elif skips_value:
            skips_value = False
            continue
        kept.append(argument)
    return kept


_SHORT = {"o": "out"}


@dataclass(frozen=True)
class Option:
    """The option of a field."""

    path: tuple[str, ...]
    """Names of the sections and of the field."""
    annotation: Any
    default: Any
    description: str
    earlier: str = ""
    """Its name in earlier versions."""
    aliases: tuple[str, ...] = ()
    """Its names in other libraries."""
    class_default: Any = None
    """The default of its config class, which a recipe may change."""

    @property
    def in_short_help(self) -> bool:
        """Whether --help shows it: options of the command itself and of the task, options that are
        often changed, and options that the recipe sets."""
        name = ".".join(self.path[1:]).replace("_", "-")
        own, of_task = self.path[0] != "recipe", re.fullmatch(r"env\.(?!kind)[\w-]+", name)
        return own or bool(of_task) or name in OFTEN or self.default != self.class_default

    def num_values(self, texts: list[str]) -> int:
        """How many of the texts after the option are its value: a flag may have true or false, and
        an interval, for example 50000 steps, has two."""
        if self.is_flag:
            return int(bool(texts) and texts[0].lower() in ("true", "false"))
        return 2 if self.annotation is str and _INTERVAL.fullmatch(" ".join(texts[:2])) else 1

    @property
    def is_flag(self) -> bool:
        return self.annotation is bool

    @property
    def container(self) -> Any:
        """The type of a field with several values; None for a single value."""
        origins = (_origin(member) for member in _members(self.annotation))
        return next((o for o in origins if o in (tuple, list, dict)), None)

    def value(self, name: str, texts: list[str]) -> Any:
        """The texts as a value that pydantic can validate; refuses too few texts."""
        if self.is_flag:
            return texts[0].lower() == "true" if texts else True
        if self.container is dict:
            if len(texts) % 2:
                raise UsageError(
                    f"--{name} takes pairs of a name and a value, for example --{name} a 1 b 2."
                )
            return dict(zip(texts[::2], map(_scalar, texts[1::2]), strict=True))
        can_be_none = type(None) in _members(self.annotation)
        if can_be_none and texts and [text.lower() for text in texts] in (["none"], ["null"]):
            return None
        if self.container:
            joined = ",".join(texts)
            inner = re.fullmatch(r"\[(.*)\]|\((.*)\)", joined)
            pieces = (joined if inner is None else inner[1] or inner[2] or "").split(",")
            words = [piece.strip() for piece in pieces if piece.strip()]
            return words if "TEXT" in _placeholder(self.annotation) else [*map(as_integer, words)]
        if not texts:
            default = f" (default: {_default_text(self.default)})"
            raise UsageError(
                f"--{name} needs a value{'' if self.default is PydanticUndefined else default}."
            )
        if int in _members(self.annotation) or float in _members(self.annotation):
            return as_integer(texts[0])
        if len(texts) > 1:
            return " ".join(texts)
        literals = typing.get_args(self.annotation) if _origin(self.annotation) is Literal else ()
        return {str(each): each for each in literals}.get(texts[0], texts[0])

    def help(self, name: str) -> tuple[str, str]:
        """(usage, description)."""
        if self.is_flag and self.default:
            return f"--{_negated(name)}", f"Turns off (default: on): {self.description}"
        if self.is_flag:
            return f"--{name}", self.description
        place, about = _placeholder(self.annotation), self.description
        if self.path[-1] == "kind" and len(self.path) > 1:
            place, about = "KIND", "Its kind; `etude list --kinds` lists all."
        if self.default is PydanticUndefined:
            about += " Must be given."
        elif self.default is not None or "default" not in about:
            about += f" (default: {_default_text(self.default)})"
        return f"--{name} {place}", about


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation) or annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types an annotation allows."""
    if _origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _placeholder(annotation: Any) -> str:
    names = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false", type(None): "none"}
    parts = []
    if _origin(annotation) is Annotated:
        return _placeholder(typing.get_args(annotation)[0])
    for member in _members(annotation):
        inner = [a for a in typing.get_args(member) if a is not ...]
        if _origin(member) is Literal:
            parts += [str(value) for value in inner]
        elif _origin(member) in (tuple, list):
            parts.append(f"{_placeholder(inner[0]) if inner else 'TEXT'} ...")
        elif _origin(member) is dict:
            parts.append("NAME VALUE ...")
        else:
            parts.append(names.get(member, "VALUE"))
    return "|".join(dict.fromkeys(parts))


def as_integer(text: str) -> str:
    """1e6 and 1_000_000 as the integers that pydantic reads; other texts as they are."""
    digits = text.replace("_", "") if re.fullmatch(r"[+-]?\d[\d_]*([.eE].*)?", text) else text
    with suppress(ValueError, OverflowError):
        if re.search(r"[.eE]", digits) and float(digits).is_integer():
            return str(int(float(digits)))
    return digits


def _scalar(text: str) -> bool | int | float | str:
    """A value without a declared type: bool, int, float or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _options(
    command: type[Config], default: Config | None, names: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Option]]:
    """("section.some-field", option) for all options of a command, without positionals."""
    for name, field in command.model_fields.items():
        value = getattr(default, name) if default is not None else field.default
        label = next((mark.name for mark in field.metadata if isinstance(mark, Called)), name)
        here = (*path, name)
        if isinstance(value, Config):
            inner = names if not label else f"{names}{label}."
            yield from _options(type(value), value, inner, here)
        elif _POSITIONAL not in field.metadata and not _is_section(field.annotation):
            earlier = next((old for old, new in command.renamed.items() if new == name), "")
            option = Option(
                path=here,
                annotation=field.annotation,
                default=value,
                description=field.description or "",
                earlier=f"{names}{earlier}".replace("_", "-") if earlier else "",
                aliases=tuple(command.aliases.get(name, "").replace("_", "-").split()),
                class_default=field.get_default(call_default_factory=True),
            )
            yield f"{names}{label}".replace("_", "-"), option


def _is_section(annotation: Any) -> bool:
    """Whether a field without a value is a section, whose fields depend on its kind."""
    inner = (typing.get_args(member) or (member,) for member in _members(annotation))
    return any(isinstance(each[0], type) and issubclass(each[0], Config) for each in inner)


def _first(default: Config | None, options: dict[str, Option]) -> dict[str, Option]:
    """Options that a page of help begins with: where a recipe needs a dataset or a teacher, that
    option and the others of its algorithm."""
    recipe = getattr(default, "recipe", None)
    field = recipe.algorithm.learns_from(recipe) if recipe is not None else ""
    if not field:
        return {}
    option = options[name := f"algorithm.{field}".replace("_", "-")]
    lead = option if option.default else replace(option, default=PydanticUndefined)
    rest = {n: o for n, o in options.items() if n.startswith("algorithm.") and n != name}
    return {name: lead, **rest}


def _help(
    verb: str,
    command: type[Config],
    options: dict[str, Option],
    places: list[str],
    every: bool,
    first: dict[str, Option],
) -> str:
    """The page of --help, or with `every` of --help-all; `first`: options that lead it."""
    rest = {n: o for n, o in options.items() if n not in first and (every or o.in_short_help)}
    shown = first | rest
    width, indent = min(terminal_width(), 120), " " * 8
    wrapped = partial(
        textwrap.wrap,
        width=width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    positionals = [_positional_usage(command, place) for place in places]
    about = " ".join((command.__doc__ or "").split())
    if len(shown) < len(options):
        about += f" `etude {verb} {HELP_ALL}` shows all {len(options)} options."
    usage = " ".join([f"usage: etude {verb}", *positionals, "[--option value ...]"])
    lines = [usage, "", *textwrap.wrap(about, width, break_on_hyphens=False), ""]
    for place, written in zip(places, positionals, strict=True):
        lines += [f"  {written}", *wrapped(command.model_fields[place].description or "")]
    sections: dict[str, list[str]] = {} if first else {"": []}
    # Options of the command itself before those of the recipe.
    for name in sorted(shown, key=lambda n: (n not in first, shown[n].path[0] == "recipe")):
        section = name.rpartition(".")[0]
        written, description = shown[name].help(name)
        sections.setdefault(section, [*[""] * bool(sections), *[section] * bool(section)])
        sections[section] += [f"  {written}", *wrapped(description)]
    lines += [line for section in sections.values() for line in section]
    return "\n".join(lines) + "\n"


def _positional_usage(command: type[Config], name: str) -> str:
    """A positional in a usage line: RUN, RUN... for one or more, [RUN] if it has a default."""
    field, upper = command.model_fields[name], name.upper()
    if _origin(field.annotation) is tuple:
        return f"{upper.removesuffix('S')}..."
    return upper if field.is_required() else f"[{upper}]"


def _default_text(value: Any) -> str:
    """A default as it is written on the command line."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "empty"
    return "none" if value is None else str(value)


def _split(arguments: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """(option, texts after it); None for the texts before the first option."""
    name: str | None = None
    texts: list[str] = []
    for argument in arguments:
        if re.match(r"--?[a-zA-Z]", argument):
            yield name, texts
            name, equals, value = argument.lstrip("-").partition("=")
            name, texts = _SHORT.get(name, name).replace("_", "-"), [value] if equals else []
        else:
            texts.append(argument)
    yield name, texts


def _negated(name: str) -> str:
    """The flag section.no-field for section.field, and section.field for section.no-field or
    no-section.field."""
    if name.startswith("no-"):
        return name.removeprefix("no-")
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"


def _find(verb: str, name: str, options: dict[str, Option]) -> Option:
    """The option with this name; refuses an unknown name with the nearest ones."""
    option = options.get(name) or options.get(_negated(name))
    if option is not None and (name in options or option.is_flag):
        return option
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        often = [each for each in OFTEN if each.startswith(f"{name}.")]
        field = [*often, *inside][0]
        raise UsageError(f"--{name} is a section: give one of its fields, for example --{field}.")
    for known, option in options.items():
        if option.earlier == name:
            raise UsageError(f"--{name} is called --{known} now.")
    near, hint = _nearest(name, options), ""
    is_alias = near and name.rpartition(".")[2] in options[near[0]].aliases
    if len(near) > 1 or is_alias:  # aliases may differ in meaning: tau is 1 - polyak
        about = [f"--{known} ({options[known].description.rstrip('.')})" for known in near]
        hint = f"did you mean {' or '.join(about)}? "
    elif near:
        hint = f"did you mean --{near[0]}? "
    page = HELP_ALL if any(option.path[0] == "recipe" for option in options.values()) else "--help"
    raise UsageError(f"There is no option --{name}; {hint}`etude {verb} {page}` shows them all.")


def _nearest(name: str, options: dict[str, Option]) -> list[str]:
    """Options that an unknown name may stand for: fields with this name or alias in any section;
    otherwise the nearest name, in every section that has it."""
    section, _, field = name.rpartition(".")
    same = [n for n, o in options.items() if field in (n.rpartition(".")[2], *o.aliases)]
    there = [known for known in same if known.rpartition(".")[0] == section] if section else same
    if there or len(same) == 1:
        return there or same
    near = nearest(name, options)
    if near is None or section:
        return [near] if near else []
    field = near.rpartition(".")[2]
    return [known for known in options if known.rpartition(".")[2] == field]


def _as_options(text: str) -> str:
    """A message with options as they are typed: without `recipe.` and without indices of values."""
    text = text.replace("--recipe.", "--")
    text = re.sub(r"(--[\w.-]+?)\.\d+(\.kind)?(?=[ :])", r"\1", text)  # a value of several
    return text if "." in text.split()[0] else text[0].upper() + text[1:]
