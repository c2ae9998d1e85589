"""Load and speed of this machine: timings beside other work are not judged."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import mujoco

from gates.lib.report import Gate

LIMIT = 0.15
"""Share of all cores that other work may use."""
LINK = (
    '<body pos="0.1 0 0"><joint axis="0 1 0" damping="0.01"/>'
    '<geom type="capsule" fromto="0 0 0 0.1 0 0" size="0.02" contype="0"/>'
)
CHAIN = f"<mujoco><worldbody>{LINK * 12}{'</body>' * 12}</worldbody></mujoco>"
"""A swinging chain of 12 links."""
STEPS = 500


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores that other work uses, measured while this process sleeps."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as stream:
            fields = [int(field) for field in stream.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    before = read()
    time.sleep(seconds)
    after = read()
    total = after[0] - before[0]
    return 1.0 - (after[1] - before[1]) / max(total, 1)


def reference_speed(seconds: float = 1.0) -> float:
    """MuJoCo steps of the chain per second, on all cores at once.

    Other machines on the same host can halve this and do not show as load: timings of different
    days are comparable only relative to it.
    """
    model = mujoco.MjModel.from_xml_string(CHAIN)
    end = time.perf_counter() + seconds

    def steps() -> int:
        data, done = mujoco.MjData(model), 0
        while time.perf_counter() < end:
            mujoco.mj_step(model, data, STEPS)
            done += STEPS
        return done

    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(lambda _: steps(), range(cores))) / seconds


def report_load(gate: Gate) -> None:
    """Print load and speed; under high load, mark the timings of the gate as not judged."""
    share = busy_share()
    gate.reference_speed = reference_speed()
    print(
        f"machine: {os.cpu_count()} cores, {share:.0%} busy, load {os.getloadavg()[0]:.2f}, "
        f"{gate.reference_speed:,.0f} reference steps/s"
    )
    if share > LIMIT:
        gate.too_busy(f"since other work used {share:.0%} of the cores (limit {LIMIT:.0%})")
