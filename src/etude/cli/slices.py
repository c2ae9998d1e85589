"""`etude slurm`, `kubernetes` and `skypilot`: batch scripts that train a run in slices of time."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import string
import sys
import textwrap
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pydantic import Field

from etude.api import plan
from etude.building.build import SUMMARY
from etude.cli.options import Trusting, parse, without_options
from etude.cli.target import Recipe_, find_target
from etude.core import user_code
from etude.core.errors import RESUMABLE, NonFinite, UsageError
from etude.core.output import duration
from etude.planning.recipes import texts, title
from etude.runs import files
from etude.runs.files import store_url
from etude.runs.finding import is_run
from etude.runs.folder import default_path, file_name
from etude.runs.objects import checked_url

MARGIN = 120
"""Seconds before the end of a slice at which a run is asked to save itself."""
START = 60
"""Expected seconds of a slice before its first step: imports, environments, checkpoint."""
_LEFT = 15
"""Seconds of the margin that the script keeps for its work after the end of the run."""
_GIB = 1 << 30
_MOUNT = PurePosixPath("/runs")
"""Where the volume is mounted in a pod."""
_FORMS = "4:00:00 (hours:minutes:seconds), 90 (minutes) or 1-12 (days-hours)"


class SliceCommand(Trusting):
    """A command that writes a batch script for a run in slices."""

    aliases = {"time": "time_limit walltime limit", "out": "output"}  # noqa: RUF012

    recipe: Recipe_
    folder: str | None = Field(
        None,
        description="The run's folder, or its URL in an object store; default: a new one in runs/.",
    )
    time: str | None = None
    margin: int = Field(
        MARGIN,
        ge=30,
        description="Seconds before a slice's end at which the run is asked to save itself: more "
        "than an iteration with its evaluation takes.",
    )
    memory: float | None = Field(
        None, gt=0, description="GiB of memory to request; default: 2 + 1.5 times the plan's peak."
    )
    out: str | None = Field(
        None,
        description="The file to write, or - to print it; -o is short; default: the recipe's name.",
    )

    @property
    def cores(self) -> int:
        """The cores that the recipe's threads use at once."""
        collector = self.recipe.collector
        return max(
            collector.threads * max(collector.engine_threads, 1), self.recipe.learner.threads
        )

    def memory_gib(self) -> int:
        """GiB of memory to request; raises if the recipe cannot be planned."""
        planned = plan(self.recipe).bytes["peak"] / _GIB
        return math.ceil(self.memory or 2 + 1.5 * planned)

    @property
    def url(self) -> str:
        """The run's place in an object store; "" for a folder."""
        return checked_url(self.folder) if self.folder and store_url(self.folder) else ""

    @property
    def gpus(self) -> int:
        return int(self.recipe.learner.device == "cuda")

    def train_options(self, words: list[str]) -> list[str]:
        """Arguments of `etude train`, with the margin as the time to end an iteration in."""
        if self.recipe.checkpoint.grace is not None:
            return words
        return [*words, "--checkpoint.grace", str(max(self.margin - _LEFT, _LEFT))]

    def write(self, text: str, name: str) -> str | None:
        """Write the file, never over another one, and return its name; None if it is printed."""
        if self.out == "-":
            print(text, end="")
            return None
        path = Path(self.out or name)
        if path.exists() and path.read_text(errors="replace") != text:
            raise UsageError(f"{path} exists already: remove it, or name another file with -o.")
        files.make_folder(path.absolute().parent)
        files.replace_file(path, [text.encode()])
        return str(path)


class SlurmCommand(SliceCommand):
    """A batch script for Slurm. The job trains for a slice, saves itself before the time limit and
    goes back into the queue until the run is finished. Give sbatch the partition, the account and
    other options."""

    time: str | None = Field(
        None,
        description="Time limit of a slice, in Slurm's format: 4:00:00, 90 (minutes) or 1-12 "
        "(days-hours). Must be given.",
    )


