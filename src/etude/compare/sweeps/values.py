"""Search space of a sweep, and how trials are drawn from it.

algorithm.gamma=0.95,0.99               one of these
policy.hidden=[64,64],[256,256]         one of these lists
algorithm.learning_rate=1e-4..1e-2      any number between, whole where the field is
algorithm.learning_rate=1e-4..1e-2:log  so that every factor of ten is drawn as often
algorithm.clip=0.1..0.3:5               five values, evenly spaced; with :log:5 by factors
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.planning import recipes
from etude.planning.recipe import Recipe

Values = dict[str, Any]
"""{section.key: value} of one trial, in the order of the options."""
Scored = tuple[Values, list[float | None]]
"""An earlier trial: its values, and its score at each rung, None if it did not reach the rung."""
FORMS = "a,b,c or LOW..HIGH, which may end with :log, with a number of values such as :5, or both"
_TRIES = 200
"""Most draws until a trial differs from all others."""


@dataclass(frozen=True)
class Vary:
    """The search space of one field: choices, or a range of numbers."""

    field: str
    choices: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> Any:
        """The value at a position from 0 to 1 in the choices or the range."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        high = self.high + 1 if self.whole else self.high
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(high) - math.log(self.low)))
        else:
            value = self.low + share * (high - self.low)
        return self.tidy(value)

    def tidy(self, value: float) -> float:
        """A number clipped to the range; an integer, or rounded to four digits."""
        value = math.floor(value) if self.whole else float(f"{value:.4g}")
        return type(value)(min(max(value, self.low), self.high))

    def spaced(self, count: int) -> tuple[float, ...]:
        """`count` evenly spaced values with both ends, without duplicates."""
        ends = [math.log(x) if self.log else x for x in (self.low, self.high)]
        step = (ends[1] - ends[0]) / (count - 1)
        points = [ends[0] + i * step for i in range(count)]
        values = [math.exp(x) if self.log else x for x in points]
        tidied = [self.tidy(round(x)) if self.whole else self.tidy(x) for x in values]
        return tuple(dict.fromkeys(tidied))


def parse(text: str, recipe: Recipe) -> Vary:
    """Parse `section.key=VALUES`; raises with a sentence if it is not valid."""
    name, equals, given = text.partition("=")
    field = name.strip().lstrip("-").replace("-", "_")
    if not equals or not field or not given.strip():
        raise UsageError(f"--vary takes section.key=VALUES, with VALUES {FORMS}; not '{text}'.")
    known = dict(recipes.fields(recipe))
    ends = re.fullmatch(r"([^,:]+?)\.\.([^,:]+?)((?::[^:,]+)*)", given.strip())
    if ends is None:
        if ".." in given:
            raise UsageError(f"--vary {text} is not understood: write {FORMS}.")
        choices = tuple(map(_value, _split(given)))
        words = [each for each in choices if isinstance(each, str)]
        if words and _is_number(known.get(field)):
            raise UsageError(f"--vary {text}: '{words[0]}' is not a number; write {FORMS}.")
        if len({json.dumps(choice) for choice in choices}) < len(choices):
            raise UsageError(f"--vary {text} names a value twice.")
        vary = Vary(field, choices)
    else:
        vary = _range(text, field, known.get(field), ends[1], ends[2], ends[3].split(":")[1:])
    if field not in known:
        try:
            recipe.replace(field, vary.at(0.0))  # says which field is meant
        except UsageError as error:
            raise UsageError(f"--vary {text}: {error}") from error
    return vary


def _range(text: str, field: str, now: Any, low: str, high: str, rest: list[str]) -> Vary:
    try:
        ends = float(low), float(high)
    except ValueError:
        raise UsageError(f"--vary {text}: {low} and {high} must be numbers.") from None
    counts = [int(word) for word in rest if re.fullmatch(r"\d+", word)]
    if len(rest) > 2 or [word for word in rest if word != "log" and not word.isdigit()]:
        raise UsageError(f"--vary {text} is not understood: write {FORMS}.")
    if not (_is_number(now) or now is None):
        raise UsageError(f"--vary {text}: {field} is {json.dumps(now)}, so list values: a,b,c.")
    both_whole = all(end.is_integer() for end in ends)
    whole = both_whole if now is None else isinstance(now, int)
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise UsageError(f"--vary {text}: the first number must be less than the second.")
    if whole and not both_whole:
        raise UsageError(f"--vary {text}: {field} is a whole number, so both ends must be.")
    if "log" in rest and ends[0] <= 0:
        raise UsageError(f"--vary {text}: with :log both numbers must be more than 0.")
    low_end, high_end = map(int if whole else float, ends)
    vary = Vary(field, (), low_end, high_end, "log" in rest, whole)
    if not counts:
        return vary
    if len(counts) > 1 or counts[0] < 2:
        raise UsageError(f"--vary {text}: the number of values must be one number, 2 or more.")
    return Vary(field, vary.spaced(counts[0]))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _split(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+", text)
    return [part.strip() for part in parts if part.strip()]


def _value(text: str) -> Any:
    """Parse a value: none, a number, a list of values, or a text."""
    if text.lower() in ("none", "null"):
        return None
    inner = re.fullmatch(r"\[(.*)\]", text)
    if inner is not None:
        return [_value(part) for part in _split(inner[1])]
    try:
        number = float(text)
    except ValueError:
        return text
    if not math.isfinite(number):
        raise UsageError(f"--vary cannot try {text}: give a finite number.")
    return int(number) if number.is_integer() else number


def check_count(varied: Sequence[Vary], count: int) -> None:
    """Raise if there are fewer combinations than trials."""
    if all(vary.choices for vary in varied):
        there = math.prod(len(vary.choices) for vary in varied)
        if count > there:
            raise UsageError(
                f"--vary leaves {there:,} different trials, and {count:,} were asked for: give "
                "fewer --trials, or leave it out to try all."
            )


def all_of(varied: Sequence[Vary]) -> list[Values]:
    """All combinations of the choices; raises for a range."""
    for vary in varied:
        if not vary.choices:
            raise UsageError(
                f"{vary.field} is varied over a range: give --trials N to draw from it, or a "
                "number of values, such as :5, to try all combinations."
            )
    names = [vary.field for vary in varied]
    return [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(vary.choices for vary in varied))
    ]


