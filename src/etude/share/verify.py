"""Checks of a bundle: its results are computed again and compared.

On a machine of the same kind with the same versions, they must be equal bit for bit. Otherwise they
must agree within what chance explains.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from etude.core import user_code
from etude.core.contracts import Array
from etude.core.errors import EtudeError, describe_error
from etude.core.intervals import wilson
from etude.core.limited import LimitedProcess, Limits, ReaderEnded
from etude.core.trees import Tree, digest
from etude.evaluate import EPISODES, evaluation, fresh, report
from etude.models.policies import BasePolicy
from etude.planning.loading import policies, policy_parts
from etude.planning.recipe import Recipe, code_roots
from etude.runs import bundle, manifest, onnx_files, tensors
from etude.runs.documents import Malformed, decode_sealed
from etude.runs.folder import NOT_EXACT
from etude.runs.manifest import Differences, differences
from etude.runs.metrics_log import DiskHistory, chain_of, older_digest_of

RETRAINED = "retrained"
Verdict = Literal["same", "close", "differs", "not compared"]
SECONDS = 40.0
"""Default limit in seconds for the recorded steps, in torch and in ONNX, and the episodes."""
_CHILD, _MEMORY = "etude.share.onnx_child", 3 << 29
_MAX_EPISODES = 100_000
_ERRORS = 3.0
"""Largest difference of two means, in standard errors."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    verdict: Verdict
    words: str


class TookLong(EtudeError):
    """A verification exceeded its time limit."""


