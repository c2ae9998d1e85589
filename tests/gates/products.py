"""For every gate a stand-in for what it measures: a good product, and broken ones.

Each function here is named like its gate. It replaces what the gate measures and returns the
arguments to call it with. `way` is one of `WAYS`.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

WAYS = ("good", "wrong", "crash", "nothing")
"""wrong: another hash, too slow, or a figure out of its bounds. nothing: no run completes."""


class Broken(Exception):
    """The product crashed."""


class Bench:
    """A gate's module, and what is replaced in it for one test."""

    def __init__(
        self, gate: ModuleType, way: str, patch: pytest.MonkeyPatch, folder: Path, run: Path
    ) -> None:
        self.gate, self.way, self.folder, self.run = gate, way, folder, run
        self._patch = patch

    def put(self, name: str, value: Any) -> None:
        self._patch.setattr(self.gate, name, value)

    def env(self, name: str, value: str) -> None:
        self._patch.setenv(name, value)

    def measures(self, name: str, good: Any, wrong: Any, nothing: Any) -> None:
        """A function of the gate that is asked for something."""

        def answer(*_: Any, **__: Any) -> Any:
            if self.way == "crash":
                raise Broken
            found = {"good": good, "wrong": wrong, "nothing": nothing}[self.way]
            return found() if callable(found) else found

        self.put(name, answer)


PRODUCTS: dict[str, Callable[[Bench], list[str]]] = {}


def product(function: Callable[[Bench], list[str]]) -> Callable[[Bench], list[str]]:
    PRODUCTS[function.__name__] = function
    return function


NAN = float("nan")


# Faults with numbered cases.


@product
def fault_cases(bench: Bench) -> list[str]:
    def case(number: int, seed: int, folder: Path) -> int:
        if bench.way == "crash":
            raise Broken
        assert bench.way != "wrong", "the promise does not hold"
        return 1

    module = SimpleNamespace(ROW=1, UNIT="cases", FULL=3, IN_CI=1, SECONDS=9.0, case=case)
    bench.put("load", lambda name: module)
    bench.put("faults", lambda: [] if bench.way == "nothing" else ["one"])
    return []


# Timings.


@product
def dashboard_cost(bench: Bench) -> list[str]:
    bench.put("without", lambda *_: 1.0)
    bench.measures("within", (1.0, 0.001), (1.0, 0.02), (1.0, NAN))
    return []


@product
def off_policy_speed(bench: Bench) -> list[str]:
    bench.measures("ratio_of", 0.9, 0.8, NAN)
    return []


@product
def ray_speed(bench: Bench) -> list[str]:
    bench.measures("measure", np.full(15, 0.9), np.full(15, 0.8), np.zeros(0))
    return []


@product
def reward_speed(bench: Bench) -> list[str]:
    bench.measures("measure", [0.9] * 9, [0.8] * 9, [])
    return []


@product
def gym_workers(bench: Bench) -> list[str]:
    bench.measures("measure", [1.8] * 9, [1.5] * 9, [])
    return []


@product
def rollout_speed(bench: Bench) -> list[str]:
    ratios = (np.full(15, 0.86), np.full(15, 0.8), np.zeros(0))
    bench.measures("measure", *((found, 10_000.0) for found in ratios))
    return ["--task", "imitate-walk"]


@product
def scale(bench: Bench) -> list[str]:
    def found(*errors: float) -> dict[str, Any]:
        return {"check": [{"predicted": 1.0 + error, "measured": 1.0} for error in errors]}

    bench.measures("measure", found(*[0.1] * 6), found(*[0.1] * 5, 0.3), {"check": []})
    return []


@product
def scaling(bench: Bench) -> list[str]:
    bench.measures("collection", 0.1, 0.2, NAN)
    bench.put("PARTS", {"collection": bench.gate.collection, "learning": lambda _: 0.1})
    return []


