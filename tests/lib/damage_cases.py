"""Runs with one damaged file: for tests, and for the gate that tries thousands of them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import etude
import short_recipes
from etude.cli import fsck
from etude.core.errors import EtudeError
from etude.planning import recipes
from etude.planning.recipe import Recipe
from toys import changed, tiny_reach, toy_dataset

UNCHECKED = (".lock", "events.out.tfevents")
"""What no hash names: a resume writes it anew."""
PARTLY = ("metrics.jsonl", "replay")
"""Of these a checkpoint names a beginning; what follows is made again."""


TESTS = {"every": "never", "episodes": 2, "num_envs": 2, "envs_per_group": 2}


def on_policy(folder: Path) -> Recipe:
    """Reach with five checkpoints, the last three of which are kept."""
    return tiny_reach(
        collector={"num_envs": 8, "envs_per_group": 8, "threads": 1},
        algorithm={"rollout_steps": 4, "minibatch_size": 32, "update_epochs": 1},
        clock={"total_timesteps": 5 * 32, "iterations": 1, "cycles": 1},
        evaluation=TESTS,
    )


def replay(folder: Path) -> Recipe:
    """SAC with a learned reward; its replay is in many small files."""
    return changed(
        short_recipes.find("episodic-short"),
        collector={"num_envs": 8, "envs_per_group": 4, "threads": 1},
        algorithm={"train_batches": 2, "warmup_steps": 64, "capacity": 256},
        clock={"total_timesteps": 16 * 64, "iterations": 2},
        evaluation=TESTS,
    )


def dataset(folder: Path) -> Recipe:
    """TD3 on a dataset, which is part of what is damaged."""
    data = {"dataset": str(toy_dataset(folder / "data")), "train_batches": 5, "batch_size": 32}
    levels = {"epochs": 4, "cycles": 1, "iterations": 1}
    rewards = {"rrd_batch_size": 64, "rrd_sample_size": 8}
    return changed(recipes.find("offline"), algorithm=data, rewards=rewards, clock=levels)


RECIPES: dict[str, Callable[[Path], Recipe]] = {
    "on-policy": on_policy,
    "replay": replay,
    "dataset": dataset,
}


class Missed(AssertionError):
    """A damaged file that nobody spoke of."""


class DamagedRuns:
    """A run that was stopped before its end, damaged anew for every case."""

    def __init__(self, scratch: Path, recipe: Callable[[Path], Recipe]) -> None:
        self.case, self._base = scratch / "case", scratch / "base"
        self.run = self.case / "run"
        self.case.mkdir(parents=True)
        whole = etude.train(recipe(self.case), self.run)
        self.fingerprint = whole.fingerprint()
        self._stop_earlier()
        shutil.copytree(self.case, self._base, symlinks=True)
        found = sorted(path for path in self._base.rglob("*") if not path.is_symlink())
        self.files = [path.relative_to(self._base) for path in found if path.is_file()]

    def _stop_earlier(self) -> None:
        """As if a kill had come before the last checkpoint."""
        folder = self.run / "checkpoints"
        *_, before, last = sorted(p for p in folder.iterdir() if not p.is_symlink())
        for link in [path for path in folder.iterdir() if path.is_symlink()]:
            if os.readlink(link) == last.name:
                link.unlink()
        shutil.rmtree(last)
        (self.run / "summary.json").unlink()
        (folder / "latest").symlink_to(before.name)

    def damage(self, file: Path, kind: str, chance: random.Random) -> None:
        """A fresh copy of the run, with one file damaged."""
        shutil.rmtree(self.case)
        shutil.copytree(self._base, self.case, symlinks=True)
        path = self.case / file
        data = bytearray(path.read_bytes())
        if kind == "missing" or not data:
            path.unlink()
            return
        if kind == "byte":
            data[chance.randrange(len(data))] ^= chance.randrange(1, 256)
        path.write_bytes(data if kind == "byte" else data[: chance.randrange(len(data))])

    def judge(self, file: Path, resume: Callable[[Path], list[str]]) -> str:
        """What became of the case: "equal", "rows lost" or "refused"; raises `Missed`."""
        noticed = self._is_noticed(file)
        try:
            said = resume(self.run)
        except EtudeError as error:
            if file.name not in str(error):
                raise Missed(f"the refusal does not name it: {error}") from error
            outcome = "refused"
        else:
            outcome = self._compare(file, said)
        must = not file.parts[1].startswith(UNCHECKED) and (
            outcome != "equal" or file.parts[1] not in PARTLY
        )
        if must and not noticed:
            raise Missed(f"fsck calls it whole, and the run is {outcome}")
        return outcome

    def _is_noticed(self, file: Path) -> bool:
        report = fsck.examine(self.run)
        shown = {str(file), str(file.relative_to("run")) if file.parts[0] == "run" else ""}
        shown.add(str(self.case / file))
        bad = {f.path for f in report.findings if f.verdict in ("damaged", "missing")}
        return bool(shown & bad)

    def _compare(self, file: Path, said: list[str]) -> str:
        found = etude.Run(self.run).fingerprint()
        if found == self.fingerprint:
            return "equal"
        told = any(file.name in text and "lost" in text for text in said)
        if not told or any(found[k] != self.fingerprint[k] for k in ("policy", "training")):
            raise Missed(f"another result without a word of it; said: {said}")
        return "rows lost"


def in_process(run: Path) -> list[str]:
    """Resume, and what was said."""
    said: list[str] = []
    etude.resume(run, say=said.append)
    return said


def by_command_line(run: Path) -> list[str]:
    """The same as a person does it; a refusal is one sentence without a traceback."""
    command = [sys.executable, "-m", "etude", "resume", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode == 0:
        return done.stdout.splitlines()
    if done.returncode not in (1, 2) or "Traceback" in done.stderr:
        raise Missed(f"exit code {done.returncode}: {done.stderr}")
    raise EtudeError(done.stderr)
