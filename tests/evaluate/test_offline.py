"""Policies from a dataset: planned, trained, judged, refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import etude
from etude.api import Run, train
from etude.building.build import build
from etude.cli import main as cli
from etude.core.contracts import EnvSpec
from etude.core.errors import UsageError
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.envs.adapters.gym import GymConfig
from etude.evaluate import evaluation
from etude.models.reward_networks import RewardNetworkConfig
from etude.planning import recipes
from etude.planning.recipe import REWARDS, Recipe
from etude.planning.resolve import resolve
from etude.rl.off_policy import OffPolicy
from etude.rl.offline import split_store
from etude.rl.rewards.rrd import RRDConfig
from etude.runs.files import Disk
from etude.runs.folder import RunFolder
from etude.tasks.reach import ReachConfig
from etude.training.loop import CurveRecorder
from toys import changed, toy_dataset

SIZES = {"rrd_batch_size": 32, "rrd_sample_size": 4}


def small(dataset: Path, **sections: dict[str, Any]) -> Recipe:
    """The recipe `offline` in a second."""
    recipe = changed(
        recipes.find("offline"),
        policy={"hidden": (16, 16)},
        algorithm={"dataset": str(dataset), "train_batches": 10, "batch_size": 32},
        rewards=SIZES,
        clock={"epochs": 2, "cycles": 2, "iterations": 2},
        evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 2},
    )
    return changed(recipe, **sections)


def random_dataset(path: Path, spec: EnvSpec, scale: float = 1.0) -> Path:
    """Noise that fits an environment, some of it rewarded; actions up to about `scale`."""
    plain = EnvSpec(spec.observations, spec.action, 20)
    store = EpisodeStore.create(path, StoreGeometry(store_specs(plain), 1, 20), Disk())
    stream = np.random.default_rng(0)
    for i in range(20):
        obs = {
            name: stream.normal(size=(9, *s.shape)).astype(np.float32)
            for name, s in spec.observations.items()
        }
        actions = scale * np.tanh(stream.normal(size=(8, *spec.action.array.shape)))
        rewards = np.eye(8, dtype=np.float32)[-1] * (i % 2)
        store.append_episode(obs, actions.astype(np.float32), rewards, True)
    store.seal().close()
    return path


def equal_dataset(path: Path, like: Path) -> Path:
    """Six episodes that all earn 1, at their end."""
    store = EpisodeStore.create(path, EpisodeStore.open(like).geometry, Disk())
    for i in range(6):
        obs = {"state": np.full((4, 2), i, np.float32), "progress": np.zeros((4, 1), np.float32)}
        store.append_episode(obs, np.zeros((3, 2), np.float32), np.eye(3, dtype="f4")[-1], True)
    store.seal().close()
    return path


def spec_of(config: Any) -> EnvSpec:
    env = config.make(2)
    env.close()
    return env.spec


@pytest.mark.parametrize("kind", ["rrd", "given", "ircr", "sac", "shards"])
def test_a_run_does_what_its_plan_says(kind: str, tmp_path: Path) -> None:
    recipe = small(toy_dataset(tmp_path / "data"))
    if kind in ("given", "ircr"):
        recipe = recipe.model_copy(update={"rewards": REWARDS.make(kind)})
    if kind == "sac":
        algorithm = {"dataset": recipe.algorithm.dataset, "train_batches": 10, "batch_size": 32}
        sac = recipes.find("sac")
        recipe = recipe.model_copy(
            update={
                "policy": sac.policy.model_copy(update={"hidden": (16, 16)}),
                "algorithm": type(sac.algorithm)(**algorithm),
            }
        )
    if kind == "shards":
        recipe = changed(recipe, learner={"shards": 2})
    plan, run = etude.plan(recipe), train(recipe, tmp_path / "run")
    assert run.summary()["counts"] == plan.counts
    assert plan.counts["updates"] == 80
    assert plan.counts["timesteps"] == 0
    rows = run.rows()
    assert [row["updates"] for row in rows] == [20, 40, 60, 80]
    assert {"eval/action_error", "eval/q_mean", "eval/q_data"} <= rows[-1].keys()
    assert ("eval/R_loss" in rows[-1]) == (kind in ("rrd", "sac", "shards"))
    saved = sum(f.stat().st_size for f in (run.path / "checkpoints/latest/").rglob("*.safetensors"))
    assert saved < plan.bytes["checkpoint"] < 1.2 * saved + 20_000
    note = any("Critics overestimate" in text for text in plan.notes)
    assert note == (kind == "sac")


@pytest.mark.parametrize("name", ["offline", "reward-only"])
def test_rows_and_epoch_lines_of_a_dataset(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Episodes and timesteps are those learned from, curves are over updates, and the line of an
    epoch has the mean over all of its batches."""
    data = toy_dataset(tmp_path / "data")
    if name == "offline":
        recipe = small(data)
        batch = 32
    else:
        rrd = RRDConfig(**SIZES, network=RewardNetworkConfig(hidden=(16,)))
        algorithm = {"dataset": str(data), "train_batches": 10, "rrd": rrd}
        levels = {"epochs": 2, "cycles": 2, "iterations": 2}
        recipe = changed(recipes.find("reward-only"), algorithm=algorithm, clock=levels)
        batch = rrd.rrd_batch_size
    recorder = CurveRecorder()
    run = train(recipe, tmp_path / "run", [recorder], console=True)
    learned, _ = split_store(EpisodeStore.open(data), recipe.algorithm)
    steps = int(learned.lengths.sum())
    rows, known = run.rows(), (learned.num_episodes, steps)
    assert [(row["episodes"], row["timesteps"]) for row in rows] == [known] * 4
    assert [row["dataset/passes"] for row in rows] == [n * batch / steps for n in (20, 40, 60, 80)]
    assert recorder.curve("train/R_loss")[0] == [20, 40, 60, 80]
    lines = [line for line in capsys.readouterr().out.splitlines() if "epoch " in line]
    losses = [row["train/R_loss"] for row in rows]
    means = [f"R loss {np.mean(losses[i : i + 2]):.3g}" for i in (0, 2)]
    assert [re.split(": |, ", line)[-1] for line in lines] == means
    assert means[0] != f"R loss {losses[1]:.3g}"


