"""A run in slices: what commands that write batch scripts share, and the shell of one slice."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from etude.api import plan
from etude.building.executing import SUMMARY
from etude.cli.options import parse
from etude.cli.seeds import passed_on
from etude.cli.target import Recipe_, Trusting, find_target
from etude.core.errors import RESUMABLE, UsageError
from etude.core.units import duration
from etude.planning.recipe import Recipe
from etude.runs import files

MARGIN = 120
"""Seconds before the end of a slice at which a run is asked to save itself."""
START = 60
"""Seconds that a slice is expected to take until it trains: imports, environments, checkpoint."""
_LEFT = 15
"""Seconds of the margin that are left to the script, for what it does after the run has ended."""
_GIB = 1 << 30
ALIASES = {"time": "time_limit walltime limit", "out": "output"}
_FORMS = "4:00:00 (hours:minutes:seconds), 90 (minutes) or 1-12 (days-hours)"


class Slicing(Trusting):
    """A command that writes a batch script for a run, slice by slice."""

    recipe: Recipe_
    folder: str | None = Field(None, description="The run's folder; default: a new one in runs/.")
    margin: int = Field(
        MARGIN,
        ge=30,
        description="Seconds before a slice's end at which the run is asked to save itself: more "
        "than an iteration with its evaluation takes.",
    )
    memory: float | None = Field(
        None,
        gt=0,
        description="GiB of memory to ask for; default: by the plan, with room to spare.",
    )
    out: str | None = Field(
        None, description="The file to write, - prints it; -o is short; default: by the recipe."
    )

    @property
    def cores(self) -> int:
        """The cores that the recipe's threads use at once."""
        collector = self.recipe.collector
        return max(
            collector.threads * max(collector.engine_threads, 1), self.recipe.learner.threads
        )

    def gib(self) -> int:
        """Memory to ask for; raises where the recipe cannot run at all."""
        planned = plan(self.recipe).bytes["peak"] / _GIB
        return math.ceil(self.memory or 2 + 1.5 * planned)

    @property
    def gpus(self) -> int:
        return int(self.recipe.learner.device == "cuda")

    @property
    def name(self) -> str:
        """The recipe's name, as a file can be called."""
        return re.sub(r"[^\w.-]+", "-", self.recipe.name).strip(".-") or "run"

    def write(self, text: str, name: str) -> str | None:
        """Write the file, never over another one, or print it; the file's name, if there is one."""
        if self.out == "-":
            print(text, end="")
            return None
        path = Path(self.out or name)
        if path.exists() and path.read_text(errors="replace") != text:
            raise UsageError(f"{path} exists already: remove it, or name another file with -o.")
        files.make_folder(path.absolute().parent)
        files.replace_file(path, [text.encode()])
        return str(path)


class Slice(NamedTuple):
    """What is needed to write a script: the command, and the arguments of the run it starts."""

    command: Slicing
    arguments: list[str]


def parsed(verb: str, kind: type[Slicing], arguments: list[str], own: tuple[str, ...]) -> Slice:
    """The command from its arguments; own: names of options of its class alone."""
    recipe, rest = find_target(["--out" if word == "-o" else word for word in arguments])
    command = parse(f"{verb} {recipe.name}", kind, rest, kind(recipe=recipe))
    if command.recipe.collector.kind != "local":
        raise UsageError(
            f"etude {verb} is for runs on one machine: leave --collector out; docs/cluster.md has "
            "scripts for several machines with Ray."
        )
    names = (*own, "folder", "margin", "memory", "out")
    return Slice(command, passed_on([arguments[0], *rest], names))


def seconds_of(text: str) -> int:
    """Seconds of a time limit as Slurm writes them: 90, 90:00, 4:00:00, 1-12, 1-12:30:00."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", text):
        raise UsageError(f"--time is such as {_FORMS}, not '{text}'.")
    if dash:
        hours, minutes, seconds = map(int, [*parts, "0", "0"][:3])
    elif len(parts) == 1:
        hours, minutes, seconds = 0, int(parts[0]), 0
    else:
        hours, minutes, seconds = map(int, ["0", *parts][-3:])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def limit_of(text: str | None, margin: int = MARGIN) -> int:
    """Seconds of a slice; refuses one that has no time to train."""
    if text is None:
        raise UsageError(f"Say how long a slice may take: --time {_FORMS}.")
    limit = seconds_of(text)
    if limit < 2 * margin + START:
        raise UsageError(
            f"--time {text} is {duration(limit)}, which leaves no time to train: a slice takes "
            f"about {START} s to start and is saved {margin} s before its end. Written {_FORMS}."
        )
    return limit


def num_slices(seconds: float, limit: int, margin: int = MARGIN) -> int:
    """How many slices of a length a run of so many seconds takes."""
    return max(math.ceil(seconds / (limit - margin - START)), 1)


def in_slices(seconds: float, text: str | None) -> tuple[dict[str, int], str]:
    """How many slices a run takes, for programs and as a sentence; text: how long one may take."""
    limit = limit_of(text)
    count = num_slices(seconds, limit)
    trains = limit - MARGIN - START
    return (
        {"count": count, "seconds": limit},
        f"{count:,} slice{'s' if count > 1 else ''} of {duration(limit)}; a slice trains for "
        f"{duration(trains)}, and the rest is for its start and its end",
    )


_SHELL = f"""\
run=@RUN
if [ -e "$run" ]; then
    set -- @RESUME "$run"
else
    set -- @TRAIN --folder "$run"
fi
saved() {{ readlink "$run/checkpoints/latest" || cat "$run/checkpoints/latest" 2> /dev/null; }}
before=$(saved)

# Signals are passed on: the run saves at the end of its iteration and exits with {RESUMABLE}.
signals=0 time_is_up=
trap 'time_is_up=1 signals=$((signals + 1)); kill -USR1 "$child"' USR1
trap 'time_is_up= signals=$((signals + 1)); kill -TERM "$child"' TERM
"$@" &
child=$!
while seen=$signals; do
    wait "$child"
    code=$?
    [ "$signals" = "$seen" ] && break # otherwise a signal has ended the wait, and not the run
done

case $code in
0) # a library may end the process in the middle: a finished run has its summary
    if [ ! -e "$run/{SUMMARY}" ]; then
        echo "The process ended with code 0 before the run was finished: see above." >&2
        code=1
    fi
    ;;
{RESUMABLE} | 138 | 143) # saved, or ended by a signal where it stood: a resume goes on
    if [ "$(saved)" = "$before" ]; then
        echo "Nothing was saved in this slice, so another would not help: give it more time." >&2
        exit 1
    fi
    code={RESUMABLE}
    ;;
esac
"""


def shell(run: str, program: list[str], arguments: list[str], trust: bool = False) -> str:
    """Shell commands that do one slice: $code is 0 of a run that is finished, and 75 of one that
    another slice can go on with.

    program: how `etude` is called; arguments: those of `etude train`; trust: resumes may run the
    code that the recipe names.
    """
    resume = [*program, "resume", *(["--trust"] if trust else [])]
    train = [*program, "train", *arguments]
    texts = {"@RUN": [run], "@RESUME": resume, "@TRAIN": train}
    script = _SHELL
    for place, words in texts.items():
        script = script.replace(place, shlex.join(words), 1)
    return script


def with_grace(recipe: Recipe, margin: int) -> list[str]:
    """Options that give a run the whole margin to reach the end of its iteration."""
    if recipe.checkpoint.grace is not None:
        return []
    return ["--checkpoint.grace", str(max(margin - _LEFT, _LEFT))]
