"""Nothing outside a kind's own folder knows it: others find it by name, in a registry."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.api import plan
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.registry import Registry
from etude.data.formats.base import FORMATS
from etude.data.segments import nearest_divisor
from etude.envs.config import ENVS
from etude.models.policies import POLICIES, make_policy
from etude.planning.recipe import ALGORITHMS, REWARDS
from etude.planning.recipes import Recipe, find
from etude.rollout.local import COLLECTORS
from etude.training.logs.outputs import LOGS
from test_layers import SOURCES, imported

REGISTRIES: tuple[Registry[Any], ...] = (
    ALGORITHMS,
    REWARDS,
    ENVS,
    POLICIES,
    LOGS,
    COLLECTORS,
    FORMATS,
)
FOLDERS = {"etude.tasks": 3, "etude.envs.adapters": 3, "etude.data.formats": 3}
"""How many names of a module's path are its kind's folder, where that is not 2."""
RECIPES = {
    place.partition(":")[0] for place in importlib.import_module("etude.tasks").RECIPES.values()
}
"""Modules of recipes: they choose kinds, and so import their configs."""
EXCEPTIONS = {
    ("etude.evaluate.offline", "etude.rl.reward_only"): "it evaluates runs of this kind",
    ("etude.compare.sweeps.processes", "etude.rollout.ray"): "how to find a cluster",
}
"""(importer, module of a kind): why it may."""


def folder(module: str) -> str:
    """The part of a module's path that is the folder of its kind."""
    depth = next((n for start, n in FOLDERS.items() if module.startswith(f"{start}.")), 2)
    return ".".join(module.split(".")[:depth])


def modules_of_kinds() -> set[str]:
    """Where the configs of built-in kinds are; the base of a section is for all to import."""
    places = {place for registry in REGISTRIES for place in registry.built_in().values()}
    bases = {registry._base for registry in REGISTRIES}
    kinds, based = ({place.partition(":")[0] for place in group} for group in (places, bases))
    return kinds - based


def strangers(kind: str, importers: dict[str, set[str]]) -> list[str]:
    """Modules that import a kind's without being in its folder."""
    return [
        module
        for module, imported in importers.items()
        if kind in imported
        and folder(module) != folder(kind)
        and module not in RECIPES
        and (module, kind) not in EXCEPTIONS
    ]


@pytest.mark.parametrize("kind", sorted(modules_of_kinds()))
def test_only_its_folder_imports_a_kind(kind: str) -> None:
    assert (
        strangers(kind, {module: imported(module, text) for module, text in SOURCES.items()}) == []
    )


def test_the_check_itself_notices() -> None:
    kind = "etude.tasks.reach"
    assert {kind, "etude.rl.ppo", "etude.envs.adapters.gym"} <= modules_of_kinds()
    assert strangers(kind, {"etude.planning.plan": {kind}, "etude.tasks.pick_place.task": {kind}})
    assert not strangers(kind, {"etude.tasks.reach.expert": {kind}})


def test_every_exception_is_needed() -> None:
    assert all(kind in imported(module, SOURCES[module]) for module, kind in EXCEPTIONS)


UNFINISHED = """
from etude.rl.on_policy import OnPolicyConfig
from etude.envs.config import EnvConfig
from etude.models.actor_critic import ModulePolicyConfig
from etude.models.policies import PolicyConfig


class Algorithm(OnPolicyConfig):
    kind: str = "mine"


class Env(EnvConfig):
    kind: str = "mine"


class Policy(ModulePolicyConfig):
    pass


class Plain(PolicyConfig):
    pass
"""


@pytest.mark.parametrize(
    ("registry", "name", "sentence"),
    [
        (ALGORITHMS, "Algorithm", "is not finished: the class must define `make`."),
        (ENVS, "Env", "is not finished: the class must define `build` and `exactness`."),
        (POLICIES, "Policy", "is not finished: the class must define `network`."),
        (REWARDS, "Env", "must be a class derived from"),
    ],
)
def test_an_unfinished_class_is_refused_by_a_sentence(
    registry: Registry[Any], name: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "unfinished.py").write_text(UNFINISHED)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        registry.make(f"{tmp_path / 'unfinished.py'}:{name}")


def test_a_policy_that_does_not_say_what_it_builds(tmp_path: Path) -> None:
    (tmp_path / "unfinished.py").write_text(UNFINISHED)
    config = POLICIES.make(f"{tmp_path / 'unfinished.py'}:Plain")
    spec = EnvSpec({"state": ArraySpec((3,))}, ActionSpec("discrete", sizes=(2,)), 10)
    with pytest.raises(UsageError, match="derive its class from"):
        make_policy(config, spec, None)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.section)
def test_every_kind_says_its_name_and_what_it_is(registry: Registry[Any]) -> None:
    for name in registry.built_in():
        config = registry.load(name)
        assert config.__doc__
        assert registry.make(name).kind == name


def _numbers(schema: Any, inside: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number in a JSON schema, with where it is."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number") and not {"enum", "const"} & schema.keys():
            yield inside, schema
        for name, part in schema.items():
            if name != "default":
                yield from _numbers(part, f"{inside}.{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from _numbers(part, inside)


def test_every_number_of_every_config_is_bounded() -> None:
    """Absurd sizes are refused before anything is made of them."""
    configs = [registry.load(name) for registry in REGISTRIES for name in registry.names()]
    count = 0
    for config in [Recipe, *configs]:
        for where, number in _numbers(config.model_json_schema()):
            assert number.keys() & {"maximum", "exclusiveMaximum"}, f"{config.__name__}{where}"
            assert number.keys() & {"minimum", "exclusiveMinimum"}, f"{config.__name__}{where}"
            count += 1
    assert count > 300


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("collector.num_envs", 10**12, "collector.num_envs must be at most 16777216"),
        ("clock.total_timesteps", 10**30, "must be at most 1000000000000000000"),
        ("env.substeps", 10**9, "env.substeps must be at most 1000"),
        ("evaluation.num_envs", 10**8, "evaluation.num_envs must be at most 65536"),
        ("env.reward.hold", -1e30, "must be at least -1000000000000000000"),
        ("env.min_distance", 0.3, "leaves no room for targets"),
        ("checkpoint.every", f"{'9' * 400} steps", "is not an interval"),
    ],
)
def test_an_absurd_size_is_refused_by_its_field(field: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        find("reach").replace(field, value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_absurd_arguments_of_an_environment() -> None:
    """The number is what is wrong, and not that it is no text."""
    with pytest.raises(UsageError, match=r"env\.kwargs must be at most"):
        find("ppo").replace("env.kwargs", {"width": 10**30})


GROUPS = {"collector.num_envs": 1 << 15, "algorithm.minibatch_size": 1 << 15}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"collector.num_envs": 4_000_000, "collector.envs_per_group": 1}, "4,000,000 groups"),
        (
            {**GROUPS, "collector.envs_per_group": 1, "clock.total_timesteps": 1 << 30},
            "has room for",
        ),
        ({"clock.total_timesteps": 10**17}, "log rows, and at most"),
        ({"policy.hidden": (65536, 65536, 65536, 65536)}, "make its layers"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_once(changes: dict[str, Any], says: str) -> None:
    begin, fields = time.process_time(), {k.replace(".", "__"): v for k, v in changes.items()}
    with pytest.raises(UsageError, match=says):
        plan(find("reach").replace(**fields))
    assert time.process_time() - begin < 2.0


def test_divisors_of_large_numbers_are_not_searched_for_ever() -> None:
    assert nearest_divisor(10**18, 7) == 8
    assert nearest_divisor(12, 5) == 4