def at_random(varied: Sequence[Vary], seed: int, first: int, count: int) -> list[Values]:
    """Draw trials `first`, `first` + 1, ..., each from the seed and its number.

    Values that an earlier trial has are drawn again.
    """
    taken: set[str] = set()
    drawn: list[Values] = []
    for number in range(first + count):
        drawn.append(_new(varied, Key(seed).child("sweep", number), taken))
    return drawn[first:]


def _new(varied: Sequence[Vary], key: Key, taken: set[str]) -> Values:
    """Draw values that are not in `taken`, and add them to it."""
    for attempt in range(_TRIES):
        stream = key.child(attempt).generator()
        values = {vary.field: vary.at(float(stream.random())) for vary in varied}
        if json.dumps(values) not in taken:
            taken.add(json.dumps(values))
            return values
    raise UsageError(
        f"--vary leaves only about {len(taken):,} different trials: ask for fewer with --trials, "
        "or for all combinations by leaving it out."
    )


def by_optuna(
    varied: Sequence[Vary],
    seed: int,
    first: int,
    count: int,
    past: Sequence[Scored],
    minimize: bool = False,
) -> list[Values]:
    """Draw trials with Optuna's TPE sampler, given the scores of all earlier brackets.

    They are a function of the seed, the trial numbers and those scores: a study in memory gets the
    earlier trials in order, and is asked `count` times.
    """
    optuna = _optuna()
    number = Key(seed).child("sweep", "tpe", first).integer() % 2**32
    # constant_liar: drawn trials count as tried, so that a bracket is not one point repeated.
    sampler = optuna.samplers.TPESampler(seed=number, multivariate=True, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="minimize" if minimize else "maximize")
    space = {vary.field: _distribution(optuna, vary) for vary in varied}
    for values, scores in past:
        params = {
            vary.field: vary.choices.index(values[vary.field])
            if vary.choices
            else values[vary.field]
            for vary in varied
        }
        study.add_trial(_past_trial(optuna, params, space, scores))
    taken = {json.dumps(values) for values, _ in past}
    drawn: list[Values] = []
    for trial in range(first, first + count):
        params = study.ask(space).params
        values = {
            vary.field: vary.choices[params[vary.field]]
            if vary.choices
            else vary.tidy(params[vary.field])
            for vary in varied
        }
        if json.dumps(values) in taken:
            values = _new(varied, Key(seed).child("sweep", trial), taken)
        taken.add(json.dumps(values))
        drawn.append(values)
    return drawn


def _past_trial(
    optuna: Any, params: Mapping[str, Any], space: Mapping[str, Any], scores: list[float | None]
) -> Any:
    """A trial of Optuna: complete with its last score, or pruned at a rung.

    A trial that diverged has no score, and is the worst of the pruned ones.
    """
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params=dict(params),
        distributions=dict(space),
        state=states.PRUNED if scores[-1] is None else states.COMPLETE,
        value=scores[-1],
        intermediate_values={k: score for k, score in enumerate(scores) if score is not None},
    )


def _distribution(optuna: Any, vary: Vary) -> Any:
    of = optuna.distributions
    if vary.choices:
        return of.CategoricalDistribution(tuple(range(len(vary.choices))))
    kind = of.IntDistribution if vary.whole else of.FloatDistribution
    return kind(vary.low, vary.high, log=vary.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "--sampler tpe draws with Optuna, which is not installed: pip install 'etude[sweep]', "
            "or use --sampler random."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def check_sampler(name: str) -> None:
    """Raise if the library of a sampler is missing."""
    if name == "tpe":
        _optuna()
