"""Mirror images: a symmetric robot moves symmetrically, and PPO and SAC learn from both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch

import etude
from etude.core.clock import ClockConfig
from etude.core.contracts import ACTION, Array, Reflection
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.envs.mujoco import mirror
from etude.envs.mujoco.env import MujocoEnv
from etude.models.policies import PolicyConfig
from etude.planning.recipe import Recipe
from etude.rl.off_policy import OffPolicy
from etude.rl.on_policy import Shard
from etude.rl.sac import SACConfig
from etude.rl.sampling import Batch
from etude.tasks.reach import reach
from etude.tasks.velocity import WalkConfig, on_floor, walk_go1

SMALL: dict[str, Any] = {
    "collector__num_envs": 8,
    "collector__envs_per_group": 4,
    "env__max_episode_steps": 20,
    "clock__cycles": 1,
    "clock__iterations": 2,
    "evaluation__episodes": 2,
    "evaluation__num_envs": 2,
    "evaluation__envs_per_group": 2,
    "evaluation__final_episodes": 2,
}


def image(array: Array, reflection: Reflection) -> Array:
    return reflection.of(torch.from_numpy(np.asarray(array, np.float32))).numpy()


def symmetric_go1() -> mujoco.MjSpec:
    """The Go1 without what is not symmetric: masses 1 or 2 mm beside the middle of trunk and
    calves, and a solver that stops early, whose result depends on the order of the contacts."""
    spec = on_floor()
    spec.option.solver, spec.option.iterations = mujoco.mjtSolver.mjSOL_NEWTON, 100
    for body in spec.bodies:
        if body.name == "trunk" or body.name.endswith("calf"):
            body.ipos[1] = 0.0
            body.iquat = (0.5**0.5, 0.0, 0.5**0.5 * (body.name == "trunk"), 0.0)
    return spec


def make_image(env: MujocoEnv, half_stride: int) -> None:
    """Make environment 1 the mirror image of environment 0."""
    pose, speed = env.simulation.bind("qpos"), env.simulation.bind("qvel")
    joints = env.parts[0].mirror()  # type: ignore[attr-defined]
    columns, signs = list(joints.columns), np.array(joints.signs)
    pose[1, :3] = pose[0, :3] * (1, -1, 1)
    pose[1, 3:7] = pose[0, 3:7] * (1, -1, 1, -1)
    pose[1, 7:] = pose[0, 7:][columns] * signs
    speed[1, :3] = speed[0, :3] * (1, -1, 1)
    speed[1, 3:6] = speed[0, 3:6] * (-1, 1, -1)
    speed[1, 6:] = speed[0, 6:][columns] * signs
    env.simulation.bind("qacc_warmstart")[:] = 0.0
    env.elapsed[1] = env.elapsed[0] + half_stride
    command: Any = next(part for part in env.parts if hasattr(part, "command"))
    for array in (command.command, command.target):
        array[1] = array[0] * (1, -1, -1)
    env.simulation.forward()
    env.tick += 1


def test_a_mirrored_robot_moves_and_observes_as_its_mirror_image() -> None:
    # 2.5 strides per second: half a stride is 10 control steps.
    config = WalkConfig(gait_frequency=2.5, command_every=(100.0, 100.0))
    env = MujocoEnv(replace(config.define(), model=symmetric_go1()), 2)
    found, generator = env.spec.mirror, np.random.default_rng(0)
    env.reset(Key(0))
    for _ in range(7):
        env.step(generator.uniform(-1, 1, (2, 12)).astype(np.float32))
    make_image(env, half_stride=10)
    for _ in range(10):
        action = generator.uniform(-1, 1, 12).astype(np.float32)
        obs = env.step(np.stack([action, image(action, found[ACTION])])).obs
        for name in ("state", "critic"):
            own, other = obs[name]
            np.testing.assert_allclose(other, image(own, found[name]), atol=1e-3)
            assert np.abs(other - own).max() > 0.1


def test_reflections_of_scaled_and_stacked_measurements() -> None:
    pair = Reflection((1, 0), (1.0, -1.0))
    found = mirror.scaled(pair, np.array([2.0, 1.0]), copies=2)
    x = np.array([3.0, 5.0, 7.0, 11.0], np.float32)
    scale = np.array([2.0, 1.0, 2.0, 1.0], np.float32)
    unscaled = np.array([5.0, -3.0, 11.0, -7.0], np.float32)
    np.testing.assert_array_equal(image(x * scale, found), unscaled * scale)
    joined = mirror.joined([pair, mirror.VECTOR])
    assert joined == Reflection((1, 0, 2, 3, 4), (1.0, -1.0, 1.0, -1.0, 1.0))


def test_a_robot_that_is_not_symmetric_has_no_mirror_image() -> None:
    spec = on_floor()
    spec.body("FL_thigh").pos[0] += 0.05
    env = MujocoEnv(replace(WalkConfig().define(), model=spec), 1)
    assert env.spec.mirror == {}
    with pytest.raises(UsageError, match="not symmetric: FR_thigh_joint has no counterpart"):
        env.parts[0].mirror()  # type: ignore[attr-defined]


def test_what_has_no_mirror_image_is_refused() -> None:
    with pytest.raises(UsageError, match="symmetric robot, and the mirror image of action, state"):
        etude.plan(reach().replace(algorithm__mirror=True))
    memory = walk_go1().replace(policy__kind="lstm", algorithm__horizon=24, algorithm__mirror=True)
    with pytest.raises(UsageError, match="policy without memory, and policy"):
        etude.plan(memory)


def trained(folder: Path, recipe: Recipe, threads: int = 1) -> dict[str, str]:
    small = recipe.replace(**SMALL, collector__threads=threads)
    return etude.train(
        small, folder / str(len(list(folder.iterdir()))), console=False
    ).fingerprint()


def test_ppo_learns_from_mirror_images(tmp_path: Path) -> None:
    recipe = walk_go1().replace(algorithm__minibatch_size=64, clock__total_timesteps=768)
    plain = trained(tmp_path, recipe)
    one = trained(tmp_path, recipe.replace(algorithm__mirror=True))
    two = trained(tmp_path, recipe.replace(algorithm__mirror=True), threads=2)
    assert one == two
    assert one["policy"] != plain["policy"]


def test_sac_learns_from_mirror_images(tmp_path: Path) -> None:
    recipe = Recipe(
        name="walk",
        env=WalkConfig(),
        policy=PolicyConfig(kind="squashed", hidden=(16,)),
        algorithm=SACConfig(
            rollout_steps=8, train_batches=4, batch_size=16, capacity=32_000, warmup_steps=128
        ),
        clock=ClockConfig(total_timesteps=256, cycles=1, iterations=2),
    )
    plain = trained(tmp_path, recipe)
    assert trained(tmp_path, recipe.replace(algorithm__mirror=True))["policy"] != plain["policy"]


def test_a_random_half_of_the_segments_is_exchanged_with_its_image() -> None:
    own, images = torch.arange(1000.0), -torch.arange(1000.0)
    shard = SimpleNamespace(images=[(own, images)], values=own)
    Shard.swap_images(shard, Key(0))  # type: ignore[arg-type]
    torch.testing.assert_close(own.abs(), torch.arange(1000.0))
    torch.testing.assert_close(images, -own)
    assert 430 < int((own < 0).sum()) < 570


def test_a_mirrored_transition_is_mirrored_as_a_whole() -> None:
    """Observations before and after, and the action, of the chosen rows only."""
    swap = Reflection((1, 0), (1.0, -1.0))
    policy = SimpleNamespace(
        mirror={ACTION: swap}, mirrored=lambda obs: {"state": swap.of(obs["state"])}
    )
    x = torch.arange(6.0).reshape(3, 2)
    batch = Batch({"state": x, "other": x}, x + 10, x[:, 0], x[:, 0] > 9, {"state": x + 20})
    learner: Any = SimpleNamespace(policy=policy, device=torch.device("cpu"))
    found = OffPolicy._mirrored(learner, batch, np.array([False, True, False]))
    for before, after in (
        (x, found.obs["state"]),
        (x + 10, found.actions),
        (x + 20, found.next_obs["state"]),
    ):
        assert after[1].tolist() == [float(before[1, 1]), -float(before[1, 0])]
        torch.testing.assert_close(after[[0, 2]], before[[0, 2]])
    torch.testing.assert_close(found.obs["other"], x)
