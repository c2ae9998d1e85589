"""`python -m etude` is the `etude` command."""

import faulthandler
import sys
from contextlib import suppress


def run() -> None:
    """Exit with the command's code; the import is here so that the environment is set first."""
    # A bad disk under a memory map, or a crash in a library, would end the process in silence.
    with suppress(RuntimeError, OSError):
        faulthandler.enable()
    from etude.cli.main import main

    sys.exit(main())


if __name__ == "__main__":
    run()
