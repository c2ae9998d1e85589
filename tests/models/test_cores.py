"""Recurrent cores against loops over time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import jolt, loop, normal

from etude.models.recurrent import CORES, Core

KINDS = tuple(CORES)


def make_core(kind: str, inputs: int, units: int, dtype: torch.dtype) -> Core:
    core = CORES[kind](inputs, units, torch.Generator().manual_seed(5)).to(dtype)
    jolt(core)
    return core


def outputs_and_gradients(
    core: Core,
    x: torch.Tensor,
    state: dict[str, torch.Tensor],
    starts: torch.Tensor,
    looped: bool = False,
) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = loop(core, x, state, starts) if looped else core.unroll(x, state, starts)
    weight = normal(*out.shape, seed=9, dtype=x.dtype)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x, *core.parameters()])]


@st.composite
def episode_starts(draw: st.DrawFn) -> torch.Tensor:
    """[m, horizon] bool: anything from no start to a start at every step."""
    m, horizon = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    steps = st.lists(st.booleans(), min_size=horizon, max_size=horizon)
    flags = st.one_of(st.just([False] * horizon), st.just([True] * horizon), steps)
    flags |= st.just([True] + [False] * (horizon - 1))
    return torch.tensor(draw(st.lists(flags, min_size=m, max_size=m)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
@settings(max_examples=60, deadline=None)
@given(episode_starts(), st.integers(1, 4), st.integers(1, 6), st.integers(0, 100))
def test_unroll_against_a_loop(
    kind: str,
    dtype: torch.dtype,
    close: float,
    starts: torch.Tensor,
    inputs: int,
    units: int,
    seed: int,
) -> None:
    core, m = make_core(kind, inputs, units, dtype), len(starts)
    x = normal(*starts.shape, inputs, seed=seed, dtype=dtype)
    state = {name: normal(m, units, seed=seed + 1, dtype=dtype) for name in core.names}
    ours = outputs_and_gradients(core, x, state, starts)
    expected = outputs_and_gradients(core, x, state, starts, looped=True)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=close, rtol=close)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_the_loop_of_one(kind: str) -> None:
    core = make_core(kind, 3, 4, torch.float64)
    x = normal(5, 1, 3, dtype=torch.float64)
    state = {name: normal(5, 4, seed=1, dtype=torch.float64) for name in core.names}
    given = {name: value.clone() for name, value in state.items()}
    out, after = core.step(x[:, 0], state)
    torch.testing.assert_close(out, loop(core, x, state, torch.zeros(5, 1, dtype=torch.bool))[:, 0])
    assert set(after) == set(core.names)
    assert torch.equal(after["h"], out)
    assert all(torch.equal(state[name], given[name]) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_episode_before_gets_through(kind: str) -> None:
    """Not even what cannot be counted with: huge inputs and states change no bit after a start."""
    core = make_core(kind, 3, 8, torch.float32)
    starts = torch.zeros(4, 10, dtype=torch.bool)
    starts[:, 6] = True
    x, state = normal(4, 10, 3), {name: normal(4, 8, seed=1) for name in core.names}
    before = core.unroll(x, state, starts)[:, 6:]
    x[:, :6] *= 1e6
    state = {name: 1e6 * value for name, value in state.items()}
    assert torch.equal(core.unroll(x, state, starts)[:, 6:], before)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(core.unroll(x, state, starts)[:, 6:].sum(), x)
    assert float(grad[:, :6].abs().sum()) == 0.0
    assert float(grad[:, 6:].abs().min()) > 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_without_starts_inside_it_is_one_plain_call(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(kind, 3, 4, torch.float32)
    lengths = []
    run = core._run

    def count(x: torch.Tensor, *rest: object) -> torch.Tensor:
        lengths.append(len(x))
        return run(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "_run", count)
    state = {name: normal(5, 4) for name in core.names}
    starts = torch.zeros(5, 7, dtype=torch.bool)
    starts[2, 0] = True
    core.unroll(normal(5, 7, 3), state, starts)
    starts[3, 4] = starts[3, 5] = starts[1, 6] = True
    core.unroll(normal(5, 7, 3), state, starts)
    assert lengths == [7, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_inputs_give_the_same_bits(kind: str) -> None:
    core = make_core(kind, 16, 32, torch.float32)
    x, state = normal(64, 8, 16), {name: normal(64, 32) for name in core.names}
    starts = normal(64, 8, seed=3) > 1.0
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = outputs_and_gradients(core, x, state, starts)
        for _ in range(4):
            again = outputs_and_gradients(core, x, state, starts)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_weights(kind: str) -> None:
    torch.manual_seed(1)
    core = CORES[kind](8, 8, torch.Generator().manual_seed(0))
    for weight in (core.weight_ih, core.weight_hh):
        for gate in weight.split(8):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8), atol=1e-5, rtol=0)
    biases = (core.bias_ih + core.bias_hh).split(8)
    forget = 1 if kind == "lstm" else None
    assert [b.unique().tolist() for b in biases] == [
        [1.0 if gate == forget else 0.0] for gate in range(len(biases))
    ]
    torch.manual_seed(2)
    again = CORES[kind](8, 8, torch.Generator().manual_seed(0))
    assert all(
        torch.equal(a, b) for a, b in zip(core.parameters(), again.parameters(), strict=True)
    )
