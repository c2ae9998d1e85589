"""Fresh episodes of a policy, which can be played again for films."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from etude.building.build import make_evaluator
from etude.core.contracts import Array, Broadcast, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.policies import BasePolicy
from etude.models.rebuilding import policy_from_contract
from etude.planning.loading import policy_parts, policy_path, recipe_with_sentence
from etude.planning.recipe import Recipe
from etude.rollout.local import Workers
from etude.runs import checkpoint

Tick = Callable[[float, float], None]

LABEL = "fresh"
EPISODES = 100
"""Default number of episodes."""
_MAX_ENVS, _MAX_ENVS_PER_GROUP, _FEW = 256, 64, 8


@dataclass(frozen=True)
class FreshEpisodes:
    """Evaluation episodes, and the keys and groups to play them again."""

    episodes: dict[str, Array]
    """{name: [n] float64}, ordered by group, episode of the environment, environment."""
    spec: EnvSpec
    step: int
    """Environment steps of training."""
    seed: int
    key: Key
    """The key of the evaluator."""
    envs_per_group: int
    per_env: int
    """Episodes per environment."""
    stochastic: bool = False
    """Whether actions were sampled; else they are the most likely ones."""

    @property
    def num_episodes(self) -> int:
        return len(self.episodes["return"])

    @property
    def motions(self) -> list[str]:
        """The motion of each episode; [] without imitation."""
        names = self.spec.motions
        return [names[int(number)] for number in self.episodes["motion"]] if names else []

    def place(self, index: int) -> tuple[int, int, int]:
        """(group, environment in the group, episode of the environment) of an episode."""
        group, inside = divmod(index, self.envs_per_group * self.per_env)
        episode, env_id = divmod(inside, self.envs_per_group)
        return group, env_id, episode

    def group_key(self, group: int) -> Key:
        """The key that `etude.rollout.group.evaluate` takes for a group."""
        return self.key.child(LABEL, group)


def new_seed(recipe: Recipe) -> int:
    """A seed of episodes that a run has not played: neither in training nor at its end.

    The same for every policy of a run, so that they play the same episodes.
    """
    return 100_000 + Key(recipe.seed).child("evaluate again").integer() % 900_000


def load(path: Path, trust: bool = False) -> BasePolicy:
    """Load the policy of a run, a checkpoint or a policy folder; trust: its code may run."""
    arrays, contract = policy_parts(path)
    try:
        return policy_from_contract(contract, arrays, path, trust)
    except UsageError as error:
        raise UsageError(f"{path} holds no policy that can be used. {error}") from error


def check_fits(policy: BasePolicy, env: EnvSpec, path: Path) -> None:
    """Raise if observations or actions of policy and environment do not match."""
    for name, spec in policy.actor_observations.items():
        if env.observations.get(name) != spec:
            raise UsageError(f"The policy of {path} was trained on another task than this.")
    if policy.action != env.action:
        raise UsageError(
            f"The actions of the policy of {path} do not match this task: {policy.action} is not "
            f"{env.action}."
        )


def play(
    recipe: Recipe,
    path: Path,
    episodes: int | None = None,
    seed: int | None = None,
    stochastic: bool = False,
    tick: Tick = lambda done, total: None,
) -> FreshEpisodes:
    """Play episodes with the policy at `path`, a function of recipe, policy, number and seed.

    episodes: default 100, or every motion once for imitation. seed: default the run's, whose
    episodes are those of the evaluation at its end. stochastic: sample actions, as in
    training. tick: called with the numbers of finished and of all episodes.
    """
    recipe = recipe_with_sentence(recipe, path)
    motions = _num_motions(recipe)
    episodes = episodes or motions or EPISODES
    num_envs, envs_per_group = _spread(episodes, recipe.task.num_agents, motions)
    recipe = recipe.replace(
        evaluation__episodes=episodes,
        evaluation__num_envs=num_envs,
        evaluation__envs_per_group=envs_per_group,
    )
    seed = recipe.seed if seed is None else seed
    key = Key(seed).child("after training")
    policy, workers = load(path), Workers(recipe.collector.threads, recipe.collector.deadline)
    evaluator = make_evaluator(recipe, key, workers, policy)
    try:
        check_fits(policy, evaluator.spec, path)
        broadcast = Broadcast(0, dict(policy.state_dict()))
        total = float(episodes)
        played = evaluator.episodes(broadcast, LABEL, stochastic, lambda done: tick(done, total))
        return FreshEpisodes(
            played,
            evaluator.spec,
            step_of(path),
            seed,
            evaluator.key,
            envs_per_group,
            episodes // num_envs,
            stochastic,
        )
    finally:
        evaluator.close()
        workers.close()


def _num_motions(recipe: Recipe) -> int:
    """The number of motions that the environment imitates."""
    env = recipe.task.make(recipe.task.num_agents)
    env.close()
    return len(env.spec.motions)


def _spread(episodes: int, agents: int, motions: int = 0) -> tuple[int, int]:
    """(num_envs, envs_per_group) that divide a number of episodes evenly.

    The agents of an environment play together, and every motion is played equally often.
    """
    unit = lcm(agents, motions or 1)
    if episodes % unit:
        near = " or ".join(str(n * unit) for n in (episodes // unit, episodes // unit + 1) if n)
        who = f"{agents} agents play every episode together"
        if motions:
            who = f"Each of the {motions} motions is played equally often"
        raise UsageError(f"{who}, and {episodes} is not a multiple of that: use {near} episodes.")

    def divisor(number: int, most: int) -> int:
        return max(n for n in range(unit, most + 1, unit) if number % n == 0)

    num_envs = divisor(episodes, min(episodes, max(_MAX_ENVS, unit)))
    group = divisor(num_envs, min(num_envs, max(_MAX_ENVS_PER_GROUP, unit)))
    # A prime number of environments would give groups of one.
    return num_envs, num_envs if group < _FEW else group


def step_of(path: Path) -> int:
    """The step of the policy at a path, of a run, a checkpoint or a copied policy folder."""
    return checkpoint.policy_step(policy_path(path))
