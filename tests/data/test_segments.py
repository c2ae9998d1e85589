"""Segments: what divides is taken, what does not is refused with sizes that work."""

from __future__ import annotations

import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from etude.core.contracts import (
    ActionSpec,
    Array,
    ArraySpec,
    EnvSpec,
    Finals,
    Fragment,
    Observations,
    StepResult,
)
from etude.core.errors import UsageError
from etude.data.segments import BufferSpec, SegmentBuffer, SegmentGeometry, join, nearest_divisor
from etude.models.policies import PolicyConfig
from etude.rl.on_policy import Minibatch
from toy_envs import ACTIONS, DISCRETE, ToyEnv
from toys import Trainer, make_trainer, toy_buffer

FIELDS = {
    "collector.num_envs": "num_envs",
    "collector.envs_per_group": "envs_per_group",
    "algorithm.rollout_steps": "steps",
    "algorithm.horizon": "horizon",
    "algorithm.minibatch_size": "minibatch",
    "learner.shards": "shards",
}


@st.composite
def legal(draw: st.DrawFn, most: int = 5) -> SegmentGeometry:
    """Built so that it divides: groups = shards x a, steps = horizon x b."""
    shards, envs_per_group = draw(st.integers(1, most - 1)), draw(st.integers(1, most))
    rows = shards * draw(st.integers(1, most - 1)) * envs_per_group
    horizon = draw(st.integers(1, most + 1))
    steps = horizon * draw(st.integers(1, most))
    pieces = rows * steps // (horizon * shards)
    share = draw(st.sampled_from([d for d in range(1, pieces + 1) if pieces % d == 0]))
    return SegmentGeometry(rows, steps, horizon, horizon * shards * share, shards, envs_per_group)


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
    rows: int, steps: int, horizon: int, minibatch: int, shards: int, envs_per_group: int
) -> None:
    sizes = (rows, steps, horizon, minibatch, shards, envs_per_group)
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


def working_alone(sizes: dict[str, int]) -> dict[str, list[int]]:
    """{field: the nearest sizes below and above} that are legal if only that field is changed."""
    found = {}
    for field, given_size in sizes.items():
        top = given_size + max(given_size, 64)
        legal_sizes = [
            size for size in range(1, top + 1) if divides(*_sizes({**sizes, field: size}))
        ]
        below = [size for size in legal_sizes if size < given_size][-1:]
        near = below + [size for size in legal_sizes if size > given_size][:1]
        if near:
            found[field] = near
    return found


@given(*(st.integers(1, 30) for _ in range(6)))
def test_a_refusal_names_the_nearest_sizes_that_work_alone(
    rows: int, steps: int, horizon: int, minibatch: int, shards: int, envs_per_group: int
) -> None:
    """Anything illegal, wrong in several ways at once too; against all sizes tried one by one."""
    sizes = {
        "num_envs": rows,
        "steps": steps,
        "horizon": horizon,
        "minibatch": minibatch,
        "shards": shards,
        "envs_per_group": envs_per_group,
    }
    assume(not divides(*_sizes(sizes)))
    with pytest.raises(UsageError) as refused:
        SegmentGeometry(**sizes)
    message, expected = str(refused.value), working_alone(sizes)
    if expected:
        assert suggestions(message) == expected
        return
    # No single size is enough: the message says so, and names several that work together.
    told = message.split("No change of a single size is enough; together these work: ")[1]
    for clause in told.removesuffix(".").split(", "):
        name, number = clause.split(" ")
        sizes[FIELDS[name]] = int(number.replace(",", ""))
    SegmentGeometry(**sizes)


def _sizes(fields: dict[str, int]) -> list[int]:
    names = ("num_envs", "steps", "horizon", "minibatch", "shards", "envs_per_group")
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
def test_the_nearest_divisor(whole: int, part: int) -> None:
    every = [d for d in range(1, whole + 1) if whole % d == 0]
    assert nearest_divisor(whole, part) == min(every, key=lambda d: (abs(d - part), d))


