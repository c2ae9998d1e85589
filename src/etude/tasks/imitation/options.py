"""The options of imitation: clips, starts, endings, physics and rewards."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator

from etude.core.config import Config
from etude.core.metrics.declared import Curve, Metric, Metrics
from etude.envs.mujoco.config import TaskConfig
from etude.envs.robots.humanoid import Physics

FRAMES = 100_000
"""Of an episode, at most: tables of clips are so long."""


class ImitationReward(Config):
    """Weights of the reward terms, each 0 to 1."""

    position: float = Field(0.5, description="Bodies are where they are in the clip.")
    turn: float = Field(0.3, description="They are turned as in the clip.")
    velocity: float = Field(0.1, description="They move as fast, and the same way.")
    spin: float = Field(0.1, description="They turn as fast, and the same way.")
    effort: float = Field(0.0, le=0, description="Per unit of mean squared action.")


class ImitationOptions(TaskConfig):
    """The options of imitation; `ImitationConfig` makes the task of them."""

    metrics: ClassVar[Metrics] = (
        Metric("eval/mpjpe_l", "mpjpe_l, mm", ".1f", curve=Curve(4, "bright_green", (0, None))),
    )
    kind: Literal["imitation"] = "imitation"
    clips: tuple[str, ...] = Field(("walk",), description="Names of clips, or all.")
    folder: str | None = Field(
        None, description="Where the clips are; None: those that come with pybullet."
    )
    start: Literal["random", "first"] = Field(
        "random", description="Frame of the clip that an episode begins with."
    )
    order: Literal["drawn", "in turn"] = Field(
        "drawn",
        description="Clips are drawn anew for each episode, or environment i plays the i-th.",
    )
    control: Literal["residual", "absolute"] = Field(
        "residual", description="Actions turn joints from the clip's pose, or from the rest pose."
    )
    lead: float = Field(
        0.1,
        ge=0,
        le=10,
        description="How far ahead the clip's pose is aimed at, s: the servos' own lag.",
    )
    reach: float = Field(0.5, gt=0, le=6.3, description="How far a unit action turns a joint, rad.")
    terminate_at: float | None = Field(
        0.4, gt=0, description="An episode ends when any body is so far off, m; None: never."
    )
    terminate_mean: float | None = Field(
        None, gt=0, description="An episode ends when bodies are so far off on average, m."
    )
    terminate_below: float | None = Field(
        None, description="An episode ends when the root is lower than this, m."
    )
    max_episode_steps: int = Field(
        300, ge=1, le=FRAMES, description="Control steps of 1/30 s at most."
    )
    evaluation_steps: int = Field(
        300, ge=1, le=FRAMES, description="Likewise when looping clips are judged."
    )
    future: tuple[Annotated[int, Field(ge=-1000, le=1000)], ...] = Field(
        (1,),
        max_length=1000,
        description="Frames of the clip that are observed, counted from now; () for none.",
    )
    style_window: int = Field(
        0,
        ge=0,
        le=1000,
        description='Frames of the observation "style", for a discriminator; 0: none.',
    )
    measure: bool = Field(False, description="Report the errors of each episode in mm.")
    physics: Physics = Field(
        "fast", description="checked: smaller steps, another integrator, limited torques."
    )
    reward: ImitationReward = Field(ImitationReward(), description="Weights of the terms.")
    sharpness: float = Field(
        1.0, gt=0, description="How fast the reward falls with distances; less leads from farther."
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
            raise ValueError("frames of the future are counted from now, 0 or more")
        return offsets

    def for_evaluation(self) -> Self:
        """Environment i plays clip i from its first frame, may go astray further, and is measured.

        Where no distance ends an episode the clip is not tracked: none ends it here either, and
        it may begin where it does in training.
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
