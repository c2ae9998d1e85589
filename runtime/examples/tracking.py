"""A robot that tracks a motion, in plain MuJoCo: measures, acts, and is judged."""

from __future__ import annotations

import mujoco
import numpy as np

from etude_runtime import JointTargets, Policy


class Tracking:
    """One robot with hinge and slide joints. What it senses and does is taken from the policy's
    contract and motion alone."""

    def __init__(self, policy: Policy, model: mujoco.MjModel) -> None:
        document = policy.document
        self.model, self.data = model, mujoco.MjData(model)
        self.policy, self._number = policy, len(document["motion"]["names"])
        self.motion = policy.motion()
        self.joints = JointTargets(document, self.motion)
        policy.check_joints(self.joints.names)
        joints = [model.joint(name) for name in self.joints.names]
        self._qpos = np.array([joint.qposadr[0] for joint in joints])
        self._qvel = np.array([joint.dofadr[0] for joint in joints])
        actuator_of = {each["joint"]: each["name"] for each in document["actuators"]}
        self._controls = [model.actuator(actuator_of[name]).id for name in self.joints.names]
        self._base = int(model.jnt_bodyid[0])
        self._bodies = [model.body(name).id for name in self.motion.bodies]
        self.period = policy.period or 0.0
        self._substeps = round(self.period / model.opt.timestep)
        self._longest = document["control"]["max_episode_steps"]
        self._keys = [term.key for term in policy.contract.terms]
        self.step = 0

    @property
    def max_steps(self) -> int:
        """Length of an episode; a motion that does not loop ends at its last frame."""
        return self._longest if self.motion.loops else min(self._longest, self.motion.last)

    def reset(self, rng: np.random.Generator) -> None:
        """On the first frame of one of the motions, joints up to 0.05 rad off."""
        self.motion = self.policy.motion(int(rng.integers(self._number)))
        self.joints.motion = self.motion
        data, motion = self.data, self.motion
        mujoco.mj_resetData(self.model, data)
        data.qpos[:7], data.qvel[:6] = motion.at("root", 0), motion.at("root_speed", 0)
        off = rng.uniform(-0.05, 0.05, self._qpos.size)
        pose = motion.at("joints", 0) + off
        data.qpos[self._qpos] = np.clip(pose, self.joints.low, self.joints.high)
        data.qvel[self._qvel] = motion.at("joint_speeds", 0)
        mujoco.mj_forward(self.model, data)
        self.step = 0
        self.policy.reset()

    def sense(self) -> dict[str, np.ndarray]:
        """Every term of the contract, in its unit."""
        data, motion = self.data, self.motion
        rotation = data.xmat[self._base].reshape(3, 3)
        joints = data.qpos[self._qpos]
        measured = {
            "gyro": data.qvel[3:6].copy(),
            "gravity": -rotation[2],
            "joints": joints - self.joints.default,
            "speeds": data.qvel[self._qvel],
            "velocity": rotation.T @ data.qvel[:3],
            "action": self.policy.last_action,
            "phase": motion.at("phase", self.step),
        }
        anchor = self._bodies[motion.anchor]
        turned = data.xmat[anchor].reshape(3, 3)
        for key in self._keys:
            name, _, ahead = key.rpartition(" ")
            if not ahead.isdigit():
                continue
            at = self.step + int(ahead)
            if name == "anchor position":
                away = motion.at("bodies", at)[motion.anchor] - data.xpos[anchor]
                measured[key] = turned.T @ away
            elif name == "anchor orientation":
                wanted = np.empty(9)
                quaternion = motion.at("body_quaternions", at)[motion.anchor]
                mujoco.mju_quat2Mat(wanted, quaternion.astype(np.float64))
                seen = turned.T @ wanted.reshape(3, 3)
                measured[key] = np.concatenate([seen[:, 0], seen[:, 2]])
            elif name == "joint errors":
                measured[key] = motion.at("joints", at) - joints
            elif name == "reference speeds":
                measured[key] = motion.at("joint_speeds", at)
        return {key: measured[key] for key in self._keys}

    @property
    def distance(self) -> float:
        """m: mean distance of the bodies from the motion."""
        away = self.data.xpos[self._bodies] - self.motion.at("bodies", self.step)
        return float(np.linalg.norm(away, axis=1).mean())

    def control(self) -> bool:
        """One control step; whether the robot has lost its motion."""
        action = self.policy.act(self.sense())
        self.data.ctrl[self._controls] = self.joints.targets(action, self.step)
        mujoco.mj_step(self.model, self.data, self._substeps)
        mujoco.mj_forward(self.model, self.data)
        self.step += 1
        return self.distance > 0.5

    def episode(self, rng: np.random.Generator) -> bool:
        """Whether it came to the end of the motion."""
        self.reset(rng)
        while self.step < self.max_steps:
            if self.control():
                return False
        return True
