"""The sentence of a task as an observation: stored, learned from, told, exported, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
import telling
from etude.api import Run
from etude.cli import main as cli
from etude.core.errors import UsageError
from etude.data.editing import read_embeddings
from etude.data.store.labels import Labels
from etude.data.store.log import DamagedStore
from etude.data.store.manifest import open_episodes
from etude.data.store.views import EpisodesOf, geometry_with_task, open_with_task
from etude.planning import recipes
from telling import LEFT, RIGHT

VECTORS = {LEFT: [0.25, -1.0, 0.5], RIGHT: [0.75, 2.0, 0.5], "stay": [0.0, 0.0, 1.0]}
SIDES = {LEFT: -1.0, RIGHT: 1.0}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return telling.demonstrations(tmp_path_factory.mktemp("sentences") / "sides")


@pytest.fixture(scope="module")
def embedded(dataset: Path) -> Path:
    """The same with vectors of its sentences, and of one more."""
    table, out = dataset.parent / "table.npz", dataset.parent / "embedded"
    np.savez(table, sentences=np.array([*VECTORS]), vectors=np.array([*VECTORS.values()]))
    assert cli.main(["data", "add-embeddings", str(dataset), str(table), str(out)]) == 0
    return out


def recipe_of(data: Path, name: str = "bc", updates: int = 150, **fields: Any) -> etude.Recipe:
    small = {
        "env": {"kind": "task", "task": f"{telling.__file__}:Sides", "sentence": RIGHT},
        "algorithm__dataset": str(data),
        "algorithm__batch_size": 64,
        "algorithm__train_batches": updates,
        "algorithm__learning_rate": 3e-3,
        "clock__epochs": 1,
        "clock__cycles": 1,
        "clock__iterations": 1,
        "evaluation__episodes": 8,
        "evaluation__num_envs": 8,
        "evaluation__envs_per_group": 8,
        "evaluation__final_episodes": 0,
    }
    if not {"policy", "policy__kind"} & fields.keys():
        small["policy__hidden"] = (32,)
    return recipes.find(name).replace(**small | fields)


def successes(run: Run) -> dict[str, float]:
    """The share of episodes that leave on the side that they are told, by the sentence."""
    return {
        sentence: run.evaluate(8, sentence=sentence, options={"side": side})["eval/success_rate"]
        for sentence, side in SIDES.items()
    }


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mlp", {"hidden": (32,)}),
        ("lstm", {"hidden": (32,), "units": 16}),
        ("act", {"chunk": 4, "width": 16, "layers": 1}),
        ("flow", {"chunk": 4, "width": 16, "layers": 1}),
    ],
)
def test_a_cloned_policy_does_what_it_is_told(
    kind: str, fields: dict[str, Any], embedded: Path, tmp_path: Path
) -> None:
    policy = {"kind": kind, "actor_reads": (), "critic_reads": (), **fields}
    run = etude.train(recipe_of(embedded, policy=policy), tmp_path / "run")
    assert run.recipe.policy.actor_reads == ("state", "task")
    assert successes(run) == {LEFT: 1.0, RIGHT: 1.0}


def test_without_the_sentence_neither_task_is_learned(dataset: Path, tmp_path: Path) -> None:
    env = {"kind": "task", "task": f"{telling.__file__}:Sides"}
    untold = recipe_of(dataset, env=env, policy__actor_reads=("state",))
    run = etude.train(untold, tmp_path / "run")
    for side in SIDES.values():
        assert run.evaluate(8, options={"side": side})["eval/success_rate"] == 0.0
    told = etude.train(recipe_of(dataset), tmp_path / "told")  # by a one-hot
    assert successes(told) == {LEFT: 1.0, RIGHT: 1.0}


@pytest.mark.parametrize("name", ["iql", "offline"])
def test_so_does_one_that_learned_from_rewards(name: str, embedded: Path, tmp_path: Path) -> None:
    fields: dict[str, Any] = {}
    if name == "offline":
        reads = ("state", "task")
        fields = {f"policy__{which}_reads": reads for which in ("actor", "critic")}
        fields |= {"rewards__network__reads": reads, "rewards__rrd_batch_size": 32}
        fields |= {"rewards__rrd_sample_size": 4, "algorithm__allow_equal_returns": True}
    run = etude.train(recipe_of(embedded, name, 200, **fields), tmp_path / "run")
    assert successes(run) == {LEFT: 1.0, RIGHT: 1.0}


def test_every_step_of_an_episode_has_the_vector_of_its_task(dataset: Path, embedded: Path) -> None:
    hot = {LEFT: [1.0, 0.0], RIGHT: [0.0, 1.0]}
    for path, vectors in ((dataset, hot), (embedded, VECTORS)):
        store = open_with_task(path, {"state", "task"})
        assert geometry_with_task(path).observations == store.geometry.observations
        plain = open_episodes(path)
        assert store.state_dict() == plain.state_dict()
        some = EpisodesOf(store, np.arange(3, 20))
        for number in range(3):
            wanted = np.array(vectors[store.labels.tasks[3 + number]], np.float32)
            steps, _ = some.episode(number)
            alone, _ = plain.episode(3 + number)
            for obs in (steps.obs, steps.next_obs):
                np.testing.assert_array_equal(obs["task"], np.tile(wanted, (len(obs["task"]), 1)))
            np.testing.assert_array_equal(steps.next_obs["state"], alone.next_obs["state"])
            places, offsets = np.full(2, number), np.arange(2)
            windows = some.windows(places, offsets, ("state", "task"), 1, 2, 3)
            assert windows.obs["task"].shape == (2, 4, len(wanted))
            assert (windows.obs["task"] == wanted).all()
        drawn = some.sample_observations(np.random.default_rng(0), 5, ("task",))["task"]
        assert {tuple(x) for x in drawn.tolist()} <= {tuple(x) for x in vectors.values()}


def test_embeddings_stay_with_a_dataset_that_is_edited(dataset: Path, embedded: Path) -> None:
    out = embedded.parent
    one = ["data", "filter", str(embedded), str(out / "left"), "--task", "*left"]
    assert cli.main(one) == 0
    assert open_episodes(out / "left").labels.embeddings == VECTORS
    merged = ["data", "merge", str(out / "left"), str(dataset), str(out / "merged")]
    assert cli.main(merged) == 0
    assert open_episodes(out / "merged").labels.embeddings == VECTORS
    with pytest.raises(UsageError, match="has two different embeddings"):
        Labels(embeddings={LEFT: [1.0]}).embed({LEFT: [2.0]})
    with pytest.raises(UsageError, match="1 and 2 numbers"):
        Labels(embeddings={LEFT: [1.0]}).embed({RIGHT: [2.0, 0.0]})
    document = Labels(embeddings={LEFT: [1.0]}).to_json()
    assert Labels.parse(document, 0, Path()).embeddings == {LEFT: [1.0]}
    for bad in ({LEFT: "no"}, {LEFT: [1e39]}, {LEFT: [1.0], RIGHT: []}, [1.0], {LEFT: [True]}):
        with pytest.raises(DamagedStore, match="embeddings"):
            Labels.parse({**document, "embeddings": bad}, 0, Path())


def test_tables_of_three_kinds(tmp_path: Path, dataset: Path) -> None:
    rows = [f"{sentence},{','.join(map(str, vector))}" for sentence, vector in VECTORS.items()]
    (tmp_path / "a.csv").write_text("\n".join(["sentence,x,y,z", *rows]))
    assert read_embeddings(tmp_path / "a.csv") == VECTORS
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    columns = {"sentence": [*VECTORS], "vector": [*VECTORS.values()]}
    parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
    assert read_embeddings(tmp_path / "a.parquet") == VECTORS
    for text, said in (("a,1\na,2", "twice"), ("a,1\nb,1,2", "table"), ("a,nan", "finite")):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(UsageError, match=said):
            read_embeddings(tmp_path / "b.csv")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said instead of doing it: one line."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert "\n" not in said
    return said


def test_the_policy_keeps_what_it_was_told(
    embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its contract, and of a run that goes on from it by PPO; another sentence is refused."""
    recipe = recipe_of(embedded, updates=2, policy__critic_reads=())
    run = etude.train(recipe, tmp_path / "run")
    known = {sentence: tuple(vector) for sentence, vector in VECTORS.items()}
    assert run.recipe.task.task_vector == known[RIGHT]
    assert run.policy().policy.sentences == known
    capsys.readouterr()
    said = refusal(capsys, "eval", run.path, "--env.sentence", "jump", "--trust")
    assert f"'jump' is unknown to {run.path}: '{LEFT}', '{RIGHT}', 'stay'." in said
    env = {**recipe.task.model_dump(), "sentence": "stay"}
    online = recipes.find("ppo").replace(
        env=env,
        policy=recipe.policy.model_copy(update={"actor_reads": ("state", "task")}),
        start_from=str(run.path),
        collector={"num_envs": 8, "envs_per_group": 8},
        algorithm__rollout_steps=8,
        algorithm__minibatch_size=64,
        clock={"total_timesteps": 64},
        evaluation__final_episodes=0,
        evaluation__every="1 epoch",
        evaluation__episodes=8,
        evaluation__num_envs=8,
        evaluation__envs_per_group=8,
    )
    later = etude.train(online, tmp_path / "ppo")
    assert later.recipe.task.task_vector == known["stay"]
    assert later.policy().policy.sentences == {"stay": known["stay"]}


