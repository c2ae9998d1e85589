"""The plan: all counts, shapes and bytes of a run, computed before it starts; and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.tree import Tree as RichTree

from etude.core.board import Board
from etude.core.clock import Clock, Counters, Interval, Loops
from etude.core.contracts import ArraySpec, EnvSpec
from etude.core.errors import UsageError
from etude.core.output import amount, duration, html_text, rendered, size
from etude.core.trees import Tree, leaves, num_bytes
from etude.planning import memory, recipes
from etude.planning.loading import Start, checked_start
from etude.planning.recipe import PlanSection, Recipe, Resolved, dump, kinds_with
from etude.runs import checkpoint, tensors
from etude.runs.metrics_log import planned_position
from etude.training.curriculum import Curriculum, SuccessCurriculum
from etude.training.saving import RUN


def counted(
    now: Counters, agents: int, log_rows: int, evaluations: int, episodes: int, checkpoints: int
) -> dict[str, int]:
    """The counts of a plan and of a finished run's summary; episodes: of evaluations."""
    names = ("epochs", "cycles", "iterations", "updates", "timesteps")
    return {
        **{name: getattr(now, name) for name in names},
        "environment_steps": now.timesteps // agents,
        "log_rows": log_rows,
        "evaluations": evaluations,
        "evaluation_episodes": episodes,
        "checkpoints": checkpoints,
    }


@dataclass(frozen=True)
class Plan:
    """The plan of a run; `counts` are those at its end."""

    recipe: str
    seed: int
    exactness: dict[str, Any]
    levels: dict[str, int]
    """{level of the clock: its number in the level above}."""
    counts: dict[str, int]
    at_most: dict[str, str]
    """{count that is a maximum: why}."""
    geometry: dict[str, int]
    lines: list[str]
    """Steps of an iteration, as text."""
    shapes: dict[str, Any]
    shapes_title: str
    usage: str
    """How often a collected step is used, as text."""
    sizes: dict[str, int]
    """Bytes of the experience in the buffer, a group, a minibatch, and each level of the clock."""
    bytes: dict[str, int]
    data: dict[str, float]
    notes: list[str]
    seconds: dict[str, float] = field(default_factory=dict)
    """Expected seconds of each phase, if measured."""

    def to_json(self) -> Tree:
        return asdict(self)

    def __repr__(self) -> str:
        counts, exact = self.counts, "exact" if self.exactness["exact"] else "not exact"
        steps = f"{counts['timesteps']:,} steps, " if counts["timesteps"] else ""
        updates = amount(counts["updates"], "gradient step")
        return f"<Plan {self.recipe!r}, seed {self.seed}: {steps}{updates}, {exact}>"

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        return html_text(repr(self)[1:-1], render(self), unfolded=True)


def make_plan(
    run: Resolved, begun: bool = False, ranks: int = 1, notes: Sequence[str] = ()
) -> Plan:
    """The plan of a resolved recipe.

    begun: the run exists, so the policy that it starts from is not checked. ranks: processes that
    share its shards. notes: further notes, placed first.
    """
    recipe, loops, spec = run.recipe, run.loops, run.spec
    check_ranks(recipe, ranks)
    starting = list(notes)
    if recipe.start_from is not None and not begun:
        starting.append(_start_note(checked_start(recipe, run.deployed.contract())))
    section = recipe.algorithm.plan(run)
    evaluations = loops.times_due(Interval.parse(recipe.evaluation.every), also_last=True)
    checkpoints = loops.times_due(Interval.parse(recipe.checkpoint.every), also_last=True)
    total, episodes = loops.total, evaluations * run.evaluation_episodes
    counts = counted(total, spec.agents, total.cycles, evaluations, episodes, checkpoints)
    return Plan(
        recipe=recipe.name,
        seed=recipe.seed,
        exactness=asdict(run.exactness),
        levels={
            "epochs": total.epochs,
            "cycles_per_epoch": loops.cycles_per_epoch,
            "iterations_per_cycle": loops.iterations_per_cycle,
            "batches_per_iteration": loops.batches_per_iteration,
            "steps_per_iteration": loops.steps_per_iteration,
        },
        counts=counts,
        at_most=_at_most(recipe, section.at_most, [*counts]),
        geometry=_geometry(run) | section.geometry,
        lines=_collect_lines(recipe, spec, loops) + section.lines,
        shapes=section.shapes,
        shapes_title=section.title,
        usage=section.usage,
        sizes=_sizes(run, section),
        bytes=_bytes(run, section),
        data=section.data,
        notes=[
            *starting,
            *_notes(recipe, spec),
            *rank_notes(recipe, ranks),
            *section.notes,
            *_length_notes(recipe, loops),
        ],
    )


