"""Weights & Biases: the same rows, each sent once even if the run is killed several times.

W&B cannot remove rows. A recomputed row equals the one that was sent, so rows that W&B has are
skipped, and rows that were lost in a kill are sent again. Online its server knows which it has.
Offline each process writes its own files and buffers rows: files of a process that was killed are
removed, and their rows written again. wandb.json in the run's folder has the last step of each.

W&B is called in its own thread, so that a run waits neither for its service nor for its server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from etude.core.errors import EtudeError, UsageError
from etude.core.history import Row, history_of
from etude.core.metrics import chart_values, step_of
from etude.runs import checkpoint, files
from etude.runs.folder import file_name, films
from etude.training.logs.outputs import Background, LogConfig, LoggedRun, OpenLog
from etude.training.loop import Callback, Context

Mode = Literal["online", "offline"]
NOTHING = -1
"""The step before any row."""
START, END = 10.0, 60.0
"""Seconds for W&B to begin a run, and to receive the remaining rows at its end."""


def require() -> None:
    """Raise an error if wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise UsageError(
            "logs.wandb is on, but wandb is not installed: `pip install etude[wandb]`, or train "
            "without it."
        )


class WandbConfig(LogConfig):
    """Rows and the final policy, sent to W&B."""

    kind: Literal["wandb"] = "wandb"
    project: str | None = None
    mode: Mode | None = None

    def check(self) -> None:
        require()
        self._mode()

    def _mode(self) -> Mode:
        """The mode of the recipe, else of WANDB_MODE."""
        mode = self.mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in get_args(Mode):
            raise UsageError(
                f"WANDB_MODE is {mode!r}: set it to online, offline or disabled, or give "
                "--logs.wandb-mode."
            )
        return cast(Mode, mode)

    def _log(self, run: LoggedRun) -> Background:
        title = file_name(run.title or run.recipe["name"])
        name = os.environ.get("WANDB_NAME") or f"{title}-{run.folder.resolve().name}"
        project = self.project or os.environ.get("WANDB_PROJECT") or "etude"
        make = partial(WandbLog, run.folder, project, name, self._mode(), run.recipe, run.say)
        return Background(make, END, end_service)

    def add_final(
        self, run: LoggedRun, step: int, metrics: dict[str, float], pictures: dict[str, Path]
    ) -> None:
        log = self._log(run._replace(say=lambda text: None))
        log.start()
        log.call("add_final", step, metrics, pictures)
        log.close()

    def open(self, run: LoggedRun) -> OpenLog:
        log = self._log(run)
        policy = run.folder / "checkpoints" / "final" / "policy"
        return OpenLog(log, (FinalPolicy(log, policy),))


_ENDING = threading.Lock()


def _service() -> Any:
    """W&B's service process, a Popen; None if it has none, or another version of W&B moved it."""
    from wandb.sdk import wandb_setup

    connection = getattr(wandb_setup.singleton(), "_connection", None)
    return getattr(getattr(connection, "_proc", None), "_process", None)


def end_service(service: Any = None) -> None:
    """End W&B's service process, which has died or hangs; the next log starts another one.

    Calls that wait for it then fail, and do not block the end of this process. service: end only
    this one, not its successor.
    """
    import wandb

    with _ENDING:
        current = _service()
        if (ended := service or current) is not None:
            ended.kill()
        if ended is current:
            with suppress(Exception, SystemExit):  # it ends with the service's exit code
                wandb.teardown()


