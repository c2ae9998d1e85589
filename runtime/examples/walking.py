"""A quadruped that follows velocity commands, in plain MuJoCo: measures, acts, and is judged."""

from __future__ import annotations

import mujoco
import numpy as np

from etude_runtime import JointTargets, Policy


class Walking:
    """One robot. What it senses and does is taken from the policy's contract alone."""

    def __init__(self, policy: Policy, model: mujoco.MjModel) -> None:
        document = policy.document
        self.model, self.data = model, mujoco.MjData(model)
        self.policy, self.joints = policy, JointTargets(document)
        policy.check_joints(self.joints.names)
        joints = [model.joint(name) for name in self.joints.names]
        self._qpos = np.array([joint.qposadr[0] for joint in joints])
        self._qvel = np.array([joint.dofadr[0] for joint in joints])
        actuator_of = {each["joint"]: each["name"] for each in document["actuators"]}
        self._controls = [model.actuator(actuator_of[name]).id for name in self.joints.names]
        self._base = model.body("trunk").id
        self.period = policy.period or 0.0
        self._substeps = round(self.period / model.opt.timestep)
        self._command, self._env = document["command"], document["run"]["env"]
        self.max_steps = document["control"]["max_episode_steps"]
        self._keys = [term.key for term in policy.contract.terms]

    def reset(self, rng: np.random.Generator) -> None:
        """Standing, turned anyhow, joints up to 0.1 rad off."""
        data, model = self.data, self.model
        mujoco.mj_resetDataKeyframe(model, data, model.key("stand").id)
        half = rng.uniform(-np.pi, np.pi) / 2
        data.qpos[3:7] = np.cos(half), 0.0, 0.0, np.sin(half)
        noise = rng.uniform(-0.1, 0.1, self._qpos.size)
        data.qpos[self._qpos] = np.clip(
            data.qpos[self._qpos] + noise, self.joints.low, self.joints.high
        )
        data.ctrl[self._controls] = self.joints.default
        mujoco.mj_forward(model, data)
        self.step, self._error, self.command = 0, 0.0, np.zeros(3)
        self._draw_command(rng)
        if self._command["acceleration"] is None:
            self.command = self._asked
        self.policy.reset()

    def _draw_command(self, rng: np.random.Generator) -> None:
        said = self._command
        low, high = np.array(said["range"]).T
        self._asked = rng.uniform(low, high)
        self._asked *= (rng.random(3) >= said["zero"]) & (rng.random() >= said["stand"])
        self._left = max(int(rng.uniform(*said["every"]) / self.period), 1)

    def _move_command(self) -> None:
        """Towards what is asked for, no faster than the policy was trained with."""
        limit = self._command["acceleration"]
        most = np.inf if limit is None else limit * self.period
        self.command = self.command + np.clip(self._asked - self.command, -most, most)

    def sense(self) -> dict[str, np.ndarray]:
        """Every term of the contract, in its unit."""
        data = self.data
        rotation = data.xmat[self._base].reshape(3, 3)
        measured = {
            "gyro": data.qvel[3:6].copy(),
            "gravity": -rotation[2],
            "joints": data.qpos[self._qpos] - self.joints.default,
            "speeds": data.qvel[self._qvel],
            "velocity": rotation.T @ data.qvel[:3],
            "action": self.policy.last_action,
            "command": self.command,
        }
        if self.joints.trot is not None:
            measured["phase"] = self.joints.trot.phase(self.step, self.command)
        return {key: measured[key] for key in self._keys}

    def control(self, rng: np.random.Generator) -> bool:
        """One control step; whether the robot has fallen."""
        data = self.data
        action = self.policy.act(self.sense())
        data.ctrl[self._controls] = self.joints.targets(action, self.step, self.command)
        mujoco.mj_step(self.model, data, self._substeps)
        mujoco.mj_forward(self.model, data)
        self.step += 1
        rotation = data.xmat[self._base].reshape(3, 3)
        x, y = rotation[:2, 0] / np.linalg.norm(rotation[:2, 0])
        velocity = np.array([[x, y], [-y, x]]) @ data.qvel[:2]
        self._error += float(np.linalg.norm(velocity - self._asked[:2]))
        self._left -= 1
        if self._left <= 0:
            self._draw_command(rng)
        self._move_command()
        return bool(rotation[2, 2] < np.cos(np.deg2rad(60.0)) or data.qpos[2] < 0.12)

    def episode(self, rng: np.random.Generator) -> bool:
        """Whether it did not fall, and kept to its commands."""
        self.reset(rng)
        while self.step < self.max_steps:
            if self.control(rng):
                return False
        return self._error / self.step <= self._env["success_error"]