class KubernetesCommand(SliceCommand):
    """A Job for Kubernetes. A pod that is evicted, or that reaches --time, saves the run, and the
    next pod continues it until it is finished. A run in an object store needs no volume."""

    folder: str | None = Field(
        None,
        description="The run's folder on the volume, or its URL in an object store; default: "
        f"{_MOUNT}/<recipe>-s<seed>.",
    )
    time: str | None = Field(
        None,
        description="Time limit of a pod: 4:00:00, 90 (minutes) or 1-12 (days-hours); default: "
        "none.",
    )
    image: str | None = Field(
        None, description="The container image with Etude installed. Must be given."
    )
    claim: str = Field("runs", description="The PersistentVolumeClaim that holds the runs.")
    secret: str | None = Field(
        None,
        description="The Secret whose entries are the environment variables of the object store; "
        "default: none, for pods with a role.",
    )
    queue: str | None = Field(
        None, description="The LocalQueue of Kueue that admits the job; default: no queue."
    )
    jobset: bool = Field(False, description="Write a JobSet with this one job in it.")


class SkyPilotCommand(SliceCommand):
    """A managed job for SkyPilot on spot machines, for a run in an object store. A replacement
    continues the run wherever SkyPilot finds a machine."""

    folder: str | None = Field(
        None, description="The run's URL in an object store: s3://BUCKET/PATH. Must be given."
    )
    setup: str = Field(
        "pip install 'etude[store]'", description="The shell command that installs Etude."
    )


S = TypeVar("S", bound=SliceCommand)


def _parsed(verb: str, kind: type[S], arguments: list[str]) -> tuple[S, list[str]]:
    """(command, arguments of the run that its script starts)."""
    recipe, rest = find_target(arguments)
    command = parse(f"{verb} {recipe.name}", kind, rest, kind(recipe=recipe))
    if command.recipe.collector.kind != "local":
        raise UsageError(
            f"etude {verb} is for runs on one machine: leave --collector out; docs/cluster.md has "
            "scripts for several machines with Ray."
        )
    own = kind.model_fields.keys() - {"recipe", "trust"}
    return command, without_options([arguments[0], *rest], own)


class _Template(string.Template):
    delimiter = "@"  # scripts and manifests are full of $


