"""From LIBERO's files to a reward that is being learned, as a person types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import short_recipes
from etude import load_reward
from etude.api import Run
from etude.cli import main as cli
from etude.data.store.episodes import EpisodeStore
from etude.data.store.views import open_with_task

TASKS = {
    "KITCHEN_SCENE1_open_the_drawer_demo.hdf5": "open the drawer of the cabinet",
    "KITCHEN_SCENE2_put_the_bowl_on_the_plate_demo.hdf5": "put the bowl on the plate",
    "STUDY_SCENE1_pick_up_the_book_demo.hdf5": None,
}
LENGTHS = (18, 25, 21)
REAL = Path(__file__).parents[3] / "shared/data/robosuite_lift_demos.hdf5"


def write_libero(folder: Path, **parts: bool) -> list[Path]:
    """A file per task as LIBERO has them: two cameras, what the arm feels, every demo a success.

    The simulator's states have another size in every scene. `rewards` and `sentences` as asked.
    """
    folder.mkdir()
    rng, paths = np.random.default_rng(0), []
    for number, (name, sentence) in enumerate(TASKS.items()):
        paths.append(folder / name)
        with h5py.File(paths[-1], "w") as file:
            data = file.create_group("data")
            data.attrs["bddl_file_name"] = f"{name}.bddl"
            if sentence is not None:
                data.attrs["problem_info"] = json.dumps({"language_instruction": sentence})
            for demo, steps in enumerate(LENGTHS):
                group = data.create_group(f"demo_{demo}")
                group["actions"] = rng.uniform(-1.2, 1.2, (steps, 7))
                group["states"] = rng.normal(size=(steps, 40 + number))
                for camera, size in (("agentview_rgb", 32), ("eye_in_hand_rgb", 16)):
                    pixels = rng.integers(0, 256, (steps, size, size, 3), np.uint8)
                    group[f"obs/{camera}"] = pixels
                for felt, size in (("joint_states", 7), ("gripper_states", 2), ("ee_pos", 3)):
                    group[f"obs/{felt}"] = rng.normal(size=(steps, size))
                if parts.get("rewards", True):
                    group["rewards"] = group["dones"] = np.eye(steps, dtype=np.uint8)[-1]
    return paths


def etude(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said instead of doing it: one line."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err.removesuffix("\n")
    assert "\n" not in said
    return said


def begin_and_stop(*arguments: str) -> list[str]:
    """What a training says until its second iteration of 50 batches is over; then it is stopped."""
    command = [sys.executable, "-m", "etude", "train", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "iteration 2:" in line:
            process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert any("iteration 2:" in line for line in lines), "".join(lines)
    return lines


def test_from_the_files_to_a_reward_without_further_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = write_libero(tmp_path / "files")
    shown = etude(capsys, "data", "import", *paths, "D")
    assert "open the drawer of the cabinet; put the bowl on the plate; STUDY SCENE1 pick" in shown
    store = EpisodeStore.open(tmp_path / "D")
    sentences = [sentence or "STUDY SCENE1 pick up the book" for sentence in TASKS.values()]
    assert store.labels.tasks == [task for task in sentences for _ in LENGTHS]
    assert store.labels.names[3] == f"{paths[1].stem}/demo_0"
    assert store.lengths.tolist() == [steps - 1 for steps in LENGTHS] * 3
    for number in range(9):
        with h5py.File(paths[number // 3]) as file:
            demo = file[f"data/demo_{number % 3}"]
            steps, total = store.episode(number)
            raw = demo["actions"][:-1].astype(np.float32)
            np.testing.assert_array_equal(steps.actions, raw)
            np.testing.assert_array_equal(
                steps.next_obs["eye_in_hand_rgb"], demo["obs/eye_in_hand_rgb"][1:]
            )
            assert total == 1.0

    plan = json.loads(etude(capsys, "plan", "reward-only", "--algorithm.dataset", "D", "--json"))
    cameras, felt = ["agentview_rgb", "eye_in_hand_rgb"], ["ee_pos", "gripper_states"]
    read = {n.removeprefix("obs/") for n in plan["shapes"] if n.startswith("obs/")}
    assert read == {*cameras, *felt, "joint_states", "task"}
    assert any("9 clips that end before their episode does are added" in n for n in plan["notes"])
    assert any("because all 9 returns are 1" in note for note in plan["notes"])
    assert any("1 of 9 episodes are held out" in note for note in plan["notes"])

    once = f"{short_recipes.__file__}:reward_only_debug"
    learns = ("train", once, "--algorithm.dataset", "D", "--folder", "run")
    etude(capsys, *learns)
    (row,) = Run(tmp_path / "run").rows()
    assert row["updates"] == 1
    assert np.isfinite(row["train/R_loss"])
    assert row["eval/R_loss"] >= 0.0
    # One episode and its clip: at equal length, with all of [0, 1] as the interval.
    assert (row["eval/reward_pairs_low"], row["eval/reward_pairs_high"]) == (0.0, 1.0)
    assert not any("correlation" in name for name in row)
    assert "eval/reward_success (there are no failures)" in " ".join(plan["notes"])


@pytest.mark.rotated
def test_policies_from_pictures_and_joints_of_a_filtered_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bc, offline and reward-only from what was imported compressed and edited after that."""
    monkeypatch.chdir(tmp_path)
    files = write_libero(tmp_path / "files")
    etude(capsys, "data", "import", *files, "all", "--pictures", "png")
    etude(capsys, "data", "filter", "all", "D", "--task", "*the*")
    short = ("--clock.epochs", 1, "--clock.cycles", 1, "--clock.iterations", 1)
    short += ("--algorithm.dataset", "D", "--algorithm.train-batches", 2)
    etude(capsys, "train", "bc", *short, "--algorithm.batch-size", 8, "--folder", "bc")
    etude(capsys, "train", "offline-pictures", *short, "--folder", "offline")
    etude(capsys, "train", "reward-only", *short, "--folder", "reward")
    read = ("agentview_rgb", "eye_in_hand_rgb", "ee_pos", "gripper_states", "joint_states", "task")
    sentences = {sentence or "STUDY SCENE1 pick up the book" for sentence in TASKS.values()}
    for name in ("bc", "offline"):
        policy = Run(tmp_path / name).policy().policy
        assert {*policy.observations} == {*read}
        assert policy.sentences.keys() == sentences
    plan = json.loads((tmp_path / "offline" / "plan.json").read_text())
    sizes = {"batch_size": 32, "rrd_batch_size": 32, "rrd_sample_size": 32}
    assert sizes.items() <= plan["geometry"].items()
    assert "eval/q_data" in Run(tmp_path / "offline").rows()[0]
    for name, column in (
        ("bc", "train/imitation_loss"),
        ("offline", "train/critic_loss"),
        ("reward", "train/R_loss"),
    ):
        (row,) = Run(tmp_path / name).rows()
        assert row["updates"] == 2
        assert np.isfinite(row[column])


