"""The recipes that come with Etude, and how one is found."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from etude.algorithms.ppo import LearnerConfig, PPOConfig
from etude.algorithms.recipes import (
    episodic,
    episodic_ircr,
    episodic_short,
    offline,
    pick_place_sac,
    reward_only,
    reward_only_debug,
    sac,
    td3,
)
from etude.core.clock import ClockConfig
from etude.core.errors import EtudeError, UsageError
from etude.core.explain import explain
from etude.core.imports import describe, load_object
from etude.envs.adapters.gym import GymConfig
from etude.envs.adapters.pettingzoo import PettingZooConfig
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe, changes, digest, dump, load, texts, validated
from etude.rollout.local import CollectorConfig
from etude.tasks.imitation.recipes import (
    amp_clips,
    amp_walk,
    amp_walk_short,
    imitate_all,
    imitate_backflip,
    imitate_walk,
    imitate_walk_short,
)
from etude.tasks.pick_place.task import PickPlaceConfig
from etude.tasks.reach.task import ReachConfig
from etude.training.curriculum import CurriculumConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig

__all__ = [
    "CATALOG",
    "Recipe",
    "changes",
    "digest",
    "dump",
    "find",
    "load",
    "purpose",
    "texts",
    "validated",
]


def reach() -> Recipe:
    """A Kuka arm learns to hold its hand at a random point, by joint control."""
    return Recipe(
        name="reach",
        env=ReachConfig(),
        policy=PolicyConfig(init_std=0.3),
        collector=CollectorConfig(rows=256, group_rows=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=512,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=131_072, cycles=4, iterations=2),
        evaluation=EvaluationConfig(every="1 epoch", episodes=200, rows=200, group_rows=50),
    )


def reach_short() -> Recipe:
    """The same arm for a few seconds, saved and tested often: a run to kill and resume."""
    full = reach()
    return full.model_copy(
        update={
            "name": "reach-short",
            "collector": CollectorConfig(rows=64, group_rows=16, threads=2),
            "algorithm": full.algorithm.model_copy(
                update={"minibatch_size": 256, "update_epochs": 4}
            ),
            "clock": ClockConfig(total_timesteps=24_576, cycles=1, iterations=2),
            "evaluation": EvaluationConfig(every="3 cycles", episodes=32, rows=32, group_rows=16),
            "checkpoint": CheckpointConfig(every="1 cycle"),
        }
    )


def reach_memory() -> Recipe:
    """The target is shown for 5 steps and then hidden: an LSTM policy must remember it."""
    return reach().model_copy(
        update={
            "name": "reach-memory",
            "env": ReachConfig(shown_steps=5),
            "policy": PolicyConfig(
                kind="lstm",
                hidden=(64,),
                units=64,
                init_std=0.3,
                critic_reads=("state", "critic"),
            ),
            "algorithm": PPOConfig(
                rollout_steps=64,
                horizon=64,
                minibatch_size=4096,
                update_epochs=4,
                learning_rate=1e-3,
                final_learning_rate=0.2,
                gamma=0.95,
                bound_coef=0.1,
            ),
            "clock": ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=4),
        }
    )


def reach_at_scale() -> Recipe:
    """Half a million steps in one buffer, 10^10 in all: LSTM, priorities, collection ahead."""
    return Recipe(
        name="reach-at-scale",
        env=ReachConfig(),
        policy=PolicyConfig(kind="lstm", units=128, init_std=0.3),
        collector=CollectorConfig(rows=8192, group_rows=512, threads=2, lag=1),
        algorithm=PPOConfig(
            rollout_steps=64,
            horizon=64,
            minibatch_size=16_384,
            update_epochs=1,
            sampling="prioritised",
            learning_rate=4.57e-4,
            gamma=0.977,
            gae_lambda=0.916,
            advantages="vtrace",
            clip=0.1,
            value_clip=0.1,
            value_coef=0.44,
            entropy_coef=0.0021,
            bound_coef=0.1,
            max_grad_norm=0.5,
        ),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=10_000_000_000, cycles=10, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=512, rows=512, group_rows=256),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reach_at_scale_short() -> Recipe:
    """The same parts in a few seconds, saved and tested often: a run to kill and resume."""
    full = reach_at_scale()
    return full.model_copy(
        update={
            "name": "reach-at-scale-short",
            "policy": PolicyConfig(kind="lstm", hidden=(32,), units=32, init_std=0.3),
            "collector": CollectorConfig(rows=64, group_rows=16, threads=2, lag=1),
            "algorithm": full.algorithm.model_copy(
                update={"rollout_steps": 32, "horizon": 16, "minibatch_size": 512}
            ),
            "clock": ClockConfig(total_timesteps=32_768, cycles=1, iterations=2),
            "evaluation": EvaluationConfig(every="3 cycles", episodes=32, rows=32, group_rows=16),
        }
    )


def spread() -> Recipe:
    """PettingZoo's simple_spread: three agents, one policy, learn to cover three landmarks."""
    return Recipe(
        name="spread",
        env=PettingZooConfig(parallel="mpe2.simple_spread_v3"),
        collector=CollectorConfig(rows=96, group_rows=48, threads=1),
        algorithm=PPOConfig(
            rollout_steps=25,
            minibatch_size=600,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.95,
            entropy_coef=0.01,
        ),
        clock=ClockConfig(total_timesteps=600_000, cycles=5, iterations=5),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=300, rows=300, group_rows=150, final_episodes=600
        ),
    )


