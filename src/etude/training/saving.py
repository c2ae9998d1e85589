"""Checkpoints: when they are written, and their content, the state of every part by name."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import Field

from etude.core.clock import Clock, Interval, IntervalText
from etude.core.config import SECONDS, Config
from etude.core.contracts import Algorithm, ReadsFiles, Stateful
from etude.core.errors import Damaged, EtudeError, UsageError
from etude.core.output import waiting
from etude.core.ranks import ALONE, Ranks, Shared, named
from etude.core.trees import Tree, digest, without_arrays
from etude.runs import checkpoint
from etude.runs.folder import RunFolder

Say = Callable[[str], None]
RUN = "run"
"""The name of the copies of recipe and manifest in a checkpoint."""


class CheckpointConfig(Config):
    """When the run is saved. No field changes results."""

    aliases = {"every": "save_freq save_interval"}  # noqa: RUF012

    every: IntervalText = Field("1 epoch", description="How often; the run's end always counts.")
    seconds: float | None = Field(
        None,
        gt=0,
        le=SECONDS,
        description="Also save when this much wall-clock time has passed.",
    )
    grace: float | None = Field(
        None,
        gt=0,
        le=SECONDS,
        description="Seconds from a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1) to the process's end "
        "if no iteration ends before; None: 3 times the longest iteration, at least 5.",
    )
    lease: float = Field(
        30.0,
        ge=1,
        le=SECONDS,
        description="Of a run in an object store: seconds without a sign of life of its writer "
        "after which another process may continue it.",
    )
    keep_last: int = Field(3, ge=1, le=10_000, description="Resumable checkpoints that are kept.")
    keep_every: int | None = Field(
        None, ge=1, description="Timesteps between policies that are also kept."
    )


class Saver:
    """Writes checkpoints at the ends of iterations, and restores a run from the last intact one.

    All ranks call it together, since each has a part of the state; only the first one reads and
    writes files.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        algorithm: Algorithm,
        parts: Mapping[str, Stateful],
        ranks: Ranks = ALONE,
        compare_every: str = "never",
    ) -> None:
        """parts: everything with state, by name. compare_every: how often ranks compare their
        weights, in addition to saves."""
        self._folder, self._config, self._ranks = folder, config, ranks
        self._algorithm, self._parts = algorithm, parts
        self._every, self._compare_every = map(Interval.parse, (config.every, compare_every))
        self._last_save = time.monotonic()
        # The algorithm's state, without arrays, in each checkpoint that can be resumed.
        self._saved: dict[str, Tree] = {}
        self.best_step: int | None = None
        """The step of the best policy."""
        self._best_is_new = False
        self.num_saved = 0

    def want_best(self, clock: Clock) -> None:
        """Keep the present policy as the best so far."""
        self.best_step, self._best_is_new = step_of(clock), True

    def save_if_due(self, clock: Clock, urgent: bool = False) -> bool:
        """Save if the schedule, wall-clock time, the end of the run or an urgent stop requires it.

        Returns whether a checkpoint was saved from which the run can be resumed.
        """
        seconds, last = self._config.seconds, self._last_save
        late = seconds is not None and self._ranks.from_first(
            lambda: time.monotonic() - last >= seconds
        )
        due = clock.finished or clock.is_due(self._every)
        # Only scheduled saves are counted: the count is state, and a run that was stopped and
        # resumed must end with the same state.
        self.num_saved += due
        wanted = urgent or late or due
        if wanted or self._best_is_new or clock.is_due(self._compare_every):
            if isinstance(self._algorithm, Shared):
                self._algorithm.gather()
            self._compare(clock)
        if wanted or self._best_is_new:
            self._folder.check_writer()
            for part in self._parts.values():
                if isinstance(part, ReadsFiles):
                    part.check_unchanged()
        if wanted:
            self._save(clock)
        elif self._best_is_new and self._ranks.is_first:
            folder, policy = self._folder.checkpoints, self._algorithm.policy_parts()
            checkpoint.save(folder, step_of(clock), policy, training=None)
        self._mark_best()
        return wanted

    def _compare(self, clock: Clock) -> None:
        """Raise an error if ranks differ in weights, optimizer or statistics."""
        learned = self._algorithm
        if others := self._ranks.differing(
            lambda: digest({"policy": learned.policy_parts()[0], "rest": learned.state_dict()})
        ):
            raise EtudeError(
                f"Rank 0 and {named(others)} no longer have the same weights, at step "
                f"{step_of(clock):,}: a hardware error, or your code depends on the rank. Nothing "
                "was saved since they last agreed; `etude resume` continues from there."
            )

    def _mark_best(self) -> None:
        if self._best_is_new and self.best_step is not None and self._ranks.is_first:
            checkpoint.mark(self._folder.checkpoints, "best", self.best_step)
        self._best_is_new = False

    def _save(self, clock: Clock) -> None:
        folder, step = self._folder.checkpoints, step_of(clock)
        for name, part in self._parts.items():
            if isinstance(part, Shared) and name != "algorithm":  # already gathered to compare
                part.gather()
        training = self.training_state()
        if not self._ranks.is_first:
            return
        path = checkpoint.save(folder, step, self._algorithm.policy_parts(), training)
        self._remember(path.name, training)
        if clock.finished:
            checkpoint.mark(folder, "final", step)
        self._mark_best()
        checkpoint.retain(folder, self._config.keep_last, self._config.keep_every)
        self._retire()
        self._folder.publish()
        self._last_save = time.monotonic()

    def _retire(self) -> None:
        """Let the algorithm delete files that no checkpoint needs any more."""
        kept = [path.name for path in checkpoint.resumable(self._folder.checkpoints)]
        self._saved = {name: self._saved[name] for name in kept if name in self._saved}
        if len(self._saved) == len(kept):  # An unknown checkpoint may need any file.
            self._algorithm.retire(list(self._saved.values()))

    def _remember_all(self, newest: Path, training: Tree) -> None:
        self._remember(newest.name, training)
        for path in checkpoint.resumable(self._folder.checkpoints):
            if path != newest:
                with suppress(checkpoint.DamagedCheckpoint):
                    self._remember(path.name, checkpoint.load_document(path))

    def _remember(self, name: str, training: Tree) -> None:
        # The names of files are needed, and arrays may be large.
        self._saved[name] = without_arrays(training["algorithm"])

    def training_state(self) -> Tree:
        state: Tree = {name: part.state_dict() for name, part in self._parts.items()}
        state["saver"] = {"best": self.best_step, "num_saved": self.num_saved}
        state[RUN] = self._folder.copies()
        return state

    @waiting("reading the checkpoint")
    def restore(self, clock: Clock, say: Say, step: int | None = None) -> bool:
        """Restore every part from the newest intact checkpoint; False if there is none.

        With `step`, from the checkpoint of that step; later ones are set aside. If its replay is
        damaged, it is set aside for the one before, if that is intact: otherwise nothing changes.
        """
        folder, before = self._folder.checkpoints, None
        if step is not None:
            self._ranks.from_first(lambda: checkpoint.check_step(folder, step))
            before = step + 1
        damage: list[Damaged] = []
        while found := self._ranks.from_first(partial(self._newest, say, before)):
            try:
                self._load(found, clock)
            except Damaged as error:
                damage.append(error)
                before = int(found[0])
                if step is not None:
                    break
                say(f"{error} The checkpoint of step {before:,} needs it; trying the one before.")
                continue
            if before is not None and self._ranks.is_first:
                checkpoint.roll_back(folder, int(found[0]), say)
            return True
        if damage:
            self._newest(say)  # restores `latest`
            raise EtudeError(
                f"{damage[0]} No checkpoint that was tried can be resumed without it; the policies "
                f"are intact, and --from {self._folder.path} starts a new run from the newest."
            )
        return False

    def _load(self, found: tuple[str, Tree, Tree], clock: Clock) -> None:
        name, arrays, training = found
        path = self._folder.checkpoints / name
        self.load(path, arrays, renumbered(training))
        if self._ranks.is_first:
            self._remember_all(path, training)
            self._mark_again(clock)

    def load(self, path: Path, arrays: Tree, training: Tree) -> None:
        """Restore every part from the policy and the training state of a checkpoint; no file is
        changed. path: of the checkpoint, for errors."""
        missing = sorted(self._parts.keys() - training.keys())
        if missing:
            raise UsageError(
                f"{path} has no state of {', '.join(missing)}: resume with the callbacks that the "
                "run was started with."
            )
        with checkpoint.explain_mismatch(path, "policy"):
            self._algorithm.load_policy(arrays)
        for name, part in self._parts.items():
            with checkpoint.explain_mismatch(path, f"state of '{name}'"):
                part.load_state_dict(training[name])
        with checkpoint.explain_mismatch(path, "state of 'saver'"):
            self.best_step = training["saver"]["best"]
            self.num_saved = int(training["saver"]["num_saved"])

    def _newest(self, say: Say, before: int | None = None) -> tuple[str, Tree, Tree] | None:
        """Name, policy and training state of the newest checkpoint that verifies."""
        path = checkpoint.newest_verified(self._folder.checkpoints, say, before=before)
        if path is None:
            return None
        arrays, _, training = checkpoint.load_training(path)
        return path.name, arrays, training

    def _mark_again(self, clock: Clock) -> None:
        """Repeat the marks of a save, since the process may have been killed before them."""
        folder = self._folder.checkpoints
        if self.best_step is not None and checkpoint.exists(folder, self.best_step):
            checkpoint.mark(folder, "best", self.best_step)
        if clock.finished:
            checkpoint.mark(folder, "final", step_of(clock))


def step_of(clock: Clock) -> int:
    """The number of a checkpoint: environment steps, or updates if nothing is collected."""
    return clock.now.timesteps if clock.loops.steps_per_iteration else clock.now.updates


def renumbered(training: Tree) -> Tree:
    """A training state with its callbacks, callback-NUMBER-Class, numbered from 0 on.

    Earlier versions also counted callbacks without state, of which the screen has some.
    """
    found = [re.fullmatch(r"callback-(\d{1,9})-(.+)", name) for name in training]
    callbacks = sorted(filter(None, found), key=lambda each: int(each[1]))
    names = {each[0]: f"callback-{i}-{each[2]}" for i, each in enumerate(callbacks)}
    return {names.get(name, name): state for name, state in training.items()}
