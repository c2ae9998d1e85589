from __future__ import annotations

from etude.core.keys import Key
from etude.envs.config import ENVS


def test_every_kind_makes_an_exact_environment_from_its_defaults() -> None:
    for kind in ENVS.names():
        if kind == "track":  # needs files: tests/tasks/test_tracking.py
            continue
        config = ENVS.make(kind)
        assert config.kind == kind
        env = config.make(2 * config.num_agents)
        assert set(env.reset(Key(0))) == set(env.spec.observations)
        assert config.exactness().exact
        env.close()


def test_a_recipe_names_the_kind() -> None:
    for kind in ENVS.names():
        assert type(ENVS.validate({"kind": kind})) is ENVS.load(kind)


def test_every_field_has_its_help() -> None:
    for kind in ENVS.names():
        for name, field in ENVS.load(kind).model_fields.items():
            assert field.description or name == "kind"
