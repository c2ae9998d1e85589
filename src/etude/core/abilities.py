"""What only some environments can do, as protocols, and how wrappers pass it on.

`ability(env, Restarts)` is the object that restarts the episodes of `env`, or None.
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
    """Knows how long its simulator took."""

    physics_seconds: float
    """Of the last step."""


@runtime_checkable
class AbsentAgents(Protocol):
    """Has agents that can be absent: they died or have not yet come."""

    present: Array
    """[num_envs] bool, for the observation that was given last."""


@runtime_checkable
class FollowsCurriculum(Protocol):
    """Can be made easier."""

    def follow(self, curriculum: Tree) -> None:
        """Take in the broadcast's curriculum before a rollout, {} for the whole task.

        It decides how episodes begin from then on and changes none that is open. It is no part of
        a snapshot, as it comes with every broadcast. One whose `spec.motions` are imitated is
        given "weights" [motions]; in evaluation environment i plays motion i modulo their number,
        from its first frame.
        """


@runtime_checkable
class Restarts(Protocol):
    """Can leave all its episodes at once, which a curriculum in rounds asks for."""

    def restart(self) -> Observations:
        """Every environment leaves its episode, unreported, and begins its next one."""


@runtime_checkable
class StyleReference(Protocol):
    """Has motion that can be compared with a reference, by an adversarial motion prior.

    It has the observation "style", [frames, features] float32: the last frames of motion of this
    episode, newest last.
    """

    def style_windows(self) -> Array:
        """[n, frames, features] float32: all windows of the reference."""


@runtime_checkable
class StyleMotions(Protocol):
    """Has a reference of several motions, and the observation "motion", [1] float32: the number of
    the motion that is practised."""

    def style_motions(self) -> Array:
        """[n] int64: the motion that each window of the reference is of."""


@runtime_checkable
class Pictured(Protocol):
    """Draws its environments."""

    step_rate: float
    """Steps of a second, as a film should show them."""
    watch: Callable[[int], None] | None
    """Called with each environment after its step, while it still stands where it ended."""

    def picture(self, env_id: int) -> Array:
        """[height, width, 3] uint8 of an environment as it is."""
        ...


@runtime_checkable
class Described(Protocol):
    """Says what a policy of it needs where it acts without this package, on a robot for example."""

    def describe(self) -> Tree:
        """Plain JSON for a policy's contract, any part of what docs/export.md lists; "scene" is an
        MJCF that is written beside the policy. Parts of a task say theirs in the same way."""
        ...


@runtime_checkable
class Located(Protocol):
    """Knows which of its environments it is calling, and what for; any thread may ask."""

    call: str
    """"reset" or "step"."""

    def where(self) -> str:
        """Such as "environment 3"."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """Can end a call that hangs, which then raises `ProcessLost`."""

    def interrupt(self, seconds: float) -> None:
        """End the call, after so many seconds; any thread may ask."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """Declares what it observes."""

    bounds: dict[str, tuple[Array, Array]]
    """{name: (low, high)} of one environment's observation, where there are finite bounds."""


@runtime_checkable
class HasAbilities(Protocol):
    """Has parts, or wraps an environment, and knows which of them can do something."""

    def ability(self, kind: type[A]) -> A | None:
        """The object that has an ability, or None."""
        ...


class EnvWrapper:
    """An environment around another one; it can do what the inner one can."""

    def __init__(self, inner: BatchEnv) -> None:
        self.inner = inner
        self.num_envs, self.spec = inner.num_envs, inner.spec

    def ability(self, kind: type[A]) -> A | None:
        """The object that has an ability; a wrapper that must take part in it gives itself."""
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
    """`env`, or the environment inside of it, as one with an ability; None where it has not."""
    if isinstance(env, HasAbilities):
        return env.ability(kind)
    return env if isinstance(env, kind) else None
