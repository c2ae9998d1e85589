"""Imitation: a simulated humanoid moves like the people in recorded clips."""

from __future__ import annotations

from collections.abc import Mapping

from etude.envs.mujoco.task import Part, Task, Term
from etude.envs.robots.humanoid import CAMERA, humanoid_spec, substeps
from etude.tasks.imitation.imitator import Imitator
from etude.tasks.imitation.options import ImitationOptions
from etude.tasks.imitation.terms import ErrorMeter, rewards


class ImitationConfig(ImitationOptions):
    """A humanoid follows clips of recorded motion; actions are joint rotations for its servos."""

    def define(self) -> Task:
        figure, weights = Imitator(self), self.reward.model_dump()
        names, parts = figure.library.names, list[Part]()
        observations: dict[str, Mapping[str, Term]] = {"state": {"seen": lambda f: f.seen}}
        if self.style_window:
            observations["style"] = {"style": lambda f: f.style}
            if len(names) > 1:
                observations["motion"] = {"motion": lambda f: f.motion[:, None]}
        statistics: dict[str, Term] = {
            "motion": lambda f: f.motion,
            "progress": lambda f: f.progress,
        }
        if self.measure:
            meter = ErrorMeter(figure)
            parts += [figure, meter]
            statistics |= meter.statistics()
        return Task(
            model=humanoid_spec(self.physics),
            action=figure,
            view=figure,
            parts=parts,
            observations=observations,
            rewards={name: (f, weights[name]) for name, f in rewards(self.sharpness).items()},
            terminations={"off the motion": lambda f: f.ended},
            statistics=statistics,
            substeps=substeps(self.physics),
            max_episode_steps=figure.longest(),
            time_limit=lambda f: f.episode_steps,
            motions=names,
            camera=CAMERA,
            forward_after_reset=False,
        )
