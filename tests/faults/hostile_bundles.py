"""Bundles and ONNX files that a stranger made to hang, to fill the memory, or to run code.

`etude verify` and etude-runtime must end within time and memory, in a sentence and not in a
traceback; and `etude verify` within 2 s of an interrupt, with nothing left of its subprocess.
"""

from __future__ import annotations

import atexit
import gzip
import hashlib
import io
import json
import math
import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from etude.runs import bundle
from etude.runs.documents import SEAL, encode_sealed
from faults._watched import watched

ROW = 32
UNIT = "hostile bundles and ONNX files"
FULL, IN_CI = 1000, 5
SECONDS = 90.0
"""With what making a case takes; of the command itself, 60."""
MOST_SECONDS, MOST_BYTES, ANSWERED = 60.0, 2 << 30, 2.0
node = helper.make_node
Change = Callable[[bytes], bytes]


@cache
def good() -> Path:
    """A small bundle with everything but films, made once."""
    from etude.api import train
    from etude.cli.main import main
    from etude.share import export
    from toys import tiny_reach

    folder = Path(tempfile.mkdtemp(prefix="etude-hostile-"))
    atexit.register(shutil.rmtree, folder, True)
    run = train(tiny_reach(2), folder / "run").path
    export.STEPS, steps = 20, export.STEPS
    defaults = export.export.__defaults__
    assert defaults is not None
    export.export.__defaults__ = (*defaults[:-1], 20)
    try:
        options = ["--to", str(folder / "bundle"), "--no-film", "--episodes", "2", "--json"]
        with redirect_stdout(io.StringIO()):
            assert main(["bundle", str(run), *options]) in (0, None)
    finally:
        export.STEPS, export.export.__defaults__ = steps, defaults
    return folder / "bundle"


def reseal(folder: Path) -> None:
    """An index with every size and hash right, without the checks of those who mean well."""
    about = json.loads((folder / bundle.INDEX).read_bytes())
    listed = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not path.is_symlink() and name != bundle.INDEX:
            size = path.stat().st_size
            data = path.read_bytes() if size < 1 << 28 else b""
            listed[name] = {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    content = {name: value for name, value in about.items() if name not in (SEAL, "files")}
    (folder / bundle.INDEX).write_bytes(encode_sealed({**content, "files": listed}))


def replace_model(folder: Path, data: bytes) -> None:
    """Put an ONNX file in place, with the hash that the runtime compares."""
    (folder / "onnx/policy.onnx").write_bytes(data)
    contract = json.loads((folder / "onnx/policy.json").read_text())
    about = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    contract["files"]["policy.onnx"] = about
    (folder / "onnx/policy.json").write_text(json.dumps(contract))


def _loaded(data: bytes) -> Any:
    return onnx.load_model_from_string(data)


def _constant(name: str, value: Any, kind: Any = np.int64) -> Any:
    return numpy_helper.from_array(np.array(value, kind), name)


def _adding(*nodes: Any, constants: tuple[Any, ...] = (), last: str = "") -> Change:
    """The good model and more nodes, one of whose results is an output so that it is computed."""

    def change(data: bytes) -> bytes:
        model = _loaded(data)
        model.graph.initializer.extend(constants)
        model.graph.node.extend(nodes)
        model.graph.output.append(helper.make_tensor_value_info(last, TensorProto.FLOAT, None))
        return bytes(model.SerializeToString())

    return change


def endless_loop(rng: random.Random) -> Change:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Identity", ["v"], ["w"])],
        "body",
        [info("i", 7, []), info("go", 9, []), info("v", 1, None)],
        [info("on", 9, []), info("w", 1, None)],
    )
    loop = node("Loop", ["trips", "", "action"], ["looped"], body=body)
    trips = _constant("trips", rng.choice([1 << 62, 1 << 40, 1 << 31]))
    return _adding(loop, constants=(trips,), last="looped")


