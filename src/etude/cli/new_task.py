"""`etude new-task`: a file with a task for a robot, from its MJCF; it runs as it is."""

from __future__ import annotations

import re
from pathlib import Path

import mujoco
from pydantic import Field

from etude.cli.options import Positional, parse
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.envs.mujoco.model_files import model_file
from etude.envs.mujoco.robot import names_of
from etude.envs.mujoco.simulation import load_spec


class NewTaskCommand(Config):
    """Write a task for a robot: a Python file to train at once, and to change."""

    robot: Positional[str] = Field(
        description="An MJCF or URDF file, or the name of a robot of MuJoCo Menagerie."
    )
    out: str | None = Field(None, description="File to write; default NAME_task.py, here.")
    force: bool = Field(False, description="Replace the file if there is one.")


def run(arguments: list[str]) -> int:
    """Write the file and say how to go on."""
    command = parse("new-task", NewTaskCommand, arguments)
    text, name = task_file(command.robot)
    file = Path(command.out or f"{_snake(name)}_task.py")
    if file.exists() and not command.force:
        raise UsageError(f"{file} exists: name another with --out, or replace it with --force.")
    file.write_text(text, encoding="utf-8")
    print(f"Wrote {file}: the task {name} for {command.robot}. Go on with")
    print(f"  etude check {file}:{name}")
    print(f"  etude view {file}:{name}")
    print(f"  etude train ppo --env.kind {file}:{name}")
    print(f"and change its observations, rewards and terminations in {file}.")
    return 0


def task_file(robot: str) -> tuple[str, str]:
    """(the text of a task's file, the name of its class) for a robot's file or name."""
    path = model_file(robot)
    try:
        model = load_spec(path).compile()
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot compile {path}: {error}") from error
    if not model.njnt:
        raise UsageError(f"{path} has no joints: there is nothing to learn to move.")
    base, floats = _base(model)
    name = _camel(path.parent.name if path.stem in ("scene", "model", "robot") else path.stem)
    parts = _moving(model, base, floats) if base else _fixed(model)
    text = _FILE.format(
        name=name,
        kind=_snake(name).replace("_", "-"),
        # A robot of Menagerie keeps its name: where its file lies differs by machine.
        path=str(path.resolve()) if Path(robot).expanduser().exists() else robot,
        base=f'"{base}"' if base else "",
        joints=_comment("joints", names_of(model, "joint")),
        actuators=_comment("actuators", names_of(model, "actuator")),
        sites=_comment("sites", [model.site(i).name for i in range(model.nsite)]),
        action=_ACTION if model.nu else _SERVOS,
        substeps=max(1, round(0.02 / model.opt.timestep)),
        **parts,
    )
    return text, name


