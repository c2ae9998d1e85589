"""What a log writer offers: its config opens it for a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from etude.core.config import Config
from etude.core.contracts import LogWriter
from etude.core.registry import Registry
from etude.training.callbacks import Callback


class LoggedRun(NamedTuple):
    """The run that a log is opened for."""

    folder: Path
    recipe: dict[str, Any]
    """As plain data."""
    say: Callable[[str], None]
    """Prints a line on the console of the run."""


class OpenLog(NamedTuple):
    """A log, and the callbacks it needs besides rows."""

    writer: LogWriter
    callbacks: tuple[Callback, ...] = ()


class LogConfig(Config):
    """The base of every log writer's config; `kind` is its name in a recipe."""

    kind: str

    def check(self) -> None:
        """Refuse, before anything is written, what could not be logged later."""

    @abstractmethod
    def open(self, run: LoggedRun) -> OpenLog:
        """The log of one run; nothing is written before its `begin`."""

    def add_final(
        self, run: LoggedRun, step: int, metrics: dict[str, float], pictures: dict[str, Path]
    ) -> None:
        """Add the evaluation after a run's end, of the policy of that step, to its closed log.

        metrics: {"final/mean_reward": ...}. pictures: {"final/success": file}, each a PNG of one
        episode, where `evaluation.final_video` asks for them.
        """


LOGS: Registry[LogConfig] = Registry("logs", "etude.training.logs.kinds:LogConfig")
