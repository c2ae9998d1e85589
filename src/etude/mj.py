"""Building blocks of tasks on MuJoCo: robots from MJCF files, parts and terms (docs/robots.md)."""

from __future__ import annotations

from etude.core.contracts import Reflection
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.markers import Arrow, Ghost, Target
from etude.envs.mujoco.randomize import Randomization
from etude.envs.mujoco.reference import ReferenceMotion, SelfContacts, StartNoise
from etude.envs.mujoco.robot import Controls, Feet, JointTargets, Robot
from etude.envs.mujoco.simulation import Camera, Marker, Simulation, load_spec
from etude.envs.mujoco.targets import ReachTarget, WalkTarget
from etude.envs.mujoco.task import (
    Action,
    Draws,
    Group,
    Observation,
    Part,
    Task,
    Term,
    derived,
    measured,
)
from etude.envs.mujoco.terms import observations, resets, rewards, terminations, tracking
from etude.envs.mujoco.terrain import Terrain

__all__ = [
    "Action",
    "Arrow",
    "Camera",
    "Controls",
    "Draws",
    "Feet",
    "Ghost",
    "Group",
    "JointTargets",
    "Marker",
    "MujocoEnv",
    "Observation",
    "Part",
    "Randomization",
    "ReachTarget",
    "ReferenceMotion",
    "Reflection",
    "Robot",
    "SelfContacts",
    "Simulation",
    "StartNoise",
    "Target",
    "Task",
    "TaskConfig",
    "Term",
    "Terrain",
    "VelocityCommand",
    "WalkTarget",
    "derived",
    "load_spec",
    "measured",
    "observations",
    "resets",
    "rewards",
    "terminations",
    "tracking",
]
