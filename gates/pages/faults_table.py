"""The table of docs/faults.md: each fault, how it is tested, and what the gates have counted.

    python -m gates.pages.faults_table          # Writes docs/faults.md from gates/results/*.json.

`FAULTS` lists the tests and gates of every fault. Results are those
of gates at full size, kept in the repository.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gates import ROOT
from gates.lib.report import RESULTS

PAGE = ROOT / "docs" / "faults.md"
ROTATED = "pytest.mark.rotated"
BELOW = "below its count"
COUNTED = {
    "kill": "kills",
    "stop": "freezes",
    "removal": "removed nodes",
    "strikes": "kills or freezes of the head",
    "moments": "errors, slow workers or lost broadcasts",
    "caught": "values, each of them caught",
    "numbers that are not finite": "values",
    "noticed and fell back": "damaged checkpoints, each of them noticed",
    "by command line": "cases by the command line",
    "kills in creating": "kill while the folder is made",
    "kills in restoring": "kill while a checkpoint is restored",
    "recordings": "recorded saves",
}
"""{what a gate counts: its words on the page}, where these differ."""


@dataclass(frozen=True)
class Need:
    """The count that one result of a gate must reach."""

    gate: str
    count: int
    what: str
    variant: str = ""


class Fault(NamedTuple):
    number: int
    text: str
    in_ci: str
    """The number or kind of cases in the tests."""
    tests: tuple[str, ...]
    """Files below tests/."""
    asked: str
    """The size that is asked of a gate, in words."""
    gates: tuple[Need, ...] = ()
    tests_are_the_gate: bool = False
    """Whether the tests cover all cases, so that a gate would add nothing."""


METHODS = (
    *("reach-at-scale", "reach-2-threads", "pick-place", "imitate-walk", "amp-walk", "walk-go1"),
    *("ppo", "spread", "sac", "td3", "episodic-ircr", "offline", "reward-only", "bc", "iql"),
    *("rlpd", "dagger"),
)
"""Beside PPO on reach, and SAC with RRD on its episodic form."""

FAULTS = (
    Fault(
        1,
        "SIGKILL at a random time, then resume: the hash of weights, optimizer, normaliser, "
        "snapshots, buffers and metrics.jsonl is that of the untouched run",
        "10",
        ("test_exact_resume.py",),
        "300 kills of PPO and of SAC with RRD, 100 of every other method",
        (
            Need("exact_resume", 300, "kills", "reach"),
            Need("exact_resume", 300, "kills", "episodic"),
            *(Need("exact_resume", 100, "kills", method) for method in METHODS),
        ),
    ),
    Fault(
        2,
        "death at every system call of a save: the old checkpoint or the new one, never neither",
        "all",
        ("runs/test_checkpoint_kill.py", "runs/test_replay_faults.py"),
        "all",
        tests_are_the_gate=True,
    ),
    Fault(
        3,
        "torn checkpoint: cut, bit flipped, block of zeros, file missing, files swapped",
        "200",
        ("runs/test_checkpoint_damage.py", "test_faults.py"),
        "10,000, all noticed, the one before takes over",
        (Need("torn_checkpoints", 10_000, "noticed and fell back"),),
    ),
    Fault(
        4,
        "disk full, I/O error, read-only folder or SIGTERM in the middle of a save: answered "
        "within 10 s",
        "each",
        ("test_faults.py", "runs/test_checkpoint_kill.py", "runs/test_replay_faults.py"),
        "each",
        tests_are_the_gate=True,
    ),
    Fault(
        5,
        "the same seed twice, on 1, 2 and 4 threads, on 1, 2 and 4 Ray actors: one hash",
        "each",
        ("test_exact_resume.py", "rollout/test_ray.py"),
        "20 seeds",
        (Need("same_bits", 20, "seeds"),),
    ),
    Fault(
        6,
        "snapshot round trip of every shipped task, randomised model values included: 1,000 "
        "steps, every bit",
        "all",
        ("tasks/test_reach.py", "tasks/test_pick_place.py", "tasks/test_humanoid.py"),
        "all",
        tests_are_the_gate=True,
    ),
    Fault(
        7,
        "rollout worker killed or frozen during training: the hash of the run without it",
        "5",
        ("rollout/test_ray.py",),
        "100",
        (
            Need("ray_faults", 80, "kill", "reach-at-scale"),
            Need("ray_faults", 20, "stop", "reach-at-scale"),
        ),
    ),
    Fault(
        8,
        "Ray node removed during training",
        "1",
        ("rollout/test_ray.py",),
        "50",
        (Need("ray_faults", 50, "removal", "reach-at-scale"),),
    ),
    Fault(
        9,
        "learner rank killed",
        "1",
        ("training/test_ranks.py",),
        "20",
        (Need("ranks", 20, "kills", "reach-at-scale-short"),),
    ),
    Fault(
        10,
        "NaN or infinity in observation, reward, action, loss, gradient, physics or dataset: "
        "caught in that update, nothing saved, the culprit named",
        "each",
        ("rl/test_ppo_nonfinite.py", "training/test_run_nonfinite.py"),
        "200",
        (Need("not_finite", 200, "caught"),),
    ),
    Fault(
        11,
        "damaged HDF5 file or shard, external links, absurd shapes: the reader's parent lives, "
        "file and episode are named",
        "100",
        ("data/test_datasets_damaged.py",),
        "5,000",
        (Need("damaged_data", 5_000, "cases"),),
    ),
    Fault(
        12,
        "hostile checkpoint (pickle, names with `..`, links, absurd headers): no code runs, "
        "nothing is written outside",
        "30",
        ("runs/test_checkpoint_damage.py",),
        "each",
        tests_are_the_gate=True,
    ),
    Fault(
        13,
        "source scan: no pickle, torch.load, eval, yaml.load, allow_pickle, extractall",
        "0 hits",
        ("test_source_scan.py",),
        "0 hits",
        tests_are_the_gate=True,
    ),
    Fault(
        14,
        "sockets that listen while training: none, or of this machine only; Ray on another "
        "address without a token is refused",
        "each",
        ("test_faults.py", "rollout/test_ray.py"),
        "each",
        tests_are_the_gate=True,
    ),
    Fault(
        15,
        "a gate that is fed a broken product (wrong hash, crash, nothing completed, too slow)",
        "each gate",
        ("gates/test_gates.py",),
        "each gate",
        tests_are_the_gate=True,
    ),
    Fault(
        16,
        "kill and resume in fresh interpreters with other hash seeds, also while the folder is "
        "made and while a checkpoint is restored",
        "5",
        ("test_exact_resume.py",),
        "100",
        (
            Need("exact_resume", 100, "kills", "reach"),
            Need("exact_resume", 1, "kills in creating", "reach"),
            Need("exact_resume", 1, "kills in restoring", "reach"),
        ),
    ),
    Fault(
        17,
        "recipe edited, other instruction set or library version before a resume: refused, or "
        "marked not exact for good",
        "each",
        ("building/test_exactness.py", "runs/test_manifest.py", "envs/test_probe.py"),
        "each",
        tests_are_the_gate=True,
    ),
    Fault(
        18,
        "ranks that disagree (recipe, instruction set, weights): noticed at the start, or within "
        "some iterations where one drifts",
        "each",
        ("training/test_rank_faults.py",),
        "each",
        tests_are_the_gate=True,
    ),
    Fault(
        19,
        "NaN on any rank: reported with its culprit, nothing saved",
        "each place",
        ("training/test_rank_faults.py",),
        "50",
        (Need("rank_faults", 50, "numbers that are not finite"),),
    ),
    Fault(
        20,
        "frozen or cut-off rank or head: named within 2 minutes, signals answered within 10 s, "
        "the resume exact",
        "1",
        ("training/test_rank_faults.py", "rollout/test_ray.py"),
        "20",
        (Need("rank_faults", 20, "freezes"), Need("ray_head", 20, "strikes")),
    ),
    Fault(
        21,
        "hostile run folder (links, foreign `.py`, policies sealed anew, huge JSON): nothing "
        "written outside, no code, bounded time and memory",
        "40",
        ("test_hostile.py", "fuzz/test_corpus.py", "fuzz/test_gate.py"),
        "1,000,000 fuzzed inputs",
        (Need("fuzz", 1_000_000, "inputs"),),
    ),
    Fault(
        22,
        "one damaged byte in any file of a run: resumes from what is whole, or says what is lost",
        "every file",
        ("test_damaged_runs.py", "building/test_falling_back.py"),
        "5,000",
        (Need("damaged_runs", 5_000, "cases"), Need("damaged_runs", 50, "by command line")),
    ),
    Fault(
        23,
        "an exception on one worker that passes, a worker ten times slower, a broadcast that "
        "fails: the run goes on, with the same bits",
        "each",
        ("rollout/test_ray.py", "rollout/test_elastic.py", "rollout/test_schedule.py"),
        "50",
        (Need("ray_transients", 50, "moments", "reach-at-scale"),),
    ),
    Fault(
        24,
        "writes that were not synced are lost or reordered at any point of a save, below Python",
        "200",
        ("runs/test_crash_states.py",),
        "all prefixes",
        (Need("crash_states", 70, "recordings"),),
    ),
    Fault(
        25,
        "folders and files of other programs beside runs and inside of them: prune, fsck and the "
        "cleaning of a resume delete and change none of them",
        "20",
        ("test_fault_cases.py", "cli/test_runs.py"),
        "1,000 foreign folders beside 2,000 runs, listed within 10 s of processor time",
        (Need("fault_cases", 1000, "foreign folders", "foreign_folders"),),
    ),
    Fault(
        26,
        "standard output closed, full, slow or a terminal that goes away; a log writer that raises "
        "or whose disk is full; W&B's service or server dying, hanging or away: the run goes on "
        "with the same bits, and says so once",
        "each",
        (
            "test_fault_cases.py",
            "core/test_outlets.py",
            "training/logs/test_apart.py",
            "training/logs/test_wandb.py",
        ),
        "100",
        (Need("fault_cases", 100, "faults of what only reports", "reporting"),),
    ),
    Fault(
        27,
        "an environment that exits, hangs, crashes, forks, runs out of memory or gives another "
        "shape, type or range, in process and in workers: named within 2 minutes, restarted where "
        "it can be or ended with another exit code than 0, no orphan",
        "4",
        ("test_fault_cases.py", "envs/test_gym_workers.py", "rollout/test_guard.py"),
        "200",
        (Need("fault_cases", 200, "strikes of environments", "environments"),),
    ),
    Fault(
        28,
        "code that decides bits changed before a resume or on one of two ranks (Etude's, an "
        "environment's, a package's, the model): named, and never called exact",
        "each kind",
        ("core/test_code.py", "building/test_changed_task.py", "test_fault_cases.py"),
        "200",
        (Need("fault_cases", 200, "changes of code", "changed_code"),),
    ),
    Fault(
        29,
        "bytes of a dataset or replay changed in place while training: noticed before the next "
        "save, and named",
        "20",
        ("data/test_episodes_resume.py", "test_fault_cases.py"),
        "500",
        (Need("fault_cases", 500, "changes of data in training", "changed_data"),),
    ),
    Fault(
        30,
        "a million log rows: what a save, plan, resume, report and bundle cost, and a "
        "checkpoint's size",
        "10^5 rows",
        ("test_fault_cases.py", "runs/test_run_folder.py", "core/test_history.py"),
        "10^6 rows, and signals while a resume starts",
        (
            Need("fault_cases", 1_100_000, "log rows", "long_logs"),
            Need("fault_cases", 50, "signals while a resume starts", "stopped_resumes"),
        ),
    ),
    Fault(
        31,
        "absurd sizes in recipes and options: a plan or one sentence within 2 s of processor time",
        "each field",
        ("test_kinds.py", "test_fault_cases.py"),
        "10,000 fuzzed",
        (Need("fault_cases", 10_000, "absurd sizes", "absurd_sizes"),),
    ),
    Fault(
        32,
        "hostile ONNX, tar, JSON, YAML and tables in bundles, foreign requests to the page of "
        "`--web`: bounded time and memory, interrupts answered, no data sent",
        "20",
        ("test_fault_cases.py", "share/test_export.py", "cli/test_view.py"),
        "1,000 bundles and ONNX files, 100 requests",
        (
            Need("fault_cases", 1_000, "hostile bundles and ONNX files", "hostile_bundles"),
            Need("fault_cases", 100, "foreign web requests", "foreign_requests"),
        ),
    ),
    Fault(
        33,
        "file systems without links, flushed folders, locks or renamed folders, read-only, full "
        "or in memory: a fallback with a note, or one sentence, before the first step",
        "4",
        ("test_fault_cases.py", "runs/test_run_folder.py"),
        "each",
        (Need("fault_cases", 9, "emulated file systems", "file_systems"),),
    ),
    Fault(
        34,
        "object store: requests lost, late, doubled or unanswered, also after another writer took "
        "over; two writers at once; machine and disk gone: no checkpoint is lost, the same bits",
        "5",
        ("runs/test_stored_runs.py",),
        "200 preemptions",
        (Need("preemptions", 200, "preemptions"),),
    ),
    Fault(
        38,
        "memory limit reached (address space), replay larger than the disk: one sentence, the last "
        "good checkpoint kept",
        "each",
        ("planning/test_out_of_memory.py", "test_fault_cases.py"),
        "20",
        (Need("fault_cases", 20, "memory or disk limits", "memory_limits"),),
    ),
    Fault(
        39,
        "every allocation of a save and of a resume refused once: no checkpoint is bad or lost",
        "2",
        ("test_fault_cases.py",),
        "1,000 points",
        (Need("fault_cases", 1_000, "refused allocations", "refused_allocations"),),
    ),
    Fault(
        40,
        "ranks or actors with other code or models: refused or marked",
        "each kind",
        ("training/test_rank_faults.py", "rollout/test_elastic.py", "test_fault_cases.py"),
        "those of row 28",
        (Need("fault_cases", 200, "changes of code", "changed_code"),),
    ),
)

HEAD = """# Faults, and what has been counted

