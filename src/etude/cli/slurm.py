"""`etude slurm`: a batch script that trains in slices and puts itself back into the queue."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from pydantic import Field

from etude.cli.slices import ALIASES, Slicing, limit_of, parsed, shell, with_grace
from etude.core.errors import RESUMABLE, UsageError
from etude.core.units import duration
from etude.runs import files
from etude.runs.finding import is_run
from etude.runs.folder import default_path


class SlurmCommand(Slicing):
    """A batch script for Slurm. The job trains for a slice, saves itself before the time limit and
    goes back into the queue, until the run is finished. Partition, account and the like are said to
    sbatch."""

    aliases = ALIASES

    time: str | None = Field(
        None,
        description="Time limit of a slice as Slurm writes it: 4:00:00, 90 (minutes) or 1-12 "
        "(days-hours). There is no default.",
    )


def run(arguments: list[str]) -> None:
    """Write the script."""
    given, words = parsed("slurm", SlurmCommand, arguments, ("time",))
    assert isinstance(given, SlurmCommand)
    limit, memory = limit_of(given.time, given.margin), given.gib()
    recipe = given.recipe
    folder = Path(given.folder) if given.folder else default_path(recipe.name, recipe.seed)
    begun = is_run(folder)
    if folder.exists() and not begun:
        raise UsageError(f"{folder} exists and is no run: name another folder.")
    name = f"{folder.parent.name}-{folder.name}" if given.folder is None else folder.name
    file = given.write(
        script(given, words, folder.absolute(), memory, name), f"{given.name}.sbatch"
    )
    if file is None:
        return
    files.make_folder(folder.absolute().parent)  # Slurm writes its log only where there is a folder
    print(f"Written: {file}, for slices of {duration(limit)} of the run {folder}")
    if begun:
        print("The run is there already: the job goes on with it, as its own recipe says.")
    print(f"Submit it: sbatch {shlex.quote(file)}")
    print(f"How many slices it takes: etude plan {shlex.join(words)} --measure --time {given.time}")


def script(given: SlurmCommand, arguments: list[str], folder: Path, memory: int, name: str) -> str:
    """The text of the script; folder: the run's; memory in GiB; name: the job's."""
    log = shlex.quote(f"{folder}.log".replace("%", "%%"))
    program = [sys.executable, "-P", "-m", "etude"]
    train = [*arguments, *with_grace(given.recipe, given.margin)]
    gpus = [f"#SBATCH --gpus={given.gpus}"] if given.gpus else []
    head = [
        "#!/bin/bash",
        "# A run in slices, made by `etude slurm`; submit it with sbatch. Exit codes: 0 finished,",
        f"# {RESUMABLE} saved and to be continued (submit it again), others as the log says.",
        f"#SBATCH --job-name={shlex.quote(name)}",
        f"#SBATCH --time={given.time}",
        f"#SBATCH --signal=B:USR1@{given.margin}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={log}",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        f"#SBATCH --cpus-per-task={given.cores}",
        f"#SBATCH --mem={memory}G",
        *gpus,
        "",
        f"cd {shlex.quote(os.getcwd())} || exit 1",
    ]
    return "\n".join(head) + "\n" + shell(str(folder), program, train) + _REQUEUE


_REQUEUE = f"""\
# Only the time limit brings it back: a job that was cancelled stays so, and one that was preempted
# is brought back by Slurm.
if [ "$code" = {RESUMABLE} ] && [ -n "$time_is_up" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "The run is saved, but the job could not be requeued: submit the script again." >&2
fi
exit "$code"
"""
