"""Code that decides bits is changed between a stop and a resume, or on one of two ranks.

Each case trains with one copy of Etude's sources, a project with an environment, an installed
package that it uses, and a package which that one requires; then one of these is changed and the
run is resumed, or started on two ranks, in fresh processes. Every change must be refused or marked,
by name, and a run of which nothing was changed must stay exact.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import etude
from etude.core.user_code import NOT_HASHED
from rank_driver import free_port

ROW = 28
UNIT = "changes of code"
FULL, IN_CI = 200, 2
SECONDS = 120.0
KINDS = ("etude", "project", "version", "model")
RANKS_EVERY = 5
"""Of these cases of a kind, one changes the code of a rank at its start."""
ENV = """
from pathlib import Path
from typing import Literal

import numpy as np

from etude import mj
from etude.mj import observations as obs
from scoring import WEIGHT


class Pole(mj.TaskConfig):
    kind: Literal["pole"] = "pole"

    def define(self) -> mj.Task:
        from polekit import STEPS

        pole = mj.Robot("pole")
        return mj.Task(
            model=Path(__file__).with_name("pole.xml"),
            parts=[pole],
            action=mj.Controls(),
            observations={"state": {"joints": obs.joint_positions(pole)}},
            rewards={"up": (lambda env: np.cos(pole.joint_positions[:, 0]), WEIGHT)},
            max_episode_steps=STEPS,
        )
"""
MODEL = """
<mujoco>
  <worldbody>
    <body name="pole"><joint name="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0 0 0.5" size="0.02" mass="0.4"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1" gear="1.5"/></actuator>
</mujoco>
"""
SIZES = (
    *("--collector.num-envs=4", "--collector.envs-per-group=2", "--learner.shards=2"),
    *("--algorithm.rollout-steps=16", "--algorithm.minibatch-size=64", "--clock.cycles=1"),
    *("--clock.iterations=1", "--checkpoint.every=1 cycle", "--evaluation.every=never"),
    *("--evaluation.final-episodes=0", "--clock.total-timesteps=128", "--logs.tensorboard=false"),
)
MARK = "From here on this run is not exact"


class Place(NamedTuple):
    """Copies of all that a run computes with, and the run."""

    root: Path

    @property
    def site(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.root / "user" / "lib" / version / "site-packages"

    def etude(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """A command in the project, with these copies and nothing else of ours."""
        paths = [self.root / "src", self.root / "project", self.site]
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUSERBASE": str(self.root / "user"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_STATE_HOME": str(self.root / "state"),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "etude", *arguments],
            cwd=self.root / "project",
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _install(site: Path, name: str, version: str, text: str, needs: str = "") -> None:
    """A package as pip leaves it."""
    about = site / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (site / name).mkdir(exist_ok=True)
    (site / name / "__init__.py").write_text(text)
    required = f"Requires-Dist: {needs}\n" if needs else ""
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}"
    )
    (about / "RECORD").write_text(f"{name}/__init__.py,,\n")


@cache
def _trained() -> Place:
    """A run of two iterations, made once for all cases."""
    place = Place(Path(tempfile.mkdtemp(prefix="changed-code-")))
    atexit.register(shutil.rmtree, place.root, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.pyc", "__pycache__")
    shutil.copytree(Path(etude.__file__).parent, place.root / "src" / "etude", ignore=ignored)
    project = place.root / "project"
    project.mkdir()
    (project / "pole.py").write_text(ENV)
    (project / "pole.xml").write_text(MODEL)
    (project / "scoring.py").write_text("WEIGHT = 1.0\n")
    _install(place.site, "polekit", "1.0", "STEPS = 20\n", "jointkit")
    _install(place.site, "jointkit", "1.0", "")
    task = ("train", "ppo", "--env.kind", "pole.py:Pole", *SIZES)
    code, said = _ended(place.etude(*task, "--folder", "run"))
    assert code == 0, said
    return place


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def _change(place: Place, kind: str, chance: random.Random) -> str:
    """Change something of a kind; the name that must be said."""
    if kind == "etude":
        root = place.root / "src" / "etude"
        sources = (path for path in sorted(root.rglob("*.py")) if path.stat().st_size)
        known = [p for p in sources if not p.relative_to(root).as_posix().startswith(NOT_HASHED)]
        with chance.choice(known).open("a") as stream:
            stream.write(f"\n_CHANGED = {chance.random()}\n")
        return "etude"
    if kind == "project":
        name, file = chance.choice(
            [
                ("project/pole.py", place.root / "project" / "pole.py"),
                ("scoring", place.root / "project" / "scoring.py"),
                ("polekit", place.site / "polekit" / "__init__.py"),
            ]
        )
        with file.open("a") as stream:
            stream.write(f"\n_CHANGED = {chance.random()}\n")
        return name
    if kind == "version":
        name = chance.choice(["polekit", "jointkit"])
        shutil.rmtree(place.site / f"{name}-1.0.dist-info")
        text = (place.site / name / "__init__.py").read_text()
        needs = "jointkit" if name == "polekit" else ""
        _install(place.site, name, f"1.{chance.randrange(1, 99)}", text, needs)
        return f"version of {name}"
    old, figure = chance.choice(
        [('damping="{}"', "0.1"), ('mass="{}"', "0.4"), ('gear="{}"', "1.5"), ("0 0 {}", "0.5")]
    )
    new = old.format(f"{float(figure) * chance.uniform(1.1, 2.0):.6f}")
    (place.root / "project" / "pole.xml").write_text(MODEL.replace(old.format(figure), new))
    return "simulated model"


def case(number: int, seed: int, folder: Path) -> None:
    """One change, and beside it one resume without any."""
    chance = random.Random(f"{seed}-{number}")
    kind, on_ranks = KINDS[number % len(KINDS)], number // len(KINDS) % RANKS_EVERY == 1
    place, changed = Place(folder / "same"), Place(folder / "changed")
    for each in (place, changed):
        shutil.copytree(_trained().root, each.root, symlinks=True)
    name = _change(changed, kind, chance)
    if on_ranks:
        _on_ranks(place, changed, name)
        return
    resume = ("resume", "run", "--total-timesteps", "256", "--trust")
    (code, said), (same, unchanged) = map(_ended, (changed.etude(*resume), place.etude(*resume)))
    assert code == 0, said
    assert f"{MARK}: resumed where the " in said, f"{kind} {name}: {said}"
    assert name in said.partition(MARK)[2], f"{kind} {name}: {said}"
    assert _statement(changed).startswith("not exact: ")
    assert same == 0, unchanged
    assert MARK not in unchanged, unchanged
    assert _statement(place).startswith("exact: ")


def _on_ranks(first: Place, second: Place, name: str) -> None:
    """Two ranks, the second with other code: neither trains."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = ("train", "ppo", "--env.kind", "pole.py:Pole", *SIZES, "--folder", "shared")
    ranks = [
        place.etude(*words, **meet, RANK=str(rank)) for rank, place in enumerate((first, second))
    ]
    (code, said), (other, _) = map(_ended, ranks)
    assert (code, other) == (2, 2), said
    assert "Rank 1 computes with other code than rank 0" in said, said
    assert name.removeprefix("version of ") in said, f"{name}: {said}"
    assert not (first.root / "project" / "shared").exists()


def _statement(place: Place) -> str:
    text = (place.root / "project" / "run" / "manifest.json").read_text()
    return str(json.loads(text)["exactness"])
