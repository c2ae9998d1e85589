"""The contracts everything meets through. Shapes are in the docstrings.

    rollout(broadcast, snapshot, key) -> (fragment, snapshot')

is a pure function; exact resume, any number of workers and recovery of a lost one follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

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
    """Whatever has memory. The checkpoint knows nothing else about it."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> None: ...


@runtime_checkable
class ReadsFiles(Protocol):
    """What learns from files that stay on the disk: a dataset, a replay."""

    def check_unchanged(self) -> None:
        """Raise where such a file was changed while it was in use; called before every save."""


@dataclass(frozen=True)
class ArraySpec:
    """Shape (of one environment) and dtype of one named array."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


_LEAST, _MOST = np.float32(-1.0), np.float32(1.0)
"""Bounds of a box policy's actions; float32, so that the arithmetic stays in it."""


@dataclass(frozen=True)
class ActionSpec:
    """What an environment accepts: a box, or one or several discrete choices.

    A box policy acts in [-1, 1] per dimension; `to_env` clips and scales to [low, high].
    """

    kind: Literal["box", "discrete", "multi_discrete"]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def array(self) -> ArraySpec:
        """How one environment's action is stored: float32 [dims] or int64 [choices]."""
        if self.kind == "box":
            return ArraySpec((len(self.low),), "float32")
        return ArraySpec((len(self.sizes),), "int64")

    def to_env(self, actions: Array) -> Array:
        """Policy actions [num_envs, n] in the environment's units; a discrete one as [num_envs]."""
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
        """Actions [num_envs, n] in the environment's units as a policy's, changed in place."""
        if self.kind == "box":
            if self._scale is not None:
                center, reach, _, _ = self._scale
                actions -= center
                actions /= reach
            np.clip(actions, _LEAST, _MOST, out=actions)
        return actions

    @cached_property
    def _scale(self) -> tuple[Array, Array, Array, Array] | None:
        """Center, half width and bounds of the box, float32; None where it is [-1, 1] already."""
        low, high = np.asarray(self.low, np.float32), np.asarray(self.high, np.float32)
        if bool((low == -1.0).all() and (high == 1.0).all()):
            return None
        half = np.float32(0.5)
        # The bounds again, because rounding can put the scaled action just outside them.
        return (high + low) * half, (high - low) * half, low, high


@dataclass(frozen=True)
class Exactness:
    """Whether an environment can be killed and resumed bit for bit, and how that is known."""

    exact: bool
    reason: str


@dataclass(frozen=True)
class EnvSpec:
    """What a policy and a plan need to know of an environment, without running it."""

    observations: dict[str, ArraySpec]
    action: ActionSpec
    max_episode_steps: int | None
    statistics: tuple[str, ...] = ()
    """Names in `StepResult.episodes`, besides return and length, which the group keeps."""
    substeps: int = 1
    outcomes: tuple[str, ...] = ()
    """What can become of an episode, by the number in the statistic "outcome"; the first is
    success."""
    agents: int = 1
    """Agents that share one environment; each counts as one of `num_envs`."""
    motions: tuple[str, ...] = ()
    """What is imitated, by the number in the statistic "motion"."""
    sentences: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """{sentence: vector} of the observation "task"; {} where there is none, or no sentence."""
    model: str = ""  # a hash of the simulated model, where there is one
    notes: tuple[str, ...] = ()
    """What a plan says of the environment."""


KINDS = ("outcome", "motion")
"""Statistics that are the number of a kind, by `EnvSpec.outcomes` and `EnvSpec.motions`: they have
no mean."""


@dataclass
class StepResult:
    """One control step of all environments; those that finished have been reset in it."""

    obs: Observations
    """{name: [num_envs, ...]}: what the next action is chosen from."""
    reward: Array
    """[num_envs] float32."""
    terminated: Array
    """[num_envs] bool: the task ended here; the value of the future is 0."""
    truncated: Array
    """[num_envs] bool: time ran out; the value of the future is V(final observation)."""
    final_envs: Array
    """[k] int64, ascending: environments that finished."""
    final_obs: Observations
    """{name: [k, ...]}: what they ended on, before the reset."""
    episodes: dict[str, Array] = field(default_factory=dict)
    """{name: [k] float64}: any named numbers about the finished episodes; success is
    "is_success", a reward term's sum is "reward/<term>"."""


