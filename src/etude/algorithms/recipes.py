"""Recipes that learn from replayed experience."""

from __future__ import annotations

from etude.algorithms.ircr import IRCRConfig
from etude.algorithms.ppo import LearnerConfig
from etude.algorithms.reward_model import RewardOnlyConfig
from etude.algorithms.rrd import RRDConfig
from etude.algorithms.sac import SACConfig
from etude.algorithms.td3 import TD3Config
from etude.core.clock import ClockConfig
from etude.envs.adapters.gym import GymConfig
from etude.logs.outputs import LogsConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rollout.local import CollectorConfig
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.tasks.reach.task import ReachConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig


def sac() -> Recipe:
    """SAC on any Gymnasium environment with a box of actions: `--env.id HalfCheetah-v5`."""
    return Recipe(
        name="sac",
        env=GymConfig(id="Pendulum-v1"),
        collector=CollectorConfig(rows=1, group_rows=1, threads=1),
        policy=PolicyConfig(kind="squashed", hidden=(256, 256), activation="relu"),
        algorithm=SACConfig(rollout_steps=100, train_batches=100, warmup_steps=1_000),
        clock=ClockConfig(total_timesteps=20_000, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=10, rows=10, group_rows=10),
    )


def td3() -> Recipe:
    """TD3 on any Gymnasium environment with a box of actions: `--env.id HalfCheetah-v5`."""
    return sac().model_copy(
        update={
            "name": "td3",
            "policy": PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
            "algorithm": TD3Config(rollout_steps=100, train_batches=100, warmup_steps=1_000),
        }
    )


def pick_place_sac() -> Recipe:
    """Pick-and-place by SAC: fewer steps than by PPO, and three times the gradients."""
    return Recipe(
        name="pick-place-sac",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.95),
        collector=CollectorConfig(rows=32, group_rows=16, threads=2),
        policy=PolicyConfig(
            kind="squashed",
            hidden=(128, 128),
            activation="relu",
            critic_reads=("state", "critic"),
        ),
        algorithm=SACConfig(
            rollout_steps=8,
            train_batches=64,
            warmup_steps=5_120,
            gamma=0.95,
            capacity=200_000,
            initial_alpha=0.02,
            target_entropy=-2.0,
            normalise_observations=True,
        ),
        clock=ClockConfig(total_timesteps=76_800, cycles=5, iterations=20),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, rows=10, group_rows=10),
    )


def episodic() -> Recipe:
    """Reach, rewarded only when an episode is over: RRD learns what each step was worth."""
    return Recipe(
        name="episodic",
        env=ReachConfig(episodic=True),
        collector=CollectorConfig(rows=32, group_rows=16, threads=2),
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
        rewards=RRDConfig.vector().model_copy(update={"loss": "unbiased"}),
        clock=ClockConfig(total_timesteps=57_600, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, rows=100, group_rows=50),
    )


def episodic_ircr() -> Recipe:
    """What `episodic` is compared with: every step earns its episode's return (IRCR).

    Replay, batch and target averaging are those of the method's reference implementation.
    """
    base = episodic()
    own = {"capacity": 300_000, "batch_size": 512, "polyak": 0.999}
    return base.model_copy(
        update={
            "name": "episodic-ircr",
            "algorithm": base.algorithm.model_copy(update=own),
            "rewards": IRCRConfig(),
        }
    )


def episodic_short() -> Recipe:
    """The same in a few seconds, saved and tested often: a run to kill and resume."""
    full = episodic()
    return full.model_copy(
        update={
            "name": "episodic-short",
            "env": ReachConfig(episodic=True, max_episode_steps=12),
            "collector": CollectorConfig(rows=16, group_rows=4, threads=2),
            "policy": PolicyConfig(kind="squashed", hidden=(32, 32), activation="relu"),
            "algorithm": SACConfig(
                rollout_steps=8,
                train_batches=8,
                batch_size=64,
                warmup_steps=300,
                capacity=1_024,
                normalise_observations=True,
            ),
            "rewards": RRDConfig(rrd_batch_size=64, rrd_sample_size=8),
            "learner": LearnerConfig(shards=2),
            "clock": ClockConfig(total_timesteps=3_072, cycles=1, iterations=2),
            "evaluation": EvaluationConfig(every="3 cycles", episodes=16, rows=16, group_rows=8),
            "checkpoint": CheckpointConfig(every="1 cycle"),
        }
    )


def offline() -> Recipe:
    """A policy from a dataset, its reward learned from returns: `--algorithm.dataset FOLDER`."""
    return Recipe(
        name="offline",
        policy=PolicyConfig(kind="deterministic", hidden=(256, 256), activation="relu"),
        algorithm=TD3Config(
            train_batches=100, behaviour_coef=0.4, normalise_observations=True, gamma=0.98
        ),
        rewards=RRDConfig(normalise_targets=True),
        clock=ClockConfig(epochs=10, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, rows=100, group_rows=50),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reward_only() -> Recipe:
    """A reward learned from a dataset's returns: `--algorithm.dataset FOLDER`, no environment."""
    return Recipe(
        name="reward-only",
        algorithm=RewardOnlyConfig(dataset="", train_batches=50, rrd=RRDConfig.image(reads=())),
        clock=ClockConfig(epochs=10, cycles=100, iterations=100),
        evaluation=EvaluationConfig(every="10 cycles", final_episodes=0),
        checkpoint=CheckpointConfig(every="1 cycle"),
        logs=LogsConfig(losses="iteration"),
    )


def reward_only_debug() -> Recipe:
    """The same with one of everything, to see that it runs."""
    full = reward_only()
    return full.model_copy(
        update={
            "name": "reward-only-debug",
            "algorithm": full.algorithm.model_copy(update={"train_batches": 1}),
            "clock": ClockConfig(epochs=1, cycles=1, iterations=1),
        }
    )
