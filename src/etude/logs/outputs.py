"""Where a run's metrics go besides metrics.jsonl, and what is shown of it on the screen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import LogWriter
from etude.logs import wandb
from etude.logs.console import ConsoleTable
from etude.logs.dashboard import Dashboard
from etude.logs.tensorboard import TensorBoardLog
from etude.logs.wandb import WandbLog
from etude.metrics.declared import Health, Metrics
from etude.training.callbacks import Callback, Context
from etude.training.progress import DashboardCallback, EpochLines, LossLines

Say = Callable[[str], None]
LOSS_BATCHES = 100
"""Batches of one line, where lines are wanted of batches."""


class LogsConfig(Config):
    """What is written and shown of a run. None of this changes a result."""

    tensorboard: bool = Field(True, description="Write curves for TensorBoard.")
    wandb: bool = Field(False, description="Send rows and the final policy to W&B.")
    wandb_project: str = Field("etude", description="The W&B project.")
    wandb_mode: Literal["online", "offline"] = Field(
        "online", description="Offline keeps it in the run's folder until `wandb sync`."
    )
    console: Literal["auto", "dashboard", "table", "none"] = Field(
        "auto",
        description="What commands show; auto is a dashboard in a terminal, a table in a pipe.",
    )
    losses: Literal["cycle", "iteration", "batches"] = Field(
        "cycle",
        description="What a learned reward's loss is shown for: log rows, iterations too, or "
        "every 100 batches too.",
    )


@dataclass
class Outputs:
    """The logs of a run and what comes with them."""

    say: Say
    on_phase: Callable[[str], None]
    logs: list[LogWriter] = field(default_factory=list)
    callbacks: list[Callback] = field(default_factory=list)


def check(config: LogsConfig) -> None:
    """Refuse before anything is written what could not be logged later."""
    if config.wandb:
        wandb.require()


def open_logs(
    config: LogsConfig,
    folder: Path,
    recipe: dict[str, Any],
    metrics: Metrics,
    iterations: int,
    console: bool,
    outputs: Outputs,
) -> Outputs:
    """The logs a recipe asks for, before those in `outputs`; `console`: show it on the screen.

    `metrics`: the declarations of the run; `iterations`: how many it has in all.
    """
    out = Outputs(outputs.say, outputs.on_phase)
    screen: list[LogWriter] = []
    health = Health(metrics, iterations)
    if console and config.console != "none":
        if config.console != "table" and shows_dashboard():
            dashboard = Dashboard(recipe["name"], str(folder), health)
            _add_dashboard(out, dashboard)
            screen = [dashboard]
        else:
            table = ConsoleTable(health)
            screen = [table]
            out.callbacks.append(EpochLines(table.epoch))
        if config.losses != "cycle":
            every = LOSS_BATCHES if config.losses == "batches" else None
            out.callbacks += [LossLines(out.say, m, every) for m in metrics if m.losses]
    if config.tensorboard:
        out.logs.append(TensorBoardLog(folder / "tensorboard"))
    if config.wandb:
        name = f"{recipe['name']}-{folder.resolve().name}"
        log = WandbLog(folder, config.wandb_project, name, config.wandb_mode, recipe, out.say)
        out.logs.append(log)
        out.callbacks.append(FinalPolicy(log, folder / "checkpoints" / "final" / "policy"))
    # The screen last: whatever another log has to say at its start comes before the first picture.
    out.logs += [*screen, *outputs.logs]
    out.callbacks = [*outputs.callbacks, *out.callbacks]
    return out


def shows_dashboard() -> bool:
    """Whether standard output is a terminal that can be drawn on."""
    from rich.console import Console

    console = Console()
    return (
        sys.stdout.isatty() and console.encoding.startswith("utf") and not console.is_dumb_terminal
    )


def _add_dashboard(out: Outputs, dashboard: Dashboard) -> None:
    on_phase = out.on_phase

    def both(phase: str) -> None:
        dashboard.activity(phase)
        on_phase(phase)

    out.say, out.on_phase = dashboard.say, both
    out.callbacks.append(DashboardCallback(dashboard))


class FinalPolicy(Callback):
    """Gives the policy of a finished run to W&B."""

    def __init__(self, log: WandbLog, policy: Path) -> None:
        self._log, self._policy = log, policy

    def run_end(self, context: Context) -> None:
        self._log.finish(self._policy)