class BatchEnv(Protocol):
    """Many copies of one environment, with randomness from `key.episode(env, episode)`.

    What only some environments can do is in `etude.core.abilities`. One whose `spec.motions` are
    imitated reports "motion" and "is_success" of every episode.
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, key: Key) -> Observations:
        """Every environment at the start of its episode 0."""

    def step(self, actions: Array) -> StepResult:
        """`actions`: as `spec.action.to_env` gives them."""

    def snapshot(self) -> Tree:
        """A copy of everything that decides the future: arrays [num_envs, ...]."""

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Continue from a snapshot, on any instance with as many environments."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Broadcast:
    """What the learner sends out: weights and normaliser, curriculum, a version number."""

    version: int
    policy: Tree
    curriculum: Tree = field(default_factory=dict)


Snapshot = Tree
"""Everything one group of environments is: simulator state, last observations, open episodes,
recurrent state, arrays [num_envs, ...]; and the round of the curriculum they began in."""


class Finals(NamedTuple):
    """The observations that finished episodes ended on: sparse, in (step, environment) order."""

    envs: Array
    """[k] int64."""
    steps: Array
    """[k] int64."""
    obs: Observations
    """{name: [k, ...]}."""
    state: dict[str, Array]
    """{name: [k, ...]}: the recurrent state these observations were met with."""


@dataclass
class Fragment:
    """The experience of a rollout: `steps` of each of `num_envs` environments, observations raw."""

    obs: Observations
    """{name: [num_envs, steps, ...]}: what each action was chosen from."""
    actions: Array
    """[num_envs, steps, n] as the policy gave them, before clipping and scaling."""
    log_probs: Array
    """[num_envs, steps] float32."""
    rewards: Array
    """[num_envs, steps] float32."""
    terminated: Array
    """[num_envs, steps] bool."""
    truncated: Array
    """[num_envs, steps] bool."""
    present: Array
    """[num_envs, steps] bool: an agent was there; other steps count for nothing."""
    states: dict[str, Array]
    """{name: [num_envs, segments, ...]}: the recurrent state every segment began with."""
    last_obs: Observations
    """{name: [num_envs, ...]}: the observation after the last step."""
    last_state: dict[str, Array]
    """{name: [num_envs, ...]}: the recurrent state it was met with."""
    finals: Finals
    episodes: dict[str, Array]
    """{name: [k] float64}: statistics of finished episodes, in the order of `finals`."""
    moments: dict[str, Tree]
    """{name: {"count", "mean" [n], "m2" [n]}} float64 over all steps of this fragment, for
    every observation that the policy reads."""
    restarted: Array
    """[num_envs] bool: it began a new episode before the first step, and so does not continue the
    fragment before, whose last episode was left open."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Where the time went: "physics", "environment" and "inference"; "transport" where it came
    from another process. Decides nothing."""


class Action(NamedTuple):
    """Actions [num_envs, n], their log-probabilities [num_envs], and the policy's next state.

    log_probs: None where `Policy.log_probs` gives those of a whole rollout at once.
    """

    actions: torch.Tensor
    log_probs: torch.Tensor | None
    state: dict[str, torch.Tensor]


class Policy(Protocol):
    """Acts and is trained. The normaliser is inside it and travels with it everywhere."""

    @property
    def observations(self) -> dict[str, ArraySpec]:
        """What it reads to act or to learn; environments may give more."""

    @property
    def actor_observations(self) -> dict[str, ArraySpec]:
        """What it needs to act: a critic may read more."""

    @property
    def state_specs(self) -> dict[str, ArraySpec]:
        """Recurrent state of one environment, {} for a memoryless policy."""

    def noise(self, generator: np.random.Generator, steps: int, num_envs: int) -> Array:
        """All the randomness of a rollout, [steps, num_envs, n] float32."""

    def log_probs(self, noise: torch.Tensor) -> torch.Tensor | None:
        """[steps, num_envs]: log-probabilities of the actions from noise [steps, num_envs, n].

        None where they depend on the observations as well, and `act` gives them step by step.
        """

    def initial_state(self, num_envs: int) -> dict[str, Array]:
        """Recurrent state at an episode's start, {name: [num_envs, ...]}."""

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Action:
        """The action for raw observations; without noise, the most likely one."""

    def state_dict(self) -> Tree: ...

    def load_state_dict(self, state: Tree) -> Any: ...


class Collector(Stateful, Protocol):
    """Runs groups somewhere and gives their results in group order, whoever finished first."""

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The next fragment of every group."""

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        """Where to tell a person what happens on the way, and why the run is not exact any more."""

    def status(self) -> dict[str, float]:
        """Its `system/` columns of a log row, since they were last read. Decides nothing."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class BatchMetrics:
    """One gradient step, as the board, progress bars and callbacks see it."""

    values: dict[str, float]


class Algorithm(Stateful, Protocol):
    """Learns from fragments. PPO, SAC and reward models share the loop through this."""

    def broadcast(self, clock: Clock) -> Broadcast:
        """What the next rollout acts with."""

    def ingest(self, fragments: list[Fragment], clock: Clock) -> dict[str, float]:
        """Take in what was collected; metrics about it."""

    def batches(self, clock: Clock, key: Key) -> Iterator[BatchMetrics]:
        """One gradient step at a time; not called in iterations that only collect."""

    def end_iteration(self) -> dict[str, float]:
        """What happens after the update: the normaliser takes in what was collected."""

    def policy_parts(self) -> tuple[Tree, Tree]:
        """(arrays, contract): all that is needed to act, for a checkpoint's `policy/`."""

    def load_policy(self, arrays: Tree) -> None:
        """Put back the arrays of `policy_parts`."""

    def start_from(self, arrays: Tree, training: Tree | None) -> None:
        """Begin a new run with what another one learned.

        arrays: those of its `policy_parts`. training: its `state_dict` at that time; None where
        only the policy was kept, and then whatever else is learned begins anew.
        """

    def retire(self, states: list[Tree]) -> None:
        """Give up files that none of these states needs: what `state_dict` gave, without arrays,
        to every checkpoint that can still be resumed."""

    def close(self) -> None: ...


class LogWriter(Protocol):
    """A place for metric rows. One that raises ends no run."""

    def begin(self, history: Iterable[Row]) -> None:
        """The rows a resumed run keeps, none for a new one; what was written after them is void.

        Called again, with all rows so far, after an error. They are read from the disk as they are
        iterated, and may be millions: a log that needs each of them takes no list of them, and one
        that draws or summarises takes `history_of(history).thinned()`.
        """

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...
