"""The table of decisions: `python docs/_site/decisions.py` writes it into docs/decisions/README.md.

A record is docs/decisions/NNNN-title.md; its first line has number and title, and a line that
begins with "Status:" its status. A test fails where the table and the records differ.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "decisions"
INDEX = FOLDER / "README.md"
_TABLE = re.compile(r"(<!-- index -->\n).*?(<!-- /index -->)", re.DOTALL)
_TITLE = re.compile(r"# (\d+)\. (.+)")
_STATUS = re.compile(r"^Status: (proposed|accepted|rejected|replaced by \d+)\b", re.MULTILINE)


def records(folder: Path = FOLDER) -> list[Path]:
    return sorted(folder.glob("[0-9]*.md"))


def row(path: Path) -> str:
    """A record's line of the table; ValueError if it lacks a part."""
    text = path.read_text()
    title, status = _TITLE.match(text), _STATUS.search(text)
    if not title or not status:
        raise ValueError(f'{path.name} must begin with "# N. Title" and have a line "Status: ..."')
    return f"| {title[1]} | [{title[2]}]({path.name}) | {status[1]} |"


def problems(folder: Path = FOLDER) -> list[str]:
    """Numbers that are not 1, 2, 3, ..., in names of files and in titles."""
    found = []
    for number, path in enumerate(records(folder), start=1):
        if not path.name.startswith(f"{number:04d}-"):
            name = f"{number:04d}{path.name[4:]}"
            found.append(f"rename {path.name} to {name}: numbers have no holes")
        elif not path.read_text().startswith(f"# {number}. "):
            found.append(f'the title of {path.name} must begin with "# {number}. "')
    return found


def page(folder: Path = FOLDER) -> str:
    """README.md with the table of today's records."""
    table = "\n".join(["| # | decision | status |", "|---|---|---|", *map(row, records(folder))])
    return _TABLE.sub(rf"\1\n{table}\n\n\2", (folder / "README.md").read_text())


if __name__ == "__main__":
    INDEX.write_text(page())
    print("\n".join(problems()) or f"{len(records())} records")
