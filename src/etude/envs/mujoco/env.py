"""Many environments of one task on MuJoCo at once, and the pipeline from its terms to observations.

A measurement gets its noise once: the noise depends on the episode and the step of the measurement,
so a delayed value and the same value in a history are equal. `describe` tells an export what a
policy needs to run on a robot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import mujoco
import numpy as np

from etude.core.contracts import (
    ACTION,
    Array,
    ArraySpec,
    Described,
    EnvSpec,
    Observations,
    Reflection,
    StepResult,
)
from etude.core.errors import UsageError
from etude.core.keys import Key, Streams
from etude.core.trees import Tree
from etude.envs.mujoco.mirror import joined, scaled
from etude.envs.mujoco.simulation import (
    Marker,
    Simulation,
    avoid_sparse,
    compile_model,
    digest,
    load_spec,
)
from etude.envs.mujoco.task import Draws, Function, Group, Observation, Part, Task, TaskEnv

A = TypeVar("A")


class MujocoEnv:
    """Parallel environments of one task: a `BatchEnv`."""

    state_advice = (
        "Keep the state of a part in env.state(...): create it in bind(), set it in reset()."
    )

    def __init__(self, task: Task, num_envs: int, threads: int = 1) -> None:
        self.task, self.num_envs = task, num_envs
        self.parts = task.all_parts
        self.edits = self._with("edit")
        """The parts' methods `edit`, which add to the model before it is compiled."""
        model = compile_model(task.model, self.edits)
        notes = avoid_sparse(model)
        self.simulation = Simulation(model, num_envs, threads)
        self.dt = self.simulation.model.opt.timestep * task.substeps
        """Length of a control step, s."""
        self.episode: Array = np.zeros(num_envs, np.int64)
        """[num_envs]: number of each environment's current episode."""
        self.elapsed: Array = np.zeros(num_envs, np.int64)
        """[num_envs]: control steps since the start of the episode."""
        self.tick = 0  # counts states of the simulation, for `derived`
        self.seed = np.uint64(0)
        self.streams = Streams(num_envs)
        self.physics_seconds = 0.0
        self._states: dict[str, Array] = {}
        self.view = self if task.view is None else task.view
        for part in self.parts:
            part._env = self
        for part in self.parts:
            part.bind()
        self._acting, self._updating, self._changing = map(self._with, ("act", "update", "change"))
        self._resetting, self._beginning = self._with("reset"), self._with("begin")
        self._delayed: Array | None = None
        if task.action.delay[1]:
            self._delay = self.state("action/delay", dtype="int64")
            self._delayed = self.state(
                "action/queue", task.action.delay[1] + 1, task.action.size, dtype="float32"
            )
        self.action: Array = self.state("action", task.action.size)
        """[num_envs, n]: the policy's last action."""
        self.last_action: Array = self.state("last_action", task.action.size)
        """[num_envs, n]: the action before the last; zero at the start of an episode."""
        self.terminated: Array = np.zeros(num_envs, np.bool_)
        """[num_envs]: whether the last step terminated the episode."""
        self.ended_by: dict[str, Array] = {}  # {termination: [num_envs] bool} of the last step
        self._names = [name for name, (_, weight) in task.rewards.items() if weight]
        self._weighted: Array = np.zeros((len(self._names), num_envs))
        self._sums = np.zeros_like(self._weighted)
        self.simulation.forward()
        self._update()
        check_terms(self)
        self._readers = {
            name: Reader(self, name, terms) for name, terms in task.observations.items()
        }
        scored = () if task.success is None else ("is_success", "outcome")
        rewarded = (f"reward/{name}" for name in self._names)
        self.spec = EnvSpec(
            observations={
                name: ArraySpec(array.shape[1:], str(array.dtype))
                for name, array in self._observe().items()
            },
            action=task.action.spec,
            max_episode_steps=task.max_episode_steps,
            statistics=tuple(dict.fromkeys((*scored, *rewarded, *task.statistics))),
            substeps=task.substeps,
            model=digest(self.simulation.model),
            outcomes=task.outcomes or ("success", *task.terminations, "no success in time"),
            motions=task.motions,
            notes=notes,
            mirror=self._reflections(),
        )

    def _reflections(self) -> dict[str, Reflection]:
        """The reflections of observations and actions that are known; {} if the robot is not
        symmetric."""
        try:
            found = {name: reader.mirror() for name, reader in self._readers.items()}
            found[ACTION] = self.task.action.mirror()
        except UsageError:
            return {}
        return {name: reflection for name, reflection in found.items() if reflection is not None}

    def _with(self, hook: str) -> list[Any]:
        """The method `hook` of the parts that override it."""
        return [
            getattr(part, hook)
            for part in self.parts
            if getattr(type(part), hook) is not getattr(Part, hook)
        ]

    def state(self, name: str, *shape: int, dtype: str = "float64") -> Array:
        """A new array [num_envs, *shape] of zeros that is part of every snapshot."""
        return self.keep(name, np.zeros((self.num_envs, *shape), dtype))

    def keep(self, name: str, array: Array) -> Array:
        """Add an array [num_envs, ...] to every snapshot; write to it in place."""
        name = name.replace("/", ".")
        if name in self._states:
            raise UsageError(f"Two parts of a task have a state named {name!r}: rename one.")
        self._states[name] = array
        return array

    @property
    def reward_sums(self) -> dict[str, Array]:
        """Weighted rewards summed over the open episode, {term: [num_envs]}; live arrays."""
        return dict(zip(self._names, self._sums, strict=True))

    @property
    def reward_terms(self) -> dict[str, Array]:
        """Weighted rewards of the last step, {term: [num_envs]}; live arrays."""
        return dict(zip(self._names, self._weighted, strict=True))

    @property
    def draws(self) -> Draws:
        """Random numbers of this step for all environments."""
        return Draws(self)

    def ability(self, kind: type[A]) -> A | None:
        """This environment or the first of its parts that implements a protocol."""
        return next((each for each in (self, *self.parts) if isinstance(each, kind)), None)

    def markers(self, env_id: int, step: int | None = None) -> list[Marker]:
        """Shapes that films and windows draw of an environment: the `target` of the task's view and
        the markers of all parts; step: of its episode, default the current one."""
        from etude.envs.mujoco.markers import Target

        step = int(self.elapsed[env_id]) if step is None else step
        target: Array | None = getattr(self.view, "target", None)
        own = [] if target is None else [Target.of(self.task.camera, target[env_id])]
        return [*own, *(marker for part in self.parts for marker in part.markers(env_id, step))]

    def describe(self) -> Tree:
        """Description of the task for exports; see `etude.core.contracts.Described`."""
        return describe(self)

    def reset(self, key: Key) -> Observations:
        """Reset every environment to its episode 0."""
        self._use(key)
        self.episode[:] = 0
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def restart(self) -> Observations:
        """Reset every environment to its next episode; the open episodes are not reported."""
        self.episode += 1
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: Array) -> StepResult:
        """One control step with actions [num_envs, n]; finished environments are reset."""
        task = self.task
        self.last_action[:] = self.action
        self.action[:] = actions
        task.action.apply(self._delayed_actions(actions))
        for act in self._acting:
            act()
        self.physics_seconds = self.simulation.step(task.substeps, task.lagged)
        self.elapsed += 1
        self._update()
        terminated = np.zeros(self.num_envs, np.bool_)
        for name, ends in task.terminations.items():
            self.ended_by[name] = ends(self.view).copy()
            terminated |= self.ended_by[name]
        self.terminated = terminated
        reward = self._reward()
        limit = task.max_episode_steps if task.time_limit is None else task.time_limit(self.view)
        truncated = self.elapsed >= limit
        # An episode that terminates on its last step is not truncated: "greater" is "and not".
        np.greater(truncated, terminated, out=truncated)
        env_ids = (terminated | truncated).nonzero()[0]
        for change in self._changing:
            change()
        for reader in self._readers.values():
            reader.push()
        obs = self._observe()
        if not env_ids.size:
            none = {name: array[:0] for name, array in obs.items()}
            return StepResult(obs, reward, terminated, truncated, env_ids, none)
        final_obs = {name: array[env_ids] for name, array in obs.items()}
        episodes = self._report(env_ids)
        self.episode[env_ids] += 1
        self._begin(env_ids)
        obs = self._observe()
        return StepResult(obs, reward, terminated, truncated, env_ids, final_obs, episodes)

    def _delayed_actions(self, actions: Array) -> Array:
        """The actions [num_envs, n] that take effect in this step."""
        if self._delayed is None:
            return actions
        self._delayed[:, 1:] = self._delayed[:, :-1].copy()
        self._delayed[:, 0] = actions
        late: Array = self._delayed[np.arange(self.num_envs), self._delay]
        return late

    def _update(self) -> None:
        self.tick += 1
        for update in self._updating:
            update()

    def _reward(self) -> Array:
        """Sum of the weighted terms, [num_envs] float32; adds the terms to the episodes' sums."""
        for name, weighted in zip(self._names, self._weighted, strict=True):
            term, weight = self.task.rewards[name]
            np.multiply(term(self.view), weight, out=weighted)
        self._sums += self._weighted
        total: Array = np.add.reduce(self._weighted, axis=0)
        return total.astype(np.float32)

    def _observe(self) -> Observations:
        """Observations {name: [num_envs, n]}, new arrays."""
        return {name: reader.read() for name, reader in self._readers.items()}

    def _report(self, env_ids: Array) -> dict[str, Array]:
        """Statistics {name: [k] float64} of the episodes that end in environments [k]."""
        sums = self._sums[:, env_ids]
        return {
            **self._success(env_ids),
            **{f"reward/{name}": total for name, total in zip(self._names, sums, strict=True)},
            **{
                name: term(self.view)[env_ids].astype(np.float64)
                for name, term in self.task.statistics.items()
            },
        }

    def _success(self, env_ids: Array) -> dict[str, Array]:
        """Success and outcome of the episodes that end in environments [k]."""
        success = self.task.success
        if success is None:
            return {}
        succeeded = ~self.terminated if success == "survived" else success(self.view)
        if succeeded.dtype != bool:
            raise UsageError(
                f"`success` of the task returns {succeeded.dtype}: it must return bool."
            )
        ways = np.stack([succeeded, *self.ended_by.values(), np.ones_like(succeeded)])[:, env_ids]
        return {"is_success": ways[0].astype(np.float64), "outcome": ways.argmax(0) * 1.0}

    def _begin(self, env_ids: Array) -> None:
        """Reset environments [k] to the start of their current episode."""
        draws = Draws(self, env_ids)
        self.elapsed[env_ids] = 0
        self._sums[:, env_ids] = 0.0
        self.action[env_ids] = self.last_action[env_ids] = 0.0
        if self._delayed is not None:
            self._delayed[env_ids] = 0.0
            self._delay[env_ids] = draws.integers("action/delay", *self.task.action.delay)
        self.simulation.reset(env_ids)
        for reset in self._resetting:
            reset(env_ids, draws)
        self.simulation.forward(env_ids)
        self.tick += 1
        for begin in self._beginning:
            begin(env_ids, draws)
        for reader in self._readers.values():
            reader.begin(env_ids, draws)

    def _use(self, key: Key) -> None:
        self.streams.use(key)
        self.seed = np.uint64(key.child("draws").integer())

    def snapshot(self) -> Tree:
        """Simulation, per-environment model fields, episode counters, open sums and states."""
        return {
            "simulation": self.simulation.snapshot(),
            "episode": self.episode.copy(),
            "elapsed": self.elapsed.copy(),
            "sums": {name: total.copy() for name, total in self.reward_sums.items()},
            "task": {name: array.copy() for name, array in self._states.items()},
        }

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Restore a snapshot of an instance with the same number of environments."""
        self.simulation.restore(snapshot["simulation"])
        self._use(key)
        self.episode[:] = snapshot["episode"]
        self.elapsed[:] = snapshot["elapsed"]
        for name, total in self.reward_sums.items():
            total[:] = snapshot["sums"][name]
        for name, array in self._states.items():
            if name not in snapshot["task"]:
                raise UsageError(
                    f"This snapshot has no '{name}': another version of the task or of Etude wrote "
                    "it. The policy can still be loaded and evaluated."
                )
            array[...] = snapshot["task"][name]
        self.tick += 1
        for part in self.parts:
            part.restored()

    def close(self) -> None:
        """Nothing to release: MuJoCo's memory is freed with the object."""


