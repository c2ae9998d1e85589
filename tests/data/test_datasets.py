"""Other systems' files in one form: robomimic, LIBERO, Minari, and real demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from etude.core.limited import Limits
from etude.data.contrast import contrast
from etude.data.formats.base import DataError, Episode, ReadOptions
from etude.data.formats.opening import open_dataset, scan

REAL = Path(__file__).parents[3] / "shared/data/robosuite_lift_demos.hdf5"


def write_demos(path: Path, lengths: tuple[int, ...] = (5, 12, 3), **parts: bool) -> Path:
    """A file as robomimic writes it; `next_obs`, `rewards`, `libero` and `packed` as asked."""
    rng = np.random.default_rng(0)
    packed: dict[str, Any] = {"compression": "gzip"} if parts.get("packed") else {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = "{}"
        if parts.get("libero"):
            data.attrs["problem_info"] = "{}"
        for number, steps in enumerate(lengths):
            demo = data.create_group(f"demo_{number}")
            demo["actions"] = rng.uniform(-1.5, 1.5, (steps, 7))
            demo["states"] = rng.normal(size=(steps, 4))
            image = rng.integers(0, 256, (steps + 1, 8, 8, 3), np.uint8)
            joints = rng.normal(size=(steps + 1, 7))
            demo.create_dataset("obs/agentview_rgb", data=image[:-1], **packed)
            demo["obs/joint_states"] = joints[:-1]
            if parts.get("next_obs"):
                demo.create_dataset("next_obs/agentview_rgb", data=image[1:], **packed)
                demo["next_obs/joint_states"] = joints[1:]
            if parts.get("rewards", True):
                last = np.eye(steps, dtype=np.uint8)[-1]
                demo["rewards"], demo["dones"] = last, last
        file["mask/train"] = np.array([b"demo_0", b"demo_2"])
    return path


def write_minari(path: Path, nested: bool = False) -> Path:
    """A folder as Minari writes it: two episodes, one terminated and one truncated."""
    rng = np.random.default_rng(1)
    (path / "data").mkdir(parents=True)
    with h5py.File(path / "data/main_data.hdf5", "w") as file:
        for number, steps in enumerate((4, 6)):
            episode = file.create_group(f"episode_{number}")
            seen = rng.normal(size=(steps + 1, 3))
            if nested:
                episode["observations/achieved/hand"] = seen
                episode["observations/observation"] = seen.astype(np.float32)
            else:
                episode["observations"] = seen
            episode["actions"] = (
                rng.integers(0, 3, steps) if nested else rng.normal(size=(steps, 2))
            )
            episode["rewards"] = rng.normal(size=steps)
            ended = np.eye(steps, dtype=bool)[-1]
            episode["terminations"] = ended & (number == 0)
            episode["truncations"] = ended & (number == 1)
            episode["infos/success"] = ended & (number == 0)
    return path


def read(path: Path, options: ReadOptions | None = None) -> list[Episode]:
    with open_dataset(path, "read", options) as dataset:
        return list(dataset.episodes())


def test_robomimic_with_next_observations(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5", next_obs=True, packed=True)
    summary, episodes = scan(path), read(path)
    assert summary.format == "robomimic"
    assert [e.name for e in episodes] == ["demo_0", "demo_1", "demo_2"]
    assert summary.lengths.tolist() == [5, 12, 3]
    assert summary.num_successes == 3
    assert summary.masks == {"train": 2}
    with h5py.File(path) as file:
        demo, first = file["data/demo_0"], episodes[0]
        image = np.concatenate([demo["obs/agentview_rgb"][:], demo["next_obs/agentview_rgb"][-1:]])
        assert first.obs["agentview_rgb"].dtype == np.uint8
        np.testing.assert_array_equal(first.obs["agentview_rgb"], image)
        np.testing.assert_array_equal(
            first.obs["joint_states"][1:], demo["next_obs/joint_states"][:].astype(np.float32)
        )
        np.testing.assert_array_equal(first.actions, demo["actions"][:].astype(np.float32))
        assert np.abs(first.actions).max() > 1.0  # never clipped: it may be an absolute pose
    assert first.rewards.tolist() == [0, 0, 0, 0, 1]
    assert first.terminated


def test_without_next_observations_the_last_step_goes_and_its_reward_stays(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5", libero=True)
    summary, episodes = scan(path), read(path)
    assert summary.format == "LIBERO"
    assert summary.lengths.tolist() == [4, 11, 2]
    assert summary.num_file_steps == 20
    assert "left out" in summary.notes[0]
    assert [e.rewards.sum() for e in episodes] == [1, 1, 1]
    with h5py.File(path) as file:
        whole = file["data/demo_2/obs/joint_states"][:].astype(np.float32)
    np.testing.assert_array_equal(episodes[2].obs["joint_states"], whole)
    assert len(episodes[2].actions) == 2


def test_a_natural_order_and_masks(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5", lengths=(3,) * 12)
    assert [e.name for e in scan(path).episodes] == [f"demo_{n}" for n in range(12)]
    chosen = scan(path, ReadOptions(mask="train"))
    assert [e.name for e in chosen.episodes] == ["demo_0", "demo_2"]
    with pytest.raises(DataError, match="no mask 'test'; it has train"):
        scan(path, ReadOptions(mask="test"))


def test_observations_are_chosen_by_name(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    (first, *_) = read(path, ReadOptions(obs=("states",)))
    assert list(first.obs) == ["states"]
    with pytest.raises(DataError, match="no observation 'stats'; it has agentview_rgb, joint"):
        scan(path, ReadOptions(obs=("stats",)))


def test_rewards_can_be_replaced(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_1/rewards"][-1] = 0  # one that failed
    episodes = read(path, ReadOptions(success_reward=8.0))
    assert [e.rewards.sum() for e in episodes] == [8, 0, 8]


def test_unknown_success_stays_unknown(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_0/rewards"][:] = 1  # a reward for every step tells nothing of success
        del file["data/demo_2/rewards"]
    options = ReadOptions(success_reward=8.0)
    summary, episodes = scan(path, options), read(path, options)
    assert [e.success for e in summary.episodes] == [None, True, None]
    assert [e.rewarded for e in summary.episodes] == [False, True, False]
    assert [e.rewards.sum() for e in episodes] == [0, 8, 0]
    assert any("2 of 3 episodes do not say whether they succeeded" in n for n in summary.notes)
    assumed = ReadOptions(success_reward=8.0, assume_success=True)
    assert [e.success for e in scan(path, assumed).episodes] == [True] * 3
    assert [e.rewards.sum() for e in read(path, assumed)] == [8, 8, 8]


def test_a_file_without_rewards_gives_none(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5", rewards=False)
    summary = scan(path)
    assert [e.rewarded for e in summary.episodes] == [False] * 3
    assert summary.num_successes is None
    assert [e.rewards.any() for e in read(path)] == [False] * 3
    assert any("--assume-success --success-reward 1" in note for note in summary.notes)


def test_without_dones_an_episode_was_truncated(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "a") as file:
        del file["data/demo_0/dones"]
        file["data/demo_1/dones"][-1] = 0
    assert [e.terminated for e in read(path)] == [False, False, True]
    assert [e.terminated for e in scan(path).episodes] == [False, False, True]
    other = write_minari(tmp_path / "set-v0")
    with h5py.File(other / "data/main_data.hdf5", "a") as file:
        del file["episode_0/terminations"]
    assert [e.terminated for e in read(other)] == [False, False]


@pytest.mark.parametrize(
    ("problem", "task"),
    [
        ('{"language_instruction": "open  the\\ndrawer"}', "open the drawer"),
        (b'{"language_instruction": "open the drawer"}', "open the drawer"),
        ('{"language_instruction": ["open", "the", "drawer"]}', "open the drawer"),
        ('{"language_instruction": "x\\u001b[2Jy"}', "x?[2Jy"),
        ('{"language_instruction": 7}', "SCENE3 close the lid"),
        ("{}", "SCENE3 close the lid"),
        ("[" * 100_000, "SCENE3 close the lid"),
        (7, "SCENE3 close the lid"),
        (["{}", "{}"], "SCENE3 close the lid"),
        (None, "SCENE3 close the lid"),
    ],
)
def test_the_task_is_a_sentence_from_the_file_or_its_name(
    problem: Any, task: str, tmp_path: Path
) -> None:
    path = write_demos(tmp_path / "SCENE3_close_the_lid_demo.hdf5")
    with h5py.File(path, "a") as file:
        if problem is not None:
            file["data"].attrs["problem_info"] = problem
    assert scan(path).task == task
    assert scan(write_minari(tmp_path / "set-v0")).task == "set-v0"


def test_minari(tmp_path: Path) -> None:
    path = write_minari(tmp_path / "set-v0")
    summary, episodes = scan(path), read(path)
    assert summary.format == "Minari"
    assert summary.num_successes == 1
    assert [e.terminated for e in episodes] == [True, False]
    with h5py.File(path / "data/main_data.hdf5") as file:
        for number, episode in enumerate(episodes):
            raw = file[f"episode_{number}"]
            np.testing.assert_array_equal(
                episode.obs["state"], raw["observations"][:].astype(np.float32)
            )
            # Unlike robomimic's, its actions have no common range.
            np.testing.assert_array_equal(episode.actions, raw["actions"][:].astype(np.float32))
            np.testing.assert_array_equal(episode.rewards, raw["rewards"][:].astype(np.float32))


def test_minari_with_nested_observations_and_discrete_actions(tmp_path: Path) -> None:
    path = write_minari(tmp_path / "set-v0", nested=True)
    (first, _) = read(path)
    assert set(first.obs) == {"achieved.hand", "observation"}
    assert first.actions.dtype == np.int64
    assert first.actions.shape == (4, 1)


def test_what_minari_itself_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari", reason="needs the extra minari")
    gymnasium = pytest.importorskip("gymnasium")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    space = gymnasium.spaces
    lengths, buffers = [7, 3], []
    for number, steps in enumerate(lengths):
        ended = np.eye(steps, dtype=bool)[-1]
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                id=number,
                observations=np.zeros((steps + 1, 4), np.float32),
                actions=np.ones(steps, np.int64),
                rewards=[1.0] * steps,
                terminations=ended.tolist(),
                truncations=[False] * steps,
            )
        )
    minari.create_dataset_from_buffers(
        "cart/test-v0",
        buffers,
        action_space=space.Discrete(2),
        observation_space=space.Box(-1, 1, (4,)),
        algorithm_name="x",
        author="x",
        author_email="x@x",
        code_permalink="x",
    )
    summary = scan(tmp_path / "cart/test-v0")
    assert summary.lengths.tolist() == lengths
    assert summary.returns.tolist() == lengths
    assert summary.num_successes is None  # a reward for every step is no success
    assert {n: str(f) for n, f in summary.fields.items()} == {
        "state": "float32 [4]",
        "actions": "int64 [1]",
    }


def test_real_demonstrations_are_counted_as_they_are() -> None:
    if not REAL.exists():
        pytest.skip(f"needs {REAL}, which is not part of the repository")
    summary, episodes = scan(REAL), read(REAL)
    with h5py.File(REAL) as file:
        raw = [file[f"data/demo_{n}"] for n in (1, 2, 3)]
        assert [e.file_steps for e in summary.episodes] == [len(d["actions"]) for d in raw]
        assert summary.num_file_steps == 482 + 510 + 392
        for episode, demo in zip(episodes, raw, strict=True):
            assert len(episode.actions) == len(demo["actions"]) - 1
            np.testing.assert_array_equal(
                episode.obs["states"], demo["states"][:].astype(np.float32)
            )
            actions = demo["actions"][:-1].astype(np.float32)
            np.testing.assert_array_equal(episode.actions, actions)
    assert max(e.largest_action for e in summary.episodes) == pytest.approx(3.75)
    assert summary.num_successes is None
    assert not contrast(summary.returns, summary.lengths).enough


def test_a_number_that_is_not_finite_is_named(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_1/obs/joint_states"][7, 3] = np.nan
    with pytest.raises(DataError, match=r"at demo_1: 'joint_states' .* at step 7"):
        read(path)
    scan(path)  # a look at it does not read so much


def test_a_number_too_large_for_float32_is_named(tmp_path: Path) -> None:
    path = write_demos(tmp_path / "demos.hdf5")
    with h5py.File(path, "a") as file:
        file["data/demo_0/actions"][2, 0] = 1e300
    with pytest.raises(DataError, match=r"at demo_0: 'actions' .* at step 2"):
        read(path)


def test_an_episode_that_needs_too_much_memory_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "demos.hdf5"
    with h5py.File(path, "w") as file:
        demo = file.create_group("data/demo_0")
        demo["actions"] = np.zeros((50, 7))
        demo.create_dataset("obs/image", (50, 512, 512, 3), "u1", compression="gzip", chunks=True)
        demo["obs/image"][...] = np.zeros((50, 512, 512, 3), np.uint8)
    with pytest.raises(DataError, match=r"demo_0: needs .* raise --memory"):
        scan(path, limits=Limits(memory=64 << 20))
    assert scan(path).lengths.tolist() == [49]
