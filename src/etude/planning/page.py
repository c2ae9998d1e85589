"""Plans as text: trees and tables."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.tree import Tree as RichTree

from etude.core.units import amount, duration, size
from etude.planning.plan import Plan

ESTIMATES = ("environments", "rollouts", "learner", "workspace", "best_episodes", "peak")
"""Names of a plan's bytes that are estimates."""


def render(plan: Plan, width: int = 100, color: bool = False) -> str:
    """The whole plan as text."""
    exact = "Exact" if plan.exactness["exact"] else "NOT exact"
    page: list[RenderableType] = [_loops(plan), "", _shapes(plan), f"[italic]{plan.usage}[/]"]
    page += [*_sizes(plan), ""]
    page += [_bytes(plan), "[italic]peak: memory of the whole run beyond the imported libraries[/]"]
    page += ["", f"[bold]{exact}[/]: {plan.exactness['reason']}."]
    page += [f"Note: {note}" for note in plan.notes]
    if plan.seconds:
        parts = ", ".join(f"{k} {duration(v)}" for k, v in plan.seconds.items() if k != "total")
        page.append(f"[bold]Expected time[/] {duration(plan.seconds['total'])} ({parts})")
    return _text(page, width, color)


def _text(page: Sequence[RenderableType], width: int, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    for part in page:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _loops(plan: Plan) -> RichTree:
    levels, counts = plan.levels, plan.counts
    limits = {name: "at most " if name in plan.at_most else "" for name in counts}
    most = limits["updates"]
    steps = f"{counts['timesteps']:,} environment steps, " if counts["timesteps"] else ""
    if plan.geometry["agents"] > 1:
        steps = f"{counts['timesteps']:,} agent steps ({counts['environment_steps']:,} of the "
        steps += "environments), "
    tree = RichTree(
        f"[bold]{plan.recipe}[/], seed {plan.seed}: {steps}"
        f"{most}{amount(counts['updates'], 'gradient step')}"
    )
    cycles = f"{amount(levels['cycles_per_epoch'], 'cycle')} ({amount(counts['cycles'], 'cycle')}"
    epoch = tree.add(f"[bold]{amount(levels['epochs'], 'epoch')}[/] of {cycles} in all)")
    cycle = epoch.add(
        f"cycle: {amount(levels['iterations_per_cycle'], 'iteration')} "
        f"({counts['iterations']:,} in all), then one log row"
    )
    collected = levels["steps_per_iteration"]
    iteration = cycle.add(
        f"iteration: {collected:,} steps into the buffer" if collected else "iteration"
    )
    for line in plan.lines:
        iteration.add(line)
    epoch.add(
        f"evaluation: {limits['evaluations']}{counts['evaluations']:,} in all, "
        f"{amount(counts['evaluation_episodes'], 'episode')} together"
    )
    epoch.add(f"checkpoints: {limits['checkpoints']}{counts['checkpoints']:,} in all")
    return tree


def _shapes(plan: Plan) -> Table:
    table = Table(title=plan.shapes_title.replace("[", r"\["), title_justify="left", box=None)
    for heading in ("array", "dtype", "buffer", "minibatch"):
        table.add_column(heading)
    for name, shape in plan.shapes.items():
        table.add_row(name, shape["dtype"], f"{shape['buffer']}", f"{shape['minibatch']}")
    return table


def _sizes(plan: Plan) -> list[str]:
    """Total bytes of these arrays."""
    sizes = {name: size(count) for name, count in plan.sizes.items()}
    group = f", rollout of a group {sizes['group']}" if "group" in sizes else ""
    part = ", a shard's part of it" if plan.geometry["shards"] > 1 else ""
    part = f"{part} {sizes['shard']}" if part else ""
    levels = ", ".join(f"{sizes[name]} per {name}" for name in ("batch", *_LEVELS))
    return [
        f"in bytes: buffer {sizes['buffer']}{group}, minibatch {sizes['minibatch']}{part}",
        f"gradient steps read {levels}",
    ]


_LEVELS = ("iteration", "cycle", "epoch")


def _bytes(plan: Plan) -> Table:
    table = Table(title="Bytes", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    for name, count in plan.bytes.items():
        exact = "estimated" if name in ESTIMATES else f"{count:,}"
        table.add_row(name.replace("_", " "), size(count), exact)
    return table


def compare(field: str, plans: Sequence[tuple[str, Plan]], width: int = 100) -> str:
    """Plans for several values of one field as a table of the rows that differ."""
    columns = {}
    for value, plan in plans:
        cells = {f"{k}": f"{v:,}" for k, v in plan.counts.items()}
        cells |= {k: f"{v:,}" for k, v in plan.levels.items() if k not in cells}
        cells |= {k: f"{v:,}" for k, v in plan.geometry.items()}
        cells |= {f"{k} bytes": size(v) for k, v in plan.bytes.items()}
        cells |= {f"{k} time": duration(v) for k, v in plan.seconds.items()}
        columns[value] = cells
    table = Table(box=None)
    table.add_column(field)
    for value in columns:
        table.add_column(value, justify="right")
    for name in next(iter(columns.values())):
        row = [cells.get(name, "") for cells in columns.values()]
        if len(set(row)) > 1:
            table.add_row(name.replace("_", " "), *row)
    return _text([table], width)
