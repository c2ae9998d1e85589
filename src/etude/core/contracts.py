"""Data types and interfaces between environments, policies, rollouts and algorithms.

    rollout(broadcast, snapshot, key) -> (fragment, snapshot')

is a pure function; exact resume, independence of the number of workers and recovery of lost ones
follow from it. Shapes are in the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from etude.core.history import Row
from etude.core.keys import Key
from etude.core.trees import Tree

if TYPE_CHECKING:
    import torch

    from etude.core.clock import Clock

Array = np.ndarray[Any, Any]
Observations = dict[str, Array]
"""Named observations, {name: [num_envs, ...]}: "state" float32, "image" uint8, "critic", ..."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state that checkpoints save."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


@runtime_checkable
class ReadsFiles(Protocol):
    """An object that reads files during training, for example a dataset."""

    def check_unchanged(self) -> None:
        """Raise if a file was changed while it was in use; called before every save."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape (of one environment) and dtype of one named array."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


_LEAST, _MOST = np.float32(-1.0), np.float32(1.0)
"""Bounds of a box policy's actions, in float32 so that the arithmetic stays float32."""


@dataclass(frozen=True)
class ActionSpec:
    """Actions of an environment: a box, or one or several discrete choices.

    A box policy acts in [-1, 1] per dimension; `to_env` clips and scales to [low, high].
    """

    kind: Literal["box", "discrete", "multi_discrete"]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def array(self) -> ArraySpec:
        """Shape and type of an environment's action: float32 [dims] or int64 [choices]."""
        if self.kind == "box":
            return ArraySpec((len(self.low),), "float32")
        return ArraySpec((len(self.sizes),), "int64")

    def to_env(self, actions: Array) -> Array:
        """Convert policy actions [num_envs, n] to the environment's; discrete ones to
        [num_envs]."""
        if self.kind == "discrete":
            return np.asarray(actions[:, 0])
        if self.kind == "multi_discrete":
            return actions
        unit: Array = np.minimum(np.maximum(actions, _LEAST), _MOST)
        if self._scale is None:
            return unit
        center, reach, low, high = self._scale
        scaled: Array = np.minimum(np.maximum(center + unit * reach, low), high)
        return scaled

    def from_env(self, actions: Array) -> Array:
        """Convert the environment's actions [num_envs, n] to a policy's, in place."""
        if self.kind == "box":
            if self._scale is not None:
                center, reach, _, _ = self._scale
                actions -= center
                actions /= reach
            np.clip(actions, _LEAST, _MOST, out=actions)
        return actions

    @cached_property
    def _scale(self) -> tuple[Array, Array, Array, Array] | None:
        """Center, half width and bounds of the box, float32; None if the box is [-1, 1]."""
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        if bool((low == -1.0).all() and (high == 1.0).all()):
            return None
        half = np.float32(0.5)
        # With the bounds, because rounding can move a scaled action just beyond them.
        return (high + low) * half, (high - low) * half, low, high


class Reflection(NamedTuple):
    """How a vector looks in a mirror: its numbers in another order, some with the other sign."""

    columns: tuple[int, ...]
    signs: tuple[float, ...]

    def of(self, x: Any) -> Any:
        """The mirror image of x [..., n], an array or a tensor of float32."""
        image = x[..., list(self.columns)]
        return image * image.new_tensor(self.signs)


@dataclass(frozen=True)
class Exactness:
    """Whether a run in an environment can be resumed bit for bit, and the reason."""

    exact: bool
    reason: str


