"""The Python interface of runs: plan, train, resume, evaluate, load a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.building.build import (
    SUMMARY,
    Say,
    build,
    compare,
    compare_code,
    device_line,
    execute,
    joined,
    manifest_of,
    on_first,
    open_folder,
    outputs_of,
    silent,
    start_policy,
)
from etude.building.build import Interrupted as Interrupted
from etude.core import user_code
from etude.core.contracts import LogWriter
from etude.core.errors import Damaged, EtudeError, UsageError
from etude.core.history import History
from etude.core.metrics import ELAPSED, is_offline, numbers, outline, step_of
from etude.core.output import duration, html_table
from etude.core.ranks import ALONE, Ranks, was_restarted
from etude.core.trees import digest
from etude.planning import loading, recipes
from etude.planning.memory import check_plan, explain_out_of_memory
from etude.planning.plan import Plan, make_plan, rank_notes, render
from etude.planning.recipe import Recipe, Resolved, metrics_of
from etude.planning.resolve import resolve
from etude.runs import checkpoint, file_system
from etude.runs.changes import changes_of
from etude.runs.documents import decode_sealed
from etude.runs.files import store_url
from etude.runs.folder import PLAN, RunFolder, default_path, publish_to
from etude.runs.metrics_log import DiskHistory, chain_at
from etude.training.evaluation import summarise
from etude.training.logs.outputs import Outputs, apart, check
from etude.training.loop import Callback
from etude.training.saving import RUN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from etude.evaluate.acting import LoadedPolicy
    from etude.rollout.placement import Placement


def plan(recipe: Recipe, measure: bool = False) -> Plan:
    """The plan of a run: counts, shapes and bytes; raises if the recipe cannot run.

    measure: also time a few iterations and estimate the time of the run.
    """
    run = resolve(recipe)
    planned = make_plan(run)
    if not measure:
        return planned
    from etude.building.measuring import measured

    return measured(run, planned)


class Run:
    """A run on disk."""

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        """Open a run; trust: the code that its recipe names may run, now and later."""
        self.folder = RunFolder.open(path, write=False)
        try:
            self.recipe = recipes.load(self.folder.recipe, trust)
        except UsageError:
            from etude.building import resuming

            self.recipe = resuming.recipe_of(self.folder, trust)
        self.recipe = recipes.with_changes(self.recipe, self.folder, trust)

    @property
    def path(self) -> Path:
        """Its folder on this machine; of a run in an object store, that of a copy."""
        return self.folder.path

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl as a list; `history` reads them one by one."""
        return list(self.history())

    def history(self) -> History:
        """The rows of metrics.jsonl, read from disk during iteration."""
        return DiskHistory(self.folder.metrics)

    def summary(self) -> dict[str, Any]:
        """summary.json of a finished run: counts, best evaluation and its step; {} of an unfinished
        run."""
        path = self.path / SUMMARY
        try:
            return decode_sealed(path.read_bytes()) if path.exists() else {}
        except ValueError as error:
            raise Damaged(path, f"{path} {error}: `etude resume` writes it again.") from error

    @property
    def exactness(self) -> str:
        """ "exact: ..." or "not exact: ...", and why; and the changes of `resume`, if any."""
        statement = str(self.folder.manifest().get("exactness", ""))
        return "; ".join([statement, *self.changes])

    @property
    def changes(self) -> list[str]:
        """ "changed at step 2,048: algorithm.learning_rate 0.001 -> 0.0001" of each change that a
        resume made."""
        return [change.words() for change in changes_of(self.folder.manifest())]

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 hashes of policy, training state and metric rows at the newest checkpoint.

        Two exact runs of a recipe agree in all three. The hashes exclude whatever may differ: the
        `time/` and `system/` columns, the position in metrics.jsonl, the number of saves, and the
        copies of recipe and manifest.
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
        """{metric: (steps, values)} of all metrics or of these names, for example `eval/*`."""
        return loading.curves(self.history(), names)

    def policies(self) -> dict[int, Path]:
        """{step: checkpoint} of all kept policies, the oldest first."""
        return loading.policies(self.path)

    def policy(self, checkpoint: str | int = "best") -> LoadedPolicy:
        """Load a policy of the run: "best", "latest" or that of a step."""
        from etude.evaluate.acting import load_policy

        return load_policy(loading.chosen_path(self.path, str(checkpoint)))

    def evaluate(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
        **env: Any,
    ) -> dict[str, float]:
        """Metrics of new episodes; nothing is written.

        episodes: their number; default 100, or every motion once for motion imitation. seed: by
        default one with other episodes than those of the evaluation at the end of training.
        checkpoint: "best", "latest" or a step. stochastic: draw actions as in training. env:
        changed fields of the environment, for example tolerance=0.05.
        """
        from etude.evaluate import fresh
        from etude.training.logs.progress import slow_work_shown

        policy = loading.chosen_path(self.path, str(checkpoint))
        recipe = self.recipe.replace(**{f"env__{name}": value for name, value in env.items()})
        seed = fresh.new_seed(recipe) if seed is None else seed
        with slow_work_shown():
            return summarise(fresh.play(recipe, policy, episodes, seed, stochastic).episodes)

    def film(
        self,
        episodes: int | None = None,
        seed: int | None = None,
        checkpoint: str | int = "best",
        stochastic: bool = False,
        small: bool = False,
    ) -> list[Path]:
        """Evaluate like `etude eval --video`; the paths of its films and pictures.

        small: films of 640 x 360 pixels, which are drawn faster, instead of 1280 x 720. Where the
        list is the last line of a cell, a notebook shows the films.
        """
        from etude.evaluate.evaluation import examine
        from etude.evaluate.film import Films
        from etude.training.logs.progress import slow_work_shown

        if self.recipe.env is None:
            raise UsageError(f"{self.path} learned from a dataset: it has no episodes to film.")
        which = str(checkpoint)
        arguments = (episodes, seed, True, silent, which, stochastic, small)
        with slow_work_shown():
            made = examine(self.recipe, self.path, *arguments)
        return Films(Path(name) for name in made["films"])

    def plot(self, *names: str) -> Figure:
        """The curves of metrics as a matplotlib figure, which a notebook shows.

        names: as in `curves`; by default those that the progress of a run shows: returns and
        successes of training and evaluations, and losses of learned rewards or cloned policies.
        """
        from etude.evaluate import charts

        metrics = metrics_of(self.recipe)
        curves = self.curves(*(names or outline(metrics)))
        for name in names:
            if not loading.matching(curves, [name]):
                raise UsageError(
                    f"{self.path} has no metric {name!r}: `run.curves()` has the names of all."
                )
        if not curves:
            raise UsageError(f"{self.path} has no log rows yet; `etude resume` continues it.")
        unit = "updates" if is_offline(self.history().last) else "steps"
        figure: Figure = charts.of_curves(curves, metrics, unit, paired=not names)
        return figure

    def __repr__(self) -> str:
        facts = self._facts()
        facts["recipe"] = repr(facts["recipe"])
        words = ", ".join(f"{name} {value}" for name, value in facts.items())
        return f"<Run {str(self.path)!r}: {words}>"

    def _repr_html_(self) -> str:
        """Its state in a notebook."""
        return html_table(f"Run {self.path}", {**self._facts(), "exactness": self._exactness()})

    def _facts(self) -> dict[str, str]:
        """Its state in words: recipe, seed, progress and newest results."""
        facts = {"recipe": self.recipe.name, "seed": str(self.recipe.seed)}
        try:
            row, summary = numbers(self.history().last), self.summary()
        except EtudeError:  # what reports must not fail; using the run says what is damaged
            return facts | {"state": "damaged"}
        facts["state"] = "finished" if summary else "not finished" if row else "not begun"
        if row:
            unit = "updates" if is_offline(row) else "steps"
            facts["progress"] = f"{step_of(row):,} {unit} in {duration(row.get(ELAPSED, 0.0))}"
        declared = {metric.name: metric for metric in metrics_of(self.recipe)}
        for metric in (declared[name] for name in outline((*declared.values(),))):
            if metric.name in row:
                facts[metric.label] = format(row[metric.name], metric.format)
        return facts

    def _exactness(self) -> str:
        try:
            return self.exactness
        except EtudeError:
            return "unknown: its manifest is damaged"


