"""Options of a command: tyro reads them, and what it refuses is explained in one sentence."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import tyro
from pydantic import ValidationError

from etude.core.config import Config
from etude.core.errors import UsageError
from etude.core.explain import explain, nearest
from etude.envs.config import ENVS
from etude.planning.kinds import REWARDS
from etude.planning.recipe import Recipe

C = TypeVar("C", bound=Config)
Verbs = dict[str, Callable[[list[str]], int | None]]
"""What each verb of a program does with the arguments after it."""


def run_verb(program: str, usage: str, verbs: Verbs, arguments: list[str]) -> int:
    """Do what the first argument says; the exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"There is no command '{program} {verb}'.{hint} `{program} --help` shows them."
        )
    return verbs[verb](rest) or 0


def parse(verb: str, command: type[C], arguments: list[str], default: C | None = None) -> C:
    """A command from its options; --help prints and exits."""
    given: dict[str, Any] = {} if default is None else {"default": default}
    refusal, complaint = io.StringIO(), io.StringIO()
    wants_help = any(argument in ("-h", "--help") for argument in arguments)
    quiet = contextlib.ExitStack()
    try:
        with quiet:
            if not wants_help:
                quiet.enter_context(contextlib.redirect_stdout(refusal))
                quiet.enter_context(contextlib.redirect_stderr(complaint))
            parsed: C = tyro.cli(
                command,
                args=arguments,
                prog=f"etude {verb}",
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff),
                **given,
            )
    except (SystemExit, ValidationError) as error:
        if wants_help:
            raise
        clear = _diagnose(verb, command, arguments, default)
        if clear is None and isinstance(error, ValidationError):
            clear = explain(error, None)
        raise UsageError(clear or _flat(refusal.getvalue() + complaint.getvalue())) from None
    return parsed


def spelled_out(arguments: list[str]) -> list[str]:
    """`--collector ray` is short for `--collector.kind ray`."""
    return [
        "--collector.kind" if a == "--collector" else a.replace("--collector=", "--collector.kind=")
        for a in arguments
    ]


def with_env(recipe: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with the environment and the reward source that options ask for: `--env.id`,
    `--env.kind`, `--env.task`, `--env.parallel`, `--rewards.kind`."""
    for section, registry in (("env", ENVS), ("rewards", REWARDS)):
        kind = _value_of(f"--{section}.kind", arguments)
        there = getattr(recipe, section)
        if kind and registry.has(kind) and (there is None or there.kind != kind):
            recipe = recipe.model_copy(update={section: registry.make(kind)})
    for kind in ENVS.names():
        config = ENVS.load(kind)
        value = _value_of(f"--env.{config.named_by}", arguments) if config.named_by else None
        if value is not None and not isinstance(recipe.env, config):
            named = config.model_validate({config.named_by: value} if value else {})
            recipe = recipe.model_copy(update={"env": named})
            break
    return recipe


def _value_of(option: str, arguments: list[str]) -> str | None:
    """What was typed after an option, "" if nothing was; None without the option."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else next(iter(arguments[i + 1 :]), "")
    return None


@dataclass(frozen=True)
class Option:
    """A field of a command: where it is in the config, and what it holds."""

    path: tuple[str, ...]
    annotation: Any
    default: Any

    @property
    def is_switch(self) -> bool:
        return self.annotation is bool

    @property
    def origin(self) -> Any:
        return typing.get_origin(self.annotation) or self.annotation

    def take(self, texts: list[str]) -> tuple[list[str], list[str]]:
        """Of what was typed after it, its own, and what is left for positionals."""
        own = len(texts) if self.origin in (tuple, list, dict) else int(not self.is_switch)
        return texts[:own], texts[own:]

    def value(self, texts: list[str]) -> Any:
        """What was typed, in the shape the config takes."""
        if self.origin in (tuple, list):
            return texts
        if self.origin is dict:
            return dict(zip(texts[::2], texts[1::2], strict=True))
        return None if texts == ["None"] else texts[0]


def _options(
    command: type[Config], default: Config | None, names: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Option]]:
    """("section.some-field", option) of everything a command takes; positionals are left out."""
    for name, field in command.model_fields.items():
        value = getattr(default, name) if default is not None else field.default
        marks = [mark for mark in field.metadata if hasattr(mark, "name")]
        label = name if not marks else str(marks[0].name)
        here = (*path, name)
        if isinstance(value, Config):
            inner = names if not label else f"{names}{label}."
            yield from _options(type(value), value, inner, here)
        elif tyro.conf.Positional not in field.metadata:
            shown = f"{names}{label}".replace("_", "-")
            yield shown, Option(here, field.annotation, value)


