"""Fingerprints of the first iterations of trainings: while they are equal, results stay valid.

A result keeps the fingerprint of the first two iterations of its training: a hash of each array of
the policy and of each number of the log. `now.json` has the fingerprints of today's code. While
both are equal, learned figures are valid, wherever code has moved. Timings are valid while one
iteration also makes the same calls of NumPy, torch and MuJoCo (within 2 %) and Etude (within 10 %):
unlike seconds, calls do not depend on the load of the machine. Results of gates that train nothing
are valid while the gate passes at its smallest size.

Bits depend on the machine: `now.json` has fingerprints by the hash of the standard computation.
`fresh.py` updates it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from etude.core.catalogue import RECIPES
from gates import ROOT

NOW = ROOT / "gates" / "now.json"
LOADED = ("torch._dynamo", "mujoco", "gymnasium", "etude.api")
LIBRARIES = ("numpy", "torch", "mujoco")
ITERATIONS = 2
WITHIN = {"torch": 0.02, "mujoco": 0.02, "numpy": 0.02, "etude": 0.1}
"""{library: largest relative change of its calls for which timings stay valid}. A call of one of
Etude's functions takes about 1 us beside the calls it makes: a tenth of them is under 1 % of the
time."""
SOME = 500
"""Change of the number of calls of Etude's functions, about .5 ms, that is ignored: threads that
draw ahead or wait make a varying number."""
LIBRARY = {"torch": "torch", "mujoco": "MuJoCo", "numpy": "NumPy", "etude": "Etude's functions"}
NOT_PROVEN = "the first iterations of that code have not been compared with today's"
NOT_REPEATED = "its gate has not been repeated with today's code"
NOT_COUNTED = "the calls of that code have not been counted"
FREE = ("time/", "system/")
"""Prefixes of log columns that are not compared."""
Fingerprint = dict[str, Any]
"""bits: {array or column: hash}; calls: {function: calls of one iteration}."""
Begins = dict[str, Any]
"""computation: hash of the standard computation; code: the commit that was run again to make the
fingerprints of an older result; and the fingerprint of each beginning by name."""


class Beginning(NamedTuple):
    """The command that trains the first iterations."""

    command: str
    """With {scratch}, {run}, {iterations} and {steps} of the environment."""
    steps: int = 0
    """Environment steps of one iteration."""
    warmup: int = 0
    """Environment steps before the first iteration."""
    before: tuple[str, ...] = ()
    """Commands that make its datasets and teachers."""
    times: bool = True
    """Whether timings depend on it, so that its calls are counted."""


def train(words: str, steps: int, warmup: int = 0, *before: str) -> Beginning:
    """The beginning of a recipe; words: the recipe and its options."""
    command = f"etude train {words} {UNTESTED} --clock.total-timesteps {{steps}}"
    return Beginning(command, steps, warmup, before)


def learn_from(data: str, words: str, times: bool = False) -> Beginning:
    """The beginning of a recipe that learns from a dataset, which is recorded first."""
    record = f"etude data record {data} --episodes 12"
    command = f"etude train {words} {UNTESTED} --algorithm.dataset {{scratch}}/data"
    lengths = " --clock.epochs 1 --clock.cycles 1 --clock.iterations {iterations}"
    return Beginning(
        command + lengths + " --algorithm.train-batches 4", before=(record,), times=times
    )


def compare(peer: str, task: str, steps: int, warmup: int = 0) -> Beginning:
    """The beginning of Etude's runs in benchmarks."""
    words = f"benchmarks.runners.{peer} {task} --seed 0 --cap 600 --out {{scratch}}"
    return Beginning(f"{words} --steps {{steps}}", steps, warmup)