@given(legal())
def test_counts_of_a_legal_geometry(geometry: SegmentGeometry) -> None:
    cut = geometry
    assert cut.buffer_steps == cut.num_envs * cut.steps
    assert cut.num_groups * cut.envs_per_group == cut.num_envs
    assert cut.num_segments * cut.horizon == cut.buffer_steps
    assert cut.num_minibatches * cut.minibatch == cut.buffer_steps
    assert cut.segments_per_minibatch * cut.horizon == cut.minibatch
    rows = [r for s in range(cut.shards) for r in range(cut.num_envs)[cut.shard_envs(s)]]
    assert rows == list(range(cut.num_envs))
    # A shard owns whole groups.
    assert all(cut.shard_envs(s).start % cut.envs_per_group == 0 for s in range(cut.shards))


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
        first = ppo.geometry.shard_envs(s).start * steps
        marks = first + np.arange(shard.log_probs.numel())
        shard.log_probs = shard.log_probs.new_tensor(marks).reshape(shard.log_probs.shape)
    seen: list[np.ndarray] = []
    ppo._gradient = lambda chosen: (
        seen.extend(  # type: ignore[method-assign]
            shard.log_probs[some.segments].numpy()
            for shard, some in zip(ppo.shards, chosen, strict=True)
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


class CountingEnv(ToyEnv):
    """A toy that sees (row / 100, time / 100, ..), all rows of all groups being counted through
    and time never starting again, and is paid a number no other step is paid; it remembers what
    was done where."""

    def __init__(self, num_envs: int, first_row: int) -> None:
        super().__init__(num_envs, DISCRETE)
        self.first_row = first_row
        self.state["time"] = np.zeros(num_envs, np.int64)
        self.taken: dict[tuple[int, int], tuple[int, float, bool]] = {}

    def _observe(self) -> Observations:
        obs = super()._observe()
        obs["state"][:, 0] = (self.first_row + np.arange(self.num_envs)) / 100
        obs["state"][:, 1] = self.state["time"] / 100
        return obs

    def step(self, actions: Array) -> StepResult:
        at = self.state["time"].copy()
        self.state["time"] += 1
        result = super().step(actions)
        rows = self.first_row + np.arange(self.num_envs)
        result.reward[:] = paid(rows, at)
        done = result.terminated | result.truncated
        for i, (row, time) in enumerate(zip(rows.tolist(), at.tolist(), strict=True)):
            assert (row, time) not in self.taken
            self.taken[row, time] = (int(actions[i]), float(result.reward[i]), bool(done[i]))
        return result


def paid(row: Array, time: Array) -> Array:
    return row + time / 128


def counting_trainer(cut: SegmentGeometry, kind: str, **ppo: object) -> Trainer:
    """PPO of this geometry around counting environments; its gradients change nothing."""
    envs = [CountingEnv(cut.envs_per_group, g * cut.envs_per_group) for g in range(cut.num_groups)]
    trainer = make_trainer(
        envs=envs,
        policy=PolicyConfig.model_validate({"kind": kind, "hidden": (4,), "units": 3}),
        **{name: size for name, size in asdict(cut).items() if name != "agents"},
        normalise_rewards=False,
        **ppo,
    )
    trainer.ppo._apply = lambda *_: 0.0  # type: ignore[method-assign]
    with torch.no_grad():
        for i, p in enumerate(trainer.ppo.policy.parameters()):
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return trainer


def states_by_loop(trainer: Trainer, state: dict[str, torch.Tensor]) -> dict[str, list[Array]]:
    """Every row's recurrent state before each step, and after the last, one step at a time.

    `state` is where the rollout begins, and is moved on to where it ends.
    """
    arrays, policy = trainer.ppo.buffers[0].arrays, trainer.ppo.policy
    kept: dict[str, list[Array]] = {name: [] for name in state}
    steps = arrays["rewards"].shape[1]
    for t in range(steps + 1):
        for name, value in state.items():
            kept[name].append(value.numpy().copy())
        if t < steps:
            obs = {"state": torch.from_numpy(arrays["obs/state"][:, t])}
            with torch.no_grad():
                after = policy.act(obs, state, None).state
            over = torch.from_numpy(arrays["terminated"][:, t] | arrays["truncated"][:, t])
            state |= {n: s.masked_fill(over[:, None], 0.0) for n, s in after.items()}
    return kept


@settings(max_examples=20)
@given(
    legal(3),
    st.sampled_from(["mlp", "lstm", "gru"]),
    st.sampled_from(["uniform", "prioritised"]),
)
def test_every_collected_step_is_in_exactly_one_place(
    cut: SegmentGeometry, kind: str, sampling: str
) -> None:
    """From the environment through collector, buffer and shards into the minibatches."""
    trainer = counting_trainer(cut, kind, sampling=sampling, update_epochs=2)
    ppo, policy = trainer.ppo, trainer.ppo.policy
    envs = [group.env.inner for group in trainer.collector._groups]
    state = {n: torch.from_numpy(a) for n, a in policy.initial_state(cut.num_envs).items()}
    gradient, chosen_before = ppo._gradient, list[list[Minibatch]]()
    ppo._gradient = lambda chosen: chosen_before.append(chosen) or gradient(chosen)  # type: ignore[func-returns-value, method-assign]
    for iteration in range(2):
        trainer.ingest()
        times = iteration * cut.steps + np.arange(cut.steps)
        arrays, taken = ppo.buffers[0].arrays, {k: v for env in envs for k, v in env.taken.items()}
        # The buffer holds every step that was taken, each in its own place.
        assert sorted(taken) == [
            (r, t) for r in range(cut.num_envs) for t in range((iteration + 1) * cut.steps)
        ]
        np.testing.assert_array_equal(
            np.rint(100 * arrays["obs/state"][:, :, 0]),
            np.arange(cut.num_envs)[:, None] + 0 * times,
        )
        numbers = paid(np.arange(cut.num_envs)[:, None], times)
        np.testing.assert_array_equal(arrays["rewards"], numbers.astype(np.float32))
        # The states of segments are those of the rollout; they go on from one to the next.
        kept = states_by_loop(trainer, state)
        for name, by_step in kept.items():
            at_starts = np.stack(by_step[: cut.steps : cut.horizon], 1)
            np.testing.assert_allclose(arrays[f"state/{name}"], at_starts, atol=1e-6)
            np.testing.assert_allclose(arrays[f"last_state/{name}"], by_step[-1], atol=1e-6)
        chosen_before.clear()
        trainer.update()
        assert len(chosen_before) == 2 * cut.num_minibatches
        seen: list[set[tuple[int, int]]] = [set(), set()]
        for m, chosen in enumerate(chosen_before):
            in_minibatch: set[tuple[int, int]] = set()
            for s, (shard, some) in enumerate(zip(ppo.shards, chosen, strict=True)):
                order = some.segments
                assert len(order) == cut.segments_per_minibatch // cut.shards
                where = (100 * shard.features["actor"][order, :, :2]).round().long().numpy()
                rows, at = where[..., 0], where[..., 1]
                # One row and one stretch of time to a segment, of the shard's own rows.
                assert (rows == rows[:, :1]).all()
                assert set(rows[:, 0]) <= set(range(cut.num_envs)[cut.shard_envs(s)])
                assert (np.diff(at, axis=1) == 1).all()
                assert (at[:, 0] % cut.horizon == 0).all()
                places = list(zip(rows.reshape(-1).tolist(), at.reshape(-1).tolist(), strict=True))
                assert in_minibatch.isdisjoint(places)
                in_minibatch |= set(places)
                # What else a segment holds is of the same steps.
                acted = [taken[place][0] for place in places]
                assert shard.actions[order].reshape(-1).tolist() == acted
                ended = np.array([taken[place][2] for place in places]).reshape(at.shape)
                if shard.memory is not None:
                    starts = shard.memory.starts[order].numpy()
                    assert not starts[:, 0].any()
                    np.testing.assert_array_equal(starts[:, 1:], ended[:, :-1])
                    for name, by_step in kept.items():
                        begun = np.stack(by_step)[at[:, 0] - times[0], rows[:, 0]]
                        np.testing.assert_allclose(
                            shard.memory.state[name][order], begun, atol=1e-6
                        )
            assert len(in_minibatch) == cut.minibatch
            epoch = seen[m // cut.num_minibatches]
            if sampling == "uniform":
                assert epoch.isdisjoint(in_minibatch)
            epoch |= in_minibatch
        everything = {(r, t) for r in range(cut.num_envs) for t in times.tolist()}
        for epoch in seen:
            assert epoch == everything if sampling == "uniform" else epoch <= everything
        trainer.clock.advance(1, 0)
    trainer.collector.close()


@settings(max_examples=20)
@given(legal(3), st.sampled_from(["mlp", "lstm"]), st.sampled_from(["gae", "vtrace"]), st.data())
def test_rows_do_not_leak_into_one_another(
    cut: SegmentGeometry, kind: str, advantages: str, data: st.DataObject
) -> None:
    """Other rewards, observations or endings in one row change the advantages of that row alone."""
    trainer = counting_trainer(cut, kind, advantages=advantages)
    row = data.draw(st.integers(0, cut.num_envs - 1))
    fragments = trainer.collect()
    fragment, own = fragments[row // cut.envs_per_group], row % cut.envs_per_group

    def outcome() -> Array:
        """[rows, steps, 2]: advantages before normalisation (in the returns), and values."""
        trainer.ppo.ingest(fragments, trainer.clock)
        shards = trainer.ppo.shards
        both = torch.stack([torch.cat([x.returns, x.values]) for x in shards], 0)
        split = both.reshape(cut.shards, 2, -1, cut.steps).transpose(0, 1)
        return split.reshape(2, cut.num_envs, cut.steps).permute(1, 2, 0).numpy()

    def change(what: str) -> None:
        if what == "obs":
            fragment.obs["state"][own] += 1.0
            fragment.last_obs["state"][own] += 1.0
        elif what == "rewards":
            fragment.rewards[own] += 10.0
        else:
            fragment.terminated[own] ^= True
            fragment.truncated[own] = False

    others = np.arange(cut.num_envs) != row
    before = outcome()
    for what in ("rewards", "obs", "ends"):
        change(what)
        after = outcome()
        if what == "ends":  # A start anywhere has all segments unrolled in another batch: rounding.
            np.testing.assert_allclose(after[others], before[others], rtol=1e-5, atol=1e-5)
        else:
            assert after[others].tobytes() == before[others].tobytes(), what
        assert after[row].tobytes() != before[row].tobytes(), what
        before = after
    trainer.collector.close()


@pytest.mark.parametrize("kind", ACTIONS)
def test_bytes_are_known_before(kind: str) -> None:
    observations = {"state": ArraySpec((5,)), "image": ArraySpec((4, 4, 3), "uint8")}
    spec = EnvSpec(observations, ACTIONS[kind], 10)
    contents = BufferSpec(spec, {"h": ArraySpec((3,))}, 6, 9, 3)
    buffer = SegmentBuffer(contents)
    arrays = list(buffer.arrays.values())
    assert contents.num_bytes == sum(array.nbytes for array in arrays)
    assert all(array.ctypes.data % 64 == 0 for array in arrays)


def fragment(buffer: SegmentBuffer, rows: slice, number: int, elsewhere: bool) -> Fragment:
    """A group's fragment, filled with `number`; in the buffer or in memory of its own."""
    part = buffer.part(rows)
    if elsewhere:
        part.obs = {name: np.zeros_like(array) for name, array in part.obs.items()}
        part.last_obs = {name: np.zeros_like(array) for name, array in part.last_obs.items()}
        for name in ("actions", "log_probs", "rewards", "terminated", "truncated", "present"):
            setattr(part, name, np.zeros_like(getattr(part, name)))
    for array in (part.actions, part.log_probs, part.rewards, *part.obs.values()):
        array[...] = number
    for array in part.last_obs.values():
        array[...] = number + 0.5
    part.terminated[...] = True
    count = number  # as many finals as the number says
    finals = {"state": np.full((count, 4), number, np.float32)}
    part.finals = Finals(np.zeros(count, np.int64), np.arange(count), finals, {})
    part.episodes = {"return": np.full(count, float(number))}
    return part


def test_join_copies_what_was_made_elsewhere() -> None:
    buffer = toy_buffer(ToyEnv(2).spec, 8, 5)
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
    assert joined.finals.envs.tolist() == [0, 2, 2, 4, 4, 4]
    assert joined.finals.steps.tolist() == [0, 0, 1, 0, 1, 2]
    assert joined.finals.obs["state"][:, 0].tolist() == [1, 2, 2, 3, 3, 3]
    assert joined.episodes["return"].tolist() == [1, 2, 2, 3, 3, 3]


def test_actions_have_the_shape_and_type_of_their_kind() -> None:
    assert ActionSpec("discrete", sizes=(5,)).array == ArraySpec((1,), "int64")
    assert ActionSpec("multi_discrete", sizes=(5, 2)).array == ArraySpec((2,), "int64")
    assert ActionSpec("box", low=(0.0,) * 3, high=(1.0,) * 3).array == ArraySpec((3,), "float32")