_ON_DISK = _Template("""\
exists() { [ -e "$run" ]; }
saved() { readlink "$run/checkpoints/latest" || cat "$run/checkpoints/latest" 2> /dev/null; }
finished() { [ -e "$run/@summary" ]; }
stuck() { [ "$(saved)" = "$before" ]; }
""")
_IN_STORE = _Template("""\
listed() { @runs "$run" --json; }
# 2: there is no such run; other codes: the store cannot be read, and nothing is begun anew.
exists() {
    listed > /dev/null; code=$?
    case $code in 0 | 2) return $code ;; *) exit $code ;; esac
}
saved() { listed | grep '"steps"'; }
finished() { listed | grep -q '"state": "finished"'; }
# A machine that was taken away at once has no time to save; only a whole slice must get further.
stuck() { [ -n "$time_is_up" ] && [ "$(saved)" = "$before" ]; }
""")
_SLICE = _Template("""\
run=@run
@place
if exists; then
    set -- @resume "$run"
else
    set -- @train --folder "$run"
fi
before=$(saved)

# Signals are passed on: the run saves itself at the end of its iteration and exits with @again.
signals=0 time_is_up=
trap 'time_is_up=1 signals=$((signals + 1)); kill -USR1 "$child"' USR1
trap 'time_is_up= signals=$((signals + 1)); kill -TERM "$child"' TERM
"$@@" &
child=$!
while seen=$signals; do
    wait "$child"
    code=$?
    [ "$signals" = "$seen" ] && break # otherwise a signal has ended the wait, and not the run
done

case $code in
0) # a library may end the process early: only a finished run has a summary
    if ! finished; then
        echo "The process ended with code 0 before the run was finished: see above." >&2
        code=1
    fi
    ;;
@again | 138 | 143) # saved, or ended by a signal: a resume continues the run
    if stuck; then
        echo "Nothing was saved in this slice, and another would save nothing: raise --time." >&2
        exit 1
    fi
    code=@again
    ;;
esac
""")
_SLURM = _Template("""\
#!/bin/bash
# A run in slices, made by `etude slurm`; submit it with sbatch. Exit codes: 0 finished,
# @again saved and to be continued (submit it again), others as the log says.
#SBATCH --job-name=@name
#SBATCH --time=@time
#SBATCH --signal=B:USR1@@@margin
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=@log
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=@cores
#SBATCH --mem=@{memory}G@gpus

cd @here || exit 1
@slice\
# Only the time limit requeues the job: one that was cancelled stays cancelled, and Slurm itself
# requeues one that was preempted.
if [ "$code" = @again ] && [ -n "$time_is_up" ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    echo "The run is saved, but the job could not be requeued: submit the script again." >&2
fi
exit "$code"
""")
_SUSPENDED = "suspend: true # until Kueue admits it"
_JOB = _Template("""\
backoffLimit: 6@suspend
podFailurePolicy:
  rules:
    - action: Ignore
      onExitCodes: {containerName: etude, operator: In, values: [@again]}
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    - action: FailJob # a number that is not finite: a retry would fail in the same way
      onExitCodes: {containerName: etude, operator: In, values: [@not_finite]}
template:
  spec:
    restartPolicy: Never
    terminationGracePeriodSeconds: @margin
    containers:
      - name: etude
        image: @image
        command: [bash, -c]
        args:
          - |
@slice        resources:
          requests: @requests
          limits: @limits
@storage""")
_KUBERNETES = _Template("""\
# A run in slices, made by `etude kubernetes`; start it with `kubectl apply -f`. A pod exits with 0
# if the run is finished, and with @again if it is saved and another pod continues it.
apiVersion: @version
kind: @kind
metadata:
  name: @name@labels
spec:
@spec""")
_SKYPILOT = _Template("""\
# A run on spot machines, made by `etude skypilot`; start it with `sky jobs launch`. It exits with 0
# if the run is finished, and with @again if it is saved and another machine continues it.
name: @name
resources:
  cpus: @cores+
  memory: @memory+@gpus
  use_spot: true
  job_recovery: {max_restarts_on_errors: 0, recover_on_exit_codes: [@again]}
# Values come from the shell that launches the job: sky jobs launch --secret AWS_ACCESS_KEY_ID ...
secrets: {AWS_ACCESS_KEY_ID: null, AWS_SECRET_ACCESS_KEY: null}
setup: @setup
run: |
@slice""")


def slice_script(
    run: str, program: list[str], train_options: list[str], trust: bool = False
) -> str:
    """Shell commands for one slice; afterwards $code is 0 if the run is finished and 75 if another
    slice can continue it.

    program: the command `etude`; trust: resumes may run the code that the recipe names.
    """
    resume = [*program, "resume", *(["--trust"] if trust else [])]
    if store_url(run):
        place = _IN_STORE.substitute(runs=shlex.join([*program, "runs"]))
    else:
        place = _ON_DISK.substitute(summary=SUMMARY)
    return _SLICE.substitute(
        run=shlex.quote(run),
        place=place.rstrip(),
        resume=shlex.join(resume),
        train=shlex.join([*program, "train", *train_options]),
        again=RESUMABLE,
    )


