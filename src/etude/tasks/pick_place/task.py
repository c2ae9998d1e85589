"""Pick and place: a KUKA iiwa 14 grasps a cube by friction, carries it and puts it down.

Actions go to the controller without scripts or attachments. For a success the cube must have been
lifted between two pressing fingers, and rest released in the target, with fingers, palm and links
away from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from etude.envs.mujoco.simulation import Camera
from etude.envs.mujoco.task import Demonstration, Group, Task
from etude.tasks.pick_place import terms
from etude.tasks.pick_place.arm import PickPlaceArm
from etude.tasks.pick_place.expert import PickPlaceDemonstration
from etude.tasks.pick_place.options import PickPlaceOptions
from etude.tasks.pick_place.scene import (
    CONTROL_SECONDS,
    REST_HEIGHT,
    TABLE_CENTER,
    scene_spec,
)
from etude.tasks.pick_place.terms import PositionNoise

CAMERA = Camera(
    look_at=(0.5, 0.0, 0.22),
    distance=1.5,
    azimuth=145.0,
    elevation=-30.0,
    floor=0.0,
    target="disc",
    target_sink=REST_HEIGHT - float(TABLE_CENTER[2]),
)
PICTURE_CAMERA = replace(
    CAMERA, look_at=(0.58, 0.0, 0.17), distance=0.6, azimuth=180.0, elevation=-55.0
)
"""Camera of the image observation, close to the table: a cube is 7 of 84 pixels wide."""


class PickPlaceConfig(PickPlaceOptions):
    """Pick up a cube by friction and place it at a target."""

    demonstration: ClassVar[type[Demonstration] | None] = PickPlaceDemonstration

    def define(self) -> Task:
        arm, weights = PickPlaceArm(self), self.reward.model_dump()
        state, parts = dict(terms.STATE), self.random.parts()
        if self.control == "joint":
            state["joints"] = terms.joint_position
        if self.random.observation_noise:
            noise = PositionNoise(self.random.observation_noise)
            state |= noise.observations()
            parts.append(noise)
        return Task(
            model=scene_spec(CONTROL_SECONDS / self.substeps, self.cone, self.integrator),
            action=arm,
            view=arm,
            parts=parts,
            observations={
                "state": Group(state, delay=(0, self.random.observation_delay)),
                "critic": terms.CRITIC,
            },
            rewards={name: (term, weights[name]) for name, term in terms.REWARDS.items()},
            terminations={"success": terms.success, "fallen": terms.fallen},
            success=terms.success,
            statistics=terms.STATISTICS,
            outcomes=terms.OUTCOMES,
            substeps=self.substeps,
            max_episode_steps=self.max_episode_steps,
            camera=replace(CAMERA, target_radius=self.radius),
            picture_camera=replace(PICTURE_CAMERA, target_radius=self.radius),
        )