def check_terms(env: TaskEnv) -> None:
    """Refuse rewards and terminations that do not return one value per environment."""
    task = env.task
    terms = {f"reward '{name}'": term for name, (term, weight) in task.rewards.items() if weight}
    terms |= {f"termination '{name}'": term for name, term in task.terminations.items()}
    for name, term in terms.items():
        shape = np.shape(term(env.view))
        if shape != (env.num_envs,):
            raise UsageError(
                f"The {name} returns an array of shape {list(shape)} for {env.num_envs} "
                f"environments: it must be [{env.num_envs}]."
            )


def _columns(env: TaskEnv, name: str, term: Function) -> Function:
    """The term with shape [num_envs, n] or [num_envs, ...]; refuses other shapes."""
    shape = np.shape(term(env.view))
    if shape == (env.num_envs,):
        return lambda view: term(view)[:, None]
    if shape[:1] != (env.num_envs,):
        raise UsageError(
            f"The observation '{name}' returns an array of shape {list(shape)} for {env.num_envs} "
            f"environments: it must be [{env.num_envs}] or [{env.num_envs}, n]."
        )
    return term


def _concatenated(channels: list[Function], dtype: str) -> Function:
    """The concatenated channels, [num_envs, n]."""
    return lambda view: np.concatenate([channel(view) for channel in channels], axis=1, dtype=dtype)


