from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_env_contract import assert_same_bits
from etude.core.trees import digest
from etude.envs.adapters.object_state import StateError, decode, encode, load, save

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=10,
)


@given(nested)
def test_values_survive_encoding_with_their_types(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert repr(found) == repr(value)


def test_arrays_scalars_queues_and_generators_survive_encoding() -> None:
    for array in (np.arange(6.0).reshape(2, 3).T, np.array(3, np.int8), np.zeros((0, 2), "f4")):
        assert_same_bits(decode(encode(array)), array)
    scalar = decode(encode(np.float32(0.1)))
    assert isinstance(scalar, np.float32)
    assert scalar == np.float32(0.1)
    assert decode(encode(deque([1, 2], maxlen=2))) == deque([1, 2], maxlen=2)
    assert np.isnan(decode(encode(np.nan)))
    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        generator = np.random.Generator(kind(3))
        generator.normal(size=3)
        copy = decode(encode(generator))
        assert digest({"a": copy.normal(size=5)}) == digest({"a": generator.normal(size=5)})


class Colour(Enum):
    RED = 1
    BLUE = 2


class Player:
    made = 0

    def __init__(self, world: World, score: int) -> None:
        Player.made += 1
        self.world = world
        self.score = score
        self.place = np.full(2, float(score))


class World:
    """Players who know their world, and everything an attribute can be."""

    def __init__(self, num_players: int = 2) -> None:
        self.players = [Player(self, i) for i in range(num_players)]
        self.turn: Player | None = self.players[0]
        self.colour = Colour.RED
        self.names = ["a", "b"]
        self.alias = self.names
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.dice = random.Random(0)
        self.rng = np.random.default_rng(0)
        self.callback = lambda: 7
        self.tools: list[Any] = [print, 3]
        self.metadata = {"fps": 3}

    def play(self, steps: int) -> None:
        for _ in range(steps):
            assert self.turn is not None
            self.turn.score += self.dice.randrange(10)
            self.turn.place += self.rng.normal(size=2)
            self.counts[f"{self.turn.score}"] += 1
            self.turn = self.players[1] if self.turn is self.players[0] else self.players[0]
            self.colour = Colour.BLUE if self.colour is Colour.RED else Colour.RED
            self.alias.append(str(self.turn.score))


def test_a_world_goes_on_as_it_would_have() -> None:
    one, two = World(), World()
    one.play(5)
    two.play(2)
    text, made = save(one), Player.made
    one.play(7)
    load(two, text)
    assert save(two) == text
    assert Player.made == made
    two.play(7)
    assert save(two) == save(one)
    assert two.players[0].world is two
    assert two.turn is two.players[0]
    assert two.alias is two.names
    assert two.colour is one.colour
    assert two.callback() == 7
    assert two.tools == [print, 3]
    assert isinstance(two.counts, defaultdict)
    assert Colour.RED.value == 1


def test_what_was_not_there_is_gone_and_what_was_there_is_back() -> None:
    one, two = World(), World()
    one.turn = None
    two.extra = 3  # type: ignore[attr-defined]
    del two.names
    load(two, save(one))
    assert not hasattr(two, "extra")
    assert two.turn is None
    assert two.names is two.alias
    one.turn = one.players[1]
    load(two, save(one))
    assert two.turn is two.players[1]


def test_an_array_that_others_hold_is_not_written_into() -> None:
    one, two = World(), World()
    start = two.players[0].place
    one.play(3)
    load(two, save(one))
    assert start.tolist() == [0.0, 0.0]
    assert_same_bits(two.players[0].place, one.players[0].place)


def test_what_is_the_same_always_and_what_cannot_be_saved_is_left_alone() -> None:
    one = World()
    saved = json.loads(save(one))[3]
    assert saved["metadata"] == saved["callback"] == ["kept"]
    assert saved["tools"][2] == [["kept"], 3]


def test_objects_are_never_made() -> None:
    text = save(World(3))
    with pytest.raises(StateError, match="fewer objects of class Player"):
        load(World(2), text)


def test_lists_that_contain_themselves_survive() -> None:
    one: list[Any] = [1]
    one.append(one)
    two = decode(encode(one))
    assert two[0] == 1
    assert two[1] is two
