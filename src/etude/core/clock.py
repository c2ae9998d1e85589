"""The clock of a run: counters on four nested levels, and intervals that are due by them.

An epoch is a block of cycles, a cycle a block of iterations; an iteration fills the buffer once
and updates from it in batches. No schedule depends on wall-clock time.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from etude.core.config import LARGEST, Config
from etude.core.errors import UsageError
from etude.core.trees import Tree

_UNITS = {
    "step": "timesteps",
    "update": "updates",
    "iteration": "iterations",
    "cycle": "cycles",
    "epoch": "epochs",
}


@dataclass(frozen=True)
class Interval:
    """ "every 50000 steps", "every 2 epochs", or never (count 0)."""

    count: int
    unit: str

    @classmethod
    def parse(cls, text: str) -> Interval:
        if text == "never":
            return cls(0, "timesteps")
        match = re.fullmatch(r"(\d[\d_,]{,30})\s*([a-z]+?)s?", text.strip())
        if match is None or match[2] not in _UNITS:
            raise ValueError(
                f"'{text[:60]}' is not an interval; write a number and a unit, such as "
                "'50000 steps', '10 iterations', '1 cycle', '2 epochs', or 'never'"
            )
        count = int(re.sub("[_,]", "", match[1]))
        if count == 0:
            raise ValueError(f"'{text}' is not an interval; write 'never' to switch it off")
        return cls(count, _UNITS[match[2]])


def _checked(text: str) -> str:
    Interval.parse(text)
    return text


LOG_ROWS = 10_000_000
"""Most log rows of a run: about 10 GB of metrics.jsonl."""
IntervalText = Annotated[str, AfterValidator(_checked)]
"""An interval as people write it; `Interval.parse` reads it."""


class ClockConfig(Config):
    """Length of a run: a budget of environment steps, or a number of epochs."""

    aliases = {  # noqa: RUF012
        "total_timesteps": "timesteps total_steps steps max_steps max_iterations num_iterations "
        "updates total_updates max_updates",
        "iterations": "log_interval",
    }

    total_timesteps: int | None = Field(
        None,
        ge=1,
        description="Environment steps of the run, rounded down to whole iterations; for learning "
        "from a dataset, gradient updates.",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Epochs of the run, each a block of cycles, instead of total_timesteps. Passes "
        "over the rollout buffer are called update epochs.",
    )
    cycles: int = Field(5, ge=1, description="Cycles in an epoch.")
    iterations: int = Field(1, ge=1, description="Iterations in a cycle; a cycle is one log row.")

    @model_validator(mode="after")
    def _one_length(self) -> ClockConfig:
        if (self.total_timesteps is None) == (self.epochs is None):
            raise ValueError("give either clock.total_timesteps or clock.epochs, and not both")
        return self


@dataclass(frozen=True)
class Loops:
    """Lengths of the nested loops of a run, printed by the plan and followed by the clock."""

    iterations: int
    iterations_per_cycle: int
    cycles_per_epoch: int
    steps_per_iteration: int
    """Environment steps per iteration; 0 for offline learning."""
    batches_per_iteration: int
    """Most gradient steps of an iteration."""
    idle_iterations: int = 0
    """Number of first iterations that only collect."""

    @classmethod
    def of(
        cls,
        config: ClockConfig,
        steps_per_iteration: int,
        batches_per_iteration: int,
        idle_iterations: int = 0,
    ) -> Loops:
        if config.total_timesteps is not None:
            size = steps_per_iteration or max(batches_per_iteration, 1)
            iterations = config.total_timesteps // size
            if iterations == 0:
                unit = "steps" if steps_per_iteration else "gradient updates"
                raise UsageError(
                    f"clock.total_timesteps {config.total_timesteps:,} is less than one iteration "
                    f"of {size:,} {unit}: raise it to at least that."
                )
        else:
            iterations = (config.epochs or 0) * config.cycles * config.iterations
        loops = cls(
            iterations,
            config.iterations,
            config.cycles,
            steps_per_iteration,
            batches_per_iteration,
            idle_iterations,
        )
        loops._check_length()
        return loops

    @property
    def budget(self) -> tuple[int, int, str]:
        """(total, size of an iteration, unit) of what `clock.total_timesteps` counts."""
        if self.steps_per_iteration:
            return self.total.timesteps, self.steps_per_iteration, "steps"
        return self.total.updates, self.batches_per_iteration, "updates"

    def _check_length(self) -> None:
        """Raise for a run that no machine could finish: such sizes are typing errors."""
        total = self.total
        lengths = {
            "log rows": (total.cycles, LOG_ROWS, "more clock.iterations make a log row"),
            "environment steps": (total.timesteps, LARGEST, "shorten clock"),
            "gradient steps": (total.updates, LARGEST, "shorten clock or the updates"),
        }
        for what, (count, most, fix) in lengths.items():
            if count > most:
                raise UsageError(f"The run has {count:,} {what}, and at most {most:,} fit: {fix}.")

    def at(self, iterations: int, updates: int | None = None) -> Counters:
        """All counters after `iterations`; the last cycle and epoch may be short."""

        def completed(count: int, size: int) -> int:
            return -(-count // size) if iterations >= self.iterations else count // size

        cycles = completed(iterations, self.iterations_per_cycle)
        most = max(iterations - self.idle_iterations, 0) * self.batches_per_iteration
        return Counters(
            iterations=iterations,
            cycles=cycles,
            epochs=completed(cycles, self.cycles_per_epoch),
            timesteps=iterations * self.steps_per_iteration,
            updates=most if updates is None else updates,
        )

    @property
    def total(self) -> Counters:
        """All counters at the end of the run, with the most updates it can have."""
        return self.at(self.iterations)

    def times_due(self, interval: Interval, also_last: bool = False) -> int:
        """How often an interval is due in the whole run; `also_last` adds the run's end."""
        total = self.total
        if interval.count == 0:
            return int(also_last)
        # An interval shorter than an iteration is due once per iteration; updates do not advance in
        # the first iterations, which only collect.
        moving = self.iterations - (self.idle_iterations if interval.unit == "updates" else 0)
        times = min(int(getattr(total, interval.unit)) // interval.count, max(moving, 0))
        last_due = self.at(self.iterations - 1).is_due(interval, total)
        return times + int(also_last and not last_due)

    def longest_wait(self, interval: Interval) -> int:
        """Most iterations between two times that an interval is due, or until the run's end."""
        per_cycle = self.iterations_per_cycle
        each = {"iterations": 1, "cycles": per_cycle, "epochs": per_cycle * self.cycles_per_epoch}
        advance = {"timesteps": self.steps_per_iteration, "updates": self.batches_per_iteration}
        if interval.unit in each:
            waited = interval.count * each[interval.unit]
        else:
            waited = -(-interval.count // max(advance[interval.unit], 1))
        idle = self.idle_iterations if interval.unit == "updates" else 0
        return min(waited + idle, self.iterations) if interval.count else self.iterations


@dataclass(frozen=True)
class Counters:
    """Completed iterations, cycles, epochs, environment steps and updates."""

    iterations: int = 0
    cycles: int = 0
    epochs: int = 0
    timesteps: int = 0
    updates: int = 0

    def is_due(self, interval: Interval, after: Counters) -> bool:
        """Whether an interval became due between these counters and `after`."""
        if interval.count == 0:
            return False
        before_count = int(getattr(self, interval.unit)) // interval.count
        return int(getattr(after, interval.unit)) // interval.count > before_count


class Clock:
    """Progress of a run. Its counters are its whole state, so a resume cannot shift a schedule."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.now = Counters()
        self.before = Counters()
        self.episodes = 0
        self.ended_early = False

    @property
    def finished(self) -> bool:
        return self.now.iterations >= self.loops.iterations

    @property
    def only_collects(self) -> bool:
        """Whether the current iteration is one of the first, which only collect."""
        return self.now.iterations < self.loops.idle_iterations

    @property
    def progress(self) -> float:
        """From 0 at the start to 1 at the end of the run."""
        return self.now.iterations / self.loops.iterations

    def advance(self, updates: int, episodes: int) -> None:
        """Count an iteration with its gradient steps and finished episodes."""
        self.before = self.now
        self.now = self.loops.at(self.now.iterations + 1, self.now.updates + updates)
        self.episodes += episodes

    def skip_idle(self) -> None:
        """Begin with the first iteration that learns, to time typical iterations."""
        self.now = self.before = self.loops.at(self.loops.idle_iterations)

    def end_here(self) -> None:
        """End the run after the iteration that just ended."""
        self.continue_to(replace(self.loops, iterations=self.now.iterations))
        self.ended_early = True

    def continue_to(self, loops: Loops) -> None:
        """Change the run's length; a short last cycle continues."""
        self.loops = loops
        self.now = loops.at(self.now.iterations, self.now.updates)
        self.ended_early = False

    def is_due(self, interval: Interval) -> bool:
        """Whether an interval became due in the iteration that just ended."""
        return self.before.is_due(interval, self.now)

    @property
    def cycle_ended(self) -> bool:
        return self.now.cycles > self.before.cycles

    @property
    def epoch_ended(self) -> bool:
        return self.now.epochs > self.before.epochs

    def state_dict(self) -> Tree:
        return {
            "now": asdict(self.now),
            "before": asdict(self.before),
            "episodes": self.episodes,
            "ended_early": self.ended_early,
        }

    def load_state_dict(self, state: Tree) -> None:
        self.now = replace(Counters(), **state["now"])
        self.before = replace(Counters(), **state["before"])
        self.episodes = int(state["episodes"])
        if state["ended_early"]:
            self.end_here()
