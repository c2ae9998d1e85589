"""skrl's PPO and SAC in torch with its SequentialTrainer."""

from __future__ import annotations

from typing import Any

import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.agents.torch.sac import SAC, SAC_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed

from benchmarks import envs
from benchmarks.progress import Progress, main
from benchmarks.runners.cleanrl_style import mlp
from benchmarks.tasks import Task


class Actor(GaussianMixin, Model):
    """Gaussian around a network; bounded: its mean is squashed, as skrl's examples of SAC do."""

    def __init__(self, env: Any, task: Task, bounded: bool) -> None:
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        Model.__init__(self, **spaces, device="cpu")
        GaussianMixin.__init__(self, clip_actions=bounded)
        self.net, self._bounded = mlp(self.num_observations, self.num_actions, task), bounded
        start = torch.full((self.num_actions,), task.init_std).log()
        self.log_std = torch.nn.Parameter(start)

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        mean = self.net(inputs["observations"])
        return mean.tanh() if self._bounded else mean, {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    """A value, or with `actions` the value of an action."""

    def __init__(self, env: Any, task: Task, actions: bool) -> None:
        spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
        Model.__init__(self, **spaces, device="cpu")
        DeterministicMixin.__init__(self)
        self._actions = actions
        self.net = mlp(self.num_observations + actions * self.num_actions, 1, task)

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        read = inputs["observations"]
        if self._actions:
            read = torch.cat([read, inputs["taken_actions"]], -1)
        return self.net(read), {}


def agent(env: Any, task: Task) -> Any:
    """The agent with the shared settings."""
    scaler = {"size": env.observation_space, "device": "cpu"}
    shared: dict[str, Any] = {
        "learning_rate": task.learning_rate,
        "discount_factor": task.gamma,
        "observation_preprocessor": RunningStandardScaler,
        "observation_preprocessor_kwargs": scaler,
    }
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    if task.algorithm == "ppo":
        memory = RandomMemory(memory_size=task.rollout_steps, num_envs=env.num_envs, device="cpu")
        config: Any = PPO_CFG(
            rollouts=task.rollout_steps,
            learning_epochs=task.update_epochs,
            mini_batches=task.rollout // task.minibatch_size,
            gae_lambda=task.gae_lambda,
            grad_norm_clip=task.max_grad_norm,
            ratio_clip=task.clip,
            value_clip=0.0,
            entropy_loss_scale=task.entropy_coef,
            value_loss_scale=0.5,
            time_limit_bootstrap=True,
            value_preprocessor=RunningStandardScaler,
            value_preprocessor_kwargs={"size": 1, "device": "cpu"},
            **shared,
        )
        models: dict[str, Model] = {
            "policy": Actor(env, task, False),
            "value": Critic(env, task, False),
        }
        return PPO(models=models, memory=memory, cfg=config, device="cpu", **spaces)
    size = task.capacity // env.num_envs
    memory = RandomMemory(memory_size=size, num_envs=env.num_envs, device="cpu")
    config = SAC_CFG(
        # It learns after every step of all environments.
        gradient_steps=task.train_batches // task.rollout_steps,
        batch_size=task.minibatch_size,
        polyak=task.tau,
        random_timesteps=task.warmup_steps // env.num_envs,
        learning_starts=task.warmup_steps // env.num_envs,
        initial_entropy_value=task.initial_alpha,
        target_entropy=task.target_entropy,
        **shared,
    )
    names = ("critic_1", "critic_2", "target_critic_1", "target_critic_2")
    models = {"policy": Actor(env, task, True), **{n: Critic(env, task, True) for n in names}}
    return SAC(models=models, memory=memory, cfg=config, device="cpu", **spaces)


def train(progress: Progress) -> None:
    task = progress.task
    set_seed(progress.seed)
    env = wrap_env(envs.make(progress), wrapper="gymnasium", verbose=False)
    learner = agent(env, task)
    folder = progress.out / "run" / "checkpoints"
    if progress.resume:
        saved = {int(path.stem.split("_")[1]): path for path in folder.glob("agent_*.pt")}
        learner.load(str(saved[max(saved)]))
        progress.goes_on_from(max(saved) * env.num_envs)
    experiment = learner.cfg.experiment
    experiment.directory, experiment.experiment_name = str(progress.out), "run"
    experiment.write_interval = task.rollout_steps
    learner.write_interval = task.rollout_steps
    learner.checkpoint_interval = max(progress.checkpoint_every // env.num_envs, 1)
    learner.experiment_dir = str(progress.out / "run")
    config = {"timesteps": 10**9, "headless": True, "disable_progressbar": True}
    config["close_environment_at_exit"] = False
    SequentialTrainer(env=env, agents=learner, cfg=config).train()


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="skrl",
            resumes="Agent.load: weights, optimizer, scalers; the replay memory is not saved",
            note="environments in its process, one batch for Etude's tasks; values are scaled; "
            "SAC learns after every step of all environments, and takes what follows a time limit "
            "to be the first observation after the reset",
        )
    )
