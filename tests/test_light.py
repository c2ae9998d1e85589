"""What commands load: help and lists next to nothing, a run only what it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import etude

SECONDS = 0.4
"""Of processor time that help and lists may take."""
HEAVY = ("torch", "mujoco", "gymnasium", "pydantic", "numpy", "rich")
MODULES, LINES = 85, 18_700
"""Of this package that a PPO run may import."""
UNUSED = {
    "sac",
    "td3",
    "off_policy",
    "rrd",
    "ircr",
    "amp",
    "learned",
    "reward_only",
    "offline",
}
UNUSED |= {"motion", "formats", "store", "pick_place", "imitation", "adapters", "ray", "wandb"}
"""Folders and modules that a PPO run of reach has no use for."""

COMMAND = """
import json, sys, time
from etude.cli.main import main
assert main(sys.argv[1:]) == 0
print()
print(json.dumps([time.process_time(), [*sys.modules]]))
"""
LOADED = """
import json, sys
print()
print(json.dumps({n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "etude"}))
"""
TRAIN = """
import sys
from etude.cli.main import main
assert main(["train", "reach-short", "--clock.total-timesteps=16384", "--clock.cycles=1",
    "--clock.iterations=1", "--folder", sys.argv[1]]) == 0
"""
RUN = """
import sys
import etude
recipe = etude.recipes.reach_short()
clock = {"total_timesteps": recipe.algorithm.rollout_steps * recipe.collector.num_envs}
clock = recipe.clock.model_copy(update={**clock, "cycles": 1, "iterations": 1})
etude.train(recipe.model_copy(update={"clock": clock}), sys.argv[1])
"""


def last_line(script: str, *arguments: str | Path) -> str:
    """What a script in a new process prints last."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "list",
        "list --kinds",
        "plan --help",
        "train --help",
        "completion bash",
    ],
)
def test_help_and_lists_are_quick(arguments: str) -> None:
    seconds = []
    for _ in range(3):
        spent, modules = json.loads(last_line(COMMAND, *arguments.split()))
        seconds.append(spent)
        assert not [name for name in HEAVY if name in modules]
        if spent < SECONDS:
            break
    assert min(seconds) < SECONDS


def loaded(script: str, folder: Path) -> dict[str, int]:
    """{module: lines} of this package that a script has loaded at its end."""
    files = json.loads(last_line(script + LOADED, folder))
    lines = {name: Path(file).read_text().count("\n") for name, file in sorted(files.items())}
    print(f"{len(lines)} modules, {sum(lines.values()):,} lines:")
    print("\n".join(f"{count:6} {name}" for name, count in lines.items()))
    assert not [name for name in lines if UNUSED.intersection(name.split("."))]
    return lines


def test_a_ppo_run_loads_what_it_uses(tmp_path: Path) -> None:
    lines = loaded(RUN, tmp_path / "run")
    assert len(lines) <= MODULES
    assert sum(lines.values()) <= LINES


def test_so_does_its_command(tmp_path: Path) -> None:
    commands = [n for n in loaded(TRAIN, tmp_path / "run") if n.startswith("etude.cli.")]
    assert commands == [f"etude.cli.{n}" for n in ("main", "options", "target", "train", "verbs")]


def test_what_is_unused_is_there() -> None:
    package = Path(etude.__file__).parent
    paths = [path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")]
    assert not UNUSED.difference(*paths)
