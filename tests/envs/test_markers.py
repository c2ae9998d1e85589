"""What films draw beside the model: of which shape, where, and that training does not see it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from etude.core.contracts import Array
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.envs.mujoco import rendering
from etude.envs.mujoco.commands import VelocityCommand
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.markers import Arrow, Twist
from etude.envs.mujoco.rendering import Studio
from etude.envs.mujoco.robot import Robot
from etude.envs.mujoco.task import Part
from etude.tasks.velocity import WalkConfig

SIZE = (640, 360)


@pytest.fixture(scope="module", autouse=True)
def drawable() -> None:
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))


@pytest.fixture
def walk() -> Any:
    env: Any = WalkConfig(acceleration=None).make(2)
    env.reset(Key(0))
    yield env
    env.close()


def picture(env: Any, env_id: int = 0) -> tuple[Array, list[str]]:
    """Pixels as numbers, and the texts of the legend."""
    with Studio(decorated(env), env.task.camera, *SIZE) as studio:
        pixels = studio.picture(env.simulation.state[env_id], env.markers(env_id))
        return pixels.astype(int), [line.text for line in studio.legend]


def green(pixels: Array) -> Array:
    """[height, width] bool: where the colour of commands is."""
    red, middle, blue = np.moveaxis(pixels, -1, 0)
    found: Array = (middle > red + 70) & (middle > blue + 70)
    return found


def test_an_arrow_points_along_the_command(walk: Any) -> None:
    command = walk.ability(VelocityCommand)
    pictures = {}
    for name, speed in (("ahead", 1.0), ("back", -1.0), ("none", 0.0)):
        command.hold([speed, 0.0, 0.5])
        pictures[name], legend = picture(walk)
        assert legend[0] == f"commanded: {abs(speed):.2f} m/s, turning +0.50 rad/s"
        assert legend[1].startswith("actual: ")
    ahead, back = (np.argwhere(green(pictures[name])) for name in ("ahead", "back"))
    assert min(len(ahead), len(back)) > 200
    azimuth = np.deg2rad(walk.task.camera.azimuth)  # of the camera's direction
    right = np.array([np.sin(azimuth), -np.cos(azimuth)])
    (robot,) = (part for part in walk.parts if isinstance(part, Robot))
    side = float(robot.heading[0] @ right)
    assert abs(side) > 0.3
    moved = ahead[:, 1].mean() - back[:, 1].mean()
    assert np.sign(moved) == np.sign(side)
    assert abs(moved) > 40 * abs(side)
    assert not green(pictures["none"]).any()


def test_the_arrow_of_the_actual_velocity_is_blue_and_measured_in_the_drawn_state(
    walk: Any,
) -> None:
    walk.ability(VelocityCommand).hold([0.0, 0.0, 0.0])
    state = walk.simulation.state[0]
    model = walk.simulation.model
    still, _ = picture(walk)
    state[1 + model.nq : 4 + model.nq] = 0.6, 0.8, 0.0
    moving, legend = picture(walk)
    assert legend[1].startswith("actual: 1.00 m/s")

    def blue(pixels: Array) -> int:
        red, middle, most = np.moveaxis(pixels, -1, 0)
        return int(((most > red + 90) & (most > middle + 60)).sum())

    assert blue(moving) > blue(still) + 200


def test_a_part_of_a_task_draws_what_it_likes(walk: Any) -> None:
    class Wind(Part):
        def markers(self, env_id: int, step: int) -> list[Arrow]:
            return [Arrow(np.array([0.0, 0.0, 0.6]), np.array([0.0, 0.5 * env_id, 0.0]), "wind")]

    walk.parts = (Wind(),)
    (pixels, legend), (other, _) = picture(walk, 1), picture(walk, 0)
    assert legend == ["wind"]
    assert green(pixels).sum() > 100
    assert green(other).sum() < 20


def test_markers_are_a_record_of_their_moment(walk: Any) -> None:
    """The command of the next step must not change those of the last."""
    command = walk.ability(VelocityCommand)
    command.hold([0.5, 0.0, 0.0])
    (before,) = walk.markers(0)
    command.hold([-0.5, 0.0, 0.0])
    assert isinstance(before, Twist)
    assert before.command.tolist() == [0.5, 0.0, 0.0]
