"""What can be said of a policy that was learned from a dataset, without an environment."""

from __future__ import annotations

import numpy as np
import torch

from etude.algorithms.held_out import EpisodesOf
from etude.algorithms.off_policy import OffPolicy
from etude.algorithms.reward_model import evaluate
from etude.algorithms.rrd import RRD


def evaluate_offline(learner: OffPolicy, held_out: EpisodesOf) -> dict[str, float]:
    """Metrics on whole episodes that were not learned from; {} if there are none.

    "eval/action_error": mean square of the policy's most likely action less the one that was
    taken, per dimension in [-1, 1]. "eval/q_mean": what the critics say the policy's actions are
    worth, "eval/q_data" the same of those that were taken; the former far above the latter, and
    above any return, is a critic that believes in what nobody tried. With a reward that is learned
    at the same time, "eval/R_loss" and "eval/return_correlation" as for reward-only.
    """
    if not held_out.num_episodes:
        return {}
    errors, chosen, taken = [], [], []
    policy, device = learner.policy, learner.device
    with torch.no_grad():
        for number in range(held_out.num_whole):  # they come first; clips repeat their steps
            steps, _ = held_out.episode(number)
            obs = {n: torch.from_numpy(steps.obs[n]).to(device) for n in policy.observations}
            theirs = torch.from_numpy(steps.actions).to(device)
            ours = policy.act(obs, {}, None).actions
            critic = policy.prepare(obs)["critic"]
            errors.append((ours - theirs).square().mean(1).cpu().numpy())
            chosen.append(learner.critics.min_q(critic, ours).cpu().numpy())
            taken.append(learner.critics.min_q(critic, theirs).cpu().numpy())
    metrics = {
        "eval/action_error": float(np.concatenate(errors).mean(dtype=np.float64)),
        "eval/q_mean": float(np.concatenate(chosen).mean(dtype=np.float64)),
        "eval/q_data": float(np.concatenate(taken).mean(dtype=np.float64)),
    }
    if isinstance(learner.rewards, RRD):
        metrics |= evaluate(learner.rewards, held_out, None)
    return metrics
