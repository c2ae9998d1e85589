"""Where a run's metrics go besides metrics.jsonl, and what is shown of it on the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from etude.core.config import Config
from etude.core.contracts import LogWriter, Stateful
from etude.core.history import History
from etude.core.metrics.declared import Metrics
from etude.core.output import notices
from etude.runs.folder import METRICS, REPORTING
from etude.runs.metrics_log import DiskHistory
from etude.training.callbacks import Callback
from etude.training.logs.apart import FAULTS, ApartCallback, ApartLog, ApartScreen, apart, words
from etude.training.logs.kinds import LOGS, LogConfig, LoggedRun

Say = Callable[[str], None]
LOSS_BATCHES, LOSS_BATCHES_OF_PICTURES = 25, 100
"""Batches per line of `logs.losses batches`."""


def _by_name(value: Any) -> LogConfig:
    """The name of a kind alone is short for {"kind": name}."""
    return LOGS.validate({"kind": value} if isinstance(value, str) else value)


class LogsConfig(Config):
    """What is logged and shown of a run. Nothing here changes a result."""

    tensorboard: bool = Field(True, description="Write curves for TensorBoard.")
    wandb: bool = Field(False, description="Send rows and the final policy to W&B.")
    wandb_project: str = Field("etude", description="The W&B project.")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="offline keeps rows in the run's folder until `wandb sync`."
    )
    console: Literal["auto", "dashboard", "table", "none"] = Field(
        "auto",
        description="Shown while training; auto is a dashboard in a terminal, else a table.",
    )
    losses: Literal["cycle", "iteration", "batches"] = Field(
        "cycle",
        description="How often the loss of a learned reward is printed: per log row, also per "
        "iteration, or also every 25 batches, of pictures every 100.",
    )
    writers: tuple[Annotated[SerializeAsAny[LogConfig], BeforeValidator(_by_name)], ...] = Field(
        (), description="Further log writers: kinds of other packages, or module:Class."
    )

    def kinds(self) -> list[LogConfig]:
        """Every log that is written besides metrics.jsonl."""
        wandb = {"kind": "wandb", "project": self.wandb_project, "mode": self.wandb_mode}
        asked = [{"kind": "tensorboard"}] if self.tensorboard else []
        asked += [wandb] if self.wandb else []
        return [*map(LOGS.validate, asked), *self.writers]


@dataclass
class Outputs:
    """The logs of a run and what comes with them."""

    say: Say
    on_phase: Callable[[str], None]
    logs: list[LogWriter] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)


def check(config: LogsConfig) -> None:
    """Refuse before anything is written what could not be logged later."""
    for kind in config.kinds():
        kind.check()


def open_logs(
    config: LogsConfig,
    folder: Path,
    recipe: dict[str, Any],
    metrics: Metrics,
    iterations: int,
    console: bool,
    outputs: Outputs,
    changed: Callable[[], str] = lambda: "",
    loss_batches: int = LOSS_BATCHES,
) -> Outputs:
    """The logs a recipe asks for, before those in `outputs`; `console`: show it on the screen.

    `metrics`: the declarations of the run; `iterations`: how many it has in all; `changed`: says
    which settings are not those of the recipe of that name; `loss_batches`: batches per line of
    `logs.losses batches`.
    """
    notices.keep_in(folder / REPORTING)
    out = Outputs(outputs.say, outputs.on_phase)
    screen: list[LogWriter] = []
    shown: list[Callback] = []
    if console and config.console != "none":
        from etude.core.metrics.declared import Health
        from etude.training.logs.console import ConsoleTable, EpochLines, LossLines

        health = Health(metrics, iterations)
        if config.console != "table" and shows_dashboard():
            from etude.training.logs.dashboard import Dashboard, DashboardCallback

            facts = [("seed", str(recipe["seed"])), ("changed", changed() or "nothing")]
            dashboard = Dashboard(recipe["name"], str(folder), health, facts=facts)
            screen = [dashboard]

            def on_phase(phase: str) -> None:
                dashboard.activity(phase)
                outputs.on_phase(phase)

            out.say, out.on_phase = apart("The dashboard", dashboard.say), on_phase
            shown.append(DashboardCallback(dashboard))
        else:
            table = ConsoleTable(health)
            screen = [table]
            shown.append(EpochLines(table.epoch))
        if config.losses != "cycle":
            every = loss_batches if config.losses == "batches" else None
            shown += [LossLines(out.say, m, every) for m in metrics if m.losses]
    out.callbacks = [*outputs.callbacks, *(ApartCallback(each, "The screen") for each in shown)]

    def rows() -> History:
        return DiskHistory.so_far(folder / METRICS)

    for kind in config.kinds():
        try:
            log = kind.open(LoggedRun(folder, recipe, out.say))
        except FAULTS as error:
            notices.add(f"The log {kind.kind} cannot be opened, and is left out: {words(error)}")
            continue
        out.logs.append(ApartLog(log.writer, kind.kind, rows))
        out.callbacks += [_reporting(each, kind.kind) for each in log.callbacks]
    # The screen last: whatever another log has to say at its start comes before the first picture.
    out.logs += [ApartScreen(each) for each in screen]
    out.logs += [ApartLog(each, type(each).__name__, rows) for each in outputs.logs]
    return out


def _reporting(callback: Callback, log: str) -> Callback:
    """A log's callback; one with memory is part of the run's state, and not only reports."""
    if isinstance(callback, Stateful):
        return callback
    return ApartCallback(callback, f"A callback of the log {log}")


def shows_dashboard() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    from rich.console import Console

    console = Console()
    return (
        sys.stdout.isatty() and console.encoding.startswith("utf") and not console.is_dumb_terminal
    )
