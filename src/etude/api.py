"""Runs from Python: plan, train, resume, evaluate, load a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.building.build import build, start_policy
from etude.building.executing import (
    SUMMARY,
    Say,
    compare,
    compare_code,
    device_line,
    execute,
    joined,
    manifest_of,
    open_folder,
    outputs_of,
    silent,
)
from etude.building.executing import Interrupted as Interrupted
from etude.core import user_code
from etude.core.contracts import LogWriter
from etude.core.errors import Damaged, UsageError
from etude.core.history import History
from etude.core.ranks import ALONE, Ranks, was_restarted
from etude.core.trees import digest
from etude.planning import recipes
from etude.planning.out_of_memory import check_plan, explained
from etude.planning.page import render
from etude.planning.plan import Plan, make_plan, rank_notes
from etude.planning.recipe import Recipe, Resolved
from etude.planning.resolve import resolve
from etude.rollout.local import Placement
from etude.runs import checkpoint, file_system
from etude.runs.documents import decode_sealed
from etude.runs.folder import PLAN, RunFolder, default_path
from etude.runs.metrics_log import DiskHistory, chain_at
from etude.training.callbacks import Callback
from etude.training.evaluation import summarise
from etude.training.logs.outputs import Outputs, apart, check
from etude.training.saving import RUN

if TYPE_CHECKING:
    from etude.evaluate.acting import LoadedPolicy


def plan(recipe: Recipe, measure: bool = False) -> Plan:
    """What a run of the recipe would do: counts, shapes and bytes; raises where it cannot run.

    `measure`: also time a few iterations and estimate how long the run takes.
    """
    run = resolve(recipe)
    made = make_plan(run)
    if not measure:
        return made
    from etude.building.measure import measured

    return measured(run, made)


class Run:
    """A run on disk."""

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        """trust: code that its recipe names may run, now and later."""
        self.folder = RunFolder.open(Path(path), write=False)
        try:
            self.recipe = recipes.load(self.folder.recipe, trust)
        except UsageError:
            from etude.building import resuming

            self.recipe = resuming.recipe_of(self.folder, trust)

    @property
    def path(self) -> Path:
        return self.folder.path

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, all of them in memory; `history` has them one by one."""
        return list(self.history())

    def history(self) -> History:
        """The rows of metrics.jsonl, read from the disk as they are iterated."""
        return DiskHistory(self.folder.metrics)

    def summary(self) -> dict[str, Any]:
        """What a finished run did."""
        path = self.path / SUMMARY
        try:
            return decode_sealed(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise Damaged(path, f"{path} {error}: `etude resume` writes it anew.") from error

    @property
    def exactness(self) -> str:
        """ "exact: ..." or "not exact: ...", and why."""
        return str(self.folder.manifest().get("exactness", ""))

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of weights with normaliser, of training state, and of the metric rows, as the
        newest checkpoint holds them.

        Two exact runs agree in all three: `time/` and `system/` columns, which may differ, are
        left out, and so is the position in metrics.jsonl, whose bytes they are part of, how often
        the run was saved, and the copies of recipe and manifest.
        """
        path = checkpoint.newest_verified(self.folder.checkpoints, repair=False)
        if path is None:
            raise UsageError(f"{self.path} has no checkpoint yet.")
        policy, _, training = checkpoint.load_training(path)
        position = training.pop("metrics")
        del training["saver"]["num_saved"]
        training.pop(RUN, None)
        return {
            "policy": digest(policy),
            "training": digest(training),
            "metrics": chain_at(self.folder.metrics, position),
        }

    def curves(self, *names: str) -> dict[str, tuple[list[int], list[float]]]:
        """{metric: (steps, values)} of the rows, of all metrics or of these; `eval/*` works."""
        from etude.planning.loading import curves

        return curves(self.history(), names)

    def policies(self) -> dict[int, Path]:
        """{step: checkpoint} of every policy that was kept, the oldest first."""
        from etude.planning.loading import policies

        return policies(self.path)

    def policy(self, checkpoint: str | int = "best") -> LoadedPolicy:
        """A policy of the run, to act with: "best", "latest" or that of a step."""
        from etude.evaluate.acting import load_policy
        from etude.planning.loading import chosen_path

        return load_policy(chosen_path(self.path, str(checkpoint)))

    def evaluate(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
        **env: Any,
    ) -> dict[str, float]:
        """Metrics of fresh episodes; nothing is written.

        Without a count, 100 episodes; or every motion once, where motions are imitated. checkpoint:
        "best", "latest" or a step. stochastic: actions are drawn, as in training. env: fields of
        the environment that are changed, such as tolerance=0.05.
        """
        from etude.evaluate import fresh
        from etude.planning.loading import chosen_path

        policy = chosen_path(self.path, str(checkpoint))
        recipe = self.recipe.replace(**{f"env__{name}": value for name, value in env.items()})
        return summarise(fresh.play(recipe, policy, episodes, seed, stochastic).episodes)

    def film(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
    ) -> list[Path]:
        """Evaluates like `etude eval --video`, and gives the films and pictures that it made."""
        from etude.evaluate.evaluation import examine

        which = str(checkpoint)
        made = examine(self.recipe, self.path, episodes, seed, True, silent, which, stochastic)
        return [Path(name) for name in made["films"]]


def train(
    recipe: Recipe,
    path: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool = False,
) -> Run:
    """Plan, then train a recipe in a new run folder.

    `console`: show the run on the screen, as the recipe's `logs.console` says. Processes that
    torchrun started together share the run's shards, and the first of them writes it; where
    torchrun has started them again, the run in the folder `path` goes on.
    """
    asked = _asked(say, on_phase, logs, callbacks)
    user_code.trust_texts(recipes.texts(recipe))
    with joined() as ranks:
        if ranks.from_first(lambda: was_restarted() and _is_begun(path)):
            assert path is not None
            from etude.building.continuing import continue_run

            return Run(continue_run(ranks, Path(path), asked, console))
        recipe = pinned(recipe, ranks)
        compare(ranks, recipe)
        resolved: list[Resolved] = []  # the first rank's, whose errors are reported once
        ranks.from_first(lambda: resolved.append(resolve(recipe)))
        run = resolved[0] if resolved else resolve(recipe)
        compare_code(ranks, run)
        create = partial(_create, run, path, ranks, asked.say)
        with open_folder(ranks, create) as folder, explained(folder.path):
            out = outputs_of(run, folder, console, asked, ranks)
            headline = (folder.path / PLAN).read_text().partition("\n")[0]
            said = (headline, f"Run folder: {folder.path}", device_line(run))
            for note in (*said, *rank_notes(recipe, ranks.size)):
                out.say(note)
            parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
            start_policy(recipe, parts.algorithm)
            execute(parts, folder, out.say)
        return Run(folder.path)


def _asked(
    say: Say,
    on_phase: Callable[[str], None],
    logs: Sequence[LogWriter],
    callbacks: Sequence[Callback],
) -> Outputs:
    """Where a caller wants messages and metrics to go; messages only report."""
    return Outputs(apart("say", say), apart("on_phase", on_phase), [*logs], [*callbacks])


def create(run: Resolved, path: str | Path) -> Run:
    """Plan a run and make its folder, without training: `resume` begins with it."""
    user_code.trust_texts(recipes.texts(run.recipe))
    _create(run, path, ALONE, silent).close()
    return Run(path)


def pinned(recipe: Recipe, ranks: Ranks = ALONE) -> Recipe:
    """The recipe with the checkpoint it starts from in place of that checkpoint's run.

    A run that still trains has another newest checkpoint soon: every rank, and a resume before
    this run's first save, must start from the same.
    """
    if recipe.start_from is None:
        return recipe
    from etude.planning.loading import start_path

    start = Path(recipe.start_from)
    chosen = ranks.from_first(lambda: str(start_path(start).resolve()))
    return recipe.model_copy(update={"start_from": chosen})


def _create(run: Resolved, path: str | Path | None, ranks: Ranks, say: Say) -> RunFolder:
    recipe = run.recipe
    check(recipe.logs)
    plan = make_plan(run, ranks=ranks.size)
    target = Path(path) if path else default_path(recipe.name, recipe.seed)
    check_plan(plan.bytes, target, say)
    file_system.check(target.parent, plan.bytes["checkpoint"], recipe.checkpoint.keep_last, say)
    document, text = manifest_of(run, plan, ranks), recipes.dump(recipe)
    folder = RunFolder.create(target, text, render(plan), plan.to_json(), document)
    user_code.remember_trust(folder.recipe, recipes.texts(recipe))
    return folder


def _is_begun(path: str | Path | None) -> bool:
    if path is None:
        raise UsageError(
            "torchrun has started this run again and cannot know its folder: name one with "
            "--folder, or continue with `etude resume RUN`."
        )
    return Path(path).exists()


def resume(
    path: str | Path,
    total_timesteps: int | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool = False,
    collector: Placement | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
    pause_after: int | None = None,
) -> Run:
    """Continue a run from its last good checkpoint, as if it had never stopped.

    `checkpoint`: from that of this step, and those after it are set aside. `total_timesteps` gives
    it a larger budget first; schedules that follow the run's progress then follow the new length.
    `console`: show the run on the screen. `collector`: where its rollouts run this time, which
    changes no bit; nor does the number of ranks it goes on with. `trust`: code that its recipe
    names may run, now and later. `pause_after`: stop once so many of its iterations are done, and
    save; the next resume goes on from there with the bits of a run that never paused.
    """
    from etude.building.continuing import continue_run

    asked = _asked(say, on_phase, logs, callbacks)
    how = (total_timesteps, collector, checkpoint, trust, pause_after)
    with joined() as ranks:
        path = continue_run(ranks, Path(path), asked, console, *how)
    return Run(path)


def import_dataset(
    paths: Sequence[str | Path],
    folder: str | Path,
    obs: Sequence[str] = (),
    success_reward: float | None = None,
    assume_success: bool = False,
    format: str | None = None,
) -> Path:
    """Import episodes of other systems into a new dataset, like `etude data import`.

    paths: files or folders of robomimic, LIBERO, Minari, LeRobot v3 or an installed format. obs:
    the observations to read; all by default. success_reward: reward of the last step of successes,
    instead of the file's rewards. assume_success: count episodes of unknown success as successes.
    format: the format of the files; by default the first that recognises each.
    """
    from etude.core.limited import Limits
    from etude.data.formats.base import ReadOptions
    from etude.data.importing import import_dataset as import_files

    options = ReadOptions(tuple(obs), None, success_reward, assume_success)
    files = [Path(path) for path in paths]
    import_files(files, Path(folder), options, Limits(), kind=format).close()
    return Path(folder)
