"""What `mkdocs build` adds to the pages in docs/: reference, files of the repository.

MkDocs calls the functions named `on_...`; mkdocs.yml names this file under `hooks`.
"""

from __future__ import annotations

import re
from html import escape, unescape
from itertools import cycle
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import reference
import repository

MADE: set[str] = set()
"""Pages of this build that no file in docs/ is behind."""
DOCS = repository.ROOT / "docs"
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_CODE = re.compile(r"<code.*?</code>", re.DOTALL)
_OPTION = re.compile(r"(?<![^\s>\[(|])--[a-z][\w.-]*")
_FENCE = re.compile(r"^(```\w+) (file=(\S+)|own=(\S+)|fails)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every decision into the navigation below their index."""
    numbered = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    entries = [{_title(path.read_text()): f"decisions/{path.name}"} for path in numbered]
    for entry in config.nav or []:
        if "Decisions" in entry:
            entry["Decisions"] = [entry["Decisions"], *entries]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of the code, and those of files that other pages link to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (repository.ROOT / name).read_text() for name in repository.HOME}
    made = reference.pages()
    for name, uri in repository.HOME.items():
        made[uri] = repository.on_site(name, uri)
    made |= repository.pages(texts)
    MADE.update(made)
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to files of the repository to their pages, and name the files in blocks."""
    uri = page.file.src_uri
    if uri not in MADE:
        markdown = repository.relinked(markdown, f"docs/{uri}", uri)
    return _FENCE.sub(_info, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Give each cell of a table its column's name, for narrow windows, where site.css shows a row
    as a list, and mark options of commands, which are not to break behind their hyphens."""
    html = _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    return _TABLE.sub(_labelled, html)


def _labelled(table: re.Match[str]) -> str:
    names = [escape(unescape(re.sub(r"<[^>]+>", "", each))) for each in _HEAD.findall(table[0])]
    if len(names) < 2 or "<img" in table[0].partition("<tbody>")[0]:
        return table[0]
    columns = cycle(names)

    def labelled(cell: re.Match[str]) -> str:
        inside = f"<div>{cell[2]}</div>" if cell[2].strip() else ""
        return f'<td data-label="{next(columns)}"{cell[1]}>{inside}</td>'

    return _CELL.sub(labelled, table[0].replace("<table", f'<table data-columns="{len(names)}"', 1))


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def _info(match: re.Match[str]) -> str:
    """The tests' words after a block's language, as the site shows them."""
    name = match[3] or match[4]
    return f'{match[1]} title="{name}"' if name else f'{match[1]} title="refused"'
