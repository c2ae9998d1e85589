"""Options of a command: `--section.field value` becomes a config, or one sentence says why not."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, ValidationError
from pydantic_core import PydanticUndefined

from etude.cli.verbs import HELP_ALL, OFTEN
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.explain import explain, nearest

C = TypeVar("C", bound=Config)
T = TypeVar("T")


@dataclass(frozen=True)
class Called:
    """Marks a field whose option has another name; "" leaves a section's name out."""

    name: str


_INTERVAL = re.compile(r"\d[\d_,]* (step|update|iteration|cycle|epoch)s?")
_POSITIONAL = object()
Positional = Annotated[T, _POSITIONAL]
"""Marks a field that is given by its place, before or between options."""


class Reporting(Config):
    """A command that prints for people, or JSON for programs."""

    # `json` itself would hide a method of the config.
    json_output: Annotated[bool, Called("json")] = Field(
        False, description="Print JSON, for programs."
    )

    def show(self, document: Any, text: str) -> None:
        """Print the document as JSON, or the text."""
        print(json.dumps(document, indent=2) + "\n" if self.json_output else text, end="")


def parse(verb: str, command: type[C], arguments: list[str], default: C | None = None) -> C:
    """A command from its options, `default` for those that are left out.

    --help prints what is changed most often, and --help-all everything; both exit. Values are typed
    as pydantic takes them from text, so a field's own checks apply.
    """
    options = dict(_options(command, default))
    positionals = [n for n, f in command.model_fields.items() if _POSITIONAL in f.metadata]
    asked = next((word for word in arguments if word in ("-h", "--help", HELP_ALL)), None)
    if asked is not None:
        print(_help(verb, command, options, positionals, asked == HELP_ALL), end="")
        raise SystemExit(0)
    content: dict[str, Any] = {} if default is None else default.model_dump()
    loose: list[tuple[str, str | None]] = []  # with the switch that a text follows, if any
    for name, texts in _given(arguments):
        if name is None:
            loose += [(text, None) for text in texts]
            continue
        option = _known(verb, name, options)
        # What an option does not take is left for positionals.
        count = len(texts) if option.container else option.num_values(texts)
        section = content
        for part in option.path[:-1]:
            section = section.setdefault(part, {})
        value = option.value(name, texts[:count])
        is_off = option.is_switch and name not in options
        section[option.path[-1]] = not value if is_off else value
        loose += [
            (text, name if option.is_switch and not i else None)
            for i, text in enumerate(texts[count:])
        ]
    for place in positionals:
        if not loose and not command.model_fields[place].is_required():
            continue
        if not loose:
            named = _place(command, place).removesuffix("...")
            raise UsageError(f"Name the {place} first: etude {verb} {named} ...")
        if _origin(command.model_fields[place].annotation) is tuple:
            content[place], loose = [text for text, _ in loose], []
        else:
            content[place] = loose.pop(0)[0]
    if loose:
        text, switch = loose[0]
        if switch is not None:
            raise UsageError(
                f"--{switch} takes no value, not '{text}': write it alone, or leave it out."
            )
        raise UsageError(
            f"'{text}' belongs to no option: options are written --section.field value."
        )
    try:
        return command.model_validate(content)
    except ValidationError as error:
        raise UsageError(_named_as_typed(explain(error, command, option=True))) from None


