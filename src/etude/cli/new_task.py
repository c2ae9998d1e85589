"""`etude new-task`: write a Python file with a task for a robot, from its MJCF."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from pydantic import Field

from etude.cli.options import Positional, parse
from etude.cli.target import env_config
from etude.core.config import Config
from etude.core.errors import EtudeError, UsageError
from etude.envs.check import Finding, check_env
from etude.envs.mujoco.robot import names_of
from etude.envs.mujoco.simulation import load_spec, model_file
from etude.envs.mujoco.survey import Servo, Survey

_COLUMNS = ("home", "scale", "stiffness", "damping", "torque")
_CHECK_STEPS = 60
_EPISODE = 40
"""Control steps of the check and of its episodes: seconds, also for a humanoid."""
_GAP = 0.01
"""Largest distance of a standing robot from the floor that is left as it is, m."""
_CLEARANCE = 0.002
"""Height above the floor at which a robot that was moved starts, m."""


class NewTaskCommand(Config):
    """Write a task for a robot: a Python file that trains as it is, to edit."""

    robot: Positional[str] = Field(
        description="An MJCF or URDF file, or the name of a robot of MuJoCo Menagerie."
    )
    out: str | None = Field(None, description="File to write; default NAME_task.py.")
    force: bool = Field(False, description="Replace the file if it exists.")
    servos: bool = Field(
        False,
        description="Replace the model's actuators by position servos. A model without actuators "
        "gets them anyway.",
    )
    frequency: float = Field(
        2.0,
        gt=0,
        description="Natural frequency of the servos, Hz: stiffness = I w^2, where I is the "
        "joint's inertia in the home pose with its armature, and w = 2 pi frequency.",
    )
    damping_ratio: float = Field(
        1.0,
        gt=0,
        description="Damping ratio z of the servos: damping of the joint = 2 z I w.",
    )


def run(arguments: list[str]) -> int:
    """Write the file, check the task, and print the next commands; 1 if the check fails."""
    command = parse("new-task", NewTaskCommand, arguments)
    text, name, notes = task_file(command)
    file = Path(command.out or f"{_snake(name)}_task.py")
    if file.exists() and not command.force:
        raise UsageError(f"{file} exists: name another with --out, or replace it with --force.")
    file.write_text(text, encoding="utf-8")
    failed = check(f"{file}:{name}")
    for note in notes:
        print(note)
    if failed:
        print(f"Wrote {file}: the task {name} for {command.robot}, which fails its check:")
        for finding in failed:
            print(f"  {finding.item}: {finding.problem.rstrip('.')}.\n  Fix: {finding.fix}")
        if "SERVOS" not in text and any("NaN" in finding.problem for finding in failed):
            print("  The actuators may be too stiff for the time step: --servos replaces them.")
        print(f"Edit {file}, and check it again: etude check {file}:{name}")
        return 1
    print(f"Wrote {file}: the task {name} for {command.robot}. It passes etude check. Next:")
    print(f"  etude view {file}:{name}")
    print(f"  etude train ppo --env.kind {file}:{name}")
    print(f"Edit its observations, rewards and terminations in {file}.")
    return 0


def check(target: str) -> list[Finding]:
    """The findings of a short `etude check` that failed."""
    try:
        config = env_config(target, {"max_episode_steps": _EPISODE})
        config.build_unchecked(1).close()
    except EtudeError as error:
        return [Finding("it can be built", "failed", str(error).rstrip("."), "Edit the file.")]
    findings = check_env(config.build_unchecked, _CHECK_STEPS, _CHECK_STEPS)
    return [finding for finding in findings if finding.verdict == "failed"]


def task_file(command: NewTaskCommand) -> tuple[str, str, list[str]]:
    """(text of the file, name of the task's class, sentences about what was added)."""
    from jinja2 import Environment

    path = model_file(command.robot)
    try:
        model = load_spec(path).compile()
    except ValueError as error:
        raise UsageError(f"MuJoCo cannot compile {path}: {error}") from error
    survey = Survey(model)
    if not survey.joints and not model.nu:
        raise UsageError(
            f"{path} has neither hinges, slides nor actuators: there is nothing to learn to move."
        )
    name = _camel(
        next(filter(_says_which, (path.stem, *path.resolve().parent.parts[::-1])), "robot")
    )
    facts, notes = _scene(survey, path)
    servos, more = _servos(survey, command)
    explicit = int(mujoco.mjtIntegrator.mjINT_RK4) == int(model.opt.integrator)
    facts["implicit"] = bool(servos) and explicit
    if facts["implicit"]:
        facts["edits_model"] = True
        more.append(f"{path.name} has the integrator RK4: the task has implicitfast for servos.")
    facts |= _walker(survey, facts["raised"]) if survey.floats else _reacher(survey)
    template = Environment(trim_blocks=True, keep_trailing_newline=True).from_string(_FILE)
    template.globals.update(number=_number, row=_row)
    text = template.render(
        name=name,
        kind=_snake(name).replace("_", "-"),
        # A robot of Menagerie keeps its name: the path of its file differs by machine.
        path=str(path.resolve()) if Path(command.robot).expanduser().exists() else command.robot,
        parts={
            "joints": _listed("joints", names_of(model, "joint")),
            "actuators": _listed("actuators", names_of(model, "actuator")),
            "sites": _listed("sites", [model.site(i).name for i in range(model.nsite)]),
        },
        survey=survey,
        servos=servos,
        joints=_pattern(survey),
        home=[float(x) for x in survey.home[model.jnt_qposadr[survey.joints]]],
        num_actions=len(servos) or model.nu,
        substeps=max(1, round(0.02 / model.opt.timestep)),
        notes=notes + more,
        **facts,
    )
    return text, name, notes + more


def _scene(survey: Survey, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Changes of the model that the task needs, and sentences about them."""
    model, notes, facts = survey.model, [], dict[str, Any]()
    facts["add_gravity"] = survey.floats and not model.opt.gravity.any()
    if facts["add_gravity"]:
        notes.append(f"{path.name} has no gravity: the task adds 9.81 m/s^2.")
    lowest = survey.lowest
    facts["add_floor"] = not survey.has_floor and not survey.planar
    facts["floor"] = survey.floor
    if facts["add_floor"]:
        facts["floor"] = 0.0 if survey.floats else float(np.floor(1000.0 * lowest) / 1000.0)
        place = f" at z = {facts['floor']:g} m" if facts["floor"] else ""
        notes.append(f"{path.name} has no floor: the task adds one{place}.")
    gap = lowest - facts["floor"] if survey.floats else 0.0
    facts["raised"] = _CLEARANCE - gap if abs(gap) > _GAP else 0.0
    if facts["raised"]:
        where = "in" if gap < 0 else "above"
        notes.append(
            f"{survey.name or 'The robot'} starts {100 * abs(gap):.1f} cm {where} the floor in its "
            "home pose: the task moves it onto the floor."
        )
    if facts["raised"] and not survey.name:
        facts["raised"] = 0.0
        notes[-1] = "The robot's base has no name: name it, so that a task can move it."
    facts["edits_model"] = facts["add_floor"] or facts["add_gravity"] or facts["raised"]
    return facts, notes


def _servos(survey: Survey, command: NewTaskCommand) -> tuple[dict[str, Servo], list[str]]:
    """The servos of the task, {} if the model's actuators stay, and sentences about them."""
    model = survey.model
    if model.nu and not command.servos:
        if all(survey.is_motor(a) for a in range(len(model.actuator_trntype))):
            return {}, [
                "The model's actuators are motors, so that actions are torques: --servos replaces "
                "them by position servos."
            ]
        return {}, []
    nameless = sum(not model.joint(j).name for j in survey.joints)
    if nameless:
        raise UsageError(
            f"{nameless} joints of the model have no name, and a servo needs one: name them."
        )
    servos = survey.servos(command.frequency, command.damping_ratio)
    what = "The model's actuators are replaced" if model.nu else "The model has no actuators"
    notes = [
        f"{what}: every joint gets a position servo of {command.frequency:g} Hz and damping ratio "
        f"{command.damping_ratio:g} for its inertia, or stiffer for its load."
    ]
    derived = [joint for joint, servo in servos.items() if servo.derived]
    if derived:
        who = "any joint" if len(derived) == len(servos) else ", ".join(derived)
        notes.append(
            f"Warning: the model gives no torque limit for {who}; the limits in the file are "
            "derived from load and inertia: replace them by those of the motors."
        )
    return servos, notes


def _pattern(survey: Survey) -> str:
    """Regular expression of the joints that move; "" for all."""
    model = survey.model
    left = set(range(model.njnt)) - set(survey.joints)
    names = [model.joint(j).name for j in sorted(left) if survey.is_single(j)]
    return f"(?!({'|'.join(map(re.escape, names))})$).*" if names and all(names) else ""


def _walker(survey: Survey, raised: float) -> dict[str, Any]:
    """Numbers of a task for a robot with a free base, which is raised onto the floor."""
    return {
        "near": survey.size,
        "far": 2.0 * survey.size,
        "at": 0.5 * survey.size,
        "speed": min(1.0, 1.5 * survey.size),
        "down": survey.base_height + raised - 0.4 * survey.mass_height,
        "camera": 3.5 * survey.size,
        "ball": 0.06 * survey.size,
    }


def _reacher(survey: Survey) -> dict[str, Any]:
    """Numbers of a task for a robot on a fixed base."""
    if not survey.hand and not survey.planar:
        raise UsageError("The model has neither a site nor a body with a name: name its hand.")
    middle, radius = survey.view()
    return {
        "look_at": f"({', '.join(map(_number, middle))})",
        "camera": 1.5 * radius,
        "reach": survey.size,
        "far": 0.4 * survey.size,
        "at": 0.08 * survey.size,
        "ball": 0.04 * survey.size,
        "down": 0.5 * survey.base_height,
    }


def _row(servo: Servo) -> str:
    """The numbers of a servo as a tuple."""
    return f"({', '.join(_number(getattr(servo, name)) for name in _COLUMNS)})"


def _number(value: float) -> str:
    """A number with three digits."""
    return repr(float(f"{value:.3g}") + 0.0)


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


def _says_which(name: str) -> bool:
    """Whether the name of a file or folder may be that of a robot."""
    return name.lower() not in ("scene", "model", "robot", "assets", "mjcf", "xml", "xmls", "urdf")


def _camel(text: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", text)
    name = "".join(word[0].upper() + word[1:] for word in words) or "Robot"
    return name if name[0].isalpha() else f"Robot{name}"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


_FILE = '''\
{% if survey.floats %}
{% set purpose = "walks to a target" %}
{% elif survey.planar %}
{% set purpose = "moves forward" %}
{% else %}
{% set purpose = "brings " ~ survey.hand ~ " to a target" %}
{% endif %}
{% set base = survey.name %}
{% set length = 250 if purpose.startswith("brings") else 500 %}
"""{{ name }} {{ purpose }}: written by `etude new-task`, to be edited."""

from typing import Literal

{% if add_floor or implicit %}
import mujoco
{% endif %}
import numpy as np
from pydantic import Field

from etude import mj
from etude.mj import observations as obs
from etude.mj import resets, rewards{{ ", terminations" if survey.floats or survey.planar }}

ROBOT = "{{ path }}"
{% for note in notes %}
# {{ note | wordwrap(96, wrapstring="\n# ") }}
{% endfor %}
{{ parts.joints }}
{{ parts.actuators }}
{{ parts.sites }}
{% if servos %}

# Joint: (home pose, scale of its action, stiffness, damping, torque limit), in rad and N m, or m
# and N.
SERVOS = {
{% for joint, servo in servos.items() %}
    "{{ joint }}": {{ row(servo) }},
{% endfor %}
}
HOME, SCALE, STIFFNESS, DAMPING, TORQUE = (
    dict(zip(SERVOS, column)) for column in zip(*SERVOS.values())
)
{% endif %}


class {{ name }}(mj.TaskConfig):
    """{{ name }} {{ purpose }}."""

    kind: Literal["{{ kind }}"] = "{{ kind }}"
    max_episode_steps: int = Field(
        {{ length }}, ge=1, description="Control steps of about 20 ms."
    )

    def define(self) -> mj.Task:
{% if edits_model %}
        model = mj.load_spec(ROBOT)
{% if implicit %}
        model.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
{% endif %}
{% if add_gravity %}
        model.option.gravity = (0.0, 0.0, -9.81)
{% endif %}
{% if add_floor %}
        plane = mujoco.mjtGeom.mjGEOM_PLANE
        floor = model.worldbody.add_geom(name="floor", type=plane, size=(0, 0, 0.05))
        floor.pos[2] = {{ number(floor) }}
{% endif %}
{% if raised %}
        model.body("{{ base }}").pos[2] += {{ "%.4f" % raised }}
{% endif %}
{% endif %}
        # Arrays of joints and base: robot.joint_positions, robot.velocity, ...
        robot = mj.Robot(
            {{ '"%s"' % base if base else None }},
{% if joints %}
            joints=r"{{ joints }}",
{% endif %}
{% if servos %}
            home=list(HOME.values()),
{% elif survey.home_changes %}
            home=[
{% for value in home %}
                {{ number(value) }},
{% endfor %}
            ],
{% endif %}
        )
{% if survey.floats %}
        target = mj.WalkTarget(
            robot,
            near={{ number(near) }},
            far={{ number(far) }},
            floor={{ number(floor) }},
            radius={{ number(ball) }},
        )

        def approach(env):
            """[num_envs] from -1 to 1: speed toward the target; 1 for standing still at it."""
            still = np.exp(-4.0 * (robot.world_velocity[:, :2] ** 2).sum(axis=1))
            speed = np.clip(target.approach / {{ number(speed) }}, -1.0, 1.0)
            return np.where(target.distance < {{ number(at) }}, still, speed)

        def direction(env):
            """[num_envs, 2]: from the base to the target along its heading, at most 1 m."""
            return target.offset / np.maximum(target.distance, 1.0)[:, None]
{% elif survey.planar %}

        def forward(env):
            """[num_envs] m/s along x, up to 1."""
            return np.minimum(robot.world_velocity[:, 0], 1.0)
{% else %}
        target = mj.ReachTarget(
            robot, "{{ survey.hand }}", floor={{ number(floor) }}, radius={{ number(ball) }}
        )
{% endif %}

        return mj.Task(
            model={{ "model" if edits_model else "ROBOT" }},
{% if survey.floats %}
            parts=[robot, target, resets.BasePose(robot), resets.JointNoise(robot, 0.05)],
{% elif survey.planar %}
            parts=[robot, resets.JointNoise(robot, 0.05)],
{% else %}
            parts=[robot, target, resets.JointNoise(robot, 0.1)],
{% endif %}
{% if servos %}
            # Actions from -1 to 1 are joint positions around the home pose: home + scale x action.
            # The damping is that of the joints: torque limits do not limit it.
            action=mj.JointTargets(
                robot, SCALE, stiffness=STIFFNESS, joint_damping=DAMPING, torque=TORQUE
            ),
{% else %}
            # Actions from -1 to 1 span the actuators' ranges. mj.JointTargets(robot, scale=0.5)
            # makes them joint positions around the home pose.
            action=mj.Controls(),
{% endif %}
            # Observations of the policy; each may have noise=, scale=, delay=, history=.
            observations={
                "state": {
{% if survey.floats or survey.planar %}
                    "height": obs.height(robot),
                    "gravity": obs.gravity(robot),
                    "velocity": obs.velocity(robot),
                    "spin": obs.angular_velocity(robot, scale=0.25),
{% endif %}
{% if survey.floats %}
                    "to_target": direction,
{% elif not survey.planar %}
                    "to_target": lambda env: target.offset / {{ number(reach) }},
{% endif %}
                    "joints": obs.joint_positions(robot),
                    "speeds": obs.joint_velocities(robot, scale=0.1),
                    "action": obs.last_action(),
                }
            },
            # {name: (function that returns [num_envs], weight)}.
            rewards={
{% if survey.floats %}
                "approach": (approach, 1.0),
                "alive": (rewards.alive, 0.5),
                "upright": (rewards.upright(robot), 0.5),
{% elif survey.planar %}
                "forward": (forward, 1.0),
                "alive": (rewards.alive, 0.5),
{% else %}
                "near": (lambda env: np.exp(-target.distance / {{ number(far) }}), 1.0),
                "at": (lambda env: np.exp(-target.distance / {{ number(at) }}), 1.0),
{% endif %}
                "effort": (rewards.effort, {{ number(-0.1 / num_actions) }}),
                "jerk": (rewards.action_rate, {{ number(-0.05 / num_actions) }}),
            },
{% if survey.floats %}
            terminations={
                "tilted": terminations.tilted(robot, degrees=60),
                "down": terminations.lower_than(robot, {{ number(down) }}),
            },
            # Evaluated when an episode ends; a function that returns [num_envs] bool.
            success=lambda env: ~env.terminated & (target.distance < {{ number(at) }}),
            statistics={"distance": lambda env: target.distance},
            camera=mj.Camera({{ 'follow="%s", ' % base if base }}distance={{ number(camera) }}),
{% elif survey.planar %}
            terminations={"fell": terminations.lower_than(robot, {{ number(down) }})},
            # None: success is not to end early; or a function that returns [num_envs] bool.
            success=None,
{% else %}
            terminations={},
            # Evaluated when an episode ends; a function that returns [num_envs] bool.
            success=lambda env: target.distance < {{ number(at) }},
            statistics={"distance": lambda env: target.distance},
            camera=mj.Camera(
                look_at={{ look_at }},
                distance={{ number(camera) }},
            ),
{% endif %}
            substeps={{ substeps }},
            max_episode_steps=self.max_episode_steps,
        )
'''
