"""Runs, bundles and datasets that earlier versions wrote are read, resumed and verified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import etude
from etude.cli.main import main
from etude.core.errors import UsageError
from etude.models.rebuilding import policy_from_contract

VERSIONS = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.json"))


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what a version wrote: a resume writes into it."""
    return Path(shutil.copytree(request.param, tmp_path / "kept", symlinks=True))


def expected(kept: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((kept / "expected.json").read_text())
    return found


def test_a_policy_acts_as_it_did(kept: Path) -> None:
    for where in ("reach", "reach/checkpoints/best", "reach/checkpoints/best/policy", "bundle"):
        action = etude.load_policy(kept / where).act(np.ones(25, np.float32))
        np.testing.assert_allclose(action, expected(kept)["action"], atol=1e-6)


@pytest.mark.parametrize("name", ["reach", "replay"])
def test_a_run_is_the_one_it_was(kept: Path, name: str) -> None:
    run = etude.Run(kept / name)
    assert run.fingerprint() == expected(kept)["fingerprints"][name]
    assert run.rows()
    assert main(["fsck", str(kept / name)]) == 0


@pytest.mark.parametrize(("name", "steps"), [("reach", 1_024), ("replay", 800)])
def test_a_run_goes_on_from_its_checkpoint(kept: Path, name: str, steps: int) -> None:
    before = etude.Run(kept / name).rows()
    rows = etude.resume(kept / name, total_timesteps=steps).rows()
    assert rows[: len(before)] == before
    assert rows[-1]["time/total_timesteps"] == steps


def test_a_bundle_is_verified(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(kept / "bundle")]) == 0
    assert "Verified" in capsys.readouterr().out


def test_a_dataset_is_read(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "validate", str(kept / "dataset")]) == 0
    assert "Valid: every number was read" in capsys.readouterr().out


def test_another_format_of_a_policy_is_refused_by_its_number(kept: Path) -> None:
    with safe_open(kept / "bundle/policy/arrays.safetensors", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    contract = json.loads((kept / "bundle/policy/contract.json").read_text())
    with pytest.raises(UsageError, match="has format 99; this version of etude reads format 1"):
        policy_from_contract(contract | {"format": 99}, arrays)
