"""`etude data add | merge | filter | clip`: new datasets that share the files of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from etude.cli.data import run as data_main
from etude.cli.main import main as cli
from etude.core.errors import EtudeError, UsageError
from etude.data.store.episodes import DamagedStore, EpisodeStore
from etude.data.store.manifest import MANIFEST, TABLE, Dataset, open_episodes
from etude.data.store.views import EpisodesOf
from etude.rl.offline import split


def write_demos(path: Path, lengths: tuple[int, ...], seed: int, task: str) -> Path:
    """A LIBERO file; odd demos fail."""
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        said = json.dumps({"language_instruction": task})
        file.create_group("data").attrs["problem_info"] = said
        for number, steps in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = rng.uniform(-1, 1, (steps, 7))
            demo["obs/image"] = rng.integers(0, 256, (steps, 8, 8, 3), np.uint8)
            demo["obs/joints"] = rng.normal(size=(steps, 7))
            if seed:
                demo["obs/more"] = rng.normal(size=(steps, 2))
            demo["dones"] = np.eye(steps, dtype=np.uint8)[-1]
            demo["rewards"] = demo["dones"][:] * (1 - number % 2)
    return path


@pytest.fixture
def bowls(tmp_path: Path) -> Path:
    file = write_demos(tmp_path / "bowls.hdf5", (9, 12, 15, 11), 0, "lift the bowl")
    data_main(["import", str(file), str(tmp_path / "bowls")])
    return tmp_path / "bowls"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    file = write_demos(tmp_path / "books.hdf5", (7, 8, 21), 1, "push the book")
    data_main(["import", str(file), str(tmp_path / "books")])
    return tmp_path / "books"


def run(*arguments: object) -> None:
    assert data_main([str(argument) for argument in arguments]) == 0


def blocks(path: Path) -> set[int]:
    """The inodes of all block files."""
    return {file.stat().st_ino for file in path.rglob("*.bin") if file.name != TABLE}


def same(one: Any, other: Any) -> None:
    """Two episodes, bit for bit."""
    for a, b in zip(one[0], other[0], strict=True):
        for x, y in zip(*(v.values() if isinstance(v, dict) else [v] for v in (a, b)), strict=True):
            np.testing.assert_array_equal(x, y)
    assert one[1] == other[1]


def test_a_merge_has_the_episodes_of_both_and_copies_no_step(
    bowls: Path, books: Path, tmp_path: Path
) -> None:
    run("merge", bowls, books, tmp_path / "all")
    merged, one, two = Dataset.open(tmp_path / "all"), open_episodes(bowls), open_episodes(books)
    assert blocks(tmp_path / "all") == blocks(bowls) | blocks(books)
    assert sorted(merged.geometry.observations) == ["image", "joints"]  # what both have
    for number in range(7):
        old = (
            one.episode(number)
            if number < 4
            else EpisodeStore.open(books, ["image", "joints"]).episode(number - 4)
        )
        same(merged.episode(number), old)
    assert merged.labels.tasks == ["lift the bowl"] * 4 + ["push the book"] * 3
    assert merged.labels.sources == list(range(7))
    np.testing.assert_array_equal(merged.returns, np.concatenate([one.returns, two.returns]))
    # Drawn from both at once, in an order of its own.
    places, offsets = np.array([6, 0, 5, 3, 6]), np.array([19, 7, 0, 2, 4])
    drawn = merged.transitions(places, offsets)
    for i, (place, offset) in enumerate(zip(places, offsets, strict=True)):
        steps, _ = merged.episode(int(place))
        np.testing.assert_array_equal(drawn.obs["image"][i], steps.obs["image"][offset])
        np.testing.assert_array_equal(drawn.next_obs["joints"][i], steps.next_obs["joints"][offset])
        assert drawn.truncated[i] == steps.truncated[offset]
    assert drawn.obs["joints"].ctypes.data % 64 == 0
    run("validate", tmp_path / "all")


def test_what_datasets_share_is_taken_once_and_stays_on_one_side(
    bowls: Path, tmp_path: Path
) -> None:
    run("clip", bowls, tmp_path / "short", "--stop", 5)
    run("filter", bowls, tmp_path / "good", "--success", "yes")
    run("merge", tmp_path / "good", bowls, tmp_path / "short", tmp_path / "all")
    data = Dataset.open(tmp_path / "all")
    assert len(data.shards) == 1
    names = data.labels.names
    assert names[:4] == ["demo_0", "demo_2", "demo_1", "demo_3"]  # each whole one once
    assert names[4:] == [f"demo_{n}[0:5]" for n in range(4)]
    assert data.labels.sources == [0, 1, 2, 3, 0, 2, 1, 3]
    training, held_out = split(data.returns, 0.25, data.labels.groups)
    assert not set(data.labels.groups[training]) & set(data.labels.groups[held_out])


def test_a_filter_asks_for_all_at_once(bowls: Path, books: Path, tmp_path: Path) -> None:
    run("merge", bowls, books, tmp_path / "all")
    run("filter", tmp_path / "all", tmp_path / "f", "--task", "*book", "--min-steps", 7)
    assert Dataset.open(tmp_path / "f").labels.names == ["demo_1", "demo_2"]
    assert blocks(tmp_path / "f") == blocks(books)  # the other shard is let go
    run("filter", tmp_path / "all", tmp_path / "g", "--max-return", 0.5, "--episodes", 2)
    assert Dataset.open(tmp_path / "g").labels.successes == [False, False]
    with pytest.raises(UsageError, match=r"None of 7 .*tasks are 'lift the bowl'"):
        run("filter", tmp_path / "all", tmp_path / "h", "--task", "*cup*")
    assert not (tmp_path / "h").exists()


def test_a_clip_is_a_part_of_an_episode(bowls: Path, tmp_path: Path) -> None:
    run("clip", bowls, tmp_path / "middle", "--start", 2, "--stop", -3)
    run("clip", tmp_path / "middle", tmp_path / "twice", "--start", 1, "--stop", 3)
    run("clip", bowls, tmp_path / "late", "--start", 10)
    old, middle = open_episodes(bowls), Dataset.open(tmp_path / "middle")
    assert middle.lengths.tolist() == [3, 6, 9, 5]
    for number, (first, last) in enumerate([(2, 5), (2, 8), (2, 11), (2, 7)]):
        whole, (steps, total) = old.episode(number)[0], middle.episode(number)
        np.testing.assert_array_equal(steps.actions, whole.actions[first:last])
        np.testing.assert_array_equal(steps.next_obs["image"], whole.next_obs["image"][first:last])
        assert (total, middle.labels.successes[number]) == (0.0, False)
        assert steps.truncated.tolist() == [False] * (last - first - 1) + [True]
        assert not steps.terminated.any()
    twice = Dataset.open(tmp_path / "twice").episode(2)[0]
    np.testing.assert_array_equal(twice.actions, old.episode(2)[0].actions[3:5])
    late = Dataset.open(tmp_path / "late")
    assert late.labels.names == ["demo_1[10:11]", "demo_2[10:14]"]
    assert late.labels.successes == [False, True]  # these have the end
    assert late.episode(1)[0].terminated.tolist() == [False, False, False, True]
    run("validate", tmp_path / "middle")


def test_more_files_are_added(bowls: Path, tmp_path: Path) -> None:
    more = write_demos(tmp_path / "more.hdf5", (6, 5), 2, "wipe the table")
    run("add", bowls, more, tmp_path / "grown")
    data = Dataset.open(tmp_path / "grown")
    assert data.num_episodes == 6
    assert data.labels.tasks[-1] == "wipe the table"
    assert {path.name for path in tmp_path.iterdir()} >= {"bowls", "grown"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_edit_stands_without_the_old_dataset(bowls: Path, tmp_path: Path) -> None:
    before = open_episodes(bowls).episode(2)
    run("filter", bowls, tmp_path / "some", "--min-steps", 10)
    for file in bowls.iterdir():
        file.unlink()
    bowls.rmdir()
    same(Dataset.open(tmp_path / "some").episode(1), before)
    (tmp_path / "some").rename(tmp_path / "moved")
    run("validate", tmp_path / "moved")


def test_damage_is_named(bowls: Path, tmp_path: Path) -> None:
    run("filter", bowls, tmp_path / "some", "--min-steps", 10)
    table = tmp_path / "some" / TABLE
    good = table.read_bytes()
    table.write_bytes(good[:-1] + b"\xff")
    with pytest.raises(DamagedStore, match=r"episodes\.bin is damaged"):
        Dataset.open(tmp_path / "some")
    table.write_bytes(good)
    manifest = json.loads((tmp_path / "some" / MANIFEST).read_text())
    del manifest["seal"]
    for wrong in ("../../etc", "0" * 64):
        manifest["shards"] = [wrong]
        (tmp_path / "some" / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises((DamagedStore, UsageError)):
            Dataset.open(tmp_path / "some")
    assert cli(["fsck", str(tmp_path / "some")]) != 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["merge", "a", "b"], "etude data merge DATASETS... OUT"),
        (["merge", "a", "b", "c"], "a is not a dataset of Etude: check the path"),
        (["filter", "bowls.hdf5", "c"], "import it first"),
        (["filter", "bowls", "bowls"], "exists already"),
        (["clip", "bowls", "c", "--start", "40"], "they have 8 to 14 steps"),
        (["add", "bowls", "c"], "etude data add DATASET PATHS... OUT"),
        (["import", "bowls", "c"], "`etude data merge` merges datasets"),
    ],
)
def test_mistakes(
    arguments: list[str],
    sentence: str,
    bowls: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EtudeError) as caught:
        data_main(arguments)
    assert sentence in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["bowls", "bowls.hdf5"]


def test_views_of_a_manifest_resume_only_on_itself(bowls: Path, tmp_path: Path) -> None:
    run("filter", bowls, tmp_path / "some", "--min-steps", 9)
    run("filter", bowls, tmp_path / "same", "--min-steps", 9)
    run("filter", bowls, tmp_path / "other", "--min-steps", 11)
    views = [
        EpisodesOf(data, np.arange(2))
        for data in (Dataset.open(tmp_path / n) for n in ("some", "same", "other"))
    ]
    views[1].load_state_dict(views[0].state_dict())
    with pytest.raises(EtudeError, match="not the data this run was started with"):
        views[2].load_state_dict(views[0].state_dict())
