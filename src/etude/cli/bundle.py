"""`etude bundle`: a run as one folder or tar that others can check, and on a hub."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from etude.api import Run
from etude.building.executing import silent
from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import Trusting, split_run
from etude.cli.train import say
from etude.core.errors import UsageError
from etude.core.units import size
