"""Subprocess that runs an untrusted ONNX file; `etude.core.limited` has the protocol.

python -P -m etude.share.onnx_child '{"path": ..., "observations": ..., ...}'
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import describe_error
from etude.core.limited import FrameWriter, serve
from etude.core.trees import Tree
from etude.runs import onnx_files


def onnx_actions(
    model: bytes,
    observations: Mapping[str, Array],
    starts: Sequence[bool] | Array,
    zeros: Mapping[str, Array],
    outputs: Sequence[str],
) -> Array:
    """Actions [steps, n] of an ONNX file for the observations of one environment.

    observations: {input: [steps, ...]}; starts: [steps], an episode begins; zeros: {input: [1,
    ...]}, the recurrent state where it does; outputs: the action, and the next recurrent state.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    state, found = dict(zeros), []
    for step, begins in enumerate(starts):
        if begins:
            state = dict(zeros)
        rows = {name: x[step : step + 1] for name, x in observations.items()}
        action, *after = session.run(list(outputs), {**rows, **state})
        state = dict(zip(state, after, strict=True))
        found.append(np.asarray(action)[0])
    return np.stack(found)


def run(order: Tree, writer: FrameWriter) -> None:
    """Send the contract in the file, and then its actions."""
    try:
        seen = {name: _received(*spec) for name, spec in order["observations"].items()}
        with Path(order["path"]).open("rb") as stream:
            data = stream.read(onnx_files.MAX_BYTES + 1)
        contract = onnx_files.check(data).encode()
        writer.send("contract", [contract], size=len(contract))
        zeros = {name: np.zeros(shape, kind) for name, (kind, shape) in order["states"].items()}
        actions = onnx_actions(data, seen, order["starts"], zeros, order["outputs"])
        kind, shape = order["actions"]
        if [str(actions.dtype), [*actions.shape]] != [kind, shape]:
            raise ValueError(f"its actions are {actions.dtype} of shape {actions.shape}")
        writer.send("actions", [np.ascontiguousarray(actions).data.cast("B")], size=actions.nbytes)
    except onnx_files.Refused as error:
        writer.send("refused", what=str(error))
    except MemoryError:
        writer.send("failed", what="it needs too much memory")
    except Exception as error:  # onnxruntime has many kinds of them
        writer.send("failed", what=describe_error(error)[:200])


def _received(kind: str, shape: Sequence[int]) -> Array:
    """Read an array from the standard input."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    return np.frombuffer(sys.stdin.buffer.read(size), kind).reshape(shape)


if __name__ == "__main__":
    serve(run)
