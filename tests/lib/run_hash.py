"""What must be equal between two exact runs, as one hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from etude.core.trees import digest
from etude.runs import checkpoint

FREE = ("time/", "system/")
"""Columns that may differ."""

OWN = {
    "metrics",  # a position in a file whose time/ columns differ
    "run",  # copies of recipe and manifest, which may name another machine or other intervals
    "saver",  # a save that a signal asked for is one more
}
"""Parts of the training state that may differ."""


def comparable_rows(run: Path) -> list[dict[str, object]]:
    """The rows of metrics.jsonl without what may differ."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(FREE)} for row in rows]


def run_hash(run: Path) -> dict[str, str]:
    """{part: hash} of a finished run, so that a difference says where it is."""
    arrays, contract, training = checkpoint.load_training(run / "checkpoints" / "final")
    parts = {"policy": digest(arrays), "contract": json.dumps(contract, sort_keys=True)}
    parts |= {name: digest(part) for name, part in training.items() if name not in OWN}
    rows = json.dumps(comparable_rows(run), sort_keys=True)
    parts["rows"] = hashlib.sha256(rows.encode()).hexdigest()
    return parts
