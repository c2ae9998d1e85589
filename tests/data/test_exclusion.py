"""Excluded episodes: what is learned from, the dataset's hash, runs that use it, and undoing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.api import Interrupted, resume, train
from etude.cli.main import main as cli
from etude.core.contracts import BatchMetrics
from etude.core.errors import EtudeError, UsageError
from etude.data import editing
from etude.data.importing import ABOUT
from etude.data.store.files import EXCLUDED
from etude.data.store.log import DamagedStore
from etude.data.store.manifest import examine, open_episodes, open_whole
from etude.data.store.views import EpisodesOf, open_with_task
from etude.training.loop import Callback, Context
from toys import tiny_bc, toy_dataset


def run(*arguments: object) -> None:
    assert cli(["data", *map(str, arguments)]) == 0


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return toy_dataset(tmp_path / "toys", 12)


def merged(tmp_path: Path) -> Path:
    """A dataset of two shards, with clips beside their episodes."""
    first = toy_dataset(tmp_path / "first", 5)
    second = toy_dataset(tmp_path / "second", 4, seed=1)
    run("clip", first, tmp_path / "cut", "--stop", 4)
    run("merge", first, tmp_path / "cut", second, tmp_path / "merged")
    return tmp_path / "merged"


@pytest.mark.parametrize("made", ["store", "manifest"])
def test_excluded_episodes_are_never_drawn(made: str, tmp_path: Path) -> None:
    path = toy_dataset(tmp_path / "toys", 12) if made == "store" else merged(tmp_path)
    whole = open_whole(path)
    lengths, returns = whole.lengths, whole.returns
    editing.exclude(path, [1, 10])
    data = open_episodes(path)
    excluded = [1, 10] if made == "store" else [1, 6, 10]  # 6 was cut from 1
    kept = np.delete(np.arange(len(lengths)), excluded)
    assert data.num_episodes == len(kept)
    assert np.array_equal(data.lengths, lengths[kept])
    assert np.array_equal(data.returns, returns[kept])
    assert data.labels.names == [whole.labels.names[n] for n in kept.tolist()]
    for place, number in enumerate(kept.tolist()):
        assert np.array_equal(data.episode(place)[0].actions, whole.episode(number)[0].actions)
    bad = np.concatenate([whole.episode(number)[0].actions for number in excluded])
    drawn = EpisodesOf(data, np.arange(len(kept))).sample_actions(np.random.default_rng(0), 2_000)
    assert not (drawn[:, None] == bad).all(-1).any()


def test_the_list_is_part_of_the_hash_and_undone_without_a_trace(dataset: Path) -> None:
    files = {file.name: file.read_bytes() for file in dataset.iterdir()}
    before = open_episodes(dataset).seal_sha256
    assert editing.exclude(dataset, [7, 3]).tolist() == [3, 7]
    both = open_episodes(dataset).seal_sha256
    assert editing.exclude(dataset, [3], undo=True).tolist() == [7]
    one = open_episodes(dataset).seal_sha256
    assert editing.exclude(dataset, [3]).tolist() == [3, 7]
    assert open_episodes(dataset).seal_sha256 == both
    assert len({before, one, both}) == 3
    assert open_whole(dataset).seal_sha256 == before
    assert not editing.exclude(dataset, [3, 7], undo=True).size
    assert open_episodes(dataset).seal_sha256 == before
    assert {file.name: file.read_bytes() for file in dataset.iterdir()} == files


def test_clips_stay_with_their_episode_in_the_split(tmp_path: Path) -> None:
    path = merged(tmp_path)
    editing.exclude(path, [0])
    data = open_episodes(path)
    named = [name.partition("[")[0] for name in data.labels.names]
    groups = data.labels.groups.tolist()
    for name, group in zip(named[:8], groups[:8], strict=True):
        assert named[group] == name
    assert groups == [named.index(name) for name in named[:8]] + [8, 9, 10, 11][: len(groups) - 8]


def test_edits_and_exports_leave_them_out(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("exclude", dataset, 0, 5)
    assert "10 of 12 episodes, excluded are 0, 5." in capsys.readouterr().out
    run("inspect", dataset)
    assert "2 more episodes are excluded" in capsys.readouterr().out
    run("validate", dataset)
    run("filter", dataset, tmp_path / "good")
    assert f"2 excluded episodes of {dataset} are left out" in " ".join(
        capsys.readouterr().out.split()
    )
    made = open_episodes(tmp_path / "good")
    assert made.num_episodes == 10
    assert not list((tmp_path / "good").rglob(EXCLUDED))
    run("export", dataset, tmp_path / "files", "--format", "minari")
    run("import", tmp_path / "files", tmp_path / "again")
    assert open_episodes(tmp_path / "again").num_episodes == 10
    run("include", dataset)
    assert open_episodes(dataset).num_episodes == 12


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [([12], "no episode 12: they are numbered 0 to 11"), (range(12), "all 12 episodes")],
)
def test_mistakes(numbers: Any, sentence: str, dataset: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        editing.exclude(dataset, numbers)
    assert not (dataset / EXCLUDED).exists()


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"of": "0" * 64}, "list of another dataset"),
        ({"episodes": [3, 12]}, "does not have"),
        ({"episodes": [4, 3]}, "does not have"),
        ({"episodes": [3, 3]}, "does not have"),
        ({"episodes": [True]}, "does not have"),
        ({"episodes": []}, "does not have"),
        ({"episodes": "3"}, "does not list"),
    ],
)
def test_a_list_that_does_not_fit_is_damage(
    changed: dict[str, Any], fault: str, dataset: Path
) -> None:
    from etude.data.store.files import write_json
    from etude.runs import files

    editing.exclude(dataset, [3])
    document = json.loads((dataset / EXCLUDED).read_text())
    del document["seal"]
    write_json(dataset / EXCLUDED, document | changed, files.current())
    with pytest.raises(DamagedStore, match=fault):
        open_episodes(dataset)
    assert fault in examine(dataset)[dataset / EXCLUDED]
    editing_by_hand = (dataset / EXCLUDED).read_text().replace("etude", "étude")
    (dataset / EXCLUDED).write_text(editing_by_hand)
    with pytest.raises(DamagedStore):
        open_episodes(dataset)


@pytest.mark.parametrize("edit", ["exclude", "include"])
def test_refused_while_a_run_learns_from_it_and_noticed_before_its_next_save(
    edit: str, dataset: Path
) -> None:
    if edit == "include":
        editing.exclude(dataset, [2])
    data = open_with_task(dataset, {"state"})
    other = open_with_task(dataset, {"state"})  # runs do not keep each other away
    view = EpisodesOf(data, np.arange(data.num_episodes))
    with pytest.raises(UsageError, match="in use by a training"):
        editing.exclude(dataset, [2], undo=edit == "include")
    view.check_unchanged()
    other.close()
    data.close()
    editing.exclude(dataset, [2], undo=edit == "include")  # as if from another machine
    with pytest.raises(DamagedStore, match=f"{EXCLUDED} was changed while the dataset was in use"):
        view.check_unchanged()
    editing.exclude(dataset, [2], undo=edit == "exclude")
    view.check_unchanged()


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "final" / "policy" / "arrays.safetensors").read_bytes()


class Stop(Callback):
    """Asks the run to stop after its first iteration."""

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if context.clock.now.iterations == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_training_draws_others_and_resumes_on_its_own_list_only(tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("whole", "some", "same")}
    recipe = tiny_bc(tmp_path, "act", 2, 1, "never")
    data = tmp_path / "data"
    train(recipe, runs["whole"])
    editing.exclude(data, [0, 4])
    with pytest.raises(Interrupted):
        train(recipe, runs["some"], callbacks=[Stop()])
    editing.exclude(data, [0, 4], undo=True)
    with pytest.raises(EtudeError, match=r"not the data.*etude data exclude"):
        resume(runs["some"])
    editing.exclude(data, [4])
    with pytest.raises(EtudeError, match=r"not the data.*etude data include"):
        resume(runs["some"])
    editing.exclude(data, [0])
    resume(runs["some"])
    # The same weights as from a dataset in which these episodes never were.
    editing.write(editing.select([data]), tmp_path / "filtered", "without them")
    train(recipe.replace(algorithm__dataset=str(tmp_path / "filtered")), runs["same"])
    assert weights(runs["same"]) == weights(runs["some"]) != weights(runs["whole"])
    editing.exclude(data, [0, 4], undo=True)
    train(recipe, tmp_path / "again")
    assert weights(tmp_path / "again") == weights(runs["whole"])


def test_the_list_of_a_shard_does_not_travel(dataset: Path, tmp_path: Path) -> None:
    editing.exclude(dataset, [1])
    run("merge", dataset, toy_dataset(tmp_path / "more", 3, seed=2), tmp_path / "both")
    assert open_episodes(tmp_path / "both").num_episodes == 14
    shard = next((tmp_path / "both" / "shards").iterdir())
    assert {ABOUT, EXCLUDED}.isdisjoint(os.listdir(shard))