@dataclass(frozen=True)
class EnvSpec:
    """Description of an environment for policies and plans."""

    observations: dict[str, ArraySpec]
    action: ActionSpec
    max_episode_steps: int | None
    statistics: tuple[str, ...] = ()
    """Names in `StepResult.episodes`; the group adds return and length."""
    substeps: int = 1
    outcomes: tuple[str, ...] = ()
    """Names of the outcomes of an episode, indexed by the statistic "outcome"; the first is
    success."""
    agents: int = 1
    """Agents per environment; each counts as one of `num_envs`."""
    motions: tuple[str, ...] = ()
    """Names of the imitated motions, indexed by the statistic "motion"."""
    sentences: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """{sentence: vector} of the observation "task"; {} for environments without sentences."""
    model: str = ""
    """Hash of the simulated model; "" without one."""
    notes: tuple[str, ...] = ()
    """Sentences about the environment for the plan."""
    mirror: Mapping[str, Reflection] = field(default_factory=dict)
    """{observation: its reflection left for right}, and that of actions as `ACTION`; without those
    whose terms have none."""


ACTION = "action/"
"""Name of the actions in `EnvSpec.mirror`, which no observation has."""
KINDS = ("outcome", "motion")
"""Statistics that are indices, of `EnvSpec.outcomes` and `EnvSpec.motions`; they are not
averaged."""


@dataclass
class StepResult:
    """One control step of all environments; finished ones are already reset."""

    obs: Observations
    """{name: [num_envs, ...]}: observations for the next action."""
    reward: Array
    """[num_envs] float32."""
    terminated: Array
    """[num_envs] bool: the task ended; the value of the next state is 0."""
    truncated: Array
    """[num_envs] bool: the time limit was reached; the value of the next state is V(final
    observation)."""
    final_envs: Array
    """[k] int64, ascending: environments that finished."""
    final_obs: Observations
    """{name: [k, ...]}: their last observations, before the reset."""
    episodes: dict[str, Array] = field(default_factory=dict)
    """{name: [k] float64}: statistics of the finished episodes; success is "is_success", the sum of
    a reward term is "reward/<term>"."""


class BatchEnv(Protocol):
    """A batch of copies of one environment, with randomness from `key.episode(env, episode)`.

    Optional methods are protocols at the end of this module. With `spec.motions`, every episode
    reports "motion" and "is_success".
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, key: Key) -> Observations:
        """Begin episode 0 of every environment."""

    def step(self, actions: Array) -> StepResult:
        """Step all environments with `actions` from `spec.action.to_env`."""

    def snapshot(self) -> Tree:
        """A copy of the whole state, arrays [num_envs, ...]."""

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on any instance with the same `num_envs`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Broadcast:
    """Data sent to the rollout: weights with the normaliser, curriculum, version number."""

    version: int
    policy: Tree
    curriculum: Tree = field(default_factory=dict)


Snapshot = Tree
"""Whole state of one group of environments: simulator state, last observations, running episodes
and recurrent state, arrays [num_envs, ...]; and the curriculum round in which they began."""


class Finals(NamedTuple):
    """Last observations of finished episodes: sparse, in (step, environment) order."""

    envs: Array
    """[k] int64."""
    steps: Array
    """[k] int64."""
    obs: Observations
    """{name: [k, ...]}."""
    state: dict[str, Array]
    """{name: [k, ...]}: recurrent state at these observations."""


@dataclass
class Fragment:
    """Experience of a rollout: `steps` of each of `num_envs` environments, observations raw."""

    obs: Observations
    """{name: [num_envs, steps, ...]}: the observation of each action."""
    actions: Array
    """[num_envs, steps, n]: outputs of the policy, before clipping and scaling."""
    log_probs: Array
    """[num_envs, steps] float32."""
    rewards: Array
    """[num_envs, steps] float32."""
    terminated: Array
    """[num_envs, steps] bool."""
    truncated: Array
    """[num_envs, steps] bool."""
    present: Array
    """[num_envs, steps] bool: an agent was present; other steps are ignored."""
    states: dict[str, Array]
    """{name: [num_envs, segments, ...]}: recurrent state at the start of every segment."""
    last_obs: Observations
    """{name: [num_envs, ...]}: observations after the last step."""
    last_state: dict[str, Array]
    """{name: [num_envs, ...]}: recurrent state at these observations."""
    finals: Finals
    episodes: dict[str, Array]
    """{name: [k] float64}: statistics of finished episodes, in the order of `finals`."""
    moments: dict[str, Tree]
    """{name: {"count", "mean" [n], "m2" [n]}} float64 over all steps of this fragment, for every
    observation that the policy reads."""
    restarted: Array
    """[num_envs] bool: a new episode began before the first step, so this fragment does not
    continue the previous one, whose last episode was abandoned."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent in "physics", "environment" and "inference"; from another process also in
    "transport". For logs only."""


class Action(NamedTuple):
    """Actions [num_envs, n], their log-probabilities [num_envs], and the policy's next state.

    log_probs: None if `Policy.log_probs` computes those of a whole rollout at once.
    """

    actions: torch.Tensor
    log_probs: torch.Tensor | None
    state: dict[str, torch.Tensor]


class Policy(Protocol):
    """A policy with its observation normaliser."""

    @property
    def observations(self) -> dict[str, ArraySpec]:
        """Observations that it reads to act or to learn."""

    @property
    def actor_observations(self) -> dict[str, ArraySpec]:
        """Observations that it reads to act, without those of the critic."""

    @property
    def state_specs(self) -> dict[str, ArraySpec]:
        """Recurrent state of one environment, {} for a memoryless policy."""

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        """Draw the random numbers of a whole rollout, [steps, num_envs, n] float32."""

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        """Log-probabilities [steps, num_envs] of the actions from noise [steps, num_envs, n].

        None if they also depend on the observations; `act` then returns them for each step.
        """

    def initial_state(self, num_envs: int) -> dict[str, Array]:
        """Recurrent state at the start of an episode, {name: [num_envs, ...]}."""

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        """Actions for raw observations; without noise, the most likely ones."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> Any: ...


