"""Kill -9 anywhere and resume: the result is that of a run nobody touched, in every bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import short_recipes
import telling
from etude.api import Run, train
from etude.planning import recipes
from etude.planning.recipes import Recipe
from run_hash import run_hash
from toys import changed, tiny_bc, tiny_motions, tiny_offline, tiny_reach, tiny_reward_only

EVERYTHING = "reach-at-scale-short"
"""LSTM, priorities, collection ahead and two shards at once."""
DRIVER = Path(__file__).parent / "lib" / "kill_driver.py"
GATE, ROOT = "gates.exact.exact_resume", Path(__file__).parents[1]


def killed_runs(recipe: Recipe, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill a recipe's runs so often; all that complete must equal the untouched one."""
    file = folder / "recipe.yaml"
    file.write_text(recipes.dump(recipe))
    command = [sys.executable, str(DRIVER), str(file), str(folder), str(kills), str(seed)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    untouched, *others = map(Path, result["runs"])
    expected, whole = run_hash(untouched), Run(untouched)
    assert others
    for other in others:
        assert run_hash(other) == expected
        assert Run(other).fingerprint() == whole.fingerprint()
        assert Run(other).summary() == whole.summary()
    return dict(result["hits"])


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    recipe = tiny_reach(
        24,
        collector={"num_envs": 64, "envs_per_group": 16},
        clock={"total_timesteps": 24 * 512},
        evaluation={"every": "1 cycle"},
    )
    hits = killed_runs(recipe, tmp_path, kills=10, seed=1)
    assert sum(hits.values()) == 10
    assert len(hits) >= 3  # not always in the same place
    assert hits.keys() & {"save", "test"}


@pytest.mark.rotated
def test_fresh_interpreters_with_other_hash_seeds_too(tmp_path: Path) -> None:
    """Killed also while the folder is made and while a checkpoint is restored."""
    recipe = tiny_reach(12, clock={"total_timesteps": 12 * 256})
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipe))
    command = [sys.executable, "-m", GATE, "--recipe", str(tmp_path / "recipe.yaml"), "--kills=5"]
    command += ["--kills-per-run=5", "--chains=1", f"--json={tmp_path / 'result.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "result.json").read_text())["counts"]
    assert counts["kills"] == 5
    assert counts["kills in creating"] >= 1
    assert counts["equal runs"] >= 1


@pytest.mark.rotated
def test_a_gymnasium_environment_too(tmp_path: Path) -> None:
    recipe = changed(
        recipes.find("ppo"),
        algorithm={"update_epochs": 2, "rollout_steps": 32},
        clock={"total_timesteps": 12 * 512, "iterations": 2, "cycles": 1},
        evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 4},
    )
    hits = killed_runs(recipe, tmp_path, kills=2, seed=2)
    assert sum(hits.values()) == 2


@pytest.mark.parametrize(
    "name",
    [
        # Curriculum and randomisation.
        pytest.param("pick-place-short", marks=pytest.mark.rotated),
        pytest.param("imitate-walk-short", marks=pytest.mark.rotated),  # many clips
        pytest.param(EVERYTHING, marks=pytest.mark.rotated),
        # AMP, its replay, LSTM, curriculum, two shards, lag.
        pytest.param("amp-walk-short", marks=pytest.mark.rotated),
        # Randomised, late, pushed, on rough ground with a curriculum.
        pytest.param("walk-go1-short", marks=pytest.mark.rotated),
        pytest.param("episodic-short", marks=pytest.mark.slow),  # SAC, its replay, learned rewards
    ],
)
def test_recipes_with_all_that_has_state_too(name: str, tmp_path: Path) -> None:
    hits = killed_runs(short_recipes.find(name), tmp_path, kills=5, seed=3)
    assert sum(hits.values()) == 5


@pytest.mark.rotated
def test_a_curriculum_over_motions_too(tmp_path: Path) -> None:
    """With an LSTM, one iteration ahead: 6 times all rows begin anew."""
    recipe = tiny_motions(1, clock={"total_timesteps": 12 * 256})
    hits = killed_runs(recipe, tmp_path, kills=2, seed=5)
    assert sum(hits.values()) == 2


@pytest.mark.rotated
def test_learning_from_a_dataset_too(tmp_path: Path) -> None:
    recipe = tiny_reward_only(tmp_path, 12, 4, "2 epochs")
    hits = killed_runs(recipe, tmp_path, kills=5, seed=4)
    assert sum(hits.values()) == 5


