"""`etude new-task`: write a Python file with a task for a robot, from its MJCF."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mujoco
from pydantic import Field

from etude.cli.options import Positional, parse
from etude.core.config import Config
from etude.core.errors import UsageError
from etude.envs.mujoco.robot import names_of
from etude.envs.mujoco.simulation import load_spec, model_file


class NewTaskCommand(Config):
    """Write a task for a robot: a Python file that trains as it is, to edit."""

    robot: Positional[str] = Field(
        description="An MJCF or URDF file, or the name of a robot of MuJoCo Menagerie."
    )
    out: str | None = Field(None, description="File to write; default NAME_task.py.")
    force: bool = Field(False, description="Replace the file if it exists.")


def run(arguments: list[str]) -> int:
    """Write the file and print the next commands."""
    command = parse("new-task", NewTaskCommand, arguments)
    text, name = task_file(command.robot)
    file = Path(command.out or f"{_snake(name)}_task.py")
    if file.exists() and not command.force:
        raise UsageError(f"{file} exists: name another with --out, or replace it with --force.")
    file.write_text(text, encoding="utf-8")
    print(f"Wrote {file}: the task {name} for {command.robot}. Next:")
    print(f"  etude check {file}:{name}")
    print(f"  etude view {file}:{name}")
    print(f"  etude train ppo --env.kind {file}:{name}")
    print(f"Edit its observations, rewards and terminations in {file}.")
    return 0


def task_file(robot: str) -> tuple[str, str]:
    """(text of the file, name of the task's class) for a robot's file or name."""
    from jinja2 import Environment

    path = model_file(robot)
    try:
        model = load_spec(path).compile()
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot compile {path}: {error}") from error
    if not model.njnt:
        raise UsageError(f"{path} has no joints: there is nothing to learn to move.")
    base, floats = _base(model)
    name = _camel(path.parent.name if path.stem in ("scene", "model", "robot") else path.stem)
    template = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(_FILE)
    text = template.render(
        name=name,
        kind=_snake(name).replace("_", "-"),
        # A robot of Menagerie keeps its name: the path of its file differs by machine.
        path=str(path.resolve()) if Path(robot).expanduser().exists() else robot,
        parts={
            "joints": _listed("joints", names_of(model, "joint")),
            "actuators": _listed("actuators", names_of(model, "actuator")),
            "sites": _listed("sites", [model.site(i).name for i in range(model.nsite)]),
        },
        base=base,
        floats=floats,
        has_actuators=model.nu > 0,
        substeps=max(1, round(0.02 / model.opt.timestep)),
        **({"height": _height(model, base)} if base else _hand(model)),
    )
    return text, name


def _base(model: mujoco.MjModel) -> tuple[str, bool]:
    """(body that moves, whether it has a free joint); "" for a robot on a fixed base."""
    free = [j for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    if free:
        return model.body(int(model.jnt_bodyid[free[0]])).name, True
    # Planar walkers: a body that slides without an actuator.
    moved = set(model.actuator_trnid[:, 0].tolist())
    first = int(model.jnt_bodyid[0])
    root = [j for j in range(model.njnt) if model.jnt_bodyid[j] == first]
    slides = any(model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE for j in root)
    return (model.body(first).name if slides and moved.isdisjoint(root) else ""), False


def _height(model: mujoco.MjModel, base: str) -> float:
    """Height of the base in the model's initial pose, m."""
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    return float(data.body(base).xpos[2])


def _hand(model: mujoco.MjModel) -> dict[str, Any]:
    """The last site or body with a name, for a reaching task."""
    sites = [model.site(i).name for i in range(model.nsite) if model.site(i).name]
    bodies = [name for name in names_of(model, "body")[1:] if name]
    if not sites and not bodies:
        raise UsageError("The model has neither a site nor a body with a name: name its hand.")
    return {"hand": (sites or bodies)[-1], "hand_is": "site" if sites else "body"}


def _listed(what: str, names: list[str]) -> str:
    """Names on comment lines."""
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
{% if base %}
{% set purpose = "moves forward" %}
{% else %}
{% set purpose = "brings " ~ hand ~ " to a point" %}
{% endif %}
"""{{ name }} {{ purpose }}: written by `etude new-task`, to be edited."""

from typing import Literal

import numpy as np
from pydantic import Field

from etude import mj
from etude.mj import observations as obs
from etude.mj import resets, rewards{{ ", terminations" if base }}

ROBOT = "{{ path }}"
{{ parts.joints }}
{{ parts.actuators }}
{{ parts.sites }}


class {{ name }}(mj.TaskConfig):
    """{{ name }} {{ purpose }}."""

    kind: Literal["{{ kind }}"] = "{{ kind }}"
    max_episode_steps: int = Field(500, ge=1, description="Control steps of about 20 ms.")

    def define(self) -> mj.Task:
        # Arrays of joints and base: robot.joint_positions, robot.velocity, ...
{% if base %}
        robot = mj.Robot("{{ base }}")

        def forward(env):
            """[num_envs] m/s along x, up to 1."""
            return np.minimum(robot.world_velocity[:, 0], 1.0)
{% else %}
        robot = mj.Robot()

        class Target(mj.Part):
            """A point for {{ hand }} to reach, drawn for every episode."""

            def bind(self):
                simulation = self.env.simulation
                index = simulation.model.{{ hand_is }}("{{ hand }}").id
                self.hand = simulation.bind("{{ "site_" if hand_is == "site" }}xpos")[:, index]
                self.position = self.env.state("target", 3)  # in every snapshot

            def begin(self, env_ids, draws):
                away = draws.uniform("target", 3, low=-0.2, high=0.2)
                self.position[env_ids] = self.hand[env_ids] + away

            @mj.derived
            def distance(self):
                return np.linalg.norm(self.position - self.hand, axis=1)

        target = Target()
{% endif %}

        return mj.Task(
            model=ROBOT,
{% if floats %}
            parts=[robot, resets.BasePose(robot, yaw=0.1), resets.JointNoise(robot, 0.05)],
{% elif base %}
            parts=[robot, resets.JointNoise(robot, 0.05)],
{% else %}
            parts=[robot, target, resets.JointNoise(robot, 0.1)],
{% endif %}
{% if has_actuators %}
            # Actions from -1 to 1 span the actuators' ranges. mj.JointTargets(robot, scale=0.5)
            # makes them joint positions around the home pose.
            action=mj.Controls(),
{% else %}
            # The model has no actuators: position servos are added. Choose their gains.
            action=mj.JointTargets(robot, scale=0.5, stiffness=50.0, damping=2.0),
{% endif %}
            # Observations of the policy; each may have noise=, scale=, delay=, history=.
            observations={
                "state": {
{% if base %}
                    "height": obs.height(robot),
                    "gravity": obs.gravity(robot),
                    "velocity": obs.velocity(robot),
                    "spin": obs.angular_velocity(robot, scale=0.25),
{% else %}
                    "to_target": lambda env: target.position - target.hand,
{% endif %}
                    "joints": obs.joint_positions(robot),
                    "speeds": obs.joint_velocities(robot, scale=0.1),
                    "action": obs.last_action(),
                }
            },
            # {name: (function that returns [num_envs], weight)}.
            rewards={
{% if base %}
                "forward": (forward, 1.0),
                "alive": (rewards.alive, 0.5),
{% else %}
                "near": (lambda env: np.exp(-10.0 * target.distance), 1.0),
{% endif %}
                "effort": (rewards.effort, -0.01),
                "jerk": (rewards.action_rate, -0.01),
            },
{% if base %}
            terminations={"fell": terminations.lower_than(robot, {{ "%.3g" % (0.5 * height) }})},
            # None: success is not to end early; or a function that returns [num_envs] bool.
            success=None,
{% else %}
            terminations={},
            # A function that returns [num_envs] bool.
            success=lambda env: target.distance < 0.05,
{% endif %}
            substeps={{ substeps }},
            max_episode_steps=self.max_episode_steps,
        )
'''
