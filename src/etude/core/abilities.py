"""Optional abilities of environments, as protocols, and the base class of wrappers.

`ability(env, Restarts)` returns the object that restarts the episodes of `env`, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.keys import Key
from etude.core.trees import Tree

A = TypeVar("A")


@runtime_checkable
class TimedPhysics(Protocol):
    """Measures the time of its simulator."""

    physics_seconds: float
    """Seconds of the last step."""


@runtime_checkable
class AbsentAgents(Protocol):
    """Has agents that can be absent: they have died or not yet spawned."""

    present: Array
    """[num_envs] bool, for the last observation."""


@runtime_checkable
class FollowsCurriculum(Protocol):
    """Can be made easier by a training curriculum."""

    def follow(self, curriculum: Tree) -> None:
        """Apply the broadcast's curriculum before a rollout; {} is the full task.

        It affects the episodes that begin afterwards, and none that is running. Snapshots do not
        contain it, because every broadcast does. Imitation of `spec.motions` gets "weights"
        [motions]; in evaluation, environment i plays motion i modulo their number, from its first
        frame.
        """


@runtime_checkable
class Restarts(Protocol):
    """Can restart all its episodes at once, for a curriculum in rounds."""

    def restart(self) -> Observations:
        """Abandon all running episodes without reporting them, and begin the next ones."""


@runtime_checkable
class StyleReference(Protocol):
    """Has reference motion for the discriminator of an adversarial motion prior.

    Its observation "style" [frames, features] float32 holds the last frames of motion of the
    episode, newest last.
    """

    def style_windows(self) -> Array:
        """[n, frames, features] float32: all windows of the reference."""


@runtime_checkable
class StyleMotions(Protocol):
    """Has a reference of several motions; its observation "motion" [1] float32 is the index of the
    motion that is practised."""

    def style_motions(self) -> Array:
        """[n] int64: index of the motion of each window of the reference."""


@runtime_checkable
class Pictured(Protocol):
    """Renders its environments."""

    step_rate: float
    """Control steps per second: the frame rate of a film in real time."""
    watch: Callable[[int], None] | None
    """Called with the index of each environment after its step and before its reset."""

    def picture(self, env_id: int) -> Array:
        """Render an environment in its current state: [height, width, 3] uint8."""
        ...


@runtime_checkable
class Described(Protocol):
    """Describes what a policy needs to act without this package, on a robot for example."""

    def describe(self) -> Tree:
        """JSON for a policy's contract: any part of what docs/export.md lists; "scene" is an
        MJCF that is written beside the policy. Parts of a task have the same method."""
        ...


@runtime_checkable
class Located(Protocol):
    """Reports which environment it is calling, and for what; callable from any thread."""

    call: str
    """"reset" or "step"."""

    def where(self) -> str:
        """The environment, for example "environment 3"."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Can end a call that hangs, which then raises `ProcessLost`."""

    def interrupt(self, seconds: float) -> None:
        """End the call, which has taken `seconds`; callable from any thread."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """Declares the bounds of its observations."""

    bounds: dict[str, tuple[Array, Array]]
    """{name: (low, high)} of the observations of one environment that have finite bounds."""


@runtime_checkable
class HasAbilities(Protocol):
    """Has parts, or wraps an environment, and finds the part that has an ability."""

    def ability(self, kind: type[A]) -> A | None:
        """The object that has the ability, or None."""
        ...


class EnvWrapper:
    """A wrapper of an environment, with the abilities of the inner one."""

    def __init__(self, inner: BatchEnv) -> None:
        self.inner = inner
        self.num_envs, self.spec = inner.num_envs, inner.spec

    def ability(self, kind: type[A]) -> A | None:
        """The object that has the ability; wrappers override this to return themselves."""
        return ability(self.inner, kind)

    def reset(self, key: Key) -> Observations:
        return self.inner.reset(key)

    def step(self, actions: Array) -> StepResult:
        return self.inner.step(actions)

    def snapshot(self) -> Tree:
        return self.inner.snapshot()

    def restore(self, snapshot: Tree, key: Key) -> None:
        self.inner.restore(snapshot, key)

    def close(self) -> None:
        self.inner.close()


def ability(env: Any, kind: type[A]) -> A | None:
    """The object behind `env` that has an ability: itself, a wrapped one or a part; or None."""
    if isinstance(env, HasAbilities):
        return env.ability(kind)
    return env if isinstance(env, kind) else None
