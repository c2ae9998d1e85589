"""Which code each gate measures, and a hash of it.

A result keeps the hash of the code that it measured. Where the code's hash is another one today,
pages mark the result's figures as older than the code. Comments and docstrings do not count.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINING = (
    "algorithms",
    "building",
    "core",
    "envs",
    "experience",
    "learning",
    "models",
    "planning",
)
TRAINING += ("robots", "rollout", "runs", "tasks", "training")
"""The packages below src/etude that every training goes through."""
COLLECTING = ("core", "envs", "models", "robots", "rollout", "tasks")
UPDATING = ("algorithms", "core", "experience", "learning", "models")
MEASURES = {
    "rollout_speed": COLLECTING,
    "gym_workers": COLLECTING,
    "ray_speed": COLLECTING,
    "update_speed": UPDATING,
    "off_policy_speed": UPDATING,
    "reward_speed": UPDATING,
    "damaged_data": ("core", "datasets", "experience"),
    "datasets": ("core", "datasets", "experience"),
    "torn_checkpoints": ("core", "runs", "training"),
    "crash_states": ("core", "experience", "runs", "training"),
    "dashboard_cost": (*TRAINING, "logs", "metrics"),
    "train_imitation": (*TRAINING, "motion"),
    "sweep": (*TRAINING, "sweeps"),
    "sim_to_sim": (*TRAINING, "reports"),
}
"""Of a gate that is not named here, all that a training goes through."""


def source_hash(gate: str) -> str:
    """The start of a SHA-256 over the code that a gate measures."""
    hashes = [package_hash(name) for name in sorted(MEASURES.get(gate, TRAINING))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]


@cache
def package_hash(name: str, root: Path = ROOT) -> str:
    """SHA-256 over the Python files of a package, without comments and docstrings."""
    found = hashlib.sha256()
    for path in sorted((root / "src" / "etude" / name).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode())
        found.update(ast.dump(_without_docstrings(ast.parse(path.read_text()))).encode())
    return found.hexdigest()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, field, None), list):
                kept = [line for line in body if not _is_text(line)]
                setattr(node, field, kept)
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