def train(
    recipe: Recipe,
    path: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool | None = None,
) -> Run:
    """Plan a recipe, then train it in a new run folder.

    path: the run's folder, or a URL such as s3://bucket/runs/one, which keeps it in an object store
    (docs/object-stores.md); by default a new folder in runs/. say: called with messages. on_phase:
    called with the name of each phase (collect, train, test, save). console: by default a line of
    progress in a notebook, and on a terminal that is standard error; without either, or with False,
    nothing is printed. True shows what the recipe's `logs.console` says, as the command does; with
    `logs.console none` there is no line either. Processes that torchrun started share the run's
    shards, and the first of them writes the run; after a restart by torchrun the run in `path`
    continues.
    """
    outputs = _outputs(say, on_phase, logs, callbacks)
    user_code.trust_texts(recipes.texts(recipe))
    with joined() as ranks:
        if ranks.from_first(lambda: was_restarted() and _exists(path)):
            assert path is not None
            from etude.building.resuming import continue_run

            return Run(continue_run(ranks, path, outputs, console))
        recipe = with_start_checkpoint(recipe, ranks)
        compare(ranks, recipe)
        first, _ = on_first(ranks, lambda: (resolve(recipe), None))
        run = first or resolve(recipe)
        compare_code(ranks, run)
        create = partial(_create, run, path, ranks, outputs.say)
        with open_folder(ranks, create) as folder, explain_out_of_memory(folder.path):
            out = outputs_of(run, folder, console, outputs, ranks)
            headline = (folder.path / PLAN).read_text().partition("\n")[0]
            lines = (headline, f"Run folder: {folder.name}", device_line(run))
            for line in (*lines, *rank_notes(recipe, ranks.size)):
                out.say(line)
            parts = build(run, folder, out.logs, out.callbacks, out.on_phase, out.say, ranks)
            start_policy(recipe, parts.algorithm)
            execute(parts, folder, out.say)
        return Run(folder.path)


