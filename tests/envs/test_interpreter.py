"""Environments in another interpreter: the same bits, kills, hangs, and results that do not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batch_env_contract import KEY, check_contract
from etude.core.errors import EtudeError, NonFinite, ProcessLost, UsageError
from etude.core.trees import digest
from etude.envs.adapters import interpreter, interpreter_child, virtual_envs
from etude.envs.adapters.gym import GymConfig, GymEnv, RemoteGymEnv, instances
from etude.envs.adapters.workers import EnvWorkers
from etude.envs.probe import random_actions
from run_hash import run_hash


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A virtual environment that finds the packages of this one, and the environments of tests."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    lib = Path(__file__).parents[1] / "lib"
    (site / "here.pth").write_text("\n".join([*packages, str(lib)]))
    return str(folder)


def remote(config: GymConfig, num_envs: int = 3) -> RemoteGymEnv:
    env = instances(config, num_envs, exact=True)
    assert isinstance(env, RemoteGymEnv)
    return env


def played(env: Any, steps: int, name: str = "play") -> list[str]:
    found = []
    for action in random_actions(env, steps, KEY.child(name)):
        result = env.step(action)
        arrays = {"obs": result.obs, "reward": result.reward, "final": result.final_obs}
        arrays |= {"ended": result.terminated, "cut": result.truncated, "at": result.final_envs}
        found.append(digest(arrays))
    return found


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Hopper-v5"])
def test_the_same_bits_as_here(venv: str, env_id: str) -> None:
    """Steps with ends of episodes, and a snapshot continued by another process."""
    here, there = GymEnv(GymConfig(id=env_id), 3), remote(GymConfig(id=env_id, python=venv))
    assert digest(here.reset(KEY)) == digest(there.reset(KEY))
    assert played(here, 60) == played(there, 60)
    saved, expected = there.snapshot(), played(there, 60, "after")
    other = remote(GymConfig(id=env_id, python=venv))
    other.restore(saved, KEY)
    assert played(other, 60, "after") == expected
    there.close()
    other.close()


def test_snapshots_hold_the_physics_of_those_here(venv: str) -> None:
    """And nothing of MuJoCo's arena, whose unused memory differs between equal runs."""
    here, there = (
        GymEnv(GymConfig(id="Hopper-v5"), 2),
        remote(GymConfig(id="Hopper-v5", python=venv), 2),
    )
    for env in (here, there):
        env.reset(KEY)
        played(env, 20)
    physics = [row.tobytes().hex() for row in here.snapshot()["physics"]]
    texts = there.snapshot()["attributes"]
    assert [json.loads(text.tobytes())["physics"] for text in texts] == physics
    there.close()


@pytest.mark.rotated
def test_contract(venv: str) -> None:
    config = GymConfig(id="slow_gym:Slow-v0", kwargs={"seconds": 0.0}, python=venv)
    check_contract(lambda rows, threads: config.build(rows, threads), steps=60, exact_steps=60)


def test_a_run_has_the_same_bits(venv: str, tmp_path: Path) -> None:
    from etude.api import train
    from etude.planning import recipes
    from toys import changed

    hashes = []
    for name, python in (("here", ""), ("there", venv)):
        recipe = changed(
            recipes.find("ppo"),
            env={"python": python},
            algorithm={"update_epochs": 2, "rollout_steps": 32},
            clock={"total_timesteps": 2 * 512, "iterations": 2, "cycles": 1},
            evaluation={"episodes": 2, "num_envs": 2, "envs_per_group": 2},
        )
        hashes.append(run_hash(train(recipe, tmp_path / name).path))
        del hashes[-1]["collector"]  # Snapshots have the other interpreter's format.
    assert hashes[0] == hashes[1]


def test_the_plan_names_the_interpreter_and_its_packages(venv: str) -> None:
    env = remote(GymConfig(id="CartPole-v1", python=venv))
    (note,) = env.spec.notes
    assert venv in note
    assert f"numpy {np.__version__}" in note
    before = env.spec.model
    env._interpreter.facts["packages"]["numpy"] = "1.0"
    assert env._describe()[0] != before
    env.close()


def test_a_killed_process_is_started_again_with_the_same_bits(venv: str) -> None:
    env = remote(GymConfig(id="CartPole-v1", python=venv))
    env.reset(KEY)
    played(env, 10)
    saved, expected = env.snapshot(), played(env, 30, "after")
    os.kill(env._interpreter._process.pid, signal.SIGKILL)
    with pytest.raises(ProcessLost, match=r"was ended by signal 9 \(SIGKILL\)"):
        played(env, 1)
    env.restore(saved, KEY)
    assert played(env, 30, "after") == expected
    env.close()