def test_what_cannot_be_told_is_refused(dataset: Path, tmp_path: Path) -> None:
    task = {"kind": "task", "task": f"{telling.__file__}:Sides"}
    for env, said in (
        ({**task, "sentence": "jump"}, f"unknown to {dataset}: '{LEFT}', '{RIGHT}'"),
        (task, f"give one with --env.sentence \\('{LEFT}', '{RIGHT}'\\)"),
    ):
        with pytest.raises(UsageError, match=said):
            etude.plan(recipe_of(dataset, env=env))
    with pytest.raises(UsageError, match=r"The vector of the sentence .* is unknown"):
        etude.plan(recipes.find("ppo").replace(env={**task, "sentence": LEFT}))
    incomplete = tmp_path / "table.csv"
    incomplete.write_text(f"{LEFT},1,2")
    command = ["data", "add-embeddings", str(dataset), str(incomplete), str(tmp_path / "D")]
    assert cli.main(command) == 2
    assert not (tmp_path / "D").exists()


def test_an_export_lists_its_sentences(embedded: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    run = etude.train(recipe_of(embedded, updates=2), tmp_path / "run")
    assert cli.main(["export", str(run.path), "--to", str(tmp_path / "out"), "--trust"]) == 0
    document = json.loads((tmp_path / "out" / "policy.json").read_text())
    assert document["sentences"] == VECTORS
    assert document["observations"]["task"]["size"] == 3
