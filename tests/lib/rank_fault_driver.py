"""What befalls one of several ranks, and how all of them end.

    python rank_fault_driver.py RECIPE.yaml FOLDER FAULTS.json

FAULTS.json is a list of {"kind", "ranks", "rank", "iteration"}: in each, that rank of so many
meets the fault in that iteration. Every fault has a run folder of its own, FOLDER/0 and on. Prints
one JSON list: exit codes, seconds until the last rank had ended, and what each rank had to say.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.core import user_code
from etude.core.errors import UsageError
from etude.envs.mujoco.simulation import Simulation
from etude.planning import recipes
from etude.rl.ppo import PPO
from etude.rollout.local import LocalCollector
from etude.runs import manifest
from rank_driver import PATIENCE, attempt, wait

COLLECTED = ("observation", "reward", "action", "log-probability")
"""Found where all ranks look at what they have collected."""
LEARNED = ("loss", "gradient")
NOT_FINITE = ("physics", *COLLECTED, *LEARNED)
AT_START = ("recipe", "bits", "code", "build")
STOPPED = ("freeze", "freeze-and-signal", "kill")
SIGNALS = {"kill": signal.SIGKILL, "signal": signal.SIGTERM}


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def inject(kind: str, iteration: int) -> None:
    """Change the code of this process, so that the fault comes by itself."""
    now = {"iteration": -1}

    def collected(good: Callable[..., Any]) -> Callable[..., Any]:
        def collect(self: LocalCollector, broadcast: Any, number: int) -> Any:
            now["iteration"] = number
            if number == iteration and kind == "crash":
                raise ValueError("the roof has fallen in")
            fragments = good(self, broadcast, number)
            if number == iteration and kind in COLLECTED:
                some = fragments[0]
                arrays = {"observation": some.obs["state"], "reward": some.rewards}
                arrays |= {"action": some.actions, "log-probability": some.log_probs}
                arrays[kind][3, 2] = np.nan
            return fragments

        return collect

    def moved(good: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Simulation, *arguments: Any) -> Any:
            if now["iteration"] == iteration:
                self.bind("qpos")[3, 0] = np.nan
            return good(self, *arguments)

        return step

    def lost(good: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            value, metrics = good(*arguments)
            bad = float("nan") if now["iteration"] == iteration else 1.0
            return value * bad if kind == "loss" else Poisoned.apply(value, bad), metrics

        return loss

    def drifting(good: Callable[..., Any]) -> Callable[..., Any]:
        def end_iteration(self: PPO) -> Any:
            if now["iteration"] == iteration:
                vector = self.optimizer.mean if kind == "moments" else self.flat.data
                vector[5] += 2.0**-20
            return good(self)

        return end_iteration

    wrap(LocalCollector, "collect", collected)
    if kind == "physics":
        wrap(Simulation, "step", moved)
    if kind in LEARNED:
        wrap(PPO, "loss", lost)
    if kind in ("drift", "moments"):
        wrap(PPO, "end_iteration", drifting)
    if kind == "bits":
        wrap(manifest, "standard_digest", lambda good: lambda: "other bits")
    if kind == "code":
        wrap(
            user_code,
            "compute_hashes",
            lambda good: lambda roots: good(roots) | {"etude": "another"},
        )
    if kind == "build":
        wrap(LocalCollector, "__init__", lambda good: partial(_fail, "no such file"))


def _fail(text: str, *_: Any) -> None:
    raise UsageError(text)


class Poisoned(torch.autograd.Function):
    """A number that stays as it is, and whose gradient does not."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def suffer(recipe: Path, folder: Path, fault: dict[str, Any]) -> dict[str, Any]:
    """Train until the fault has ended all ranks."""
    kind, victim = fault["kind"], fault["rank"]
    said = folder.with_suffix(".txt")

    def prepare(rank: int) -> None:
        with said.open("a") as stream:
            os.dup2(stream.fileno(), 2)
        if rank == victim and kind not in (*STOPPED, "signal"):
            inject(kind, fault["iteration"])
        if rank == victim and kind == "recipe":
            wrap(recipes, "load", _faster)

    children, read = attempt(recipe, folder, fault["ranks"], prepare)
    phases = 0
    while chunk := os.read(read, 64):  # collect, train, save and what is between them
        phases += chunk.count(b"\n")
        if kind in (*STOPPED, "signal") and phases >= 6 * fault["iteration"]:
            break
    left = [child for rank, child in enumerate(children) if rank != victim]
    begin = time.monotonic()
    if kind in (*STOPPED, "signal"):
        os.kill(children[victim], SIGNALS.get(kind, signal.SIGSTOP))
    if kind == "freeze-and-signal":
        time.sleep(1.0)
        begin = time.monotonic()
        for child in left:
            os.kill(child, signal.SIGTERM)
    codes = wait(left if kind in STOPPED else children, PATIENCE)
    seconds = time.monotonic() - begin
    if kind in STOPPED:
        os.kill(children[victim], signal.SIGKILL)
        wait([children[victim]])
    os.close(read)
    return {**fault, "codes": codes, "seconds": seconds, "said": said.read_text()}


def _faster(good: Callable[..., Any]) -> Callable[..., Any]:
    def load(path: Path, **options: Any) -> Any:
        return good(path, **options).replace("algorithm.learning_rate", 0.5)

    return load


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    recipe, folder = Path(sys.argv[1]), Path(sys.argv[2])
    faults = json.loads(Path(sys.argv[3]).read_text())
    results = [suffer(recipe, folder / str(i), fault) for i, fault in enumerate(faults)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
