"""The local collector: group order, any number of threads, state that goes on elsewhere."""

from __future__ import annotations

import time

import pytest
import torch

from etude.core.contracts import Broadcast, Fragment
from etude.core.keys import Key
from etude.core.trees import copy_arrays, digest
from etude.rollout.local import LocalCollector, Workers
from toy_envs import ToyEnv
from toys import fragment_bits, make_trainer, toy_buffer, toy_policy

GROUPS, ROWS, STEPS = 5, 2, 7


class SlowStart(ToyEnv):
    """The first group is the last to finish."""

    def __init__(self, seconds: float) -> None:
        super().__init__(ROWS)
        self._seconds = seconds

    def step(self, actions):  # type: ignore[no-untyped-def]
        time.sleep(self._seconds)
        return super().step(actions)


def make(threads: int) -> tuple[LocalCollector, Broadcast]:
    envs = [SlowStart(0.001 * (GROUPS - g)) for g in range(GROUPS)]
    policy = toy_policy(envs[0])
    buffer = toy_buffer(envs[0].spec, GROUPS * ROWS, STEPS)
    parts = [buffer.part(slice(g * ROWS, (g + 1) * ROWS)) for g in range(GROUPS)]
    collector = LocalCollector(envs, toy_policy(envs[0], 1), Key(3), Workers(threads), [parts])
    return collector, Broadcast(0, dict(policy.state_dict()))


def bits(fragments: list[Fragment]) -> list[str]:
    return [fragment_bits(fragment) for fragment in fragments]


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_nothing(threads: int) -> None:
    one, broadcast = make(1)
    many, _ = make(threads)
    for iteration in range(3):
        expected = bits(one.collect(broadcast, iteration))
        assert bits(many.collect(broadcast, iteration)) == expected
        assert len(set(expected)) == GROUPS  # every group has streams of its own
    assert digest(many.state_dict()) == digest(one.state_dict())
    one.close()
    many.close()


def test_state_goes_on_in_another_collector() -> None:
    one, broadcast = make(2)
    one.collect(broadcast, 0)
    two, _ = make(1)
    two.load_state_dict(copy_arrays(one.state_dict()))
    assert digest(two.state_dict()) == digest(one.state_dict())
    assert bits(two.collect(broadcast, 1)) == bits(one.collect(broadcast, 1))
    assert digest(two.state_dict()) == digest(one.state_dict())


def test_the_state_before_the_first_rollout_is_its_start() -> None:
    one, broadcast = make(1)
    two, _ = make(1)
    two.load_state_dict(copy_arrays(one.state_dict()))
    assert bits(one.collect(broadcast, 0)) == bits(two.collect(broadcast, 0))


def test_more_groups_than_digits_keep_their_order() -> None:
    collector, _ = make(1)
    groups = {f"{g:06d}": {"n": g} for g in (0, 2, 10, 100, 1)}
    collector.load_state_dict({"groups": groups})
    assert collector._snapshots is not None
    assert [snapshot["n"] for snapshot in collector._snapshots] == [0, 1, 2, 10, 100]


def test_the_broadcast_is_what_acts() -> None:
    collector, broadcast = make(1)
    other = toy_policy(ToyEnv(ROWS), 2)
    second, _ = make(1)
    mine = bits(collector.collect(broadcast, 0))
    assert bits(second.collect(Broadcast(0, dict(other.state_dict())), 0)) != mine


def test_workers_keep_order_use_one_torch_thread_and_raise() -> None:
    workers = Workers(3)

    def task(i: int) -> tuple[int, int]:
        time.sleep(0.01 * (4 - i))
        return i, torch.get_num_threads()

    torch.set_num_threads(2)
    try:
        assert workers.run([lambda i=i: task(i) for i in range(4)]) == [(i, 1) for i in range(4)]
    finally:
        torch.set_num_threads(1)

    def fail(number: int) -> None:
        raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match="task 1"):
        workers.run([lambda: None, lambda: fail(1), lambda: fail(2)])
    workers.close()


def test_a_trainer_writes_straight_into_the_buffer() -> None:
    trainer = make_trainer()
    fragments = trainer.collect()
    buffer = trainer.ppo.buffers[0].arrays["rewards"]
    assert all(fragment.rewards.base is not None for fragment in fragments)
    assert [float(f.rewards[0, 0]) for f in fragments] == buffer[::2, 0].tolist()
