"""A Go1 on mjbatch's engine, with the sizes of its Go1 example and the PPO of `cleanrl_style.py`.

Of that example are the physics settings, the servos, 1,024 environments of 24 steps, the network
and PPO's coefficients. The robot is this repository's, the reward has fewer terms.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
from mjbatch import Batch

from benchmarks.progress import Progress, Steps, main
from benchmarks.runners.cleanrl_style import ppo

ROBOT = Path(__file__).parents[2] / "src" / "etude" / "robots" / "go1" / "go1.xml"
SUBSTEPS, CONTROL_STEP, ACTION_SCALE, EPISODE = 5, 0.02, 0.5, 500
COMMANDS = np.array([1.5, 0.8, 1.2])
"""Largest velocity forward and sideways in m/s, and turning rate in rad/s."""


def model() -> mujoco.MjModel:
    """The robot on flat ground, with sensors of its trunk's motion."""
    spec = mujoco.MjSpec.from_file(str(ROBOT))
    ground = {"type": mujoco.mjtGeom.mjGEOM_PLANE, "size": [0, 0, 1]}
    spec.worldbody.add_geom(**ground, contype=0, conaffinity=1)
    imu = {"objtype": mujoco.mjtObj.mjOBJ_SITE, "objname": "imu"}
    spec.add_sensor(name="velocity", type=mujoco.mjtSensor.mjSENS_VELOCIMETER, **imu)
    spec.add_sensor(name="gyro", type=mujoco.mjtSensor.mjSENS_GYRO, **imu)
    compiled = spec.compile()
    compiled.vis.global_.bvactive = 0  # as in its example: nothing is drawn
    return compiled


class Walk:
    """Follow a commanded velocity; observations [num_envs, 48], actions [num_envs, 12]."""

    def __init__(self, num_envs: int, progress: Progress) -> None:
        self.num_envs = num_envs
        self.single_observation_space = SimpleNamespace(shape=(48,))
        self.single_action_space = SimpleNamespace(shape=(12,))
        compiled = model()
        self._stand = compiled.key_qpos[0][7:].copy()
        self._batch = Batch(compiled, num_envs)
        names = ("qpos", "qvel", "ctrl", "sensordata")
        self._qpos, self._qvel, self._ctrl, self._sensors = (self._batch.bind(n) for n in names)
        self._random = np.random.default_rng(progress.seed)
        self._age = np.zeros(num_envs, np.int64)
        self._action = np.zeros((num_envs, 12), np.float32)
        self._command = np.zeros((num_envs, 3))
        self._count = Steps(progress, num_envs, progress.task.rollout)

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        self._begin(np.arange(self.num_envs))
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._count.before()
        self._ctrl[:] = self._stand + ACTION_SCALE * actions
        self._batch.step(nstep=SUBSTEPS)
        self._age += 1
        velocity, gyro = self._sensors[:, :3], self._sensors[:, 3:6]
        up = self._up()
        rewards = np.exp(-4 * ((velocity[:, :2] - self._command[:, :2]) ** 2).sum(1))
        rewards += 0.5 * np.exp(-4 * (gyro[:, 2] - self._command[:, 2]) ** 2)
        rewards += 0.5 * np.exp(-((self._qpos[:, 7:] - self._stand) ** 2).sum(1))
        rewards -= 5 * (up[:, :2] ** 2).sum(1) + 0.01 * ((actions - self._action) ** 2).sum(1)
        rewards = np.maximum(rewards, 0.0)
        self._action = actions
        fell, late = up[:, 2] < 0, self._age >= EPISODE
        done, infos = fell | late, {}
        obs = self._observe()
        if done.any():
            infos["final_obs"] = obs
            self._begin(np.flatnonzero(done))
            obs = self._observe()
        self._count.after(rewards, done)
        return obs, rewards, fell, late & ~fell, infos

    def _begin(self, ids: Any) -> None:
        self._batch.reset(ids, keyframe=0)
        self._qpos[ids, 7:] += self._random.uniform(-0.1, 0.1, (ids.size, 12))
        self._batch.forward(ids)
        self._command[ids] = self._random.uniform(-1, 1, (ids.size, 3)) * COMMANDS
        self._age[ids], self._action[ids] = 0, 0.0

    def _up(self) -> Any:
        """[num_envs, 3]: the direction upward as the trunk sees it."""
        w, x, y, z = self._qpos[:, 3:7].T
        return np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], 1)

    def _observe(self) -> Any:
        joints = self._qpos[:, 7:] - self._stand
        parts = [self._sensors[:, :6], self._up(), joints, self._qvel[:, 6:], self._action]
        return np.concatenate([*parts, self._command], 1, dtype=np.float32)


def train(progress: Progress) -> None:
    sizes = {"num_envs": 1024, "rollout_steps": 24, "minibatch_size": 6144, "update_epochs": 5}
    coefficients = {"gamma": 0.99, "entropy_coef": 0.005, "max_grad_norm": 1.0, "init_std": 0.5}
    progress.task = replace(progress.task, **sizes, **coefficients)
    ppo(Walk(progress.task.num_envs, progress), progress, progress.task, scale_rewards=False)


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="mjbatch",
            algorithms=("ppo",),
            tasks=("walk-go1",),
            own_engine=True,
            note="its engine with all cores and the settings of its Go1 example: 1,024 "
            "environments, minibatch 6,144; the PPO is that of cleanrl_style, rewards are ours",
        )
    )
