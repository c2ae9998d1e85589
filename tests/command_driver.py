"""Commands of etude, one after the other, each in a process of its own.

    python command_driver.py < COMMANDS.json

Reads [[argument, ...], ...] and prints [[exit code, output, errors], ...]. The libraries are loaded
once, before the first fork, so that a command costs only its work.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import etude.building.build
import etude.envs.mujoco.env  # noqa: F401 - what most commands load
from etude.cli.main import main


def run(arguments: list[str]) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed to both streams."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = 70
            try:
                code = main(arguments)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


if __name__ == "__main__":
    print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]))
