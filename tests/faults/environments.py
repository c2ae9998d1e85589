"""Environments that hang, exit, crash, eat memory or give the wrong values, in a run of their own.

Each case is a run in a session of its own: what is left in it after the run is an orphan.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from etude.api import Run, train
from etude.core.errors import EtudeError
from etude.envs import probe
from etude.planning import recipes
from etude.planning.recipe import Recipe
from forks import Forks
from toys import changed
from unruly_gym import VALUES

ROW = 27
UNIT = "strikes of environments"
FULL, IN_CI = 200, 4
SECONDS = 120.0
DEADLINE = 3.0
ORPHANS = 10.0
"""Seconds in which processes of an ended run must be gone."""
KILLED = 137


class Strike(NamedTuple):
    act: str
    workers: int
    call: str = "step"
    forever: bool = False
    says: str = ""
    """What the message must match; "" for the words of a refused value."""
    finishes: bool = False
    """The run goes on to its end, with the bits of a run without the strike."""


_NAMED = r"[Ee]nvironment [01] \('unruly_gym:Unruly-v0'\)"
STRIKES = (
    Strike("hang", 2, says="in step", finishes=True),
    Strike("sys.exit", 1, says=r"called sys\.exit\(0\)"),
    Strike("text", 1),
    Strike("trainer killed", 2),
    Strike("os._exit", 1, says=r"called os\._exit\(0\)"),
    Strike("interrupt", 1, says="called KeyboardInterrupt"),
    Strike("hang", 1, says="has not come back from step"),
    Strike("hang", 1, "reset", says="has not come back from reset"),
    Strike("spin", 1, says="has not come back from step"),
    Strike("memory", 1, says="Out of memory"),
    Strike("fork", 1, finishes=True),
    *(Strike(act, workers) for act in VALUES for workers in (1, 2)),
    Strike("sys.exit", 2, says=r"called sys\.exit\(0\)"),
    Strike("os._exit", 2, "reset", says=r"called os\._exit\(0\)"),
    Strike("memory", 2, says="memory ran out"),
    Strike("hang", 2, "reset", says="in reset", finishes=True),
    Strike("spin", 2, says="in step", finishes=True),
    Strike("hang in C", 2, says="did not return within", finishes=True),
    Strike("crash", 2, says="SIGSEGV", finishes=True),
    Strike("crash", 2, "reset", says="SIGSEGV", finishes=True),
    Strike("kill", 2, says="SIGKILL.*memory", finishes=True),
    Strike("C exit", 2, says="with code 0", finishes=True),
    Strike("C exit", 2, forever=True, says="3 times in group 0"),
    Strike("hang", 2, forever=True, says="3 times in group"),
    Strike("fork", 2, finishes=True),
)


@cache
def _forks() -> Forks:
    """A process that has loaded nothing but what a run needs: forks of others may not live."""
    forks = Forks({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    atexit.register(forks.close)
    return forks


def case(number: int, seed: int, folder: Path) -> None:
    """One strike, at another step in each round of them."""
    good = _untouched() if STRIKES[number % len(STRIKES)].finishes else {}
    done = _forks().run("faults.environments:struck", number, seed, str(folder), good)
    assert done.code == 0, done.out + done.err


def struck(number: int, seed: int, place: str, good: dict[str, str]) -> None:
    """The run of a case, and what must be so after it. good: the fingerprint without a strike."""
    folder = Path(place)
    strike, turn = STRIKES[number % len(STRIKES)], number // len(STRIKES) + seed
    mark, said = folder / "struck", folder / "said"
    act = "spin" if strike.act == "trainer killed" else strike.act
    at = 2 + 5 * (turn % 8)  # of the 64 steps that an environment makes
    kwargs = {"act": act, "mark": str(mark), "call": strike.call, "at": at}
    if strike.forever:
        kwargs["forever"] = True
    child = os.fork()
    if child == 0:
        _run(_recipe(strike.workers, kwargs), folder, said)
    if strike.act == "trainer killed":
        _wait(mark.exists, SECONDS)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(_reaped(child))
    left = _left_after(child)
    text = said.read_text(errors="replace")
    assert mark.exists(), f"{strike} did not happen:\n{text}"
    assert not left, f"{strike} left processes {left}:\n{text}"
    if strike.act == "trainer killed":
        assert status == -signal.SIGKILL
        return
    _check(strike, status, text, folder, good)


def _check(strike: Strike, status: int, text: str, folder: Path, good: dict[str, str]) -> None:
    says = strike.says or ("" if strike.finishes else "is needed|and its space is|finite")
    assert re.search(says, text, re.DOTALL), f"{strike} is not said ({says}):\n{text}"
    if says and strike.act in ("sys.exit", "os._exit", "interrupt", "hang", "spin"):
        assert re.search(_NAMED, text), f"{strike} names no environment:\n{text}"
    if strike.finishes:
        assert status == 0, f"{strike} ended the run with {status}:\n{text}"
        found = json.loads((folder / "fingerprint").read_text())
        assert found == good, f"{strike} changed the bits:\n{text}"
    else:
        assert status in (1, 2, 3), f"{strike} ended the run with {status}:\n{text}"
        assert "Traceback" not in text, f"{strike} ended in a traceback:\n{text}"
        assert not (folder / "run" / "summary.json").exists()
        assert any((folder / "run" / "failures").iterdir())


def _recipe(workers: int, kwargs: dict[str, object]) -> Recipe:
    return changed(
        recipes.find("ppo"),
        env={"id": "unruly_gym:Unruly-v0", "kwargs": kwargs},
        collector={
            **{"num_envs": 2, "envs_per_group": 2, "threads": 2},
            **{"engine_threads": workers, "deadline": DEADLINE},
        },
        algorithm={"update_epochs": 1, "rollout_steps": 16, "minibatch_size": 32},
        clock={"total_timesteps": 4 * 32, "iterations": 2, "cycles": 1},
        evaluation={"episodes": 1, "num_envs": 1, "envs_per_group": 1},
        checkpoint={"every": "1 cycle"},
        logs={"console": "none"},
    )


def _run(recipe: Recipe, folder: Path, said: Path) -> None:
    """The child: train, write what is said to a file, and end as the command does."""
    code = 70
    try:
        os.setsid()
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            torch.set_num_threads(1)
            # Two more processes to probe the environment in would take most of the time.
            probe._ask = lambda order: [{"unmade": "not in this case"}]
            try:
                _train(recipe, folder)
                code = 0
            except EtudeError as error:
                print(error, flush=True)
                code = error.exit_code
            except BaseException:
                traceback.print_exc()
            file.flush()
    finally:
        os._exit(code)


def _train(recipe: Recipe, folder: Path) -> None:
    run = train(recipe, folder / "run", say=lambda text: print(text, flush=True))
    (folder / "fingerprint").write_text(json.dumps(_bits(run)))


def _bits(run: Run) -> dict[str, str]:
    """Of weights and rows; a snapshot also holds what the environment is to do in this case."""
    found = run.fingerprint()
    return {name: found[name] for name in ("policy", "metrics")}


@cache
def _untouched() -> dict[str, str]:
    """The fingerprint of a run without a strike."""
    with TemporaryDirectory() as name:
        train(_recipe(1, {}), Path(name) / "run")
        return _bits(Run(Path(name) / "run"))


def _reaped(child: int) -> int:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _wait(done: object, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.02)


def _left_after(session: int) -> list[int]:
    """Processes of a session that are still there after a while; these are ended."""
    _wait(lambda: not _members(session), ORPHANS)
    left = _members(session)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = entry.read_text().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(its) == session and state != "Z":
            found.append(int(entry.parent.name))
    return found