class Deadline:
    """The time limit of a verification."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.1)

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise self.late()

    def late(self) -> TookLong:
        return TookLong(
            f"The steps and episodes of the bundle took longer than {self._seconds:g} s; "
            "--seconds allows more, if you trust its author."
        )


def changed_machine(recipe: Recipe, made_on: Tree) -> Differences:
    """Differences of this machine that may change bits; made_on: the manifest of the run."""
    torch.set_num_threads(recipe.learner.threads)
    own = user_code.compute_hashes(code_roots(recipe))
    here = manifest.collect("", {"learner": recipe.learner.threads}, code=own)
    return differences({name: value for name, value in made_on.items() if name != "files"}, here)


def document(folder: Path, name: str) -> Tree:
    """A JSON file of an examined bundle, without its seal."""
    try:
        return decode_sealed(bundle.read_text(folder, name).encode())
    except (OSError, ValueError) as error:
        wrong = "is missing" if isinstance(error, OSError) else str(error)
        raise EtudeError(f"{name} of the bundle {wrong}.") from error


def check_onnx(folder: Path, policy: BasePolicy, deadline: Deadline) -> Finding:
    """Compare the ONNX file with the policy on the recorded steps.

    A subprocess with limits reads and runs it: an untrusted model may hang, or take all memory.
    """
    what, path = "onnx", folder / bundle.ONNX
    if not path.is_dir():
        return Finding(what, "not compared", "the bundle has no ONNX file")
    if find_spec("onnxruntime") is None:
        words = "onnxruntime is not installed: pip install 'etude[export]'"
        return Finding(what, "not compared", words)
    from etude.share.export import CONTRACT, TOLERANCE, distance
    from etude.share.export import ONNX as MODEL

    try:
        contract = document(folder, f"{bundle.ONNX}/{CONTRACT}")
        contract.pop("files")
        weights = digest({k: v.numpy() for k, v in policy.state_dict().items()})
        if contract["run"]["policy_sha256"] != weights:
            return Finding(what, "differs", f"{CONTRACT} is of another policy than policy/")
        replay = _replay(path, policy, deadline)
        with _running(path / MODEL, policy, replay, deadline) as child:
            inside = _answer(child, "contract", limit=bundle.MAX_TEXT)
            if json.loads(inside) != contract:
                words = f"{MODEL} and {CONTRACT} have different contracts"
                return Finding(what, "differs", words)
            actions = np.frombuffer(
                _answer(child, "actions", size=replay.actions.nbytes), replay.actions.dtype
            )
        steps, most = len(replay.starts), distance(actions.reshape(replay.actions.shape), replay)
    except onnx_files.Refused as error:
        return Finding(what, "differs", f"{MODEL} {error}, so it was not run")
    except ReaderEnded as error:
        if error.why == "slow":
            raise deadline.late() from error
        return Finding(what, "differs", f"{MODEL} {error.words}")
    except TookLong:
        raise
    except Exception as error:  # untrusted files may fail in any way
        return Finding(what, "differs", f"{MODEL} cannot be run: {describe_error(error)[:200]}")
    words = f"{steps:,} recorded steps, largest difference from torch {most:.1e}"
    if not most <= TOLERANCE:
        return Finding(what, "differs", f"{words}, and {TOLERANCE:g} is allowed")
    return Finding(what, "same", words)


def _running(path: Path, policy: BasePolicy, replay: Any, deadline: Deadline) -> LimitedProcess:
    """The subprocess that runs an ONNX file over recorded steps."""
    from etude.share.export import ActingPolicy

    acting = ActingPolicy(policy)
    seen = {name: np.ascontiguousarray(x) for name, x in replay.observations.items()}
    order = {
        "path": str(path),
        "observations": {name: [str(x.dtype), x.shape] for name, x in seen.items()},
        "states": {name: [str(x.dtype), x.shape] for name, x in acting.zeros().items()},
        "outputs": acting.outputs,
        "starts": replay.starts.tolist(),
        "actions": [str(replay.actions.dtype), replay.actions.shape],
    }
    limits = Limits(_MEMORY, deadline.left)
    return LimitedProcess(_CHILD, order, limits, (x.data.cast("B") for x in seen.values()))


def _answer(child: LimitedProcess, kind: str, size: int = -1, limit: int = 0) -> bytes:
    """The bytes that the subprocess sends next: `size` of them, or at most `limit`."""
    header = child.header()
    if header["kind"] == "refused":
        raise onnx_files.Refused(header["what"])
    if header["kind"] == "failed":
        raise Malformed(header["what"])
    if header["kind"] != kind or not (header["size"] == size or 0 <= header["size"] <= limit):
        raise Malformed("its reader answers something else")
    return bytes(child.read(header["size"]))


def _replay(path: Path, policy: BasePolicy, deadline: Deadline) -> Any:
    """The recorded observations, with the actions of torch on this machine."""
    from etude.share.export import REPLAY, STEPS, Replay, torch_actions

    with (path / REPLAY).open("rb") as stream:
        arrays = tensors.read(stream, (path / REPLAY).stat().st_size)
    starts = arrays["starts"]
    seen = {name: arrays[f"observations/{name}"] for name in policy.actor_observations}
    for name, spec in policy.actor_observations.items():
        if seen[name].shape != (len(starts), *spec.shape) or seen[name].dtype != spec.dtype:
            raise Malformed(f"the recorded '{name}' does not fit the policy")
    if starts.dtype != np.bool_ or starts.ndim != 1 or not starts[:1].all():
        raise Malformed("the recorded steps begin with no episode")
    if len(starts) > STEPS:
        raise Malformed(f"{len(starts):,} steps were recorded, and an export has {STEPS:,}")
    return Replay(seen, starts, torch_actions(policy, seen, starts, deadline.check))


def check_episodes(
    recipe: Recipe,
    folder: Path,
    path: Path,
    changed: Sequence[str],
    deadline: Deadline,
) -> Finding:
    """Play the episodes of the bundle again with the policy at `path`, and compare.

    changed: sentences on differences that decide bits; without any, all numbers must be equal.
    """
    what, summary = "episodes", f"{bundle.EVALUATION}/{report.SUMMARY}"
    name = f"{bundle.EVALUATION}/{EPISODES}"
    if not (folder / name).is_file():
        return Finding(what, "not compared", "the bundle has no evaluation")
    if recipe.env is None:
        return Finding(what, "not compared", "the recipe has no environment")
    there = bundle.read_text(folder, name)
    if there.count("\n") > _MAX_EPISODES:
        raise EtudeError(f"{name} of the bundle has more than {_MAX_EPISODES:,} episodes.")
    old, seed = _table(there, name), document(folder, summary).get("seed")
    if type(seed) is not int or seed < 0:
        raise EtudeError(f"{summary} of the bundle names no seed.")
    count = len(old["return"])
    here = evaluation.played(recipe, path, count, seed, check=deadline.check).csv()
    if here == there:
        return Finding(what, "same", f"{count} played again, the same bit for bit; {_success(old)}")
    return _compared(old, _table(here, "what was played"), changed)


def _compared(old: dict[str, Array], new: dict[str, Array], changed: Sequence[str]) -> Finding:
    """Compare two different tables of episodes."""
    moved = np.zeros(len(old["return"]), np.bool_)
    for name in old.keys() & new.keys():
        moved |= old[name] != new[name]
    words = (
        f"{int(moved.sum())} of {len(moved)} are not the same bit for bit; {_success(old)} in the "
        f"bundle and {_success(new)} here"
    )
    if not changed:
        return Finding("episodes", "differs", f"{words}, where all should be")
    far = _far(old, new)
    if far:
        return Finding("episodes", "differs", f"{words}: {far}")
    return Finding("episodes", "close", f"{words}: no more than chance explains")


def _far(old: dict[str, Array], new: dict[str, Array]) -> str:
    """How two tables of episodes differ by more than chance explains; "" if they do not."""
    if "is_success" in old and "is_success" in new:
        (low, high), (below, above) = (
            wilson(int(x["is_success"].sum()), len(x["is_success"])) for x in (old, new)
        )
        if low > above or below > high:
            return "the 95 % intervals of success do not meet"
    a, b = old["return"], new["return"]
    error = math.sqrt(a.var() / len(a) + b.var() / len(b))
    apart = abs(float(a.mean() - b.mean()))
    if not apart <= _ERRORS * error + 1e-6 * abs(float(a.mean())):
        return f"mean returns are more than {_ERRORS:g} standard errors apart"
    return ""


def _success(table: dict[str, Array]) -> str:
    if "is_success" in table:
        return f"success {table['is_success'].mean():.1%}"
    return f"mean return {table['return'].mean():,.2f}"


def _table(text: str, name: str) -> dict[str, Array]:
    """The numbers of a table of episodes by column; raises if it is not such a table."""
    try:
        rows = list(csv.DictReader(io.StringIO(text), strict=True))
        columns = [c for c in rows[0] if c not in ("episode", "kind", "motion")]
        table = {c: np.array([float(row[c]) for row in rows], np.float64) for c in columns}
        if "return" not in table:
            raise ValueError
    except (ValueError, TypeError, KeyError, IndexError, csv.Error) as error:
        raise EtudeError(f"{name} is not a table of episodes.") from error
    return table


def check_metrics(folder: Path, about: Tree) -> Finding:
    """Compare the rows of metrics.jsonl with the fingerprint."""
    expected = _fingerprint(about)
    if not expected:
        return Finding("metrics", "not compared", "the bundle has no fingerprint")
    rows, digest = DiskHistory(folder / bundle.METRICS), expected.get("metrics")
    if not any(digest == digest_of(rows) for digest_of in (chain_of, older_digest_of)):
        return Finding("metrics", "differs", "metrics.jsonl is of another run than the fingerprint")
    return Finding("metrics", "same", "the rows are those of the fingerprint")


def check_retrained(
    recipe: Recipe,
    folder: Path,
    about: Tree,
    run: Path,
    found: Tree,
    changed: Sequence[str],
    deadline: Deadline,
) -> Finding:
    """Compare a run of the recipe, trained on this machine, with the bundled one.

    about: the content of bundle.json; found: the fingerprint of the new run; changed: sentences on
    differences that decide bits.
    """
    expected, reasons = _fingerprint(about), [*changed]
    other = [name for name in found if expected.get(name) != found[name]]
    if not other:
        return _same_policy(folder, about, run, found)
    exactness = str(about.get("exactness", ""))
    if exactness.startswith(NOT_EXACT):
        reasons.append(f"The run is {exactness}.")
    words = f"another fingerprint ({', '.join(other)})" if expected else "no fingerprint to compare"
    if not reasons:
        return Finding(RETRAINED, "differs", f"{words}, where it should be the same")
    episodes = check_episodes(recipe, folder, run, reasons, deadline)
    return Finding(RETRAINED, episodes.verdict, f"{words}; of its episodes, {episodes.words}")


def _same_policy(folder: Path, about: Tree, run: Path, found: Tree) -> Finding:
    """Compare the policy of the bundle with those of a run with its fingerprint."""
    words = f"fingerprint {found['policy'][:12]}...: weights, training state and metrics"
    step = about.get("policy_step")
    path = policies(run).get(step) if isinstance(step, int) else None
    if path is None:
        words += " are the same bit for bit; the run has not kept the bundle's policy to compare"
        return Finding(RETRAINED, "not compared", words)
    if digest(policy_parts(path)[0]) != digest(policy_parts(folder / bundle.POLICY)[0]):
        words += f" are the same, but policy/ is not that of step {step:,}"
        return Finding(RETRAINED, "differs", words)
    return Finding(RETRAINED, "same", f"{words}, and policy/, are the same bit for bit")


def _fingerprint(about: Tree) -> Tree:
    found = about.get("fingerprint")
    return found if isinstance(found, dict) else {}


def load_policy(folder: Path) -> BasePolicy:
    """The policy of an examined bundle; its code runs if that of the recipe is trusted."""
    return fresh.load(folder / bundle.POLICY).eval()
