"""`etude replay`: any moment of a training again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.cli.options import Positional, Reporting, Trusting, parse
from etude.core.errors import UsageError
from etude.rollout.local import THREADS

FORMATS = ("page", "table", "dataset", "film")


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
    say = (lambda text: None) if command.json_output else lambda text: print(text, flush=True)
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
