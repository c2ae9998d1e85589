"""Damaged and hostile files: the parent lives, one sentence names the file, nothing leads out."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from test_datasets import write_demos, write_minari

from damage import damage
from etude.core import limited
from etude.core.limited import Limits
from etude.data.formats import opening as datasets
from etude.data.formats.base import DataError
from etude.data.formats.opening import open_dataset, scan

QUICK = Limits(memory=1 << 30, seconds=10.0)


def survive(path: Path) -> str | None:
    """What is said of a file, None where it can be read; anything else is raised."""
    try:
        with open_dataset(path, "read", None, QUICK) as dataset:
            for _ in dataset.episodes():
                pass
    except DataError as error:
        return str(error)
    return None


def try_damages(folder: Path, cases: range) -> list[str | None]:
    demos = write_demos(folder / "demos.hdf5", packed=True, next_obs=True).read_bytes()
    minari = (write_minari(folder / "set") / "data/main_data.hdf5").read_bytes()
    said = []
    for case in cases:
        chance = random.Random(case)
        path = folder / f"case-{case}.hdf5"
        way = ("cut", "flip", "zero", "shuffle")[case % 4]
        path.write_bytes(damage(demos if case % 8 < 4 else minari, way, chance))
        begin = time.monotonic()
        sentence = survive(path)
        assert time.monotonic() - begin < QUICK.seconds + 15.0
        if sentence is not None:
            assert sentence.startswith(str(path))
            assert "\n" not in sentence
            assert "Traceback" not in sentence
        said.append(sentence)
        path.unlink()
    return said


def test_damaged_files(tmp_path: Path) -> None:
    said = try_damages(tmp_path, range(8))
    assert all(said[case] for case in range(0, 8, 4)), "a cut file was read"


@pytest.mark.rotated
def test_a_hundred_damaged_files(tmp_path: Path) -> None:
    said = try_damages(tmp_path, range(8, 108))
    assert all(said[case] for case in range(0, 100, 4)), "a cut file was read"
    assert any(" at demo_" in text for text in said if text), "no episode was named"


def base(path: Path) -> h5py.File:
    write_demos(path)
    return h5py.File(path, "a")


def external_link(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = h5py.ExternalLink(str(folder / "secret.hdf5"), "/x")


def external_demo(file: h5py.File, folder: Path) -> None:
    file["data/demo_9"] = h5py.ExternalLink(str(folder / "secret.hdf5"), "/data/demo_0")


def link_through_external(file: h5py.File, folder: Path) -> None:
    file["out"] = h5py.ExternalLink(str(folder / "secret.hdf5"), "/")
    file["data/demo_1/obs/other"] = h5py.SoftLink("/out/x")


def dangling_link(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = h5py.SoftLink("/nowhere")


def circular_link(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = h5py.SoftLink("/data/demo_1/obs/other")


def external_storage(file: h5py.File, folder: Path) -> None:
    external = [(str(folder / "secret.txt"), 0, 64)]
    file["data/demo_1/obs"].create_dataset("other", (12, 4), "u1", external=external)


def external_mask(file: h5py.File, folder: Path) -> None:
    external = [(str(folder / "secret.txt"), 0, 16)]
    file.create_dataset("mask/other", (2,), "S8", external=external)


def virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((12, 4), "f4")
    layout[:] = h5py.VirtualSource(str(folder / "secret.hdf5"), "x", (12, 4))
    file["data/demo_1/obs"].create_virtual_dataset("other", layout)


def absurd_shape(file: h5py.File, folder: Path) -> None:
    shape = (12, 1 << 20, 1 << 20)
    file["data/demo_1/obs"].create_dataset("other", shape, "f8", chunks=(1, 1024, 1024))


def absurd_packed(file: h5py.File, folder: Path) -> None:
    made = file["data/demo_1/obs"].create_dataset(
        "other", (12, 1 << 16, 1 << 10), "u1", chunks=(1, 1024, 1024), compression="gzip"
    )
    made[0, :1024] = 1


def wrapping_shape(file: h5py.File, folder: Path) -> None:
    shape = (1 << 21, 1 << 21, 1 << 21)
    file["data/demo_1/obs"].create_dataset("other", shape, "f8", chunks=(1, 64, 64))


def huge_chunk(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs"].create_dataset(
        "other", (12, 4), "u1", chunks=(1 << 15, 1 << 15), maxshape=(None, None), compression="gzip"
    )


def unknown_filter(file: h5py.File, folder: Path) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((12, 4))
    made.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple((12, 4))
    h5py.h5d.create(file["data/demo_1/obs"].id, b"other", h5py.h5t.NATIVE_FLOAT, space, made)


def objects(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = np.array(["a"] * 12, object)


def ragged(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs"].create_dataset("other", (12,), h5py.vlen_dtype(np.float32))


def records(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = np.zeros(12, [("a", "f4"), ("b", "f4")])


def deep(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/" + "/".join("abcdefgh" * 40)] = np.zeros((12, 2))


def endless(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/again"] = file["data/demo_1/obs"]


def dots(file: h5py.File, folder: Path) -> None:
    file.create_group("data/demo_1/obs/..")["passwd"] = np.zeros((12, 2))


def odd_name(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/a b\n"] = np.zeros((12, 2))


def other_length(file: h5py.File, folder: Path) -> None:
    file["data/demo_1/obs/other"] = np.zeros((11, 2))


def short_rewards(file: h5py.File, folder: Path) -> None:
    del file["data/demo_1/rewards"]
    file["data/demo_1/rewards"] = np.zeros(3)


def no_actions(file: h5py.File, folder: Path) -> None:
    del file["data/demo_1/actions"]


HOSTILE: dict[Callable[[h5py.File, Path], None], str] = {
    external_link: "demo_1.* link to another file",
    external_demo: "demo_9.* link to another file",
    link_through_external: "demo_1.* link to another file",
    dangling_link: "demo_1.* is not in the file",
    circular_link: "demo_1.* in circles",
    external_storage: "demo_1.* other files",
    external_mask: "mask/other.* other files",
    virtual: "demo_1.* other files",
    absurd_shape: "demo_1.* claims 105,553,116,266,496 bytes",
    absurd_packed: "demo_1.* claims 805,306,368 bytes",
    wrapping_shape: "demo_1.* claims",
    huge_chunk: "demo_1.* chunks of 1,073,741,824 bytes",
    unknown_filter: "demo_1.* filter 32015",
    objects: "demo_1.* not plain numbers",
    ragged: "demo_1.* not plain numbers",
    records: "demo_1.* not plain numbers",
    deep: "demo_1.* nested too deeply",
    endless: "demo_1.* nested too deeply",
    dots: "demo_1.* not a valid name for an observation",
    odd_name: "demo_1.* not a valid name for an observation",
    other_length: "demo_1.* 11 rows beside 12 actions",
    short_rewards: "demo_1.* beside 12 actions",
    no_actions: "demo_1.* is missing",
}


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_hostile_files_are_refused(make: Callable[[h5py.File, Path], None], tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_bytes(b"secret" * 16)
    with h5py.File(tmp_path / "secret.hdf5", "w") as secret:
        secret["x"] = np.zeros((12, 4), np.float32)
        secret["data/demo_0/actions"] = np.zeros((12, 7))
    path = tmp_path / "demos.hdf5"
    with base(path) as file:
        make(file, tmp_path)
    with pytest.raises(DataError, match=HOSTILE[make]) as caught:
        scan(path, limits=QUICK)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_links_that_stay_in_the_file_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "demos.hdf5"
    with base(path) as file:
        for number in range(3):
            file[f"data/demo_{number}/obs/again"] = h5py.SoftLink(f"/data/demo_{number}/states")
    assert "again" in scan(path).fields


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all", b"\x89HDF\r\n\x1a\n" + bytes(64)])
def test_what_is_no_hdf5_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "demos.hdf5"
    path.write_bytes(content)
    sentence = survive(path)
    assert sentence is not None
    assert "get a whole copy" in sentence


def test_other_things_than_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        scan(tmp_path / "absent.hdf5")
    with pytest.raises(DataError, match="is in none of the formats lerobot, robomimic, minari"):
        scan(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "demos.hdf5").touch()
    with pytest.raises(DataError, match=r"a folder of HDF5 files; name the files, .*demos.hdf5"):
        scan(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a plain file"):
        scan(tmp_path / "pipe")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = 1
    with pytest.raises(DataError, match="is in none of the formats lerobot, robomimic, minari"):
        scan(tmp_path / "other.hdf5")


FAKES = {
    "dies": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"crashed .*SIGSEGV"),
    "hangs": ("import time; time.sleep(60)", "took longer than 0.5 s"),
    "burns": ("limited.limit_seconds(0.0)\nwhile True: pass", "of computing"),
    "ends": ("", "ended early"),
    "babbles": ("writer._stream.write(b'x' * 99); writer._stream.flush()", "absurdly"),
    "swells": (
        "writer.send('arrays', episode='demo_7', terminated=True, "
        "arrays=[['obs/a', 'float32', [1 << 40, 9]]])",
        "'obs/a' is larger than agreed",
    ),
}


@pytest.mark.parametrize("fate", FAKES)
def test_whatever_becomes_of_the_reader(
    fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, expected = FAKES[fate]
    begin = "writer.send('source', format='x', task='x', masks={}, num_episodes=1)"
    known = (
        "dict(name='demo_7', steps=1, file_steps=1, fields={}, total=0.0, success=None, "
        "terminated=True, rewarded=True, largest_action=0.0)"
    )
    lines = (
        "import sys",
        "from etude.core import limited",
        "writer = limited.FrameWriter(1)",
        begin,
        "writer.send('begin', episode='demo_7')",
        f"writer.send('described', episode={known})",
        "writer.send('all described')",
        code,
    )
    (tmp_path / "fake_reader.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(datasets, "_CHILD", "fake_reader")
    monkeypatch.setattr(limited, "_START_SECONDS", 2.0 if fate == "hangs" else 60.0)
    with (
        pytest.raises(DataError, match=f"demo_7.*{expected}"),
        open_dataset(tmp_path, "read", None, Limits(seconds=0.5)) as dataset,
    ):
        list(dataset.episodes())
