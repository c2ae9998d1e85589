from __future__ import annotations

from pydantic import TypeAdapter

from etude.core.contracts import BatchEnv
from etude.core.keys import Key


def test_every_kind_makes_an_exact_environment_from_its_defaults() -> None:
    for kind, entry in ENVS.items():
        config = entry.config()
        assert config.kind == kind
        env: BatchEnv = config.make(2 * config.num_agents)
        assert set(env.reset(Key(0))) == set(env.spec.observations)
        assert config.exactness().exact
        env.close()


def test_a_recipe_names_the_kind() -> None:
    adapter: TypeAdapter[EnvConfig] = TypeAdapter(EnvConfig)
    for kind, entry in ENVS.items():
        assert type(adapter.validate_python({"kind": kind})) is entry.config


def test_every_field_has_its_help() -> None:
    for entry in ENVS.values():
        for name, field in entry.config.model_fields.items():
            assert field.description or name == "kind"
