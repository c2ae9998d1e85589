"""The model of docs/scale.md: seconds of an iteration and the part that limits it, and its tables.

`scale.py` measures the constants and compares predictions with runs. `kept` is the `details` of its
result: the constants, and the predictions beside the measured seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

STEPS = 64
"""Steps of every environment in an iteration."""
TEN_GIGABIT = 1.25e9
"""Assumed bytes per second of the head's network."""
MESSAGE = 50e-6
"""Assumed seconds of a small message between two machines."""
MACHINE_CORES = 32
GROUP = 128


@dataclass(frozen=True)
class Constants:
    """Constants of a recipe on a kind of machine. Seconds are those of one core."""

    step: float
    """Seconds of a rollout per environment step, with the other cores idle."""
    crowding: float
    """Factor on all seconds while all cores work."""
    step_bytes: float
    """Bytes of a fragment per step."""
    row_bytes: float
    """Bytes of a snapshot per row; one snapshot per group and iteration."""
    broadcast_bytes: float
    """Bytes of a version of weights, normaliser and curriculum."""
    order: float
    """Seconds of the head per iteration and worker: broadcast, order and answer."""
    fragment: float
    """Seconds of the head per fragment: unpack and store."""
    byte: float
    """Seconds of the head per byte of it."""
    look: float
    """Seconds of the head per pending worker and answer."""
    wire: float
    """Seconds per byte from a worker's store to the head's."""
    sample: float
    """Seconds of the learner per step it learns from, advantages and copies included."""
    update: float
    """Seconds of the learner per gradient step, beside those per sample."""
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
    """Steps of every environment in an iteration."""
    minibatches: int
    passes: int = 1
    lag: int = 1
    workers: int = 1
    """Ray actors; with several ranks each rank collects itself and sends nothing to a head."""
    threads: int = 1
    """Threads of each worker."""
    ranks: int = 1
    """Processes that share the learning."""
    machines: int = 1
    """Machines that receive a broadcast."""
    cores: int | None = None
    """Cores of the only machine; None if every worker and learner has its own cores."""

    @property
    def buffer_steps(self) -> int:
        return self.num_envs * self.steps

    @property
    def groups(self) -> int:
        return self.num_envs // self.envs_per_group


@dataclass(frozen=True)
class Cost:
    """Seconds of an iteration: the parts and the total."""

    parts: dict[str, float]
    seconds: float
    limit: str
    """The largest part of the critical path."""


COLLECT = ("rollout", "network", "head")
LEARN = ("learner", "exchange")


def iteration(k: Constants, setup: Setup) -> Cost:
    """Predict the seconds of an iteration.

    Collection is rollout, network and head one after the other: all workers answer at about the
    same time. An iteration takes collection plus learning, with lag 1 the longer of both.
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
        # Slices all to all, then the sums to all: each a message to every other rank.
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
    """Ranks on `cores` cores, each with one core to learn and others to collect.

    The collecting cores of a rank, one group each, are chosen for the highest speed.
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


def constants_text(kept: dict[str, Any]) -> str:
    """One line for each constant of the model."""
    lines = []
    for name, value in kept["constants"].items():
        unit, scale = ("us", 1e6)
        if name.endswith("bytes"):
            unit, scale = "bytes", 1.0
        elif name in ("byte", "wire", "rank_wire"):
            unit, scale = "ns", 1e9
        elif name == "crowding":
            unit, scale = "times", 1.0
        lines.append(f"{name:16} {value * scale:12,.3f} {unit}")
    crossed = kept["crossed"]
    lines.append(
        f"{crossed:.2f} bytes on the loopback interface for each byte of a fragment or snapshot"
    )
    return "\n".join(lines)


def check_text(kept: dict[str, Any]) -> str:
    """Predictions beside measurements."""
    lines = [
        f"seconds of an iteration of {kept['steps']:,} steps, everything on {kept['cores']} cores",
        f"{'lag':>4} {'actors':>6} {'predicted':>9} {'measured':>8} {'ratio':>6}  limit",
    ]
    for one in kept["check"]:
        ratio = one["predicted"] / one["measured"]
        lines.append(
            f"{one['lag']:4} {one['actors']:6} {one['predicted']:9.3f} {one['measured']:8.3f} "
            f"{ratio:6.2f}  {one['limit']}"
        )
    return "\n".join(lines)


def tables_text(kept: dict[str, Any]) -> str:
    """Predictions far beyond the measurements, for the networks assumed above.

    Transfers to the head are at most as fast as the measured ones of Ray.
    """
    # Imported here: pages without these tables are made without the package.
    from etude.core.output import duration

    k = Constants(**kept["constants"])
    wire = max(k.wire, 1 / TEN_GIGABIT)
    k = replace(k, wire=wire, rank_wire=1 / TEN_GIGABIT, message=MESSAGE)
    ways = {
        "Ray, one learner on one core": lambda n: (k, on_ray(n)),
        "Ray, a learner that is never waited for": lambda n: (
            replace(k, sample=0.0, update=0.0),
            on_ray(n),
        ),
        "ranks that collect and learn": lambda n: (k, with_learners(k, n, GROUP, STEPS, 32)),
    }
    titles = ("cores", "steps/s", "10^10", "10^11", "buffer", "iteration", "limit")
    tables = []
    for way, made in ways.items():
        lines = [way, "{:>7} {:>12} {:>10} {:>10} {:>12} {:>9}  {}".format(*titles)]
        for cores in (100, 1000, 10_000):
            known, setup = made(cores)
            cost, rate = iteration(known, setup), speed(known, setup)
            parts = ", ".join(f"{n} {s:.2f}" for n, s in cost.parts.items() if s >= 0.005)
            where = f"; {setup.ranks} ranks of {setup.threads} + 1" if setup.ranks > 1 else ""
            lines.append(
                f"{cores:7,} {rate:12,.0f} {duration(1e10 / rate):>10} "
                f"{duration(1e11 / rate):>10} {setup.buffer_steps:12,} {cost.seconds:7.2f} s  "
                f"{cost.limit} ({parts}{where})"
            )
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def on_ray(cores: int) -> Setup:
    """Machines with one actor each, one thread per core and one group per thread; and the head."""
    machines = -(-cores // MACHINE_CORES)
    threads = cores // machines
    return Setup(
        num_envs=machines * threads * GROUP,
        envs_per_group=GROUP,
        steps=STEPS,
        minibatches=32,
        workers=machines,
        threads=threads,
        machines=machines,
    )
