"""The command line: verb, target, --section.key value. Each verb is a module of this folder."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.metadata import version

from etude.cli.verbs import HELP, HELP_ALL, OFTEN, Verbs, later, run_verb
from etude.core import output, progress
from etude.core.catalogue import RECIPES
from etude.core.errors import EtudeError, UsageError

USAGE = """\
etude trains robot skills.

  etude list [--kinds]                        recipes, or algorithms, environments, policies ...
  etude plan   RECIPE [--section.key value]   what a run would do; --measure, --compare, --json
  etude train  RECIPE [--section.key value]   plan, then train
  etude resume RUN                            continue a run, bit for bit
  etude slurm  RECIPE --time 4:00:00          a batch script that trains through time limits
  etude kubernetes RECIPE --image IMAGE       the same as a Job for Kubernetes
  etude runs   [FOLDER]                       runs with state, steps, success, age and size
  etude prune  [FOLDER]                       frees what no run needs any more, asking first
  etude eval   RUN... [--checkpoint all]      fresh episodes of one run or several, --video films
                                              them; --env.NAME VALUE changes their environment
  etude sweep  RECIPE --vary section.key=...  many trials, of which the best go on; --resume FOLDER
  etude compare RUN... [--at STEPS]           which is better: curves and scores over seeds
  etude report RUN... [-o page.html]          a page about them, to open without a network
  etude play   RUN [--web]                    watch the policy in MuJoCo's viewer, or the browser
  etude demo   [reach|pick-place|walk-go1]    a trained policy that comes with this package
  etude export RUN --to DIR                   the policy as ONNX, with what it reads and does
  etude bundle RUN [--to X.tar] [--upload]    a run to share: policy, ONNX, recipe, films, a card
  etude verify BUNDLE [--retrain]             is it whole, and does it come out here as well
  etude view   TASK [--policy zero|random|RUN] [--web]
                                              a film of a task before it is trained, or the browser
  etude new-task ROBOT.xml                    a task for a robot, as a file to change
  etude check  TASK                           does an environment keep its contract
  etude data   inspect|import|record|...      datasets of demonstrations; `etude data` lists all
  etude motion list|show CLIP                 clips of motion that a humanoid can imitate
  etude fsck   RUN                            which files of it are whole, what can be saved
  etude doctor                                what this machine can and cannot do
  etude completion bash|zsh                   a script that completes these in a shell
  etude --version                             the version of this package

RECIPE is a name from `etude list`, a recipe.yaml or FILE.py:FUNCTION; RUN is a run folder; TASK is
module:Class or a Gymnasium id. Your own: `etude train ppo` with `--env.id ID` for Gymnasium,
`--env.kind FILE.py:Class` for a MuJoCo task, or `--env.task FILE.py:Class` for a task in numpy.
`etude train --help` shows what is changed most often, `etude train RECIPE --help-all` every field.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    try:
        with output.nonblocking_output(strict=arguments[:1] not in _TRAINING):
            return _code(arguments)
    except output.OutputLost as error:  # only at the end of the command
        if str(error):
            print(error, file=sys.stderr)
        return error.exit_code


_TRAINING = (["train"], ["resume"], ["sweep"])
"""Commands whose result is a run folder: what they print only reports."""


def _code(arguments: list[str]) -> int:
    """Run one command, with errors as sentences; the exit code."""
    # Of several ranks the first speaks.
    shown = progress.show_on(sys.stderr if os.environ.get("RANK", "0") == "0" else None)
    try:
        return _run(arguments)
    except EtudeError as error:
        if str(error):  # The first of several ranks speaks for all; the others only leave.
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        trains = arguments[:1] in _TRAINING
        begun = "; a run that had begun goes on with `etude resume RUN`" if trains else ""
        print(f"Stopped{begun}.", file=sys.stderr)
        return 128 + signal.SIGINT
    except MemoryError:  # there was none left to say more
        print("Out of memory. Nothing that was saved is lost.", file=sys.stderr)
        return EtudeError.exit_code
    except BrokenPipeError:  # where the output is not a file of the system's
        return 128 + signal.SIGPIPE
    finally:
        progress.show_on(shown)


def _run(arguments: list[str]) -> int:
    """Run one command. Errors of libraries become sentences; these are imported only then."""
    if arguments[:1] == ["--version"]:
        print(f"etude {version('etude')}")
        return 0
    try:
        return run_verb("etude", USAGE, VERBS, arguments)
    except EtudeError:
        raise
    except Exception as error:
        from etude.core.explain import explain
        from etude.planning.out_of_memory import explained

        with explained():
            from pydantic import ValidationError

            if not isinstance(error, ValidationError):
                raise
            raise UsageError(explain(error, None)) from error


