"""A parallel PettingZoo environment from its name, or one sentence about why there is none."""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gymnasium import spaces

from etude.core.errors import EtudeError, UsageError
from etude.core.exits import contained
from etude.core.imports import describe
from etude.core.own_code import load_object
from etude.core.trust import Untrusted
from etude.envs.adapters.gym_spaces import Spaces

Agent = Any
"""What an environment calls an agent, mostly a string."""
Given = Mapping[Agent, Any]
"""{agent: observation, reward, ...}."""
_EXTRA = ("pettingzoo", "mpe2")
_NEEDED = ("possible_agents", "reset", "step", "observation_space", "action_space")


class ParallelEnv(Protocol):
    """What is used of PettingZoo's class of that name."""

    agents: list[Agent]
    possible_agents: list[Agent]

    def reset(self, *, seed: int) -> tuple[Given, Given]: ...

    def step(self, actions: Given) -> tuple[Given, Given, Given, Given, Given]: ...

    def observation_space(self, agent: Agent) -> spaces.Space[Any]: ...

    def action_space(self, agent: Agent) -> spaces.Space[Any]: ...

    def close(self) -> None: ...


def make_parallel(name: str, kwargs: Mapping[str, Any]) -> ParallelEnv:
    """One instance of what `name` stands for."""
    # MPE draws with pygame, whose greeting would end up in what a command prints.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    factory = _factory(name)
    try:
        with contained(lambda: f"The constructor of '{name}'"):
            env: Any = factory(**kwargs)
    except EtudeError:
        raise
    except TypeError as error:
        raise UsageError(f"'{name}' does not take these arguments: {describe(error)}.") from error
    except Exception as error:  # someone else's code may fail in any way
        raise UsageError(f"'{name}' cannot be made: {describe(error)}.") from error
    if hasattr(env, "agent_iter"):
        raise UsageError(f"'{name}' lets agents act in turn: name its parallel_env instead.")
    missing = [part for part in _NEEDED if not hasattr(env, part)]
    if missing or not env.possible_agents:
        raise UsageError(
            f"'{name}' is no parallel environment of PettingZoo: it lacks "
            f"{', '.join(missing) or 'any possible_agents'}."
        )
    made: ParallelEnv = env
    return made


def _factory(name: str) -> Callable[..., Any]:
    example = "a module such as mpe2.simple_spread_v3, or module:factory"
    try:
        factory = load_object(name, example, default="parallel_env")
    except Untrusted:
        raise
    except UsageError as error:
        clear = _clearer(name, error.__cause__)
        raise error if clear is None else UsageError(clear) from error
    if not callable(factory):
        raise UsageError(f"{name} cannot be called: name what makes the environment.")
    made: Callable[..., Any] = factory
    return made


def _clearer(name: str, cause: BaseException | None) -> str | None:
    """More about a name that stands for nothing than `load_object` can know."""
    if cause is None:
        if ":" in name or not name:
            return None
        return f"{name} has no parallel_env: name what makes the environment, as module:factory."
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing in _EXTRA:
        return f"'{name}' needs the package '{missing}': pip install 'etude[multiagent]'."
    module = name.rpartition(":")[0] or name
    package, dot, last = module.rpartition(".")
    if missing != module or not dot:
        return None
    inside = importlib.import_module(package)
    known = [found.name for found in pkgutil.iter_modules(getattr(inside, "__path__", []))]
    near = difflib.get_close_matches(last, known, n=3, cutoff=0.5)
    hint = f" Nearest: {', '.join(f'{package}.{found}' for found in near)}." if near else ""
    return f"The package '{package}' has no module '{last}': check the name.{hint}"


def shared_spaces(env: ParallelEnv, name: str) -> Spaces:
    """The spaces of all agents, which must be the same: one policy plays them all."""
    first, *others = env.possible_agents
    for what, space in (("observe", env.observation_space), ("act in", env.action_space)):
        for other in others:
            if space(other) != space(first):
                raise UsageError(
                    f"One policy plays all agents of '{name}', but '{first}' and '{other}' {what} "
                    f"different spaces, {space(first)} and {space(other)}: pad them alike in a "
                    "factory of your own, for example with SuperSuit."
                )
    return Spaces(env.observation_space(first), env.action_space(first), name)
