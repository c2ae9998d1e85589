"""The first commit that changes the bits of a recipe.

Of each commit that is tried, a worktree of git trains the first iterations of the recipe in a
process of its own, with the code of that commit, and hashes what every phase computes
(`probe.py`). The first commit between two is found by bisection, as `git bisect` does: where
several commits change bits, it is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.errors import EtudeError, UsageError
from etude.core.output import waiting

PROBE = Path(__file__).with_name("probe.py")
Log = list[tuple[str, dict[str, str]]]
"""[(phase, {tensor: hash})] in the order in which it was computed."""


class Changed(NamedTuple):
    """A commit whose bits differ from those of the one before."""

    commit: str
    subject: str
    before: str
    iteration: int
    phase: str
    tensor: str
    probes: int
    """Commits that were tried."""

    def sentence(self) -> str:
        return (
            f"{self.commit[:10]} ({self.subject}) is the first commit that changes the bits: in "
            f"iteration {self.iteration}, phase {self.phase}, {self.tensor} differs from "
            f"{self.before[:10]}. {self.probes} commits were tried."
        )


def first_change(
    recipe: str,
    good: str,
    bad: str,
    options: Sequence[str] = (),
    iterations: int = 2,
    repository: Path = Path(),
    say: Callable[[str], None] = lambda text: None,
) -> Changed | None:
    """The first commit after `good`, up to `bad`, that changes bits; None if they have the same."""
    root = Path(_git(repository, "rev-parse", "--show-toplevel"))
    old, new = (_git(root, "rev-parse", "--verify", f"{each}^{{commit}}") for each in (good, bad))
    between = _git(root, "rev-list", "--first-parent", "--reverse", f"{old}..{new}").split()
    if not between or between[-1] != new:
        raise UsageError(f"{good} is not an ancestor of {bad} on its first-parent line.")
    commits, logs = [old, *between], dict[str, Log]()
    with tempfile.TemporaryDirectory(prefix="etude-bisect-") as scratch:

        def log_of(commit: str) -> Log:
            if commit not in logs:
                logs[commit] = _probe(root, commit, Path(scratch), recipe, options, iterations)
                say(f"{commit[:10]} {_git(root, 'log', '-1', '--format=%s', commit)[:70]}")
            return logs[commit]

        low, high = 0, len(commits) - 1
        if difference(log_of(commits[low]), log_of(commits[high])) is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            same = difference(log_of(commits[0]), log_of(commits[middle])) is None
            low, high = (middle, high) if same else (low, middle)
        found = difference(log_of(commits[low]), log_of(commits[high]))
    assert found is not None
    subject = _git(root, "log", "-1", "--format=%s", commits[high])
    return Changed(commits[high], subject, commits[low], *found, len(logs))


def difference(a: Log, b: Log) -> tuple[int, str, str] | None:
    """(iteration, phase, tensor) of the first hash that differs; new names are ignored."""
    iteration = 0
    for (phase, x), (other, y) in zip(a, b, strict=False):
        if phase != other:
            return iteration, phase, f"the order of phases ({other} instead)"
        names = [name for name in x if name in y and x[name] != y[name]]
        if names:
            return iteration, phase, names[0]
        iteration += phase == "iteration"
    return None if len(a) == len(b) else (iteration, "log", "the number of phases")


def _probe(
    root: Path, commit: str, scratch: Path, recipe: str, options: Sequence[str], iterations: int
) -> Log:
    """Train the first iterations with the code of a commit, in a worktree."""
    tree, output = scratch / commit[:12], scratch / f"{commit[:12]}.json"
    _git(root, "worktree", "add", "--detach", "--force", str(tree), commit)
    try:
        source = tree / "src" if (tree / "src").is_dir() else tree
        # Its own modules are found first; its recipes' files are relative to it.
        path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
        words = [sys.executable, "-P", str(PROBE), recipe, str(iterations), str(output), *options]
        with waiting(f"training with {commit[:10]}"):
            done = subprocess.run(
                words,
                cwd=tree,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
            )
        if done.returncode or not output.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise EtudeError(f"{commit[:10]} cannot train {recipe}: {lines[-1] if lines else ''}")
        document: Any = json.loads(output.read_text())
        return [(str(phase), dict(hashes)) for phase, hashes in document["log"]]
    finally:
        _git(root, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()