def _with_recipe(verb: str) -> Callable[[list[str]], int | None]:
    """A command that takes a recipe first; where none is named, nothing is imported."""

    def run(arguments: list[str]) -> int | None:
        if arguments and not arguments[0].startswith("-"):
            return later(f"etude.cli.{verb}")(arguments)
        if not HELP.intersection(arguments):
            names = ", ".join(RECIPES.names())
            raise UsageError(f"Name a recipe first: etude {verb} RECIPE ... (one of {names}).")
        if HELP_ALL in arguments:
            return later(f"etude.cli.{verb}")(["ppo", HELP_ALL])
        print(_page(verb), end="")
        return 0

    return run


def _page(verb: str) -> str:
    """Help on a command that takes a recipe, where none is named."""
    recipes = textwrap.wrap(", ".join(RECIPES.names()), 76, break_on_hyphens=False)
    often = [f"  --{name:<26}{text}" for name, text in OFTEN.items()]
    steps = " --clock.total-timesteps 1e5"
    lines = [
        f"usage: etude {verb} RECIPE [--section.field value ...]",
        "",
        _ABOUT[verb],
        "RECIPE is a recipe.yaml, FILE.py:FUNCTION, or one of",
        *(f"  {line}" for line in recipes),
        "",
        f"  etude {verb} reach --seed 1 --algorithm.learning-rate 1e-4{_NEEDED.get(verb, '')}",
        f"  etude {verb} ppo --env.id CartPole-v1{_NEEDED.get(verb, steps)}",
        "",
        "Often changed:",
        *often,
        *_OWN[verb],
        "",
        f"`etude {verb} RECIPE --help` shows these with the recipe's values, and `etude {verb}",
        f"RECIPE {HELP_ALL}` every field.",
    ]
    return "\n".join(lines) + "\n"


_ABOUT = {
    "plan": "What a run would do, without doing it.",
    "train": "Plan a run, then do it.",
    "slurm": "A batch script for Slurm that trains in slices, until the run is finished.",
    "kubernetes": "A Job for Kubernetes that trains in slices, until the run is finished.",
}
_NEEDED = {"slurm": " --time 4:00:00", "kubernetes": " --image REGISTRY/etude:TAG"}
_SLICES = [
    "  --time                      time limit of a slice: 4:00:00, 90 (minutes), 1-12 (days-hours)",
    "  --margin                    seconds before it at which the run is asked to save itself",
    "  -o                          the file to write; - prints it",
]
_OWN = {
    "plan": [
        "  --measure                   time a few iterations and estimate the time of the run",
        "  --time                      with --measure: how many slices of this length it takes",
        "  --compare FIELD=A,B,C       plans for several values of a field",
        "  --json                      print JSON, for programs",
    ],
    "train": [
        "  --folder                    the run's folder",
        "  --seeds                     runs of so many seeds, side by side where cores allow",
    ],
    "slurm": _SLICES,
    "kubernetes": [
        "  --image                     the image that Etude is installed in",
        "  --claim                     the PersistentVolumeClaim that runs are kept on",
        *_SLICES,
    ],
}


def _completion(arguments: list[str]) -> int:
    from etude.cli.completion import run

    return run(arguments, [*VERBS])


VERBS: Verbs = {
    "list": later("etude.cli.list"),
    "plan": _with_recipe("plan"),
    "train": _with_recipe("train"),
    "resume": later("etude.cli.resume"),
    "slurm": _with_recipe("slurm"),
    "kubernetes": _with_recipe("kubernetes"),
    "runs": later("etude.cli.runs"),
    "prune": later("etude.cli.prune"),
    "eval": later("etude.cli.evaluate"),
    "sweep": later("etude.cli.sweep"),
    "compare": later("etude.cli.compare"),
    "report": later("etude.cli.report"),
    "play": later("etude.cli.play"),
    "demo": later("etude.cli.demo"),
    "export": later("etude.cli.export"),
    "bundle": later("etude.cli.bundle"),
    "verify": later("etude.cli.verify"),
    "view": later("etude.cli.view"),
    "new-task": later("etude.cli.new_task"),
    "check": later("etude.cli.check"),
    "data": later("etude.cli.data"),
    "motion": later("etude.cli.motion"),
    "fsck": later("etude.cli.fsck"),
    "doctor": later("etude.cli.doctor"),
    "completion": _completion,
}
