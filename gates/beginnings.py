"""The first iterations of trainings: results stand while these stay as they were.

A result keeps the fingerprint of the first two iterations of what it trained: a hash of each array
of the policy and of each number of the log. `now.json` has those of today's code. While they are
equal, what was learned stands, wherever code has moved. A timing stands while one iteration also
makes the same calls of NumPy, torch, MuJoCo and Etude itself, but for 2 % (`counting.py`). What
trains nothing stands while its gate passes at its smallest size.

Bits are those of a machine: `now.json` has fingerprints by the hash of the standard computation.
`fresh.py` makes them anew.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import counting

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "src"), str(ROOT)]
NOW = Path(__file__).with_name("now.json")
LOADED = ("torch._dynamo", "mujoco", "gymnasium", "etude.api")
ITERATIONS = 2
WITHIN = 0.02
"""Share of a library's calls that may be others while a timing stands."""
NOT_PROVEN = "not proven: no fingerprint of the code that was measured"
FREE = ("time/", "system/")
"""Columns of the log that may differ."""
Fingerprint = dict[str, Any]
"""bits: {array or column: hash}; calls: {function: calls of one iteration}."""
Begins = dict[str, Any]
"""computation: how the machine rounds; and the fingerprint of each beginning, by its name."""


class Beginning(NamedTuple):
    """The first iterations of a training, by its command."""

    command: str
    """With {scratch}, {run}, {iterations} and {steps} of the environment."""
    steps: int = 0
    """Environment steps of one iteration."""
    warmup: int = 0
    """Environment steps before the first iteration."""
    before: tuple[str, ...] = ()
    """Commands that make what it learns from."""
    times: bool = True
    """Whether a timing depends on it: then its calls are counted."""


def train(words: str, steps: int, warmup: int = 0, *before: str) -> Beginning:
    """A recipe with its options."""
    command = f"etude train {words} {UNTESTED} --clock.total-timesteps {{steps}}"
    return Beginning(command, steps, warmup, before)


def learn_from(data: str, words: str) -> Beginning:
    """A recipe that learns from a recorded dataset."""
    record = f"etude data record {data} --episodes 12"
    command = f"etude train {words} {UNTESTED} --algorithm.dataset {{scratch}}/data"
    lengths = " --clock.epochs 1 --clock.cycles 1 --clock.iterations {iterations}"
    return Beginning(
        command + lengths + " --algorithm.train-batches 4", before=(record,), times=False
    )


def compare(peer: str, task: str, steps: int, warmup: int = 0) -> Beginning:
    """Etude in the comparison with other libraries."""
    words = f"benchmarks.runners.{peer} {task} --seed 0 --cap 600 --out {{scratch}}"
    return Beginning(f"{words} --steps {{steps}}", steps, warmup)


