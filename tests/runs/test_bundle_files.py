"""Bundles as files: what a stranger may send, and what a changed byte shows in."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etude.core.errors import EtudeError
from etude.runs import bundle, tensors
from etude.runs.documents import decode_sealed, encode_sealed

ARRAYS = {"weight": np.arange(6, dtype=np.float32)}
CHUNKS = tensors.chunks(ARRAYS, tensors.layout(ARRAYS))
PLAIN = {
    "README.md": b"# A card\n",
    "recipe.yaml": b"name: x\n",
    "manifest.json": b"{}\n",
    "metrics.jsonl": b'{"a": 1}\n',
    "policy/arrays.safetensors": b"".join(
        map(bytes, tensors.chunks(ARRAYS, tensors.layout(ARRAYS)))
    ),
    "policy/contract.json": b"{}",
    "policy/manifest.json": b"{}",
    "onnx/policy.onnx": b"\x08\x0a rest",
    "evaluation/episodes.csv": b"episode,return\n0,1\n",
    "evaluation/success.png": b"\x89PNG\r\n\x1a\n rest",
    "evaluation/success.mp4": b"\0\0\0\x20ftypisom rest",
    "evaluation/success.webp": b"RIFF\0\0\0\0WEBP rest",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small bundle; its contents are no run's."""
    return made(tmp_path / "bundle")


def made(path: Path, **changed: bytes) -> Path:
    for name, data in {**PLAIN, **changed}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    bundle.seal(path, {"name": "x"})
    return path


def test_rows_may_be_many_and_other_texts_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_TEXT", 100)
    path = made(tmp_path / "long", **{"metrics.jsonl": b'{"a": 1}\n' * 100})
    assert bundle.examine(path).wrong == {}
    with pytest.raises(EtudeError, match=r"episodes.csv is larger than 100 bytes"):
        made(tmp_path / "text", **{"evaluation/episodes.csv": b"episode,return\n0" + b"1" * 164})


def test_a_flipped_byte_is_named_in_every_file(folder: Path) -> None:
    assert bundle.examine(folder).wrong == {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == len(PLAIN) + 1
    for path in files:
        whole, name = path.read_bytes(), str(path.relative_to(folder))
        every = (
            range(0, len(whole), 5)
            if name == bundle.INDEX
            else (0, len(whole) // 2, len(whole) - 1)
        )
        for place in every:
            flipped = bytearray(whole)
            flipped[place] ^= 1
            path.write_bytes(flipped)
            assert [*bundle.examine(folder).wrong] == [name], (name, place)
        path.write_bytes(whole)


def linked(folder: Path) -> str:
    (folder / "recipe.yaml").rename(folder.parent / "elsewhere.yaml")
    (folder / "recipe.yaml").symlink_to(folder.parent / "elsewhere.yaml")
    return "recipe.yaml is a link"


def linked_folder(folder: Path) -> str:
    (folder / "policy").rename(folder.parent / "elsewhere")
    (folder / "policy").symlink_to(folder.parent / "elsewhere")
    return "policy is a link"


def linked_index(folder: Path) -> str:
    (folder / bundle.INDEX).rename(folder.parent / "elsewhere.json")
    (folder / bundle.INDEX).symlink_to(folder.parent / "elsewhere.json")
    return "bundle.json is a link"


def pipe(folder: Path) -> str:
    (folder / "README.md").unlink()
    os.mkfifo(folder / "README.md")
    return "README.md is not a regular file"


def missing(folder: Path) -> str:
    (folder / "metrics.jsonl").unlink()
    return "metrics.jsonl is missing"


def no_index(folder: Path) -> str:
    (folder / bundle.INDEX).unlink()
    return "bundle.json is missing"


def foreign(folder: Path) -> str:
    (folder / "policy" / "install.py").write_text("print()")
    return "policy/install.py is not part of the bundle"


def index_that_leads_out(folder: Path) -> str:
    about = decode_sealed((folder / bundle.INDEX).read_bytes())
    about["files"]["../secret"] = {"bytes": 1, "sha256": "0" * 64}
    (folder / bundle.INDEX).write_bytes(encode_sealed(about))
    return "bundle.json lists '../secret'"


def without_seal(folder: Path) -> str:
    about = decode_sealed((folder / bundle.INDEX).read_bytes())
    (folder / bundle.INDEX).write_text(json.dumps(about))
    return "bundle.json was changed"


def of_a_later_version(folder: Path) -> str:
    about = decode_sealed((folder / bundle.INDEX).read_bytes())
    (folder / bundle.INDEX).write_bytes(encode_sealed(about | {"format": 2}))
    return "bundle.json has another format"


@pytest.mark.parametrize(
    "change",
    [
        linked,
        linked_folder,
        linked_index,
        pipe,
        missing,
        no_index,
        foreign,
        index_that_leads_out,
        without_seal,
        of_a_later_version,
    ],
)
def test_what_is_not_as_bundled_is_named(folder: Path, change: Callable[[Path], str]) -> None:
    expected = change(folder)
    assert any(f"{n} {w}".startswith(expected) for n, w in bundle.examine(folder).wrong.items())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("README.md", b"#!/bin/sh\n"),
        ("recipe.yaml", b"name: x\n\0\x7fELF"),
        ("evaluation/episodes.csv", b"\x80\x04\x95pickle"),
        ("evaluation/success.png", b"PK\x03\x04"),
        ("evaluation/success.mp4", b"\x7fELF\0\0\0\0\0\0"),
        ("policy/arrays.safetensors", b"\x80\x04\x95" + b" " * 20),
        ("onnx/policy.onnx", b"PK\x03\x04"),
    ],
)
def test_a_file_is_the_data_that_its_name_says(tmp_path: Path, name: str, data: bytes) -> None:
    with pytest.raises(EtudeError, match=name):
        made(tmp_path / "b", **{name: data})


