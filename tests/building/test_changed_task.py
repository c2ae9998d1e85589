"""A task that is changed while its run is stopped: the resume says so, and the run is marked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import commands

POLE = """
<mujoco>
  <worldbody>
    <body name="pole"><joint name="hinge" axis="0 1 0"/>
      <geom type="capsule" fromto="0 0 0 0 0 .5" size=".02"/>
    </body>
  </worldbody>
  <actuator><motor joint="hinge" ctrlrange="-1 1" gear="1"/></actuator>
</mujoco>
"""
TASK = """
from pathlib import Path
from typing import Literal

import numpy as np

from etude import mj
from etude.mj import observations as obs


class Pole(mj.TaskConfig):
    kind: Literal["pole"] = "pole"

    def define(self) -> mj.Task:
        pole = mj.Robot("pole")
        return mj.Task(
            model=Path(__file__).with_name("pole.xml"),
            parts=[pole],
            action=mj.Controls(),
            observations={"state": {"joints": obs.joint_positions(pole)}},
            rewards={"up": (lambda env: np.cos(pole.joint_positions[:, 0]), 1.0)},
            max_episode_steps=20,
        )
"""


def statement(run: Path) -> str:
    return str(json.loads((run / "manifest.json").read_text())["exactness"])


def test_a_changed_task_marks_a_run_for_good(tmp_path: Path) -> None:
    """Looks do not count, and nothing is said of a task that is as it was."""
    task, run = tmp_path / "robots", tmp_path / "run"
    task.mkdir()
    (task / "pole.xml").write_text(POLE)
    (task / "pole.py").write_text(TASK)

    def etude(*arguments: str) -> str:
        code, out, err = commands.run([*arguments], tmp_path)
        assert code == 0, err
        return out + err

    sizes = ["--collector.num-envs=4", "--collector.envs-per-group=4", "--clock.cycles=1"]
    sizes += ["--algorithm.rollout-steps=16", "--algorithm.minibatch-size=64"]
    sizes += ["--clock.total-timesteps=512", "--clock.iterations=2", "--checkpoint.every=1 cycle"]
    sizes += ["--evaluation.every=never", "--evaluation.final-episodes=0"]
    etude("train", "ppo", "--env.kind", "robots/pole.py:Pole", *sizes, "--folder", "run")
    (task / "pole.xml").write_text(POLE.replace("<geom ", '<geom rgba="1 0 0 1" '))
    assert "hash" not in etude("resume", "run", "--total-timesteps", "1024")
    assert statement(run).startswith("exact: ")
    shutil.copytree(run, tmp_path / "copy", symlinks=True)
    examined = etude("fsck", "copy")
    assert "A resume asks for trust first. " in examined
    assert "The run can be resumed from step 1024" in examined
    marked = "From here on this run is not exact: resumed where"
    (task / "pole.xml").write_text(POLE.replace('gear="1"', 'gear="2"'))
    told = etude("resume", "copy", "--total-timesteps", "2048", "--trust")
    assert f"{marked} the hash of the simulated model was" in told
    assert statement(tmp_path / "copy").startswith("not exact: ")
    (task / "pole.xml").write_text(POLE)
    (task / "pole.py").write_text(TASK.replace("1.0)},", "2.0)},"))
    assert f"{marked} the hash of the code of robots/pole.py was" in etude(
        "resume", "run", "--total-timesteps", "2048", "--trust"
    )
    assert statement(run).startswith("not exact: ")
