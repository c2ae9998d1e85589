"""The PPO in one file: right advantages, the built-in PPO's updates, exact resumes."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude import api
from etude.planning.resolve import resolve
from run_hash import run_hash
from test_docs import BLOCK
from test_exact_resume import killed_runs
from test_plugin import other_modules

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "tutorial_ppo.py"
PAGE = ROOT / "docs" / "tutorial-ppo.md"
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(FILE.parent))
import tutorial_ppo  # noqa: E402


def short(recipe: etude.Recipe, **changes: Any) -> etude.Recipe:
    """A recipe of reach in 12 iterations of 512 steps, with a checkpoint after every second."""
    sizes = {
        "collector__num_envs": 32,
        "collector__envs_per_group": 16,
        "algorithm__minibatch_size": 128,
        "algorithm__update_epochs": 2,
        "clock__total_timesteps": 12 * 512,
        "clock__cycles": 1,
        "checkpoint__every": "1 cycle",
        "evaluation__episodes": 8,
        "evaluation__num_envs": 8,
        "evaluation__envs_per_group": 8,
    }
    return recipe.replace(**{**sizes, **changes})


def test_it_is_one_short_file_on_the_public_modules() -> None:
    text = FILE.read_text()
    assert text.count("\n") <= 250
    assert not other_modules(text)


def test_advantages_are_the_sums_that_define_gae() -> None:
    rng, gamma, lam = np.random.default_rng(0), 0.9, 0.8
    rewards, values, following = rng.normal(size=(3, 4, 12))
    terminated = rng.random((4, 12)) < 0.15
    done = terminated | (rng.random((4, 12)) < 0.15)
    arrays = map(torch.from_numpy, (rewards, values, following, terminated, done))
    advantages = tutorial_ppo.gae(*arrays, gamma, lam)
    errors = rewards + gamma * following * ~terminated - values
    for env, start in itertools.product(range(4), range(12)):
        expected = 0.0
        for step in range(start, 12):
            expected += (gamma * lam) ** (step - start) * errors[env, step]
            if done[env, step]:
                break
        assert advantages[env, start] == pytest.approx(expected, rel=1e-5)


def test_its_updates_are_those_of_the_built_in_ppo(tmp_path: Path) -> None:
    """With one minibatch per epoch, whose order decides nothing, the weights are the same."""
    built_in = short(
        etude.recipes.reach(),
        algorithm__minibatch_size=512,
        algorithm__entropy_coef=0.01,
        clock__total_timesteps=4 * 512,
    )
    mine = tutorial_ppo.use_tutorial_ppo(built_in)
    recipes = {"built-in": built_in, "mine": mine, "other": mine.replace(algorithm__clip=0.19)}
    runs = {name: api.train(recipe, tmp_path / name) for name, recipe in recipes.items()}
    assert runs["mine"].rows()[-1]["train/n_updates"] == 6
    weights = {name: [*run.policy("latest").policy.parameters()] for name, run in runs.items()}

    def difference(name: str) -> float:
        pairs = zip(weights["built-in"], weights[name], strict=True)
        return max(float((one - other).detach().abs().max()) for one, other in pairs)

    assert difference("mine") < 1e-5
    assert difference("other") > 1e-4


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> etude.Run:
    """A run of the tutorial that nobody has touched."""
    folder = tmp_path_factory.mktemp("tutorial") / "run"
    return api.train(short(tutorial_ppo.reach()), folder)


def test_it_logs_what_it_declares(finished: etude.Run) -> None:
    declared = {metric.name for metric in tutorial_ppo.TutorialPPOConfig.metrics}
    rows = finished.rows()
    assert declared | {"train/value_loss", "train/entropy_loss"} <= set(rows[-1])
    assert 0 < rows[-1]["train/approx_kl"] < 0.1
    plan = etude.plan(finished.recipe)
    assert rows[-1]["train/n_updates"] == plan.counts["updates"]
    assert rows[-1]["train/learning_rate"] < rows[0]["train/learning_rate"]


def test_paused_runs_end_with_the_same_bits(finished: etude.Run, tmp_path: Path) -> None:
    path = api.create(resolve(finished.recipe), tmp_path / "run").path
    for iterations in (1, 2, 4):
        api.resume(path, pause_after=iterations)
    assert api.resume(path).fingerprint() == finished.fingerprint()
    assert run_hash(path) == run_hash(finished.path)


@pytest.mark.slow
def test_kills_change_nothing(tmp_path: Path) -> None:
    hits = killed_runs(short(tutorial_ppo.reach()), tmp_path, kills=5, seed=3)
    assert sum(hits.values()) == 5


@pytest.mark.parametrize(
    "change", [{"policy__kind": "lstm", "algorithm__horizon": 16}, {"collector__lag": 1}]
)
def test_what_it_cannot_train_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(etude.plugin.UsageError, match=r"use --policy\.kind mlp"):
        etude.plan(short(tutorial_ppo.reach(), **change))


def test_the_page_shows_the_whole_file_in_order() -> None:
    shown = [text for _, info, text in BLOCK.findall(PAGE.read_text()) if "file=" in info]
    lines = [line for text in shown for line in text.splitlines() if line]
    assert lines == [line for line in FILE.read_text().splitlines() if line]
