"""What the config of every environment offers: building it, and what is known of it before."""

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
    """What is logged of its episodes' own statistics, beside what is logged of all environments."""

    episodic: bool = Field(
        False, description="Sum the rewards and give them only at the end of an episode."
    )
    pictures: int = Field(
        0,
        ge=0,
        le=1024,
        description="Observe a picture of so many pixels a side as 'image', and what the robot "
        "measures of itself as 'proprio'; 0: neither. For reach and pick-place.",
    )
    sentence: str = Field(
        "", description="Sentence that tells the policy its task, as the observation 'task'."
    )
    task_vector: tuple[FiniteFloat, ...] = Field(
        (),
        max_length=4096,
        description="Vector that tells the task; that of the sentence, where there is one.",
    )
    kind: str

    @abstractmethod
    def build(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """A batch of environments with every step's own reward, simulated by so many threads."""

    def build_unchecked(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """The same without a look at whether its snapshots can be relied on."""
        return self.build(num_envs, threads)

    def make(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """A batch of environments as a run learns from it: with pictures, the observation "task"
        and episodic rewards, where they are asked for."""
        build: Callable[[int, int], BatchEnv] = self.build
        if self.pictures:
            build = self.build_with_pictures
        env = build(num_envs, threads)
        if self.sentence or self.task_vector:
            from etude.envs.wrappers import Telling

            env = Telling(env, self.sentence, self.task_vector)
        if not self.episodic:
            return env
        from etude.envs.wrappers import Episodic

        return Episodic(env)

    def build_with_pictures(self, num_envs: int, threads: int = 1) -> BatchEnv:
        """The batch with the observations "image" and "proprio"; see `pictures`."""
        env: BatchEnv = self.demonstrated(num_envs, threads, f"env.pictures {self.pictures}")[0]
        return env

    def demonstrated(
        self, num_envs: int, threads: int = 1, needed_by: str = "A demonstration"
    ) -> tuple[Any, Any]:
        """The batch with what a demonstration observes, and its `Demonstration`; an error for
        tasks without one."""
        kinds = [n for n in ENVS.names() if getattr(ENVS.load(n), "demonstration", None)]
        raise UsageError(
            f"{needed_by} needs a task that says how it is shown and done, {' or '.join(kinds)}, "
            f"and not one of the kind '{self.kind}'."
        )

    @abstractmethod
    def exactness(self) -> Exactness:
        """Whether a run with this environment resumes bit for bit, and why."""

    def modules(self) -> tuple[str, ...]:
        """Modules of the environment's own code, besides the one of this class."""
        return ()

    @property
    def num_agents(self) -> int:
        """How many rows share one environment; numbers of rows are multiples of it."""
        return 1

    def for_evaluation(self) -> Self:
        """The environment that policies are evaluated in: this one, unless a kind knows better."""
        return self

    def for_film(self) -> Self:
        """The same environment as one that draws itself, where it has to be told before."""
        return self

    def shaping_discount(self) -> float | None:
        """The discount in rewards that are gains of a potential; None where there are none.

        Such rewards leave the best policy as it is only where the learner's gamma is the same.
        """
        return None


ENVS: Registry[EnvConfig] = Registry("env", "etude.envs.config:EnvConfig")
