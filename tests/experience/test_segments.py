"""Segments: what divides is taken, what does not is refused with sizes that work."""

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec, Finals, Fragment
from etude.core.errors import UsageError
from etude.experience.segments import (
    SegmentBuffer,
    SegmentGeometry,
    join,
    nearest_divisors,
)
from toys import ACTIONS, ToyEnv, make_trainer

FIELDS = {
    "collector.rows": "rows",
    "collector.group_rows": "group_rows",
    "algorithm.rollout_steps": "steps",
    "algorithm.horizon": "horizon",
    "algorithm.minibatch_size": "minibatch",
    "learner.shards": "shards",
}


@st.composite
def legal(draw: st.DrawFn) -> SegmentGeometry:
    """Built so that it divides: groups = shards x a, steps = horizon x b."""
    shards, group_rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = shards * draw(st.integers(1, 4)) * group_rows
    horizon = draw(st.integers(1, 6))
    steps = horizon * draw(st.integers(1, 5))
    pieces = rows * steps // (horizon * shards)
    share = draw(st.sampled_from([d for d in range(1, pieces + 1) if pieces % d == 0]))
    return SegmentGeometry(rows, steps, horizon, horizon * shards * share, shards, group_rows)


def divides(rows: int, steps: int, horizon: int, minibatch: int, shards: int, group: int) -> bool:
    return (
        rows % group == 0
        and (rows // group) % shards == 0
        and steps % horizon == 0
        and minibatch % (horizon * shards) == 0
        and (rows * steps) % minibatch == 0
    )


@given(*(st.integers(1, 24) for _ in range(6)))
def test_what_does_not_divide_is_refused(
    rows: int, steps: int, horizon: int, minibatch: int, shards: int, group_rows: int
) -> None:
    sizes = (rows, steps, horizon, minibatch, shards, group_rows)
    if divides(*sizes):
        SegmentGeometry(*sizes)
    else:
        with pytest.raises(UsageError, match=r"Sizes that work|No change of a single size"):
            SegmentGeometry(*sizes)


def suggestions(message: str) -> dict[str, list[int]]:
    """{field: sizes} that a refusal names, for what a person can set."""
    found: dict[str, list[int]] = {}
    for clause in message.split("Sizes that work: ")[1].split("; or "):
        for name, field in FIELDS.items():
            if clause.startswith(name + " ") and " x " not in clause:
                numbers = re.findall(r"\d[\d,]*", clause.removeprefix(name).replace(", ", " "))
                found[field] = [int(number.replace(",", "")) for number in numbers]
    return found


@given(legal(), st.sampled_from(list(FIELDS.values())), st.integers(1, 40))
def test_suggested_sizes_work(geometry: SegmentGeometry, field: str, value: int) -> None:
    """One size of a sound geometry is changed; whatever size the refusal names is sound again."""
    wrong = {**asdict(geometry), field: value}
    if divides(*_sizes(wrong)):
        return
    with pytest.raises(UsageError) as refused:
        SegmentGeometry(**wrong)
    found = suggestions(str(refused.value))
    assert found
    for name, sizes in found.items():
        for size in sizes:
            works = divides(*_sizes({**wrong, name: size}))
            assert works, f"{refused.value} -- but {name} {size} is refused too"


def _sizes(fields: dict[str, int]) -> list[int]:
    names = ("rows", "steps", "horizon", "minibatch", "shards", "group_rows")
    return [fields[name] for name in names]


def test_a_refusal_names_both_sizes_and_the_way_out() -> None:
    with pytest.raises(UsageError) as refused:
        SegmentGeometry(8_160, 64, 64, 64 * 100, 1, 60)
    message = str(refused.value)
    assert "6,400" in message
    assert f"{8_160 * 64:,}" in message
    for size in suggestions(message)["minibatch"]:
        SegmentGeometry(8_160, 64, 64, size, 1, 60)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_nearest_divisors(whole: int, part: int) -> None:
    found = nearest_divisors(whole, part)
    every = [d for d in range(1, whole + 1) if whole % d == 0]
    assert set(found) <= set(every)
    worst = max(abs(d - part) for d in found)
    assert all(abs(d - part) >= worst for d in every if d not in found)


@given(legal())
def test_counts_of_a_legal_geometry(geometry: SegmentGeometry) -> None:
    cut = geometry
    assert cut.buffer_steps == cut.rows * cut.steps
    assert cut.num_groups * cut.group_rows == cut.rows
    assert cut.num_segments * cut.horizon == cut.buffer_steps
    assert cut.num_minibatches * cut.minibatch == cut.buffer_steps
    assert cut.segments_per_minibatch * cut.horizon == cut.minibatch
    rows = [r for s in range(cut.shards) for r in range(cut.rows)[cut.shard_rows(s)]]
    assert rows == list(range(cut.rows))
    # A shard owns whole groups.
    assert all(cut.shard_rows(s).start % cut.group_rows == 0 for s in range(cut.shards))


@pytest.mark.parametrize(
    ("shards", "horizon", "minibatch"), [(1, 1, 32), (1, 8, 32), (2, 4, 64), (4, 2, 8)]
)
def test_every_step_is_used_once_per_epoch_and_rows_do_not_mix(
    shards: int, horizon: int, minibatch: int
) -> None:
    trainer = make_trainer(shards=shards, horizon=horizon, minibatch=minibatch, update_epochs=3)
    ppo = trainer.ppo
    trainer.ingest()
    steps = ppo.geometry.steps
    # Old log-probabilities are read by nothing before the loss: they carry a number per step.
    for s, shard in enumerate(ppo.shards):
        first = ppo.geometry.shard_rows(s).start * steps
        marks = first + np.arange(shard.log_probs.numel())
        shard.log_probs = shard.log_probs.new_tensor(marks).reshape(shard.log_probs.shape)
    seen: list[np.ndarray] = []
    ppo._gradient = lambda chosen: (
        seen.extend(  # type: ignore[method-assign]
            shard.log_probs[order].numpy() for shard, order in zip(ppo.shards, chosen, strict=True)
        )
        or (0.0, {"train/approx_kl": 0.0})
    )
    ppo._apply = lambda *_: 0.0  # type: ignore[method-assign]
    trainer.update()
    segments = np.concatenate(seen)
    assert segments.shape[1] == horizon
    assert len({mark // steps for mark in segments[0]}) == 1
    for segment in segments:
        assert (np.diff(segment) == 1).all()
        assert segment[0] // steps == segment[-1] // steps
    per_epoch = segments.reshape(3, -1)
    for epoch in per_epoch:
        assert sorted(epoch) == list(range(ppo.geometry.buffer_steps))
    assert per_epoch[0].tolist() != per_epoch[1].tolist()


@pytest.mark.parametrize("kind", ACTIONS)
def test_bytes_are_known_before(kind: str) -> None:
    observations = {"state": ArraySpec((5,)), "image": ArraySpec((4, 4, 3), "uint8")}
    spec = EnvSpec(observations, ACTIONS[kind], 10)
    buffer = SegmentBuffer(spec, 6, 9)
    arrays = [*buffer.arrays.values(), *buffer.last_obs.values()]
    assert SegmentBuffer.num_bytes(spec, 6, 9) == sum(array.nbytes for array in arrays)
    assert all(array.ctypes.data % 64 == 0 for array in arrays)


def fragment(buffer: SegmentBuffer, rows: slice, number: int, elsewhere: bool) -> Fragment:
    """A group's fragment, filled with `number`; in the buffer or in memory of its own."""
    part = buffer.part(rows)
    if elsewhere:
        part.obs = {name: np.zeros_like(array) for name, array in part.obs.items()}
        part.last_obs = {name: np.zeros_like(array) for name, array in part.last_obs.items()}
        for name in ("actions", "log_probs", "rewards", "terminated", "truncated"):
            setattr(part, name, np.zeros_like(getattr(part, name)))
    for array in (part.actions, part.log_probs, part.rewards, *part.obs.values()):
        array[...] = number
    for array in part.last_obs.values():
        array[...] = number + 0.5
    part.terminated[...] = True
    count = number  # as many finals as the number says
    finals = {"state": np.full((count, 4), number, np.float32)}
    part.finals = Finals(np.zeros(count, np.int64), np.arange(count), finals)
    part.episodes = {"return": np.full(count, float(number))}
    return part


def test_join_copies_what_was_made_elsewhere() -> None:
    buffer = SegmentBuffer(ToyEnv(2).spec, 8, 5)
    places = [slice(2, 4), slice(4, 6), slice(6, 8)]
    parts = [fragment(buffer, rows, i + 1, i == 1) for i, rows in enumerate(places)]
    joined = join(parts, buffer, slice(2, 8))
    for name, array in buffer.arrays.items():
        assert not array[:2].any(), name
    assert joined.rewards[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert buffer.arrays["obs/state"][2:, -1, -1].tolist() == [1, 1, 2, 2, 3, 3]
    assert buffer.arrays["actions"][2:, 0, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert joined.last_obs["state"][:, 0].tolist() == [1.5, 1.5, 2.5, 2.5, 3.5, 3.5]
    assert buffer.arrays["terminated"][2:].all()
    assert np.shares_memory(joined.rewards, buffer.arrays["rewards"])
    # Finals are counted from the joined part's first row.
    assert joined.finals.rows.tolist() == [0, 2, 2, 4, 4, 4]
    assert joined.finals.steps.tolist() == [0, 0, 1, 0, 1, 2]
    assert joined.finals.obs["state"][:, 0].tolist() == [1, 2, 2, 3, 3, 3]
    assert joined.episodes["return"].tolist() == [1, 2, 2, 3, 3, 3]


def test_actions_have_the_shape_and_type_of_their_kind() -> None:
    assert ActionSpec("discrete", sizes=(5,)).array == ArraySpec((1,), "int64")
    assert ActionSpec("multi_discrete", sizes=(5, 2)).array == ArraySpec((2,), "int64")
    assert ActionSpec("box", low=(0.0,) * 3, high=(1.0,) * 3).array == ArraySpec((3,), "float32")
