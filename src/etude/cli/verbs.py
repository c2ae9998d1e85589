"""Verbs of a program, found by name; nothing of a command is imported before it is used."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from importlib import import_module

from etude.core.errors import UsageError

Verbs = dict[str, Callable[[list[str]], int | None]]
"""What each verb of a program does with the arguments after it."""
HELP = {"-h", "--help"}


def later(module: str) -> Callable[[list[str]], int | None]:
    """The function `run` of a command's module, which is imported when it is called."""
    return lambda arguments: import_module(module).run(arguments)


def run_verb(program: str, usage: str, verbs: Verbs, arguments: list[str]) -> int:
    """Do what the first argument says; the exit code."""
    if not arguments or arguments[0] in (*HELP, "help"):
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


def check_words(verb: str, arguments: list[str], known: Collection[str]) -> None:
    """Refuse arguments that a command without a config does not know."""
    for word in (each for each in arguments if each not in known):
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"There is no option {word}; {hint}`etude {verb} --help` shows them all.")
