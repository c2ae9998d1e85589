"""A run in slices: time limits, requeues and evictions do not change a bit of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.api import Interrupted, Run, resume, train
from etude.cli.main import main
from etude.cli.slices import in_slices, num_slices, seconds_of, slice_script
from etude.core.contracts import BatchMetrics
from etude.core.errors import RESUMABLE, UsageError
from etude.runs.objects import Objects
from etude.runs.stored import read_index
from etude.training.loop import Callback, Context
from object_store import BUCKET, KEY, SECRET, environment, serving
from toys import tiny_reach

FAKE = Path(__file__).parents[1] / "lib" / "fake_slurm.py"
SHORT = [
    *("--clock.total-timesteps", "10240", "--algorithm.update-epochs", "1"),
    *("--evaluation.every", "never", "--checkpoint.every", "never"),
    *("--evaluation.final-episodes", "2"),
]


class Limit(Callback):
    """Sends this process a signal in the second update of each slice."""

    def __init__(self, number: int) -> None:
        self.number, self.iteration = number, 0

    def run_start(self, context: Context) -> None:
        self.iteration = context.clock.now.iterations + 1

    def batch_end(self, context: Context, metrics: BatchMetrics) -> None:
        if context.clock.now.iterations == self.iteration:
            self.iteration = -1
            os.kill(os.getpid(), self.number)


def test_a_run_in_slices_is_the_untouched_run(tmp_path: Path) -> None:
    untouched, run = train(tiny_reach(6), tmp_path / "untouched"), tmp_path / "run"
    with pytest.raises(Interrupted):
        train(tiny_reach(6), run, callbacks=[Limit(signal.SIGUSR1)])
    with pytest.raises(Interrupted) as stopped:
        resume(run, callbacks=[Limit(signal.SIGTERM)])
    assert stopped.value.exit_code == RESUMABLE
    resume(run)
    assert Run(run).summary()["counts"] == untouched.summary()["counts"]
    assert Run(run).fingerprint() == untouched.fingerprint()


@pytest.mark.rotated
def test_the_batch_script_requeues_itself_until_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    monkeypatch.setenv("FAKE_SLURM_STRIKES", "1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    for name in ("sbatch", "scontrol"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" {name} "$@"\n')
        program.chmod(0o755)
    # A space in the folder's name is a trap for scripts.
    assert main(["slurm", "reach-short", *SHORT, "--time", "10:00", "--folder", "runs/a run"]) == 0
    assert "Submit it: sbatch reach-short.sbatch" in capsys.readouterr().out
    assert subprocess.run(["bash", "-n", "reach-short.sbatch"], check=True).returncode == 0
    done = subprocess.run(
        ["sbatch", "reach-short.sbatch"], capture_output=True, text=True, timeout=120
    )
    log = (tmp_path / "runs" / "a run.log").read_text()
    assert done.returncode == 0, log
    assert done.stdout.splitlines() == [
        "slice 1: exit code 0, requeued: True",
        "slice 2: exit code 0, requeued: False",
    ]
    assert log.count("SIGUSR1: the run is saved") == log.count("Resuming ") == 1
    assert main(["train", "reach-short", *SHORT, "--folder", "whole"]) == 0
    assert Run("runs/a run").fingerprint() == Run("whole").fingerprint()


STUB = """\
#!/bin/bash
# Stands for etude: does what $run/next says.
mkdir -p "$run/checkpoints"
echo "$1" >>"$run/verbs"
. "$run/next"
"""
SAVES = 'ln -sfn "$RANDOM" "$run/checkpoints/latest"'
DONE = 'touch "$run/summary.json"; exit 0'
WAITS = "for i in $(seq 500); do sleep 0.01; done; exit 9"


def do_slice(
    tmp_path: Path, commands: str, number: int | None = None, tail: str = 'exit "$code"'
) -> int:
    """The exit code of a slice's shell in which the run does these commands, and to which a signal
    is sent as soon as the run has begun."""
    run, stub = tmp_path / "run", tmp_path / "etude"
    stub.write_text(STUB)
    stub.chmod(0o755)
    (tmp_path / "next").write_text(commands)
    text = slice_script(str(run), [str(stub)], ["reach"]) + tail
    text = f'mkdir -p "{run}"; cp "{tmp_path}/next" "{run}/next"; export run\n{text}'
    begun = run / "begun"
    begun.unlink(missing_ok=True)
    process = subprocess.Popen(["bash", "-c", text])
    if number is not None:
        end = time.monotonic() + 20
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.005)
        process.send_signal(number)
    return process.wait(20)


@pytest.mark.parametrize(
    ("commands", "number", "code"),
    [
        (DONE, None, 0),
        ("exit 0", None, 1),  # the process was ended before the run was finished
        ("exit 3", None, 3),
        (f"{SAVES}; exit 75", None, 75),
        ("exit 75", None, 1),  # nothing was saved: another slice would not help
        (f'trap "{SAVES}; exit 75" USR1; touch "$run/begun"; {WAITS}', signal.SIGUSR1, 75),
        (f'trap "{SAVES}; exit 75" TERM; touch "$run/begun"; {WAITS}', signal.SIGTERM, 75),
        (f'{SAVES}; touch "$run/begun"; {WAITS}', signal.SIGUSR1, 75),  # it takes no signals yet
        (f'touch "$run/begun"; {WAITS}', signal.SIGTERM, 1),
        (
            f'trap "" USR1; touch "$run/begun"; sleep 0.3; {SAVES}; {DONE}',
            signal.SIGUSR1,
            0,
        ),
    ],
)
def test_the_exit_code_of_a_slice(
    commands: str, number: int | None, code: int, tmp_path: Path
) -> None:
    assert do_slice(tmp_path, commands, number) == code
    assert (tmp_path / "run" / "verbs").read_text() == "resume\n"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [([signal.SIGUSR1], "1"), ([signal.SIGTERM], ""), ([signal.SIGUSR1, signal.SIGTERM], "")],
)
def test_only_the_time_limit_asks_for_another_slice(
    numbers: list[int], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A job that was cancelled must not come back."""
    own = "".join(f"kill -{number} $PPID; sleep 0.05; " for number in numbers)
    commands = f'trap "" USR1 TERM; {SAVES}; {own} exit 75'
    assert do_slice(tmp_path, commands, tail='echo "up:$time_is_up"') == 0
    assert f"up:{said}\n" in capfd.readouterr().out


