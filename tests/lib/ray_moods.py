"""Ray actors with a bad moment now and then, for tests and gates.

A file `moods/KIND-NUMBER` in the folder where the driver was started is one bad moment; the actor
that removes it has it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from etude.core.contracts import Broadcast
from etude.rollout import ray as on_ray
from etude.rollout.host import Answer, Task

MOODS = Path("moods")
KINDS = {
    "raise": "errors of a call",
    "step": "errors of an environment",
    "slow": "workers ten times slower",
    "fetch": "broadcasts lost",
}
LEAST_SLOW = 4.0
"""Seconds that a slow one takes at least, since nobody minds a few milliseconds."""


def put(kind: str, number: int = 0) -> None:
    """One bad moment for whoever works next."""
    MOODS.mkdir(exist_ok=True)
    (MOODS / f"{kind}-{number}").touch()


def take(*kinds: str) -> str:
    """A kind of bad moment, if there is one and nobody else has it."""
    for file in sorted(MOODS.glob("*")):
        kind = file.name.partition("-")[0]
        try:
            if kind in kinds:
                file.unlink()
                return kind
        except FileNotFoundError:
            continue
    return ""


class Moody(on_ray.Actor):
    """An actor that has the bad moments of others to come."""

    def run(self, broadcast: list[Any], task: Task) -> Answer:
        start, mood = time.perf_counter(), take("raise", "step", "slow")
        if mood == "raise":
            raise OSError("a strange moment")
        if mood == "step":
            self._spoil(task.groups[0])
        answer = super().run(broadcast, task)
        if mood == "slow":
            time.sleep(max(LEAST_SLOW, 9.0 * (time.perf_counter() - start)))
        return answer

    def _spoil(self, group: int) -> None:
        self._host._sit(group)
        env = self._host._seats[group].group.env

        def step(actions: Any) -> Any:
            raise RuntimeError("the simulator lost its mind")

        env.step = step  # type: ignore[method-assign]


class Keeper:
    """Owns an object, which is gone when it is."""

    def keep(self, value: Any) -> list[Any]:
        import ray

        return [ray.put(value)]


class MoodyFleet(on_ray.RayFleet):
    """Hands out a broadcast that is lost already."""

    def broadcast(self, serial: int, broadcast: Broadcast) -> None:
        super().broadcast(serial, broadcast)
        if take("fetch"):
            options = {**self._options, "num_cpus": 0}
            keeper = self._ray.remote(Keeper).options(**options).remote()
            self._broadcast = self._ray.get(keeper.keep.remote(broadcast))
            self._ray.kill(keeper)
            with suppress(self._ray.exceptions.RayError):
                while True:
                    self._ray.get(self._broadcast[0])
                    time.sleep(0.02)


@contextmanager
def moody() -> Iterator[None]:
    """Runs of this process have such actors."""
    plain = on_ray.Actor, on_ray.RayFleet
    on_ray.Actor, on_ray.RayFleet = Moody, MoodyFleet  # type: ignore[misc]
    try:
        yield
    finally:
        on_ray.Actor, on_ray.RayFleet = plain  # type: ignore[misc]


def left() -> list[str]:
    """Bad moments that nobody has had yet."""
    return sorted(os.listdir(MOODS)) if MOODS.is_dir() else []
