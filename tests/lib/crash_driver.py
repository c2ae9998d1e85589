"""Runs on recording file systems, in several lives, of which all but the last end by a kill.

    python crash_driver.py '[["RECIPE.yaml", "MOUNT", ["iteration=5", "end"]], ...]'

A life is "end", or where it is killed: "iteration=5" in the middle of that iteration's update, or
"call=12" after so many calls of `runs.files.Disk`. The recording is marked where the folder was
made ("created"), before a checkpoint was put in place ("saving STEP HASH") and where its save had
returned ("saved STEP").
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import tensorboard.summary.writer.record_writer  # noqa: F401  once, and not in every child

import etude
from etude.core.contracts import BatchMetrics
from etude.core.trees import Tree, digest
from etude.planning import recipes
from etude.planning.recipes import Recipe
from etude.runs import checkpoint, files
from etude.runs.folder import RunFolder
from etude.training.loop import Callback, Context
from recording_fs import mark

RUN = "runs/run"
"""The run, below the mount."""
KILLED = 9


def content_hash(arrays: Tree, contract: Tree, training: Tree) -> str:
    """All of a checkpoint, as one hash."""
    return digest({"arrays": arrays, "contract": contract, "training": training})


class KilledAt(Callback):
    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if context.clock.now.iterations == self._iteration:
            os._exit(KILLED)


class Mortal(files.Disk):
    """Dies after so many calls."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name == "close":
            return found

        def call(*arguments: Any) -> Any:
            if self._left == 0:
                os._exit(KILLED)
            self._left -= 1
            return found(*arguments)

        return call


def mark_saves(mount: Path) -> None:
    save, put, create = checkpoint.save, checkpoint._put_in_place, RunFolder.create

    def marked_put(temporary: Path, target: Path) -> None:
        if (temporary / "training").exists():
            content = content_hash(*checkpoint.load_training(temporary))
            mark(mount, f"saving {int(target.name)} {content}")
        put(temporary, target)

    def marked_save(folder: Path, step: int, policy: Any, training: Any) -> Path:
        path = save(folder, step, policy, training)
        if training is not None:
            mark(mount, f"saved {step}")
        return path

    def marked_create(*arguments: Any) -> RunFolder:
        folder = create(*arguments)
        mark(mount, "created")
        return folder

    checkpoint.save, checkpoint._put_in_place = marked_save, marked_put
    RunFolder.create = marked_create  # type: ignore[method-assign]


def live(recipe: Recipe, mount: Path, life: str) -> None:
    """One life, in a child: train, or go on with what is there."""
    mark_saves(mount)
    ends, _, number = life.partition("=")
    callbacks = [KilledAt(int(number))] if ends == "iteration" else []
    with files.using(Mortal(int(number)) if ends == "call" else files.Disk()):
        if (mount / RUN).exists():
            etude.resume(mount / RUN, callbacks=callbacks)
        else:
            etude.train(recipe, mount / RUN, callbacks=callbacks)


def forked(recipe: Recipe, mount: Path, life: str) -> int:
    """How a life ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(recipe, mount, life)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for file, mount, lives in json.loads(sys.argv[1]):
        recipe = recipes.load(Path(file), trust=True)
        etude.plan(recipe)  # Imports what every child would have to.
        for life in lives:
            code = forked(recipe, Path(mount), life)
            if code != (0 if life == "end" else KILLED):
                sys.exit(f"the life {life!r} of {recipe.name} ended with {code}")


if __name__ == "__main__":
    main()