def test_a_hanging_call_is_ended(venv: str) -> None:
    from threading import Timer

    config = GymConfig(id="slow_gym:Slow-v0", kwargs={"seconds": 60.0}, python=venv)
    env = remote(config, 1)
    env.reset(KEY)
    Timer(0.5, env.interrupt, [0.5]).start()
    with pytest.raises(ProcessLost, match=r"environment 0 .* did not return within 0.5 s"):
        played(env, 1)
    env.close()


def test_workers_have_an_interpreter_each(venv: str) -> None:
    here = GymEnv(GymConfig(id="CartPole-v1"), 4)
    env = GymConfig(id="CartPole-v1", python=venv).build(4, 2)
    assert isinstance(env, EnvWorkers)
    assert digest(here.reset(KEY)) == digest(env.reset(KEY))
    assert played(here, 30) == played(env, 30)
    env.close()


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("shape", r"observes float32 \[3\] in 'value', and its space is float32 \[2\]"),
        ("reward", r"gives the reward as an array of the shape \(2,\)"),
        ("raise", "ValueError: the wheel came off"),
    ],
)
def test_results_that_do_not_fit_are_named(venv: str, lie: str, words: str) -> None:
    """Not in the first step, but the third."""
    env = remote(GymConfig(id="lying_gym:Lying-v0", kwargs={"lie": lie}, python=venv), 2)
    env.reset(KEY)
    played(env, 2)
    with pytest.raises(EtudeError, match=words):
        played(env, 1)
    env.close()


def test_diverged_physics_are_named(venv: str) -> None:
    env = remote(GymConfig(id="lying_gym:Diverging-v0", python=venv), 2)
    env.reset(KEY)
    with pytest.raises(NonFinite, match=r"physics of environment 0 in 'lying_gym:Diverging-v0'"):
        played(env, 1)
    env.close()


def test_another_version_of_the_messages_is_refused(
    venv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter_child, "VERSION", 2)
    with pytest.raises(EtudeError, match="sent a message of version 1, and version 2 is needed"):
        remote(GymConfig(id="CartPole-v1", python=venv))


def test_an_unknown_environment_and_interpreter_are_named(venv: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot make 'CartPole-v77'"):
        remote(GymConfig(id="CartPole-v77", python=venv))
    with pytest.raises(UsageError, match=r"neither an interpreter nor a virtual environment"):
        remote(GymConfig(id="CartPole-v1", python=str(tmp_path)))
    with pytest.raises(UsageError, match="engine batch"):
        GymConfig(id="Hopper-v5", engine="batch", python=venv).build(2)


def test_no_process_is_left(venv: str) -> None:
    env = remote(GymConfig(id="CartPole-v1", python=venv))
    process = env._interpreter._process
    env.close()
    assert process.returncode == 0


def test_pictures(venv: str) -> None:
    pytest.importorskip("pygame")
    env = remote(GymConfig(id="CartPole-v1", python=venv).for_film(), 1)
    env.reset(KEY)
    assert env.picture(0).shape == (400, 600, 3)
    env.close()


def test_spaces_survive_their_description() -> None:
    from gymnasium import spaces

    space = spaces.Dict(
        {
            "a": spaces.Box(-1.0, 1.0, (3,), np.float64),
            "b": spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, 2.0]), dtype=np.float32),
            "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        }
    )
    assert interpreter._space(interpreter_child.describe(space)) == space
    for action in (spaces.Discrete(4, start=1), spaces.MultiDiscrete([2, 3])):
        assert interpreter._space(interpreter_child.describe(action)) == action


def test_environments_are_made_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_ENVS", str(tmp_path))
    with pytest.raises(UsageError, match="`etude env create metaworld` makes it"):
        virtual_envs.interpreter_of("metaworld")
    folder = virtual_envs.create("mine", ["pip"], say=lambda text: None)
    assert virtual_envs.interpreter_of("mine") == folder / "bin" / "python"
    assert virtual_envs.installed() == {"mine": folder}
    assert "pip" in virtual_envs.packages(folder)
    with pytest.raises(UsageError, match="exists"):
        virtual_envs.create("mine", ["pip"])
    with pytest.raises(UsageError, match="failed"):
        virtual_envs.create("broken", ["./no-such-package"], say=lambda text: None)
    assert not (tmp_path / "broken").exists()