@product
def update_speed(bench: Bench) -> list[str]:
    bench.measures("ratio_of", 0.95, 0.5, NAN)
    bench.put("overhead_of", lambda *_: 0.01)
    return []


@product
def peer_pick_place(bench: Bench) -> list[str]:
    bench.measures("compare_speed", [9.0] * 5, [7.0] * 5, [])
    return []


# Faults.


@product
def exact_resume(bench: Bench) -> list[str]:
    fake = Path(__file__).with_name("fake_attempt.py")
    bench.put("fresh_attempt", SimpleNamespace(__file__=str(fake)))
    bench.put("short_run", lambda *_: None)
    bench.put("dump", lambda _: "")
    bench.put("fingerprint", lambda run: (run / "summary.json").read_text())
    # A run that is never hit: what looks for something to kill must end as well.
    if bench.way == "nothing":
        bench.put("Kill", lambda *_: SimpleNamespace(wait=lambda process, *_: process.wait()))
    bench.env("FAKE_RUN", "good" if bench.way == "nothing" else bench.way)
    return ["--kills", "4", "--kills-per-run", "2"]


@product
def ranks(bench: Bench) -> list[str]:
    runs = ["1", "2", "4", "killed"]
    hit = {"ranks": 4, "rank": 0, "phase": "train", "seconds": 0.1, "codes": [-9, 1, 1, 1]}
    answers = {"good": (runs, [hit]), "wrong": (runs, [hit]), "nothing": ([], [])}

    def answer(way: str) -> str:
        found = answers[way]
        return json.dumps({"runs": found[0], "hits": found[1]})

    bench.measures("run", answer("good"), answer("wrong"), answer("nothing"))
    odd = "killed" if bench.way == "wrong" else ""
    bench.put("fingerprint", lambda run: "another" if run == odd else "the same")
    return ["--kills", "1"]


@product
def ray_faults(bench: Bench) -> list[str]:
    cluster = SimpleNamespace(address="", shutdown=lambda: None)
    done = Counter[str](() if bench.way == "nothing" else {"kill": 1, "stop": 1, "removal": 1})
    torment = SimpleNamespace(start=lambda: None, end=lambda: Counter(done))
    bench.put("start", lambda _: cluster)
    bench.put("Torment", lambda *_: torment)

    def train(recipe: Any, path: Path) -> Any:
        if bench.way == "crash" and path.name != "untouched":
            raise Broken
        return SimpleNamespace(path=path)

    bench.put("etude", SimpleNamespace(train=train))
    odd = "run1" if bench.way == "wrong" else ""
    bench.put("fingerprint", lambda run: "another" if run.name == odd else "the same")
    return ["--kills", "3", "--stops", "3", "--removals", "3", "--runs", "20"]


@product
def sweep(bench: Bench) -> list[str]:
    outcome = bench.gate.Outcome(
        "a table", "t0 a hash", {"t0": "a hash", "t1": "a hash"}, 1, 0, 1.0
    )

    def sweep_once(gate: Any, options: Any, folder: Path, kills: int = 0, *_: Any) -> Any:
        if bench.way == "crash":
            raise Broken
        gate.count("kills", kills if bench.way != "nothing" else 0)
        is_odd = bench.way == "wrong" and kills
        return outcome._replace(repeated=2048) if is_odd else outcome

    bench.put("sweep_once", sweep_once)
    return ["--trials", "2", "--kills", "3"]


@product
def moments(bench: Bench) -> list[str]:
    bench.measures("moment", "", "another state of the learner", "")
    recipe = SimpleNamespace(replace=lambda **_: None)
    bench.put("short_run", lambda *_: recipe)
    bench.put("etude", SimpleNamespace(train=lambda *_, **__: SimpleNamespace(path=bench.run)))
    return ["--moments", "3" if bench.way != "nothing" else "0", "--ray", "0", "--methods", "PPO"]