@dataclass(frozen=True)
class Option:
    """A field of a command: where it is in the config, and what it holds."""

    path: tuple[str, ...]
    annotation: Any
    default: Any
    description: str
    earlier: str = ""
    """Its name in earlier versions."""
    aliases: tuple[str, ...] = ()
    """What the field is called in other libraries."""
    usual: Any = None
    """What its config has where nothing else is said: a recipe may say something else."""

    @property
    def in_short_help(self) -> bool:
        """Whether the first page of help has it: an option of the command itself, of the task, one
        that is often changed, or one that the recipe sets."""
        name = ".".join(self.path[1:]).replace("_", "-")
        own, of_task = self.path[0] != "recipe", re.fullmatch(r"env\.(?!kind)[\w-]+", name)
        return own or bool(of_task) or name in OFTEN or self.default != self.usual

    def num_values(self, texts: list[str]) -> int:
        """How many of the texts after it are its value: true or false of a switch may be, and an
        interval such as 50000 steps is two."""
        if self.is_switch:
            return int(bool(texts) and texts[0].lower() in ("true", "false"))
        return 2 if self.annotation is str and _INTERVAL.fullmatch(" ".join(texts[:2])) else 1

    @property
    def is_switch(self) -> bool:
        return self.annotation is bool

    @property
    def container(self) -> Any:
        """The type of a field that takes several values; None for one that takes one."""
        origins = (_origin(member) for member in _members(self.annotation))
        return next((o for o in origins if o in (tuple, list, dict)), None)

    def value(self, name: str, texts: list[str]) -> Any:
        """The value that texts stand for, as the config takes it; refuses too few of them."""
        if self.is_switch:
            return texts[0].lower() == "true" if texts else True
        if self.container is dict:
            if len(texts) % 2:
                raise UsageError(
                    f"--{name} takes names and values in turn, such as --{name} a 1 b 2."
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
            return words if "TEXT" in _placeholder(self.annotation) else [*map(_plain, words)]
        if not texts:
            usual = f": it is {self.default!r} if left out"
            known = "" if self.default is PydanticUndefined else usual
            raise UsageError(f"--{name} needs a value{known}.")
        if int in _members(self.annotation) or float in _members(self.annotation):
            return _plain(texts[0])
        if len(texts) > 1:
            return " ".join(texts)
        literals = typing.get_args(self.annotation) if _origin(self.annotation) is Literal else ()
        return {str(each): each for each in literals}.get(texts[0], texts[0])

    def help(self, name: str) -> tuple[str, str]:
        """How it is written, and what it is."""
        if self.is_switch and self.default:
            return f"--{_switched(name)}", f"Turns off what is on by default: {self.description}"
        if self.is_switch:
            return f"--{name}", self.description
        place, about = _placeholder(self.annotation), self.description
        if self.path[-1] == "kind" and len(self.path) > 1:
            place, about = "KIND", "Of what kind it is; `etude list --kinds` shows all."
        if self.default is PydanticUndefined:
            about += " Must be given."
        elif self.default is not None or "default" not in about:
            about += f" (default: {_written(self.default)})"
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


def _plain(text: str) -> str:
    """A number as Python's own parsers take it: 1e6 and 1_000_000 are whole numbers too."""
    digits = text.replace("_", "") if re.fullmatch(r"[+-]?\d[\d_]*([.eE].*)?", text) else text
    with suppress(ValueError, OverflowError):
        if re.search(r"[.eE]", digits) and float(digits).is_integer():
            return str(int(float(digits)))
    return digits


def _scalar(text: str) -> bool | int | float | str:
    """A value without a declared type, as it is most likely meant."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _options(
    command: type[Config], default: Config | None, names: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Option]]:
    """("section.some-field", option) of everything a command takes; positionals are left out."""
    for name, field in command.model_fields.items():
        value = getattr(default, name) if default is not None else field.default
        label = next((mark.name for mark in field.metadata if isinstance(mark, Called)), name)
        here = (*path, name)
        if isinstance(value, Config):
            inner = names if not label else f"{names}{label}."
            yield from _options(type(value), value, inner, here)
        elif _POSITIONAL not in field.metadata and not _is_section(field.annotation):
            shown = f"{names}{label}".replace("_", "-")
            earlier = next((old for old, new in command.renamed.items() if new == name), "")
            former = f"{names}{earlier}".replace("_", "-") if earlier else ""
            about = field.description or ""
            also = tuple(command.aliases.get(name, "").replace("_", "-").split())
            usual = field.get_default(call_default_factory=True)
            yield shown, Option(here, field.annotation, value, about, former, also, usual)


def _is_section(annotation: Any) -> bool:
    """Whether a field holds a section that is left out: its kind chooses its fields."""
    inner = (typing.get_args(member) or (member,) for member in _members(annotation))
    return any(isinstance(each[0], type) and issubclass(each[0], Config) for each in inner)


def _help(
    verb: str, command: type[Config], options: dict[str, Option], places: list[str], every: bool
) -> str:
    """The page of --help: options with their values, what they are, and their defaults.

    `every`: all of them; otherwise, of a command with a whole recipe, those that matter most.
    """
    shown = {n: o for n, o in options.items() if every or o.in_short_help}
    width, deep = min(shutil.get_terminal_size((100, 24)).columns, 120), " " * 8
    wrapped = partial(
        textwrap.wrap,
        width=width,
        initial_indent=deep,
        subsequent_indent=deep,
        break_on_hyphens=False,
    )
    named = "".join(f" {_place(command, place)}" for place in places)
    doc = " ".join((command.__doc__ or "").split())
    if len(shown) < len(options):
        doc += f" `etude {verb} {HELP_ALL}` shows all {len(options)} options."
    usage = f"usage: etude {verb}{named} [--option value ...]"
    lines = [usage, "", *textwrap.wrap(doc, width, break_on_hyphens=False), ""]
    # Those of the command itself before the recipe's.
    ordered = sorted(shown.items(), key=lambda item: item[1].path[0] == "recipe")
    for place in places:
        about = command.model_fields[place].description or ""
        lines += [f"  {_place(command, place)}", *wrapped(about)]
    section = ""
    for name, option in ordered:
        prefix = name.rpartition(".")[0]
        if prefix != section:
            lines += ["", prefix]
            section = prefix
        written, about = option.help(name)
        lines += [f"  {written}", *wrapped(about)]
    return "\n".join(lines) + "\n"


def _place(command: type[Config], name: str) -> str:
    """A positional as help writes it: RUN, RUN... for one or more, or [RUN] where it may be left
    out."""
    field, shown = command.model_fields[name], name.upper()
    if _origin(field.annotation) is tuple:
        return f"{shown.removesuffix('S')}..."
    return shown if field.is_required() else f"[{shown}]"


def _written(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "empty"
    return "none" if value is None else str(value)


def _given(arguments: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """(option, values) as typed; None for what stands before the first option."""
    name: str | None = None
    texts: list[str] = []
    for argument in arguments:
        if re.match(r"--?[a-zA-Z]", argument):
            yield name, texts
            name, equals, value = argument.lstrip("-").partition("=")
            name, texts = name.replace("_", "-"), [value] if equals else []
        else:
            texts.append(argument)
    yield name, texts


def _switched(name: str) -> str:
    """The field behind --section.no-field, or the option that switches a field off."""
    if name.startswith("no-"):
        return name.removeprefix("no-")
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"


def _known(verb: str, name: str, options: dict[str, Option]) -> Option:
    """The option of a name as it was typed; refuses what there is not."""
    option = options.get(name) or options.get(_switched(name))
    if option is not None and (name in options or option.is_switch):
        return option
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        often = [each for each in OFTEN if each.startswith(f"{name}.")]
        such = [*often, *inside][0]
        raise UsageError(f"--{name} is a section: give one of its fields, such as --{such}.")
    for known, option in options.items():
        if option.earlier == name:
            raise UsageError(f"--{name} is called --{known} now.")
    meant, hint = _meant(name, options), ""
    others_name = meant and name.rpartition(".")[2] in options[meant[0]].aliases
    if len(meant) > 1 or others_name:  # `tau` elsewhere is `polyak`, which is 1 - tau
        about = [f"--{known} ({options[known].description.rstrip('.')})" for known in meant]
        hint = f"did you mean {' or '.join(about)}? "
    elif meant:
        hint = f"did you mean --{meant[0]}? "
    page = HELP_ALL if any(option.path[0] == "recipe" for option in options.values()) else "--help"
    raise UsageError(f"There is no option --{name}; {hint}`etude {verb} {page}` shows them all.")


def _meant(name: str, options: dict[str, Option]) -> list[str]:
    """Options that a name may stand for: fields of this name in any section, or called so in other
    libraries; otherwise the nearest name, in every section that has it."""
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


def _named_as_typed(text: str) -> str:
    """Fields of the recipe are options without its name, and values of a list have no number."""
    text = text.replace("--recipe.", "--")
    text = re.sub(r"(--[\w.-]+?)\.\d+(\.kind)?(?=[ :])", r"\1", text)  # a value of several
    return text if "." in text.split()[0] else text[0].upper() + text[1:]