def pick_place() -> Recipe:
    """A Kuka arm learns to pick up a cube by friction and put it down at a target."""
    return Recipe(
        name="pick-place",
        env=PickPlaceConfig(max_episode_steps=50, discount=0.95),
        policy=PolicyConfig(init_std=0.6, critic_reads=("state", "critic")),
        collector=CollectorConfig(rows=64, group_rows=32, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=256,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            entropy_coef=0.004,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=200_000, cycles=3, iterations=5),
        evaluation=EvaluationConfig(every="1 cycle", episodes=10, rows=10, group_rows=10),
    )


def pick_place_original() -> Recipe:
    """Pick-and-place with the PPO settings of stable-baselines3: what tuning gains over them."""
    tuned = pick_place()
    return tuned.model_copy(
        update={
            "name": "pick-place-original",
            "env": PickPlaceConfig(max_episode_steps=50, discount=0.99),
            "policy": tuned.policy.model_copy(update={"init_std": 1.0}),
            "collector": CollectorConfig(rows=8, group_rows=4, threads=2),
            "algorithm": PPOConfig(
                rollout_steps=256,
                minibatch_size=64,
                update_epochs=10,
                learning_rate=3e-4,
                gamma=0.99,
                gae_lambda=0.95,
                clip=0.2,
                value_coef=1.0,
                entropy_coef=0.01,
                max_grad_norm=0.5,
            ),
            "clock": ClockConfig(total_timesteps=200_000, cycles=4, iterations=2),
        }
    )


def pick_place_anywhere() -> Recipe:
    """The same with the cube anywhere on the table, turned any way, and the target elsewhere."""
    fixed = pick_place()
    return fixed.model_copy(
        update={
            "name": "pick-place-anywhere",
            "env": PickPlaceConfig.anywhere(max_episode_steps=60, discount=0.95),
            "policy": fixed.policy.model_copy(update={"hidden": (128, 128)}),
            "collector": CollectorConfig(rows=256, group_rows=128, threads=2, engine_threads=2),
            "algorithm": fixed.algorithm.model_copy(
                update={
                    "minibatch_size": 1024,
                    "update_epochs": 6,
                    "final_learning_rate": 0.1,
                    "entropy_coef": 0.002,
                }
            ),
            "clock": ClockConfig(total_timesteps=819_200, cycles=5, iterations=10),
            "evaluation": EvaluationConfig(every="1 epoch", episodes=200, rows=200, group_rows=100),
            "checkpoint": CheckpointConfig(every="5 cycles"),
        }
    )


def pick_place_short() -> Recipe:
    """Pick-and-place for a few seconds with everything that has state: a run to kill and resume."""
    full = pick_place_anywhere()
    shaky = {"cube_mass": 0.3, "friction": 0.3, "servo_gain": 0.1}
    return full.model_copy(
        update={
            "name": "pick-place-short",
            "env": PickPlaceConfig.anywhere(
                max_episode_steps=20,
                discount=0.95,
                random={**shaky, "observation_noise": 0.001, "observation_delay": 1},
            ),
            "collector": CollectorConfig(rows=32, group_rows=8, threads=2),
            "algorithm": full.algorithm.model_copy(
                update={"minibatch_size": 128, "update_epochs": 2}
            ),
            "clock": ClockConfig(total_timesteps=6_144, cycles=1, iterations=2),
            "curriculum": CurriculumConfig(enabled=True, step=0.1, raise_at=0.0, episodes=16),
            "evaluation": EvaluationConfig(every="2 cycles", episodes=16, rows=16, group_rows=8),
            "checkpoint": CheckpointConfig(every="1 cycle"),
        }
    )


