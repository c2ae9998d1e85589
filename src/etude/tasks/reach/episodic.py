"""Recipes of the arm that reaches, whose rewards come at an episode's end: SAC, RRD and IRCR."""

from __future__ import annotations

from etude.core.clock import ClockConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.rewards.ircr import IRCRConfig
from etude.rl.rewards.rrd import RRDConfig
from etude.rl.sac import SACConfig
from etude.rollout.local import CollectorConfig
from etude.tasks.reach.task import ReachConfig
from etude.training.evaluation import EvaluationConfig


def episodic() -> Recipe:
    """Reach, rewarded only when an episode is over: RRD learns what each step was worth."""
    return Recipe(
        name="episodic",
        env=ReachConfig(episodic=True),
        collector=CollectorConfig(num_envs=32, envs_per_group=16, threads=2),
        policy=PolicyConfig(kind="squashed", hidden=(256, 256), activation="relu"),
        algorithm=SACConfig(
            rollout_steps=10,
            train_batches=100,
            warmup_steps=4_800,
            gamma=0.95,
            capacity=200_000,
            initial_alpha=0.02,
        ),
        # Episodes are short beside K, and some end early: the biased loss then pulls the rewards
        # of an episode together and a policy never sees where it did well.
        rewards=RRDConfig.vector().replace(loss="unbiased"),
        clock=ClockConfig(total_timesteps=57_600, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
    )


def episodic_ircr() -> Recipe:
    """What `episodic` is compared with: every step earns its episode's return (IRCR).

    Replay, batch and target averaging are those of the method's reference implementation.
    """
    return episodic().replace(
        name="episodic-ircr",
        algorithm__capacity=300_000,
        algorithm__batch_size=512,
        algorithm__polyak=0.999,
        rewards=IRCRConfig(),
    )