def run_slurm(arguments: list[str]) -> None:
    """Write a batch script for Slurm."""
    command, words = _parsed("slurm", SlurmCommand, arguments)
    limit, memory = limit_of(command.time, command.margin), command.memory_gib()
    recipe, url = command.recipe, command.url
    folder = Path(command.folder) if command.folder else default_path(title(recipe), recipe.seed)
    exists = not url and is_run(folder)
    if not url and folder.exists() and not exists:
        raise UsageError(f"{folder} exists and is not a run: name another folder.")
    name = folder.name if command.folder else f"{folder.parent.name}-{folder.name}"
    path, program = folder.absolute(), [sys.executable, "-P", "-m", "etude"]
    if url:  # the log is on the disk where sbatch is called
        path = Path.cwd() / name
    text = _SLURM.substitute(
        again=RESUMABLE,
        name=shlex.quote(name),
        time=command.time,
        margin=command.margin,
        log=shlex.quote(f"{path}.log".replace("%", "%%")),
        cores=command.cores,
        memory=memory,
        gpus=f"\n#SBATCH --gpus={command.gpus}" if command.gpus else "",
        here=shlex.quote(os.getcwd()),
        slice=slice_script(url or str(path), program, command.train_options(words)),
    )
    file = command.write(text, f"{file_name(recipe.name)}.sbatch")
    if file is None:
        return
    files.make_folder(path.parent)  # Slurm writes its log only into an existing folder
    print(f"Written: {file}, for slices of {duration(limit)} of the run {url or folder}")
    if exists:
        print("The run exists already: the job continues it with the run's own recipe.")
    print(f"Submit it: sbatch {shlex.quote(file)}")
    print(f"Number of slices: etude plan {shlex.join(words)} --measure --time {command.time}")


def run_kubernetes(arguments: list[str]) -> None:
    """Write the manifest of a Job for Kubernetes."""
    command, words = _parsed("kubernetes", KubernetesCommand, arguments)
    if command.image is None:
        raise UsageError("Name an image with Etude installed: --image REGISTRY/etude:TAG.")
    recipe = command.recipe
    url = command.url
    folder = _MOUNT / (command.folder or f"{file_name(recipe.name)}-s{recipe.seed}")
    if not url and (_MOUNT not in folder.parents or ".." in folder.parts):
        raise UsageError(
            f"--folder {command.folder} is not on the volume, so the run would be lost with its "
            f"pod: name a folder below {_MOUNT}, for example {_MOUNT}/one, or a URL."
        )
    if command.secret and not url:
        raise UsageError("--secret is of a run in an object store: --folder s3://BUCKET/PATH.")
    limit = None if command.time is None else limit_of(command.time, command.margin)
    trusted = user_code.names_code(texts(recipe))
    body = slice_script(url or str(folder), ["etude"], command.train_options(words), trusted)
    if limit is not None:
        body = f'(sleep {limit - command.margin} && kill -USR1 "$$") &\n{body}'
    memory = {"memory": f"{command.memory_gib()}Gi"}
    place = url.partition("://")[2] if url else folder.relative_to(_MOUNT)
    name = re.sub(r"[^a-z0-9]+", "-", f"etude-{place}".lower())[:52].strip("-")
    spec = _JOB.substitute(
        again=RESUMABLE,
        not_finite=NonFinite.exit_code,
        suspend="\nsuspend: true # until Kueue admits it"
        if command.queue and not command.jobset
        else "",
        margin=command.margin,
        image=json.dumps(command.image),
        slice=textwrap.indent(body + 'exit "$code"\n', " " * 12),
        requests=json.dumps({"cpu": command.cores} | memory),
        limits=json.dumps(memory | ({"nvidia.com/gpu": command.gpus} if command.gpus else {})),
        storage=_storage(command),
    )
    if command.jobset:
        job = textwrap.indent(spec, " " * 8)
        head = f"{_SUSPENDED}\n" if command.queue else ""
        spec = f"{head}replicatedJobs:\n  - name: run\n    template:\n      spec:\n{job}"
    labels = f"\n  labels: {{kueue.x-k8s.io/queue-name: {json.dumps(command.queue)}}}"
    text = _KUBERNETES.substitute(
        again=RESUMABLE,
        version="jobset.x-k8s.io/v1alpha2" if command.jobset else "batch/v1",
        kind="JobSet" if command.jobset else "Job",
        name=name,
        labels=labels if command.queue else "",
        spec=textwrap.indent(spec, "  "),
    )
    file = command.write(text, f"{file_name(recipe.name)}-job.yaml")
    if file is not None:
        where = url or f"{folder} on the claim '{command.claim}'"
        print(f"Written: {file}, for the run {where}")
        print(f"Start it: kubectl apply -f {shlex.quote(file)}")