def ppo() -> Recipe:
    """PPO on any Gymnasium environment: `etude train ppo --env.id HalfCheetah-v5`."""
    return Recipe(
        name="ppo",
        env=GymConfig(id="CartPole-v1"),
        collector=CollectorConfig(rows=16, group_rows=8, threads=2),
        algorithm=PPOConfig(
            rollout_steps=64,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=1e-3,
            final_learning_rate=0.1,
            gamma=0.99,
            normalise_rewards=True,
        ),
        clock=ClockConfig(total_timesteps=100_000, cycles=5, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=20, rows=20, group_rows=20),
    )


def halfcheetah() -> Recipe:
    """Gymnasium's HalfCheetah-v5 learns to run."""
    return Recipe(
        name="halfcheetah",
        env=GymConfig(id="HalfCheetah-v5"),
        collector=CollectorConfig(rows=16, group_rows=8, threads=2),
        algorithm=PPOConfig(
            rollout_steps=128,
            minibatch_size=256,
            update_epochs=10,
            learning_rate=3e-4,
            final_learning_rate=0.1,
            gamma=0.99,
        ),
        clock=ClockConfig(total_timesteps=500_000, cycles=10, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=16, rows=16, group_rows=8),
    )


CATALOG: dict[str, Callable[[], Recipe]] = {
    "reach": reach,
    "reach-short": reach_short,
    "reach-memory": reach_memory,
    "reach-at-scale": reach_at_scale,
    "reach-at-scale-short": reach_at_scale_short,
    "pick-place": pick_place,
    "pick-place-original": pick_place_original,
    "pick-place-sac": pick_place_sac,
    "pick-place-anywhere": pick_place_anywhere,
    "pick-place-short": pick_place_short,
    "imitate-walk": imitate_walk,
    "imitate-walk-short": imitate_walk_short,
    "imitate-backflip": imitate_backflip,
    "imitate-all": imitate_all,
    "amp-walk": amp_walk,
    "amp-clips": amp_clips,
    "amp-walk-short": amp_walk_short,
    "ppo": ppo,
    "halfcheetah": halfcheetah,
    "spread": spread,
    "sac": sac,
    "td3": td3,
    "episodic": episodic,
    "episodic-ircr": episodic_ircr,
    "episodic-short": episodic_short,
    "offline": offline,
    "reward-only": reward_only,
    "reward-only-debug": reward_only_debug,
}


def purpose(name: str) -> str:
    """What a recipe is for, in one line."""
    return (CATALOG[name].__doc__ or "").strip().splitlines()[0]


def find(target: str, trust: bool = False) -> Recipe:
    """A recipe by its name, from a recipe.yaml, or from one's own function.

    trust: code that the recipe.yaml names may run.
    """
    if target in CATALOG:
        return CATALOG[target]()
    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError(f"There is no file {target}; check the path.")
        return load(path, trust)
    if ":" in target:
        return _from_function(target)
    if path.suffix == ".py":
        raise UsageError(f"Name the function in it that returns the recipe: {target}:FUNCTION.")
    near = difflib.get_close_matches(target, CATALOG, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(
        f"There is no recipe '{target}'; {hint}`etude list` shows them all, and a path to a "
        "recipe.yaml or FILE.py:FUNCTION works too."
    )


def _from_function(target: str) -> Recipe:
    """What the function behind `file.py:function` or `module:function` returns."""
    function = load_object(target, "my_recipes.py:my_recipe")
    if not callable(function):
        raise UsageError(f"{target} is no function: write one that returns an etude.Recipe.")
    try:
        recipe = function()
    except EtudeError:
        raise
    except ValidationError as error:
        raise UsageError(f"{target}: {explain(error, Recipe)}") from error
    except Exception as error:  # someone else's code may fail in any way
        raise UsageError(f"{target} failed: {describe(error)}.") from error
    if not isinstance(recipe, Recipe):
        raise UsageError(
            f"{target} returns a {type(recipe).__name__}; it must return an etude.Recipe, such as "
            "etude.recipes.reach() with some fields changed."
        )
    return recipe
