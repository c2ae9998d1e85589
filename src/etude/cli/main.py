"""The command line: `etude VERB TARGET --section.key value`."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from importlib.metadata import version

from etude.cli.verbs import HELP, HELP_ALL, OFTEN, Command, Verbs, lazy, run_verb
from etude.core import output
from etude.core.catalogue import RECIPES
from etude.core.errors import EtudeError, UsageError

USAGE = """\
etude trains robot skills.

  etude list [--kinds]                        recipes; or algorithms, environments, policies, ...
  etude plan   RECIPE [--section.key value]   steps, shapes, memory and time of a run, before it
                                              starts; --measure, --compare, --json
  etude train  RECIPE [--section.key value]   plan a run, then train it
  etude resume RUN                            continue a run, bit for bit
  etude slurm  RECIPE --time 4:00:00          write a batch script that trains through time limits
  etude kubernetes RECIPE --image IMAGE       write a Job for Kubernetes that does the same
  etude skypilot RECIPE --folder s3://...     write a job on spot machines that does the same
  etude runs   [FOLDER]                       list runs: state, steps, success, age and size
  etude prune  [FOLDER]                       list files that no run needs; --yes deletes them
  etude eval   RUN... [--checkpoint all]      evaluate runs on new episodes; --video films them,
                                              --env.FIELD VALUE changes the environment
  etude sweep  RECIPE --vary section.key=...  train many trials, and continue only the best;
                                              --resume FOLDER
  etude compare RUN... [--at STEPS]           compare runs: curves and scores over seeds
  etude report RUN... [-o page.html]          write a page about runs that opens without a network
  etude replay RUN --at STEP [--env I]        show any training episode again, bit for bit: a page
                                              with a timeline, a film, a table, a dataset
  etude inspect RUN --at STEP                 show losses, gradients, samples and activations of the
                                              learner in an iteration; two steps side by side
  etude bisect RUN_A RUN_B                    find the iteration, phase and number in which two runs
                                              first differ; RECIPE --between GOOD,BAD: the commit
  etude fork   RUN --at STEP --section.key value
                                              branch a run at a step with another setting
  etude play   RUN [--web]                    watch the policy in MuJoCo's viewer, or the browser
  etude demo   [reach|pick-place|walk-go1]    watch a trained policy that comes with this package
  etude export RUN --to DIR                   export the policy as ONNX with its description
  etude bundle RUN [--to X.tar] [--upload]    pack a run to share: policy, ONNX, recipe, films, card
  etude verify BUNDLE [--retrain]             check a bundle's files, and repeat its results
  etude view   TASK [--policy zero|random|RUN] [--web]
                                              film a task before it is trained, or show it live
  etude new-task ROBOT.xml                    write a task for a robot, as a file to edit
  etude check  TASK                           test whether an environment keeps the contract
  etude data   inspect|import|record|...      datasets of demonstrations; `etude data` lists all
  etude motion list|show|check|import         motions that a robot can track
  etude env    list|create NAME               Python environments for simulations that need other
                                              versions, for --env.python
  etude fsck   RUN                            check every file of a run, and what can be recovered
  etude doctor                                examine this machine: versions, speed, disk, rendering
  etude completion bash|zsh                   print a script that completes commands in a shell
  etude --version                             print the version of this package

RECIPE is a name from `etude list`, a recipe.yaml or FILE.py:FUNCTION; RUN is a run folder; TASK is
module:Class or a Gymnasium id. To train in your own environment: `etude train ppo` with --env.id ID
for Gymnasium, --env.kind FILE.py:Class for a MuJoCo task, or --env.task FILE.py:Class for a task in
numpy. `etude train --help` shows the options that are changed most often, and
`etude train RECIPE --help-all` all of them.
"""
_TRAINING = (["train"], ["resume"], ["sweep"])
"""Commands whose result is a run folder, so that a lost output does not end them."""
_READING = ("eval", "report", "compare", "play", "view", "export", "bundle", "verify", "fsck")
"""Commands that read folders of runs, for which runs in object stores are downloaded."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    try:
        with output.nonblocking_output(strict=arguments[:1] not in _TRAINING):
            return _run(arguments)
    except output.OutputLost as error:  # raised at the end of the command
        if str(error):
            print(error, file=sys.stderr)
        return error.exit_code


def _run(arguments: list[str]) -> int:
    """Run one command, with errors as sentences on stderr; the exit code."""
    is_first = os.environ.get("RANK", "0") == "0"  # of several ranks only the first prints
    before = output.show_on(sys.stderr if is_first else None)
    try:
        return _run_verb(arguments)
    except EtudeError as error:
        if str(error):  # empty on ranks whose error the first rank reports
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        trains = arguments[:1] in _TRAINING
        run = "; `etude resume RUN` continues a run that has started" if trains else ""
        print(f"Stopped{run}.", file=sys.stderr)
        return 128 + signal.SIGINT
    except MemoryError:  # without memory for a longer message
        print("Out of memory. Nothing that was saved is lost.", file=sys.stderr)
        return EtudeError.exit_code
    except BrokenPipeError:  # of an output that is not a file of the system
        return 128 + signal.SIGPIPE
    finally:
        output.show_on(before)


def _run_verb(arguments: list[str]) -> int:
    """Run one command, with errors of pydantic and torch as `EtudeError`."""
    if arguments[:1] == ["--version"]:
        print(f"etude {version('etude')}")
        return 0
    try:
        if arguments[:1] and arguments[0] in _READING and any("://" in text for text in arguments):
            from etude.cli.copies import downloaded

            with downloaded(arguments) as copied:
                return run_verb("etude", USAGE, VERBS, copied)
        return run_verb("etude", USAGE, VERBS, arguments)
    except EtudeError:
        raise
    except Exception as error:
        from etude.core.explain import explain
        from etude.planning.memory import explain_out_of_memory

        with explain_out_of_memory():
            from pydantic import ValidationError

            if not isinstance(error, ValidationError):
                raise
            raise UsageError(explain(error, None)) from error