@product
def planted(bench: Bench) -> list[str]:
    bench.measures("judged", ("", 2), ("phase collect instead of update", 2), ("", 0))
    run = SimpleNamespace(path=bench.run, history=lambda: SimpleNamespace(last={"iterations": 12}))
    bench.put("etude", SimpleNamespace(train=lambda *_, **__: run))
    bench.put("planted_commit", lambda *_: "" if bench.way == "good" else "not found")
    words = ["--faults", "3" if bench.way != "nothing" else "0", "--recipes", "ppo"]
    return [*words, "--commits", "2"]


@product
def same_bits(bench: Bench) -> list[str]:
    def one_run(recipe: Any, seed: int, folder: Path, **collector: Any) -> str:
        if bench.way == "crash":
            raise Broken
        if bench.way == "nothing":  # every seed is the same run: none has trained
            return "the same"
        return f"{seed} {collector.get('threads') == 4 and bench.way == 'wrong'}"

    bench.put("one_run", one_run)
    bench.put("short_run", lambda *_: None)
    bench.put("start", lambda _: SimpleNamespace(address="", shutdown=lambda: None))
    return ["--seeds", "2"]


@product
def not_finite(bench: Bench) -> list[str]:
    bench.measures("judge", "", "was not noticed", "")
    return ["--cases", "3" if bench.way != "nothing" else "0"]


@product
def damaged_data(bench: Bench) -> list[str]:
    error = bench.gate.DataError

    def open_dataset(path: Path, *_: Any) -> Any:
        if bench.way == "crash":
            raise Broken
        if bench.way == "wrong":  # even a file that was cut is read
            return _Whole()
        raise error(path if bench.way == "good" else "something", "is damaged")

    bench.put("open_dataset", open_dataset)
    return ["--cases", "8"]


class _Whole:
    """A dataset without episodes."""

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *_: object) -> None: ...

    def episodes(self) -> list[Any]:
        return []


@product
def torn_checkpoints(bench: Bench) -> list[str]:
    def train(path: Path) -> None:
        if bench.way == "crash":
            raise Broken
        shutil.copytree(bench.run, path, symlinks=True)
        if bench.way == "nothing":
            shutil.rmtree(path / "checkpoints")
            (path / "checkpoints").mkdir()

    bench.put("train", train)
    if bench.way == "wrong":  # damage that is not noticed
        flip = bench.gate.damage

        def damage(folder: Path, kind: str, chance: Any) -> tuple[str, int]:
            copy = folder.with_name("kept")
            shutil.copytree(folder, copy, symlinks=True)
            found = flip(folder, kind, chance)
            shutil.rmtree(folder)
            copy.rename(folder)
            return found

        bench.put("damage", damage)
    return ["--cases", "5", "--resumes", "1"]


@product
def memory(bench: Bench) -> list[str]:
    def measure(gate: Any, options: Any, folder: str) -> int:
        if bench.way == "crash":
            raise Broken
        gate.count("iterations", bench.way != "nothing")
        return 130 if bench.way == "wrong" else 110

    bench.put("measure", measure)
    bench.put("changed", lambda *_: None)
    bench.put("plan_bytes", lambda _: 100)
    return []


@product
def datasets(bench: Bench) -> list[str]:
    bench.measures("import_bytes", (1 << 30, 1.0), (3 << 30, 1.0), (0, 1.0))
    bench.put("growth", lambda *_: 0.05)
    bench.put("rates", lambda *_: {"plain": 100.0, "ahead": 120.0})
    return []


# Trainings.


