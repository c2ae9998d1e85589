"""examples/etude-plugin: a package of its own whose kinds are used like those of this package."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import yaml

import etude
import etude.plugin
from commands import run_all
from etude.core.catalogue import KINDS as KINDS_OF_SECTIONS
from etude.core.catalogue import RECIPES
from run_hash import run_hash
from test_docs import BLOCK, ROOT, answers, commands

PACKAGE = ROOT / "examples" / "etude-plugin"
PAGE = ROOT / "docs" / "plugins.md"
FILES = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*")
    if path.suffix in (".py", ".toml") and "build" not in path.parts
)
KINDS = {
    "algorithm": "reinforce",
    "env": "balance",
    "policy": "residual",
    "rewards": "calm",
    "logs": "csv",
    "format": "npz",
}
SHORT = {
    "name": "short",
    "env": {"kind": "balance", "max_episode_steps": 20},
    "policy": {"kind": "residual", "width": 8},
    "algorithm": {"kind": "reinforce", "rollout_steps": 16, "minibatch_size": 128},
    "rewards": {"kind": "calm"},
    "collector": {"num_envs": 32, "envs_per_group": 16},
    "clock": {"total_timesteps": 16 * 512, "iterations": 2, "cycles": 1},
    "evaluation": {"every": "2 cycles", "episodes": 8, "num_envs": 8, "envs_per_group": 8},
    "checkpoint": {"every": "1 cycle"},
    "logs": {"writers": ["csv"], "tensorboard": False},
}
"""All kinds of a run in 16 iterations."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that can import the package, which pip has installed."""
    folder = tmp_path_factory.mktemp("plugin")
    # A copy, as pip leaves what it builds beside the source.
    source = shutil.copytree(PACKAGE, folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / "site")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [str(folder / "site"), str(Path(etude.__file__).parents[1])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "XDG_STATE_HOME": str(folder / "state"),
    }


def blocks() -> list[tuple[str, str, str]]:
    """(language, rest of the info string, text) of every fenced block of the page."""
    return [(m[1], m[2].strip(), m[3]) for m in BLOCK.finditer(PAGE.read_text())]


def test_the_page_shows_the_files_as_they_are() -> None:
    shown = {info.removeprefix("file="): text for _, info, text in blocks() if "file=" in info}
    assert sorted(shown) == FILES
    for name, text in shown.items():
        assert text == (PACKAGE / name).read_text(), f"docs/plugins.md shows another {name}"


def test_entry_point_groups_keep_their_names() -> None:
    """Packages that are installed somewhere name them: a group with another name loses them."""
    groups = {section: arguments[0] for section, arguments in KINDS_OF_SECTIONS.items()}
    assert groups == {
        "algorithm": "etude.algorithms",
        "env": "etude.envs",
        "policy": "etude.policies",
        "rewards": "etude.rewards",
        "collector": "etude.collectors",
        "logs": "etude.logs",
        "format": "etude.dataset_formats",
    }
    assert RECIPES.group == "etude.recipes"


def other_modules(text: str) -> set[str]:
    """Modules of Etude that a file imports, other than `etude` and `etude.plugin`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    ours = {name for name in found if name.partition(".")[0] == "etude"}
    return ours - {"etude", "etude.plugin"}


def test_one_module_is_all_that_it_imports() -> None:
    for name in FILES:
        if name.endswith(".py"):
            assert not other_modules((PACKAGE / name).read_text()), name
    assert other_modules("def f():\n    from etude.core.keys import Key") == {"etude.core.keys"}
    assert other_modules("import etude.mj as mj") == {"etude.mj"}


def test_every_name_of_that_module_is_listed_and_there() -> None:
    listing = (etude.plugin.__doc__ or "").partition("Every kind\n")[2]
    names = [
        word
        for words in re.findall(r"^    ([\w, ]+):", listing, re.M)
        for word in words.split(", ")
    ]
    listed = set(re.findall(r"\b\w+\b", listing))
    assert set(names) <= set(etude.plugin.__all__) <= listed
    for name in etude.plugin.__all__:
        assert getattr(etude.plugin, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = etude.plugin.Nothing


def test_a_name_loads_only_what_it_needs() -> None:
    script = f"""
