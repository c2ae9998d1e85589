"""The environments a recipe can name."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from etude.core.contracts import BatchEnv, Exactness
from etude.envs.gym import GymConfig, GymEnv
from etude.envs.reach import Reach, ReachConfig

EnvConfig = Annotated[ReachConfig | GymConfig, Field(discriminator="kind")]


class EnvClass(Protocol):
    """What the class of an environment offers, given a config of its kind."""

    def __call__(self, config: Any, num_rows: int, threads: int = 1) -> BatchEnv: ...

    def exactness(self, config: Any) -> Exactness: ...


class Entry(NamedTuple):
    """A kind of environment: what configures it and what runs it."""

    config: type[ReachConfig] | type[GymConfig]
    env: EnvClass


ENVS: dict[str, Entry] = {
    "reach": Entry(ReachConfig, Reach),
    "gym": Entry(GymConfig, GymEnv),
}


def make_env(config: ReachConfig | GymConfig, num_rows: int, threads: int = 1) -> BatchEnv:
    """A group's worth of the configured environment, with that many engine threads."""
    return ENVS[config.kind].env(config, num_rows, threads)


def env_exactness(config: ReachConfig | GymConfig) -> Exactness:
    """Whether the configured environment resumes bit for bit."""
    return ENVS[config.kind].env.exactness(config)