def _base(model: mujoco.MjModel) -> tuple[str, bool]:
    """(the body that moves about, whether by a free joint); "" for a robot that stands fixed."""
    free = [j for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    if free:
        return model.body(int(model.jnt_bodyid[free[0]])).name, True
    # A body that slides without an actuator, as planar walkers do.
    moved = set(model.actuator_trnid[:, 0].tolist())
    first = int(model.jnt_bodyid[0])
    root = [j for j in range(model.njnt) if model.jnt_bodyid[j] == first]
    slides = any(model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE for j in root)
    return (model.body(first).name if slides and moved.isdisjoint(root) else ""), False


def _moving(model: mujoco.MjModel, base: str, floats: bool) -> dict[str, str]:
    """A robot whose base moves: it is to move forward without falling."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    height = float(data.body(base).xpos[2])
    turned = "resets.BasePose(robot, yaw=0.1), " if floats else ""
    return {
        "purpose": "moves forward",
        "helpers": "resets, rewards, terminations",
        "terms": _FORWARD,
        "resets": f"{turned}resets.JointNoise(robot, 0.05)",
        "observations": _BASE_OBSERVATIONS,
        "rewards": _FORWARD_REWARDS,
        "terminations": f'{{"fell": terminations.lower_than(robot, {0.5 * height:.3g})}}',
        "success": "None",
    }


def _fixed(model: mujoco.MjModel) -> dict[str, str]:
    """A robot on a fixed base: a point of it is to come to another."""
    sites = [model.site(i).name for i in range(model.nsite) if model.site(i).name]
    bodies = [name for name in names_of(model, "body")[1:] if name]
    if not sites and not bodies:
        raise UsageError("The model has neither a site nor a body with a name: name its hand.")
    hand = sites[-1] if sites else bodies[-1]
    field = "site_xpos" if sites else "xpos"
    kind = "site" if sites else "body"
    return {
        "purpose": f"brings {hand} to a point",
        "helpers": "resets, rewards",
        "terms": _REACH.format(hand=hand, kind=kind, field=field),
        "resets": "target, resets.JointNoise(robot, 0.1)",
        "observations": _REACH_OBSERVATIONS,
        "rewards": _REACH_REWARDS,
        "terminations": "{}",
        "success": "lambda env: target.distance < 0.05",
    }


def _comment(what: str, names: list[str]) -> str:
    """The names of things on comment lines."""
    nameless = sum(not name for name in names)
    shown = [name for name in names if name] + [f"{nameless} without a name"] * bool(nameless)
    lines, line = [], f"# {what}:"
    for name in shown or ["none"]:
        if len(line) + len(name) > 96:
            lines.append(line)
            line = "#   "
        line += f" {name},"
    return "\n".join([*lines, line.rstrip(",")])


def _camel(text: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", text)
    name = "".join(word[0].upper() + word[1:] for word in words) or "Robot"
    return name if name[0].isalpha() else f"Robot{name}"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


_FILE = '''\
"""{name} {purpose}: written by `etude new-task`, to be changed."""

from typing import Literal

import numpy as np
from pydantic import Field

from etude import mj
from etude.mj import observations as obs
from etude.mj import {helpers}

ROBOT = "{path}"
{joints}
{actuators}
{sites}


class {name}(mj.TaskConfig):
    """{name} {purpose}."""

    kind: Literal["{kind}"] = "{kind}"
    max_episode_steps: int = Field(500, ge=1, description="Control steps of about 20 ms.")

    def define(self) -> mj.Task:
        # Joints, the base, and arrays of them: robot.joint_positions, robot.velocity ...
        robot = mj.Robot({base})
{terms}
        return mj.Task(
            model=ROBOT,
            parts=[robot, {resets}],
{action}
            # What the policy sees, side by side. Each may have noise=, scale=, delay=, history=.
            observations={{
                "state": {{
{observations}
                    "joints": obs.joint_positions(robot),
                    "speeds": obs.joint_velocities(robot, scale=0.1),
                    "action": obs.last_action(),
                }}
            }},
            # Functions that give [num_envs] numbers, and their weights.
            rewards={{
{rewards}
                "effort": (rewards.effort, -0.01),
                "jerk": (rewards.action_rate, -0.01),
            }},
            terminations={terminations},
            # [num_envs] bool when an episode ends; None: it did not end early.
            success={success},
            substeps={substeps},
            max_episode_steps=self.max_episode_steps,
        )
'''
_ACTION = """\
            # Actions from -1 to 1 span the actuators' ranges. mj.JointTargets(robot, scale=0.5)
            # makes them joint positions around the home pose.
            action=mj.Controls(),"""
_SERVOS = """\
            # The model has no actuators: position servos are added. Choose their gains.
            action=mj.JointTargets(robot, scale=0.5, stiffness=50.0, damping=2.0),"""
_FORWARD = '''
        def forward(env):
            """[num_envs] m/s along x, up to 1."""
            return np.minimum(robot.world_velocity[:, 0], 1.0)
'''
_BASE_OBSERVATIONS = """\
                    "height": obs.height(robot),
                    "gravity": obs.gravity(robot),
                    "velocity": obs.velocity(robot),
                    "spin": obs.angular_velocity(robot, scale=0.25),"""
_FORWARD_REWARDS = """\
                "forward": (forward, 1.0),
                "alive": (rewards.alive, 0.5),"""
_REACH = '''
        class Target(mj.Part):
            """A point that {hand} is to reach, drawn for every episode."""

            def bind(self):
                simulation = self.env.simulation
                self.hand = simulation.bind("{field}")[:, simulation.model.{kind}("{hand}").id]
                self.position = self.env.state("target", 3)  # in every snapshot

            def begin(self, env_ids, draws):
                away = draws.uniform("target", 3, low=-0.2, high=0.2)
                self.position[env_ids] = self.hand[env_ids] + away

            @mj.derived
            def distance(self):
                return np.linalg.norm(self.position - self.hand, axis=1)

        target = Target()
'''
_REACH_OBSERVATIONS = """\
                    "to_target": lambda env: target.position - target.hand,"""
_REACH_REWARDS = """\
                "near": (lambda env: np.exp(-10.0 * target.distance), 1.0),"""
