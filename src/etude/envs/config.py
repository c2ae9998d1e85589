"""The base config of environments: construction, and properties known before it.

Its options `episodic` and `sentence` wrap the environment: in episodic rewards, and in the
observation "task".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from pydantic import Field, FiniteFloat

from etude.core.config import Config
from etude.core.contracts import (
    Array,
    ArraySpec,
    BatchEnv,
    EnvWrapper,
    Exactness,
    Observations,
    Restarts,
    StepResult,
    ability,
)
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.metrics import Metrics
from etude.core.registry import Registry
from etude.core.trees import Tree
from etude.data.sentences import TASK


class EnvConfig(Config):
    """The base of every environment's config.

    A kind of environment derives from it, adds `kind: Literal["its-name"]` and its own fields, and
    defines `build` and `exactness`.
    """

    metrics: ClassVar[Metrics] = ()
    """Metrics of the environment's own episode statistics."""

    episodic: bool = Field(
        False, description="Sum the rewards and give them only at the end of an episode."
    )
    pictures: int = Field(
        0,
        ge=0,
        le=1024,
        description="Side of the picture observed as 'image', in pixels, with the robot's own "
        "sensors as 'proprio'; 0: neither. For reach and pick-place.",
    )
    sentence: str = Field(
        "", description="Sentence that describes the task; the observation 'task' is its vector."
    )
    task_vector: tuple[FiniteFloat, ...] = Field(
        (),
        max_length=4096,
        description="Vector of the observation 'task'; default that of the sentence.",
    )
    kind: str

    @abstractmethod
    def build(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """Build a batch of environments that is simulated by `threads` threads."""

    def build_unchecked(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """Build the batch without probing whether its snapshots are exact."""
        return self.build(num_envs, threads)

    def make(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """Build the batch for a run: with pictures, the observation "task" and episodic rewards, as
        configured."""
        build: Callable[[int, int], BatchEnv] = self.build
        if self.pictures:
            build = self.build_with_pictures
        env = build(num_envs, threads)
        if self.sentence or self.task_vector:
            env = WithTask(env, self.sentence, self.task_vector)
        if not self.episodic:
            return env

        return Episodic(env)

    def build_with_pictures(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """Build the batch with the observations "image" and "proprio"; see `pictures`."""
        env: BatchEnv = self.demonstrated(num_envs, threads, f"env.pictures {self.pictures}")[0]
        return env

    def demonstrated(
        self, num_envs: int, threads: int = 1, needed_by: str = "A demonstration"
    ) -> tuple[Any, Any]:
        """Build the batch with the observations of a demonstration, and the `Demonstration`.

        Raises an error for tasks without a demonstration; `needed_by` is its subject.
        """
        kinds = [n for n in ENVS.names() if getattr(ENVS.load(n), "demonstration", None)]
        raise UsageError(
            f"{needed_by} needs a task with a demonstration, {' or '.join(kinds)}, and not one of "
            f"the kind '{self.kind}'."
        )

    @abstractmethod
    def exactness(self) -> Exactness:
        """Whether a run with this environment resumes bit for bit, and why."""

    def modules(self) -> tuple[str, ...]:
        """Modules of the environment's code, besides the module of this class."""
        return ()

    @property
    def num_agents(self) -> int:
        """Rows per environment; numbers of rows must be multiples of it."""
        return 1

    @property
    def task_name(self) -> str:
        """Name of the task in captions and folders of runs: its kind, class or id."""
        return self.kind.rpartition(":")[2]

    def for_evaluation(self) -> Self:
        """The config of evaluation environments; default this one."""
        return self

    def for_film(self, size: tuple[int, int] = (1280, 720)) -> Self:
        """The config of environments that render themselves, if that needs other options.

        size: width and height in pixels, for those that can choose.
        """
        return self

    def for_window(self) -> Self:
        """The config of an environment that shows itself in a window; raises if it cannot."""
        raise UsageError(
            "A window shows only tasks on Etude's own MuJoCo simulation and Gymnasium's "
            f"environments; this one is of the kind '{self.kind}'."
        )

    def shaping_discount(self) -> float | None:
        """The discount of potential-based shaping in the rewards; None without shaping.

        Shaping does not change the optimal policy if the learner's gamma is the same.
        """
        return None


ENVS: Registry[EnvConfig] = Registry(
    "env",
    "etude.envs.config:EnvConfig",
    removed={
        "imitation": "env.kind imitation is now env.kind track, and its humanoid has limits of "
        "torques and joints: train again with the recipe imitate-walk, and name clips with "
        "env.motion (docs/imitation.md)."
    },
)


A = TypeVar("A")


class Episodic(EnvWrapper):
    """Gives the sum of an episode's rewards in its last step, and 0 before."""

    def __init__(self, inner: BatchEnv) -> None:
        super().__init__(inner)
        self._earned: Array = np.zeros(inner.num_envs)

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        return self if found is not None and isinstance(self, kind) else found

    def reset(self, key: Key) -> Observations:
        self._earned[:] = 0.0
        return super().reset(key)

    def restart(self) -> Observations:
        """Restart an environment that implements `Restarts`."""
        inner = ability(self.inner, Restarts)
        assert inner is not None
        self._earned[:] = 0.0
        return inner.restart()

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        self._earned += result.reward
        over = result.terminated | result.truncated
        reward: Array = np.where(over, self._earned, 0.0).astype(np.float32)
        self._earned[over] = 0.0
        return replace(result, reward=reward)

    def snapshot(self) -> Tree:
        """{"inner": the environment's snapshot, "earned": [rows]}; {} if that is empty."""
        inner = super().snapshot()
        return {"inner": inner, "earned": self._earned.copy()} if inner else {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        super().restore(snapshot["inner"], key)
        self._earned[:] = snapshot["earned"]


class WithTask(EnvWrapper):
    """Adds the vector of the task to every observation."""

    def __init__(self, inner: BatchEnv, sentence: str, vector: tuple[float, ...]) -> None:
        """sentence: "" if the vector belongs to no sentence."""
        super().__init__(inner)
        if not vector:
            raise UsageError(
                f"The vector of the sentence '{sentence}' is unknown: learn from a dataset with "
                "that sentence, start from a policy that was trained with it (--from), or give "
                "--env.task-vector."
            )
        if TASK in inner.spec.observations:
            raise UsageError(
                "This environment already has an observation 'task': leave out env.sentence and "
                "env.task_vector."
            )
        self._vector: Array = np.array(vector, np.float32)
        observations = {**inner.spec.observations, TASK: ArraySpec((len(vector),))}
        known = {sentence: vector} if sentence else {}
        self.spec = replace(inner.spec, observations=observations, sentences=known)

    def _with_task(self, obs: Observations, num: int) -> Observations:
        return {**obs, TASK: np.tile(self._vector, (num, 1))}

    def ability(self, kind: type[A]) -> A | None:
        found = super().ability(kind)
        return self if found is not None and isinstance(self, kind) else found

    def reset(self, key: Key) -> Observations:
        return self._with_task(super().reset(key), self.num_envs)

    def restart(self) -> Observations:
        """Restart an environment that implements `Restarts`."""
        inner = ability(self.inner, Restarts)
        assert inner is not None
        return self._with_task(inner.restart(), self.num_envs)

    def step(self, actions: Array) -> StepResult:
        result = super().step(actions)
        final = self._with_task(result.final_obs, len(result.final_envs))
        return replace(result, obs=self._with_task(result.obs, self.num_envs), final_obs=final)
