"""Reference motions of parallel environments: which motion an episode plays, and from which frame;
and the errors of an episode from it.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.data.motion import metrics
from etude.data.motion.library import MotionLibrary
from etude.data.motion.metrics import ERRORS
from etude.envs.mujoco.simulation import Marker
from etude.envs.mujoco.task import Draws, Part, Term

_LAST_START = 10
"""Minimum number of remaining frames at a random start in a motion that does not loop."""
STRICT = 0.25
"""Stricter bound on the mean distance in an episode, m."""


class MotionPlayer(Part):
    """Motions, one for each episode, that begin at a random or at their first frame.

    Arrays are [num_envs] int64.
    """

    library: MotionLibrary

    def __init__(
        self,
        longest: int,
        start: Literal["random", "first"] = "random",
        order: Literal["drawn", "in turn"] = "drawn",
    ) -> None:
        """longest: length of an episode in control steps, which "in turn" ends motions that do not
        loop at their last frame only. order: sample a motion for each episode, or play motion i in
        environment i."""
        self._longest, self._start, self._order = longest, start, order

    def bind_motions(self) -> None:
        """Create the state. `library` must be set."""
        env = self.env
        self.motion = env.state("motion", dtype="int64")
        """Index of the motion."""
        self.start = env.state("start", dtype="int64")
        """Initial frame of the episode in the motion."""
        self.episode_steps = env.keep("limit", np.full(env.num_envs, self._longest))
        """Length of the episode in control steps."""
        known = self.library
        spans = np.where(known.loops, known.cycles, known.cycles - _LAST_START)
        self._spans: Array = np.maximum(spans, 1)
        """[motions]: number of frames from which episodes start."""
        self.first_frame, self.last_frame = np.zeros((2, env.num_envs), np.int64)
        """Rows in the library of the episode's first frame and the motion's last."""
        self.restored()

    def restored(self) -> None:
        self._find_frames(np.arange(self.env.num_envs))

    def _find_frames(self, env_ids: Array) -> None:
        """Look up the rows of the first and last frames of environments [k]."""
        known, motion = self.library, self.motion[env_ids]
        self.first_frame[env_ids] = known.starts[motion] + self.start[env_ids]
        self.last_frame[env_ids] = known.starts[motion] + known.counts[motion] - 1

    def frames_at(self, ahead: int) -> Array:
        """Rows [num_envs] in the library of the frames `ahead` steps from now."""
        frames: Array = np.minimum(self.first_frame + self.env.elapsed + ahead, self.last_frame)
        return frames

    def follow(self, curriculum: Tree) -> None:
        """Sample the motions and first frames of new episodes with the curriculum's probabilities
        "starts" [motions, bins], or with "weights" [motions] of the motions, else uniformly."""
        count = self.library.num_motions
        weights = np.asarray(curriculum.get("weights", np.ones(count)), np.float64)
        starts = np.asarray(curriculum.get("starts", weights[..., None]), np.float64)
        if starts.shape[:-1] != (count,) or not (starts >= 0).all() or not starts.sum() > 0:
            raise UsageError(f"A curriculum over {count} motions needs {count} weights, 0 or more.")
        self._bins = starts.shape[-1]
        self._cumulative = np.cumsum(starts) / starts.sum()

    def longest(self) -> int:
        """Length of the longest episode in control steps."""
        motions = np.arange(self.library.num_motions)
        return int(self._steps_from(motions, np.zeros(1, np.int64)).max())

    def _steps_from(self, motion: Array, start: Array) -> Array:
        """Lengths [k] of episodes of motions [k] from frames [k], in control steps."""
        known = self.library
        left = known.cycles[motion] - 1 - start
        if self._order == "drawn":
            left = np.minimum(left, self._longest)
        steps: Array = np.where(known.loops[motion], self._longest, left)
        return steps

    def choose(self, env_ids: Array, drawn: Array) -> None:
        """Choose motion and first frame of environments [k] by numbers [k, 2] from 0 to 1."""
        if self._order == "in turn":
            motion, part = env_ids % self.library.num_motions, np.zeros(len(env_ids), np.int64)
        else:
            place = np.searchsorted(self._cumulative, drawn[:, 0], side="right")
            motion, part = np.divmod(place, self._bins)
        self.motion[env_ids] = motion
        starts = (part + drawn[:, 1]) * (self._spans[motion] / self._bins)
        self.start[env_ids] = 0 if self._start == "first" else starts
        self.episode_steps[env_ids] = self._steps_from(motion, self.start[env_ids])
        self._find_frames(env_ids)

    def statistics(self) -> dict[str, Term]:
        """Statistics {name: [num_envs]} from which a curriculum finds where episodes fail, as
        fractions of the frames from which episodes start: "start" is the first frame of the episode
        and "played" its length. Motions that do not loop end at 1."""

        def played(_: object) -> Array:
            length = self.env.elapsed / self._spans[self.motion]
            left = 1.0 - 1e-9 - self._started()
            found: Array = np.where(
                self.library.loops[self.motion], length, np.minimum(length, left)
            )
            return found

        return {"start": lambda _: self._started(), "played": played}

    def _started(self) -> Array:
        fraction: Array = self.start / self._spans[self.motion]
        return fraction

    def markers(self, env_id: int, step: int) -> tuple[Marker, ...]:
        from etude.envs.mujoco.markers import Ghost

        frame = self.library.rows(self.motion[env_id], self.start[env_id] + step)
        return (Ghost(self.library.frames.pose[frame].copy()),)


class Tracker(Protocol):
    """A `MotionPlayer` with the robot that plays."""

    library: MotionLibrary
    motion: Array
    episode_steps: Array
    first_frame: Array
    pose: Array
    """[num_envs, nq]: positions of the simulation."""

    @property
    def position(self) -> Array:
        """[num_envs, bodies, 3] m: positions of the bodies."""

    @property
    def mean_distance(self) -> Array:
        """[num_envs] m: mean distance of the bodies from the reference."""

    def frames_at(self, ahead: int) -> Array: ...


class ErrorMeter(Part):
    """Means of `ERRORS` over each open episode. It must come after its `Tracker` in the parts."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def bind(self) -> None:
        env = self.env
        self._sums = env.state("error_sums", len(ERRORS))
        self._last = env.state("last_bodies", 2, 2, self._tracker.position.shape[1], 3)
        """[num_envs, frames ago - 1, (robot, reference), bodies, 3]."""
        self.errors: Array = np.zeros((len(ERRORS), env.num_envs))
        """[5, num_envs] mm: means of `ERRORS` over the open episode."""
        self.worst, self.first_worst = env.state("worst"), env.state("first_worst")
        """[num_envs] m: largest mean distance in the open episode, and in its first pass through
        the motion."""
        self._late: Array = np.zeros(env.num_envs, np.int64)
        """[num_envs]: control steps since the motion first ended; below 0 before."""
        self.travelled: Array = np.zeros(env.num_envs)
        """[num_envs] m: horizontal distance of the root from its initial position."""

    def begin(self, env_ids: Array, draws: Draws) -> None:
        tracker = self._tracker
        self._sums[env_ids] = 0.0
        self.errors[:, env_ids] = 0.0
        self.worst[env_ids] = self.first_worst[env_ids] = 0.0
        position = tracker.library.frames.position[tracker.first_frame[env_ids]]
        self._last[env_ids] = position[:, None, None]

    def update(self) -> None:
        tracker, known, steps = self._tracker, self._tracker.library, self.env.elapsed
        own, reference = tracker.position, known.frames.position[tracker.frames_at(0)]
        one, two = self._last[:, 0], self._last[:, 1]
        found = (
            metrics.global_error(own, reference),
            metrics.local_error(own, reference),
            metrics.procrustes_error(own, reference),
            metrics.velocity_error(one[:, 0], own, one[:, 1], reference),
            metrics.acceleration_error(two[:, 0], one[:, 0], own, two[:, 1], one[:, 1], reference)
            * (steps >= 2),
        )
        self._sums += np.stack(found, axis=1)
        counts = np.maximum(steps, 1)
        self.errors[:4] = self._sums[:, :4].T / counts
        self.errors[4] = self._sums[:, 4] / np.maximum(counts - 1, 1)
        # Steps of one pass through the motion.
        cycles = np.where(
            known.loops[tracker.motion], known.cycles[tracker.motion], tracker.episode_steps
        )
        np.maximum(self.worst, tracker.mean_distance, out=self.worst)
        np.copyto(self.first_worst, self.worst, where=steps <= cycles)
        self._late[:] = steps - cycles
        self._last[:, 1] = self._last[:, 0]
        self._last[:, 0, 0], self._last[:, 0, 1] = own, reference
        away = tracker.pose[:, :2] - known.frames.pose[tracker.first_frame, :2]
        self.travelled[:] = np.linalg.norm(away, axis=1)

    def statistics(self) -> dict[str, Term]:
        """Statistics {name: [num_envs]} of the open episode."""

        def error(index: int) -> Term:
            return lambda _: self.errors[index]

        return {
            **{name: error(index) for index, name in enumerate(ERRORS)},
            "travelled": lambda _: self.travelled,
            "success_25": lambda _: ~self.env.terminated & (self.worst <= STRICT),
            "once": lambda _: self._once(),
            "once_25": lambda _: self._once() & (self.first_worst <= STRICT),
        }

    def _once(self) -> Array:
        """[num_envs] bool: the motion was played to its end at least once."""
        once: Array = (self._late > 0) | ((self._late == 0) & ~self.env.terminated)
        return once
