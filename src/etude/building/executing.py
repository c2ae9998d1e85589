"""A run that has been built is executed: its folder, its outputs, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from etude.building.build import Parts
from etude.core import code
from etude.core.errors import AGAIN, EtudeError
from etude.core.exits import raise_ending
from etude.core.history import History
from etude.core.ranks import LostRank, Ranks, ReportedElsewhere
from etude.core.seals import sealed
from etude.core.trees import Tree
from etude.logs.outputs import LOSS_BATCHES, LOSS_BATCHES_OF_PICTURES, Outputs, open_logs
from etude.models.networks import is_image
from etude.planning import recipes
from etude.planning.page import amount
from etude.planning.plan import Plan, counted
from etude.planning.recipe import Recipe, code_roots, metrics_of
from etude.planning.resolve import Resolved
from etude.runs import files, manifest
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import DiskHistory

Say = Callable[[str], None]
SUMMARY = "summary.json"
MODEL = "the simulated model"


def silent(text: str) -> None:
    """Says nothing."""


def compare(ranks: Ranks, recipe: Recipe | None = None) -> None:
    """Refuse ranks that were given another recipe than the first, or compute other bits."""
    if ranks.size > 1:
        from etude.building.rank_checks import compare_bits, compare_recipes

        if recipe is not None:
            compare_recipes(recipe, ranks)
        compare_bits(ranks)


def compare_code(ranks: Ranks, run: Resolved) -> None:
    """Refuse ranks that compute with other code or another model than the first."""
    if ranks.size > 1:
        from etude.building.rank_checks import compare_hashes

        compare_hashes({**code.hashes(code_roots(run.recipe)), MODEL: run.spec.model}, ranks)


def open_folder(ranks: Ranks, make: Callable[[], RunFolder]) -> RunFolder:
    """The run's folder: the first rank makes or opens it, the others open it to read."""
    made: list[RunFolder] = []

    def first() -> str:
        made.append(make())
        return str(made[0].path.absolute())

    path = ranks.from_first(first)
    return made[0] if made else RunFolder.open(Path(path), write=False)


def outputs_of(
    run: Resolved, folder: RunFolder, console: bool, asked: Outputs, ranks: Ranks
) -> Outputs:
    """The logs of a run, with what the caller asked for; only the first rank has any."""
    if not ranks.is_first:
        return Outputs(silent, silent)
    recipe, iterations, metrics = run.recipe, run.loops.iterations, metrics_of(run.recipe)
    if run.data is None and "is_success" not in run.spec.statistics:
        metrics = tuple(metric for metric in metrics if "success" not in metric.name)
    plain, changed = recipe.model_dump(mode="json"), lambda: recipes.changed(recipe)
    path, every = folder.path, loss_batches(run)
    return open_logs(recipe.logs, path, plain, metrics, iterations, console, asked, changed, every)


def loss_batches(run: Resolved) -> int:
    """Batches per line of `logs.losses batches`: those of pictures take longer."""
    observations = run.deployed.observations  # type: ignore[attr-defined]
    sees = any(is_image(spec) for spec in observations.values())
    return LOSS_BATCHES_OF_PICTURES if sees else LOSS_BATCHES


def device_line(run: Resolved) -> str:
    """Where a run computes, in words."""
    learner, device = run.recipe.learner, run.device
    where = (
        "the CPU" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"
    )
    line = f"Device: learning on {where} with {amount(learner.threads, 'thread')}"
    if not run.num_groups:
        return f"{line}."
    config = run.recipe.collector
    return f"{line}, rollouts on the CPU with {amount(config.threads, 'thread')}."


class Interrupted(EtudeError):
    """A signal ended the run at a boundary, where it was saved, or before its first iteration."""

    exit_code = AGAIN

    def __init__(self, path: Path, what: str = "Stopped and saved.") -> None:
        super().__init__(f"{what} Continue with: etude resume {path}")


def execute(parts: Parts, folder: RunFolder, say: Say) -> None:
    """Run the loop; any failure leaves the last good checkpoint and a report."""
    loop, ranks = parts.loop, parts.ranks
    try:
        with loop.stop:
            finished = loop.run(DiskHistory.so_far(folder.metrics) if ranks.is_first else History())
    except (LostRank, ReportedElsewhere):
        raise  # It says nothing about this run that the next try should be warned of.
    except (Exception, SystemExit) as error:
        if ranks.is_first:  # where failures of other ranks are raised too
            from etude.runs.failures import report_failure

            report_failure(error, loop.clock.state_dict(), folder, say)
        if isinstance(error, SystemExit):
            raise_ending(error, "Code in the run")
        raise
    finally:
        parts.close()
    now = loop.clock.now
    if finished:
        ranks.from_first(lambda: _summarise(parts, folder))
    elif loop.stop.pauses(now.iterations):
        say(f"Paused and saved after {now.iterations:,} iterations, at step {now.timesteps:,}.")
    else:
        raise Interrupted(folder.path) if ranks.is_first else ReportedElsewhere(AGAIN)


def _summarise(parts: Parts, folder: RunFolder) -> None:
    """summary.json: what the run did, to hold against the plan."""
    loop = parts.loop
    now, rows = loop.clock.now, parts.metrics.num_rows if parts.metrics else 0
    tester, saved = loop.evaluator, loop.saver.num_saved
    counts = counted(now, parts.spec.agents, rows, tester.num_done, tester.num_episodes, saved)
    summary = {"counts": counts, "episodes": loop.clock.episodes, "best": loop.evaluator.best}
    summary["exactness"] = folder.manifest().get("exactness", "unknown")
    files.replace_file(folder.path / SUMMARY, [sealed(summary)])


def manifest_of(run: Resolved, plan: Plan, ranks: Ranks) -> Tree:
    recipe, spec = run.recipe, run.spec
    torch.set_num_threads(recipe.learner.threads)
    verdict = "exact" if plan.exactness["exact"] else "not exact"
    return manifest.collect(
        f"{verdict}: {plan.exactness['reason']}",
        {"learner": recipe.learner.threads},
        ranks=ranks.size,
        recipe=recipes.digest(recipe),
        model=spec.model,
        code=code.hashes(code_roots(recipe)),
        notes=spec.notes,
    )
