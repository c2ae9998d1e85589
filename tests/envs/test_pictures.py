"""Tasks that are seen: pictures of every environment as an observation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import etude
from etude.cli import main as cli
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.envs.mujoco import rendering
from etude.envs.mujoco.rendering import IMAGE
from etude.evaluate import footage
from toys import tiny_reach


@pytest.fixture(autouse=True)
def _pictures_can_be_drawn() -> None:
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(f"draws pictures: {error}")


def test_a_picture_shows_its_own_environment_and_its_state_alone() -> None:
    config = etude.recipes.pick_place().env.replace(pictures=48, max_episode_steps=3)
    env = config.make(3)
    plain = etude.recipes.pick_place().env.replace(max_episode_steps=3).make(3)
    obs, unseen = env.reset(Key(1)), plain.reset(Key(1))
    assert np.array_equal(obs["state"], unseen["state"])
    assert env.spec.observations[IMAGE].shape == (48, 48, 3)
    assert set(obs) == set(env.spec.observations)
    assert len({picture.tobytes() for picture in obs[IMAGE]}) == 3
    actions = np.random.default_rng(0).uniform(-1, 1, (3, env.spec.action.array.shape[0]))
    snapshot, before = env.snapshot(), []
    for _ in range(3):
        result = env.step(actions.astype(np.float32))
        before.append(result.obs[IMAGE].copy())
    assert len(result.final_envs) == 3
    assert result.final_obs[IMAGE].shape == (3, 48, 48, 3)
    assert not np.array_equal(result.final_obs[IMAGE], result.obs[IMAGE])
    env.restore(snapshot, Key(1))
    for expected in before:
        assert np.array_equal(env.step(actions.astype(np.float32)).obs[IMAGE], expected)
    env.close()
    plain.close()


def test_cube_and_target_can_be_found_in_every_first_picture() -> None:
    """Wherever they lie in 20 x 20 cm: about 50 of 84 x 84 pixels are red, and as many green."""
    env = etude.recipes.find("pick-place-pictures").task.make(24)
    red, green, blue = np.moveaxis(env.reset(Key(2))[IMAGE].astype(int), -1, 0)
    env.close()
    assert ((red > 2 * green) & (red > 2 * blue)).sum((1, 2)).min() >= 30
    assert ((green > 2 * red) & (green > 2 * blue)).sum((1, 2)).min() >= 30


def test_recorded_pictures_are_those_that_are_observed(tmp_path: Path) -> None:
    """A policy cloned from a recording sees the same pictures when it acts."""
    from etude.data.store.episodes import EpisodeStore
    from etude.evaluate.record import RecordOptions, record

    recipe = etude.recipes.pick_place_bc().replace(env__max_episode_steps=40)
    options = RecordOptions(1, fail_share=0.0, noise=(0.0,), image_size=48, workers=1)
    record(recipe, tmp_path / "data", options)
    store = EpisodeStore.open(tmp_path / "data")
    steps, _ = store.episode(0)
    env = recipe.env.replace(pictures=48).make(32)
    obs = env.reset(Key(options.seed).child("record", "env"))
    (row,) = np.flatnonzero((obs["state"] == steps.obs["state"][0]).all(axis=1))
    assert np.array_equal(obs[IMAGE][row], steps.obs[IMAGE][0])
    env.close()
    store.close()


def test_what_has_no_picture_is_refused() -> None:
    with pytest.raises(UsageError, match=r"env\.pictures 64.*reach or pick-place"):
        etude.plan(etude.recipes.ppo().replace(env__pictures=64))


def test_a_policy_that_sees_and_is_told_its_task_is_filmed_and_viewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run, out = tmp_path / "run", tmp_path / "films"
    recipe = tiny_reach(
        2,
        env={"pictures": 36, "sentence": "go there", "task_vector": [1.0, 0.0]}
        | {"max_episode_steps": 3},
        policy={"actor_reads": ["image", "proprio", "task"], "critic_reads": ["state"]},
        evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2},
    )
    etude.train(recipe, run)
    monkeypatch.setattr(footage, "STRIP_SIZE", (60, 80))
    assert cli.main(["eval", str(run), "--episodes", "2", "--video", "--small"]) == 0
    assert list(run.glob("evaluations/*/no-success-in-time.mp4"))
    asked = ["view", "reach", "--policy", str(run), "--out", str(out), "--seconds", "0.2"]
    told = ["--env.pictures", "36", "--env.sentence", "go there"]
    assert cli.main([*asked, "--small", *told]) == 0
    assert "return of" in capsys.readouterr().out
    assert cli.main([*asked, "--small", *told[:-1], "stay"]) == 2
    assert "go there" in capsys.readouterr().err