def check_ranks(recipe: Recipe, size: int) -> None:
    """Refuse ranks that cannot share the recipe's shards evenly."""
    if size == 1:
        return
    shards = recipe.learner.shards
    if shards % size:
        fitting = [str(n) for n in range(1, shards + 1) if shards % n == 0]
        several = f"{', '.join(fitting[:-1])} or {fitting[-1]}" if fitting[1:] else fitting[0]
        raise UsageError(
            f"{size:,} ranks cannot share learner.shards {shards:,} evenly: start {several} of "
            "them (torchrun --nproc-per-node), or change --learner.shards, which changes the "
            "result."
        )
    if not recipe.algorithm.takes_ranks:
        raise UsageError(
            f"{recipe.algorithm.kind} learns in one process, and {size:,} ranks were started: "
            f"leave out torchrun, or use algorithm {kinds_with('takes_ranks', True)}."
        )
    if recipe.collector.kind != "local":
        raise UsageError(
            f"Each of {size:,} ranks collects with its own threads: use --collector.kind local, "
            f"or one process with --collector.kind {recipe.collector.kind}."
        )


def make_curriculum(recipe: Recipe, spec: EnvSpec) -> Curriculum:
    """The curriculum of a recipe."""
    if recipe.motions.enabled:
        if recipe.curriculum.enabled:
            raise UsageError(
                "A run has one curriculum: leave out --curriculum.enabled or --motions.enabled."
            )
        if not spec.motions:
            raise UsageError(
                "This environment has no motions to choose from: leave out --motions.enabled."
            )
        if not {"motion", "is_success"} <= set(spec.statistics):
            raise UsageError(
                'This environment does not report "motion" and "is_success" of its episodes, which '
                "--motions.enabled goes by: add them to its statistics."
            )
        from etude.training.practice import MotionCurriculum

        by_part = {"start", "played"} <= set(spec.statistics)
        bins = recipe.motions.bins if by_part else 1
        return MotionCurriculum(recipe.motions, len(spec.motions), bins)
    if not recipe.curriculum.enabled:
        return Curriculum()
    if "is_success" not in spec.statistics:
        raise UsageError("--curriculum.enabled needs an environment that reports success.")
    return SuccessCurriculum(recipe.curriculum)


def _start_note(start: Start) -> str:
    """A note on the state that a run starts from."""
    if start.training is None:
        return (
            f"Starts from the policy in {start.path} only: its training state was not kept, so "
            "value functions and reward statistics start from scratch."
        )
    return (
        f"Starts from {start.path}: its policy with its normaliser, its value function or critics, "
        "and the statistics or entropy coefficient that these depend on. Optimizers, schedules, "
        "replay, discriminators and reward networks start from scratch."
    )


def _at_most(recipe: Recipe, reason: str | None, counts: list[str]) -> dict[str, str]:
    if recipe.evaluation.stop_at_success is not None:
        return dict.fromkeys(counts, "evaluation.stop_at_success may end the run early")
    if reason is None:
        return {}
    reasons = {"updates": reason}
    if Interval.parse(recipe.evaluation.every).unit == "updates":
        reasons |= {"evaluations": reason, "evaluation_episodes": reason}
    if Interval.parse(recipe.checkpoint.every).unit == "updates":
        reasons["checkpoints"] = reason
    return reasons