import sys
import etude.plugin
assert not {{"torch", "numpy", "pydantic", "mujoco"}} & set(sys.modules)
sys.path.insert(0, {str(PACKAGE / "src")!r})
import etude_plugin.balance
assert "mujoco" in sys.modules and "torch" not in sys.modules
import etude_plugin.reinforce
assert "etude.rl.sac" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_line_of_the_source_names_the_package_or_its_kinds() -> None:
    names = "|".join(KINDS.values())
    named = re.compile(
        rf"etude[-_]plugin|\b(?:reinforce|balance|calm)\b|kind\W+(?:{names})\b", re.IGNORECASE
    )
    source = Path(etude.__file__).parent
    hits = [
        f"{path.relative_to(source)}: {line}"
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if named.search(line)
    ]
    assert hits == []


@pytest.mark.rotated
def test_every_command_of_the_page(environment: dict[str, str], tmp_path: Path) -> None:
    steps = [
        (command[1:], answer)
        for language, info, text in blocks()
        if language == "console"
        for command, answer in zip(
            commands(text), answers(text) if info == "fails" else repeat(""), strict=False
        )
    ]
    for _, info, text in blocks():
        if info.startswith("own="):
            (tmp_path / info.removeprefix("own=")).write_text(text)
    listing: list[list[str]] = [["list"], ["list", "--kinds", "--json"]]
    results = run_all([*listing, *(arguments for arguments, _ in steps)], tmp_path, environment)
    for (arguments, answer), (code, out, err) in zip(steps, results[2:], strict=True):
        assert "Traceback" not in err
        assert (code != 0) == bool(answer), f"{arguments}: {out}{err}"
        assert not answer or " ".join(err.split()) == answer
    listed = results[0][1]
    assert "  balance  " in listed
    assert "(from etude-plugin)" in listed
    kinds = json.loads(results[1][1])
    assert {section: kinds[section].get(kind) for section, kind in KINDS.items()} == dict.fromkeys(
        KINDS, "etude-plugin"
    )
    # It learns, and the log of one's own has every row.
    run = tmp_path / "runs" / "balance"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/success_rate"] > 0.9
    assert {"train/advantage_std", "rollout/jerk"} <= set(rows[-1])
    assert len((run / "metrics.csv").read_text().splitlines()) == 1 + len(rows)


@pytest.mark.rotated
def test_five_kills_change_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(SHORT))
    driver = str(Path(__file__).parent / "lib" / "kill_driver.py")
    done = subprocess.run(
        [sys.executable, driver, str(recipe), str(tmp_path), "5", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert sum(result["hits"].values()) == 5
    untouched, *others = map(Path, result["runs"])
    assert others
    for other in others:
        assert run_hash(other) == run_hash(untouched)
        assert (other / "metrics.csv").read_bytes() == (untouched / "metrics.csv").read_bytes()


@pytest.mark.rotated
def test_a_class_that_a_file_names_needs_trust(environment: dict[str, str], tmp_path: Path) -> None:
    imported = tmp_path / "imported"
    (tmp_path / "wide.py").write_text(
        f"with open({str(imported)!r}, 'a') as file:\n    file.write('once more')\n\n"
        "from etude_plugin.residual import ResidualConfig\n\n\n"
        "class Wide(ResidualConfig):\n    width: int = 48\n"
    )
    hidden = ["wide.py:Wide"]  # no text, which would be asked about
    for name, kind in (("plain", "residual"), ("named", "wide.py:Wide"), ("hidden", hidden)):
        recipe = {**SHORT, "policy": {"kind": kind}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    results = run_all(
        [
            ["plan", "named.yaml"],
            ["plan", "hidden.yaml"],
            ["plan", "plain.yaml", "--policy.kind", "wide.py:Wide"],
            ["train", "named.yaml", "--trust", "--folder", "run", "--clock.total-timesteps=1024"],
            ["eval", "run", "--episodes", "8"],
        ],
        tmp_path,
        environment,
    )
    assert [code for code, _, _ in results] == [2, 2, 0, 0, 0], results
    assert "it is not trusted here yet" in results[0][2]
    assert "not 'list'" in results[1][2]
    assert imported.read_text() == 3 * "once more"
    contract = json.loads((tmp_path / "run/checkpoints/final/policy/contract.json").read_text())
    assert (contract["policy"]["kind"], contract["policy"]["width"]) == ("wide.py:Wide", 48)
