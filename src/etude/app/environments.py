"""The environments a recipe can name."""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from etude.core.contracts import Array, BatchEnv, Exactness
from etude.envs.adapters.gym import GymConfig, GymEnv
from etude.envs.adapters.pettingzoo import PettingZooConfig, PettingZooEnv, num_agents
from etude.envs.episodic import Episodic
from etude.envs.named_task import OwnTasks, TaskConfig, make_task
from etude.tasks.imitation.task import Imitation, ImitationConfig
from etude.tasks.pick_place.task import PickPlace, PickPlaceConfig
from etude.tasks.reach.task import Reach, ReachConfig

AnyEnvConfig = (
    ReachConfig | PickPlaceConfig | ImitationConfig | GymConfig | PettingZooConfig | TaskConfig
)
EnvConfig = Annotated[AnyEnvConfig | None, Field(discriminator="kind")]


class EnvClass(Protocol):
    """What the class of an environment offers, given a config of its kind."""

    def __call__(self, config: Any, num_rows: int, threads: int = 1) -> BatchEnv: ...

    def exactness(self, config: Any) -> Exactness: ...


class Entry(NamedTuple):
    """A kind of environment: what configures it and what runs it."""

    config: type[AnyEnvConfig]
    env: EnvClass
    named_by: str | None = None
    """The field that says which environment it is: `--env.<field>` alone chooses the kind."""


ENVS: dict[str, Entry] = {
    "reach": Entry(ReachConfig, Reach),
    "pick-place": Entry(PickPlaceConfig, PickPlace),
    "imitation": Entry(ImitationConfig, Imitation),
    "gym": Entry(GymConfig, GymEnv, named_by="id"),
    "pettingzoo": Entry(PettingZooConfig, PettingZooEnv, named_by="parallel"),
    "task": Entry(TaskConfig, OwnTasks(), named_by="task"),
}


def make_env(config: AnyEnvConfig, num_rows: int, threads: int = 1) -> BatchEnv:
    """A group's worth of the configured environment, with that many engine threads."""
    env = make_plain(config, num_rows, threads)
    return Episodic(env) if config.episodic else env


def make_plain(config: AnyEnvConfig, num_rows: int, threads: int = 1) -> BatchEnv:
    """The same with every step's own reward: to look at, not to learn from."""
    return ENVS[config.kind].env(config, num_rows, threads)


def env_exactness(config: AnyEnvConfig) -> Exactness:
    """Whether the configured environment resumes bit for bit."""
    return ENVS[config.kind].env.exactness(config)


def env_agents(config: AnyEnvConfig) -> int:
    """How many rows share one environment: `num_rows` must be a multiple of it."""
    return num_agents(config) if isinstance(config, PettingZooConfig) else 1


def env_config(target: str, options: dict[str, bool | int | float | str]) -> AnyEnvConfig:
    """What a person means by a kind, a Gymnasium id, a PettingZoo module, or a task's class."""
    if target in ENVS:
        return ENVS[target].config.model_validate(options)
    # Gymnasium's own way to name a package, package:Env-v0, has a colon as well.
    if ":" in target and not re.search(r"-v\d+$", target):
        return TaskConfig(task=target, options=options)
    if re.fullmatch(r"\w+(\.\w+)*\.\w+_v\d+", target):
        return PettingZooConfig(parallel=target, kwargs=options)
    return GymConfig(id=target, kwargs=options)


def make_bare(config: AnyEnvConfig, num_rows: int, threads: int = 1) -> BatchEnv:
    """As `make_env`, but a task of one's own is given as it is, exact or not."""
    if isinstance(config, TaskConfig):
        return make_task(config, num_rows, threads)
    return make_env(config, num_rows, threads)


def style_reference(config: AnyEnvConfig) -> tuple[Array | None, Array | None]:
    """All windows [n, frames, features] of the reference that motion is judged by, if any is; and
    the motion [n] int64 that each is of, where the environment says so."""
    env = make_bare(config, env_agents(config))
    try:
        windows: Array | None = env.style_windows() if hasattr(env, "style_windows") else None
        motions: Array | None = env.style_motions() if hasattr(env, "style_motions") else None
    finally:
        env.close()
    return windows, motions
