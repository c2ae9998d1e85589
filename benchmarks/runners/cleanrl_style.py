"""PPO and SAC, each as one function in plain torch, in the manner of CleanRL's single files."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.progress import Progress, main
from benchmarks.tasks import Task

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU}


class Moments:
    """Running mean and variance of rows [n, width]."""

    def __init__(self, width: int) -> None:
        self.mean, self.var, self.count = np.zeros(width), np.ones(width), 1e-4

    def update(self, rows: Any) -> None:
        many, difference = len(rows), rows.mean(0) - self.mean
        total = self.count + many
        weighted = self.var * self.count + rows.var(0) * many
        self.var = (weighted + difference**2 * self.count * many / total) / total
        self.mean = self.mean + difference * many / total
        self.count = total

    def __call__(self, rows: Any) -> Tensor:
        scaled = (rows - self.mean) / np.sqrt(self.var + 1e-8)
        return torch.as_tensor(np.clip(scaled, -10, 10), dtype=torch.float32)


def mlp(inputs: int, outputs: int, task: Task, gain: float | None = None) -> nn.Sequential:
    """gain: of the last layer; where given, layers are orthogonal."""
    layers: list[nn.Module] = []
    width = inputs
    for size in task.hidden:
        layers += [nn.Linear(width, size), ACTIVATIONS[task.activation]()]
        width = size
    layers.append(nn.Linear(width, outputs))
    if gain is not None:
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        for layer in linear:
            nn.init.orthogonal_(layer.weight, 2**0.5 if layer is not linear[-1] else gain)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def ppo(env: Any, progress: Progress, task: Task, scale_rewards: bool) -> None:
    """Proximal policy optimisation until the run is ended from outside.

    env: a vector environment that resets itself in the step in which an episode ends.
    scale_rewards: divide rewards by the deviation of the discounted return.
    """
    torch.manual_seed(progress.seed)
    steps, rows = task.rollout_steps, env.num_envs
    n_obs, n_act = env.single_observation_space.shape[0], env.single_action_space.shape[0]
    actor, critic = mlp(n_obs, n_act, task, 0.01), mlp(n_obs, 1, task, 1.0)
    log_std = nn.Parameter(torch.full((n_act,), float(np.log(task.init_std))))
    weights = [*actor.parameters(), *critic.parameters(), log_std]
    optimizer = torch.optim.Adam(weights, lr=task.learning_rate, eps=1e-5, fused=True)
    seen, discounted, spread = Moments(n_obs), np.zeros(rows), Moments(1)

    obs_buffer = torch.zeros(steps, rows, n_obs)
    act_buffer = torch.zeros(steps, rows, n_act)
    log_probs, values, rewards, alive = (torch.zeros(steps, rows) for _ in range(4))
    raw, _ = env.reset(seed=progress.seed)
    seen.update(raw)
    obs = seen(raw)
    while True:
        with torch.no_grad():
            for t in range(steps):
                mean = actor(obs)
                chosen = mean + log_std.exp() * torch.randn_like(mean)
                obs_buffer[t], act_buffer[t] = obs, chosen
                log_probs[t], values[t] = density(chosen, mean, log_std), critic(obs)[:, 0]
                raw, reward, terminated, truncated, infos = env.step(chosen.numpy())
                done = terminated | truncated
                if scale_rewards:
                    discounted = discounted * task.gamma + reward
                    spread.update(discounted[:, None])
                    discounted[done] = 0.0
                    reward = np.clip(reward / np.sqrt(spread.var[0] + 1e-8), -10, 10)
                seen.update(raw)
                obs = seen(raw)
                rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
                alive[t] = torch.as_tensor(~done, dtype=torch.float32)
                cut = np.flatnonzero(truncated & ~terminated)
                if cut.size:  # what would have come is part of the reward
                    last = np.stack([infos["final_obs"][i] for i in cut])
                    rewards[t, cut] += task.gamma * critic(seen(last))[:, 0]
            advantages, carry, after = (
                torch.zeros(steps, rows),
                torch.zeros(rows),
                critic(obs)[:, 0],
            )
            for t in reversed(range(steps)):
                error = rewards[t] + task.gamma * alive[t] * after - values[t]
                carry = error + task.gamma * task.gae_lambda * alive[t] * carry
                advantages[t], after = carry, values[t]
        flat_obs, flat_act = obs_buffer.flatten(0, 1), act_buffer.flatten(0, 1)
        flat_log, flat_adv = log_probs.flatten(), advantages.flatten()
        returns = flat_adv + values.flatten()
        for _ in range(task.update_epochs):
            for some in torch.randperm(task.rollout).split(task.minibatch_size):
                mean = actor(flat_obs[some])
                ratio = (density(flat_act[some], mean, log_std) - flat_log[some]).exp()
                gain = flat_adv[some]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                clipped = ratio.clamp(1 - task.clip, 1 + task.clip)
                loss = -torch.min(ratio * gain, clipped * gain).mean()
                loss = loss + 0.5 * functional.mse_loss(critic(flat_obs[some])[:, 0], returns[some])
                loss = loss - task.entropy_coef * log_std.sum()
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(weights, task.max_grad_norm)
                optimizer.step()


def density(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """[n]: log probability of actions [n, m] of a Gaussian."""
    error = (actions - mean) / log_std.exp()
    constant = 0.5 * float(np.log(2 * np.pi))
    return (-0.5 * error**2 - log_std - constant).sum(-1)


def sac(env: Any, progress: Progress, task: Task) -> None:
    """Soft actor-critic until the run is ended from outside."""
    from benchmarks.envs import final_obs

    torch.manual_seed(progress.seed)
    random = np.random.default_rng(progress.seed)
    rows = env.num_envs
    n_obs, n_act = env.single_observation_space.shape[0], env.single_action_space.shape[0]
    actor = mlp(n_obs, 2 * n_act, task)
    critics = [mlp(n_obs + n_act, 1, task) for _ in range(2)]
    targets = [mlp(n_obs + n_act, 1, task) for _ in range(2)]
    for target, critic in zip(targets, critics, strict=True):
        target.load_state_dict(critic.state_dict())
    both = [weight for critic in critics for weight in critic.parameters()]
    theirs = [weight for target in targets for weight in target.parameters()]
    log_alpha = nn.Parameter(torch.tensor(float(np.log(task.initial_alpha))))
    for_actor, for_critics, for_alpha = (
        torch.optim.Adam(weights, lr=task.learning_rate, fused=True)
        for weights in (list(actor.parameters()), both, [log_alpha])
    )

    def act(obs: Tensor) -> tuple[Tensor, Tensor]:
        """Squashed actions [n, m] and their log probabilities [n]."""
        mean, log_std = actor(obs).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        before = mean + log_std.exp() * torch.randn_like(mean)
        squash = 2 * (np.log(2) - before - functional.softplus(-2 * before))
        return before.tanh(), density(before, mean, log_std) - squash.sum(-1)

    def least(models: list[nn.Sequential], obs: Tensor, actions: Tensor) -> Tensor:
        pair = torch.cat([obs, actions], -1)
        return torch.min(models[0](pair), models[1](pair))[:, 0]

    size, filled, place = task.capacity // rows * rows, 0, 0
    stored = {
        "obs": np.zeros((size, n_obs), np.float32),
        "after": np.zeros((size, n_obs), np.float32),
        "actions": np.zeros((size, n_act), np.float32),
        "rewards": np.zeros(size, np.float32),
        "ended": np.zeros(size, np.float32),
    }
    seen = Moments(n_obs)
    raw, _ = env.reset(seed=progress.seed)
    while True:
        for _ in range(task.rollout_steps):
            if filled < task.warmup_steps:
                actions = random.uniform(-1, 1, (rows, n_act)).astype(np.float32)
            else:
                with torch.no_grad():
                    actions = act(seen(raw))[0].numpy()
            after, reward, terminated, _, infos = env.step(actions)
            new = (raw, final_obs(after, infos), actions, reward, terminated)
            for name, value in zip(stored, new, strict=True):
                stored[name][place : place + rows] = value
            seen.update(raw)
            place, filled, raw = (place + rows) % size, min(filled + rows, size), after
        if filled < task.warmup_steps:
            continue
        for _ in range(task.train_batches):
            some = random.integers(filled, size=task.minibatch_size)
            obs, following = seen(stored["obs"][some]), seen(stored["after"][some])
            done, actions_t = (torch.as_tensor(stored[k][some]) for k in ("ended", "actions"))
            reward_t = torch.as_tensor(stored["rewards"][some])
            alpha = log_alpha.detach().exp()
            with torch.no_grad():
                later, log_prob = act(following)
                value = least(targets, following, later) - alpha * log_prob
                goal = reward_t + task.gamma * (1 - done) * value
            pair = torch.cat([obs, actions_t], -1)
            loss = sum(functional.mse_loss(critic(pair)[:, 0], goal) for critic in critics)
            for_critics.zero_grad()
            loss.backward()
            for_critics.step()
            fresh, log_prob = act(obs)
            for_actor.zero_grad()
            (alpha * log_prob - least(critics, obs, fresh)).mean().backward()
            for_actor.step()
            for_alpha.zero_grad()
            (-log_alpha * (log_prob.detach() + task.target_entropy).mean()).backward()
            for_alpha.step()
            with torch.no_grad():
                torch._foreach_lerp_(theirs, both, task.tau)


def train(progress: Progress) -> None:
    from benchmarks.envs import make

    task = progress.task
    if task.algorithm == "sac":
        sac(make(progress), progress, task)
    ppo(make(progress), progress, task, scale_rewards=True)


if __name__ == "__main__":
    raise SystemExit(main(train, package="", note="one process; one batch for Etude's tasks"))
