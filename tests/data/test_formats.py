"""Datasets in the layouts of other systems, written and read again."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etude
from etude.cli.data import run as data_main
from etude.core.contracts import ArraySpec
from etude.core.errors import EtudeError, UsageError
from etude.core.limited import Limits
from etude.data.formats.base import FORMATS, DataError
from etude.data.formats.lerobot import LeRobotFormat
from etude.data.formats.opening import open_dataset, scan
from etude.data.importing import finish, new_store
from etude.data.store.episodes import DamagedStore, EpisodeStore
from etude.data.store.labels import Labels

TASKS = ("lift the bowl", "push the book")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes with smooth pictures, one of them truncated."""
    path, rng = tmp_path_factory.mktemp("made") / "data", np.random.default_rng(0)
    fields = {
        "obs/state": ArraySpec((4,), "float32"),
        "obs/grid": ArraySpec((2, 3), "float32"),
        "obs/camera": ArraySpec((32, 48, 3), "uint8"),
        "actions": ArraySpec((3,), "float32"),
    }
    rows, columns = np.mgrid[0:32, 0:48]
    labels = Labels()
    with new_store(path, fields, 20) as store:
        for number, steps in enumerate((7, 12, 9)):
            time = np.arange(steps + 1)[:, None, None]
            pictures = [4 * columns + 6 * time, 5 * rows + 0 * time, 0 * rows + 9 * time]
            obs = {
                "state": rng.normal(size=(steps + 1, 4)).astype(np.float32),
                "grid": rng.normal(size=(steps + 1, 2, 3)).astype(np.float32),
                "camera": np.stack(np.broadcast_arrays(*pictures), -1).clip(0, 255).astype("u1"),
            }
            actions = rng.normal(size=(steps, 3)).astype(np.float32)
            rewards = np.zeros(steps, np.float32)
            rewards[-1] = number != 1
            store.append_episode(obs, actions, rewards, terminated=number != 2)
            labels.add(f"take {number}", success=number != 1, task=TASKS[number % 2])
        finish(store, {}, labels)
    return path


def joints_only(path: Path, episodes: int) -> Path:
    """Episodes of numbers alone."""
    fields = {"obs/joints": ArraySpec((3,), "float32"), "actions": ArraySpec((2,), "float32")}
    rng, labels = np.random.default_rng(0), Labels()
    with new_store(path, fields, 20) as store:
        for number in range(episodes):
            steps = int(rng.integers(2, 20))
            joints = rng.normal(size=(steps + 1, 3)).astype(np.float32)
            actions = rng.normal(size=(steps, 2)).astype(np.float32)
            store.append_episode({"joints": joints}, actions, np.zeros(steps, "f4"), True)
            labels.add(f"take {number}")
        finish(store, {}, labels)
    return path


def check_same(old: Path, new: Path, lossy: float = 0.0) -> None:
    """Every episode, bit for bit; pictures may differ by `lossy` on average."""
    one, two = EpisodeStore.open(old), EpisodeStore.open(new)
    assert one.num_episodes == two.num_episodes
    for number in range(one.num_episodes):
        (a, total), (b, other) = one.episode(number), two.episode(number)
        assert total == other
        for name in ("actions", "rewards", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
        for before, after in ((a.obs, b.obs), (a.next_obs, b.next_obs)):
            for name in before:
                if before[name].dtype == np.uint8 and lossy:
                    off = np.abs(before[name].astype(int) - after[name]).mean()
                    assert off < lossy, (name, off)
                else:
                    np.testing.assert_array_equal(before[name], after[name], name)
    assert one.labels.successes == two.labels.successes


@pytest.mark.parametrize("pictures", ["png", "video"])
def test_lerobot_there_and_back(made: Path, tmp_path: Path, pictures: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    out = tmp_path / "lerobot"
    data_main(["export", str(made), str(out), "--fps", "10", "--pictures", pictures])
    info = json.loads((out / "meta/info.json").read_text())
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"]) == (
        "v3.0",
        3,
        31,
    )
    assert info["features"]["observation.images.camera"]["dtype"] == (
        "image" if pictures == "png" else "video"
    )
    data_main(["import", str(out), str(tmp_path / "again")])
    check_same(made, tmp_path / "again", 0.0 if pictures == "png" else 3.0)
    assert EpisodeStore.open(tmp_path / "again").labels.tasks == [TASKS[0], TASKS[1], TASKS[0]]


def test_robomimic_and_minari_there_and_back(made: Path, tmp_path: Path) -> None:
    data_main(["export", str(made), str(tmp_path / "minari"), "--format", "minari"])
    data_main(["import", str(tmp_path / "minari"), str(tmp_path / "from-minari")])
    check_same(made, tmp_path / "from-minari")
    data_main(["filter", str(made), str(tmp_path / "lift"), "--task", "lift*"])
    data_main(["export", str(tmp_path / "lift"), str(tmp_path / "hdf5"), "--format", "robomimic"])
    (file,) = (tmp_path / "hdf5").iterdir()
    assert file.name == "lift_the_bowl_demo.hdf5"
    data_main(["import", str(file), str(tmp_path / "from-hdf5")])
    again = EpisodeStore.open(tmp_path / "from-hdf5")
    assert again.labels.tasks == ["lift the bowl"] * 2
    for number, old in enumerate((0, 2)):
        a, b = EpisodeStore.open(made).episode(old)[0], again.episode(number)[0]
        np.testing.assert_array_equal(a.next_obs["camera"], b.next_obs["camera"])
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.terminated, b.terminated)