def _with_recipe(verb: str, module: str, function: str = "run") -> Command:
    """A command whose first argument is a recipe; its help without one imports nothing."""
    command = lazy(module, function)

    def run(arguments: list[str]) -> int | None:
        if arguments and not arguments[0].startswith("-"):
            return command(arguments)
        if not HELP.intersection(arguments):
            raise UsageError(
                f"Name a recipe first: etude {verb} RECIPE ...; `etude list` shows them all."
            )
        if HELP_ALL in arguments:
            return command(["ppo", HELP_ALL])
        print(_help(verb), end="")
        return 0

    return run


def _help(verb: str) -> str:
    """Help on a command that takes a recipe, if none is named."""
    about, needed, options = _RECIPE_HELP[verb]
    names = textwrap.wrap(", ".join(RECIPES.names()), 76, break_on_hyphens=False)
    return _HELP.format(
        verb=verb,
        about=about,
        recipes="\n".join(f"  {line}" for line in names),
        needed=needed,
        options="\n".join(f"  --{name:<26}{text}" for name, text in OFTEN.items()) + options,
    )


_HELP = """\
usage: etude {verb} RECIPE [--section.field value ...]

{about}
RECIPE is a recipe.yaml, FILE.py:FUNCTION, or one of
{recipes}

  etude {verb} reach --seed 1 --algorithm.learning-rate 1e-4{needed}
  etude {verb} ppo --env.id CartPole-v1 --clock.total-timesteps 1e5{needed}

Often changed:
{options}

`etude {verb} RECIPE --help` shows these with the recipe's values, and
`etude {verb} RECIPE --help-all` shows all options.
"""
_SLICES = """
  --time                      time limit of a slice: 4:00:00, 90 (minutes), 1-12 (days-hours)
  --margin                    seconds before the limit at which the run is asked to save itself
  -o                          the file to write, or - to print it"""
_RECIPE_HELP = {
    "plan": (
        "Show the steps, shapes, memory and time of a run before it starts.",
        "",
        """
  --measure                   time a few iterations and estimate the time of the run
  --time                      with --measure: the number of slices of this length
  --compare FIELD=A,B,C       plans for several values of a field
  --json                      print JSON, for programs""",
    ),
    "train": (
        "Plan a run, then train it.",
        "",
        """
  --folder                    the run's folder
  --seeds                     number of runs with successive seeds, in parallel as cores allow""",
    ),
    "slurm": (
        "Write a batch script for Slurm that trains in slices until the run is finished.",
        " --time 4:00:00",
        _SLICES,
    ),
    "kubernetes": (
        "Write a Job for Kubernetes that trains in slices until the run is finished.",
        " --image REGISTRY/etude:TAG",
        """
  --image                     the container image with Etude installed
  --claim                     the PersistentVolumeClaim that holds the runs
  --folder                    the run's folder on the volume, or s3://BUCKET/PATH without a volume
  --secret                    the Secret with the environment variables of the object store
  --queue                     the LocalQueue of Kueue
  --jobset                    a JobSet instead of a Job"""
        + _SLICES,
    ),
    "skypilot": (
        "Write a managed job for SkyPilot that trains on spot machines until the run is finished.",
        " --folder s3://BUCKET/PATH",
        """
  --folder                    the run's URL in an object store
  --setup                     the shell command that installs Etude"""
        + _SLICES,
    ),
}
"""{command: (its purpose, options that must be given, other options of its own)}."""
VERBS: Verbs = {
    "list": lazy("etude.cli.list"),
    "plan": _with_recipe("plan", "etude.cli.plan"),
    "train": _with_recipe("train", "etude.cli.train"),
    "resume": lazy("etude.cli.train", "run_resume"),
    "slurm": _with_recipe("slurm", "etude.cli.slices", "run_slurm"),
    "kubernetes": _with_recipe("kubernetes", "etude.cli.slices", "run_kubernetes"),
    "skypilot": _with_recipe("skypilot", "etude.cli.slices", "run_skypilot"),
    "runs": lazy("etude.cli.runs", "run_list"),
    "prune": lazy("etude.cli.runs", "run_prune"),
    "eval": lazy("etude.cli.evaluate"),
    "sweep": lazy("etude.cli.sweep"),
    "compare": lazy("etude.cli.compare"),
    "report": lazy("etude.cli.report"),
    "replay": lazy("etude.cli.travel", "run_replay"),
    "inspect": lazy("etude.cli.travel", "run_inspect"),
    "bisect": lazy("etude.cli.travel", "run_bisect"),
    "fork": lazy("etude.cli.travel", "run_fork"),
    "play": lazy("etude.cli.watching", "run_play"),
    "demo": lazy("etude.cli.watching", "run_demo"),
    "export": lazy("etude.cli.share", "run_export"),
    "bundle": lazy("etude.cli.share", "run_bundle"),
    "verify": lazy("etude.cli.verify"),
    "view": lazy("etude.cli.watching", "run_view"),
    "new-task": lazy("etude.cli.new_task"),
    "check": lazy("etude.cli.check"),
    "data": lazy("etude.cli.data"),
    "motion": lazy("etude.cli.motion"),
    "env": lazy("etude.cli.env"),
    "fsck": lazy("etude.cli.fsck"),
    "doctor": lazy("etude.cli.doctor"),
    "completion": lazy("etude.cli.completion"),
}