def job_of(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The manifest that `etude kubernetes` prints."""
    arguments = ["kubernetes", "reach-short", "--image", "here/etude:1", "-o", "-", *options]
    assert main(arguments) == 0
    job: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return job


def test_the_job_of_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(capsys, "--seed", "3", "--claim", "disk", "--margin", "60")
    assert job["metadata"]["name"] == "etude-reach-short-s3"
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[0]["onExitCodes"]["values"] == [RESUMABLE]
    pod = job["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 60)
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "disk"}
    container = pod["containers"][0]
    assert container["image"] == "here/etude:1"
    text = container["args"][0]
    assert "set -- etude train reach-short --seed 3 --checkpoint.grace 45 --folder" in text
    assert "sleep" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_pod_ends_itself_where_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = job_of(capsys, "--time", "1:00:00")["spec"]["template"]["spec"]["containers"][0]["args"]
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "next").write_text(f'trap "{SAVES}; exit 75" USR1; touch begun; while :; do :; done')
    sleep = '#!/bin/bash\necho "$1" >limit; until [ -e begun ]; do :; done'
    for name, program in {"etude": STUB, "sleep": sleep}.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("run", str(run))
    script = text[0].replace("run=/runs/reach-short-s0", f"run={run}")
    assert subprocess.run(["bash", "-c", script], cwd=tmp_path, timeout=30).returncode == RESUMABLE
    assert (tmp_path / "limit").read_text() == "3480\n"  # an hour but for the margin


STORED = ("--folder", f"s3://{BUCKET}/runs/one", "--secret", "keys", "--time", "4:00:00")


@pytest.mark.parametrize(
    "options", [(), ("--claim", "disk"), STORED, (*STORED, "--queue", "robots")]
)
def test_jobs_are_valid(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes")
    job = job_of(capsys, *options)
    validate.validate(job, "1.30", strict=True)
    whole = job_of(capsys, *options, "--jobset")
    assert (whole["kind"], whole["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (inner,) = whole["spec"]["replicatedJobs"]
    validate.validate({**job, "spec": inner["template"]["spec"]}, "1.30", strict=True)
    spec = {name: value for name, value in job["spec"].items() if name != "suspend"}
    assert inner["template"]["spec"] == spec
    for each in (job, whole):
        assert each["spec"].get("suspend", False) == ("--queue" in options)
        queue = each["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        assert queue == ("robots" if "--queue" in options else None)


def test_a_job_in_a_store_names_its_credentials_only(capsys: pytest.CaptureFixture[str]) -> None:
    with environment("http://127.0.0.1:1"):
        pod = job_of(capsys, *STORED)["spec"]["template"]["spec"]
        assert main(["skypilot", "reach-short", *STORED[:2], "-o", "-"]) == 0
        sky = capsys.readouterr().out
    assert KEY not in str(pod) + sky
    assert SECRET not in str(pod) + sky
    container = pod["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["volumes"] == [{"name": "cache", "emptyDir": {}}]
    task = yaml.safe_load(sky)
    assert task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [RESUMABLE]
    for text in (container["args"][0], task["run"]):
        assert f"run=s3://{BUCKET}/runs/one" in text
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.rotated
@pytest.mark.parametrize("kind", ["kubernetes", "slurm", "skypilot"])
def test_scripts_continue_a_run_in_a_store(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The machine gets a notice twice, and its disk is deleted each time."""
    pytest.importorskip("moto", reason="the S3 server of the tests is not installed")
    url, program = f"s3://{BUCKET}/runs/one", tmp_path / "bin" / "etude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m etude "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    short = ["reach-short", "--clock.total-timesteps", "40960", "--checkpoint.lease", "1"]
    short += [*SHORT[4:6], *SHORT[8:]]
    own = {"kubernetes": ["--image", "x"], "slurm": ["--time", "10:00"], "skypilot": []}[kind]
    assert main([kind, *short, "--folder", url, *own, "-o", "-"]) == 0
    text = capsys.readouterr().out
    if kind != "slurm":
        document = yaml.safe_load(text)
        if kind == "kubernetes":
            text = document["spec"]["template"]["spec"]["containers"][0]["args"][0]
        else:
            text = document["run"]
    with serving() as server, environment(server.endpoint, tmp_path / "cache"):
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

        def newest() -> str:
            found = read_index(Objects(url))
            names = found[0].files if found else {}
            return max((name for name in names if name.endswith("/training")), default="")

        codes = list[int]()
        for notice in (True, True, False):
            before = newest()
            job = subprocess.Popen(["bash", "-c", text])
            while notice and job.poll() is None:
                if newest() > before:
                    job.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.02)
            codes.append(job.wait(120))
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert codes == [RESUMABLE, RESUMABLE, 0]
        assert main(["train", *short, "--folder", "whole"]) == 0
        assert Run(url).fingerprint() == Run("whole").fingerprint()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("4:00:00", 14400),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("1-0:0:5", 86405),
    ],
)
def test_time_limits_as_slurm_writes_them(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["4h", "", "1:2:3:4", "-1", "1-", "1.5", "\u0664:00:00"])
def test_other_time_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--time must look like 4:00:00"):
        seconds_of(text)


