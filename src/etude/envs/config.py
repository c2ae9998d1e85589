"""The base config of environments: construction, and properties known before it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from pydantic import Field, FiniteFloat

from etude.core.config import Config
from etude.core.contracts import BatchEnv, Exactness
from etude.core.errors import UsageError
from etude.core.metrics.declared import Metrics
from etude.core.registry import Registry


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
            from etude.envs.wrappers import WithTask

            env = WithTask(env, self.sentence, self.task_vector)
        if not self.episodic:
            return env
        from etude.envs.wrappers import Episodic

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

    def for_evaluation(self) -> Self:
        """The config of evaluation environments; default this one."""
        return self

    def for_film(self) -> Self:
        """The config of environments that render themselves, if that needs other options."""
        return self

    def shaping_discount(self) -> float | None:
        """The discount of potential-based shaping in the rewards; None without shaping.

        Shaping does not change the optimal policy if the learner's gamma is the same.
        """
        return None


ENVS: Registry[EnvConfig] = Registry("env", "etude.envs.config:EnvConfig")