UNTESTED = "--folder {run} --evaluation.every never --evaluation.final-episodes 0"
SHOWN = "--fail-share 0 --noise 0 0.2 0.4 --labels intended"
TASK = "pick-place {scratch}/data --image-size 0"
REWARD = "reward-only --algorithm.rrd.network.reads state --algorithm.progress progress"
LAG, VTRACE = "--collector.lag 1", "--algorithm.advantages vtrace"
PRIORITISED = "--algorithm.sampling prioritised"
DEMONSTRATIONS = (
    "{scratch}/KITCHEN_SCENE1_put_the_bowl_on_the_plate_demo.hdf5 "
    "{scratch}/KITCHEN_SCENE1_put_the_mug_in_the_microwave_demo.hdf5"
)
KNOWING = (
    "--env.no-observe-velocity --policy.actor-reads state,scan,critic --evaluation.every never "
    "--evaluation.final-episodes 0 --clock.total-timesteps 12288"
)
FEW = "--collector.num-envs 256 --collector.envs-per-group 64 --algorithm.minibatch-size 4096"
BEGINNINGS: dict[str, Beginning] = {
    "reach-memory mlp": train("reach-memory --policy.kind mlp", 16_384),
    "reach-at-scale": train(f"reach-at-scale {FEW}", 16_384),
    "reach on Ray": train("reach --collector.kind ray --collector.actors 2", 4096),
    "episodic": train("episodic --collector.threads 1", 320, 4800),
    "episodic given": train("episodic --collector.threads 1 --rewards.kind given", 320, 4800),
    "episodic-ircr": train("episodic-ircr --collector.threads 1", 320, 4800),
    "sac": train("sac --env.id Hopper-v5", 100, 1000),
    "td3": train("td3 --env.id Hopper-v5", 100, 1000),
    "sac HalfCheetah": train("sac --env.id HalfCheetah-v5", 100, 1000),
    "pick-place lag": train(f"pick-place {LAG} --algorithm.advantages gae", 1024),
    "pick-place lag, V-trace": train(f"pick-place {LAG} {VTRACE}", 1024),
    "pick-place prioritised": train(f"pick-place {PRIORITISED}", 1024),
    "pick-place all": train(f"pick-place {LAG} {VTRACE} {PRIORITISED}", 1024),
    "pick-place-sac": train("pick-place-sac --env.shaping 0", 256, 2560),
    "pick-place-rlpd": train(
        "pick-place-rlpd --algorithm.dataset {scratch}/data",
        *(256, 1280),
        "etude data record pick-place-rlpd {scratch}/data --episodes 12 --fail-share 0 "
        "--image-size 0 --reward task",
    ),
    "cloned states": learn_from(
        f"pick-place-bc {{scratch}}/data --image-size 0 {SHOWN}", "pick-place-bc"
    ),
    "cloned pictures": learn_from(
        f"pick-place-bc {{scratch}}/data --image-size 84 {SHOWN}", "pick-place-pictures"
    ),
    "student": train(
        "walk-go1-student --algorithm.teacher {scratch}/teacher",
        *(12_288, 0),
        f"etude train walk-go1-rough --folder {{scratch}}/teacher {KNOWING}",
    ),
    "Humanoid": train("ppo --env.id Humanoid-v5", 2048),
    "workers": train("ppo --env.id CartPole-v1 --collector.engine-threads 2", 2048),
    "offline": learn_from(TASK, "offline --env.kind pick-place"),
    "offline bc": learn_from(TASK, "bc --env.kind pick-place --policy.actor-reads state"),
    "reward": learn_from(TASK, REWARD, times=True),
    "reward unbiased": learn_from(TASK, f"{REWARD} --algorithm.rrd.loss unbiased", times=True),
    "reward 4 steps": learn_from(TASK, f"{REWARD} --algorithm.rrd.rrd-sample-size 4", times=True),
    "reward of failures": Beginning(
        f"etude train reward-only {UNTESTED} --algorithm.dataset {{scratch}}/data "
        "--algorithm.held-out 0.3 --algorithm.rrd.rrd-batch-size 256 --clock.epochs 1 "
        "--algorithm.rrd.rrd-sample-size 32 --clock.cycles 1 --clock.iterations {iterations} "
        "--algorithm.train-batches 4",
        before=(
            "gates.learn.train_reward_only --write {scratch}",
            f"etude data import {DEMONSTRATIONS} {{scratch}}/data",
        ),
    ),
    "benchmarks halfcheetah": compare("etude", "halfcheetah", 2048),
    "benchmarks ant": compare("etude", "ant", 2048),
    "benchmarks pick-place": compare("etude", "pick-place", 1024),
    "benchmarks pick-place-sac": compare("etude", "pick-place-sac", 256, 5120),
    "benchmarks walk-go1": compare("etude", "walk-go1", 12_288),
}
PREFIXES = {
    "benchmarks": "benchmarks ",
    "etude_recipe": "",
    "exact_resume": "short ",
    "rollout_speed": "",
    "train_gymnasium": "",
    "train_imitation": "",
    "train_pick_place": "",
    "train_reach": "",
    "train_return": "",
    "train_walk": "",
}
"""{gate: prefix}: the prefix and the variant of a result are the name of its beginning."""
OF: dict[str, tuple[str, ...]] = {
    "dashboard_cost": ("reach",),
    "datasets": ("cloned pictures",),
    "gym_workers": ("workers",),
    "learning-pick-place": (
        *("pick-place", "pick-place lag", "pick-place lag, V-trace"),
        *("pick-place prioritised", "pick-place all"),
    ),
    "off_policy_speed": ("sac", "td3"),
    "peer_off_policy-HalfCheetah-v5": ("sac HalfCheetah",),
    "peer_off_policy-Hopper-v5": ("sac",),
    "ray_speed": ("reach", "reach on Ray"),
    "reward_speed": ("episodic",),
    "rollout_speed-Ant-v5": ("ant",),
    "rollout_speed-HalfCheetah-v5": ("halfcheetah",),
    "rollout_speed-Hopper-v5": ("hopper",),
    "rollout_speed-Humanoid-v5": ("Humanoid",),
    "rollout_speed-Walker2d-v5": ("walker2d",),
    "same_bits": ("short reach",),
    "same_bits-ant": ("short ant",),
    "scale": ("reach-at-scale",),
    "sim_to_sim": ("walk-go1", "pick-place"),
    "train_demonstrations-pictures": ("cloned pictures",),
    "train_demonstrations-rlpd": ("pick-place-rlpd", "pick-place-sac"),
    "train_demonstrations-states": ("cloned states",),
    "train_demonstrations-student": ("student",),
    "train_episodic": ("episodic", "episodic given", "episodic-ircr"),
    "train_memory": ("reach-memory", "reach-memory mlp"),
    "train_offline": ("offline", "offline bc"),
    "train_spread": ("spread",),
    "train_reward_only-libero": ("reward of failures",),
    "train_reward_only-state": ("reward",),
    "train_reward_only-state-4-steps": ("reward 4 steps",),
    "train_reward_only-state-unbiased": ("reward unbiased",),
    "update_speed": ("reach", "reach-at-scale"),
}
"""{result: names of its beginnings}, for all other results."""
REPEATED = {"dashboard_cost", "datasets", "gym_workers"}
"""Gates that learn nothing and are repeated at their smallest size; their timings depend on the
calls of these beginnings."""


