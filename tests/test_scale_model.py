"""The cost model of docs/scale.md: sums of parts, and limits that change where they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gates.speed.scale_model import Constants, Setup, iteration, speed, with_learners

CONSTANTS = Constants(
    step=30e-6,
    crowding=1.0,
    step_bytes=150.0,
    row_bytes=3000.0,
    broadcast_bytes=4e5,
    order=1e-3,
    fragment=1e-3,
    byte=1e-9,
    look=1e-6,
    wire=1e-9,
    sample=15e-6,
    update=5e-3,
    gradient_bytes=4e5,
    message=5e-5,
    rank_wire=1e-9,
)
FREE_LEARNER = replace(CONSTANTS, sample=0.0, update=0.0)


def machines(count: int, **other: int) -> Setup:
    """Machines of 32 threads with a group each, beside the head's."""
    sizes = {"num_envs": count * 32 * 128, "envs_per_group": 128, "steps": 64, "minibatches": 32}
    return Setup(**sizes | {"workers": count, "threads": 32, "machines": count} | other)


def test_an_iteration_by_hand() -> None:
    setup = Setup(num_envs=8, envs_per_group=2, steps=10, minibatches=4, passes=2, lag=0, workers=3)
    cost = iteration(CONSTANTS, setup)
    answers = 80 * 150.0 + 8 * 3000.0
    assert cost.parts == pytest.approx(
        {
            "rollout": 2 * 20 * 30e-6,  # four groups on three workers: two rounds
            "network": (answers + 4e5) * 1e-9,
            "head": 3 * (1e-3 + 3e-6) + 4 * 1e-3 + answers * 1e-9,
            "learner": 160 * 15e-6 + 8 * 5e-3,
            "exchange": 0.0,
        }
    )
    assert cost.seconds == pytest.approx(sum(cost.parts.values()))
    assert cost.limit == "learner"


def test_lag_hides_the_shorter_side() -> None:
    setup = machines(1)
    without, within = (iteration(CONSTANTS, replace(setup, lag=lag)) for lag in (0, 1))
    learn = within.parts["learner"]
    assert without.parts == within.parts
    assert within.seconds == pytest.approx(max(learn, without.seconds - learn))


def test_on_one_machine_the_cores_are_the_limit() -> None:
    one = Setup(1024, 128, 64, 8, workers=4, cores=2)
    cost = iteration(CONSTANTS, one)
    work = 65536 * 30e-6 + sum(cost.parts.values()) - cost.parts["rollout"]
    assert (cost.limit, cost.seconds) == ("cores", pytest.approx(work / 2))
    roomy = iteration(CONSTANTS, replace(one, cores=8))
    assert roomy.limit == "learner"
    crowded = iteration(replace(CONSTANTS, crowding=1.5), one)
    assert crowded.parts["learner"] == pytest.approx(1.5 * cost.parts["learner"])
    alone = iteration(replace(CONSTANTS, crowding=1.5), replace(one, workers=1, lag=0))
    assert alone.parts["rollout"] == pytest.approx(65536 * 30e-6)


def test_limits_change_with_the_number_of_machines() -> None:
    assert iteration(CONSTANTS, machines(1)).limit == "learner"
    limits = [iteration(FREE_LEARNER, machines(2**n)).limit for n in range(12)]
    assert limits[0] == "rollout"
    assert limits[-1] == "head"
    slow = replace(FREE_LEARNER, wire=1e-8)
    assert "network" in [iteration(slow, machines(2**n)).limit for n in range(12)]


def test_machines_add_speed_until_the_head_or_its_network_limits() -> None:
    speeds = [speed(FREE_LEARNER, machines(n)) for n in range(1, 400)]
    growing = [iteration(FREE_LEARNER, machines(n)).limit == "rollout" for n in range(1, 400)]
    assert growing[0]
    assert not growing[-1]
    assert growing == sorted(growing, reverse=True)  # once another part limits, it stays so
    assert all(b > a for a, b, more in zip(speeds, speeds[1:], growing[1:], strict=False) if more)


def test_ranks_need_no_head_and_pay_for_their_exchange() -> None:
    setup = Setup(8 * 256, 128, 64, 32, threads=2, ranks=8)
    parts = iteration(CONSTANTS, setup).parts
    assert parts["network"] == parts["head"] == 0.0
    assert parts["exchange"] == pytest.approx(32 * (14 * 5e-5 + 2 * 4e5 * 7 / 8 * 1e-9))
    many, more = (with_learners(CONSTANTS, cores, 128, 64, 32) for cores in (100, 10_000))
    assert speed(CONSTANTS, many) > speed(CONSTANTS, machines(3))
    assert speed(CONSTANTS, more) > speed(CONSTANTS, many)
    assert many.ranks * (many.threads + 1) <= 100
    learners = [iteration(replace(CONSTANTS, message=m), more).limit for m in (0.0, 1e-2)]
    assert learners[1] == "exchange" != learners[0]
