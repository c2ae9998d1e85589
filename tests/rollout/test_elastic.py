"""The collector over workers that come and go, in one process and with a time of its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from etude.core.contracts import Broadcast, Fragment
from etude.core.errors import EtudeError, NonFinite
from etude.core.keys import Key
from etude.core.trees import copy_arrays, digest
from etude.data.segments import BufferSpec
from etude.rollout import elastic
from etude.rollout.elastic import (
    Answered,
    ElasticCollector,
    Event,
    HeadLost,
    Heard,
    Joined,
    Lost,
    NoWorkers,
)
from etude.rollout.host import Blueprint, Failure, Host, Task, packed
from etude.rollout.local import LocalCollector, OverlappedCollector, Workers
from etude.rollout.schedule import Patience, Schedule
from toy_envs import PoisonedEnv, ToyEnv
from toys import fragment_bits, toy_buffer, toy_policy

GROUPS, ROWS, STEPS = 5, 2, 7
Fault = Callable[[int, Task], str | None]
"""What becomes of a worker that is given a task: "die", "freeze", "later", "fail" or nothing."""


class CurriculumEnv(ToyEnv):
    """A toy that shows which curriculum it was told."""

    shift = 0.0

    def follow(self, curriculum: dict[str, Any]) -> None:
        self.shift = curriculum.get("shift", 0.0)

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        return replace(result, reward=result.reward + np.float32(self.shift))


TOY = partial(CurriculumEnv, ROWS)


def moved(value: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(value))


class FakeFleet:
    """Hosts in this process; faults by script, and a clock that moves when nothing happens."""

    def __init__(self, blueprint: Blueprint, size: int, fault: Fault | None = None) -> None:
        self.blueprint, self.size, self.fault = (
            blueprint,
            size,
            fault or (lambda worker, task: None),
        )
        self.time = 0.0
        self.hosts: dict[int, Host] = {}
        self.queue: list[Event] = []
        self.late: list[Event] = []
        self.next, self.refused, self.closed = 0, 0, False
        self.tasks: list[Task] = []
        self.asked: list[int] = []
        self.probed, self.probe, self.code = True, "", None
        self.broken = 0
        self.deaf: float | None = None

    @property
    def joining(self) -> int:
        return sum(isinstance(event, Joined) for event in self.queue)

    def silent(self, seconds: float) -> tuple[str, float] | None:
        if self.deaf is None:
            return None
        self.time += seconds
        self.deaf += seconds
        return "The head", self.deaf

    def broadcast(self, serial: int, broadcast: Broadcast) -> None:
        self.sent = serial, moved(broadcast)
        self.first = getattr(self, "first", self.sent[1])

    def recruit(self) -> None:
        while len(self.hosts) + self.refused < self.size:
            worker, self.next = self.next, self.next + 1
            if self.broken:
                self.broken -= 1
                self.queue.append(Lost(worker, "the disk is full"))
                return
            self.hosts[worker] = host = Host(self.blueprint)
            hello = host.hello(self.first if self.probed else None, "127.0.0.1")
            hello = replace(hello, probe=self.probe or hello.probe, code=self.code or hello.code)
            self.queue.append(Joined(worker, hello))

    def send(self, worker: int, task: Task) -> None:
        self.tasks.append(task)
        if worker not in self.hosts:  # it died in between, and that is on its way
            return
        fault, host = self.fault(worker, task), self.hosts[worker]
        if fault == "die":
            self.end(worker, "its process ended")
        elif fault != "freeze":
            host.follow(*self.sent)
            answer = Answered(worker, moved(host.run(moved(task))))
            if fault == "fail":
                error = Failure.of(OSError("a strange moment"))
                answer.answer.outcomes[min(task.groups)] = moved(error)
            (self.late if fault == "later" else self.queue).append(answer)

    def end(self, worker: int, why: str) -> None:
        self.hosts.pop(worker).close()
        self.queue.append(Lost(worker, why))

    def ask(self, worker: int) -> None:
        self.asked.append(worker)

    def events(self, seconds: float) -> list[Event]:
        if not self.queue:
            self.time += 1.0
        queue, self.queue = self.queue, []
        return queue

    def drop(self, worker: int, replace: bool = True) -> None:
        self.hosts.pop(worker).close()
        self.refused += not replace
        self.queue += [event for event in self.late if event.worker == worker]

    def close(self) -> None:
        self.closed = True
        for host in self.hosts.values():
            host.close()


def blueprint(make_env: Callable[[], ToyEnv] = TOY) -> Blueprint:
    env = make_env()
    part = BufferSpec(env.spec, {}, ROWS, STEPS, 1)
    return Blueprint(make_env, partial(toy_policy, env, 1), part, Key(3), threads=2)


def parts(buffers: int = 1) -> list[list[Fragment]]:
    made = [toy_buffer(ToyEnv(ROWS).spec, GROUPS * ROWS, STEPS) for _ in range(buffers)]
    return [[b.part(slice(g * ROWS, (g + 1) * ROWS)) for g in range(GROUPS)] for b in made]


def make(
    size: int = 2, fault: Fault | None = None, own: Blueprint | None = None, **options: Any
) -> tuple[ElasticCollector, FakeFleet, list[str]]:
    own = own or blueprint()
    fleet, said = FakeFleet(own, size, fault), []
    fleet.probed = options.pop("probed", True)
    collector = ElasticCollector(
        fleet,
        Schedule(GROUPS, own.threads, Patience(options.pop("deadline", 20.0))),
        parts(options.pop("buffers", 1)),
        Host(own).probe if fleet.probed else None,
        now=lambda: fleet.time,
        **options,
    )
    collector.report_to(said.append, said.append)
    return collector, fleet, said


def local(make_env: Callable[[], ToyEnv] = TOY) -> LocalCollector:
    envs = [make_env() for _ in range(GROUPS)]
    return LocalCollector(envs, toy_policy(envs[0], 1), Key(3), Workers(1), parts())


def sent(version: int) -> Broadcast:
    weights = dict(toy_policy(ToyEnv(ROWS), version).state_dict())
    return Broadcast(version, weights, {"shift": float(version)})


def bits(fragments: list[Fragment]) -> list[str]:
    return [fragment_bits(fragment) for fragment in fragments]


def clumsy(worker: int, task: Task) -> str | None:
    """Every third worker dies in its first task, every fifth freezes, every seventh is late, and
    every fourth fails at one of its groups, always."""
    for every, fate in ((3, "die"), (5, "freeze"), (7, "later"), (4, "fail")):
        if worker % every == every - 1:
            return fate
    return "die" if task.iteration == 3 and len(task.groups) > 1 else None


@pytest.mark.parametrize(("size", "fault"), [(1, None), (3, None), (9, None), (4, clumsy)])
def test_workers_and_what_becomes_of_them_change_nothing(size: int, fault: Fault | None) -> None:
    one, (many, fleet, _) = local(), make(size, fault)
    for iteration in range(6):
        expected = bits(one.collect(sent(iteration), iteration))
        assert bits(many.collect(sent(iteration), iteration)) == expected
        assert digest(many.state_dict()) == digest(one.state_dict())
    if fault is not None:
        assert many.status()["system/restarts"] >= 4
    many.close()
    assert fleet.closed


def test_snapshots_travel_only_where_something_happened() -> None:
    collector, fleet, _ = make(2)
    for iteration in range(4):
        collector.collect(sent(iteration), iteration)
    assert [len(task.snapshots) for task in fleet.tasks] == [0] * 8
    assert [task.begin for task in fleet.tasks] == [True] * 2 + [False] * 6
    gone = next(iter(fleet.hosts))
    lost = next(task.groups for task in fleet.tasks[-2:] if task.groups)
    fleet.end(gone, "its process ended")
    collector.collect(sent(4), 4)
    assert sorted(g for task in fleet.tasks[8:] for g in task.snapshots) == list(lost)


def test_state_goes_on_in_any_other_collector() -> None:
    one, (two, _, _) = local(), make(2)
    one.collect(sent(0), 0)
    two.collect(sent(0), 0)
    two.collect(sent(1), 1)  # what its workers hold is of another time after this
    state = copy_arrays(one.state_dict())
    two.load_state_dict(state)
    assert bits(two.collect(sent(1), 1)) == bits(one.collect(sent(1), 1))
    three = local()
    three.load_state_dict(copy_arrays(two.state_dict()))
    assert bits(three.collect(sent(2), 2)) == bits(two.collect(sent(2), 2))


def test_it_collects_ahead_like_any_other() -> None:
    one, (two, _, _) = local(), make(3, clumsy, buffers=2)
    ahead = OverlappedCollector(two, lambda iteration: iteration < 4)
    for iteration in range(4):
        expected = bits(one.collect(sent(max(iteration - 1, 0)), iteration))
        assert bits(ahead.collect(sent(iteration), iteration)) == expected
    ahead.close()


def test_a_person_is_told_who_is_stuck_and_what_happens() -> None:
    frozen = {"worker": 0}

    def freeze(worker: int, task: Task) -> str | None:
        return "freeze" if task.iteration == 1 and worker == frozen["worker"] else None

    collector, fleet, said = make(1, freeze)
    collector.collect(sent(0), 0)
    assert said == ["Collecting 5 groups on 1 worker on 1 machine."]
    collector.collect(sent(1), 1)
    name = r"worker 0 (pid "
    assert said[1].startswith(name)
    assert "has not answered for 11 s; its groups 0-4 go to others at 60 s." in said[1]
    assert "was lost: it did not answer in time; its groups 0-4 go to others." in said[2]
    assert said[3].startswith("worker 1 (pid ")
    assert said[3].endswith("joined.")
    assert len(said) == 4
    assert set(fleet.asked) == {0}
    status = collector.status()
    assert (status["system/workers"], status["system/restarts"]) == (1.0, 1.0)
    assert status["system/bytes_per_second"] > 0.0
    assert all(name.startswith("system/") for name in status)


def test_one_that_says_it_lives_is_not_called_silent() -> None:
    collector, fleet, said = make(1, lambda w, t: "later" if t.iteration and w == 0 else None)
    collector.collect(sent(0), 0)
    fleet.ask = lambda worker: fleet.queue.append(Heard(worker))  # type: ignore[method-assign]
    collector.collect(sent(1), 1)
    assert not any("has not answered" in text for text in said)
    assert any("did not answer in time" in text for text in said)


def test_other_bits_are_refused_by_the_name_of_the_cpu() -> None:
    collector, fleet, said = make(2)
    fleet.probe = "0" * 64
    with pytest.raises(NoWorkers, match=r"computes different bits .* its CPU is .* here it is"):
        collector.collect(sent(0), 0)
    assert any(text.startswith("Refused: worker 0") for text in said)
    assert any("--collector.allow-inexact" in text for text in said)
    assert fleet.refused == 2


def test_other_bits_are_let_in_on_request_and_the_run_is_marked() -> None:
    collector, fleet, said = make(2, allow_inexact=True)
    fleet.probe = "0" * 64
    assert len(collector.collect(sent(0), 0)) == GROUPS
    marked = [text for text in said if text.startswith("worker 0") and "different bits" in text]
    assert len(marked) == 1


def test_other_code_is_refused_by_its_name() -> None:
    """Even where the probe, which is short, has the same bits."""
    collector, fleet, said = make(2, code={"etude": "1", "my_env": "1"})
    fleet.code = {"etude": "1", "my_env": "2"}
    with pytest.raises(NoWorkers, match="has different code than this process: my_env"):
        collector.collect(sent(0), 0)
    assert any(text.startswith("Refused: worker 0") for text in said)


def test_the_probe_shows_other_numbers_and_not_other_weights() -> None:
    same, broadcast = blueprint(), packed(sent(0))
    expected = Host(same).probe(broadcast)
    assert Host(blueprint()).probe(broadcast) == expected
    assert Host(same).probe(packed(sent(1))) != expected
    assert Host(blueprint(partial(PoisonedEnv, ROWS, "reward", 3.0))).probe(broadcast) != expected


def test_the_first_failure_in_group_order_ends_the_run_as_it_would_without_workers() -> None:
    bad = partial(PoisonedEnv, ROWS, "observation", float("nan"), 4)
    with pytest.raises(NonFinite) as plain:
        local(bad).collect(sent(0), 0)
    collector, _, _ = make(2, own=replace(blueprint(), make_env=bad), probed=False)
    with pytest.raises(NonFinite) as found:
        collector.collect(sent(0), 0)
    assert str(found.value) == str(plain.value)
    assert digest(found.value.arrays) == digest(plain.value.arrays)


def test_a_passing_error_is_tried_elsewhere_and_its_worker_replaced() -> None:
    def once(worker: int, task: Task) -> str | None:
        return "fail" if worker == 0 and task.iteration == 1 else None

    one, (many, fleet, said) = local(), make(2, once)
    for iteration in range(4):
        expected = bits(one.collect(sent(iteration), iteration))
        assert bits(many.collect(sent(iteration), iteration)) == expected
    assert "The rollout of group 0 failed on worker 0 (pid" in said[1]
    assert said[1].endswith("OSError: a strange moment; its group 0 goes to others.")
    assert "worker 0 (pid" in said[2]
    assert "was lost: it failed at group 0, which worker 1 (pid" in said[2]
    assert many.status()["system/restarts"] == 1.0
    assert sorted(fleet.hosts) == [1, 2]


def test_a_passing_error_is_tried_again_where_there_is_no_other() -> None:
    faults = iter(["fail", "fail"])
    one, (many, _, said) = local(), make(1, lambda worker, task: next(faults, None))
    for iteration in range(2):
        expected = bits(one.collect(sent(iteration), iteration))
        assert bits(many.collect(sent(iteration), iteration)) == expected
    assert sum(text.endswith("its group 0 goes to others.") for text in said) == 2
    assert many.status()["system/restarts"] == 0.0


def test_an_environment_that_failed_is_not_used_again() -> None:
    bad = partial(PoisonedEnv, ROWS, "observation", float("nan"), 4)
    host = Host(replace(blueprint(), make_env=bad))
    host.follow(0, packed(sent(0)))
    answer = host.run(Task(0, 0, (0, 1), {}, begin=True))
    assert all(isinstance(outcome, Failure) for outcome in answer.outcomes.values())
    assert not host._seats
    host.close()


def test_the_groups_of_a_slow_worker_are_copied() -> None:
    def slow(worker: int, task: Task) -> str | None:
        return "later" if worker == 0 and task.iteration == 2 else None

    one, (many, fleet, said) = local(), make(2, slow, deadline=1e9)
    for iteration in range(4):
        expected = bits(one.collect(sent(iteration), iteration))
        assert bits(many.collect(sent(iteration), iteration)) == expected
        if iteration == 2:  # What it then has is of the last iteration, and not wanted any more.
            fleet.queue, fleet.late = fleet.late, []
    assert "is slow; its groups 0, 2 and 4 go to others as well." in said[1]
    assert fleet.time < 10.0
    assert many.status()["system/restarts"] == 0.0
    assert many.status()["system/workers"] == 2.0


def test_a_head_that_does_not_answer_is_waited_for_and_then_given_up() -> None:
    collector, fleet, said = make(1)
    collector.collect(sent(0), 0)
    fleet.deaf = 0.0
    with pytest.raises(HeadLost, match=r"The head has not answered for 40 s.*`etude resume`"):
        collector.collect(sent(1), 1)
    assert said[1] == "The head has not answered for 10 s; the run waits for it."
    assert len(said) == 2
    fleet.deaf = None  # It had only been away.
    one = local()
    for iteration in range(2):
        expected = bits(one.collect(sent(iteration), iteration))
    assert bits(collector.collect(sent(1), 1)) == expected


def test_nobody_is_late_while_nobody_listened() -> None:
    collector, fleet, said = make(1, lambda worker, task: None, deadline=0.5)
    collector.collect(sent(0), 0)
    send = fleet.send

    def stalled(worker: int, task: Task) -> None:
        send(worker, task)
        fleet.time += 100.0

    fleet.send = stalled  # type: ignore[method-assign]
    collector.collect(sent(1), 1)
    assert len(said) == 1
    assert collector.status()["system/restarts"] == 0.0


class Clumsy(ToyEnv):
    """A task with a mistake in it."""

    def step(self, actions: Any) -> Any:
        raise ZeroDivisionError("by my own hand")


def test_an_error_in_ones_own_code_is_named_with_the_worker() -> None:
    own = replace(blueprint(), make_env=partial(Clumsy, ROWS))
    collector, _, said = make(2, own=own, probed=False)
    with pytest.raises(EtudeError, match=r"group 0 failed on worker 1 .*by my own hand") as found:
        collector.collect(sent(0), 0)
    assert "ZeroDivisionError" in found.value.__notes__[0]
    assert collector.status()["system/restarts"] == 0.0  # It was none of the workers' fault.
    assert len(said) == 5


def test_nobody_left_is_an_error_in_one_sentence() -> None:
    collector, fleet, _ = make(1)
    collector.collect(sent(0), 0)
    fleet.end(0, "its machine is gone")
    fleet.broken = 99
    with pytest.raises(
        NoWorkers, match=r"none can be started: the disk is full\. The last checkpoint"
    ):
        collector.collect(sent(1), 1)
    assert fleet.broken == 99 - elastic.MOST_FAILED


def test_nobody_who_ever_comes_is_one_too() -> None:
    collector, fleet, _ = make(1)
    fleet.recruit = lambda: None  # type: ignore[method-assign]
    with pytest.raises(NoWorkers, match="the cluster has no room"):
        collector.collect(sent(0), 0)
    assert fleet.time > elastic.NO_WORKERS


def test_a_closed_collector_stops_waiting() -> None:
    collector, fleet, _ = make(1, lambda worker, task: "freeze", deadline=1e9)
    ahead = OverlappedCollector(collector, lambda iteration: True)
    ahead._start = ({}, sent(0))
    ahead._launch(0)
    ahead.close()
    assert fleet.closed
