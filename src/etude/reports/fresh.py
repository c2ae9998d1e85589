"""Fresh episodes of a run's best policy, which can be played again to film some of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from pathlib import Path

from etude.building.build import make_evaluator, num_motions
from etude.core.contracts import Array, Broadcast, EnvSpec
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.models.policies import BasePolicy
from etude.models.rebuilding import policy_from_contract
from etude.planning.loading import policy_parts, policy_path
from etude.planning.recipe import Recipe
from etude.rollout.local import Workers

LABEL = "fresh"
EPISODES = 100
"""Where nobody says how many."""
_MOST_ROWS, _MOST_GROUP_ROWS, _FEW = 256, 64, 8


@dataclass(frozen=True)
class FreshEpisodes:
    """Deterministic episodes that training has not seen, and where each was played."""

    episodes: dict[str, Array]
    """{name: [n] float64}, ordered by group, episode of the row, row."""
    spec: EnvSpec
    step: int
    """Environment steps the policy had been trained for."""
    seed: int
    key: Key
    """Of the evaluator."""
    envs_per_group: int
    per_row: int

    @property
    def num_episodes(self) -> int:
        return len(self.episodes["return"])

    @property
    def motions(self) -> list[str]:
        """The motion of each episode; [] where none is imitated."""
        names = self.spec.motions
        return [names[int(number)] for number in self.episodes["motion"]] if names else []

    def place(self, index: int) -> tuple[int, int, int]:
        """(group, row in it, episode of that row) of an episode by its number."""
        group, inside = divmod(index, self.envs_per_group * self.per_row)
        episode, row = divmod(inside, self.envs_per_group)
        return group, row, episode

    def group_key(self, group: int) -> Key:
        """What `etude.rollout.group.evaluate` was given for that group."""
        return self.key.child(LABEL, group)


def load(path: Path) -> BasePolicy:
    """The policy of a run, a checkpoint or a policy folder."""
    arrays, contract = policy_parts(path)
    try:
        return policy_from_contract(contract, arrays)
    except UsageError as error:
        raise UsageError(f"{path} holds no policy that can be used. {error}") from error


def check_fits(policy: BasePolicy, env: EnvSpec, path: Path) -> None:
    """Refuse a policy that acts on other observations, or otherwise, than the environment."""
    for name, spec in policy.actor_observations.items():
        if env.observations.get(name) != spec:
            raise UsageError(f"The policy of {path} was trained on another task than this.")
    if policy.action != env.action:
        raise UsageError(f"The policy of {path} acts otherwise than this task is acted on.")


def play(
    recipe: Recipe, path: Path, episodes: int | None = None, seed: int | None = None
) -> FreshEpisodes:
    """Episodes of the policy at `path`; the same for the same recipe, policy, count and seed.

    Without a count, 100; or every motion once, where motions are imitated.
    """
    motions = num_motions(recipe)
    episodes = episodes or motions or EPISODES
    rows, envs_per_group = _spread(episodes, recipe.task.num_agents, motions)
    config = recipe.evaluation.model_copy(
        update={"episodes": episodes, "num_envs": rows, "envs_per_group": envs_per_group}
    )
    recipe = recipe.model_copy(update={"evaluation": config})
    seed = recipe.seed if seed is None else seed
    key = Key(seed).child("after training")
    policy, workers = load(path), Workers(recipe.collector.threads)
    evaluator = make_evaluator(recipe, key, workers, policy)
    try:
        check_fits(policy, evaluator.spec, path)
        played = evaluator.episodes(Broadcast(0, dict(policy.state_dict())), LABEL)
        return FreshEpisodes(
            played,
            evaluator.spec,
            step_of(path),
            seed,
            evaluator.key,
            envs_per_group,
            episodes // rows,
        )
    finally:
        evaluator.close()
        workers.close()


def _spread(episodes: int, agents: int, motions: int = 0) -> tuple[int, int]:
    """(rows, rows in a group) that divide a number of episodes evenly: whole environments, and
    every motion equally often."""
    unit = lcm(agents, motions or 1)
    if episodes % unit:
        near = " or ".join(str(n * unit) for n in (episodes // unit, episodes // unit + 1) if n)
        who = f"{agents} agents play every episode together"
        if motions:
            who = f"Each of the {motions} motions is played equally often"
        raise UsageError(f"{who}, and {episodes} is no multiple of that: ask for {near} episodes.")
    rows = max(
        d for d in range(unit, min(episodes, max(_MOST_ROWS, unit)) + 1, unit) if episodes % d == 0
    )
    most = min(rows, max(_MOST_GROUP_ROWS, unit))
    group = max(d for d in range(unit, most + 1, unit) if rows % d == 0)
    # A prime number of rows would become as many groups of one.
    return rows, rows if group < _FEW else group


def step_of(path: Path) -> int:
    """What the policy at a path had been trained for, as its checkpoint is numbered."""
    name = policy_path(path).resolve().name
    return int(name) if name.isdigit() else 0
