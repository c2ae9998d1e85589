"""Check an ONNX file of `etude export` before it is loaded.

Etude and etude-runtime, which is installed without Etude, have the same copy of this file. It reads
the protobuf fields in place, without the package onnx and further memory.

Only operators without control flow are allowed, and inputs that decide the shape of a result must
be constants of the file. So time and memory of a step depend on the file alone, not on
observations: one step under limits shows the cost of every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

OPSET = 18
METADATA = "etude"
"""The only entry of the metadata: the contract."""
MAX_BYTES = 1 << 30
MAX_NODES, MAX_NAMES = 1 << 18, 1 << 21

OPERATORS: dict[str, frozenset[str]] = {
    name: frozenset(attributes.split())
    for name, attributes in {
        "Add": "",
        "ArgMax": "axis keepdims select_last_index",
        "Cast": "to",
        "Clip": "",
        "Concat": "axis",
        "ConstantOfShape": "",
        "Conv": "auto_pad dilations group kernel_shape pads strides",
        "Div": "",
        "Elu": "alpha",
        "Equal": "",
        "Erf": "",
        "Exp": "",
        "Expand": "",
        "Gather": "axis",
        "Gemm": "alpha beta transA transB",
        "InstanceNormalization": "epsilon",
        "LayerNormalization": "axis epsilon stash_type",
        "Less": "",
        "LogSoftmax": "axis",
        "MatMul": "",
        "MaxPool": "auto_pad ceil_mode dilations kernel_shape pads storage_order strides",
        "Mul": "",
        "ReduceSum": "keepdims noop_with_empty_axes",
        "Relu": "",
        "Reshape": "allowzero",
        "Sigmoid": "",
        "Slice": "",
        "Softmax": "axis",
        "Split": "axis num_outputs",
        "Sub": "",
        "Tanh": "",
        "Transpose": "perm",
        "Unsqueeze": "",
        "Where": "",
    }.items()
}
"""{operator: its attributes} of exports of Etude's policies."""
_CONSTANT = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Gather": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Unsqueeze": (1,),
}
"""{operator: indices of inputs that decide the shape of its result}"""
_SIZES = {1: 4, 2: 1, 6: 4, 7: 8, 9: 1, 11: 8}
"""{element type: bytes} of constants: float, uint8, int32, int64, bool, double."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _Field(NamedTuple):
    """A field of a protobuf message."""

    name: str
    wire: int
    repeated: bool = False


_MODEL = {
    1: _Field("ir_version", _VARINT),
    2: _Field("producer_name", _BYTES),
    3: _Field("producer_version", _BYTES),
    7: _Field("graph", _BYTES),
    8: _Field("opset_import", _BYTES, True),
    14: _Field("metadata_props", _BYTES, True),
}
_OPSET = {1: _Field("domain", _BYTES), 2: _Field("version", _VARINT)}
_ENTRY = {1: _Field("key", _BYTES), 2: _Field("value", _BYTES)}
_GRAPH = {
    1: _Field("node", _BYTES, True),
    2: _Field("name", _BYTES),
    5: _Field("initializer", _BYTES, True),
    11: _Field("input", _BYTES, True),
    12: _Field("output", _BYTES, True),
}
_NODE = {
    1: _Field("input", _BYTES, True),
    2: _Field("output", _BYTES, True),
    3: _Field("name", _BYTES),
    4: _Field("op_type", _BYTES),
    5: _Field("attribute", _BYTES, True),
    7: _Field("domain", _BYTES),
}
_ATTRIBUTE = {
    1: _Field("name", _BYTES),
    2: _Field("f", _FIXED32),
    3: _Field("i", _VARINT),
    4: _Field("s", _BYTES),
    8: _Field("ints", _VARINT, True),
    20: _Field("type", _VARINT),
}
_TENSOR = {
    1: _Field("dims", _VARINT, True),
    2: _Field("data_type", _VARINT),
    8: _Field("name", _BYTES),
    9: _Field("raw_data", _BYTES),
}
_VALUE = {1: _Field("name", _BYTES), 2: _Field("type", _BYTES)}
_KNOWN = {
    ("model", 20): "has a training graph",
    ("model", 25): "has functions of its own",
    ("attribute", 6): "has a graph inside an operator",
    ("attribute", 11): "has graphs inside an operator",
    ("tensor", 13): "has data in other files",
    ("tensor", 14): "has data in other files",
}
"""{(message, field): its meaning} of refused fields."""


class Refused(ValueError):
    """An invalid ONNX file; the message is the end of the sentence "<file> ..."."""


Value = int | memoryview


def check(data: bytes | memoryview) -> str:
    """Raise `Refused` for a file that `etude export` cannot have written; returns the contract in
    its metadata."""
    if len(data) > MAX_BYTES:
        raise Refused(f"has {len(data):,} bytes, and at most {MAX_BYTES:,} are read")
    model = _message("model", _MODEL, memoryview(data))
    opsets = [_message("opset", _OPSET, each) for each in model["opset_import"]]
    if [(_text(o, "domain"), o.get("version")) for o in opsets] != [("", OPSET)]:
        raise Refused(f"is not made of operators of ONNX's opset {OPSET} alone")
    if "graph" not in model:
        raise Refused("has no graph")
    _check_graph(model["graph"])
    entries = [_message("metadata", _ENTRY, each) for each in model["metadata_props"]]
    if [_text(entry, "key") for entry in entries] not in ([], [METADATA]):
        raise Refused("has metadata that is not a contract")
    return _text(entries[0], "value") if entries else ""


def _check_graph(data: memoryview) -> None:
    """Check that every name is defined once, before its use, by an allowed operator."""
    graph = _message("graph", _GRAPH, data)
    constants = {_tensor(each) for each in graph["initializer"]}
    known = [_text(_message("input", _VALUE, each), "name") for each in graph["input"]]
    known += constants
    made = set(known)
    if "" in made or len(made) != len(known) or len(constants) != len(graph["initializer"]):
        raise Refused("has two inputs or constants of one name")
    names = 0
    for each in graph["node"]:
        node = _message("node", _NODE, each)
        inputs, outputs = _texts(node["input"]), _texts(node["output"])
        names += len(inputs) + len(outputs) + len(node["attribute"])
        if names > MAX_NAMES:
            raise Refused(f"has more than {MAX_NAMES:,} inputs, outputs and attributes")
        _check_node(node, inputs, constants)
        missing = {*inputs} - made - {""}
        if missing:
            raise Refused(f"uses {min(missing)[:60]!r} before anything makes it")
        if not outputs or "" in outputs or len({*outputs} | made) != len(outputs) + len(made):
            raise Refused("makes two results of one name")
        made.update(outputs)


def _check_node(node: Mapping[str, Any], inputs: list[str], constants: set[str]) -> None:
    operator, domain = _text(node, "op_type"), _text(node, "domain")
    if domain:
        raise Refused(f"uses operators of {domain[:60]!r}")
    if operator not in OPERATORS:
        raise Refused(f"uses the operator {operator[:60]!r}, which no export has")
    for each in node["attribute"]:
        attribute = _message("attribute", _ATTRIBUTE, each)
        name = _text(attribute, "name")
        if name not in OPERATORS[operator]:
            raise Refused(f"gives {operator} the attribute {name[:60]!r}, which no export has")
        if len(attribute["ints"]) > 64:
            raise Refused(f"gives {operator} an attribute of {len(attribute['ints'])} numbers")
    for place in _CONSTANT.get(operator, ()):
        if place < len(inputs) and inputs[place] and inputs[place] not in constants:
            raise Refused(f"has a {operator} whose shape is computed")


def _tensor(data: memoryview) -> str:
    """The name of a constant whose data are in the file."""
    tensor = _message("tensor", _TENSOR, data)
    name, kind = _text(tensor, "name"), tensor.get("data_type")
    if kind not in _SIZES:
        raise Refused(f"has the constant {name[:60]!r} of type {kind}")
    dims = list(tensor["dims"])
    size = math.prod(dims) * _SIZES[kind] if len(dims) <= 8 else -1
    if size != len(tensor.get("raw_data", b"")):
        raise Refused(f"has the constant {name[:60]!r}, whose shape does not fit its data")
    return name


def _message(what: str, fields: Mapping[int, _Field], data: memoryview) -> dict[str, Any]:
    """{field: value, or the list of its values}; refuses fields that no export has."""
    found: dict[str, Any] = {field.name: [] for field in fields.values() if field.repeated}
    for number, wire, value in _walk(data):
        field = fields.get(number)
        if field is None:
            words = _KNOWN.get((what, number), f"has a {what} with the unknown field {number}")
            raise Refused(words)
        if wire != field.wire:
            raise Refused(f"has a {what} whose {field.name} is of another type")
        if field.repeated:
            found[field.name].append(value)
            if len(found[field.name]) > MAX_NODES:
                raise Refused(f"has a {what} with more than {MAX_NODES:,} of {field.name}")
        elif field.name in found:
            raise Refused(f"has a {what} with two of {field.name}")
        else:
            found[field.name] = value
    return found


def _walk(data: memoryview) -> Iterator[tuple[int, int, Value]]:
    """(field number, wire type, value) of a message, in order."""
    place, end = 0, len(data)
    while place < end:
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, place = _varint(data, place)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, place = _varint(data, place)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise Refused("is not an ONNX file")
        if size > end - place:
            raise Refused("ended early")
        yield number, wire, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """(number, place after it)"""
    number = 0
    for index in range(10):
        if place + index >= len(data):
            raise Refused("ended early")
        byte = data[place + index]
        number |= (byte & 127) << (7 * index)
        if byte < 128:
            return number, place + index + 1
    raise Refused("is not an ONNX file")


def _text(message: Mapping[str, Any], name: str) -> str:
    return _texts([message.get(name, b"")])[0]


def _texts(values: list[Any]) -> list[str]:
    try:
        return [bytes(value).decode() for value in values]
    except UnicodeDecodeError as error:
        raise Refused("has a name that is not text") from error
