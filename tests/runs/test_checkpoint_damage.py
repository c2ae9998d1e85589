"""Torn and hostile checkpoints: all are noticed, none runs code or leads outside."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from disk_faults import Watched, save, tag_of

from etude.runs import checkpoint, files
from etude.runs.checkpoint import DamagedCheckpoint, UnknownFormat

FILES = [
    f"{part}/{name}"
    for part, document in checkpoint.DOCUMENTS.items()
    for name in (checkpoint.ARRAYS, document, checkpoint.MANIFEST)
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "checkpoints"
    with files.using(Watched()):
        save(folder, 1)
        save(folder, 2)
    return folder


def tear(folder: Path, rng: random.Random) -> str:
    """Damage the newest checkpoint in one way; returns which."""
    victim = folder / "000000000002" / rng.choice(FILES)
    data = bytearray(victim.read_bytes())
    way = rng.choice(["cut", "flip", "zero", "missing", "swap", "older", "longer", "folder"])
    if way == "cut":
        data = data[: rng.randrange(len(data))]
    elif way == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif way == "zero":
        start = rng.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        data[start] ^= victim.read_bytes()[start] == 0  # zeros over zeros would be no damage
    elif way == "longer":
        data += b"\0"
    elif way == "older":
        data = bytearray(
            (folder / "000000000001" / victim.relative_to(victim.parents[1])).read_bytes()
        )
    elif way == "swap":
        other = victim.parents[1] / rng.choice([n for n in FILES if not str(victim).endswith(n)])
        data = bytearray(other.read_bytes())
        other.write_bytes(victim.read_bytes())
    if way == "missing":
        victim.unlink()
    elif way == "folder":
        victim.unlink()
        victim.mkdir()
    else:
        victim.write_bytes(data)
    return f"{way} {victim.name}"


@pytest.mark.rotated
def test_two_hundred_torn_checkpoints(pair: Path, tmp_path: Path) -> None:
    for seed in range(200):
        folder = tmp_path / str(seed)
        shutil.copytree(pair, folder, symlinks=True)
        way = tear(folder, random.Random(seed))
        with pytest.raises(DamagedCheckpoint):
            checkpoint.load_training(folder / "latest")
        said: list[str] = []
        with files.using(Watched()):
            found = checkpoint.newest_verified(folder, said.append)
        assert found == folder / "000000000001", way
        assert tag_of(found) == 1
        assert "Damaged checkpoint" in said[0]
        assert (folder / "000000000002.damaged").exists()
        assert os.readlink(folder / "latest") == "000000000001"


def test_nothing_left_is_said(pair: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "c", []
    shutil.copytree(pair, folder, symlinks=True)
    for step in (1, 2):
        (folder / f"00000000000{step}" / "training" / "state.json").unlink()
    assert checkpoint.newest_verified(folder, said.append) is None
    assert len(said) == 4
    save(folder, 2)
    (folder / "000000000002" / "training" / "state.json").unlink()
    checkpoint.newest_verified(folder, said.append)
    assert (folder / "000000000002.damaged-2").exists()


def test_a_renamed_checkpoint_is_not_another_step(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair / "000000000001", tmp_path / "000000000009")
    said: list[str] = []
    assert checkpoint.newest_verified(tmp_path, said.append) is None
    assert "another step" in said[0]


class Payload:
    """What a pickle would run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.trace), "w"))


