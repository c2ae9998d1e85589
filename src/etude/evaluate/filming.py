"""Films of a policy while it trains, drawn in a process of their own.

A driver that crashes while it draws then ends that process and not the run, and the random numbers
and threads of the run are untouched. The film of a step is in evaluations/<step>-film of its run;
logs of pictures find it there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from etude.core.clock import Interval
from etude.core.contracts import Fragment
from etude.core.keys import Key
from etude.core.output import notices, waiting
from etude.runs import checkpoint, files
from etude.runs.folder import FILM, RunFolder
from etude.training.loop import Callback, Context
from etude.training.saving import step_of

SECONDS, EPISODES = 5.0, 2
"""Longest film, and most episodes in it."""
_PATIENCE = 120.0
"""Seconds that the end of a run waits for its last film."""


class Filming(Callback):
    """Films the policy at regular intervals, one film at a time; of those that wait, the newest."""

    def __init__(self, folder: Path, every: str) -> None:
        self._folder, self._every = folder, Interval.parse(every)
        self._child: _Child | None = None
        self._next: tuple[int, Path] | None = None
        self._slow = False

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        """Begin a film if it is due."""
        self._proceed(0.0)
        step = step_of(context.clock)
        if (
            not context.clock.is_due(self._every)
            or (film_folder(self._folder, step) / FILM).exists()
        ):
            return  # a resume repeats steps
        if self._next is not None:
            self._leave_out(*self._next)
        scratch = Path(tempfile.mkdtemp(prefix="etude-film-"))
        policy = context.algorithm.policy_parts()
        self._next = step, checkpoint.save(scratch, step, policy, training=None)
        self._proceed(0.0)

    def run_end(self, context: Context) -> None:
        """Wait for the last film, which the logs take before they are closed."""
        with waiting("drawing the last film"):
            while self._child is not None:
                self._proceed(_PATIENCE)

    def _proceed(self, patience: float) -> None:
        """Wait for the process if there is one, and start that of the next film."""
        if self._child is not None:
            if not self._child.ended(patience):
                self._child = self._child if not patience else None  # it ends by itself
                return
            self._child = None
        if self._next is not None:
            (step, policy), self._next = self._next, None
            self._child = _Child(self._folder, policy, step)

    def _leave_out(self, step: int, policy: Path) -> None:
        shutil.rmtree(policy.parent, ignore_errors=True)
        if not self._slow:
            self._slow = True
            notices.add(
                f"There is no film of step {step:,}, because drawing takes longer than training: "
                "a longer evaluation.film_every gives it time."
            )


class _Child:
    """The process that draws the film of a step, and removes the policy's temporary folder."""

    def __init__(self, folder: Path, policy: Path, step: int) -> None:
        self._step, self._errors = step, tempfile.TemporaryFile()  # noqa: SIM115 - read at its end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "etude.evaluate.filming", str(folder), str(policy), str(step)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl+C is for the run
        )

    def ended(self, patience: float) -> bool:
        """Whether it has ended within some seconds; a failure is reported."""
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return False
        if code:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"its process ended with {code}"
            notices.add(f"There is no film of step {self._step:,}: {why}")
        self._errors.close()
        return True


def film_folder(run: Path, step: int) -> Path:
    """The folder of the film of a step."""
    path = RunFolder(run).evaluation(step)
    return path.with_name(f"{path.name}-film")


def draw(run: Path, policy: Path, step: int) -> None:
    """Film episodes of the policy of a step: a webp, and a smaller gif for logs."""
    from etude.evaluate import film
    from etude.evaluate.footage import footage
    from etude.evaluate.playing import Player, load_actor, outcome
    from etude.planning import recipes
    from etude.planning.loading import env_with_sentence
    from etude.runs.folder import RECIPE

    recipe = recipes.load(run / RECIPE, trust=True)  # this process belongs to its training
    film.check_tools()
    task = env_with_sentence(recipe.task.for_evaluation().for_film(film.SMALL), policy)
    env = task.make(task.num_agents)
    film.check_env(env, task.kind)
    player = Player(env, load_actor(policy, env, trust=True), Key(recipe.seed).child("film"))
    title = f"{recipes.title(recipe)}, step {step:,}"
    scenes = [
        film.Scene(footage(env, recording), title, f"episode {each.number}", *outcome(each))
        for each, recording in player.record(SECONDS, EPISODES)
    ]
    to = film_folder(run, step)
    files.make_folder(to)
    with tempfile.TemporaryDirectory(dir=policy.parent) as scratch:
        gif = Path(scratch) / FILM
        webp = gif.with_suffix(".webp")
        film.write_small(scenes, webp, gif)
        for file in (webp, gif):  # the last one shows that it is complete
            if file.exists():
                files.replace_file(to / file.name, [file.read_bytes()])


def main(run: str, policy: str, step: str) -> int:
    """Draw the film of a step, and remove the policy's temporary folder; the exit code."""
    os.nice(10)
    from etude.core.errors import EtudeError, describe_error

    try:
        draw(Path(run), Path(policy), int(step))
    except Exception as error:
        text = str(error) if isinstance(error, EtudeError) else f"{describe_error(error)}."
        print(" ".join(text.split()), file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(Path(policy).parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
