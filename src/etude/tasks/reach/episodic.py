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
    """Reach with a reward only at the end of an episode: RRD learns a reward per step."""
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
        # Episodes are short relative to K, and some end early: the biased loss then makes rewards
        # of an episode equal, which hides the good steps.
        rewards=RRDConfig.vector().replace(loss="unbiased"),
        clock=ClockConfig(total_timesteps=57_600, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
    )


def episodic_ircr() -> Recipe:
    """Baseline of `episodic`: every step is rewarded with its episode's return (IRCR).

    Replay capacity, batch size and target averaging are those of the method's reference
    implementation.
    """
    return episodic().replace(
        name="episodic-ircr",
        algorithm__capacity=300_000,
        algorithm__batch_size=512,
        algorithm__polyak=0.999,
        rewards=IRCRConfig(),
    )
