"""Run a stranger's ONNX file once in a subprocess with limits, before this process loads it.

Every step of a file that `onnx_files.check` has passed takes the same time and memory, so one step
tells what the others will take. The subprocess runs this file alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEMORY = 3 << 29
"""Bytes beyond what the subprocess has when it starts."""
SECONDS = 20.0


def attempt(model: bytes) -> str:
    """What goes wrong with one step of a model, as the end of a sentence; "" if nothing does."""
    command = [sys.executable, "-P", str(Path(__file__))]
    try:
        done = subprocess.run(command, input=model, capture_output=True, timeout=SECONDS + 10.0)
    except subprocess.TimeoutExpired:
        return f"takes longer than {SECONDS:g} s to load and to run once"
    if done.returncode == 0:
        return ""
    said = done.stdout.decode(errors="replace").strip()
    return said or (
        f"takes more than {SECONDS:g} s of computing or {MEMORY / (1 << 30):g} GiB to load and to "
        "run once"
    )


def _limit() -> None:
    """Limit the memory and computing time of this process; it writes no file and dumps no core.

    On Windows, which has no such limits, only `attempt`'s time limit holds.
    """
    if sys.platform == "win32":
        return
    import resource

    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[0]) if statm.exists() else 0
    wanted = {
        resource.RLIMIT_AS: pages * resource.getpagesize() + MEMORY,
        resource.RLIMIT_CPU: int(SECONDS) + 1,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for limit, value in wanted.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, hard))


def _step(model: bytes) -> None:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": "float32", "tensor(uint8)": "uint8"}
    session.run(None, {x.name: np.zeros(x.shape, kinds[x.type]) for x in session.get_inputs()})


def main() -> int:
    _limit()
    try:
        _step(sys.stdin.buffer.read())
    except Exception as error:  # onnxruntime has many kinds of them
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        print(f"cannot be run: {first[:200]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