<!-- Made by `python -m gates.pages.faults_table` from gates/results/*.json: do not edit. -->

CI tries these faults at each change of the code, and a gate (a script in `gates/`) tries them at
full size. Tests that take long rotate: CI does one part of ten of them at each commit, so that ten
successive commits do them all, and `make nightly` does all at once. "rotates" and "some rotate"
say which. If none of n trials failed, the failure rate is below 3/n at 95 % confidence: 300 trials
bound it below 1 %. A count is a record of the commit in the last column. It stands for today's code
while the gate passes with it at its smallest size (`--smallest`, which CI runs; [record
28](decisions/0028-results-stand-by-first-iterations.md)), and while a run that is to be killed
begins with the same bits; [Measured](measured.md) lists what does not. A gate that was not run at
full size, or counted too few cases, is marked "below its count". Where the tests cover all cases,
there is no gate beside them.

| # | fault | in CI | gate | asked | counted | when | commit |
|---|---|---|---|---|---|---|---|
"""


def load(folder: Path = RESULTS) -> dict[tuple[str, str], dict[str, Any]]:
    """Results at full size, by gate and variant."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {(r["gate"], r["variant"]): r for r in found if not r["smallest"]}


def cells(need: Need, results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """The cells of one gate: name, asked and counted number, date and commit."""
    name = f"`{need.gate}.py`" + (f" {need.variant}" if need.variant else "")
    asked = f"{need.count:,} {COUNTED.get(need.what, need.what)}"
    result = results.get((need.gate, need.variant))
    if result is None:
        return [name, asked, f"not run: **{BELOW}**", "", ""]
    counted = result["counts"].get(need.what, 0)
    found = f"{counted:,}"
    if counted < need.count:
        found += f": **{BELOW}**"
    if result["verdict"] != "passed":
        found += f" ({result['verdict']})"
    return [name, asked, found, result["date"][:10], result["commit"]]


def lines(fault: Fault, results: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """A fault's rows of the table: one for each result that it needs."""
    tests = ", ".join(f"`{test}`{how_often(test)}" for test in fault.tests) or "no test"
    first = [str(fault.number), fault.text, f"{fault.in_ci}: {tests}"]
    if fault.tests_are_the_gate:
        when = "ten changes" if any(how_often(test) for test in fault.tests) else "each change"
        return [_row([*first, "the tests", fault.asked, fault.asked, when, ""])]
    if not fault.gates:
        return [_row([*first, "none", fault.asked, f"not run: **{BELOW}**", "", ""])]
    rest = [cells(need, results) for need in fault.gates]
    return [_row([*(first if i == 0 else ["", "", ""]), *found]) for i, found in enumerate(rest)]


def how_often(test: str) -> str:
    """A note on a file whose tests are not all in every run of CI."""
    tree = ast.parse((ROOT / "tests" / test).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if node.name.startswith("test_")]
    marks = [" ".join(ast.unparse(each) for each in node.decorator_list) for node in tests]
    if "pytestmark" in (text := ast.unparse(tree)) and ROTATED in text.split("pytestmark")[1][:200]:
        return " (rotates)"
    if ROTATED not in text:
        return ""
    # A mark on one set of parameters leaves the others in every run.
    whole = [ROTATED in mark and "parametrize" not in mark.split(ROTATED)[0] for mark in marks]
    return " (rotates)" if all(whole) else " (some rotate)"


def _row(words: list[str]) -> str:
    return "| " + " | ".join(words) + " |"


def render(results: dict[tuple[str, str], dict[str, Any]]) -> str:
    return HEAD + "\n".join(line for fault in FAULTS for line in lines(fault, results)) + "\n"


def main() -> int:
    page = render(load())
    PAGE.write_text(page)
    print(f"{PAGE.relative_to(ROOT)}: {page.count(BELOW) - 1} results below their count")
    return 0


if __name__ == "__main__":
    sys.exit(main())