def _diagnose(
    verb: str, command: type[Config], arguments: list[str], default: Config | None
) -> str | None:
    """Why these options were refused; None where that is not clear from here."""
    options = dict(_options(command, default))
    content: dict[str, Any] = {} if default is None else default.model_dump()
    positionals = [n for n, f in command.model_fields.items() if tyro.conf.Positional in f.metadata]
    for name, texts in _given(arguments):
        wrong = None if name is None else _wrong_name(verb, name, options)
        if wrong:
            return wrong
        option = None if name is None else options.get(name) or options[_switched(name)]
        texts, loose = ([], texts) if option is None else option.take(texts)
        awaited = [p for p in positionals if p not in content]
        if awaited and typing.get_origin(command.model_fields[awaited[0]].annotation) is tuple:
            content[awaited[0]], awaited, loose = loose, [], []
        content |= dict(zip(awaited, loose, strict=False))
        if len(loose) > len(awaited):
            follows_switch = option is not None and option.is_switch and not awaited
            return _stray(loose[len(awaited)], name if follows_switch else None)
        if option is None or name is None:
            continue
        wrong = _wrong_count(name, texts, option)
        if wrong:
            return wrong
        if name == "env.kind" and texts != [option.default]:
            return (
                f"--env.kind is {option.default} in this recipe: --env.id ID, --env.task "
                "module:Class or --env.parallel MODULE chooses another environment, or start from "
                "another recipe."
            )
        section = content
        for part in option.path[:-1]:
            section = section.setdefault(part, {})
        section[option.path[-1]] = not option.default if option.is_switch else option.value(texts)
    missing = [p for p in positionals if p not in content]
    if missing:
        return f"Name the {missing[0]} first: etude {verb} {missing[0].upper()} ..."
    try:
        command.model_validate(content)
    except ValidationError as error:
        return _named_as_typed(explain(error, command, option=True))
    return None


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


def _wrong_name(verb: str, name: str, options: dict[str, Option]) -> str | None:
    option = options.get(name) or options.get(_switched(name))
    if option is not None:
        is_off_switch = name not in options
        if option.is_switch and option.default is not is_off_switch:
            state = "on" if option.default else "off"
            return (
                f"--{name} is {state} by itself: write --{_switched(name)} to change that, or "
                "leave it out."
            )
        if not is_off_switch or option.is_switch:
            return None
    inside = [known for known in options if known.startswith(f"{name}.")]
    if inside:
        return f"--{name} is a section: give one of its fields, such as --{inside[0]}."
    meant = " or ".join(f"--{option}" for option in _meant(name, options))
    hint = f"did you mean {meant}? " if meant else ""
    return f"There is no option --{name}; {hint}`etude {verb} --help` shows them all."


def _meant(name: str, options: dict[str, Option]) -> list[str]:
    """What a name most likely stands for; without a section it may be a field of several."""
    near = nearest(name, options)
    if near is None or "." in name:
        return [near] if near else []
    field = near.rpartition(".")[2]
    return [option for option in options if option.rpartition(".")[2] == field]


def _wrong_count(name: str, texts: list[str], option: Option) -> str | None:
    """Too few values for an option that is there."""
    if option.origin is dict:
        pairs = "names and values in turn, such as"
        return f"--{name} takes {pairs} --{name} a 1 b 2." if len(texts) % 2 else None
    if not texts and not option.is_switch:
        return f"--{name} needs a value: it is {option.default!r} if left out."
    return None


def _stray(text: str, switch: str | None) -> str:
    """Of a text that nothing takes, typed after a switch or elsewhere."""
    if switch is not None:
        return f"--{switch} takes no value, not '{text}': write it alone, or leave it out."
    return f"'{text}' belongs to no option: options are written --section.field value."


def _named_as_typed(text: str) -> str:
    """Fields of the recipe are options without its name in front."""
    text = text.replace("--recipe.", "--")
    return text if "." in text.split()[0] else text[0].upper() + text[1:]


def _flat(text: str) -> str:
    """A box of text on one line: the last resort."""
    return " ".join(re.sub(r"[╭╮╰╯│─]+", " ", text).split())
