"""`python -m etude` is the `etude` command."""

import sys


def run() -> None:
    """Exit with the command's code; the import is here so that the environment is set first."""
    from etude.app.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
