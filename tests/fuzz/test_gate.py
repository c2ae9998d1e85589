"""The fuzzing gate fails on a product that is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = """
import json, os, sys

reads, calls = json.loads, [0]

def loads(text, **options):
    calls[0] += 1
    if calls[0] > 40:
        way = calls[0] % 8
        if way == 0:
            raise KeyError("broken")
        if way == 1:
            open({outside!r}, "w").close()
        if way == 2 and "antigravity_of_a_stranger" not in sys.modules:
            try:
                import antigravity_of_a_stranger
            except ImportError:
                pass
        if way == 3:
            os.system("true")
    return reads(text, **options)

json.loads = loads
"""


@pytest.mark.rotated
def test_it_fails_on_a_broken_reader(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    (tmp_path / "sitecustomize.py").write_text(BROKEN.format(outside=str(tmp_path / "outside")))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "gates.faults.fuzz", "--inputs", "200"]
    command += ["--readers", "clip", "contract"]
    command += ["--json", str(tmp_path / "result.json"), "--findings", str(tmp_path / "found")]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 1
    assert result["verdict"] == "FAILED"
    said = " ".join(result["failures"])
    for word in ("KeyError", "to write", "import of antigravity", "os.system"):
        assert word in said
    assert any((tmp_path / "found").iterdir())
