"""stable-baselines3's PPO and SAC; `sbx.py` runs the same with its own classes.

`stable_baselines3_processes.py` has a process for each environment, `stable_baselines3_eight.py` 8
environments of pick-place one after the other in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecNormalize,
)

import benchmarks.envs
from benchmarks.progress import NEVER, Progress, Steps, main
from benchmarks.runners.cleanrl_style import ACTIVATIONS
from benchmarks.tasks import Task

VecEnvMaker = Callable[[list[Callable[[], gymnasium.Env[Any, Any]]]], VecEnv]


class FromVector(VecEnv):
    """A Gymnasium vector environment as stable-baselines3 takes it."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._env = env

    def reset(self) -> Any:
        return self._env.reset(seed=self._seeds[0])[0]

    def close(self) -> None:
        self._env.close()

    def step_async(self, actions: Any) -> None:
        self._result = self._env.step(actions)

    def step_wait(self) -> Any:
        obs, rewards, terminated, truncated, infos = self._result
        each: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        success = benchmarks.envs.successes(infos)
        for i in np.flatnonzero(terminated | truncated):
            each[i] = {
                "terminal_observation": infos["final_obs"][i],
                "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
            }
            if success is not None:
                each[i]["is_success"] = success[i]
        return obs, rewards.astype(np.float32), terminated | truncated, each

    def get_attr(self, name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Recorded(VecEnvWrapper):
    """Tells the run's progress about steps and episodes."""

    def __init__(self, env: VecEnv, progress: Progress) -> None:
        super().__init__(env)
        self._count = Steps(progress, env.num_envs)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        self._count.before()
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        result = self.venv.step_wait()
        _, rewards, done, infos = result
        success = [info.get("is_success", 0.0) for info in infos] if done.any() else None
        self._count.after(rewards, done, success)
        return result


def environments(task: Task, make: VecEnvMaker | None) -> VecEnv:
    """make: of single environments one; None is the batch engine where the task has it."""
    if not task.env_id and make is None:
        return FromVector(benchmarks.envs.make_vector(task, task.num_envs))
    makers = [partial(benchmarks.envs.make_one, task) for _ in range(task.num_envs)]
    return (make or DummyVecEnv)(makers)


def with_eight(task: Task) -> Task:
    """The task with 8 environments, and as many steps between two updates in all."""
    return replace(task, num_envs=8, rollout_steps=task.rollout // 8)


def train(
    progress: Progress,
    methods: dict[str, Any],
    net: dict[str, Any],
    envs: VecEnvMaker | None = None,
) -> None:
    """methods: {"ppo": class, "sac": class}; net: further items of policy_kwargs; envs: as
    `environments` takes it."""
    task = progress.task
    env: VecEnv = Recorded(environments(task, envs), progress)
    saved = progress.out / f"model_{newest(progress)}_steps" if progress.resume else None
    statistics = progress.out / f"model_vecnormalize_{newest(progress)}_steps.pkl"
    if saved is not None:
        env = VecNormalize.load(str(statistics), env)
    else:
        env = VecNormalize(env, norm_reward=task.algorithm == "ppo", gamma=task.gamma)
    shared: dict[str, Any] = {
        "learning_rate": task.learning_rate,
        "gamma": task.gamma,
        "seed": progress.seed,
        "batch_size": task.minibatch_size,
        "device": "cpu",
    }
    kind = methods[task.algorithm]
    if saved is not None:
        model = kind.load(saved, env, device="cpu")
        progress.goes_on_from(model.num_timesteps)
        if task.algorithm == "sac":
            model.load_replay_buffer(f"{progress.out}/model_replay_buffer_{progress.steps}_steps")
    elif task.algorithm == "ppo":
        model = kind(
            "MlpPolicy",
            env,
            n_steps=task.rollout_steps,
            n_epochs=task.update_epochs,
            gae_lambda=task.gae_lambda,
            clip_range=task.clip,
            ent_coef=task.entropy_coef,
            vf_coef=0.5,
            max_grad_norm=task.max_grad_norm,
            policy_kwargs={
                "net_arch": {"pi": list(task.hidden), "vf": list(task.hidden)},
                "log_std_init": float(np.log(task.init_std)),
                **net,
            },
            **shared,
        )
    else:
        model = kind(
            "MlpPolicy",
            env,
            buffer_size=task.capacity,
            learning_starts=task.warmup_steps,
            train_freq=task.rollout_steps,
            gradient_steps=task.train_batches,
            tau=task.tau,
            ent_coef=f"auto_{task.initial_alpha}",
            target_entropy=task.target_entropy,
            policy_kwargs={"net_arch": list(task.hidden), **net},
            **shared,
        )
    callback = CheckpointCallback(
        max(progress.checkpoint_every // task.num_envs, 1),
        str(progress.out),
        "model",
        save_replay_buffer=task.algorithm == "sac",
        save_vecnormalize=True,
    )
    model.learn(NEVER, callback=callback, reset_num_timesteps=saved is None)


def newest(progress: Progress) -> int:
    """The step of the newest saved model, 0 if there is none."""
    found = [int(path.stem.split("_")[1]) for path in progress.out.glob("model_*_steps.zip")]
    return max(found, default=0)


def train_in_torch(progress: Progress, envs: VecEnvMaker | None = None) -> None:
    """`train` with stable-baselines3's own classes."""
    net = {"activation_fn": ACTIVATIONS[progress.task.activation]}
    train(progress, {"ppo": PPO, "sac": SAC}, net, envs)


RESUMES = "CheckpointCallback and load: weights, optimizer, VecNormalize, replay buffer"

if __name__ == "__main__":
    raise SystemExit(
        main(
            train_in_torch,
            package="stable-baselines3",
            resumes=RESUMES,
            note="DummyVecEnv, or one batch for Etude's tasks; VecNormalize",
        )
    )
