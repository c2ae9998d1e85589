"""TorchRL: its collector, transforms, losses and replay buffer, in a loop as its examples have."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Binary, Bounded, Composite, LazyTensorStorage, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import EnvBase, TransformedEnv, VecNormV2
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from benchmarks import envs
from benchmarks.progress import Progress, main
from benchmarks.runners.cleanrl_style import mlp


class FromVector(EnvBase):
    """A Gymnasium vector environment that resets itself, as TorchRL takes it."""

    def __init__(self, env: envs.Recorded, seed: int) -> None:
        super().__init__(batch_size=[env.num_envs])
        self._env, self._first, n = env, seed, env.num_envs
        size = env.single_observation_space.shape[0]
        self.observation_spec = Composite(observation=Unbounded((n, size)), shape=(n,))
        low, high = (torch.as_tensor(b) for b in (env.action_space.low, env.action_space.high))
        self.action_spec = Bounded(low, high, dtype=torch.float32)
        self.reward_spec = Unbounded((n, 1))
        flag = Binary(1, (n, 1), dtype=torch.bool)
        names = ("done", "terminated", "truncated")
        self.done_spec = Composite({name: flag.clone() for name in names}, shape=(n,))
        self._next: torch.Tensor | None = None

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        if self._next is None:  # later ones were made in the step that ended an episode
            self._next = _tensor(self._env.reset(seed=self._first)[0])
        flags = torch.zeros(self.batch_size[0], 1, dtype=torch.bool)
        items = {"observation": self._next.clone(), "done": flags}
        items |= {"terminated": flags.clone(), "truncated": flags.clone()}
        return TensorDict(items, batch_size=self.batch_size)

    def _step(self, tensordict: Any) -> TensorDict:
        actions = tensordict["action"].numpy()
        obs, rewards, terminated, truncated, infos = self._env.step(actions)
        self._next = _tensor(obs)
        ended, cut = (torch.as_tensor(flags)[:, None] for flags in (terminated, truncated))
        items = {"observation": _tensor(envs.final_obs(obs, infos)), "done": ended | cut}
        items |= {"reward": _tensor(rewards)[:, None], "terminated": ended, "truncated": cut}
        return TensorDict(items, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None: ...


def _tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(array, np.float32))


class Gaussian(nn.Module):
    """Mean and deviation; the deviation does not depend on the observation."""

    def __init__(self, net: nn.Module, actions: int, init_std: float) -> None:
        super().__init__()
        self.net = net
        self.log_std = nn.Parameter(torch.full((actions,), float(np.log(init_std))))

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.net(obs)
        return mean, self.log_std.exp().expand_as(mean)


def train(progress: Progress) -> None:
    torch.manual_seed(progress.seed)
    bare = FromVector(envs.make(progress), progress.seed)
    env = TransformedEnv(bare, VecNormV2(in_keys=["observation"], decay=0.99999))
    (sac if progress.task.algorithm == "sac" else ppo)(env, progress)


def ppo(env: Any, progress: Progress) -> None:
    task = progress.task
    n_obs, n_act = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    gaussian = Gaussian(mlp(n_obs, n_act, task, 0.01), n_act, task.init_std)
    module = TensorDictModule(gaussian, ["observation"], ["loc", "scale"])
    actor = ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
        spec=env.full_action_spec_unbatched,
    )
    critic = ValueOperator(mlp(n_obs, 1, task, 1.0), in_keys=["observation"])
    advantage = GAE(gamma=task.gamma, lmbda=task.gae_lambda, value_network=critic)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=task.clip,
        entropy_coeff=task.entropy_coef,
        critic_coeff=0.5,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    weights = list(loss.parameters())
    optimizer = torch.optim.Adam(weights, lr=task.learning_rate, eps=1e-5)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(task.rollout),
        sampler=SamplerWithoutReplacement(),
        batch_size=task.minibatch_size,
    )
    for data in Collector(env, actor, frames_per_batch=task.rollout, total_frames=-1):
        with torch.no_grad():
            data = advantage(data)
        buffer.empty()
        buffer.extend(data.reshape(-1))
        for _ in range(task.update_epochs):
            for batch in buffer:
                losses = loss(batch)
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(weights, task.max_grad_norm)
                optimizer.step()


def sac(env: Any, progress: Progress) -> None:
    task = progress.task
    n_obs, n_act = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    net = nn.Sequential(mlp(n_obs, 2 * n_act, task), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        spec=env.full_action_spec_unbatched,
    )
    value = ValueOperator(Joined(mlp(n_obs + n_act, 1, task)), in_keys=["observation", "action"])
    loss = SACLoss(
        actor,
        value,
        loss_function="l2",
        alpha_init=task.initial_alpha,
        target_entropy=task.target_entropy,
    )
    loss.make_value_estimator(gamma=task.gamma)
    target = SoftUpdate(loss, tau=task.tau)
    groups = (loss.actor_network_params, loss.qvalue_network_params)
    weights = [list(group.flatten_keys().values()) for group in groups]
    optimizer = torch.optim.Adam(chain(*weights, [loss.log_alpha]), lr=task.learning_rate)
    buffer = ReplayBuffer(storage=LazyTensorStorage(task.capacity), batch_size=task.minibatch_size)
    collected = 0
    random = {"init_random_frames": task.warmup_steps, "total_frames": -1}
    for data in Collector(env, actor, frames_per_batch=task.rollout, **random):
        buffer.extend(data.reshape(-1))
        collected += data.numel()
        if collected < task.warmup_steps:
            continue
        for _ in range(task.train_batches):
            losses = loss(buffer.sample())
            total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            target.step()


class Joined(nn.Module):
    """A network of observation and action side by side."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([obs, action], -1))


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="torchrl",
            note="its collector in one process, VecNormV2, no reward scaling; the loop is a "
            "script of ours, which saves nothing: TorchRL's own checkpoints were not tried",
        )
    )
