"""Configs with some fields changed: by dotted names, validated, and nothing that is no field."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.config import Config
from etude.core.errors import UsageError
from etude.envs.adapters.gym import GymConfig
from etude.planning import recipes
from etude.rl.sac import SACConfig


def test_fields_are_replaced_by_dotted_names() -> None:
    recipe = recipes.reach_short()
    changed = recipe.replace("algorithm.learning_rate", 1e-4)
    assert changed.algorithm.learning_rate == 1e-4
    assert changed.replace("algorithm.learning_rate", recipe.algorithm.learning_rate) == recipe
    assert recipe.replace() == recipe
    both = recipe.replace(seed=3, env__tolerance=0.1, env__reward__hold=2.0)
    assert (both.seed, both.task.tolerance, both.task.reward.hold) == (3, 0.1, 2.0)
    # Together they are right, one by one they would not be.
    pair = recipe.replace(
        evaluation__episodes=60, evaluation__num_envs=30, evaluation__envs_per_group=30
    )
    assert pair.evaluation.episodes == 60
    assert recipe.evaluation.replace(every="2 epochs").every == "2 epochs"
    assert recipe.algorithm.replace(gamma=0.5).gamma == 0.5


def test_kinds_are_replaced_with_their_defaults() -> None:
    recipe = recipes.reach_short().replace(algorithm__kind="sac", algorithm__batch_size=32)
    assert recipe.algorithm == SACConfig(batch_size=32)
    chosen = recipes.ppo().replace("env.id", "Pendulum-v1")
    assert chosen.env == GymConfig(id="Pendulum-v1")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("algorithm.lr", 1e-4, "no field algorithm.lr (did you mean algorithm.learning_rate?)"),
        ("algorithm.learning_rate", -1, "algorithm.learning_rate must be more than 0, not -1."),
        ("algoritm.gamma", 1, "there is no field algoritm (did you mean algorithm?)"),
        ("collector.n_envs", 4, "did you mean collector.num_envs?"),
        ("env.tol", 4, "did you mean env.tolerance?"),
        ("evaluation.num_envs", 3, "must be a multiple of evaluation.num_envs 3"),
        ("algorithm.gamma.x", 3, "gamma is a value, not a section: it has no field x."),
        ("algorithm.kind", "sacc", "algorithm.kind must be 'ppo', 'sac', 'td3'"),
    ],
)
def test_what_is_wrong_is_one_sentence(name: str, value: object, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        recipes.reach_short().replace(name, value)
    assert sentence in str(error.value)


def test_a_field_of_another_kind_is_named_as_such() -> None:
    """The kind of a policy was act, which has no hidden layers; that of the default has."""
    with pytest.raises(UsageError) as error:
        recipes.pick_place_bc().replace("policy.hidden", (16,))
    assert "no field policy.hidden (another kind of policy has it)" in str(error.value)


def test_copies_with_unknown_fields_are_refused() -> None:
    with pytest.raises(UsageError, match="Recipe has no field sed: `replace"):
        recipes.reach_short().model_copy(update={"sed": 1})
    assert recipes.reach_short().model_copy(update={"seed": 1}).seed == 1


def test_aliases_name_fields_that_there_are() -> None:
    def all_of(config: type[Config]) -> list[type[Config]]:
        return [config, *(each for kind in config.__subclasses__() for each in all_of(kind))]

    known = [config for config in all_of(Config) if config.aliases]
    assert len(known) > 5
    for config in known:
        assert config.aliases.keys() <= config.model_fields.keys(), config


def test_a_recipe_file_without_a_name_takes_the_files(tmp_path: Path) -> None:
    path = tmp_path / "my-arm.yaml"
    path.write_text("env: {kind: reach}\nclock: {total_timesteps: 1000}\n")
    assert recipes.find(str(path)).name == "my-arm"
    path.write_text("name: other\nenv: {kind: reach}\nclock: {total_timesteps: 1000}\n")
    assert recipes.find(str(path)).name == "other"