def test_imitation_learns_what_was_done_and_eval_judges_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small(
        toy_dataset(tmp_path / "data"),
        algorithm={"train_batches": 100, "behaviour_coef": 100.0, "learning_rate": 1e-3},
    )
    run = train(recipe, tmp_path / "run")
    errors = [row["eval/action_error"] for row in run.rows() if "eval/action_error" in row]
    # Half of the points walk away, which their places do not tell: no error is far below .01.
    assert errors[-1] < 0.02
    said: list[str] = []
    found = evaluation.examine(run.recipe, run.path, 100, None, False, said.append)
    assert found["eval/action_error"] == pytest.approx(errors[-1])
    assert "4 held-out episodes" in said[0]
    assert cli.main(["eval", str(run.path)]) == 0
    assert "squared error of actions" in capsys.readouterr().out
    assert etude.load_policy(run.path).act(np.zeros(2)).shape == (2,)


def learner(recipe: Recipe, path: Path) -> OffPolicy:
    folder = RunFolder.create(path, recipes.dump(recipe), "", {}, {})
    parts = build(resolve(recipe), folder)
    assert isinstance(parts.algorithm, OffPolicy)
    for _ in parts.algorithm.batches(parts.loop.clock, parts.loop.key):
        pass
    parts.close()
    folder.close()
    return parts.algorithm


def test_observations_are_normalised_by_the_dataset_once(tmp_path: Path) -> None:
    recipe = small(toy_dataset(tmp_path / "data"))
    agent, data = learner(recipe, tmp_path / "run"), resolve(recipe).data
    states = np.concatenate(
        [data.store.episode(int(n))[0].obs["state"] for n in data.training.numbers]
    ).astype(np.float64)
    norm = agent.policy.normalisers["state"]
    spread = states.std(0)
    assert np.abs(norm.mean.numpy() - states.mean(0)).max() < 0.05 * spread.max()
    assert float(norm.count) == 16_384
    run = train(recipe, tmp_path / "whole")
    assert float(run.policy().policy.normalisers["state"].count) == 16_384
    EpisodeStore.create(tmp_path / "none", data.store.geometry, Disk()).seal().close()
    with pytest.raises(UsageError, match="holds no episode to learn from"):
        etude.plan(small(tmp_path / "none"))


def test_a_reward_of_an_earlier_run_says_what_steps_are_worth(tmp_path: Path) -> None:
    data = toy_dataset(tmp_path / "data")
    first = train(small(data), tmp_path / "first")
    only = recipes.find("reward-only")
    rrd = only.algorithm.rrd.model_dump(mode="json") | {"network": {"reads": ("state",)}}
    second = train(
        changed(
            only,
            algorithm={"dataset": str(data), "train_batches": 5, "rrd": rrd},
            clock={"epochs": 1, "cycles": 1, "iterations": 2},
        ),
        tmp_path / "second",
    )
    steps, _ = EpisodeStore.open(data).episode(0)
    for source in (first, second):
        learned = REWARDS.load("learned")(run=str(source.path))
        recipe = small(data).model_copy(update={"rewards": learned})
        run = train(recipe, tmp_path / f"by-{source.path.name}")
        assert run.summary()["counts"] == etude.plan(recipe).counts
        before, after = (
            etude.load_reward(path).rewards(steps.obs, steps.actions, steps.next_obs)
            for path in (source.path, run.path)
        )
        np.testing.assert_array_equal(before, after)  # it was used, and not trained
        assert before.shape == (len(steps.rewards),)
        assert "train/R_loss" not in run.rows()[-1]
    with pytest.raises(UsageError, match="needs a run with a reward network"):
        etude.plan(recipe.model_copy(update={"rewards": REWARDS.make("learned")}))


