"""An exported policy that tracks a motion runs in plain MuJoCo, from the export alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import drive
from batch_env_contract import KEY
from etude.api import train
from etude.cli.main import main
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude_runtime import ContractError, JointTargets, Policy
from made_motions import go1_config
from toys import changed
from tracking import Tracking


def learning(folder: Path, steps: int, **noise: Any) -> Recipe:
    config = go1_config(folder, std={"velocities": 0.4}, **noise)
    return changed(
        recipes.find("track").replace(env=config),
        policy={"hidden": (64, 64)},
        collector={"num_envs": 128, "envs_per_group": 64, "threads": 2},
        algorithm={"minibatch_size": 768, "learning_rate": 1e-3},
        clock={"total_timesteps": steps, "cycles": 7, "iterations": 7},
        evaluation={"episodes": 4, "num_envs": 4, "envs_per_group": 4, "final_episodes": 4},
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A policy of the first iterations."""
    folder = tmp_path_factory.mktemp("tracked")
    recipe = learning(folder, 3072 * 2)
    run = train(recipe, folder / "run")
    assert main(["export", str(run.path), "--to", str(folder / "policy")]) == 0
    return recipe, folder / "policy"


def test_it_measures_and_acts_as_in_training(exported: tuple[Recipe, Path]) -> None:
    """The observations and controls of the task, at the same state, without any of its code."""
    recipe, folder = exported
    env = recipe.task.for_evaluation().build(1)
    observed = env.reset(KEY)["state"][0]
    policy = Policy.load(folder, trial=False)
    assert {path.name for path in folder.iterdir()} >= {"motion.safetensors", "scene.xml"}
    robot = Tracking(policy, mujoco.MjModel.from_xml_path(str(folder / "scene.xml")))
    qpos, qvel, ctrl = (env.simulation.bind(name) for name in ("qpos", "qvel", "ctrl"))
    rng = np.random.default_rng(0)
    (reader,) = policy._readers
    for step in range(60):  # more than two cycles of the motion
        robot.data.qpos[:], robot.data.qvel[:] = qpos[0], qvel[0]
        mujoco.mj_forward(robot.model, robot.data)
        robot.step = step
        sensed = robot.sense()
        policy.reset()
        plain = {**sensed, "action": env.action[0]}
        mine = reader.read([np.asarray(plain[key], np.float32) for key in sensed])
        np.testing.assert_allclose(mine, observed, atol=2e-5)
        action = rng.uniform(-0.5, 0.5, (1, 12)).astype(np.float32)
        result = env.step(action)
        if result.final_envs.size:
            break  # and the controls are those of a reset
        np.testing.assert_allclose(robot.joints.targets(action[0], step), ctrl[0], atol=1e-5)
        observed = result.obs["state"][0]
    assert step > 10


def test_an_export_does_not_name_the_machine(exported: tuple[Recipe, Path]) -> None:
    _, folder = exported
    document = json.loads((folder / "policy.json").read_text())
    assert document["run"]["env"]["robot"] == "go1.xml"
    assert document["run"]["env"]["motion"] == ["walk.npz"]
    for path in folder.iterdir():
        assert str(folder.parent).encode() not in path.read_bytes()


def test_a_motion_is_needed_and_must_be_whole(exported: tuple[Recipe, Path]) -> None:
    _, folder = exported
    policy = Policy.load(folder, trial=False)
    with pytest.raises(ContractError, match="needs one"):
        JointTargets(policy.document)
    policy.document["motion"]["counts"][0] += 1
    with pytest.raises(ContractError, match="fewer frames"):
        policy.motion()
    policy.document["motion"]["counts"][0] -= 1


def test_it_drives_the_robot_with_half_the_time_step(
    exported: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = exported
    assert drive.main([str(folder), "--episodes", "2"]) == 0
    assert "of 2 episodes, time step 2 ms" in capsys.readouterr().out


@pytest.mark.rotated
def test_a_learned_policy_tracks_its_motion_outside(tmp_path: Path) -> None:
    run = train(learning(tmp_path, 150_000), tmp_path / "run")
    assert run.rows()[-1]["eval/success_rate"] == 1.0
    assert main(["export", str(run.path), "--to", str(tmp_path / "policy")]) == 0
    robot = drive.make(tmp_path / "policy")
    assert robot.model.opt.timestep == pytest.approx(0.002)
    assert drive.success_rate(robot, 10, seed=0) >= 0.9
