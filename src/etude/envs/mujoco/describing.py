"""Description of a task on MuJoCo in an export: what a policy needs to run on a robot."""

from __future__ import annotations

import re
from typing import Any

import mujoco
import numpy as np

from etude.core.abilities import Described
from etude.core.contracts import Array
from etude.core.trees import Tree
from etude.envs.mujoco.simulation import load_spec
from etude.envs.mujoco.task import Group, Observation, TaskEnv

_HINGE, _SLIDE = int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)
_SHAPE = re.compile(r",? \[num_envs[^\]]*\]( m)?(?=[.:;])|\[num_envs[^\]]*\]:? ?")
_INTEGRATORS = {
    int(value): name.removeprefix("mjINT_").lower()
    for name, value in mujoco.mjtIntegrator.__members__.items()
}


def describe(env: TaskEnv) -> Tree:
    """Observation terms, joints, actuators and control of a task, with the parts' descriptions.

    A part's entry "default_pose", {joint: rad or m}, is listed with the joints; others are added.
    """
    task, model = env.task, env.simulation.model
    said: Tree = {"action": {"delay": list(task.action.delay)}}
    pose: dict[str, float] = {}
    for part in env.parts:
        if isinstance(part, Described):
            fragment = part.describe()
            pose |= fragment.pop("default_pose", {})
            for name, value in fragment.items():
                said[name] = {**said.get(name, {}), **value}
    return {
        "observations": {
            name: _observation(env, name, Group.of(terms))
            for name, terms in task.observations.items()
        },
        "control": {
            "period": env.dt,
            "timestep": float(model.opt.timestep),
            "substeps": task.substeps,
            "integrator": _INTEGRATORS[int(model.opt.integrator)],
            "max_episode_steps": task.max_episode_steps,
        },
        "joints": _joints(model, pose),
        "actuators": _actuators(model),
        **said,
        "scene": _scene(env),
    }


def _observation(env: TaskEnv, name: str, group: Group) -> Tree:
    """Layout of one observation: its terms with their pipelines."""
    terms, offset = [], 0
    for label, term in group.terms.items():
        observation = Observation.of(term)
        size = int(np.prod(np.shape(observation.term(env.view))[1:], dtype=np.int64))
        terms.append({"name": label, "offset": offset, "size": size, **_pipeline(observation)})
        offset += size * observation.history
    return {"delay": list(group.delay), "history": group.history, "terms": terms}


def _pipeline(observation: Observation) -> Tree:
    term = observation.term
    return {
        "unit": observation.unit or getattr(term, "unit", ""),
        "about": observation.about or _first_line(term.__doc__),
        "clip": None if observation.clip is None else [float(bound) for bound in observation.clip],
        "scale": _plain(observation.scale),
        "history": observation.history,
        "delay": list(observation.delay),
        "noise": _plain(observation.noise),
    }


def _joints(model: mujoco.MjModel, pose: dict[str, float]) -> list[Tree]:
    """Joints with one degree of freedom, in the model's order."""
    names, found = _joint_names(model), []
    for j in range(model.njnt):
        if model.jnt_type[j] not in (_HINGE, _SLIDE):
            continue
        dof, limited = model.jnt_dofadr[j], bool(model.jnt_limited[j])
        default = pose.get(names[j], model.qpos0[model.jnt_qposadr[j]])
        found.append(
            {
                "name": names[j],
                "unit": "rad" if model.jnt_type[j] == _HINGE else "m",
                "default": float(default),
                "range": model.jnt_range[j].tolist() if limited else None,
                "damping": _plain(model.dof_damping[dof]),
                "armature": float(model.dof_armature[dof]),
                "friction": float(model.dof_frictionloss[dof]),
            }
        )
    return found


def _joint_names(model: mujoco.MjModel) -> list[str]:
    return [model.joint(j).name for j in range(model.njnt)]


def _actuators(model: mujoco.MjModel) -> list[Tree]:
    """Actuators in the model's order; position servos with their gains."""
    joints, found = _joint_names(model), []
    on_joint = int(mujoco.mjtTrn.mjTRN_JOINT)
    affine = int(mujoco.mjtBias.mjBIAS_AFFINE)
    for a in range(len(model.actuator_trntype)):  # fewer than controls if joints are balls
        bias = model.actuator_biasprm[a]
        servo = model.actuator_biastype[a] == affine
        moves = model.actuator_trntype[a] == on_joint
        control = model.actuator_ctrlrange[a] if model.actuator_ctrllimited[a] else None
        force = model.actuator_forcerange[a] if model.actuator_forcelimited[a] else None
        found.append(
            {
                "name": model.actuator(a).name,
                "joint": joints[model.actuator_trnid[a, 0]] if moves else None,
                "stiffness": float(model.actuator_gainprm[a, 0]) if servo else None,
                "damping": float(0.0 - bias[2]) if servo else None,
                "control_range": None if control is None else control.tolist(),
                "force_range": None if force is None else force.tolist(),
            }
        )
    return found


def _scene(env: TaskEnv) -> str:
    """The task's MJCF; "" if it refers to other files, such as meshes."""
    model = env.task.model
    if isinstance(model, mujoco.MjModel):
        return ""
    spec = load_spec(model)
    for edit in env.edits:
        edit(spec)
    spec.compile()
    text: str = spec.to_xml()
    try:
        mujoco.MjModel.from_xml_string(text)
    except ValueError:
        return ""
    return text


def _plain(value: float | Array | Any) -> float | list[float]:
    """A number, or a list of numbers."""
    found: float | list[float] = np.asarray(value, np.float64).tolist()
    return found


def _first_line(text: str | None) -> str:
    """The first paragraph in one line, without shapes of arrays."""
    return _SHAPE.sub("", " ".join((text or "").strip().split("\n\n")[0].split()))