def reseal(path: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    """Make every manifest fit the files again, as an attacker would, after changing training's."""
    pins = None
    for part, document in checkpoint.DOCUMENTS.items():
        folder = path / part
        listed = {}
        for name in (checkpoint.ARRAYS, document):
            data = (folder / name).read_bytes() if (folder / name).is_file() else b""
            listed[name] = files.Written(len(data), hashlib.sha256(data).hexdigest())
        manifest = checkpoint._manifest(part, 2, listed, pins)
        if part == "training":
            content = json.loads(manifest)
            del content["seal"]
            change(content)
            content["seal"] = checkpoint._seal(content)
            manifest = checkpoint.encode_json(content)
        (folder / checkpoint.MANIFEST).write_bytes(manifest)
        pins = hashlib.sha256(manifest).hexdigest()


def tensor_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


ARRAY_FILES = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header of 2^63": tensor_file(b"{}", length=2**63),
    "header of 99 MB": tensor_file(b"{}", length=99_000_000),
    "header beyond the file": tensor_file(b"{}", length=3),
    "header not JSON": tensor_file(b"import os"),
    "header a list": tensor_file([1]),
    "header nested": tensor_file(b'{"a":' * 100_000),
    "header of brackets": tensor_file(b"[" * 1_000_000),
    "huge shape": tensor_file({"a": entry([2**40, 2**40], 0, 4)}, bytes(4)),
    "huge shape and a zero": tensor_file({"a": entry([2**61, 2**61, 0], 0, 0)}),
    "negative shape": tensor_file({"a": entry([-1, -1], 0, 4)}, bytes(4)),
    "float shape": tensor_file({"a": entry([1.0], 0, 4)}, bytes(4)),
    "true as shape": tensor_file({"a": entry([True], 0, 4)}, bytes(4)),
    "100 dimensions": tensor_file({"a": entry([1] * 100, 0, 4)}, bytes(4)),
    "shape not a list": tensor_file({"a": entry("1", 0, 4)}, bytes(4)),
    "offsets beyond the file": tensor_file({"a": entry([1000], 0, 4000)}, bytes(4)),
    "offsets backwards": tensor_file({"a": entry([1], 4, 0)}, bytes(4)),
    "overlap": tensor_file({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)),
    "gap": tensor_file({"a": entry([1], 4, 8)}, bytes(8)),
    "data left over": tensor_file({"a": entry([1], 0, 4)}, bytes(5)),
    "unknown type": tensor_file({"a": entry([1], 0, 8, "OBJECT")}, bytes(8)),
    "type a list": tensor_file({"a": entry([1], 0, 8, ["F64"])}, bytes(8)),
    "bool of 2": tensor_file({"a": entry([1], 0, 1, "BOOL")}, b"\2"),
    "name twice": tensor_file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        bytes(1),
    ),
    "value and group": tensor_file({"a": entry([1], 0, 4), "a/b": entry([1], 4, 8)}, bytes(8)),
    "endless path": tensor_file({"a/" * 5000 + "a": entry([1], 0, 4)}, bytes(4)),
    "metadata a list": tensor_file({"__metadata__": [1]}),
    "metadata of numbers": tensor_file({"__metadata__": {"torch": 1}}),
    "metadata of code": tensor_file({"__metadata__": {"torch": "__import__('os')"}}),
    "metadata of strangers": tensor_file({"__metadata__": {"torch": '["b"]'}}),
}
DOCUMENT_FILES = {
    "empty document": b"",
    "list": b"[1, 2]",
    "number": b"1",
    "two documents": b"{}{}",
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "rather deep": b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
    "no UTF-8": b'{"a": "\xff\xfe"}',
    "a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}",
    "document name twice": b'{"a": 1, "a": 2}',
    "code": b"__import__('os').system('true')",
}
MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "../ name": lambda m: m["files"].update({"../../x": m["files"]["state.json"]}),
    "absolute name": lambda m: m["files"].update({"/etc/passwd": m["files"]["state.json"]}),
    "file left out": lambda m: m["files"].pop("state.json"),
    "files a list": lambda m: m.update(files=["state.json"]),
    "no files": lambda m: m.pop("files"),
    "size a string": lambda m: m["files"]["state.json"].update(size="1"),
    "size negative": lambda m: m["files"]["state.json"].update(size=-1),
    "size too large": lambda m: m["files"]["state.json"].update(size=2**60),
    "hash a number": lambda m: m["files"]["state.json"].update(sha256=1),
    "file a string": lambda m: m["files"].update({"state.json": "x"}),
    "another part": lambda m: m.update(part="policy"),
    "step a string": lambda m: m.update(step="2"),
    "another step": lambda m: m.update(step=3),
    "format 2": lambda m: m.update(format=2),
    "format of text": lambda m: m.update(format="1"),
    "unknown field": lambda m: m.update(run="rm"),
    "other policy": lambda m: m.update(policy_manifest_sha256="0" * 64),
}


