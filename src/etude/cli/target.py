"""The recipe or environment that a command line names."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from etude.cli.options import Called, as_integer
from etude.cli.verbs import HELP
from etude.core.catalogue import TUNED
from etude.core.errors import UsageError
from etude.core.user_code import load_object, trust_texts
from etude.envs import NAMED_BY
from etude.envs.config import ENVS, EnvConfig
from etude.planning import recipes
from etude.planning.recipe import REGISTRIES, Recipe

SHORT = {"--collector": "--collector.kind", "--from": "--start-from"}
"""Short names of options."""
Recipe_ = Annotated[Recipe, Called("")]


def find_target(arguments: list[str]) -> tuple[Recipe, list[str]]:
    """(recipe, options): the recipe that the first argument names, with the kinds that the options
    choose."""
    name, rest = arguments[0], with_full_names(arguments[1:])
    trust_texts(text.partition("=")[2] or text for text in rest)
    recipe = recipes.find(name, "--trust" in rest)
    _check_environment(name, recipe, rest)
    return fitted(_with_kinds(recipe, rest), rest), rest


def _check_environment(name: str, recipe: Recipe, arguments: list[str]) -> None:
    """Refuse a recipe for any environment, which has the name of its algorithm, without one."""
    is_named = any(text.startswith("--env.") for text in arguments)
    is_for_any = name == recipe.algorithm.kind and recipe.env is not None
    if is_for_any and not is_named and not HELP.intersection(arguments):
        raise UsageError(
            f"{name} is for any environment: name one with --env.id ID or --env.kind "
            f"FILE.py:Class. Settings are tuned for {', '.join(TUNED.names())}: "
            f"`etude train {TUNED.names()[0]}`."
        )


_SIZES = (
    *("clock.total_timesteps", "clock.epochs", "collector.num_envs"),
    *("collector.envs_per_group", "learner.shards"),
    *("algorithm.minibatch_size", "algorithm.rollout_steps", "algorithm.horizon"),
)


def fitted(recipe: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with sizes that fit `--collector.num-envs`, and without epochs for
    `--clock.total-timesteps`, as defaults of the other options."""
    texts = {name: _value_of(f"--{name.replace('_', '-')}", arguments) for name in _SIZES}
    given = {name: as_integer(text) for name, text in texts.items() if text}
    if given.keys().isdisjoint({"collector.num_envs", "clock.total_timesteps"}):
        return recipe
    with suppress(UsageError):  # wrong values are refused where options are parsed
        return recipe.replace(**{name.replace(".", "__"): text for name, text in given.items()})
    return recipe


def with_full_names(arguments: list[str]) -> list[str]:
    """The arguments with full names in place of short ones, see `SHORT`."""
    names = [argument.partition("=") for argument in arguments]
    return [f"{SHORT.get(name, name)}{equals}{value}" for name, equals, value in names]


def _with_kinds(recipe: Recipe, arguments: list[str]) -> Recipe:
    """The recipe with the kinds that `--SECTION.kind` chooses; `--env.id`, `--env.task` and
    `--env.parallel` choose the kind of the environment too."""
    kinds = {s: kind for s in REGISTRIES if (kind := _value_of(f"--{s}.kind", arguments))}
    named = [f"env.{f}" for f in NAMED_BY if _value_of(f"--env.{f}", arguments) is not None]
    here = None if recipe.env is None else recipe.env.kind
    if kinds.get("env") in NAMED_BY.values() and kinds["env"] != here and not named:
        raise UsageError(
            f"--env.kind is {here} in this recipe: --env.id ID, --env.task module:Class or "
            "--env.parallel MODULE chooses another environment, or start from another recipe."
        )
    for section, kind in kinds.items():
        REGISTRIES[section].check(kind, "--")
    return recipe.with_kinds(kinds, named)


def _value_of(option: str, arguments: list[str]) -> str | None:
    """The text after an option, "" if there is none; None without the option."""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == option:
            return value if equals else next(iter(arguments[i + 1 :]), "")
    return None


def split_run(text: str) -> tuple[Path, str]:
    """(run, "") of a run's folder; (run, step) of one of its checkpoints."""
    path = Path(text)
    inside = path.parent.name == "checkpoints" and path.is_dir()
    return (path.parent.parent, path.name.lstrip("0") or "0") if inside else (path, "")


def env_config(target: str, options: dict[str, bool | int | float | str]) -> EnvConfig:
    """The environment with these options that a kind, a Gymnasium id, a PettingZoo module or the
    class of a task names."""
    if target in ENVS.names():
        return ENVS.load(target).model_validate({"kind": target, **options})
    # Gymnasium's name of an environment in a package, package:Env-v0, has a colon too.
    if ":" in target and not re.search(r"-v\d+$", target):
        found = load_object(
            target, "module:Class, for example my_module:MyTask or my_task.py:MyTask"
        )
        if isinstance(found, type) and issubclass(found, EnvConfig):
            return ENVS.validate({"kind": target, **options})
        return ENVS.validate({"kind": "task", "task": target, "options": options})
    if re.fullmatch(r"\w+(\.\w+)*\.\w+_v\d+", target):
        return ENVS.validate({"kind": "pettingzoo", "parallel": target, "kwargs": options})
    gym = ENVS.load("gym").model_fields
    fields = {name: value for name, value in options.items() if name in gym}
    kwargs = {name: value for name, value in options.items() if name not in gym}
    return ENVS.validate({"kind": "gym", "id": target, "kwargs": kwargs, **fields})
