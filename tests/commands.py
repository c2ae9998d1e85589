"""Commands of etude as a person types them, in processes that start quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_all(
    arguments: list[list[str]], folder: Path, environment: Mapping[str, str]
) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of commands of etude, run one after the other in a folder."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("command_driver.py"))],
        input=json.dumps(arguments),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]