@pytest.mark.parametrize(("kind", "lossy"), [("png", 0.0), ("jpeg", 2.0)])
def test_compressed_pictures(made: Path, tmp_path: Path, kind: str, lossy: float) -> None:
    data_main(["export", str(made), str(tmp_path / "minari"), "--format", "minari"])
    source, out = str(tmp_path / "minari"), tmp_path / kind
    data_main(["import", source, str(out), "--pictures", kind])
    check_same(made, out, lossy)
    store = EpisodeStore.open(out)
    raw = EpisodeStore.open(made)
    assert store.disk_bytes < 0.5 * raw.disk_bytes
    assert store.disk_bytes == sum(f.stat().st_size for f in out.glob("*.bin"))
    places, offsets = np.array([2, 0, 1]), np.array([8, 3, 5])
    names = ["obs/camera", "actions"]
    one, two = (data.columns(names, places, offsets) for data in (raw, store))
    np.testing.assert_array_equal(one["actions"], two["actions"])
    assert np.abs(one["obs/camera"].astype(int) - two["obs/camera"]).mean() <= lossy
    assert "camera" not in EpisodeStore.open(out, ["state"]).episode(0)[0].obs
    data_main(["clip", str(out), str(tmp_path / "cut"), "--stop", "4"])
    data_main(["validate", str(tmp_path / "cut")])
    block = out / "frames-000000000000.bin"
    data = bytearray(block.read_bytes())
    data[len(data) // 2] ^= 255
    block.write_bytes(data)
    with pytest.raises(DamagedStore, match=r"frames-000000000000\.bin is damaged"):
        data_main(["validate", str(out)])


def test_many_small_row_groups_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export writes one for each episode; a page of 10,000 episodes must not take minutes."""
    from pyarrow.parquet import ParquetFile

    data, out = joints_only(tmp_path / "data", 60), tmp_path / "lerobot"
    data_main(["export", str(data), str(out), "--format", "lerobot"])
    reads: list[list[int]] = []
    read = ParquetFile.read_row_groups

    def counted(file: Any, groups: list[int], **options: Any) -> Any:
        reads.append(groups)
        return read(file, groups, **options)

    monkeypatch.setattr(ParquetFile, "read_row_groups", counted)
    reader = LeRobotFormat().read(out)
    store = EpisodeStore.open(data)
    for number in (*range(60), 59, 7):
        episode = reader.episode(f"episode_{number}")
        steps, _ = store.episode(number)
        np.testing.assert_array_equal(episode.actions[:-1], steps.actions)
        np.testing.assert_array_equal(episode.obs["joints"].load()[:-1], steps.obs["joints"])
    assert len(reads) < 10


def test_what_lerobot_writes_itself_is_read() -> None:
    """Files of LeRobot 0.4.4, made by its own class from numbers that the test knows."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    folder = Path(__file__).parent / "lerobot_files"
    frames = np.load(folder / "frames.npz")
    for kind, lossy in (("image", 0.0), ("video", 4.0)):
        summary = scan(folder / kind)
        assert [e.steps for e in summary.episodes] == [4, 6]
        assert [e.task for e in summary.episodes] == ["pick it", "put it"]
        assert [e.success for e in summary.episodes] == [True, False]
        with open_dataset(folder / kind, "read") as dataset:
            for number, episode in enumerate(dataset.episodes()):
                state = frames[f"{number}/observation.state"]
                np.testing.assert_array_equal(episode.obs["state"], state)
                np.testing.assert_array_equal(episode.actions, frames[f"{number}/action"][:-1])
                picture = frames[f"{number}/observation.images.top"].astype(int)
                assert np.abs(picture - episode.obs["top"]).mean() <= lossy


def test_damaged_lerobot_files_are_named(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    good = tmp_path / "good"
    data_main(["export", str(made), str(good)])

    def refused(change: str, data: bytes | None, what: str) -> None:
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        if data is None:
            (bad / change).unlink()
        else:
            (bad / change).write_bytes(data)
        with pytest.raises(DataError, match=what):
            data_main(["validate", str(bad)])
        shutil.rmtree(bad)

    info = json.loads((good / "meta/info.json").read_text())
    old = json.dumps(info | {"codebase_version": "v2.1"}).encode()
    refused("meta/info.json", old, "convert it with LeRobot's own")
    refused("meta/info.json", b"[]", "does not describe a LeRobot dataset")
    video = "videos/observation.images.camera/chunk-000/file-000.mp4"
    whole = (good / video).read_bytes()
    refused(video, whole[: len(whole) // 2], r"at episode_\d: .*file-000.mp4")
    refused("data/chunk-000/file-000.parquet", b"PAR1", r"file-000.parquet cannot be read")
    refused("data/chunk-000/file-000.parquet", None, r"file-000.parquet cannot be read")


def test_without_pyarrow_a_sentence_says_what_to_install(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EtudeError, match=r"pip install 'etude\[data\]'"):
        data_main(["export", str(made), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


OWN = Path(__file__).parents[2] / "examples" / "etude-plugin" / "src" / "etude_plugin" / "npz.py"
"""A format outside of this package."""


def test_a_format_of_ones_own_there_and_back(made: Path, tmp_path: Path) -> None:
    kind, out = f"{OWN}:NpzFormat", tmp_path / "files"
    data_main(["export", str(made), str(out), "--format", kind, "--compress"])
    assert sorted(file.name for file in out.iterdir()) == [f"episode_{n}.npz" for n in range(3)]
    data_main(["import", str(out), str(tmp_path / "again"), "--format", kind])
    check_same(made, tmp_path / "again")
    assert EpisodeStore.open(tmp_path / "again").labels.tasks == [TASKS[0], TASKS[1], TASKS[0]]
    etude.import_dataset([out], tmp_path / "by-python", obs=["state"], format=kind)
    assert list(EpisodeStore.open(tmp_path / "by-python").geometry.observations) == ["state"]


def test_a_foreign_reader_is_limited_as_well(made: Path, tmp_path: Path) -> None:
    """Its files may be damaged or hostile, and its code may crash or hang."""
    kind, out = f"{OWN}:NpzFormat", tmp_path / "files"
    data_main(["export", str(made), str(out), "--format", kind])
    whole = (out / "episode_1.npz").read_bytes()
    pickled = np.array([print], object)
    for change, what in (
        (whole[: len(whole) // 2], "cannot be read"),
        (None, "cannot be read .*allow_pickle=False"),
    ):
        if change is None:
            np.savez(out / "episode_1.npz", actions=pickled)
        else:
            (out / "episode_1.npz").write_bytes(change)
        with pytest.raises(DataError, match=rf"files at episode_1: {what}"):
            scan(out, kind=kind)
    for body, what in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed its reader"),
        ("while True: pass", "took (more|longer) than"),
        ("bytearray(1 << 40)", "needs too much memory"),
        ("(self.path / 'written').write_text('x')", "File too large"),
        ("raise ValueError('line\\nbreak')", r"cannot be read \(line break\)"),
    ):
        (tmp_path / "bad.py").write_text(
            f"{OWN.read_text()}\n\nclass BadReader(NpzReader):\n    def episode(self, name):\n"
            f"        {body}\n\nclass Bad(NpzFormat):\n    def read(self, path):\n"
            "        return BadReader(path)\n"
        )
        with pytest.raises(DataError, match=rf"files at episode_0: .*{what}"):
            scan(out, None, Limits(seconds=3.0), f"{tmp_path / 'bad.py'}:Bad")


def test_formats_are_named_where_one_is_unknown(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = "--format is one of lerobot, robomimic, minari"
    for arguments in (
        ["export", str(made), str(tmp_path / "out"), "--format", "rlds"],
        ["export", str(made), str(tmp_path / "out"), "--format=rlds"],
        ["import", str(made), str(tmp_path / "out"), "--format", "rlds"],
        ["inspect", str(tmp_path), "--format", "rlds"],
    ):
        if arguments[0] == "import":
            arguments[1] = str(tmp_path)
        with pytest.raises(EtudeError, match=f"no dataset format 'rlds': {known}"):
            data_main(arguments)
    with pytest.raises(UsageError, match="no option --fps"):  # an option of another format
        data_main(["export", str(made), str(tmp_path), "--format", "minari", "--fps", "10"])
    data_main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n  {kind} " in listed for kind in FORMATS.names())


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("lerobot", "has no meta/info.json"),
        ("robomimic", "is not a plain file"),
        ("minari", "has no data/main_data.hdf5"),
    ],
)
def test_a_format_that_is_named_says_what_it_misses(
    kind: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=sentence):
        scan(tmp_path, kind=kind)


def test_a_format_without_write_is_read_only(made: Path, tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(
        "from etude.plugin import DatasetFormat\n\n\nclass Reads(DatasetFormat):\n"
        "    kind: str = 'reads'\n\n    def recognise(self, path):\n        return False\n\n"
        "    def read(self, path):\n        raise NotImplementedError\n"
    )
    kind = f"{tmp_path / 'reads.py'}:Reads"
    with pytest.raises(UsageError, match="can only be read"):
        data_main(["export", str(made), str(tmp_path / "out"), "--format", kind])
    assert not (tmp_path / "out").exists()
