"""Sample Factory's APPO, synchronous, with its worker processes; Etude's tasks as one batch."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import gymnasium
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from benchmarks import envs
from benchmarks.progress import NEVER, Progress, main
from benchmarks.tasks import TASKS


def _of_inner(wrapper: gymnasium.Wrapper, name: str) -> Any:
    """Look up missing attributes in the wrapped object, as older gymnasium versions did."""
    if name.startswith("_") or name == "env":
        raise AttributeError(name)
    return getattr(wrapper.env, name)


gymnasium.Wrapper.__getattr__ = _of_inner


class AsAgents(gymnasium.Env):
    """A batch of environments as one environment of many agents, as Sample Factory takes it."""

    is_multiagent = True

    def __init__(self, env: gymnasium.vector.VectorEnv, progress: Progress | None) -> None:
        self._env, self._progress, self.num_agents = env, progress, env.num_envs
        self.observation_space = gymnasium.spaces.Dict({"obs": env.single_observation_space})
        self.action_space = env.single_action_space

    def reset(self, **how: Any) -> Any:
        return {"obs": self._env.reset(seed=self._progress and self._progress.seed)[0]}, [
            {}
        ] * self.num_agents

    def step(self, actions: Any) -> Any:
        begun = time.perf_counter()
        obs, rewards, terminated, truncated, infos = self._env.step(np.asarray(actions))
        if self._progress is not None:
            self._progress.in_environments(time.perf_counter() - begun)
        success = envs.successes(infos)
        if success is not None and self._progress is not None:
            for i in np.flatnonzero(terminated | truncated):
                self._progress.episode(0.0, success[i])
        each = [{} for _ in range(self.num_agents)]
        return {"obs": obs}, rewards.astype(np.float32), terminated, truncated, each


RUNNING: list[Progress] = []
"""The run, in its own process; empty in those that Sample Factory starts."""


def make(name: str, config: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """An environment of a task."""
    task = TASKS[name]
    if task.env_id:
        return gymnasium.wrappers.ClipAction(gymnasium.make(task.env_id))  # the others clip too
    num_envs = RUNNING[0].task.num_envs if RUNNING else task.num_envs
    return AsAgents(envs.make_vector(task, num_envs), RUNNING[0] if RUNNING else None)


class Report(AlgoObserver):
    """Tells the run's progress after every update."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._begun = progress, False

    def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
        steps = runner.env_steps.get(0, 0)
        if not steps:
            return
        if self._progress.resume and not self._begun:
            self._progress.goes_on_from(steps)
        self._begun = True
        returns = runner.policy_avg_stats.get("reward", [()])[0]
        self._progress.point(steps, statistics.fmean(returns) if returns else None)


def train(progress: Progress) -> None:
    task = progress.task

    RUNNING.append(progress)
    register_env(task.name, make)
    batched = not task.env_id
    chosen: dict[str, Any] = {
        "algo": "APPO",
        "env": task.name,
        "experiment": "run",
        "train_dir": progress.out,
        "device": "cpu",
        "seed": progress.seed,
        "serial_mode": batched,
        "async_rl": False,
        "batched_sampling": batched,
        "num_workers": 1 if batched else 2,
        "num_envs_per_worker": 1 if batched else task.num_envs // 2,
        "worker_num_splits": 1 if batched else 2,
        "rollout": task.rollout_steps,
        "batch_size": task.minibatch_size,
        "num_batches_per_epoch": task.rollout // task.minibatch_size,
        "num_epochs": task.update_epochs,
        "shuffle_minibatches": True,
        "encoder_mlp_layers": list(task.hidden),
        "nonlinearity": task.activation,
        "actor_critic_share_weights": False,
        "use_rnn": False,
        "recurrence": 1,
        "adaptive_stddev": False,
        "initial_stddev": task.init_std,
        "policy_initialization": "torch_default",
        "learning_rate": task.learning_rate,
        "lr_schedule": "constant",
        "gamma": task.gamma,
        "gae_lambda": task.gae_lambda,
        "ppo_clip_ratio": task.clip,
        "value_loss_coeff": 0.5,
        "exploration_loss_coeff": task.entropy_coef,
        "max_grad_norm": task.max_grad_norm,
        "with_vtrace": False,
        "normalize_input": True,
        "normalize_returns": True,
        "value_bootstrap": True,
        "decorrelate_envs_on_one_worker": False,
        "decorrelate_experience_max_seconds": 0,
        "save_every_sec": 15,
        "train_for_env_steps": NEVER,
        "log_to_file": False,
    }
    # Its checkpoints hold NumPy scalars once an episode has ended, which torch.load refuses since
    # torch 2.6 by default; Sample Factory then starts from scratch.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    # A resumed run reads the settings of the first one, but for those on the command line.
    restart = "resume" if progress.resume else "overwrite"
    words = ["--env", task.name, "--restart_behavior", restart]
    parser, _ = parse_sf_args(words)
    parser.set_defaults(**{**chosen, "train_dir": str(progress.out)})
    _, runner = make_runner(parse_full_cfg(parser, words))
    runner.register_observer(Report(progress))
    runner.init()
    status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        raise RuntimeError(f"Sample Factory ended with status {status}")


if __name__ == "__main__":
    code = main(
        train,
        package="sample-factory",
        algorithms=("ppo",),
        resumes="restart_behavior=resume, with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD, without which it "
        "starts anew: weights, optimizer, normalisers",
        note="synchronous APPO; two worker processes, or one batch for Etude's tasks; it asks for "
        "gymnasium below 1.0, and is run with 1.4, which the tasks need",
    )
    os._exit(code)  # its processes do not end with an exception
