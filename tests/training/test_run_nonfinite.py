"""A whole run that meets a NaN: stopped, explained, nothing bad saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from etude.api import Run, train
from etude.cli import main as cli
from etude.core.contracts import StepResult
from etude.core.errors import NonFinite
from etude.core.trees import leaves
from etude.envs.mujoco.env import MujocoEnv
from etude.models.actor_critic import MlpPolicy
from etude.runs import checkpoint
from toys import tiny_reach

STEPS_BEFORE = 3 * 8
"""Control steps of a group in the three iterations before the one that fails."""


def poison(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Row 3 of every training group gives a NaN in the fourth iteration.

    An observation after the last step, since the action after any other would fail in physics.
    """
    at = STEPS_BEFORE + (2 if where == "reward" else 8)
    good = MujocoEnv.step

    def step(self: MujocoEnv, actions: Any) -> StepResult:
        result = good(self, actions)
        self.steps_taken = getattr(self, "steps_taken", 0) + 1  # type: ignore[attr-defined]
        if self.steps_taken == at:  # type: ignore[attr-defined]
            array = result.reward if where == "reward" else result.obs["state"]
            array[3] = np.nan
        return result

    monkeypatch.setattr(MujocoEnv, "step", step)


@pytest.mark.parametrize("where", ["reward", "observation"])
def test_a_run_stops_and_keeps_what_was_good(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_reach(6, evaluation={"every": "never"}, checkpoint={"every": "1 iteration"})
    poison(monkeypatch, where)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    folder = tmp_path / "run"
    code = cli.main(["train", str(tmp_path / "recipe.yaml"), "--folder", str(folder)])
    assert code == 3
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert f"{where}" in shown.err
    assert "environment 3" in shown.err
    # The last good checkpoint is the latest, verifies, and holds finite numbers only.
    latest = (folder / "checkpoints" / "latest").resolve()
    assert checkpoint.verify(latest) == 3 * 256
    assert not (folder / "checkpoints" / "final").exists()
    arrays, _, training = checkpoint.load_training(latest)
    for path, leaf in leaves({"policy": arrays, "training": training}):
        array = np.asarray(leaf) if hasattr(leaf, "dtype") else np.zeros(1)
        assert array.dtype.kind != "f" or np.isfinite(array).all(), path
    (report,) = (folder / "failures").iterdir()
    assert "NonFinite" in (report / "error.txt").read_text()
    context = json.loads((report / "context.json").read_text())
    assert context["counters"]["now"]["iterations"] == 3
    kept = load_file(report / "reproduction.safetensors")
    assert any(np.isnan(array).any() for array in kept.values() if array.dtype.kind == "f")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    # What is started again by torchrun, which restarts anything, does not run into it once more.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli.main(["resume", str(folder)]) == 3
    assert "torchrun has restarted this run" in capsys.readouterr().err
    assert len(list((folder / "failures").iterdir())) == 1
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    # Resuming warns, and a run that is healthy again ends where it would have.
    monkeypatch.undo()
    assert cli.main(["resume", str(folder)]) == 0
    assert "This run failed before" in capsys.readouterr().out
    healthy = train(recipe, tmp_path / "healthy")
    assert Run(folder).fingerprint() == healthy.fingerprint()


def test_a_policy_that_is_not_finite_is_caught_in_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = MlpPolicy.act

    def act(self: MlpPolicy, obs: Any, state: Any, noise: Any) -> Any:
        answer = good(self, obs, state, noise)
        return answer if noise is not None else answer._replace(actions=answer.actions * np.nan)

    monkeypatch.setattr(MlpPolicy, "act", act)
    with pytest.raises(NonFinite, match="evaluation"):
        train(tiny_reach(2), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
