"""Commands in forks of a process that has loaded everything, with their time and memory measured.

python tests/faults/_watched.py    # reads orders as lines of JSON, and answers so
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE = 75.0
PRELOADED = (
    *("torch", "onnxruntime", "etude.cli.main", "etude.cli.verify", "etude.api"),
    *("etude.share.export", "etude.tasks.reach", "etude_runtime.__main__"),
)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    atexit.register(process.wait)
    atexit.register(process.kill)
    return process


def watched(verb: str, path: Path, interrupt: float | None = None) -> dict[str, Any]:
    """{code, seconds, peak, said}: how `etude verify` or the runtime ended, in s and bytes.

    interrupt: seconds after which SIGINT is sent; "seconds" then counts from there.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    order = {"verb": verb, "path": str(path), "interrupt": interrupt}
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    found: dict[str, Any] = json.loads(server.stdout.readline())
    return found


def _act(verb: str, path: str) -> int:
    if verb == "verify":
        from etude.cli.main import main

        return main(["verify", path])
    from etude_runtime.__main__ import main as run

    return run([path, "--steps", "20"])


def _fork(order: dict[str, Any], log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        code = _act(order["verb"], order["path"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _family(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return found


def _resident(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return total


def _run(order: dict[str, Any], log: Path) -> dict[str, Any]:
    begin, peak, pid = time.monotonic(), 0, _fork(order, log)
    interrupted, family = False, [pid]
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - begin
        if done or seconds > PATIENCE:
            break
        family = _family(pid)
        peak = max(peak, _resident(family))
        due = order["interrupt"] is not None and seconds > order["interrupt"]
        if due and not interrupted and len(family) > 1:
            os.kill(pid, signal.SIGINT)
            interrupted, begin = True, time.monotonic()
        time.sleep(0.02)
    left = [one for one in family if one != pid and os.path.exists(f"/proc/{one}/exe")]
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not done:
        os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status) if done else None
    said = log.read_text(errors="replace")[-4000:]
    return {"code": code, "seconds": seconds, "peak": peak, "said": said, "left": left} | {
        "interrupted": interrupted
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "runtime" / "src"))
    for module in PRELOADED:
        import_module(module)
    from etude.planning import recipes

    recipes.find("reach-short").task.make(1).close()  # loads its kinds, and MuJoCo
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            print(json.dumps(_run(json.loads(line), Path(folder) / "log")), flush=True)


if __name__ == "__main__":
    main()