class FakeEtude:
    """Instead of the command: runs without training, with the success they are told to have."""

    def __init__(self, bench: Bench, success: Callable[[str], float], **columns: float) -> None:
        self.bench, self.success, self.columns = bench, success, columns

    def __call__(self, gate: Any, verb: str, *words: str) -> str:
        if self.bench.way == "crash":
            raise Broken
        if verb == "train" and self.bench.way != "nothing":
            self._train(words)
        if verb == "eval":
            return self._eval(Path(words[0]))
        return ""

    def _train(self, words: tuple[str, ...]) -> None:
        folder = Path(words[words.index("--folder") + 1])
        folder.mkdir(parents=True)
        row = {"timesteps": 131_072, "time/time_elapsed": 10.0, "eval/episodes": 100.0}
        row |= {"eval/success_rate": self.success(" ".join(words)), **self.columns}
        (folder / "words").write_text(" ".join(words))
        (folder / "metrics.jsonl").write_text(3 * (json.dumps(row) + "\n"))

    def _eval(self, folder: Path) -> str:
        success = self.success((folder / "words").read_text())
        (folder / "evaluations" / "1").mkdir(parents=True)
        with (folder / "evaluations" / "1" / "episodes.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerows([["return"], *([success + 0.01 * i] for i in range(30))])
        found = {"success_rate": success, "placement_error": 0.0, "drop_height": 0.0}
        found["episodes"] = 30.0
        return json.dumps({f"eval/{name}": value for name, value in found.items()})


def good_or(bench: Bench, good: float, wrong: float) -> Callable[[str], float]:
    return lambda _: wrong if bench.way == "wrong" else good


@product
def train_reach(bench: Bench) -> list[str]:
    bench.put("command", FakeEtude(bench, good_or(bench, 1.0, 0.98)))
    return []


@product
def train_return(bench: Bench) -> list[str]:
    class Scored(FakeEtude):
        def _eval(self, folder: Path) -> str:
            score = self.success((folder / "words").read_text())
            return json.dumps({"eval/mean_reward": score, "eval/episodes": 100})

    bench.put("command", Scored(bench, good_or(bench, 500.0, 470.0)))
    return []


@product
def train_memory(bench: Bench) -> list[str]:
    def success(words: str) -> float:
        return 0.95 if "lstm" in words or bench.way == "wrong" else 0.1

    bench.put("command", FakeEtude(bench, success))
    return []


@product
def train_pick_place(bench: Bench) -> list[str]:
    bench.put("command", FakeEtude(bench, good_or(bench, 1.0, 0.9), timesteps=200_000))
    return []


@product
def train_walk(bench: Bench) -> list[str]:
    errors = ("velocity", "turning", "settled_velocity", "settled_turning")
    walks = {f"eval/{name}_error": 0.1 for name in errors} | {"eval/fell": 0.0}
    falls = walks | {"eval/fell": 0.1}

    class Walking(FakeEtude):
        def _eval(self, folder: Path) -> str:
            (folder / "words").read_text()  # of a run that was trained
            found = falls if bench.way == "wrong" else walks
            return json.dumps({**found, "eval/episodes": 200})

    bench.put("command", Walking(bench, good_or(bench, 1.0, 0.9), timesteps=5_000_000))
    return []


@product
def train_demonstrations(bench: Bench) -> list[str]:
    fake = FakeEtude(bench, good_or(bench, 0.95, 0.5))
    bench.put("command", fake)
    bench.put("played", lambda gate, run, *_: json.loads(fake("eval", "eval", str(run))))
    return ["--folder", str(bench.folder / "kept")]


@product
def train_offline(bench: Bench) -> list[str]:
    def success(words: str) -> float:
        if "train bc" in words:
            return 0.95 if bench.way != "wrong" else 1.0
        if "behaviour-coef" not in words:
            return 0.96 if bench.way != "wrong" else 0.9499
        return 0.41

    bench.put("etude", FakeEtude(bench, success))
    bench.put("record", lambda *_: None)
    return []


@product
def train_spread(bench: Bench) -> list[str]:
    bench.put("command", FakeEtude(bench, good_or(bench, 1.0, -1.0)))
    bench.put("at_random", lambda _: np.linspace(-0.1, 0.1, 20))
    return []


@product
def train_imitation(bench: Bench) -> list[str]:
    ended = 0.0 if bench.way == "wrong" else 1.0
    names = ("is_success", "mpjpe_l", "travelled", "once")
    episodes = {name: np.array([ended]) for name in names} | {"reversals": np.zeros(1)}
    played = SimpleNamespace(episodes=episodes)
    bench.put("command", FakeEtude(bench, lambda _: ended))
    bench.put("followed", lambda *_: played)
    report = SimpleNamespace(table=lambda: "", motions=dict)
    bench.put("MotionReport", lambda _: report)
    return []


@product
def train_episodic(bench: Bench) -> list[str]:
    def train(gate: Any, method: str, seed: int, chosen: Any, folder: Path, episodes: int) -> None:
        if bench.way == "crash":
            raise Broken
        mean = seed / 10 + (method == "rrd" and bench.way != "wrong")
        result = {"method": method, "seed": seed, "command": "", "returns": [mean, mean]}
        result |= {"success": None, "seconds": 10.0, "curve": []}
        if bench.way != "nothing":
            (folder / f"{method}-{seed}.json").write_text(json.dumps(result))

    bench.put("train", train)
    return ["--folder", str(bench.folder / "results")]


@product
def train_reward_only(bench: Bench) -> list[str]:
    bench.put("record", lambda *_: None)
    bench.put("describe", lambda _: 0 if bench.way == "nothing" else 100_000)
    bench.measures("train", (10.0, 1 << 20), (10.0, 1 << 20), (10.0, 1 << 20))
    correlation = 0.7 if bench.way == "wrong" else 0.9
    names = ("eval/pooled_correlation", "eval/pooled_time_correlation")
    bench.put("last_test", lambda _: dict.fromkeys(names, correlation))
    bench.put("by_outcome", lambda _: {})
    return []


def reward_of_failures(bench: Bench) -> list[str]:
    """The same gate, on files in LIBERO's layout."""

    def scores(trained: float) -> tuple[dict[str, float], int]:
        found = {"eval": trained, "untrained": 0.5}
        names = [f"{prefix}/reward_{what}" for prefix in found for what in ("pairs", "success")]
        values = {name: found[name.partition("/")[0]] for name in names}
        values |= {f"{name}_low": value - 0.1 for name, value in values.items()} | {
            f"{name}_high": value + 0.1 for name, value in values.items()
        }
        return values, 900

    bench.measures("learned_from_failures", scores(0.9), scores(0.65), (scores(0.9)[0], 0))
    return ["--libero", "3"]


@product
def learning(bench: Bench) -> list[str]:
    def train(gate: Any, recipe: str, variant: str, seed: int, extra: Any) -> dict[str, float]:
        if bench.way == "crash":
            raise Broken
        area = 0.5 + seed / 1000 + (variant == "lag 0, prioritised" and bench.way == "wrong")
        area = NAN if bench.way == "nothing" else area
        return {"steps_to_80": 1.0, "area": area, "last": 1.0, "clip_fraction": 0.0}

    bench.put("train", train)
    return ["--out", str(bench.folder / "learning.json")]


def both_sides_return(bench: Bench) -> list[str]:
    """Trainings of two libraries, whose last three policies return about 100."""

    def returns_of(gate: Any, trainings: Any, options: Any) -> dict[str, list[float]]:
        if bench.way == "crash":
            raise Broken
        if bench.way == "nothing":
            return {}
        gate.count("trainings", len(trainings))
        behind = 50.0 if bench.way == "wrong" else 0.0
        return {
            each.name: 3 * [100.0 + int(each.name.rpartition("-")[2]) - behind * each.ours]
            for each in trainings
        }

    bench.put("returns_of", returns_of)
    return []


PRODUCTS["train_gymnasium"] = PRODUCTS["peer_off_policy"] = both_sides_return


@product
def crash_states(bench: Bench) -> list[str]:
    lives = {"ppo": (), "sac": ()}
    names = () if bench.way == "nothing" else lives
    bench.put("LIVES", lives)
    bench.put("why_not", lambda: None)
    bench.put(
        "record",
        lambda *_: [SimpleNamespace(name=name, entries=[], recipe=None) for name in names],
    )
    crash = SimpleNamespace(label="a crash", step=512)
    bench.put("crashes", lambda *_: iter([crash, crash]))
    bench.measures("judge", None, "the newest checkpoint is gone", None)
    bench.put("ends_equal", lambda *_: True)
    bench.put("etude", SimpleNamespace(train=lambda *_: None))
    return ["--states", "2", "--calls", "0", "--resumes", "1"]


@product
def damaged_runs(bench: Bench) -> list[str]:
    def judge(*_: Any) -> str:
        if bench.way == "wrong":
            raise AssertionError("another result without a word")
        return "equal"

    def made(*_: Any) -> Any:
        if bench.way == "crash":
            raise Broken
        return SimpleNamespace(files=["recipe.yaml"], damage=lambda *_: None, judge=judge)

    bench.put("DamagedRuns", made)
    many = "0" if bench.way == "nothing" else "3"
    return ["--cases", many, "--by-command-line", "1"]


@product
def rank_faults(bench: Bench) -> list[str]:
    def driver(command: list[str], **_: Any) -> Any:
        if bench.way == "crash":
            raise Broken
        faults = json.loads(Path(command[-1]).read_text())
        for number, fault in enumerate(faults):
            is_nan = fault["kind"] in bench.gate.PLACES
            (Path(command[-2]) / str(number) / "failures").mkdir(parents=True)
            if is_nan:
                (Path(command[-2]) / str(number) / "failures" / "report").mkdir()
            fault |= {"codes": [3 if is_nan else 1] * fault["ranks"], "seconds": 1.0}
            rank = fault["rank"]
            fault["said"] = f"{fault['kind']} on rank {rank}; nothing from rank {rank} for 4 s"
        told = [] if bench.way == "nothing" else faults
        return SimpleNamespace(stdout=json.dumps(told))

    iteration = 3
    bench.put(
        "draw",
        lambda _: [
            {"kind": k, "ranks": 2, "rank": 1, "iteration": iteration}
            for k in ("loss", "freeze", "kill")
        ],
    )
    bench.put("subprocess", SimpleNamespace(run=driver, PIPE=None))
    newest = Path(f"{iteration * bench.gate.STEPS:012d}")
    bench.put("checkpoint", SimpleNamespace(newest_verified=lambda *_: newest))
    bench.put(
        "etude",
        SimpleNamespace(
            train=lambda recipe, path: SimpleNamespace(path=path),
            resume=lambda path: SimpleNamespace(path=path),
        ),
    )
    odd = "2" if bench.way == "wrong" else ""
    bench.put("fingerprint", lambda run: "another" if run.name == odd else "the same")
    return ["--nans", "1", "--freezes", "1", "--kills", "1"]


@product
def preemptions(bench: Bench) -> list[str]:
    def strike(recipe: Path, scratch: Path, options: Any) -> dict[str, Any]:
        if bench.way == "crash":
            raise Broken
        found: dict[str, Any] = {"faults": [], "counts": {"kills": 3}, "runs": ["s3://one"]}
        found |= {"starts": {"SIGKILL": [4.0], "SIGTERM": []}, "notices": [], "repeated": [1.0]}
        found |= {"requests": 9, "faults of requests": {}, "fingerprints": ["the same"]}
        found["commits"] = [["run.json", 1, 1, "a"], ["run.json", 2, 2, "b"]]
        if bench.way == "wrong":  # the first writer again, after its successor
            found["commits"].append(["run.json", 1, 3, "a"])
        return found | ({"counts": {}, "fingerprints": []} if bench.way == "nothing" else {})

    bench.put("strike", strike)
    bench.put("fingerprint", lambda run: "the same")
    bench.put("etude", SimpleNamespace(train=lambda recipe, path: SimpleNamespace(path=path)))
    return ["--preemptions", "3"]


@product
def ray_head(bench: Bench) -> list[str]:
    def strike(folder: Path, *_: Any) -> tuple[int, str, float]:
        if bench.way == "crash":
            raise Broken
        (folder / "run" / "failures" / "report").mkdir(parents=True)
        return (0 if bench.way == "nothing" else 1), "Ray's head has not answered for 40 s", 41.0

    bench.put("strike", strike)
    bench.put(
        "etude",
        SimpleNamespace(
            train=lambda recipe, path: SimpleNamespace(path=path),
            resume=lambda path, collector: SimpleNamespace(path=path),
        ),
    )
    odd = "run" if bench.way == "wrong" else ""
    bench.put("fingerprint", lambda run: "another" if run.name == odd else "the same")
    return ["--strikes", "2"]


@product
def ray_transients(bench: Bench) -> list[str]:
    kinds = {"call": "errors of a call", "slow": "slow workers"}
    bench.put(
        "ray_moods",
        SimpleNamespace(
            KINDS=kinds,
            moody=nullcontext,
            left=lambda: ["a slow worker"] if bench.way == "nothing" else [],
        ),
    )
    bench.put("os", SimpleNamespace(chdir=lambda _: None))
    bench.put("start", lambda _: SimpleNamespace(address="", shutdown=lambda: None))

    def train(recipe: Any, path: Path, callbacks: Any = ()) -> Any:
        if bench.way == "crash" and path.name != "untouched":
            raise Broken
        return SimpleNamespace(path=path, rows=lambda: [{"system/restarts": 0.0}])

    bench.put("etude", SimpleNamespace(train=train))
    odd = "run1" if bench.way == "wrong" else ""
    bench.put("fingerprint", lambda run: "another" if run.name == odd else "the same")
    return ["--moments", "4"]


@product
def fuzz(bench: Bench) -> list[str]:
    def fed(name: str, runs: int, seed: int, gate: Any, findings: Path) -> None:
        if bench.way == "crash":
            raise Broken
        many = 0 if bench.way == "nothing" else runs
        gate.count("inputs", many)
        gate.details[name] = {"inputs": many}
        if bench.way == "wrong":
            gate.count("findings")

    bench.put("load", lambda: None)  # Instrumented code must not stay in the tests' process.
    bench.put("fuzz", fed)
    return ["--inputs", "600"]


@product
def foreign_robots(bench: Bench) -> list[str]:
    for robot in () if bench.way == "nothing" else bench.gate.ROBOTS.values():
        file = bench.folder / "packages" / robot.package / robot.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    def trial(gate: Any, name: str, file: Path, options: Any) -> dict[str, Any]:
        if bench.way == "crash":
            raise Broken
        if bench.way == "wrong" and name == "panda":
            raise bench.gate.CommandFailed("the check failed")
        return {"return": 2.0, "return of zero actions": 1.0}

    bench.put("trial", trial)
    bench.put("sheet", lambda *_: SimpleNamespace(save=lambda _: None))
    return ["--packages", str(bench.folder / "packages"), "--out", str(bench.folder / "out")]


@product
def sim_to_sim(bench: Bench) -> list[str]:
    class Exporting(FakeEtude):
        def __call__(self, gate: Any, verb: str, *words: str) -> str:
            if verb == "export":
                (to := Path(words[words.index("--to") + 1])).mkdir()
                (to / "policy.json").write_text(json.dumps({"name": Path(words[0]).name}))
            return super().__call__(gate, verb, *words)

        def _eval(self, folder: Path) -> str:
            return json.dumps({**json.loads(super()._eval(folder)), "eval/episodes": 400})

    bench.put("etude", Exporting(bench, lambda _: 0.97))
    bench.put("replay", lambda *_: (1000, 1e-6, 0.05, 0.1))
    bench.measures("driven", 0.98, 0.9, NAN)
    return []
