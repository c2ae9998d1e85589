"""No artifact holds code, so nothing in the source may turn bytes into code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import etude

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec"}
CALLS = {
    "torch.load",
    "torch.serialization.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "shutil.unpack_archive",
    "builtins.eval",
    "builtins.exec",
}
ATTRIBUTES = {"extractall"}
KEYWORDS = {"allow_pickle"}


def dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """`t.serialization.load` as the full name behind it, with imports resolved."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return "?"


def scan(source: str) -> list[str]:
    """What a file should not contain, as "line: what"."""
    tree, aliases, hits = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        for local, full in names:
            aliases[local] = full if "." not in full or local != full.split(".")[0] else local
            if full.split(".")[0] in MODULES:
                hits.append(f"{node.lineno}: import of {full}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, aliases)
            if name in CALLS or (isinstance(node, ast.Name) and name in BUILTINS):
                hits.append(f"{node.lineno}: {name}")
            if isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES:
                hits.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            hits.append(f"{node.value.lineno}: {node.arg}")
    return hits


def test_the_source_cannot_run_artifacts() -> None:
    root = Path(etude.__file__).parent
    runtime = Path(__file__).parents[1] / "runtime"
    paths = sorted([*root.rglob("*.py"), *runtime.rglob("*.py")])
    assert len(paths) > 10
    hits = [f"{p}:{hit}" for p in paths for hit in scan(p.read_text())]
    assert hits == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from marshal import loads as l",
        "import shelve",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "from torch import load as open_it\nopen_it(path)",
        "import torch.serialization\ntorch.serialization.load(path)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import yaml\nload = yaml.unsafe_load",
        "eval('1')",
        "exec(code)",
        "run = eval",
        "np.load(path, allow_pickle=True)",
        "tar.extractall(folder)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert scan(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "run.evaluate(episodes=3)",
        "import yaml\nyaml.safe_load(text)",
        "state.load(path)",
        "import json\njson.load(stream)",
        "'pickle, eval(, torch.load'",
        "import numpy as np\nnp.load(path)",
    ],
)
def test_the_scan_does_not_cry_wolf(source: str) -> None:
    assert scan(source) == []