def nested_branches(rng: random.Random) -> Change:
    info = helper.make_tensor_value_info

    def graph(made: Any, name: str) -> Any:
        return helper.make_graph([made], "g", [], [info(name, 1, None)])

    leaf = inner = graph(node("Identity", ["action"], ["b0"]), "b0")
    for depth in range(1, rng.choice([2, 12, 20])):
        name = f"b{depth}"
        other = inner if depth < 12 else leaf
        inner = graph(node("If", ["yes"], [name], then_branch=inner, else_branch=other), name)
    outer = node("If", ["yes"], ["branched"], then_branch=inner, else_branch=inner)
    return _adding(outer, constants=(_constant("yes", True, np.bool_),), last="branched")


def scan(rng: random.Random) -> Change:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [node("Identity", ["a"], ["b"])], "body", [info("a", 1, None)], [info("b", 1, None)]
    )
    return _adding(
        node("Scan", ["action"], ["scanned"], body=body, num_scan_inputs=1), last="scanned"
    )


def large_result(rng: random.Random) -> Change:
    """Allowed operators, and a result of 1 GB to 2^62 numbers."""
    size = rng.choice([1 << 28, 1 << 30, 1 << 32, 1 << 40, 1 << 62])
    if rng.random() < 0.5:
        made = node("ConstantOfShape", ["size"], ["large"])
        return _adding(made, constants=(_constant("size", [size]),), last="large")
    made = node("Expand", ["action", "size"], ["large"])
    width = 1 << 20
    return _adding(made, constants=(_constant("size", [size // width, width, 1]),), last="large")


def growing_results(rng: random.Random) -> Change:
    """Every product has the square of the numbers before it."""
    nodes, name = [node("Reshape", ["action", "row"], ["r0"])], "r0"
    for step in range(rng.choice([3, 5, 8])):
        nodes += [
            node("Reshape", [name, "column"], [f"c{step}"]),
            node("Mul", [f"c{step}", name], [f"p{step}"]),
            node("Reshape", [f"p{step}", "row"], [f"r{step + 1}"]),
        ]
        name = f"r{step + 1}"
    constants = (_constant("row", [1, -1]), _constant("column", [-1, 1]))
    return _adding(*nodes, constants=constants, last=name)


def computed_shape(rng: random.Random) -> Change:
    nodes = node("Cast", ["action"], ["size"], to=7), node("ConstantOfShape", ["size"], ["large"])
    return _adding(*nodes, last="large")


def much_work(rng: random.Random) -> Change:
    """Minutes of matrix products of allowed operators."""
    nodes, name = [node("ConstantOfShape", ["size"], ["m0"])], "m0"
    for step in range(300):
        nodes.append(node("MatMul", [name, "m0"], [f"m{step + 1}"]))
        name = f"m{step + 1}"
    return _adding(*nodes, constants=(_constant("size", [4000, 4000]),), last=name)


def wide_convolution(rng: random.Random) -> Change:
    pads = rng.choice([1 << 15, 1 << 31, 1 << 62])
    nodes = [
        node("Reshape", ["action", "image"], ["i"]),
        node("MaxPool", ["i"], ["wide"], kernel_shape=[1, 1], pads=[0, 0, 0, 0])
        if rng.random() < 0.3
        else node("Conv", ["i", "w"], ["wide"], kernel_shape=[1, 1], pads=[pads] * 4),
    ]
    constants = _constant("image", [1, 1, 1, -1]), _constant("w", [[[[1.0]]]], np.float32)
    return _adding(*nodes, constants=constants, last="wide")


def many_nodes(rng: random.Random) -> Change:
    count = rng.choice([2_000, 20_000, 300_000])
    names = ["action", *(f"n{i}" for i in range(count))]
    nodes = [node("Relu", [a], [b]) for a, b in pairwise(names)]
    return _adding(*nodes, last=names[-1])


def foreign_operator(rng: random.Random) -> Change:
    domain = rng.choice(["com.microsoft", "ai.onnx.ml", "evil", "pkg.own"])
    name = rng.choice(["FusedMatMul", "TreeEnsembleRegressor", "Run", "PythonOp"])
    return _adding(node(name, ["action"], ["f"], domain=domain), last="f")


def other_operator(rng: random.Random) -> Change:
    name = rng.choice(["Tile", "Range", "NonZero", "RandomNormal", "SequenceEmpty", "Resize"])
    return _adding(node(name, ["action"], ["o"]), last="o")


def own_function(rng: random.Random) -> Change:
    def change(data: bytes) -> bytes:
        model = _loaded(data)
        inner = node("F", ["x"], ["y"], domain="own")
        opset = [helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", "F", ["x"], ["y"], [inner], opset))
        model.opset_import.extend(opset)
        return bytes(model.SerializeToString())

    return change


def outside_data(rng: random.Random) -> Change:
    place = rng.choice(["/dev/zero", "/etc/passwd", "../../../secret", "/proc/self/mem", "policy"])

    def change(data: bytes) -> bytes:
        model = _loaded(data)
        tensor = rng.choice(model.graph.initializer)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=place)
        return bytes(model.SerializeToString())

    return change


def false_constant(rng: random.Random) -> Change:
    def change(data: bytes) -> bytes:
        model = _loaded(data)
        tensor = rng.choice(model.graph.initializer)
        del tensor.dims[:]
        tensor.dims.extend(rng.choice([[1 << 40], [1 << 31, 1 << 31], [-1], [0], [1] * 100_000]))
        return bytes(model.SerializeToString())

    return change


def cycle(rng: random.Random) -> Change:
    return _adding(node("Add", ["action", "b"], ["a"]), node("Add", ["a", "a"], ["b"]), last="b")


def deep_type(rng: random.Random) -> Change:
    """A sequence of a sequence of ..., in the type of an input."""
    depth = rng.choice([50, 1_000, 20_000])

    def change(data: bytes) -> bytes:
        inner = b""
        for _ in range(depth):
            inner = b"\x0a" + _varint(len(inner)) + inner
            inner = b"\x22" + _varint(len(inner)) + inner
        value = b"\x0a\x01q\x12" + _varint(len(inner)) + inner
        graph = _loaded(data).graph.SerializeToString() + b"\x5a" + _varint(len(value)) + value
        model = _loaded(data)
        model.ClearField("graph")
        return bytes(model.SerializeToString() + b"\x3a" + _varint(len(graph)) + graph)

    return change


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes(found) + bytes([number])


def broken_bytes(rng: random.Random) -> Change:
    def change(data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(rng.choice([1, 1, 3, 30])):
            place = rng.randrange(len(flipped))
            match rng.randrange(4):
                case 0:
                    flipped[place] ^= 1 << rng.randrange(8)
                case 1:
                    flipped[place] = rng.choice([0, 127, 128, 255])
                case 2:
                    flipped[place:place] = rng.randbytes(rng.choice([1, 8, 100]))
                case _:
                    del flipped[place : place + rng.choice([1, 8, 1000])]
        return bytes(flipped)

    return change


def repeated(rng: random.Random) -> Change:
    """Protobuf merges a message that is there twice."""
    return lambda data: data + rng.choice([data, b"\x3a\x00", b"\xff" * 30, b"\x0b" * 10_000])


MODELS = [
    *(endless_loop, nested_branches, scan, large_result, growing_results, computed_shape),
    *(wide_convolution, many_nodes, foreign_operator, other_operator, own_function),
    *(outside_data, false_constant, cycle, deep_type, repeated),
    *(broken_bytes, broken_bytes, broken_bytes),
]


def hostile_json(rng: random.Random) -> str:
    size = rng.choice([1_000, 100_000, 3_000_000])
    return rng.choice(
        [
            lambda: "[" * size,
            lambda: '{"a":' * size,
            lambda: "[" + "[]," * size + "[]]",
            lambda: "{" + ",".join(f'"k{i}":{{}}' for i in range(size // 10)) + "}",
            lambda: '{"a": ' + "9" * size + "}",
            lambda: '{"a": 1e' + "9" * 30 + "}",
            lambda: '{"a": "' + "x" * size + '"}',
            lambda: "\ufeff{}",
            lambda: '{"a": 1, "a": 2}',
            lambda: "null",
            lambda: "",
        ]
    )()


def bad_json(folder: Path, rng: random.Random) -> None:
    names = ["manifest.json", "policy/contract.json", "policy/manifest.json", "onnx/policy.json"]
    name = rng.choice([*names, "evaluation/summary.json", "metrics.jsonl"])
    text = hostile_json(rng)
    (folder / name).write_text(text)
    if rng.random() < 0.2:
        (folder / bundle.INDEX).write_text(hostile_json(rng))
    else:
        reseal(folder)


def bad_number(folder: Path, rng: random.Random) -> None:
    """One number of a contract or of the recipe is another."""
    name = rng.choice(["policy/contract.json", "onnx/policy.json", "evaluation/summary.json"])
    document = json.loads((folder / name).read_text())
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [document]
    while waiting:
        item = waiting.pop()
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            if isinstance(value, dict | list):
                waiting.append(value)
            else:
                places.append((item, key))
    item, key = rng.choice(places)
    item[key] = rng.choice([10**9, 10**18, -1, 0, 2**63, 1e308, True, None, "x" * 100, [], {}])
    document.pop(SEAL, None)
    is_sealed = name == "evaluation/summary.json"
    data = encode_sealed(document) if is_sealed else json.dumps(document).encode()
    (folder / name).write_bytes(data)
    if name.startswith("policy/"):
        manifest = json.loads((folder / "policy/manifest.json").read_text())
        about = {"bytes": len(data), "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        files = manifest.get("files", {})
        if "contract.json" in files and isinstance(files["contract.json"], dict):
            kept = files["contract.json"].keys()
            files["contract.json"].update({k: v for k, v in about.items() if k in kept})
        content = {k: v for k, v in manifest.items() if k != SEAL}
        (folder / "policy/manifest.json").write_bytes(encode_sealed(content))
    reseal(folder)


def bad_yaml(folder: Path, rng: random.Random) -> None:
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    bomb = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *lines])
    size = rng.choice([1_000, 100_000, 1_000_000])
    text = rng.choice(
        [
            bomb,
            "[" * size,
            "a: " * size,
            "- " * size,
            "name: " + "x" * size,
            "!!python/object/apply:os.system ['touch ran']",
            "x: &x [*x]",
            "{" + ", ".join(f"k{i}: {i}" for i in range(size // 10)) + "}",
            "name: " + "9" * size,
            "a: 190:20:30" + ":59" * size,
        ]
    )
    if rng.random() < 0.3:
        text += "\n" + (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text)
    reseal(folder)


def bad_arrays(folder: Path, rng: random.Random) -> None:
    name = rng.choice(["policy/arrays.safetensors", "onnx/replay.safetensors"])
    path = folder / name
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    key = rng.choice([name for name in header if name != "__metadata__"])
    match rng.randrange(7):
        case 0:
            data = rng.choice([1 << 63, 1 << 40, len(data), 0]).to_bytes(8, "little") + data[8:]
            header = {}
        case 1:
            header[key]["shape"] = rng.choice([[1 << 40, 1 << 40], [1 << 62], [-1], [1] * 100, 7])
        case 2:
            header[key]["data_offsets"] = rng.choice([[0, 1 << 50], [-8, 8], [8, 0], [0, 0]])
        case 3:
            header |= {f"k{i}": {**header[key], "data_offsets": [0, 0]} for i in range(100_000)}
        case 4:
            header |= {
                f"e{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(100_000)
            }
        case 5:
            header["__metadata__"] = {"torch": hostile_json(rng), "empty": "[" * 100_000}
        case _:
            data = broken_bytes(rng)(data)
            header = {}
    if header:
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :]
    path.write_bytes(data)
    reseal(folder)


def bad_table(folder: Path, rng: random.Random) -> None:
    path = folder / "evaluation/episodes.csv"
    head, first, *_ = path.read_text().splitlines()
    text = rng.choice(
        [
            lambda: "\n".join([head, *[first] * rng.choice([1_000, 50_000, 2_000_000])]),
            lambda: head + "\n" + "1," * 1_000_000,
            lambda: '"' * 1_000_001,
            lambda: ",".join(f"c{i}" for i in range(100_000)) + "\n" + first,
            lambda: head + "\n" + first.replace("0", "nan"),
            lambda: head + "\n" + first.replace("0", "9" * 5_000),
        ]
    )()
    path.write_text(text)
    reseal(folder)


def bad_folder(folder: Path, rng: random.Random) -> None:
    match rng.randrange(8):
        case 0:  # holes: no disk, and many bytes to read
            name = rng.choice(["evaluation/a.mp4", "policy/arrays.safetensors", "metrics.jsonl"])
            with (folder / name).open("wb") as stream:
                stream.truncate(rng.choice([1 << 30, 1 << 36, 1 << 42]))
            reseal(folder)
        case 1:
            name = rng.choice(["recipe.yaml", "policy/arrays.safetensors", "bundle.json"])
            (folder / name).unlink()
            (folder / name).symlink_to(
                rng.choice(["/dev/zero", "/proc/kcore", name, "/etc/passwd"])
            )
        case 2:
            name = rng.choice(["recipe.yaml", "onnx/policy.onnx", "bundle.json"])
            (folder / name).unlink()
            os.mkfifo(folder / name)
        case 3:
            for number in range(rng.choice([2_000, 10_000])):
                (folder / f"x{number}").touch()
        case 4:
            inner = folder / "policy"
            for _ in range(rng.choice([10, 300])):
                inner = inner / "d"
            inner.mkdir(parents=True)
        case 5:
            (folder / "onnx").rename(folder / "elsewhere")
            (folder / "onnx").symlink_to("/")
        case 6:
            (folder / "policy" / ("x" * 250)).write_text("x")
            reseal(folder)
        case _:
            path = rng.choice([p for p in sorted(folder.rglob("*")) if p.is_file()])
            path.write_bytes(broken_bytes(rng)(path.read_bytes() or b"x"))
            if path.name != bundle.INDEX:
                reseal(folder)


FOLDERS = [bad_json, bad_number, bad_number, bad_yaml, bad_arrays, bad_table, bad_folder]


def _entry(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    return entry.tobuf(tarfile.GNU_FORMAT)


def hostile_tar(to: Path, rng: random.Random) -> None:
    match rng.randrange(10):
        case 0:
            kind, name = rng.choice([(tarfile.DIRTYPE, "x/{}"), (tarfile.REGTYPE, "x/f{}")])
            count = rng.choice([5_000, 50_000])
            to.write_bytes(b"".join(_entry(name.format(i), 0, kind) for i in range(count)))
        case 1:  # a name of gigabytes, in a file with holes
            kind = rng.choice([tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE, b"K"])
            size = rng.choice([1 << 22, 1 << 30, 1 << 33])
            with to.open("wb") as stream:
                stream.write(_entry("x/name", size, kind))
                stream.truncate(size + 1024)
        case 2:  # one extended header after the other
            kind = rng.choice([tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
            body = b"name".ljust(512, b"\0") if kind == b"L" else b"12 path=abc\n".ljust(512, b"\0")
            one = _entry("x/name", 512 if kind == b"L" else 12, kind) + body
            to.write_bytes(one * rng.choice([500, 50_000]))
        case 3:
            sparse = bytearray(_entry("x/recipe.yaml", 512, tarfile.GNUTYPE_SPARSE))
            sparse[482] = 1
            sparse[148:156] = b"%06o\0 " % (sum(sparse[:148]) + 8 * 32 + sum(sparse[156:]))
            block = (b"%011o\0" % 1) * 42 + b"\1" + b"\0" * 7
            to.write_bytes(bytes(sparse) + block * rng.choice([1_000, 100_000]))
        case 4:
            pairs = "GNU.sparse.major=1\nGNU.sparse.minor=0\nGNU.sparse.name=x/recipe.yaml\n"
            lines = b"".join(f"{len(line) + 4} {line}\n".encode() for line in pairs.splitlines())
            holes = b"9999999999\n" + b"1\n" * rng.choice([1_000, 10_000_000])
            head = _entry("x/p", len(lines), tarfile.XHDTYPE) + lines.ljust(512, b"\0")
            padded = holes + b"\0" * (-len(holes) % 512)
            to.write_bytes(head + _entry("x/recipe.yaml", len(holes)) + padded)
        case 5:
            to.write_bytes(gzip.compress(b"\0" * rng.choice([1 << 20, 1 << 28]), 1))
        case 6:
            size = rng.choice([1 << 30, 1 << 33, (1 << 63) - 1])
            with to.open("wb") as stream:
                stream.write(_entry("x/metrics.jsonl", size))
                stream.truncate(min(size, 1 << 36) + 1024)
        case 7:
            kind = rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
            name = rng.choice(
                ["x/recipe.yaml", "x/policy", "/x/recipe.yaml", "x/../../recipe.yaml"]
            )
            to.write_bytes(_entry(name, 0, kind) + _entry("x/recipe.yaml") + b"\0" * 1024)
        case 8:
            stream = io.BytesIO()
            with tarfile.open(fileobj=stream, mode="w") as tar:
                tar.add(good(), "x")
            to.write_bytes(broken_bytes(rng)(stream.getvalue()))
        case _:
            to.write_bytes(rng.choice([b"", b"x" * 5_000, b"\xff" * 100_000, b"\0" * 100_000]))


def check(found: dict[str, Any], what: str) -> None:
    told = f"{what}: {found}"
    assert found["code"] in (0, 1, 2, 130), told
    assert "Traceback" not in found["said"], told
    assert found["said"].strip(), told
    assert not found["left"], told
    assert found["seconds"] <= (ANSWERED if found["interrupted"] else MOST_SECONDS), told
    assert found["peak"] <= MOST_BYTES, f"{told}, {math.ceil(found['peak'] / (1 << 20)):,} MiB"


def case(number: int, seed: int, folder: Path) -> None:
    rng = random.Random(f"{seed}, {number}")
    if number % 100 == 3:  # Ends by an interrupt; with others, by its limits.
        copy = Path(shutil.copytree(good(), folder / "bundle"))
        data = (copy / "onnx/policy.onnx").read_bytes()
        replace_model(copy, much_work(rng)(data))
        reseal(copy)
        check(watched("verify", copy, rng.uniform(1.0, 4.0)), "interrupted")
        return
    kind = number % 5
    if kind == 4:
        hostile_tar(folder / "x.tar", rng)
        check(watched("verify", folder / "x.tar"), "tar")
        return
    copy = Path(shutil.copytree(good(), folder / "bundle"))
    if kind % 2:
        change = rng.choice(FOLDERS)
        change(copy, rng)
        check(watched("verify", copy), change.__name__)
        return
    make = much_work if number % 250 == 100 else MODELS[(number // 5 * 2 + kind // 2) % len(MODELS)]
    data = (copy / "onnx/policy.onnx").read_bytes()
    replace_model(copy, make(rng)(data))
    reseal(copy)
    runs = rng.random() < 0.5
    found = watched("runtime" if runs else "verify", copy / "onnx" if runs else copy)
    check(found, make.__name__)
