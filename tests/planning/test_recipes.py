"""Recipes: complete, frozen, found by name, refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import etude
import short_recipes
from etude.core.clock import Interval
from etude.core.errors import UsageError
from etude.planning import recipes
from toys import tiny_reach


@pytest.mark.parametrize("name", short_recipes.names())
def test_a_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    recipe = short_recipes.find(name)
    assert recipe.name == name
    assert name in short_recipes.SHORT or recipes.purpose(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipes.dump(recipe))
    assert recipes.find(str(path)) == recipe
    content = yaml.safe_load(path.read_text())
    assert set(content) == set(type(recipe).model_fields)


def test_recipes_cannot_be_changed_in_place() -> None:
    recipe = recipes.find("reach")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        recipe.clock.cycles = 3  # type: ignore[misc]


def test_every_field_has_its_help() -> None:
    def missing(model: type, prefix: str) -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            if hasattr(field.annotation, "model_fields"):
                found += missing(field.annotation, f"{prefix}{name}.")
            if not field.description and name != "kind":
                found.append(f"{prefix}{name}")
        return found

    assert missing(recipes.Recipe, "") == []


@pytest.mark.parametrize(("given", "meant"), [("reech", "reach"), ("halfcheeta", "halfcheetah")])
def test_an_unknown_name_is_told_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{meant}'"):
        recipes.find(given)
    with pytest.raises(UsageError, match="etude list"):
        recipes.find("zzz")
    with pytest.raises(UsageError, match="no file"):
        recipes.find("missing.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "YAML"),
        ("3", "must be a section of fields"),
        ("name: x", "clock"),
        (recipes.dump(tiny_reach()) + "speed: 3\n", "speed"),
        (recipes.dump(tiny_reach()).replace("seed: 0", "seed: -1"), "seed"),
        (recipes.dump(tiny_reach()).replace("gamma: 0.95", "gamma: .nan"), "algorithm.gamma"),
        (recipes.dump(tiny_reach()).replace("every: 1 cycle", "every: often"), "checkpoint.every"),
        (recipes.dump(tiny_reach()).replace("kind: reach", "kind: fly"), "env"),
    ],
)
def test_a_bad_file_is_refused_by_the_name_of_the_field(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        recipes.find(str(path))
    assert said in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_bad_field_of_a_task_is_named_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipes.dump(tiny_reach()).replace("tolerance: 0.02", "tolerance: -1"))
    with pytest.raises(UsageError, match=r"env\.tolerance"):
        recipes.find(str(path))


def test_files_from_before_ray_are_read_as_they_were_meant(tmp_path: Path) -> None:
    content = tiny_reach().model_dump(mode="json")
    for name in ("kind", "actors", "address", "deadline", "allow_inexact"):
        del content["collector"][name]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    assert recipes.find(str(path)) == tiny_reach()


@pytest.mark.parametrize("name", ["pick-place", "pick-place-original", "pick-place-sac"])
def test_pick_place_is_evaluated_as_often_as_whole_iterations_allow(name: str) -> None:
    """Every 5,000 steps, or the nearest multiple of what an iteration collects; in one batch."""
    recipe = recipes.find(name)
    loops = recipe.algorithm.loops(recipe, recipe.algorithm.geometry(recipe))
    every = Interval.parse(recipe.evaluation.every)
    assert every.unit == "cycles"
    size = loops.steps_per_iteration
    between = every.count * loops.iterations_per_cycle * size
    assert between == min((n * size for n in range(1, 100)), key=lambda steps: abs(steps - 5_000))
    assert recipe.evaluation.num_envs == recipe.evaluation.envs_per_group
    assert recipe.evaluation.final_episodes == 100


@pytest.mark.parametrize("name", ["pick-place", "pick-place-original", "pick-place-sac"])
def test_gains_of_a_potential_are_discounted_as_the_learner_discounts(name: str) -> None:
    recipe = recipes.find(name)
    assert recipe.task.shaping_discount() == recipe.algorithm.gamma  # type: ignore[union-attr]
    other = recipe.model_copy(
        update={"algorithm": recipe.algorithm.model_copy(update={"gamma": 0.9})}
    )
    with pytest.raises(UsageError, match=r"Use --env\.discount 0\.9"):
        etude.plan(other)
    tied = other.task.model_copy(update={"discount": 0.9})
    assert etude.plan(other.model_copy(update={"env": tied})).recipe == name
    # A sum of rewards has no discount to agree on, and neither has a reward without a potential.
    for change in ({"episodic": True}, {"shaping": 0.0}):
        free = other.task.model_copy(update=change)
        assert etude.plan(other.model_copy(update={"env": free})).recipe == name
