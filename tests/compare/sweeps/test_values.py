"""What a sweep varies: the grammar of --vary, and trials that are drawn."""

from __future__ import annotations

import pytest

from etude.compare.sweeps import values
from etude.compare.sweeps.values import Vary, all_of, at_random, parse
from etude.core.errors import UsageError
from etude.planning import recipes

RECIPE = recipes.find("reach-short")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("algorithm.gamma=0.9,0.99", Vary("algorithm.gamma", (0.9, 0.99))),
        ("algorithm.learning-rate=1e-4, 1", Vary("algorithm.learning_rate", (1e-4, 1))),
        ("clock.total_timesteps=1e5,2e5", Vary("clock.total_timesteps", (100_000, 200_000))),
        ("policy.hidden=[64,64],[256]", Vary("policy.hidden", ([64, 64], [256]))),
        ("policy.kind=mlp,lstm", Vary("policy.kind", ("mlp", "lstm"))),
        ("algorithm.target_kl=none,0.01", Vary("algorithm.target_kl", (None, 0.01))),
        ("evaluation.every=1 cycle,2 cycles", Vary("evaluation.every", ("1 cycle", "2 cycles"))),
        ("algorithm.clip=0..1", Vary("algorithm.clip", (), 0.0, 1.0)),
        (
            "algorithm.learning_rate=1e-4..1e-2:log",
            Vary("algorithm.learning_rate", (), 1e-4, 1e-2, log=True),
        ),
        ("algorithm.update_epochs=2..10", Vary("algorithm.update_epochs", (), 2, 10, whole=True)),
        ("algorithm.clip=0.1..0.3:3", Vary("algorithm.clip", (0.1, 0.2, 0.3))),
        ("algorithm.update_epochs=1..64:log:4", Vary("algorithm.update_epochs", (1, 4, 16, 64))),
        ("algorithm.update_epochs=1..3:9", Vary("algorithm.update_epochs", (1, 2, 3))),
    ],
)
def test_values_are_read(text: str, meant: Vary) -> None:
    assert parse(text, RECIPE) == meant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithm.gamma", "takes section.key=VALUES"),
        ("algorithm.gamma=", "takes section.key=VALUES"),
        ("algorithm.lr=1,2", "did you mean algorithm.learning_rate"),
        ("algorithm.gamma=0.9,x", "'x' is not a number"),
        ("algorithm.gamma=0.9:0.99", "is not a number"),
        ("algorithm.gamma=0.9,0.9", "names a value twice"),
        ("algorithm.gamma=0.9..0.8", "must be less"),
        ("algorithm.gamma=0.9..x", "must be numbers"),
        ("algorithm.gamma=0.9..0.99:lgo", "is not understood"),
        ("algorithm.gamma=0.9..0.99:1", "2 or more"),
        ("algorithm.gamma=0.9..0.95..0.99", "must be numbers"),
        ("algorithm.gamma=0..1:log", "more than 0"),
        ("algorithm.gamma=0.9,inf", "finite"),
        ("algorithm.update_epochs=1.5..3", "whole number"),
        ("policy.activation=a..b", "must be numbers"),
        ("policy.activation=1..2", "list values"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(text, RECIPE)


VARIED = [
    Vary("a", (), 1e-4, 1e-2, log=True),
    Vary("b", (), 1, 3, whole=True),
    Vary("c", ("x", "y")),
]


def test_random_trials_follow_from_seed_and_number() -> None:
    drawn = at_random(VARIED, 0, 0, 40)
    assert drawn[30:] == at_random(VARIED, 0, 30, 10)
    assert drawn != at_random(VARIED, 1, 0, 40)
    assert len({str(each) for each in drawn}) == 40
    assert {each["b"] for each in drawn} == {1, 2, 3}
    assert {each["c"] for each in drawn} == {"x", "y"}
    assert all(1e-4 <= each["a"] <= 1e-2 for each in drawn)
    assert 12 < sum(each["a"] < 1e-3 for each in drawn) < 28  # by factors


def test_all_combinations_once_and_no_more_trials_than_those() -> None:
    assert len(all_of(VARIED[2:])) == 2
    with pytest.raises(UsageError, match="give --trials"):
        all_of(VARIED)
    few = [Vary("b", (1, 2, 3)), Vary("c", ("x", "y"))]
    assert sorted(map(str, at_random(few, 0, 0, 6))) == sorted(map(str, all_of(few)))
    values.check_count(few, 6)
    values.check_count(VARIED, 1000)
    with pytest.raises(UsageError, match="leaves 6 different trials"):
        values.check_count(few, 7)
    with pytest.raises(UsageError, match="different trials"):
        at_random([Vary("b", (), 1, 3, whole=True)], 0, 0, 4)


def test_optuna_draws_by_what_is_known() -> None:
    pytest.importorskip("optuna")
    first = at_random(VARIED, 0, 0, 24)
    past = []
    for each in first:
        score = -abs(each["a"] - 2e-4) * 1e3 + (each["c"] == "y")
        past.append((each, [score, score if score > 0 else None]))
    past[0] = (first[0], [None, None])  # it diverged
    drawn = values.by_optuna(VARIED, 0, 24, 12, past)
    assert drawn == values.by_optuna(VARIED, 0, 24, 12, past)
    assert drawn != values.by_optuna(VARIED, 1, 24, 12, past)
    assert len({str(each) for each in drawn}) == 12
    assert all(type(each["b"]) is int and 1e-4 <= each["a"] <= 1e-2 for each in drawn)
    assert sum(each["c"] == "y" for each in drawn) > 7
    assert sorted(each["a"] for each in drawn)[6] < 1e-3
    few = [Vary("c", ("x", "y", "z"))]
    taken = values.by_optuna(few, 0, 2, 1, [({"c": "x"}, [1.0]), ({"c": "y"}, [0.0])])
    assert taken == [{"c": "z"}]
