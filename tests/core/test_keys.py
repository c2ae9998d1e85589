"""Streams are named by paths: the same path the same stream, another path another one."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.keys import Key

names = st.one_of(st.integers(-5, 200), st.text("abc0123456789", max_size=4))
paths = st.lists(names, max_size=4).map(tuple)


def draws(generator: np.random.Generator, count: int = 8) -> tuple[int, ...]:
    return tuple(generator.integers(2**63, size=count).tolist())


@given(st.integers(0, 2**64), paths)
def test_the_same_path_gives_the_same_stream(seed: int, path: tuple[str | int, ...]) -> None:
    one, two = Key(seed, path), Key(seed).child(*path)
    assert one == two
    assert draws(one.generator()) == draws(two.generator())
    assert draws(one.generator()) == draws(one.generator())
    assert one.integer() == two.integer()
    assert 0 <= one.integer() < 2**63


@given(st.tuples(st.integers(0, 9), paths), st.tuples(st.integers(0, 9), paths))
def test_another_path_gives_another_stream(
    one: tuple[int, tuple[str | int, ...]], two: tuple[int, tuple[str | int, ...]]
) -> None:
    if one != two:
        assert draws(Key(*one).generator()) != draws(Key(*two).generator())
        assert Key(*one).integer() != Key(*two).integer()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ((1, "23"), (12, "3")),
        (("a", "b"), ("ab",)),
        ((1,), ("1",)),
        ((1, 2), ("1", 2)),
        ((), ("",)),
        ((0,), (0, 0)),
    ],
)
def test_paths_that_look_alike(one: tuple[str | int, ...], two: tuple[str | int, ...]) -> None:
    assert draws(Key(0, one).generator()) != draws(Key(0, two).generator())


def test_the_seed_is_not_the_first_name() -> None:
    assert draws(Key(1, (2,)).generator()) != draws(Key(2, (1,)).generator())


def test_episode_streams_do_not_overlap() -> None:
    key = Key(3, ("env",))
    streams = {(r, e): draws(key.episode(r, e), 64) for r in range(6) for e in range(6)}
    everything = [number for stream in streams.values() for number in stream]
    assert len(set(everything)) == len(everything)
    assert draws(key.episode(2, 3), 64) == streams[2, 3]
    assert draws(key.child("other").episode(2, 3), 64) != streams[2, 3]


def test_large_rows_and_episodes_have_streams() -> None:
    key = Key(0)
    assert draws(key.episode(2**40, 2**40)) != draws(key.episode(2**40, 2**40 + 1))


def test_streams_are_uniform_across_episodes() -> None:
    """Neighbouring episodes are independent: their first draws look uniform, not ordered."""
    firsts = np.array([Key(0).episode(row, e).random() for row in range(50) for e in range(40)])
    counts = np.histogram(firsts, bins=10, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 28  # chi-square, 9 degrees: p = 0.001
    assert abs(np.corrcoef(firsts[1:], firsts[:-1])[0, 1]) < 0.08


def test_the_derivation_has_not_changed() -> None:
    """Every recorded run depends on these numbers; they may only change with a format version."""
    key = Key(7, ("act", 3, "group"))
    text = repr((draws(key.generator()), draws(key.episode(5, 11)), key.integer()))
    golden = "ec2439482a27a8d9fb3c1fda0f15765aeb633bb793b4f13df9bf70ffedfe68ac"
    assert hashlib.sha256(text.encode()).hexdigest() == golden
