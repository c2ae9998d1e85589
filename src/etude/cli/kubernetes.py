"""`etude kubernetes`: a Job whose pods go on with a run until it is finished."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from pathlib import PurePosixPath

from pydantic import Field

from etude.cli.slices import ALIASES, Slicing, limit_of, parsed, shell, with_grace
from etude.core import user_code
from etude.core.errors import RESUMABLE, NonFinite, UsageError
from etude.planning.recipes import texts

MOUNT = PurePosixPath("/runs")


class KubernetesCommand(Slicing):
    """A Job for Kubernetes. A pod that is evicted, or whose slice is over, saves the run, and the
    next pod goes on with it, until it is finished."""

    aliases = ALIASES

    folder: str | None = Field(
        None, description=f"The run's folder on the volume; default: {MOUNT}/<recipe>-s<seed>."
    )
    image: str | None = Field(
        None, description="The image that Etude is installed in. There is no default."
    )
    claim: str = Field("runs", description="The PersistentVolumeClaim that runs are kept on.")
    time: str | None = Field(
        None,
        description="End a pod after this time as well: 4:00:00, 90 (minutes) or 1-12 "
        "(days-hours); by default a pod is ended by others alone.",
    )


def run(arguments: list[str]) -> None:
    """Write the manifest."""
    given, words = parsed("kubernetes", KubernetesCommand, arguments, ("image", "claim", "time"))
    assert isinstance(given, KubernetesCommand)
    if given.image is None:
        raise UsageError("Name the image that Etude is installed in: --image REGISTRY/etude:TAG.")
    recipe = given.recipe
    folder = MOUNT / (given.folder or f"{given.name}-s{recipe.seed}")
    if MOUNT not in folder.parents or ".." in folder.parts:
        raise UsageError(
            f"--folder {given.folder} is not on the volume, so that the run would end with its "
            f"pod: name a folder below {MOUNT}, such as {MOUNT}/one."
        )
    limit = None if given.time is None else limit_of(given.time, given.margin)
    file = given.write(manifest(given, words, folder, given.gib(), limit), f"{given.name}-job.yaml")
    if file is None:
        return
    print(f"Written: {file}, for the run {folder} on the claim '{given.claim}'")
    print(f"Start it: kubectl apply -f {shlex.quote(file)}")


def manifest(
    given: KubernetesCommand,
    arguments: list[str],
    folder: PurePosixPath,
    memory: int,
    limit: int | None,
) -> str:
    """The text of the manifest; folder: the run's; memory in GiB; limit: seconds of a slice."""
    train = [*arguments, *with_grace(given.recipe, given.margin)]
    body = shell(str(folder), ["etude"], train, user_code.names_code(texts(given.recipe)))
    if limit is not None:
        body = f'(sleep {limit - given.margin} && kill -USR1 "$$") &\n{body}'
    body += 'exit "$code"\n'
    name = re.sub(r"[^a-z0-9]+", "-", f"etude-{folder.relative_to(MOUNT)}".lower())[:52].strip("-")
    limits = {"memory": f"{memory}Gi"} | ({"nvidia.com/gpu": given.gpus} if given.gpus else {})
    asked = {"cpu": given.cores, "memory": f"{memory}Gi"}
    return _MANIFEST.format(
        name=name,
        again=RESUMABLE,
        not_finite=NonFinite.exit_code,
        margin=given.margin,
        image=json.dumps(given.image),
        body=textwrap.indent(body, " " * 14),
        requests=json.dumps(asked),
        limits=json.dumps(limits),
        mount=MOUNT,
        claim=json.dumps(given.claim),
    )


_MANIFEST = """\
# A run in slices, made by `etude kubernetes`; start it with `kubectl apply -f`. A pod exits with 0
# where the run is finished, and with {again} where it is saved and another pod is to go on.
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  backoffLimit: 6
  podFailurePolicy:
    rules:
      - action: Ignore
        onExitCodes: {{containerName: etude, operator: In, values: [{again}]}}
      - action: Ignore
        onPodConditions: [{{type: DisruptionTarget}}]
      - action: FailJob # not a finite number: the same would happen again
        onExitCodes: {{containerName: etude, operator: In, values: [{not_finite}]}}
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: {margin}
      containers:
        - name: etude
          image: {image}
          command: [bash, -c]
          args:
            - |
{body}          resources:
            requests: {requests}
            limits: {limits}
          volumeMounts: [{{name: runs, mountPath: {mount}}}]
      volumes: [{{name: runs, persistentVolumeClaim: {{claimName: {claim}}}}}]
"""
