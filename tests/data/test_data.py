"""`etude data`: what a person types, sees and gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import etude
from etude.cli.data import run as data_main
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.data.contrast import draw_clips
from etude.data.formats.base import DataError
from etude.data.store.episodes import DamagedStore, EpisodeStore
from etude.envs.mujoco import rendering
from etude.evaluate import record as data_record
from etude.evaluate.record import QuickCamera, RecordOptions, make_demonstrated, record
from etude.planning import recipes

REAL = Path(__file__).parents[3] / "shared/data/robosuite_lift_demos.hdf5"


@pytest.fixture
def demos(tmp_path: Path) -> Path:
    """A LIBERO file of four successes, with pictures."""
    path, rng = tmp_path / "demos.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["problem_info"] = "{}"
        for number, steps in enumerate((20, 30, 25, 40)):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = rng.uniform(-1, 1, (steps, 7))
            demo["obs/agentview_rgb"] = rng.integers(0, 256, (steps, 16, 16, 3), np.uint8)
            demo["obs/joint_states"] = rng.normal(size=(steps, 7))
            demo["rewards"] = demo["dones"] = np.eye(steps, dtype=np.uint8)[-1]
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert data_main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    return facts


def test_inspect(demos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = run_json(capsys, "inspect", demos)
    assert facts["format"] == "LIBERO"
    assert (facts["episodes"], facts["steps"], facts["steps_in_file"]) == (4, 111, 115)
    assert facts["lengths"] == {"min": 19, "median": 26.5, "max": 39}
    assert facts["successes"] == 4
    assert facts["contrast"] is False
    assert facts["observations"]["agentview_rgb"] == {"shape": [16, 16, 3], "dtype": "uint8"}
    text = " ".join(run(capsys, "inspect", demos).split())  # However wide the terminal is.
    assert "Every return is 1: a return decomposition learns nothing from this." in text
    assert "Learning a reward adds clips" in text


def test_import_keeps_every_bit_and_clips_give_contrast(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = run_json(capsys, "import", demos, tmp_path / "out", "--add-truncated", 6)
    assert facts["episodes"] == 10
    assert facts["returns"]["min"] == 0
    assert facts["contrast"] is True
    assert any("6 clips that end before" in note for note in facts["notes"])
    store = EpisodeStore.open(tmp_path / "out")
    labels = store.labels
    assert sorted(labels.kinds) == ["clip"] * 6 + ["whole"] * 4
    with h5py.File(demos) as file:
        for number, (kind, source) in enumerate(zip(labels.kinds, labels.sources, strict=True)):
            steps, total = store.episode(number)
            demo, length = file[f"data/{labels.names[source]}"], len(steps.rewards)
            image = demo["obs/agentview_rgb"][:]
            np.testing.assert_array_equal(steps.obs["agentview_rgb"], image[:length])
            np.testing.assert_array_equal(steps.next_obs["agentview_rgb"], image[1 : length + 1])
            assert steps.truncated[-1] == (kind == "clip")
            assert total == labels.successes[number] == (kind == "whole")
    assert run_json(capsys, "validate", tmp_path / "out")["valid"] is True
    again = run_json(capsys, "import", demos, tmp_path / "again", "--add-truncated", 6)
    assert again["episodes"] == 10
    for name in ("sealed.json", "store.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_clips_are_even_and_never_whole() -> None:
    lengths = np.array([2, 50, 1, 9])
    episodes, steps = draw_clips(lengths, 9, Key(0))
    assert np.bincount(episodes).tolist() == [3, 3, 0, 3]
    assert (steps >= 1).all()
    assert (steps < lengths[episodes]).all()
    np.testing.assert_array_equal(draw_clips(lengths, 9, Key(0)), (episodes, steps))
    assert (draw_clips(lengths, 9, Key(1))[1] != steps).any()
    assert len(draw_clips(np.array([1]), 1, Key(0))[0]) == 0


def test_what_became_of_a_clip_is_known_only_where_the_rewards_tell(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(demos, "a") as file:
        file["data/demo_0/rewards"][:] = 0  # a failure
        file["data/demo_1/rewards"][1:] = 1  # a success from its second step on
        file["data/demo_2/rewards"][:] = 1  # nobody knows
    run(capsys, "import", demos, tmp_path / "out", "--add-truncated", 4)
    labels = EpisodeStore.open(tmp_path / "out").labels
    wholes = [s for s, k in zip(labels.successes, labels.kinds, strict=True) if k == "whole"]
    clips = [s for s, k in zip(labels.successes, labels.kinds, strict=True) if k == "clip"]
    assert wholes == [False, True, None, True]
    assert clips == [False, None, None, False]


def test_real_demonstrations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not REAL.exists():
        pytest.skip(f"needs {REAL}, which is not part of the repository")
    run(capsys, "validate", REAL)
    facts = run_json(capsys, "import", REAL, tmp_path / "out", "--add-truncated", 3)
    assert (facts["episodes"], facts["lengths"]["max"]) == (6, 509)
    run(capsys, "validate", tmp_path / "out")


def test_a_failed_import_leaves_nothing(demos: Path, tmp_path: Path) -> None:
    with h5py.File(demos, "a") as file:
        file["data/demo_2/obs/joint_states"][3, 1] = np.inf
    for verb in (["import", str(demos), str(tmp_path / "out")], ["validate", str(demos)]):
        with pytest.raises(DataError, match=r"demos\.hdf5 at demo_2: 'joint_states' .* step 3"):
            data_main(verb)
    assert not (tmp_path / "out").exists()


def test_what_is_not_of_one_size_is_left_out(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(demos, "a") as file:
        file["data/demo_3/obs/more"] = np.zeros((40, 2))
        del file["data/demo_1/obs/agentview_rgb"]
        file["data/demo_1/obs/agentview_rgb"] = np.zeros((30, 8, 8, 3), np.uint8)
    facts = run_json(capsys, "import", demos, tmp_path / "out")
    assert list(facts["observations"]) == ["joint_states"]
    assert any("'agentview_rgb', 'more' in the same size" in note for note in facts["notes"])
    with pytest.raises(DataError, match=r"demo_1: 'agentview_rgb' is uint8 \[8, 8, 3\] here"):
        data_main(["import", str(demos), str(tmp_path / "no"), "--obs", "agentview_rgb"])
    with h5py.File(demos, "a") as file:
        del file["data/demo_3/actions"]
        file["data/demo_3/actions"] = np.zeros((40, 6))
    with pytest.raises(DataError, match=r"demo_3: 'actions' is float32 \[6\] here"):
        data_main(["import", str(demos), str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


def test_a_damaged_store_is_named(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "import", demos, tmp_path / "out")
    block = tmp_path / "out/steps-000000000000.bin"
    data = bytearray(block.read_bytes())
    data[1000] ^= 1
    block.write_bytes(data)
    with pytest.raises(DamagedStore, match=r"steps-000000000000\.bin is damaged") as caught:
        data_main(["validate", str(tmp_path / "out")])
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["inspct"], "no command 'etude data inspct'. Did you mean 'inspect'?"),
        (["inspect", "nowhere.hdf5"], "no such file or folder"),
        (["import", "x.hdf5"], "Name the files to read, then the new folder"),
        (["import", "x.hdf5", "x.hdf5", "y"], "named twice"),
        (["import", "x.hdf5", "y", "--ob", "z"], "did you mean --obs?"),
        (["record", "ppo", "y"], ", reach or pick-place, and not"),
        (["record", "reach", ".", "--image-size", "0"], "exists already"),
        (["record", "reach", "y", "--noise", "-1"], "of at least 0"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EtudeError) as caught:
        data_main(arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reach", "pick-place"])
def test_recorded_demonstrations(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    facts = run_json(
        capsys, "record", name, out, "--episodes", 20, "--fail-share", 0.4, "--image-size", 0
    )
    assert (facts["episodes"], facts["successes"]) == (20, 12)
    store = EpisodeStore.open(out)
    for number, success in enumerate(store.labels.successes):
        steps, total = store.episode(number)
        progress = np.concatenate([steps.obs["progress"], steps.next_obs["progress"][-1:]])[:, 0]
        assert progress[0] == 0.0
        assert progress.min() >= 0.0
        assert (progress[-1] == 1.0) == success == (total == 1.0)
        assert steps.terminated[-1] >= success
        assert np.abs(steps.actions).max() <= 1.0
        np.testing.assert_array_equal(steps.obs["state"][1:], steps.next_obs["state"][:-1])
    run(capsys, "validate", out)


def test_a_recording_can_be_made_again(tmp_path: Path) -> None:
    recipe, options = recipes.find("reach"), RecordOptions(12, image_size=0)
    for name in ("one", "two"):
        record(recipe, tmp_path / name, options)
    assert (tmp_path / "one/sealed.json").read_bytes() == (
        tmp_path / "two/sealed.json"
    ).read_bytes()
    record(recipe, tmp_path / "other", RecordOptions(12, image_size=0, seed=1))
    seals = [(tmp_path / name / "sealed.json").read_bytes() for name in ("one", "other")]
    assert seals[0] != seals[1]


def test_the_tasks_own_rewards(tmp_path: Path) -> None:
    store = record(
        recipes.find("reach"), tmp_path / "out", RecordOptions(8, image_size=0, reward="task")
    )
    assert len(np.unique(store.returns)) == 8


def test_what_cannot_be_had_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_record, "_PATIENCE", 2)
    options = RecordOptions(1, fail_share=0.0, noise=(50.0,), image_size=0)
    with pytest.raises(EtudeError, match=r"more were to end in success; use less --noise"):
        record(recipes.find("reach"), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def skip_without_pictures() -> None:
    try:
        rendering.backend()
    except rendering.NoPictures as error:
        pytest.skip(f"draws pictures: {error}")


def test_the_quick_camera_sees_what_the_other_sees() -> None:
    skip_without_pictures()
    env, _ = make_demonstrated(recipes.find("pick-place"), 1)
    env.reset(Key(0))
    state, markers, pictures = env.simulation.state[0], env.markers(0), []
    for kind in (rendering.Renderer, QuickCamera):
        with kind(env.simulation.model, env.task.camera, 64, 64) as camera:
            pictures.append(camera.picture(state, markers).astype(np.float64))
    assert pictures[0].std() > 10
    np.testing.assert_array_equal(pictures[0], pictures[1])


@pytest.mark.rotated
def test_recorded_pictures_show_the_episode(tmp_path: Path) -> None:
    skip_without_pictures()
    recipe = recipes.find("reach")
    for workers in (1, 2):
        options = RecordOptions(4, image_size=48, workers=workers)
        store = record(recipe, tmp_path / f"out{workers}", options)
    seals = [(tmp_path / f"out{n}/sealed.json").read_bytes() for n in (1, 2)]
    assert seals[0] == seals[1], "the number of workers changes the pictures"
    steps, _ = store.episode(0)
    images = steps.obs["image"]
    assert images.dtype == np.uint8
    assert images.shape[1:] == (48, 48, 3)
    assert images.std() > 10
    assert (images[0] != images[-1]).any()
    np.testing.assert_array_equal(images[1:], steps.next_obs["image"][:-1])


def test_a_trained_policy_demonstrates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipes.reach_short()
    short = recipe.clock.model_copy(update={"total_timesteps": 4096})
    etude.train(recipe.model_copy(update={"clock": short}), tmp_path / "run")
    common = ("--policy", tmp_path / "run", "--fail-share", 1, "--image-size", 0)
    facts = run_json(capsys, "record", "reach", tmp_path / "out", "--episodes", 8, *common)
    assert (facts["episodes"], facts["successes"]) == (8, 0)
    assert "Add successes" in facts["verdict"]
    with pytest.raises(UsageError, match="trained on another task"):
        data_main(["record", "pick-place", str(tmp_path / "no"), *map(str, common)])
