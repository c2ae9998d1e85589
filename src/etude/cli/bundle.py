"""`etude bundle`: a run as one folder or tar that others can check, and on a hub."""

from __future__ import annotations