@pytest.mark.rotated
def test_a_policy_learned_from_a_dataset_too(tmp_path: Path) -> None:
    recipe = tiny_offline(tmp_path, 12, 4, "2 epochs")
    hits = killed_runs(recipe, tmp_path, kills=5, seed=5)
    assert sum(hits.values()) == 5


@pytest.mark.parametrize(
    "kind",
    [pytest.param("lstm", marks=pytest.mark.slow), pytest.param("flow", marks=pytest.mark.rotated)],
)
def test_a_cloned_policy_too(kind: str, tmp_path: Path) -> None:
    hits = killed_runs(tiny_bc(tmp_path, kind, 8, 4, "2 epochs"), tmp_path, kills=5, seed=6)
    assert sum(hits.values()) == 5


@pytest.mark.rotated
def test_a_policy_that_is_told_a_sentence_too(tmp_path: Path) -> None:
    """It reads `task`, in the dataset and in the environment that it is evaluated in."""
    recipe = recipes.find("bc").replace(
        env={"kind": "task", "task": f"{telling.__file__}:Sides", "sentence": telling.RIGHT},
        policy__hidden=(16,),
        algorithm__dataset=str(telling.demonstrations(tmp_path / "sides")),
        algorithm__batch_size=32,
        algorithm__train_batches=8,
        clock={"epochs": 8, "cycles": 1, "iterations": 2},
        evaluation__episodes=8,
        evaluation__num_envs=8,
        evaluation__envs_per_group=8,
        evaluation__final_episodes=0,
    )
    hits = killed_runs(recipe, tmp_path, kills=5, seed=7)
    assert sum(hits.values()) == 5


def test_memory_priorities_and_lag_in_two_shards_are_one_recipe() -> None:
    recipe = short_recipes.find(EVERYTHING)
    assert recipe.policy.kind == "lstm"
    assert recipe.algorithm.sampling == "prioritised"
    assert recipe.algorithm.horizon < recipe.algorithm.rollout_steps
    assert (recipe.collector.lag, recipe.learner.shards) == (1, 2)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fingerprint of everything at once, on one thread."""
    return fingerprint(tmp_path_factory.mktemp("everything"), threads=1)


def fingerprint(folder: Path, threads: int) -> dict[str, str]:
    recipe = changed(
        short_recipes.find(EVERYTHING),
        collector={"threads": threads},
        clock={"total_timesteps": 5 * 2_048},
    )
    run = train(recipe, folder / "run")
    return {**run_hash(run.path), **run.fingerprint()}


@pytest.mark.rotated
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_and_time_change_nothing_with_everything_on(
    threads: int, everything: dict[str, str], tmp_path: Path
) -> None:
    assert fingerprint(tmp_path, threads) == everything


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("name", "counts"), [("pick-place-short", (1, 4)), ("walk-go1-short", (1, 2, 4))]
)
def test_threads_change_nothing_in_a_randomised_task(
    name: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    hashes = []
    for threads in counts:
        recipe = changed(
            short_recipes.find(name),
            collector={"threads": threads, "engine_threads": threads},
            clock={"total_timesteps": 2_048},
        )
        hashes.append(run_hash(train(recipe, tmp_path / str(threads)).path))
    assert all(each == hashes[0] for each in hashes)


@pytest.mark.slow
def test_collector_threads_change_nothing(tmp_path: Path) -> None:
    hashes = {}
    for threads in (1, 2, 4):
        recipe = tiny_reach(4, collector={"threads": threads, "engine_threads": 1 + threads // 4})
        hashes[threads] = run_hash(train(recipe, tmp_path / str(threads)).path)
    assert hashes[1] == hashes[2] == hashes[4]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_every_number_of_shards_is_reproducible(shards: int, tmp_path: Path) -> None:
    recipe = tiny_reach(3, learner={"shards": shards})
    one, two = (run_hash(train(recipe, tmp_path / name).path) for name in ("one", "two"))
    assert one == two


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, two = (
        run_hash(train(tiny_reach(2).model_copy(update={"seed": s}), tmp_path / f"{s}").path)
        for s in (0, 1)
    )
    assert one["policy"] != two["policy"]
    assert one["collector"] != two["collector"]
    assert one["rows"] != two["rows"]
