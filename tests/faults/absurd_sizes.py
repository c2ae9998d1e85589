"""Absurd numbers in any field of any recipe: `etude plan` prints a plan or one sentence, in 2 s.

Each runs in a process with the libraries loaded, under a limit of memory, and is ended after 60 s
of the wall clock. Its seconds are those of the processor, beyond a plan of the recipe as it is.
"""

from __future__ import annotations

import atexit
import random
import tempfile
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from etude.core.config import Config
from etude.planning import recipes
from forks import Done, Forks
from toys import toy_dataset

ROW = 31
UNIT = "absurd sizes"
FULL, IN_CI = 10_000, 1
AT_ONCE = 10
"""Tried by one case."""
SECONDS = 300.0
LATE = 2.0
"""Seconds that an absurd value may take beyond a plan without it."""
MEMORY = 6 << 30
VALUES = (
    *("0", "-1", "1e6", "1e9", "2147483648", "9223372036854775807", "9223372036854775808"),
    *("1e12", "1e18", "1e30", "1e308", "-1e30", "1e400", "-inf", "nan", "1e-300", "", "x" * 10_000),
    *("9" * 5000, ",".join(["1"] * 100_000), "0,1e12", "1e18,1e18", "-1e18,1e18"),
)
DATASET = ("offline", "iql", "bc", "reward-only")
"""Recipes that learn from a dataset of two observations, and need one to be planned."""
ASKED = {
    **{"ppo": ["--env.id", "CartPole-v1"], "rlpd": []},
    **{name: ["--env.id", "Pendulum-v1"] for name in ("sac", "td3")},
}


def numbers(value: Config, prefix: str = "") -> Iterator[str]:
    """The fields of a config that take numbers or intervals, section.field."""
    for name, field in type(value).model_fields.items():
        here = getattr(value, name)
        if isinstance(here, Config):
            yield from numbers(here, f"{prefix}{name}.")
        elif takes_numbers(field.annotation) or name in ("every", "compare_every"):
            yield f"{prefix}{name}"


def takes_numbers(annotation: Any) -> bool:
    """Whether a field takes a number, or several."""
    inside = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return False
    return annotation in (int, float) or any(map(takes_numbers, inside))


@cache
def fields() -> list[tuple[str, str]]:
    """(recipe, field) of every number of every recipe, in an order that mixes them."""
    found = [(name, field) for name in recipes.names() for field in numbers(recipes.find(name))]
    random.Random(0).shuffle(found)
    return found


@cache
def _forks() -> Forks:
    forks = Forks()
    atexit.register(forks.close)
    return forks


@cache
def _dataset() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return str(toy_dataset(Path(folder.name) / "data"))


def _plan(recipe: str, *options: str) -> Done:
    asked = ["--algorithm.dataset", _dataset()] if recipe in DATASET else ASKED.get(recipe, [])
    command = ["plan", recipe, *asked, *options]
    return _forks().run("etude.cli.main:main", command, seconds=60, memory=MEMORY)


@cache
def _usual(recipe: str) -> float:
    """Seconds of a plan of a recipe as it is."""
    return _plan(recipe).seconds


def value_of(stream: random.Random) -> str:
    """One of the values, or a random number of up to 40 digits."""
    if stream.random() < 0.7:
        return stream.choice(VALUES)
    sign, exponent = stream.choice(("", "", "-")), stream.randint(9, 40)
    return f"{sign}{stream.randint(1, 99)}e{exponent}"


def wrong(recipe: str, field: str, value: str) -> str:
    """What is wrong with how a plan with an absurd value ended, "" for nothing."""
    option = "--" + field.replace("_", "-")
    done = _plan(recipe, f"{option}={value}")
    found = []
    if done.seconds > _usual(recipe) + LATE:
        found.append(f"took {done.seconds:.1f} s, and {_usual(recipe):.1f} s without it")
    if done.code not in (0, 2, 3):  # A plan, or refused: no signal, and no traceback.
        found.append(f"exit code {done.code}")
    if "Traceback" in done.err or done.err.count("\n") != (done.code != 0):
        found.append("not one sentence")
    if len(done.err) > 2000:
        found.append("a long sentence")
    said = f"{recipe} {option} {value[:40]}: {', '.join(found)}: {done.err[-400:]}"
    return said if found else ""


def case(number: int, seed: int, folder: Path) -> int:
    stream, found = random.Random(f"{seed}-{number}"), []
    for at in range(number * AT_ONCE, (number + 1) * AT_ONCE):
        recipe, field = fields()[at % len(fields())]
        value = value_of(stream)
        if field.endswith("every"):
            value += stream.choice((" steps", " epochs", ""))
        found.append(wrong(recipe, field, value))
    assert not any(found), "\n".join(filter(None, found))
    return AT_ONCE
