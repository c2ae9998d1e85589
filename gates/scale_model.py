"""What an iteration costs and which part limits it: the model of docs/scale.md, as one function.

Nothing is measured in here; `scale.py` does that, and holds the model against runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Constants:
    """Of one recipe on one kind of machine. Seconds are those of one core."""

    step: float
    """Seconds of a rollout per environment step, with the other cores idle."""
    crowding: float
    """How many times as long it takes, as does all else, while all cores work."""
    step_bytes: float
    """Bytes of a fragment per step."""
    row_bytes: float
    """Bytes of a snapshot per row; one of each group comes back in every iteration."""
    broadcast_bytes: float
    """Bytes of a version of weights, normaliser and curriculum."""
    order: float
    """Seconds of the head per iteration and worker: broadcast, order and answer."""
    fragment: float
    """Seconds of the head per fragment: to unpack it and put it in its place."""
    byte: float
    """Seconds of the head per byte of it."""
    look: float
    """Seconds of the head per worker it waits for, whenever an answer comes."""
    wire: float
    """Seconds per byte from a worker's store to the head's."""
    sample: float
    """Seconds of the learner per step it learns from, advantages and copies included."""
    update: float
    """Seconds of the learner per gradient step, however few samples it has."""
    gradient_bytes: float
    message: float
    """Seconds of a message between two ranks."""
    rank_wire: float
    """Seconds per byte between two ranks."""


@dataclass(frozen=True)
class Setup:
    """A geometry and where it runs."""

    num_envs: int
    envs_per_group: int
    steps: int
    """Of every environment in an iteration."""
    minibatches: int
    passes: int = 1
    lag: int = 1
    workers: int = 1
    """Ray actors; with several ranks each rank is its own and nothing is sent to a head."""
    threads: int = 1
    """Of each worker."""
    ranks: int = 1
    """Processes that share the learning."""
    machines: int = 1
    """That a broadcast goes to."""
    cores: int | None = None
    """Of the one machine that everything shares; None where each has cores of its own."""

    @property
    def buffer_steps(self) -> int:
        return self.num_envs * self.steps

    @property
    def groups(self) -> int:
        return self.num_envs // self.envs_per_group


@dataclass(frozen=True)
class Cost:
    """Seconds of an iteration: the parts, and what they come to."""

    parts: dict[str, float]
    seconds: float
    limit: str
    """The largest part of what the iteration waits for."""


COLLECT = ("rollout", "network", "head")
LEARN = ("learner", "exchange")


def iteration(k: Constants, setup: Setup) -> Cost:
    """Collection is rollout, then network, then head: all workers answer at about the same time.

    With lag 1 an iteration is as long as the longer of collecting and learning, without it as both.
    """
    hands = setup.workers * setup.threads
    busy = hands + setup.lag
    crowding = 1.0 if busy == 1 or (setup.cores or 2) == 1 else k.crowding
    one = setup.envs_per_group * setup.steps * k.step * crowding
    rollout = ceil(setup.groups / (setup.ranks * hands)) * one
    if setup.cores:
        rollout = max(rollout, setup.groups * one / setup.cores)
    beside = crowding if setup.lag else 1.0
    parts = {"rollout": rollout, "network": 0.0, "head": 0.0, "exchange": 0.0}
    updates, samples = setup.minibatches * setup.passes, setup.buffer_steps * setup.passes
    parts["learner"] = (samples / setup.ranks * k.sample + updates * k.update) * beside
    if setup.ranks == 1:
        answers = setup.buffer_steps * k.step_bytes + setup.num_envs * k.row_bytes
        parts["network"] = (answers + setup.machines * k.broadcast_bytes) * k.wire
        parts["head"] = setup.workers * (k.order + setup.workers * k.look)
        parts["head"] += setup.groups * k.fragment + answers * k.byte
    else:
        # Slices of all to all, then the sums to all: each time a message to every other rank.
        others = setup.ranks - 1
        sent = 2 * k.gradient_bytes * others / setup.ranks
        parts["exchange"] = updates * (2 * others * k.message + sent * k.rank_wire)
    return _put_together(parts, setup, rollout_work=setup.groups * one)


def _put_together(parts: dict[str, float], setup: Setup, rollout_work: float) -> Cost:
    collect, learn = (sum(parts[name] for name in side) for side in (COLLECT, LEARN))
    if not setup.lag:
        return Cost(parts, collect + learn, max(parts, key=lambda name: parts[name]))
    longer = COLLECT if collect >= learn else LEARN
    limit = max(longer, key=lambda name: parts[name])
    seconds = max(collect, learn)
    if setup.cores:
        work = rollout_work + sum(parts[name] for name in parts if name != "rollout")
        if work / setup.cores > seconds:
            return Cost(parts, work / setup.cores, "cores")
    return Cost(parts, seconds, limit)


def with_learners(
    k: Constants, cores: int, envs_per_group: int, steps: int, minibatches: int
) -> Setup:
    """Ranks that each have one core to learn on and others to collect, to use so many cores.

    The fewest collecting cores with which no learner waits; one group for each of them.
    """
    best: Setup | None = None
    for threads in range(1, 65):
        ranks = max(cores // (threads + 1), 2)
        rows = ranks * threads * envs_per_group
        setup = Setup(rows, envs_per_group, steps, minibatches, threads=threads, ranks=ranks)
        if best is None or speed(k, setup) > speed(k, best):
            best = setup
    assert best is not None
    return best


def speed(k: Constants, setup: Setup) -> float:
    """Environment steps per second."""
    return setup.buffer_steps / iteration(k, setup).seconds
