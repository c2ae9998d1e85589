"""`etude replay`, `inspect`, `bisect` and `fork`: any moment of a training again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.options import Positional, Reporting, Trusting, parse
from etude.cli.verbs import HELP
from etude.core.errors import UsageError
from etude.rollout.local import THREADS


class Moment(Trusting):
    """A command about a moment of a run."""

    at: int | None = Field(
        None,
        ge=0,
        description="A step of the run: environment steps, or gradient steps of a run that learns "
        "from a dataset.",
    )
    threads: int | None = Field(
        None, ge=1, le=THREADS, description="Collector threads; default those of the run."
    )

    def step(self, verb: str) -> int:
        """The step, which must be given."""
        if self.at is None:
            raise UsageError(f"Say at which step of the run: etude {verb} RUN --at STEP.")
        return self.at


class ReplayCommand(Moment, Reporting):
    """Show any training episode of a run again, bit for bit, with the policy, noise and physics it
    had: a page with a timeline, a film, a table, a dataset. The run is computed forward from the
    newest checkpoint before; its folder is not changed, and it may train meanwhile."""

    aliases = {"at": "step", "out": "to folder output", "formats": "format"}  # noqa: RUF012

    run: Positional[str] = Field(description="The run's folder.")
    env: int = Field(0, ge=0, description="The environment; of several agents each counts.")
    episode: int = Field(
        0,
        ge=0,
        description="0: the episode in progress at the step; 1: the next one of this environment.",
    )
    formats: tuple[Literal["page", "table", "dataset", "film"], ...] = Field(
        ("page", "table"),
        description="What is written: page (a timeline in one HTML file), table (CSV, a row per "
        "step), dataset, film.",
    )
    out: str | None = Field(
        None, description="Folder; default replays/RUN-STEP-envI-episodeK. -o is short."
    )


def run_replay(arguments: list[str]) -> int:
    """Replay an episode; the exit code."""
    from etude.evaluate import film
    from etude.evaluate.replay import replay, write

    command = parse("replay", ReplayCommand, arguments)
    step, path = command.step("replay"), Path(command.run)
    draws = {"page", "film"} & {*command.formats}
    if draws:
        film.check_tools()
    say = _silent if command.json_output else _say
    found = replay(
        path, step, command.env, command.episode, say, command.trust, bool(draws), command.threads
    )
    name = re.sub(r"\W+", "-", path.resolve().name)
    folder = Path(command.out or f"replays/{name}-{step}-env{command.env}-{command.episode}")
    made = write(found, folder, command.formats)
    text = "".join(f"{line}\n" for line in (found.sentence(), *found.notes, *made))
    document = {
        "run": str(path),
        "env": command.env,
        "begins": {"iteration": found.begins[0], "column": found.begins[1]},
        "steps": found.length,
        "return": float(found.rewards.sum(dtype="float64")),
        "ending": found.ending,
        "success": found.success,
        "statistics": found.statistics,
        "same_bits": found.is_same,
        "notes": found.notes,
        "written": [str(each) for each in made],
    }
    command.show(document, text)
    return 0


class InspectCommand(Trusting, Reporting):
    """Show the learner in the iteration of a step: losses per term, gradient norms per layer, the
    minibatch and the samples with the largest contributions to its gradient, dead units, saturated
    actions, the normaliser. Two runs or two steps are shown side by side."""

    aliases = {"at": "step"}  # noqa: RUF012

    runs: Positional[tuple[str, ...]] = Field(description="The folder of a run, or of two.")
    at: tuple[int, ...] = Field((), description="A step of the run, or two: 20000,40000.")
    threads: int | None = Field(
        None, ge=1, le=THREADS, description="Collector threads; default those of the run."
    )


def run_inspect(arguments: list[str]) -> int:
    """Show the learner at one moment, or at two; the exit code."""
    command = parse("inspect", InspectCommand, arguments)
    if not command.at or not command.runs:
        raise UsageError("Say at which step of which run: etude inspect RUN --at STEP.")
    from etude.evaluate.inspection import inspect, text

    pairs = [(Path(run), step) for run in command.runs for step in command.at]
    say = _silent if command.json_output else _say
    found = [inspect(run, step, say, command.trust, command.threads) for run, step in pairs]
    command.show(found[0] if len(found) == 1 else found, text(found))
    return 0


class BisectCommand(Trusting, Reporting):
    """Find where two runs that should be the same first differ: the iteration, the phase (collect,
    ingest, update, normaliser, evaluation), the tensor and the number in it. Or, with --between,
    the first commit of a repository that changes the bits of a recipe."""

    runs: Positional[tuple[str, ...]] = Field(
        description="The folders of two runs; or a recipe, for --between."
    )
    between: tuple[str, ...] | None = Field(
        None, description="Two commits, GOOD,BAD: each is tried in a worktree of git."
    )
    iterations: int = Field(
        2,
        ge=1,
        le=1000,
        description="With --between: iterations with gradient steps that are hashed.",
    )
    repository: str = Field(".", description="With --between: the repository.")


def run_bisect(arguments: list[str]) -> int:
    """Compare two runs, or the commits of a repository; the exit code."""
    own = {f"--{name}" for name in BisectCommand.model_fields} | {"--json", *HELP}
    split = next((i for i, w in enumerate(arguments) if _is_setting(w, own)), len(arguments))
    settings = arguments[split:]
    command = parse("bisect", BisectCommand, arguments[:split])
    say = _silent if command.json_output else _say
    if command.between is not None:
        return _between(command, settings, say)
    if settings:
        raise UsageError(f"{settings[0]} is a setting of a recipe, for --between GOOD,BAD.")
    if len(command.runs) != 2:
        raise UsageError("Name two runs: etude bisect RUN_A RUN_B.")
    from etude.compare.bisect import bisect

    a, b = map(Path, command.runs)
    found = bisect(a, b, say, command.trust)
    first = found.difference
    document = {
        "difference": None if first is None else first._asdict(),
        "resumes": found.resumes,
        "iterations": found.iterations,
        "notes": found.notes,
    }
    lines = [] if first is None else [first.sentence(), *filter(None, [first.inferred])]
    if first is not None and first.others:
        lines.append(f"Also there: {', '.join(first.others[:8])}.")
    lines += found.notes
    if first is not None:
        lines.append(f"See it: etude replay {a} --at {first.step}, and of {b}.")
    command.show(document, "".join(f"{line}\n" for line in lines))
    return int(first is not None)


def _is_setting(word: str, own: set[str]) -> bool:
    name = word.partition("=")[0]
    return name.startswith("--") and name not in own


def _between(command: BisectCommand, settings: list[str], say: Callable[[str], None]) -> int:
    from etude.cli.commits import first_change

    if command.between is None or len(command.between) != 2 or len(command.runs) != 1:
        raise UsageError("Name a recipe and two commits: etude bisect RECIPE --between GOOD,BAD.")
    found = first_change(
        command.runs[0], *command.between, settings, command.iterations,
        Path(command.repository), say,
    )  # fmt: skip
    text = "These commits compute the same bits." if found is None else found.sentence()
    command.show(None if found is None else found._asdict(), f"{text}\n")
    return int(found is not None)


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Print nothing."""


