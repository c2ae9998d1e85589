"""Links from pages to files of the repository that are no pages, such as ../gates/exact/ranks.py.

Such a link works where the repository is read as it is. On the site the file gets a page of its
own, `source/...`, and the link is led there: the site is whole without a network, and nothing has
to know at which address the repository is published, or at which commit.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json"}
SHOWN |= {".sh": "bash", ".xml": "xml", ".txt": "text", ".cff": "yaml", "": "text"}
HOME = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository that are pages of the site's navigation."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\)| \")")
_ELSEWHERE = re.compile(r"[a-z]+:|/")


def pages(texts: dict[str, str]) -> dict[str, str]:
    """{page of the site: text} of every file that some page links to, directly or through others.

    texts: {path in the repository: Markdown} of the pages that there are.
    """
    made: dict[str, str] = {}
    waiting = list(texts.items())
    while waiting:
        place, text = waiting.pop()
        for found in _LINK.finditer(text):
            target = _target(found[2], place)
            if target is None or _page_of(target) in made:
                continue
            content = _markdown(target)
            made[_page_of(target)] = relinked(content, target, _page_of(target))
            waiting.append((target, content))
    return made


def on_site(path: str, page: str) -> str:
    """A Markdown file of the repository as a page of the site."""
    return relinked((ROOT / path).read_text(), path, page)


def relinked(text: str, place: str, page: str) -> str:
    """Markdown at `place` in the repository, its links as they are from `page` on the site."""

    def led(found: re.Match[str]) -> str:
        link, anchor = found[2], found[3] or ""
        if _ELSEWHERE.match(link):
            return found[0]
        path = _resolved(link, place)
        there = HOME.get(path, path.removeprefix("docs/"))
        there = _page_of(path) if _target(link, place) else there
        if there == path:  # Neither a page nor a file: left as it is, and the strict build says so.
            return found[0]
        return f"{found[1]}{posixpath.relpath(there, posixpath.dirname(page))}{anchor}"

    return _LINK.sub(led, text)


def _target(link: str, place: str) -> str | None:
    """The file or folder of the repository behind a link; None for pages and other links."""
    if _ELSEWHERE.match(link):
        return None
    path = _resolved(link, place)
    outside = path.startswith("../") or not (ROOT / path).exists()
    published = path.startswith("docs/") and not path.endswith(".py")
    return None if outside or published or path in HOME else path


def _resolved(link: str, place: str) -> str:
    """A link as a path from the root of the repository; `place` of a folder ends with /."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _page_of(path: str) -> str:
    kind = Path(path).suffix
    return f"source/{path.removesuffix('.md') if kind == '.md' else path}.md"


def _markdown(path: str) -> str:
    """A file as Markdown: its text, or a list of what is in a folder."""
    file = ROOT / path
    quiet = "---\nsearch:\n  exclude: true\n---\n\n"
    if file.is_dir():
        inside = sorted(each for each in file.rglob("*") if each.is_file())
        names = [os.path.relpath(each, file.parent) for each in inside if _readable(each)]
        return f"{quiet}# {path}\n\n" + "\n".join(f"- [{n}]({n})" for n in names) + "\n"
    if file.suffix == ".md":
        return quiet + file.read_text()
    return f"{quiet}# {path}\n\n````{SHOWN[file.suffix]}\n{file.read_text()}\n````\n"


def _readable(file: Path) -> bool:
    hidden = {"__pycache__"}.intersection(file.parts) or "egg-info" in str(file)
    return not hidden and (file.suffix in SHOWN or file.suffix == ".md")