class Reader:
    """One observation of a task: its concatenated terms."""

    def __init__(
        self, env: TaskEnv, name: str, terms: Mapping[str, Function | Observation] | Group
    ) -> None:
        group = self._group = Group.of(terms)
        self._env, self._view = env, env.view
        self._buffers: list[_Buffer] = []
        channels = [
            self._channel(env, f"{name}/{label}", Observation.of(term))
            for label, term in group.terms.items()
        ]
        if group.delay[1] or group.history > 1:
            whole = Observation(
                _concatenated(channels, group.dtype), delay=group.delay, history=group.history
            )
            channels = [self._channel(env, name, whole)]
        self._read = _concatenated(channels, group.dtype)

    def _channel(self, env: TaskEnv, name: str, channel: Observation) -> Function:
        channel = replace(channel, term=_columns(env, name, channel.term))
        if channel.is_plain:
            return channel.term
        measure = _Measurement(env, name, channel)
        if not channel.delay[1] and channel.history == 1:
            return measure
        buffer = _Buffer(env, name, measure, channel)
        self._buffers.append(buffer)
        return buffer

    def read(self) -> Array:
        """The observation [num_envs, n], a new array."""
        return self._read(self._view)

    def mirror(self) -> Reflection | None:
        """The observation's reflection left for right; None if that of a term is not known."""
        parts = []
        for term in map(Observation.of, self._group.terms.values()):
            found = term.mirror(self._env) if callable(term.mirror) else term.mirror
            if found is None:
                return None
            parts.append(scaled(found, term.scale, term.history))
        return scaled(joined(parts), 1.0, self._group.history)

    def push(self) -> None:
        """Measure delayed terms after a control step."""
        for buffer in self._buffers:
            buffer.push()

    def begin(self, env_ids: Array, draws: Draws) -> None:
        """Fill the buffers of environments [k] with the first measurement of their episodes."""
        for buffer in self._buffers:
            buffer.begin(env_ids, draws)