def test_what_git_and_the_hub_add_is_left_alone(folder: Path) -> None:
    (folder / ".gitattributes").symlink_to("/dev/zero")
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    assert bundle.examine(folder).wrong == {}


def test_a_tar_holds_the_same_files_and_no_names_of_people(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "x.tar", tmp_path / "sub" / "x.tar"
    second.parent.mkdir()
    bundle.pack(folder, first)
    bundle.unpack(first, tmp_path / "again")
    assert bundle.examine(tmp_path / "again") == bundle.examine(folder)
    bundle.pack(tmp_path / "again", second)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        assert {(m.uname, m.uid, m.mtime) for m in tar} == {("", 0, 0)}


def tar_of(path: Path, *entries: tuple[str, bytes, bytes]) -> Path:
    """A tar of (name, type, contents or target)."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if kind == tarfile.REGTYPE:
                entry.size = len(content)
            else:
                entry.linkname = content.decode()
            tar.addfile(entry, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "entries",
    [
        [("x/../../recipe.yaml", tarfile.REGTYPE, b"out")],
        [("/tmp/recipe.yaml", tarfile.REGTYPE, b"out")],
        [("x/evil.py", tarfile.REGTYPE, b"out")],
        [("recipe.yaml", tarfile.REGTYPE, b"out")],
        [("x/recipe.yaml", tarfile.SYMTYPE, b"/etc/hostname")],
        [("x/recipe.yaml", tarfile.LNKTYPE, b"/etc/hostname")],
        [("x/policy", tarfile.SYMTYPE, b"/tmp"), ("x/policy/contract.json", tarfile.REGTYPE, b"")],
        [("x/recipe.yaml", tarfile.FIFOTYPE, b"")],
        [("x/recipe.yaml", tarfile.CHRTYPE, b"")],
        [("x/recipe.yaml", tarfile.GNUTYPE_SPARSE, b"")],
        [("x/recipe.yaml", tarfile.REGTYPE, b"a"), ("x/recipe.yaml", tarfile.REGTYPE, b"b")],
        [("x/recipe.yaml", tarfile.REGTYPE, b"a"), ("y/recipe.yaml", tarfile.REGTYPE, b"b")],
    ],
)
def test_a_hostile_tar_is_refused(tmp_path: Path, entries: list[tuple[str, bytes, bytes]]) -> None:
    path = tar_of(tmp_path / "x.tar", *entries)
    (tmp_path / "in").mkdir()
    with pytest.raises(EtudeError, match=r"x\.tar"):
        bundle.unpack(path, tmp_path / "in" / "b")
    outside = {p.name for p in tmp_path.iterdir()} | {p.name for p in (tmp_path / "in").iterdir()}
    assert outside <= {"x.tar", "in", "b"}


def test_a_damaged_or_compressed_tar_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    bundle.pack(folder, path)
    whole = path.read_bytes()
    for number, data in enumerate((whole[:2000], gzip.compress(whole), b"", b"x" * 5000)):
        path.write_bytes(data)
        with pytest.raises(EtudeError, match="cannot be read as a tar"):
            bundle.unpack(path, tmp_path / f"{number}")


def test_a_flipped_byte_of_a_tar_shows(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    bundle.pack(folder, path)
    whole = path.read_bytes()
    expected = bundle.examine(folder)
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    for place in range(0, last.offset_data + last.size, 331):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        to = tmp_path / str(place)
        try:
            bundle.unpack(path, to)
        except EtudeError:
            continue
        found = bundle.examine(to)
        # Padding and fields such as the mode of a file say nothing of its contents.
        assert found.wrong or found == expected