def test_cloning_demonstrations_of_robosuite_that_have_no_rewards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not REAL.exists():
        pytest.skip(f"needs {REAL}, which is not part of the repository")
    monkeypatch.chdir(tmp_path)
    assert "have no rewards" in etude(capsys, "data", "import", REAL, "D")
    few = ("--clock.epochs", 2, "--clock.cycles", 1, "--clock.iterations", 1)
    few += ("--algorithm.train-batches", 100, "--algorithm.batch-size", 64)
    etude(capsys, "train", "bc", "--algorithm.dataset", "D", *few, "--folder", "bc")
    first, last = Run(tmp_path / "bc").rows()
    # Of three demonstrations one is held out: what is learned of two says little of it.
    assert last["train/imitation_loss"] < 0.6 * first["train/imitation_loss"]
    assert np.isfinite(last["eval/imitation_loss"])


@pytest.mark.rotated
def test_the_recipe_runs_as_it_is_and_its_reward_is_judged_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    etude(capsys, "data", "import", *write_libero(tmp_path / "files"), "D")
    lines = begin_and_stop("reward-only", "--algorithm.dataset", "D", "--folder", "run")
    losses = [float(line.split("R loss ")[1].split(",")[0]) for line in lines if "R loss" in line]
    assert len(losses) >= 2
    assert np.isfinite(losses).all()
    shown = etude(capsys, "eval", "run")
    assert "1 held-out episodes and 1 clips" in shown
    assert "a constant" in shown
    reads = load_reward(tmp_path / "run").network.config.reads
    steps, _ = open_with_task(tmp_path / "D", reads).episode(8)
    rewards = load_reward(tmp_path / "run").rewards(steps.obs, steps.actions, steps.next_obs)
    assert rewards.shape == (LENGTHS[-1] - 1,)


def test_files_without_rewards_serve_policies_and_no_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = write_libero(tmp_path / "files", rewards=False)
    shown = etude(capsys, "data", "import", *paths, "D")
    assert "9 of 9 episodes have no rewards: policies can be learned" in shown
    said = refusal(capsys, "plan", "reward-only", "--algorithm.dataset", "D")
    assert "no rewards for 9 of its 9 episodes" in said
    policy: tuple[Any, ...] = ("plan", "offline", "--algorithm.dataset", "D")
    for reads in ("actor-reads", "critic-reads"):
        policy += (f"--policy.{reads}", "joint_states", "gripper_states")
    assert "no rewards for 9 of its 9 episodes" in refusal(capsys, *policy)
    shown = " ".join(etude(capsys, *policy, "--rewards.kind", "given").split())
    assert "the policy can only imitate them" in shown
    # What nobody recorded a person may still know.
    known = ("--assume-success", "--success-reward", 1)
    etude(capsys, "data", "import", *paths, "E", *known)
    assert EpisodeStore.open(tmp_path / "E").labels.num_successes == 9
    etude(capsys, "plan", "reward-only", "--algorithm.dataset", "E")


def test_an_observation_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    etude(capsys, "data", "import", *write_libero(tmp_path / "files"), "D")
    reads = ("--algorithm.rrd.network.reads", "image")
    said = refusal(capsys, "plan", "reward-only", "--algorithm.dataset", "D", *reads)
    assert "reads the observation 'image', which does not exist" in said
    assert "agentview_rgb" in said
    said = refusal(capsys, "plan", "offline", "--algorithm.dataset", "D")
    assert "'state'" in said


def test_no_file_is_taken_for_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_libero(tmp_path / "files")
    said = refusal(capsys, "data", "import", *paths)
    assert "is a file: name the folder to make last" in said
    assert paths[-1].stat().st_size > 0