class Collector(Stateful, Protocol):
    """Runs the groups and returns their results in group order."""

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The next fragment of every group."""

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        """Set where to print events, and where to report why the run is no longer exact."""

    def status(self) -> dict[str, float]:
        """Its `system/` columns of a log row, since the last call."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchMetrics:
    """Metrics of one gradient step."""

    values: dict[str, float]


class Algorithm(Stateful, Protocol):
    """Learns from fragments: the interface between the training loop and PPO, SAC, reward
    models..."""

    def broadcast(self, clock: Clock) -> Broadcast:
        """The data for the next rollout."""

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Store collected experience; returns metrics."""

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """Yield after each gradient step; not called in iterations that only collect."""

    def end_iteration(self) -> dict[str, float]:
        """Finish the iteration after its updates, for example update the normaliser; returns
        metrics."""

    def policy_parts(self) -> tuple[Tree, Tree]:
        """(arrays, contract) of the policy, for a checkpoint's `policy/`."""

    def load_policy(self, arrays: Tree) -> None:
        """Restore the arrays of `policy_parts`."""

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Begin a new run from the policy of another one.

        arrays: those of its `policy_parts`. training: its `state_dict`; None if only the policy was
        kept, and everything else is then learned from scratch.
        """

    def retire(self, states: list[Tree]) -> None:
        """Delete files that no resumable checkpoint needs; `states`: their `state_dict`s without
        arrays."""

    def close(self) -> None: ...


class LogWriter(Protocol):
    """Writes metric rows. An error in it does not end the run."""

    def begin(self, history: Iterable[Row]) -> None:
        """Begin after the rows in `history`, none for a new run; later rows in the log are
        obsolete.

        Called again, with all rows so far, after an error. Rows are read from disk while they are
        iterated, and may be millions: do not make a list of them; charts and summaries use
        `history_of(history).thinned()`.
        """

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


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
        [motions], and if it reports the statistics "start" and "played" also "starts" [motions,
        bins]; in evaluation, environment i plays motion i modulo their number, from its first
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