class WandbLog:
    """One W&B run per run folder, over all processes that write to it."""

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str,
        mode: Mode,
        config: dict[str, Any],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """folder: of the run. config: the run's settings as W&B shows them."""
        self._folder, self._project, self._name = folder, project, name
        self._mode, self._config, self._say = mode, config, say
        self._files = folder
        """The folder of W&B's files: WANDB_DIR, else that of the run."""
        self._run: Any = None
        self._service: Any = None
        self._state = _State(folder / "wandb.json")
        self._has = NOTHING
        self._finished = False

    def begin(self, history: Iterable[Row]) -> None:
        """Determine which rows W&B has, and send the other rows of the history."""
        require()
        self._state.load()
        rows = history_of(history)
        if self._state.uploaded and step_of(rows.last) <= max(self._state.sent, 0):
            self._has = self._state.sent  # finished already; a longer run opens it again
            return
        self._open()
        for row in rows.after(self._has, step_of):
            self.write(row)

    def write(self, row: dict[str, Any]) -> None:
        step = step_of(row)
        if step <= self._has:
            return
        if self._run is None:
            self._open()
            if step <= self._has:
                return
        # Without commit, W&B sends a row only with the next one.
        self._run.log({**chart_values(row), **self._new_film()}, step=step, commit=True)
        self._has = step
        self._state.save(sent=step, uploaded=False)

    def _new_film(self) -> dict[str, Any]:
        """The newest film, if W&B does not have it."""
        from wandb import Video

        drawn = films(self._folder)
        if not drawn or (step := max(drawn)) <= self._state.filmed:
            return {}
        self._state.save(filmed=step)
        return {"film": Video(str(drawn[step]), caption=f"step {step:,}", format="gif")}

    def finish(self, policy: Path) -> None:
        """Mark the run as finished and upload its final policy, a folder, as an artifact."""
        self._finished = True
        if self._state.uploaded:
            return
        if self._run is None:
            self._open()
        import wandb

        self._run.summary.update(self._new_film())
        name = re.sub(r"[^\w.-]+", "-", f"{self._name}-policy")
        artifact = wandb.Artifact(name, type="model", metadata={"step": self._has})
        # The run's folder keeps the files, so W&B needs no copy of them.
        for file in sorted(policy.resolve().iterdir()):
            artifact.add_file(str(file), policy="immutable")
        self._run.log_artifact(artifact, aliases=["final"])

    def add_final(self, step: int, metrics: dict[str, float], pictures: dict[str, Path]) -> None:
        """Open the finished run again and add these to its summary, if they are missing."""
        from wandb import Image

        self._state.load()
        if self._state.final == step or not self._state.uploaded:
            return  # A resume sends the missing rows first.
        self._open()
        images = {name: Image(str(file)) for name, file in pictures.items()}
        self._run.summary.update({**metrics, **images})
        self._finished = True
        self.close()
        self._state.save(final=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish(exit_code=0 if self._finished else 1)
        except TimeoutError as error:
            raise EtudeError(
                f"W&B has not taken everything within {END / 2:.0f} s: `etude resume "
                f"{self._folder}` sends what is missing."
            ) from error
        except Exception:  # of many types: the service has died
            end_service(self._service)
            raise
        # W&B has written its buffers now.
        self._state.save(confirmed=self._has, uploaded=self._finished, unfinished="")

    def _open(self) -> None:
        """Open the W&B run of this folder."""
        # Without a server, reports of W&B's own errors would delay the end of the process.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        settings = self._folder / "wandb" / "settings"
        self._files = Path(os.environ.get("WANDB_DIR") or self._folder)
        self._files.mkdir(parents=True, exist_ok=True)
        if settings.exists():
            raise UsageError(
                f"{settings} would tell W&B where to send the run, and Etude wrote no such file: "
                "remove it, and give settings in your own folder or by variables."
            )
        try:
            self._remove_unfinished()
            self._run = self._joined()
        except Exception as error:  # of many types, some of them not public
            end_service(self._service)  # it would keep the run's id
            text = " ".join(str(error).split()) or type(error).__name__
            raise EtudeError(
                f"W&B could not start ({text}). Check `wandb login` and the network, or "
                f"use --logs.wandb-mode offline; `etude resume {self._folder}` sends what is "
                "missing, after the run's end too."
            ) from error
        if self._mode == "online":
            self._has = int(self._run.starting_step) - 1
            self._say(f"W&B: {self._run.url}")
        else:
            self._has = self._state.sent
            self._say(f"W&B is offline: `wandb sync {self._files}/wandb/offline-run-*` sends it.")
        unfinished = Path(self._run.dir).parent.name if self._mode == "offline" else ""
        self._state.save(confirmed=self._has, sent=self._has, unfinished=unfinished)

    def _remove_unfinished(self) -> None:
        """Remove the files of a process that was killed: their rows are written again.

        If they were synced and removed by hand, nothing is missing.
        """
        folder = self._files / "wandb" / self._state.unfinished
        if self._state.unfinished and folder.is_dir():
            self._state.save(sent=self._state.confirmed, filmed=NOTHING)
            shutil.rmtree(folder)

    def _joined(self) -> Any:
        """W&B's run, from a service that is alive."""
        import wandb

        service = _service()
        if service is not None and service.poll() is not None:
            end_service(service)
        wandb.setup()
        self._service = _service()
        return wandb.init(
            project=self._project,
            name=self._name,
            id=self._state.id,
            dir=str(self._files),
            mode=self._mode,
            resume="allow",
            config=self._config,
            settings=wandb.Settings(
                console="off",  # to capture the terminal would fight with the dashboard
                silent=True,
                init_timeout=START,
                finish_timeout=END / 2,
                finish_timeout_raises=True,
            ),
        )


@dataclass
class _State:
    """wandb.json: the W&B run that belongs to a folder, and what was sent to it."""

    path: Path
    id: str = ""
    confirmed: int = NOTHING
    """The last step that W&B is known to have."""
    sent: int = NOTHING
    """The last step that was passed to W&B."""
    uploaded: bool = False
    """Whether the run has ended in W&B too, with its policy."""
    final: int = NOTHING
    """The step of the policy whose final evaluation W&B has."""
    filmed: int = NOTHING
    """The step of the newest film that was passed to W&B."""
    unfinished: str = ""
    """The folder of offline files that a process has not closed yet."""

    def load(self) -> None:
        if not self.path.exists():
            self.save(id=secrets.token_hex(4))
            return
        try:
            content = json.loads(self.path.read_text())
            self.id, self.uploaded = str(content["id"]), bool(content["uploaded"])
            if not re.fullmatch(r"[\w-]{1,64}", self.id):
                raise ValueError("its id is not a W&B id")  # it becomes part of a path
            self.confirmed, self.sent = int(content["confirmed"]), int(content["sent"])
            self.final = int(content.get("final", NOTHING))
            self.filmed = int(content.get("filmed", NOTHING))
            if "unfinished" not in content:  # of an earlier version: rows may be missing
                self.sent = self.confirmed
            self.unfinished = str(content.get("unfinished", ""))
            if not re.fullmatch(r"(offline-run-[\w-]+)?", self.unfinished):
                raise ValueError("its folder does not belong to W&B")
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise EtudeError(
                f"{self.path} cannot be read ({error}): put it back, or remove it to send the run "
                "to W&B as a new one."
            ) from error

    def save(self, **changes: Any) -> None:
        """Replace the file; it is the old or the new one at any instant."""
        vars(self).update(changes)
        content = {name: value for name, value in vars(self).items() if name != "path"}
        files.replace_file(self.path, [json.dumps(content).encode() + b"\n"])


class FinalPolicy(Callback):
    """Uploads the policy of a finished run to W&B."""

    def __init__(self, log: Background, policy: Path) -> None:
        self._log, self._policy = log, policy

    def run_end(self, context: Context) -> None:
        final = checkpoint.resolve_mark(self._policy.parent)  # a file where there are no links
        self._log.call("finish", final / self._policy.name)