def _outputs(
    say: Say,
    on_phase: Callable[[str], None],
    logs: Sequence[LogWriter],
    callbacks: Sequence[Callback],
) -> Outputs:
    """The caller's outputs, of which messages cannot end the run."""
    return Outputs(apart("say", say), apart("on_phase", on_phase), [*logs], [*callbacks], _filming)


def _filming(folder: Path, every: str) -> Callback:
    from etude.evaluate.filming import Filming

    return Filming(folder, every)


def create(run: Resolved, path: str | Path) -> Run:
    """Plan a run and make its folder without training; `resume` starts it."""
    user_code.trust_texts(recipes.texts(run.recipe))
    _create(run, path, ALONE, silent).close()
    return Run(path)


def with_start_checkpoint(recipe: Recipe, ranks: Ranks = ALONE) -> Recipe:
    """The recipe with a checkpoint in place of the run that `start_from` names.

    All ranks, and a resume before the first save, must start from the same checkpoint, and a run
    that still trains writes new ones.
    """
    if recipe.start_from is None:
        return recipe
    start = Path(recipe.start_from)
    chosen = ranks.from_first(lambda: str(loading.start_path(start).resolve()))
    return recipe.replace(start_from=chosen)


def _create(run: Resolved, path: str | Path | None, ranks: Ranks, say: Say) -> RunFolder:
    recipe = run.recipe
    check(recipe.logs)
    plan = make_plan(run, ranks=ranks.size)
    document, text = manifest_of(run, plan, ranks), recipes.dump(recipe)
    with ExitStack() as undo:
        published = publish_to(path, recipe.checkpoint.lease)
        undo.callback(published.close)
        named = Path(path) if path else default_path(recipes.title(recipe), recipe.seed)
        target = published.folder if published.url else named
        check_plan(plan.bytes, target, say)
        file_system.check(target.parent, plan.bytes["checkpoint"], recipe.checkpoint.keep_last, say)
        folder = RunFolder.create(target, text, render(plan), plan.to_json(), document, published)
        undo.pop_all()
    user_code.remember_trust(folder.recipe, recipes.texts(recipe))
    return folder


def _exists(path: str | Path | None) -> bool:
    if path is None:
        raise UsageError(
            "torchrun has restarted this run without the name of its folder: name it with "
            "--folder, or continue with `etude resume RUN`."
        )
    if url := store_url(path):
        from etude.runs import stored

        return stored.exists(url)
    return Path(path).exists()


def resume(
    path: str | Path,
    total_timesteps: int | None = None,
    callbacks: Sequence[Callback] = (),
    logs: Sequence[LogWriter] = (),
    say: Say = silent,
    on_phase: Callable[[str], None] = silent,
    console: bool | None = None,
    collector: Placement | None = None,
    checkpoint: int | None = None,
    trust: bool = False,
    pause_after: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Continue a run from its last good checkpoint, bit for bit.

    changes: {"algorithm.learning_rate": 1e-4}, settings that are others from here on; the manifest
    records them with the step. total_timesteps: a larger budget of steps; schedules then follow
    the new length. console: what the screen shows, see `train`. collector: where rollouts run this
    time; neither this nor the number of ranks changes a bit. checkpoint: continue from the
    checkpoint of this step; later ones are set aside. trust: the code that its recipe names may
    run, now and later. pause_after: save and stop after this iteration of the run; the next resume
    continues from there.
    """
    from etude.building.resuming import ResumeOptions, continue_run

    outputs = _outputs(say, on_phase, logs, callbacks)
    options = ResumeOptions(
        total_timesteps, collector, checkpoint, trust, pause_after, dict(changes or {})
    )
    with joined() as ranks:
        path = continue_run(ranks, path, outputs, console, options)
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
    names of the observations to read; default all. success_reward: reward of the last step of a
    success, in place of the file's rewards. assume_success: count episodes of unknown success as
    successes. format: the format of the files; default: the first that recognises each.
    """
    from etude.core.limited import Limits
    from etude.data.formats.base import ReadOptions
    from etude.data.importing import import_dataset as import_files

    options = ReadOptions(tuple(obs), None, success_reward, assume_success)
    files = [Path(path) for path in paths]
    import_files(files, Path(folder), options, Limits(), kind=format).close()
    return Path(folder)
