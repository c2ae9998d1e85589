"""Options of imitation: clips, starts, terminations, physics and rewards."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator

from etude.core.config import Config
from etude.core.metrics import Curve, Metric, Metrics
from etude.envs.mujoco.config import TaskConfig
from etude.envs.robots.humanoid import Physics

FRAMES = 100_000
"""Largest length of an episode, for which tables of the clips are made."""


class ImitationReward(Config):
    """Weights of the reward terms, each from 0 to 1."""

    position: float = Field(0.5, description="Positions of the bodies as in the clip.")
    turn: float = Field(0.3, description="Rotations of the bodies as in the clip.")
    velocity: float = Field(0.1, description="Linear velocities of the bodies as in the clip.")
    spin: float = Field(0.1, description="Angular velocities of the bodies as in the clip.")
    effort: float = Field(0.0, le=0, description="Mean squared action.")


class ImitationOptions(TaskConfig):
    """Options of imitation; `ImitationConfig` defines the task."""

    metrics: ClassVar[Metrics] = (
        Metric("eval/mpjpe_l", "mpjpe_l, mm", ".1f", curve=Curve(4, "bright_green", (0, None))),
    )
    kind: Literal["imitation"] = "imitation"
    clips: tuple[str, ...] = Field(("walk",), description="Names of clips, or all.")
    folder: str | None = Field(
        None, description="Folder of the clips; None: the clips that come with pybullet."
    )
    start: Literal["random", "first"] = Field(
        "random", description="Initial frame of an episode in its clip."
    )
    order: Literal["drawn", "in turn"] = Field(
        "drawn",
        description="Sample a clip for each episode, or play clip i in environment i.",
    )
    control: Literal["residual", "absolute"] = Field(
        "residual", description="Actions are rotations from the clip's pose, or from the rest pose."
    )
    lead: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Time by which targets of the servos lead the clip, s: it offsets their lag.",
    )
    reach: float = Field(0.5, gt=0, le=6.3, description="Joint rotation by a unit action, rad.")
    terminate_at: float | None = Field(
        0.4, gt=0, description="Distance of any body that terminates an episode, m; None: never."
    )
    terminate_mean: float | None = Field(
        None, gt=0, description="Mean distance of all bodies that terminates an episode, m."
    )
    terminate_below: float | None = Field(
        None, description="Height of the root below which an episode terminates, m."
    )
    max_episode_steps: int = Field(
        300, ge=1, le=FRAMES, description="Largest length of an episode in control steps of 1/30 s."
    )
    evaluation_steps: int = Field(
        300, ge=1, le=FRAMES, description="Length of evaluation episodes of looping clips."
    )
    future: tuple[Annotated[int, Field(ge=-1000, le=1000)], ...] = Field(
        (1,),
        max_length=1000,
        description="Offsets of the observed frames of the clip from the current one; () for none.",
    )
    style_window: int = Field(
        0,
        ge=0,
        le=1000,
        description='Number of frames in the observation "style" of the discriminator; 0: none.',
    )
    measure: bool = Field(False, description="Report the errors of each episode in mm.")
    physics: Physics = Field(
        "fast", description="checked: smaller steps, another integrator, torque limits."
    )
    reward: ImitationReward = Field(ImitationReward(), description="Weights of the terms.")
    sharpness: float = Field(
        1.0, gt=0, description="Factor on the rates at which rewards fall with the errors."
    )

    @field_validator("clips")
    @classmethod
    def _some(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or len(set(names)) < len(names):
            raise ValueError("name at least one clip, and each only once")
        return names

    @field_validator("future")
    @classmethod
    def _ahead(cls, offsets: tuple[int, ...]) -> tuple[int, ...]:
        if any(offset < 0 for offset in offsets):
            raise ValueError("frames of the future must be 0 or more, from the current frame")
        return offsets

    def for_evaluation(self) -> Self:
        """Play clip i in environment i from its first frame, with looser termination and measured
        errors.

        Without termination by distance in training, clips are not tracked: evaluation then has none
        either, and keeps the initial frames of training.
        """
        tracks = self.terminate_at is not None or self.terminate_mean is not None
        return self.replace(
            start="first" if tracks else self.start,
            order="in turn",
            terminate_at=None,
            terminate_mean=0.5 if tracks else None,
            max_episode_steps=self.evaluation_steps,
            measure=True,
        )