def _geometry(run: Resolved) -> dict[str, int]:
    recipe = run.recipe
    num_envs = recipe.collector.num_envs if run.num_groups else 0
    return {
        "num_envs": num_envs,
        "agents": run.spec.agents,
        "environments": num_envs // run.spec.agents,
        "groups": run.num_groups,
        "envs_per_group": recipe.collector.envs_per_group if run.num_groups else 0,
        "shards": recipe.learner.shards,
        "learner_threads": recipe.learner.threads,
        "lag": recipe.collector.lag,
    }


def _collect_lines(recipe: Recipe, spec: EnvSpec, loops: Loops) -> list[str]:
    if not loops.steps_per_iteration:
        return []
    config, agents, steps = recipe.collector, spec.agents, loops.steps_per_iteration
    envs = amount(config.num_envs // agents, "environment")
    envs += f" x {agents} agents" if agents > 1 else ""
    groups = f"{amount(config.num_groups, 'group')} of {config.envs_per_group:,}"
    line = f"collect: {envs} ({groups}) x {amount(steps // config.num_envs, 'step')} = {steps:,}"
    placed = config.plan_text()
    return [f"{line}; {placed}" if placed else line]


def _sizes(run: Resolved, section: PlanSection) -> dict[str, int]:
    """Bytes of the arrays in the buffer, a group's rollout, a minibatch and a shard's part of it,
    and of all minibatches in each level of the clock."""
    buffer, batch = (
        sum(
            ArraySpec(tuple(shape[part]), shape["dtype"]).num_bytes
            for shape in section.shapes.values()
        )
        for part in ("buffer", "minibatch")
    )
    loops, sizes = run.loops, {"buffer": buffer}
    if run.num_groups:
        held = section.geometry.get("capacity", loops.steps_per_iteration)
        sizes["group"] = buffer * loops.steps_per_iteration // held // run.num_groups
    sizes |= {"minibatch": batch, "shard": batch // run.recipe.learner.shards}
    iteration = batch * loops.batches_per_iteration
    cycle = iteration * loops.iterations_per_cycle
    return sizes | {
        "batch": batch,
        "iteration": iteration,
        "cycle": cycle,
        "epoch": cycle * loops.cycles_per_epoch,
    }


def _bytes(run: Resolved, section: PlanSection) -> dict[str, int]:
    """Bytes in memory and on disk; those of a checkpoint at the end of the run."""
    parameters = sum(p.nbytes for p in run.deployed.parameters())
    arrays = dict(run.deployed.state_dict())
    normaliser = sum(b.nbytes for b in arrays.values()) - parameters
    training = _training(run) | {"algorithm": section.training}
    try:
        saved = checkpoint.checkpoint_bytes((arrays, run.deployed.contract()), training)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"This run is too large for a checkpoint: {error}. Make it smaller."
        ) from error
    exact = {**section.memory, "normaliser": normaliser}
    return {
        **exact,
        **section.estimates,
        "peak": memory.peak(section.estimates, sum(exact.values())),
        "snapshots": num_bytes(run.snapshot) * run.num_groups,
        **section.disk,
        "checkpoint": saved,
        "checkpoints_kept": saved * run.recipe.checkpoint.keep_last,
    }


def _training(run: Resolved) -> Tree:
    """A tree with the shape of a checkpoint's `training/` at the end, without the algorithm's."""
    if run.num_groups:
        _check_groups(run)
    groups = {f"{g:06d}": run.snapshot for g in range(run.num_groups)}
    collector: Tree = {"groups": groups} if groups else {}
    recipe, loops = run.recipe, run.loops
    curriculum = make_curriculum(recipe, run.spec)
    clock, total = Clock(loops), loops.total
    if recipe.collector.lag:
        arrays = run.deployed.state_dict()
        collector["broadcast"] = {
            "version": total.iterations - 1,
            "policy": {name: array.expand(array.shape) for name, array in arrays.items()},
            "curriculum": curriculum.broadcast(),
        }
    clock.before, clock.now, clock.episodes = loops.at(total.iterations - 1), total, total.timesteps
    return {
        "clock": clock.state_dict(),
        "collector": collector,
        "curriculum": curriculum.state_dict(),
        "evaluator": {"best": [1 / 3, 1 / 3], "num_done": total.epochs, "num_episodes": 0},
        "board": Board(run.spec.statistics).state_dict(),
        "metrics": planned_position(total.cycles),
        "saver": {"best": total.timesteps, "num_saved": total.epochs},
        RUN: {"recipe": dump(recipe), "manifest": "0" * 1570},  # about the length of one
    }


def _check_groups(run: Resolved) -> None:
    """Refuse more groups than fit into the header of a checkpoint."""
    one, two = (
        checkpoint.header_bytes({f"{g:06d}": run.snapshot for g in range(n)}) for n in (1, 2)
    )
    digits = 24 * len(list(leaves(run.snapshot)))  # offsets in a large file are longer
    most = int(0.95 * tensors.MAX_HEADER) // (two - one + digits)
    if run.num_groups > most:
        num_envs = run.recipe.collector.num_envs
        raise UsageError(
            f"collector.num_envs {num_envs:,} in groups of collector.envs_per_group "
            f"{run.recipe.collector.envs_per_group:,} are {run.num_groups:,} groups, and a "
            f"checkpoint has room for {most:,} of this environment: use "
            f"--collector.envs-per-group {-(-num_envs // most)} or more."
        )


def _size_notes(recipe: Recipe) -> list[str]:
    """A note about sizes that differ from the named recipe with the number of environments."""
    if recipe.name not in recipes.names() or recipe.env is None:
        return []
    usual = recipes.made_by(recipe.name)()
    sizes = ("collector.num_envs", "collector.envs_per_group", "algorithm.minibatch_size")
    here, there = (dict(recipes.fields(each)) for each in (recipe, usual))
    if here[sizes[0]] == there[sizes[0]]:
        return []
    apart = [n for n in sizes[1:] if n in here and n in there and here[n] != there[n]]
    words = [f"{name} {here[name]:,} (the recipe has {there[name]:,})" for name in apart]
    return [f"With collector.num_envs {here[sizes[0]]:,}: {', '.join(words)}."] if words else []


def _notes(recipe: Recipe, spec: EnvSpec) -> list[str]:
    notes = list(spec.notes)
    if spec.agents > 1:
        notes.append(
            f"Each of the {spec.agents} agents of an environment counts as an environment: steps, "
            "buffer and episodes are those of agents, and are not multiplied again."
        )
    notes += _size_notes(recipe)
    if recipe.collector.lag:
        notes.append(
            "Each iteration is collected during the training of the one before it, with the "
            "weights at the start of that training. The first one waits for its own collection, "
            "and the second is collected with the same weights; during the last one nothing is "
            "collected."
        )
    if recipe.curriculum.enabled:
        ease = recipe.curriculum
        notes.append(
            f"The curriculum's level rises from {ease.start:g} by {ease.step:g} whenever "
            f"{ease.raise_at:.0%} of {ease.episodes} episodes succeed; evaluation is at level 1."
        )
    if recipe.motions.enabled:
        from etude.training.practice import floor

        by_part = {"start", "played"} <= set(spec.statistics)
        num = len(spec.motions) * (recipe.motions.bins if by_part else 1)
        parts = f"{recipe.motions.bins} parts of each" if by_part else "each"
        notes.append(
            f"Practice by failures in training: {len(spec.motions)} motions, {parts}, with a "
            f"probability of at least {floor(num, recipe.motions.mix):.2%}; the probabilities "
            "change with every iteration."
        )
    if recipe.learner.shards > 1:
        notes.append(
            f"The result is exact for {recipe.learner.shards} learner shards; another number of "
            "shards gives another result."
        )
    if recipe.learner.step == "compiled":
        from etude.core import compiled

        made = compiled.description()
        notes.append(
            f"Gradient steps are {made}, once for each geometry. It takes up to minutes, while the "
            "warm-up collects; results differ from those of eager steps in rounding."
            if made
            else "Gradient steps will be eager: there is no C++ compiler here (install g++)."
        )
    return notes


def rank_notes(recipe: Recipe, ranks: int) -> list[str]:
    """A note on the shards of each rank; none for one process."""
    if ranks == 1:
        return []
    shards, fast = recipe.learner.shards, recipe.learner.reduce == "fast"
    each = shards // ranks
    which = [
        f"{r * each}" if each == 1 else f"{r * each}-{(r + 1) * each - 1}" for r in range(ranks)
    ]
    listed = [f"{shard} on rank {r}" for r, shard in enumerate(which)]
    if ranks > 8:
        listed[2:-1] = ["..."]
    return [
        f"{ranks:,} ranks share {shards:,} learner shards: {', '.join(listed)}. Rank 0 writes and "
        f"evaluates. Another number of ranks gives {'other' if fast else 'the same'} bits."
    ]


def _length_notes(recipe: Recipe, loops: Loops) -> list[str]:
    notes, total, asked = list[str](), loops.total, recipe.clock.total_timesteps
    length, _, unit = loops.budget
    if asked is not None and not loops.steps_per_iteration:
        notes.append(
            "clock.total_timesteps counts gradient updates, since this run collects no steps."
        )
    if asked is not None and asked != length:
        notes.append(
            f"{asked:,} {unit} are rounded down to {total.iterations:,} whole iterations, "
            f"{length:,} {unit}."
        )
    if total.iterations % loops.iterations_per_cycle:
        short = total.iterations % loops.iterations_per_cycle
        notes.append(
            f"The last cycle is short: {short} of {loops.iterations_per_cycle} iterations."
        )
    if total.cycles % loops.cycles_per_epoch:
        short = total.cycles % loops.cycles_per_epoch
        notes.append(f"The last epoch is short: {short} of {loops.cycles_per_epoch} cycles.")
    if recipe.checkpoint.seconds is not None:
        notes.append(
            f"Checkpoints are also saved every {recipe.checkpoint.seconds:g} s of wall clock; "
            "these are not counted."
        )
    notes.append("The policy of the best evaluation is kept as well, without training state.")
    return notes


ESTIMATES = ("environments", "rollouts", "learner", "workspace", "best_episodes", "peak")
"""Names of a plan's bytes that are estimates."""


def render(plan: Plan, width: int = 100, color: bool = False) -> str:
    """The whole plan as text."""
    exact = "Exact" if plan.exactness["exact"] else "NOT exact"
    page: list[RenderableType] = [_loops(plan), "", _shapes(plan), f"[italic]{plan.usage}[/]"]
    page += [*_size_lines(plan), ""]
    page += [
        _bytes_table(plan),
        "[italic]peak: memory of the whole run beyond the imported libraries[/]",
    ]
    page += ["", f"[bold]{exact}[/]: {plan.exactness['reason']}."]
    page += [f"Note: {note}" for note in plan.notes]
    if plan.seconds:
        parts = ", ".join(f"{k} {duration(v)}" for k, v in plan.seconds.items() if k != "total")
        page.append(f"[bold]Expected time[/] {duration(plan.seconds['total'])} ({parts})")
    return rendered(page, width, color)


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


def _size_lines(plan: Plan) -> list[str]:
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


def _bytes_table(plan: Plan) -> Table:
    table = Table(title="Bytes", title_justify="left", box=None)
    table.add_column("what")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    for name, count in plan.bytes.items():
        exact = "estimated" if name in ESTIMATES else f"{count:,}"
        table.add_row(name.replace("_", " "), size(count), exact)
    return table


def compare_plans(field: str, plans: Sequence[tuple[str, Plan]], width: int = 100) -> str:
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
    return rendered([table], width)