class ForkCommand(Trusting):
    """Branch a run at a step, with other settings from there on: --SECTION.FIELD VALUE as of `etude
    resume`. The branch is a run of its own that begins with the history both share, which is not
    trained again; a page shows it beside the run."""

    aliases = {"at": "step", "folder": "out to"}  # noqa: RUF012

    run: Positional[str] = Field(description="The folder of the run to branch from.")
    at: int | None = Field(None, ge=0, description="A step of the run.")
    folder: str | None = Field(None, description="The branch's folder; default RUN-fork-STEP.")
    beside: tuple[str, ...] = Field((), description="Other branches for the page.")


def run_fork(arguments: list[str]) -> int:
    """Branch a run and train the branch; the exit code."""
    own = {f"--{name}" for name in ForkCommand.model_fields} | HELP
    settings = list[str]()
    words = list[str]()
    for word in arguments:
        is_option = word.startswith("-")
        inside = _is_setting(word, own) if is_option else settings[-1:] == [_pending(settings)]
        (settings if inside else words).append(word)
    command = parse("fork", ForkCommand, words)
    if command.at is None:
        raise UsageError("Say at which step: etude fork RUN --at STEP --section.field value.")
    from etude.building.forking import fork
    from etude.cli.report import run as report
    from etude.cli.train import run_resume
    from etude.runs import files

    parent = Path(command.run)
    name = f"{parent.name}-fork-{command.at}"
    folder = Path(command.folder) if command.folder else files.free_path(parent.with_name(name))
    step = fork(parent, command.at, folder, command.trust)
    _say(f"{folder} shares the {step:,} steps of {parent}; they are not trained again.")
    try:
        run_resume([str(folder), *settings])
    except UsageError:
        if not any(folder.glob("events.*")):  # refused before it began
            files.remove_tree(folder)
        raise
    report([str(parent), *command.beside, str(folder), "-o", str(folder / "beside.html")])
    return 0


def _pending(settings: list[str]) -> str | None:
    """The last word of settings, if it is an option that waits for its value."""
    last = settings[-1] if settings else ""
    return last if last.startswith("--") and "=" not in last else None