UNTESTED = "--folder {run} --evaluation.every never --evaluation.final-episodes 0"
SHOWN = "--fail-share 0 --noise 0 0.2 0.4 --labels intended"
TASK = "pick-place {scratch}/data --image-size 0"
REWARD = "reward-only --algorithm.rrd.network.reads state --algorithm.progress progress"
LAG, VTRACE = "--collector.lag 1", "--algorithm.advantages vtrace"
PRIORITISED = "--algorithm.sampling prioritised"
KNOWING = (
    "--env.no-observe-velocity --policy.actor-reads state,scan,critic --evaluation.every never "
    "--evaluation.final-episodes 0 --clock.total-timesteps 12288"
)
FEW = "--collector.num-envs 256 --collector.envs-per-group 64 --algorithm.minibatch-size 4096"
BEGINNINGS: dict[str, Beginning] = {
    "reach": train("reach", 4096),
    "seek-pictures": train("seek-pictures", 2048),
    "pick-place": train("pick-place", 1024),
    "pick-place-anywhere": train("pick-place-anywhere", 4096),
    "pick-place-original": train("pick-place-original", 2048),
    "walk-go1": train("walk-go1", 12_288),
    "walk-go1-robust": train("walk-go1-robust", 12_288),
    "walk-go1-rough": train("walk-go1-rough", 12_288),
    "imitate-walk": train("imitate-walk", 4096),
    "imitate-backflip": train("imitate-backflip", 4096),
    "imitate-all": train("imitate-all", 8192),
    "amp-walk": train("amp-walk", 4096),
    "spread": train("spread", 2400),
    "hopper": train("hopper", 2048),
    "halfcheetah": train("halfcheetah", 512),
    "walker2d": train("walker2d", 2048),
    "ant": train("ant", 512),
    "reach-memory": train("reach-memory", 16_384),
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
    "pick-place-sac": train("pick-place-sac --env.shaping 0", 256, 5120),
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
    "offline": learn_from(TASK, "offline --env.kind pick-place"),
    "offline bc": learn_from(TASK, "bc --env.kind pick-place --policy.actor-reads state"),
    "reward": learn_from(TASK, REWARD),
    "reward unbiased": learn_from(TASK, f"{REWARD} --algorithm.rrd.loss unbiased"),
    "reward 4 steps": learn_from(TASK, f"{REWARD} --algorithm.rrd.rrd-sample-size 4"),
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
    "train_walk": "",
}
"""Gates whose variant, after this prefix, names a beginning."""
OF: dict[str, tuple[str, ...]] = {
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
"""The beginnings of other results."""


def stem(gate: str, variant: str) -> str:
    """The name of a result's file."""
    return "-".join(part for part in (gate, variant.replace(" ", "-")) if part)


def begins_of(gate: str, variant: str) -> tuple[str, ...]:
    """The beginnings of what a gate trains; none where it trains nothing that is learned."""
    if (name := stem(gate, variant)) in OF:
        return OF[name]
    if gate in PREFIXES and variant:
        return (PREFIXES[gate] + variant,)
    return ()


def begin(name: str, calls: bool = True) -> Fingerprint:
    """Train the first iterations, with the package that is imported; calls: count them too."""
    if name.startswith("short "):
        words = "etude train {scratch}/recipe.yaml --trust --folder {run}"
        write = f"short_runs {name.removeprefix('short ')} {{scratch}}/recipe.yaml"
        beginning = Beginning(words, times=False, before=(write,))
    else:
        beginning = BEGINNINGS[name]
    if not (beginning.times and calls):
        return {"bits": _begun(beginning, ITERATIONS)[0]}
    bits, less = _begun(beginning, ITERATIONS, counts=True)
    more = _begun(beginning, ITERATIONS + 1, counts=True)[1]
    more.subtract(less)
    return {"bits": bits, "calls": {what: times for what, times in sorted(more.items()) if times}}


def _begun(
    beginning: Beginning, iterations: int, counts: bool = False
) -> tuple[dict[str, str], Counter[str]]:
    """Bits and calls of a training of so many iterations."""
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
    """Run a module as a command in a fork of this process, which has loaded what takes long."""
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
            counting.run(words[0], counts)
            code = 0
        except SystemExit as ending:
            code = int(bool(ending.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(said.read_text().strip()[-1000:])


def bits_of(run: Path) -> dict[str, str]:
    """{array or column: hash} of a run's last policy and last log row.

    It is read without Etude, so that runs of any version can be compared.
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
    """How this machine rounds."""
    from etude.runs import manifest

    return manifest.standard_digest()[:16]


@cache
def now() -> dict[str, Any]:
    """{computation: {beginning: fingerprint}} of today's code; "gates": {gate: what is wrong}."""
    known: dict[str, Any] = json.loads(NOW.read_text()) if NOW.exists() else {}
    return known


def difference(then: Fingerprint, today: Fingerprint) -> str:
    """The first array or column whose bits differ; "" if none does. New names do not count."""
    old, new = then["bits"], today["bits"]
    policies = [
        Counter(value for name, value in bits.items() if name.startswith("policy "))
        for bits in (old, new)
    ]
    names = [name for name in old if name in new and old[name] != new[name]]
    if policies[0] != policies[1]:
        arrays = [name for name in names if name.startswith("policy ")]
        return f"{len(arrays) or 'other'} arrays of the policy differ"
    columns = [name for name in names if not name.startswith("policy ")]
    return f"{', '.join(columns[:3])} differ{'s' if len(columns) == 1 else ''}" if columns else ""


def slower(then: Fingerprint, today: Fingerprint) -> str:
    """The first library of which an iteration makes other calls; "" where all are the same."""
    if "calls" not in then or "calls" not in today:
        return "calls were not counted"
    old, new = Counter[str](then["calls"]), Counter[str](today["calls"])
    for library in ("torch", "mujoco", "numpy", "etude"):
        names = [name for name in sorted({*old, *new}) if name.startswith(f"{library}: ")]
        apart = {name: abs(new[name] - old[name]) for name in names}
        if sum(apart.values()) > WITHIN * sum(old[name] for name in names):
            name = max(names, key=apart.__getitem__)
            return f"an iteration calls {name} {new[name]:,} instead of {old[name]:,} times"
    return ""


class Doubt(NamedTuple):
    """Why figures of a result may not be those of today's code; "" where they stand."""

    learned: str = ""
    timed: str = ""


def doubt(result: dict[str, Any], known: dict[str, Any] | None = None) -> Doubt:
    """Whether a result stands, by what it keeps and what today's code does."""
    known = now() if known is None else known
    names = begins_of(result["gate"], result["variant"])
    if not names:
        fault = known.get("gates", {}).get(result["gate"], "not repeated at its smallest size")
        return Doubt(fault, fault or "not proven: nothing counts its calls")
    pairs = [
        (begins.get(name), known.get(begins["computation"], {}).get(name))
        for begins in result.get("begins") or [{"computation": ""}]
        for name in names
    ]
    learned = timed = ""
    for then, today in pairs:
        if then is None or today is None:
            return Doubt(NOT_PROVEN, NOT_PROVEN)
        learned = learned or difference(then, today)
        timed = timed or slower(then, today)
    return Doubt(learned, learned or timed)


def kept(gate: str, variant: str) -> Begins:
    """What a result keeps: the beginnings of what it is about, by today's code.

    They are made in another process: a fork of this one would lack threads that torch has started.
    """
    command = [sys.executable, __file__, gate, variant]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    begins: Begins = json.loads(done.stdout)
    return begins


def can_begin(name: str) -> bool:
    """Whether there is such a beginning; a recipe.yaml has none."""
    if not name.startswith("short "):
        return name in BEGINNINGS
    import short_runs
    from etude.planning import recipes

    return name.removeprefix("short ") in short_runs.NAMES | {*recipes.names()}


if __name__ == "__main__":
    wanted = filter(can_begin, begins_of(*sys.argv[1:]))
    print(json.dumps({"computation": computation()} | {name: begin(name) for name in wanted}))
