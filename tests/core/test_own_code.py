"""Code that is in a file: its objects reach the workers of a run."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

from etude.core.user_code import load_object

ROBOT = """
from pydantic import Field

from etude.core.config import Config


class Limits(Config):
    speed: float = Field(1.0, gt=0)


class Robot(Config):
    legs: int = 4
    limits: Limits = Limits()
"""
READ = """
import pickle, sys
robot = pickle.load(sys.stdin.buffer)
print(type(robot).__name__, robot.legs, robot.limits.speed, repr(robot))
"""


def test_an_object_of_a_class_in_a_file_reaches_another_process(tmp_path: Path) -> None:
    (tmp_path / "robot.py").write_text(ROBOT)
    made = load_object(f"{tmp_path}/robot.py:Robot", "")(legs=6, limits={"speed": 2.5})
    sent = pickle.dumps(made)
    assert pickle.loads(sent) == copy.deepcopy(made) == made
    done = subprocess.run([sys.executable, "-c", READ], input=sent, capture_output=True)
    assert done.stdout.decode().split(maxsplit=3) == ["Robot", "6", "2.5", f"{made!r}\n"], done
