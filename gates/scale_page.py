"""What `scale.py` has measured, as the text that it prints and that docs/scale.md shows.

`kept` is a result's `details`: constants of the model, its predictions beside what was measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scale_model import Constants, Setup, iteration, speed, with_learners

STEPS = 64
"""Of every environment in an iteration."""
TEN_GIGABIT = 1.25e9
"""Bytes per second, assumed of the head's network."""
MESSAGE = 50e-6
"""Seconds of a small message between two machines, assumed."""
MACHINE_CORES = 32
GROUP = 128


def constants_text(kept: dict[str, Any]) -> str:
    """A line for each constant of the model."""
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
    """Predictions beside what was measured."""
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
    """The model far beyond what was measured, for the networks assumed above.

    To the head nothing travels faster than Ray was seen to send it.
    """
    # Here, so that a page without these tables is made without the package.
    from etude.core.units import duration

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
    """Machines full of actors' threads with a group of environments each, beside the head's."""
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