@pytest.fixture
def victim(pair: Path, tmp_path: Path) -> Path:
    shutil.copytree(pair / "000000000002", tmp_path / "000000000002")
    return tmp_path / "000000000002"


def refuse(path: Path) -> DamagedCheckpoint:
    """Every way of loading refuses with the one kind of error, and writes nothing."""
    before = sorted(path.parent.rglob("*"))
    with pytest.raises(DamagedCheckpoint) as caught:
        checkpoint.load_training(path)
    assert sorted(path.parent.rglob("*")) == before
    return caught.value


@pytest.mark.parametrize("part", ["policy", "training"])
@pytest.mark.parametrize("case", ARRAY_FILES)
def test_hostile_arrays(victim: Path, case: str, part: str) -> None:
    (victim / part / checkpoint.ARRAYS).write_bytes(ARRAY_FILES[case])
    reseal(victim)
    assert checkpoint.ARRAYS in str(refuse(victim))
    if part == "policy":
        with pytest.raises(DamagedCheckpoint):
            checkpoint.load_policy_parts(victim)


@pytest.mark.parametrize("part", ["policy", "training"])
@pytest.mark.parametrize("case", DOCUMENT_FILES)
def test_hostile_documents(victim: Path, case: str, part: str) -> None:
    (victim / part / checkpoint.DOCUMENTS[part]).write_bytes(DOCUMENT_FILES[case])
    reseal(victim)
    assert checkpoint.DOCUMENTS[part] in str(refuse(victim))


@pytest.mark.parametrize("case", MANIFESTS)
def test_hostile_manifests(victim: Path, case: str) -> None:
    reseal(victim)
    assert checkpoint.verify(victim) == 2
    reseal(victim, MANIFESTS[case])
    assert isinstance(refuse(victim), UnknownFormat) == case.startswith("format")


def test_an_unsealed_manifest_is_noticed(victim: Path) -> None:
    manifest = victim / "training" / checkpoint.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b"\n")
    assert "changed" in str(refuse(victim))
    manifest.write_bytes(b" " * (1 << 20))
    assert "too large" in str(refuse(victim))


def test_another_format_is_refused_but_not_set_aside(victim: Path) -> None:
    reseal(victim, MANIFESTS["format 2"])
    with pytest.raises(UnknownFormat, match="format 2"):
        checkpoint.newest_verified(victim.parent)
    assert victim.exists()


@pytest.mark.parametrize("name", FILES)
def test_pickles_are_never_opened(victim: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "trace"
    (victim / name).write_bytes(pickle.dumps(Payload(trace)))
    refuse(victim)
    if not name.endswith(checkpoint.MANIFEST):
        reseal(victim)
        refuse(victim)
    assert not trace.exists()


@pytest.mark.parametrize("name", [*FILES, "policy", "training"])
def test_symlinks_are_not_followed(victim: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (victim / name).rename(outside)
    (victim / name).symlink_to(outside)
    refuse(victim)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_does_not_hang(victim: Path, name: str) -> None:
    (victim / name).unlink()
    os.mkfifo(victim / name)
    refuse(victim)


@pytest.mark.parametrize("name", ["code.py", "policy/code.py", "training/arrays.bin"])
def test_files_outside_the_manifest_are_refused(victim: Path, name: str) -> None:
    (victim / name).write_text("print('hello')")
    assert "should not be there" in str(refuse(victim))


def test_array_and_document_may_not_claim_one_name(victim: Path) -> None:
    (victim / "training" / "state.json").write_text('{"mask": 1}')
    reseal(victim)
    assert "array already" in str(refuse(victim))
    (victim / "training" / "state.json").write_text('{"mask/x": 1}')
    reseal(victim)
    assert "both as a value and as a group" in str(refuse(victim))
