"""Every command and every block of Python in README and docs does what the page says."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import short_recipes
from commands import run_all
from etude.api import train

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\S+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLUGINS = "plugins.md"
"""Its commands need the package that it shows: `test_plugin.py` runs them."""
INSTALL = ("pip", "python3", "git", ".")
"""What sets up an environment: CI itself does that."""


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(language, rest of the info string, text) of every fenced block that can be run."""
    found = [(m[1], m[2].strip(), m[3]) for m in BLOCK.finditer(page.read_text())]
    return [block for block in found if block[0] in ("console", "python")]


def commands(text: str) -> list[list[str]]:
    lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    parsed = [shlex.split(line, comments=True) for line in lines]
    return [command for command in parsed if command[0] not in INSTALL]


def answers(text: str) -> list[str]:
    """What a block shows below each of its commands, with single spaces."""
    return [" ".join(part.partition("\n")[2].split()) for part in f"\n{text}".split("\n$ ")[1:]]


def run(commands: list[list[str]], folder: Path, quick: bool) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of commands; `quick` for processes with the libraries loaded."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100"}
    if quick:
        return run_all([words for _, *words in commands], folder, environment)
    options: Any = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = [
        subprocess.run([sys.executable, "-m", *words], timeout=300, **options) for words in commands
    ]
    return [(one.returncode, one.stdout, one.stderr) for one in done]


def parts(page: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(language, rest of the info string, texts) of a page; neighbours of one kind together."""
    for (language, info), found in itertools.groupby(blocks(page), key=lambda block: block[:2]):
        yield language, info, [text for _, _, text in found]


@pytest.mark.rotated
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != PLUGINS], ids=lambda page: page.name
)
def test_page(page: Path, tmp_path: Path) -> None:
    """README's commands are run as they are typed."""
    files: dict[str, str] = {}
    for _, info, text in blocks(page):
        if info.startswith("file="):
            files[info] = f"{files[info]}\n{text}" if info in files else text
    for info, text in files.items():
        (tmp_path / info.removeprefix("file=")).write_text(text)
    for language, info, texts in parts(page):
        if info.startswith("file="):
            continue
        if language == "python":
            for text in texts:
                done = subprocess.run(
                    [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, timeout=300
                )
                assert done.returncode == 0, done.stderr.decode()
        else:
            typed = [command for text in texts for command in commands(text)]
            assert {command[0] for command in typed} <= {"etude"}, "a page may only run etude"
            shown = [answer for text in texts for answer in answers(text)]
            done = run(typed, tmp_path, quick=page.name != "README.md")
            for number, (code, out, err) in enumerate(done):
                assert "Traceback" not in err
                assert (code != 0) == (info == "fails"), out + err
                assert info != "fails" or shown[number] == " ".join(err.split())


def test_every_refused_command_shows_its_answer() -> None:
    """Whether it is the right one, the tests say that run the page."""
    pages = [*PAGES, *sorted((ROOT / "docs").glob("*/*.md"))]
    shown = [
        answer
        for page in pages
        for _, info, text in blocks(page)
        if info == "fails"
        for answer in answers(text)
    ]
    assert len(shown) > 8
    assert all(shown)


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme, f"README does not mention {page.name}"


def test_what_the_pages_write_is_ignored_by_git() -> None:
    """Datasets and runs where the pages put them."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    lines = [line.split() for page in PAGES for line in page.read_text().splitlines()]
    made = [words for words in lines if words[:2] == ["etude", "data"] and len(words) > 4]
    out = {words[4] for words in made if words[2] in ("record", "import")} | {"runs/first"}
    assert "data/pick" in out
    for path in out:
        assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0, path


def test_names_of_the_reference_lead_to_metrics_that_are_logged(tmp_path: Path) -> None:
    """The table of names in docs/rewards.md, against the rows of a run with all of them."""
    table = (ROOT / "docs/rewards.md").read_text().partition("| there | here | difference |")[2]
    lines = table.strip().splitlines()[1:]
    rows = [line.split("|") for line in itertools.takewhile(lambda line: line[:1] == "|", lines)]
    there, here = (re.findall(r"`([^`]+)`", " ".join(row[k] for row in rows)) for k in (1, 2))
    assert len(there) == len(here)
    assert {"Q_loss", "Pi_loss", "Q_average", "R_loss", "R_var"} <= set(there)
    recipe = short_recipes.find("episodic-short")
    clock = recipe.clock.model_copy(update={"total_timesteps": 768})
    last = train(recipe.model_copy(update={"clock": clock}), tmp_path / "run").rows()[-1]
    assert set(here) <= set(last)