def stem(gate: str, variant: str) -> str:
    """The name of a result's file, without suffix."""
    return "-".join(part for part in (gate, variant.replace(" ", "-")) if part)


def begins_of(gate: str, variant: str) -> tuple[str, ...]:
    """Names of the beginnings of a gate's trainings; empty for a gate that trains nothing."""
    if (name := stem(gate, variant)) in OF:
        return OF[name]
    if gate in PREFIXES and variant:
        return (PREFIXES[gate] + variant,)
    return ()


def of_recipe(name: str) -> Beginning:
    """The beginning of a recipe without other options."""
    from etude.planning.recipes import find

    recipe: Any = find(name)
    steps = recipe.collector.num_envs * recipe.algorithm.rollout_steps
    return train(name, steps, getattr(recipe.algorithm, "warmup_steps", 0))


def begin(name: str, calls: bool = True) -> Fingerprint:
    """Train the first iterations; return their fingerprint, with counted calls if `calls`."""
    if name.startswith("short "):
        words = "etude train {scratch}/recipe.yaml --trust --folder {run}"
        write = f"gates.lib.short_runs {name.removeprefix('short ')} {{scratch}}/recipe.yaml"
        beginning = Beginning(words, times=False, before=(write,))
    else:
        beginning = BEGINNINGS.get(name) or of_recipe(name)
    if not (beginning.times and calls):
        return {"bits": _begun(beginning, ITERATIONS)[0]}
    bits, less = _begun(beginning, ITERATIONS, counts=True)
    more = _begun(beginning, ITERATIONS + 1, counts=True)[1]
    more.subtract(less)
    return {"bits": bits, "calls": {what: times for what, times in sorted(more.items()) if times}}


