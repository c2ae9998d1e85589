"""rsl_rl's PPO through its OnPolicyRunner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from benchmarks import envs
from benchmarks.progress import Progress, main


class FromVector(VecEnv):
    """A Gymnasium vector environment as rsl_rl takes it."""

    def __init__(self, env: envs.Recorded, seed: int) -> None:
        self._env, self.num_envs, self.device, self.cfg = env, env.num_envs, "cpu", {}
        self.num_actions = env.single_action_space.shape[0]
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self._obs = self._shown(env.reset(seed=seed)[0])

    def _shown(self, obs: Any) -> TensorDict:
        tensor = torch.as_tensor(np.asarray(obs, np.float32))
        return TensorDict({"state": tensor}, batch_size=[self.num_envs])

    def get_observations(self) -> TensorDict:
        return self._obs

    def step(self, actions: torch.Tensor) -> Any:
        obs, rewards, terminated, truncated, _ = self._env.step(actions.numpy())
        done = torch.as_tensor(terminated | truncated)
        self.episode_length_buf = (self.episode_length_buf + 1) * ~done
        self._obs = self._shown(obs)
        extras = {"time_outs": torch.as_tensor(truncated & ~terminated)}
        return self._obs, torch.as_tensor(rewards, dtype=torch.float32), done, extras


def train(progress: Progress) -> None:
    task = progress.task
    torch.manual_seed(progress.seed)
    network = {
        "class_name": "MLPModel",
        "hidden_dims": list(task.hidden),
        "activation": task.activation,
        "obs_normalization": True,
    }
    gaussian = {"class_name": "GaussianDistribution", "init_std": task.init_std}
    config = {
        "num_steps_per_env": task.rollout_steps,
        "save_interval": progress.checkpoint_every // task.rollout,
        "obs_groups": {"actor": ["state"], "critic": ["state"]},
        "logger": "tensorboard",
        "actor": {**network, "distribution_cfg": gaussian},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "num_learning_epochs": task.update_epochs,
            "num_mini_batches": task.rollout // task.minibatch_size,
            "clip_param": task.clip,
            "gamma": task.gamma,
            "lam": task.gae_lambda,
            "value_loss_coef": 0.5,
            "use_clipped_value_loss": False,  # by 0.2 of returns in the hundreds; no other has it
            "entropy_coef": task.entropy_coef,
            "learning_rate": task.learning_rate,
            "max_grad_norm": task.max_grad_norm,
            "schedule": "fixed",
        },
    }
    env = FromVector(envs.make(progress), progress.seed)
    runner = OnPolicyRunner(env, config, log_dir=str(progress.out), device="cpu")
    if progress.resume:
        saved = {int(path.stem.split("_")[1]): path for path in progress.out.glob("model_*.pt")}
        runner.load(str(saved[max(saved)]))
        progress.goes_on_from((max(saved) + 1) * task.rollout)
    runner.learn(10**9)


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="rsl-rl-lib",
            algorithms=("ppo",),
            resumes="OnPolicyRunner.load: weights, optimizer, normaliser",
            note="environments in its process, one batch for Etude's tasks; no reward scaling",
        )
    )