def test_slices_are_counted_without_their_start_and_end() -> None:
    assert num_slices(3600, 3600) == 2
    assert num_slices(3420, 3600) == num_slices(1, 3600) == 1
    document, sentence = in_slices(36000, "4:00:00")
    assert document == {"count": 3, "seconds": 14400}
    assert sentence.startswith("3 slices of 4 h 0 min; a slice trains for 3 h 57 min")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["slurm", "reach-short"], "Give the time limit of a slice"),
        (["slurm", "reach-short", "--time", "4:00"], "leaves no time to train"),
        (["slurm", "reach-short", "--time", "1:00:00", "--collector", "ray"], "docs/cluster.md"),
        (["kubernetes", "reach-short"], "--image REGISTRY/etude:TAG"),
        (["kubernetes", "reach-short", "--image", "x", "--folder", "/tmp/a"], "below /runs"),
        (["kubernetes", "reach-short", "--image", "x", "--folder", "../a"], "below /runs"),
        (["plan", "reach-short", "--time", "4:00:00"], "add --measure"),
        (["plan", "reach-short", "--measure", "--time", "1"], "leaves no time to train"),
    ],
)
def test_mistakes(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_script_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["slurm", "reach-short", "--time", "1-12", "-o", "job.sh", "--folder", "one"]
    assert main(arguments) == main(arguments) == 0
    assert main([*arguments, "--seed", "1"]) == 2
    assert "job.sh exists already" in capsys.readouterr().err
    (tmp_path / "one").mkdir()
    assert main([*arguments[:-3], "other.sh", *arguments[-2:]]) == 2
    assert "one exists and is not a run" in capsys.readouterr().err


def test_the_plan_counts_slices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "reach-short", *SHORT, "--measure", "--time", "10:00"]) == 0
    assert "That is 1 slice of 10 min 0 s; a slice trains" in capsys.readouterr().out
