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

from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.explain import explain, nearest

C = TypeVar("C", bound=Config)
T = TypeVar("T")


@dataclass(frozen=True)
class Called:
    """Marks a field whose option has another name; "" leaves a section's name out."""

    name: str


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
    """A command from its options, `default` for those that are left out; --help prints and exits.

    Values are typed as pydantic takes them from text, so a field's own checks apply.
    """
    options = dict(_options(command, default))
    positionals = [n for n, f in command.model_fields.items() if _POSITIONAL in f.metadata]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_help(verb, command, options, positionals), end="")
        raise SystemExit(0)
    content: dict[str, Any] = {} if default is None else default.model_dump()
    loose: list[tuple[str, str | None]] = []  # with the switch that a text follows, if any
    for name, texts in _given(arguments):
        if name is None:
            loose += [(text, None) for text in texts]
            continue
        option = _known(verb, name, options)
        # What an option does not take is left for positionals.
        count = len(texts) if option.container else int(not option.is_switch)
        section = content
        for part in option.path[:-1]:
            section = section.setdefault(part, {})
        section[option.path[-1]] = option.value(name, texts[:count])
        loose += [
            (text, name if option.is_switch and not i else None)
            for i, text in enumerate(texts[count:])
        ]
    for place in positionals:
        if _origin(command.model_fields[place].annotation) is tuple:
            content[place], loose = [text for text, _ in loose], []
        elif not loose:
            raise UsageError(f"Name the {place} first: etude {verb} {place.upper()} ...")
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
            return not self.default
        if self.container is dict:
            if len(texts) % 2:
                raise UsageError(
                    f"--{name} takes names and values in turn, such as --{name} a 1 b 2."
                )
            return dict(zip(texts[::2], map(_scalar, texts[1::2]), strict=True))
        if self.container:
            return texts
        if not texts:
            raise UsageError(f"--{name} needs a value: it is {self.default!r} if left out.")
        if texts == ["None"] and type(None) in _members(self.annotation):
            return None
        literals = typing.get_args(self.annotation) if _origin(self.annotation) is Literal else ()
        return {str(each): each for each in literals}.get(texts[0], texts[0])

    def help(self, name: str) -> tuple[str, str]:
        """How it is written, and what it is."""
        if self.is_switch:
            shown = _switched(name) if self.default else name
            return f"--{shown}", f"{self.description} (default: {'on' if self.default else 'off'})"
        about = f"{self.description} (default: {_written(self.default)})"
        return f"--{name} {_placeholder(self.annotation)}", about


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
            yield shown, Option(here, field.annotation, value, field.description or "", former)


def _is_section(annotation: Any) -> bool:
    """Whether a field holds a section that is left out: its kind chooses its fields."""
    inner = (typing.get_args(member) or (member,) for member in _members(annotation))
    return any(isinstance(each[0], type) and issubclass(each[0], Config) for each in inner)


def _help(verb: str, command: type[Config], options: dict[str, Option], places: list[str]) -> str:
    """The page of --help: every option with its values, what it is, and its default."""
    width, deep = min(shutil.get_terminal_size((100, 24)).columns, 120), " " * 8
    wrapped = partial(textwrap.wrap, width=width, initial_indent=deep, subsequent_indent=deep)
    named = "".join(f" {place.upper()}" for place in places)
    doc = " ".join((command.__doc__ or "").split())
    lines = [f"usage: etude {verb}{named} [--option value ...]", "", doc, ""]
    for place in places:
        about = command.model_fields[place].description or ""
        lines += [f"  {place.upper()}", *wrapped(about)]
    section = ""
    for name, option in options.items():
        prefix = name.rpartition(".")[0]
        if prefix != section:
            lines += ["", prefix]
            section = prefix
        written, about = option.help(name)
        lines += [f"  {written}", *wrapped(about)]
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) or "empty"
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "empty"
    return str(value)


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
    section, dot, last = name.rpartition(".")
    return f"{section}{dot}{last.removeprefix('no-') if last.startswith('no-') else f'no-{last}'}"


def _known(verb: str, name: str, options: dict[str, Option]) -> Option:
    """The option of a name as it was typed; refuses what there is not."""
    option = options.get(name) or options.get(_switched(name))
    if option is not None:
        is_off_switch = name not in options
        if option.is_switch and option.default is not is_off_switch:
            state = "on" if option.default else "off"
            raise UsageError(
                f"--{name} is {state} by itself: write --{_switched(name)} to change that, or "
                "leave it out."
            )
        if not is_off_switch or option.is_switch:
            return option
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        raise UsageError(f"--{name} is a section: give one of its fields, such as --{inside[0]}.")
    for known, option in options.items():
        if option.earlier == name:
            raise UsageError(f"--{name} is called --{known} now.")
    near, hint = nearest(name, options), ""
    if near is not None:  # without a section it may be a field of several
        field = near.rpartition(".")[2]
        same = [known for known in options if known.rpartition(".")[2] == field]
        meant = " or ".join(f"--{known}" for known in ([near] if "." in name else same))
        hint = f"did you mean {meant}? "
    raise UsageError(f"There is no option --{name}; {hint}`etude {verb} --help` shows them all.")


def _named_as_typed(text: str) -> str:
    """Fields of the recipe are options without its name, and values of a list have no number."""
    text = text.replace("--recipe.", "--")
    text = re.sub(r"(--[\w.-]+?)\.\d+(\.kind)?(?=[ :])", r"\1", text)  # a value of several
    return text if "." in text.split()[0] else text[0].upper() + text[1:]