def test_a_policy_is_tested_in_an_environment_that_fits(tmp_path: Path) -> None:
    data = random_dataset(tmp_path / "data", spec_of(ReachConfig()))
    recipe = small(data).model_copy(update={"env": ReachConfig(max_episode_steps=5)})
    plan, run = etude.plan(recipe), train(recipe, tmp_path / "run")
    assert plan.exactness["exact"]
    assert run.summary()["counts"] == plan.counts
    assert plan.counts["evaluation_episodes"] == 8
    assert run.rows()[-1]["eval/episodes"] == 4
    assert Run(run.path).evaluate(2)["eval/episodes"] == 2
    with pytest.raises(UsageError, match=r"'state', which is .* \(2,\) in .* choose observations"):
        etude.plan(small(toy_dataset(tmp_path / "toy")).model_copy(update={"env": ReachConfig()}))
    config = GymConfig(id="Pendulum-v1")
    other = random_dataset(tmp_path / "gym", spec_of(config))
    assert etude.plan(small(other).model_copy(update={"env": config})).counts["updates"] == 80


def test_actions_of_an_environment_become_those_of_a_policy(tmp_path: Path) -> None:
    config = GymConfig(id="Pendulum-v1")
    data = random_dataset(tmp_path / "data", spec_of(config), scale=2.0)
    # Without an environment nothing is clipped: the policy has the range of the dataset.
    largest = max(np.abs(EpisodeStore.open(data).episode(n)[0].actions).max() for n in range(20))
    free = resolve(small(data)).data
    assert max(free.spec.action.high[0], -free.spec.action.low[0]) == pytest.approx(largest)
    plan = etude.plan(small(data))
    assert any("Actions go beyond [-1, 1] in 1 of 1 dimensions" in note for note in plan.notes)
    found = resolve(small(data).model_copy(update={"env": config})).data
    drawn = found.shards(1)[0].sample_transitions(np.random.default_rng(0), 500).actions
    assert 0.9 < np.abs(drawn).max() <= 1.0


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no dataset at ''"):
        etude.plan(recipes.find("offline"))
    data = toy_dataset(tmp_path / "data")
    with pytest.raises(UsageError, match=r"does not divide by learner\.shards 3: use 30"):
        etude.plan(small(data, learner={"shards": 3}))
    with pytest.raises(UsageError, match="nothing to collect ahead"):
        etude.plan(small(data, collector={"lag": 1}))
    with pytest.raises(UsageError, match="imitates the actions of a dataset, and none is given"):
        etude.plan(small(data, algorithm={"dataset": ""}).model_copy(update={"env": ReachConfig()}))
    equal_dataset(tmp_path / "equal", data)
    with pytest.raises(UsageError, match="teaches no reward: all 5 returns are 1"):
        etude.plan(small(tmp_path / "equal", algorithm={"add_truncated": 0}))
    notes = etude.plan(small(tmp_path / "equal")).notes
    assert any("6 clips that end before their episode does are added" in n for n in notes)
    given = small(tmp_path / "equal").model_copy(update={"rewards": REWARDS.make("given")})
    assert etude.plan(given).counts["updates"] == 80


def test_the_newest_is_the_best_where_nothing_is_played(tmp_path: Path) -> None:
    run = train(small(toy_dataset(tmp_path / "data")), tmp_path / "run")
    best = (run.path / "checkpoints/best").resolve().name
    assert int(best) == 80
    assert torch.isfinite(torch.tensor(run.rows()[-1]["eval/q_mean"]))


class Accident(etude.Callback):
    """Ends a run in the middle of an iteration's updates, some time after a checkpoint."""

    def __init__(self, after: int) -> None:
        self._left = after

    def batch_end(self, context: Any, metrics: Any) -> None:
        self._left -= 1
        if not self._left:
            raise RuntimeError("an accident")


@pytest.mark.parametrize("clips", [False, True])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(clips: bool, tmp_path: Path) -> None:
    data = toy_dataset(tmp_path / "data")
    if clips:
        data = equal_dataset(tmp_path / "equal", data)
    recipe = small(data, learner={"shards": 2})
    assert [s.num_clips for s in resolve(recipe).data.shards(2)] == ([2, 3] if clips else [0, 0])
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="an accident"):
        train(recipe, tmp_path / "cut", callbacks=[Accident(55)])
    said: list[str] = []
    cut = etude.resume(tmp_path / "cut", say=said.append)
    assert any("Resuming" in text for text in said)
    assert cut.fingerprint() == whole.fingerprint()
    assert cut.summary() == whole.summary()
