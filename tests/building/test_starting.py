"""Runs that begin with what another learned, and runs that get a larger budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude.api import resume, train
from etude.building.build import build, start_policy
from etude.building.resuming import extend
from etude.core.errors import UsageError
from etude.core.ranks import Alone
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.planning.resolve import resolve
from etude.rollout.placement import Placement
from etude.runs import checkpoint
from etude.runs.folder import RunFolder
from toys import changed, tiny_reach


def from_run(recipe: Recipe, path: Path) -> Recipe:
    return recipe.model_copy(update={"start_from": str(path)})


def begun(recipe: Recipe, folder: Path) -> Any:
    """The algorithm of a run that has not yet taken a step."""
    parts = build(resolve(recipe), RunFolder.create(folder, recipes.dump(recipe), "", {}, {}))
    start_policy(recipe, parts.algorithm)
    parts.close()
    return parts.algorithm


def tiny_off_policy(kind: str) -> Recipe:
    return changed(
        recipes.find(kind),
        env={"id": "Pendulum-v1", "kwargs": {"max_episode_steps": 20}},
        policy={"hidden": (8,)},
        collector={"num_envs": 2, "envs_per_group": 2, "threads": 1},
        algorithm={"warmup_steps": 40, "capacity": 400, "train_batches": 4, "batch_size": 16},
        clock={"total_timesteps": 400, "cycles": 2, "iterations": 1},
        evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2, "every": "1 epoch"},
    )


def test_a_value_function_comes_with_the_scale_of_its_returns(tmp_path: Path) -> None:
    """Without it every value is wrong by the ratio of the two scales."""
    first = train(tiny_reach(3), tmp_path / "first")
    learned = begun(first.recipe, tmp_path / "same")
    ppo = begun(from_run(first.recipe, first.path), tmp_path / "second")
    newest = max((first.path / "checkpoints").glob("0*"))
    arrays = etude.load_policy(newest).policy.state_dict()
    for name, array in ppo.policy.state_dict().items():
        assert torch.equal(array, arrays[name]), name
    assert float(ppo.scaler.moments["count"]) > 0
    rewards = np.ones((1, 1), np.float32)
    assert ppo.scaler.scale(rewards) != learned.scaler.scale(rewards)
    assert not ppo.scaler.running.any()  # the rows begin new episodes
    assert torch.equal(ppo.initial, ppo.flat.data)
    assert "value function" in etude.plan(from_run(first.recipe, first.path)).notes[0]


def test_from_a_policy_alone_the_value_function_begins_anew(tmp_path: Path) -> None:
    first = train(tiny_reach(3), tmp_path / "first")
    policy = max((first.path / "checkpoints").glob("0*")) / "policy"
    recipe = from_run(first.recipe, policy)
    ppo, fresh = begun(recipe, tmp_path / "second"), begun(first.recipe, tmp_path / "fresh")
    arrays = etude.load_policy(policy).policy.state_dict()
    for name, array in ppo.policy.state_dict().items():
        expected = fresh.policy.state_dict() if name.startswith("critic.") else arrays
        assert torch.equal(array, expected[name]), name
    assert float(ppo.scaler.moments["count"]) == 0
    assert "start from scratch" in etude.plan(recipe).notes[0]


@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_critics_come_along_and_the_warm_up_acts_by_the_policy(kind: str, tmp_path: Path) -> None:
    recipe = tiny_off_policy(kind)
    first = train(recipe, tmp_path / "first")
    agent, fresh = (
        begun(from_run(recipe, first.path), tmp_path / "second"),
        begun(recipe, tmp_path / "fresh"),
    )
    old = build(resolve(recipe), first.folder)
    assert old.loop.saver.restore(old.loop.clock, lambda text: None)
    old.close()
    for name in ("critics", "critic_target", *(["actor_target"] if kind == "td3" else [])):
        assert torch.equal(agent.state_dict()[name], old.algorithm.state_dict()[name]), name
        assert not torch.equal(agent.state_dict()[name], fresh.state_dict()[name]), name
    if kind == "sac":
        assert torch.equal(agent.log_alpha, old.algorithm.log_alpha)
    clock = build(resolve(recipe), RunFolder.create(tmp_path / "clock", "", "", {}, {})).loop.clock
    assert bool(fresh.broadcast(clock).policy["explore"])
    assert not bool(agent.broadcast(clock).policy["explore"])
    # After a resume in the middle of the warm-up too.
    fresh.load_state_dict(agent.state_dict())
    assert not bool(fresh.broadcast(clock).policy["explore"])


def test_a_larger_budget_says_what_its_schedules_do(tmp_path: Path) -> None:
    recipe = changed(tiny_reach(4), algorithm={"learning_rate": 1e-3, "final_learning_rate": 0.0})
    run = train(recipe, tmp_path / "run")
    steps = run.rows()[-1]["timesteps"]
    said: list[str] = []
    resume(run.path, total_timesteps=2 * steps, say=said.append)
    (note,) = [text for text in said if "budget grows" in text]
    assert f"from {steps:,} to {2 * steps:,} steps at step {steps:,}" in note
    assert "learning_rate 0 becomes 0.0005" in note
    assert note in json.loads((run.path / "plan.json").read_text())["notes"]
    assert note in " ".join((run.path / "plan.txt").read_text().split())
    # A row's rate is that of its last iteration, here the 6th of 8.
    assert etude.Run(run.path).rows()[2]["train/learning_rate"] == pytest.approx(1e-3 * (1 - 5 / 8))
    # Nothing is scheduled where the rate stays as it is.
    constant = changed(recipe, algorithm={"final_learning_rate": 1.0})
    run = train(constant, tmp_path / "constant")
    said.clear()
    resume(run.path, total_timesteps=2 * steps, say=said.append)
    assert any("none of them jumps" in text for text in said)


def test_a_larger_budget_does_not_keep_where_rollouts_run_this_time(tmp_path: Path) -> None:
    run = train(tiny_reach(2), tmp_path / "run")
    steps = run.rows()[-1]["timesteps"]
    resume(run.path, total_timesteps=2 * steps, collector=Placement(threads=3))
    kept = etude.Run(run.path).recipe
    assert kept.clock.total_timesteps == 2 * steps
    assert kept.collector == run.recipe.collector
    with pytest.raises(UsageError, match="already planned for 1,024 steps"):
        resume(run.path, total_timesteps=2 * steps)


def test_a_rank_that_comes_late_to_a_larger_budget_takes_it_too(tmp_path: Path) -> None:
    """The first rank may have written the longer recipe before another one gets there."""
    run = train(tiny_reach(2), tmp_path / "run")
    longer = changed(run.recipe, clock={"total_timesteps": 1_024})
    run.folder.recipe.write_text(recipes.dump(longer))
    clock = build(resolve(longer), run.folder).loop.clock

    class Second(Alone):
        is_first = False

    said: list[str] = []
    extend(resolve(longer), clock, run.folder, Second(), said.append)
    assert clock.loops.iterations == 4
    assert said == []


def test_a_start_is_pinned_to_a_checkpoint(tmp_path: Path) -> None:
    """The run it was taken from may go on, and this one must still start from the same."""
    first = train(tiny_reach(2), tmp_path / "first")
    second = train(from_run(tiny_reach(2), first.path), tmp_path / "second")
    pinned = Path(second.recipe.start_from or "")
    assert pinned == max((first.path / "checkpoints").glob("0*")).resolve()
    resume(first.path, total_timesteps=1_024)
    assert max((first.path / "checkpoints").glob("0*")).resolve() != pinned
    again = train(second.recipe, tmp_path / "again")
    assert again.fingerprint() == second.fingerprint()


def test_a_value_function_of_other_rewards_begins_anew(tmp_path: Path) -> None:
    """Whether rewards are scaled must agree, or every value would be in the wrong unit."""
    raw = tiny_reach(2, algorithm={"normalise_rewards": False})
    first = train(raw, tmp_path / "first")
    scaled = changed(raw, algorithm={"normalise_rewards": True})
    kept, anew, fresh = (
        begun(from_run(raw, first.path), tmp_path / "kept"),
        begun(from_run(scaled, first.path), tmp_path / "anew"),
        begun(scaled, tmp_path / "fresh"),
    )
    name = next(n for n in kept.policy.state_dict() if n.startswith("critic."))
    arrays = [x.policy.state_dict()[name] for x in (kept, anew, fresh)]
    assert torch.equal(arrays[1], arrays[2])
    assert not torch.equal(arrays[0], arrays[2])


def test_a_run_that_starts_from_another_learns_from_its_first_iteration(tmp_path: Path) -> None:
    """The normaliser has statistics already."""
    first = train(tiny_reach(2), tmp_path / "first")
    recipe = from_run(tiny_reach(3), first.path)
    plan, run = etude.plan(recipe), train(recipe, tmp_path / "second")
    assert plan.counts["updates"] == 3 * 8 == run.summary()["counts"]["updates"]
    assert not any("only collect" in note for note in plan.notes)


def test_a_checkpoint_of_another_version_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = train(tiny_reach(2), tmp_path / "run")
    path = max((run.path / "checkpoints").glob("0*"))
    policy, contract, training = checkpoint.load_training(path)
    del training["board"]["cycle"]["episodes"]["sums"]
    shutil.rmtree(path)
    checkpoint.save(run.path / "checkpoints", int(path.name), (policy, contract), training)
    with pytest.raises(UsageError, match=r"another version of Etude, .*state of 'board' does not"):
        resume(run.path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy__hidden": (8, 9)}, "another network than this recipe: hidden layers (64, 64) of"),
        ({"policy__activation": "relu"}, 'activation "tanh" of the run against "relu" of the rec'),
        ({"policy__hidden": (8,), "policy__activation": "relu"}, "of the recipe, and 1 more. Give"),
        (
            {"policy__units": 64},
            "another network than this recipe: units 128 of the run against 64",
        ),
    ],
)
def test_a_policy_of_other_layers_is_refused_by_the_difference(
    fields: dict[str, Any], words: str, starting_point: Path
) -> None:
    recipe = from_run(tiny_reach(2), starting_point).replace(**fields)
    with pytest.raises(UsageError) as refused:
        etude.plan(recipe)
    assert words in str(refused.value)
    if fields == {"policy__hidden": (8, 9)}:
        assert "(64, 64) of the run against (8, 9) of the recipe." in str(refused.value)


@pytest.fixture(scope="module")
def starting_point(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_reach(1), tmp_path_factory.mktemp("start") / "run").path