def _storage(command: KubernetesCommand) -> str:
    """The part of a container and its pod that holds the run."""
    if not command.url:
        claim = json.dumps(command.claim)
        return (
            f"        volumeMounts: [{{name: runs, mountPath: {_MOUNT}}}]\n"
            f"    volumes: [{{name: runs, persistentVolumeClaim: {{claimName: {claim}}}}}]\n"
        )
    secret = json.dumps(command.secret)
    given = f"        envFrom: [{{secretRef: {{name: {secret}}}}}]\n" if command.secret else ""
    return (
        f"{given}        env: [{{name: XDG_CACHE_HOME, value: /cache}}]\n"
        "        volumeMounts: [{name: cache, mountPath: /cache}]\n"
        "    volumes: [{name: cache, emptyDir: {}}]\n"
    )


def run_skypilot(arguments: list[str]) -> None:
    """Write a managed job for SkyPilot."""
    command, words = _parsed("skypilot", SkyPilotCommand, arguments)
    if not command.url:
        raise UsageError("Name a place that outlives a machine: --folder s3://BUCKET/PATH.")
    recipe = command.recipe
    limit = None if command.time is None else limit_of(command.time, command.margin)
    trusted = user_code.names_code(texts(recipe))
    body = slice_script(command.url, ["etude"], command.train_options(words), trusted)
    if limit is not None:
        body = f'(sleep {limit - command.margin} && kill -USR1 "$$") &\n{body}'
    place = command.url.partition("://")[2]
    text = _SKYPILOT.substitute(
        again=RESUMABLE,
        name=re.sub(r"[^a-z0-9]+", "-", f"etude-{place}".lower())[:52].strip("-"),
        cores=command.cores,
        memory=command.memory_gib(),
        gpus="\n  accelerators: {L4: 1}" if command.gpus else "",
        setup=json.dumps(command.setup),
        slice=textwrap.indent(body + 'exit "$code"\n', "  "),
    )
    file = command.write(text, f"{file_name(recipe.name)}-sky.yaml")
    if file is not None:
        print(f"Written: {file}, for the run {command.url}")
        print(f"Start it: sky jobs launch {shlex.quote(file)}")


def seconds_of(text: str) -> int:
    """Seconds of a time limit in Slurm's format: 90, 90:00, 4:00:00, 1-12, 1-12:30:00."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", text):
        raise UsageError(f"--time must look like {_FORMS}, not '{text}'.")
    if dash:
        hours, minutes, seconds = map(int, [*parts, "0", "0"][:3])
    elif len(parts) == 1:
        hours, minutes, seconds = 0, int(parts[0]), 0
    else:
        hours, minutes, seconds = map(int, ["0", *parts][-3:])
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def limit_of(text: str | None, margin: int = MARGIN) -> int:
    """Seconds of a slice; refuses a slice without time to train."""
    if text is None:
        raise UsageError(f"Give the time limit of a slice: --time {_FORMS}.")
    limit = seconds_of(text)
    if limit < 2 * margin + START:
        raise UsageError(
            f"--time {text} is {duration(limit)}, which leaves no time to train: a slice takes "
            f"about {START} s to start and is saved {margin} s before its end. Write {_FORMS}."
        )
    return limit


def num_slices(seconds: float, limit: int, margin: int = MARGIN) -> int:
    """Number of slices of a length that a run of `seconds` takes."""
    return max(math.ceil(seconds / (limit - margin - START)), 1)


def in_slices(seconds: float, time: str | None) -> tuple[dict[str, int], str]:
    """Number of slices of length `time` that a run takes, as JSON and as a sentence."""
    limit = limit_of(time)
    count = num_slices(seconds, limit)
    trains = limit - MARGIN - START
    return (
        {"count": count, "seconds": limit},
        f"{count:,} slice{'s' if count > 1 else ''} of {duration(limit)}; a slice trains for "
        f"{duration(trains)}, and the rest is for its start and its end",
    )