class _Measurement:
    """A term with noise, clipping and scale."""

    def __init__(self, env: TaskEnv, name: str, channel: Observation) -> None:
        self._env, self._name, self._channel = env, name, channel

    def __call__(self, view: Any) -> Array:
        channel = self._channel
        value = channel.term(view)
        if np.any(channel.noise):
            noise = self._env.draws.uniform(self._name, *value.shape[1:], low=-1.0)
            value = value + noise * channel.noise
        if channel.clip is not None:
            value = np.clip(value, *channel.clip)
        return value * channel.scale


class _Buffer:
    """The latest measurements of a term, read with the delay of the episode."""

    def __init__(self, env: TaskEnv, name: str, measure: Function, channel: Observation) -> None:
        self._env, self._name, self._measure, self._channel = env, name, measure, channel
        shape = measure(env.view).shape[1:]
        self._kept = env.state(
            f"{name}/kept", channel.delay[1] + channel.history, *shape, dtype="float32"
        )
        self._delay = env.state(f"{name}/delay", dtype="int64")

    def push(self) -> None:
        self._kept[:, 1:] = self._kept[:, :-1].copy()
        self._kept[:, 0] = self._measure(self._env.view)

    def begin(self, env_ids: Array, draws: Draws) -> None:
        low, high = self._channel.delay
        self._delay[env_ids] = draws.integers(f"{self._name}/delay", low, high)
        self._kept[env_ids] = self._measure(self._env.view)[env_ids, None]

    def __call__(self, view: Any) -> Array:
        steps = self._delay[:, None] + np.arange(self._channel.history)
        shown = self._kept[np.arange(len(steps))[:, None], steps]
        return shown.reshape(len(steps), -1)


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