def _begun(
    beginning: Beginning, iterations: int, counts: bool = False
) -> tuple[dict[str, str], Counter[str]]:
    """Bits and calls of a training that ends after `iterations`."""
    with tempfile.TemporaryDirectory() as scratch:
        steps = beginning.warmup + iterations * beginning.steps
        fields = {"scratch": scratch, "run": f"{scratch}/run"}
        *before, last = (
            command.format(**fields, iterations=iterations, steps=steps).split()
            for command in (*beginning.before, beginning.command)
        )
        for words in before:
            _forked(words, scratch)
        file = Path(scratch) / "calls.json"
        _forked(last, scratch, file if counts else None)
        calls = Counter(json.loads(file.read_text())) if counts else Counter()
        return bits_of(Path(scratch) / "run"), calls


def _forked(words: list[str], scratch: str, counts: Path | None = None) -> None:
    """Run a module as a command in a fork of this process, with the slow libraries imported."""
    for module in LOADED:
        importlib.import_module(module)
    said = Path(scratch) / "said.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(scratch)
            stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            sys.argv = words
            run_counted(words[0], counts)
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(bool(ending.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        text = said.read_text().strip()[-1000:]
        raise RuntimeError(f"{' '.join(words)} ended with {code}:\n{text}")


def run_counted(module: str, file: Path | None) -> None:
    """Run a module as a command; write {function: calls} of all its threads to a file.

    Functions of NumPy, torch and MuJoCo are counted by name, all Python functions of Etude together
    as "etude: functions".
    """
    calls: Counter[CodeType | tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1
        elif event == "c_call":
            owner = getattr(what, "__module__", None) or type(what.__self__).__module__
            calls[str(owner).partition(".")[0], what.__qualname__] += 1

    if file is not None:
        threading.setprofile(count)
        sys.setprofile(count)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        if file is not None:
            file.write_text(json.dumps(_calls_by_name(calls)))


def _calls_by_name(calls: Counter[CodeType | tuple[str, str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for what, times in list(calls.items()):
        if isinstance(what, tuple):
            if what[0] in LIBRARIES:
                found[f"{what[0]}: {what[1]}"] += times
        elif "etude" in Path(what.co_filename).parts:
            found["etude: functions"] += times
    return found


def bits_of(run: Path) -> dict[str, str]:
    """{array or column: hash} of a run's last policy and last log row.

    Reads the files without Etude, so that runs of any version can be compared.
    """
    from safetensors.numpy import load_file

    arrays = load_file(run / "checkpoints" / "final" / "policy" / "arrays.safetensors")
    found = {f"policy {name}": _hash(array.tobytes()) for name, array in arrays.items()}
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return found | {
        name: _hash(repr(value).encode())
        for name, value in sorted(row.items())
        if "/" in name and not name.startswith(FREE)
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


@cache
def computation() -> str:
    """The hash of the standard computation, which tells how this machine rounds."""
    from etude.runs import manifest

    return manifest.standard_digest()[:16]


@cache
def now() -> dict[str, Any]:
    """now.json: {computation: {beginning: fingerprint}} of today's code; "gates": {gate: fault}."""
    known: dict[str, Any] = json.loads(NOW.read_text()) if NOW.exists() else {}
    return known


def difference(then: Fingerprint, today: Fingerprint) -> str:
    """Describe what is learned differently; "" if all bits are equal. New names are ignored."""
    old, new = then["bits"], today["bits"]
    policies = [
        Counter(value for name, value in bits.items() if name.startswith("policy "))
        for bits in (old, new)
    ]
    names = [name for name in old if name in new and old[name] != new[name]]
    if policies[0] != policies[1]:
        arrays = [name for name in names if name.startswith("policy ")]
        many = len(arrays) or "some"
        return f"after two iterations {many} of the policy's arrays now hold other numbers"
    columns = [name for name in names if not name.startswith("policy ")]
    return f"after two iterations the log now has another {columns[0]}" if columns else ""


def slower(then: Fingerprint, today: Fingerprint) -> str:
    """Describe the first library whose calls have changed; "" if none has."""
    if "calls" not in then or "calls" not in today:
        return NOT_COUNTED
    old, new = Counter[str](then["calls"]), Counter[str](today["calls"])
    for library, within in WITHIN.items():
        names = [name for name in sorted({*old, *new}) if name.startswith(f"{library}: ")]
        apart = {name: abs(new[name] - old[name]) for name in names}
        before, after = (sum(calls[name] for name in names) for calls in (old, new))
        if sum(apart.values()) > max(within * before, SOME if library == "etude" else 0):
            name = max(names, key=apart.__getitem__)
            word = "more" if after > before else "fewer"
            share = f"{abs(after / before - 1.0):.0%} {word}" if 0 < before != after else "other"
            of = f"{name.partition(': ')[2]}: {new[name]:,} instead of {old[name]:,}"
            return f"an iteration now makes {share} calls of {LIBRARY[library]} ({of})"
    return ""


class Doubt(NamedTuple):
    """Why today's code may give other figures; "" if it gives the same."""

    learned: str = ""
    timed: str = ""


def doubt(result: dict[str, Any], known: dict[str, Any] | None = None) -> Doubt:
    """Compare the fingerprints of a result with those of today's code."""
    known = now() if known is None else known
    names = begins_of(result["gate"], result["variant"])
    learned = timed = ""
    if not names or result["gate"] in REPEATED:
        learned = known.get("gates", {}).get(result["gate"], NOT_REPEATED)
        timed = "" if names else NOT_COUNTED
    pairs = [
        (begins.get(name), known.get(begins["computation"], {}).get(name))
        for begins in result.get("begins") or [{"computation": ""}]
        for name in names
    ]
    for then, today in pairs:
        if then is None or today is None:
            missing = learned or NOT_PROVEN
            return Doubt(learned if result["gate"] in REPEATED else missing, missing)
        learned = learned or difference(then, today)
        timed = timed or slower(then, today)
    return Doubt(learned, learned or timed)


def kept(gate: str, variant: str) -> Begins:
    """Make the fingerprints of a gate's beginnings with today's code, to be kept in its result.

    A fresh process makes them: a fork of this one would lack the threads that torch has started.
    """
    command = [sys.executable, "-m", "gates.lib.beginnings", gate, variant]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    begins: Begins = json.loads(done.stdout)
    return begins


def can_begin(name: str) -> bool:
    """Whether this name has a beginning; recipe.yaml has none."""
    if not name.startswith("short "):
        return name in {*BEGINNINGS, *RECIPES.names()}
    from gates.lib import short_runs

    return name.removeprefix("short ") in short_runs.NAMES | {*RECIPES.names()}


if __name__ == "__main__":
    wanted = filter(can_begin, begins_of(*sys.argv[1:]))
    print(json.dumps({"computation": computation()} | {name: begin(name) for name in wanted}))
