"""The documentation site builds without a warning, and no link in it leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [
    page for page in sorted(ROOT.glob("docs/[a-z]*/*.md")) if page.parent.name != "decisions"
]
sys.path.insert(0, str(ROOT / "docs/_site"))
sys.path.insert(0, str(ROOT / "docs/images"))
import draw_diagrams  # noqa: E402

import coverage_page  # noqa: E402
import decisions  # noqa: E402
import gallery  # noqa: E402
import repository  # noqa: E402
import test_docs  # noqa: E402


class Links(HTMLParser):
    """What a page leads to, loads and names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: set[str] = set()
        self.loads: set[str] = set()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.leads.add(given["href"])
        elif tag in ("script", "link", "img", "source", "video", "iframe"):
            self.loads |= {given[name] for name in ("src", "href", "poster") if name in given}


def problems(site: Path) -> list[str]:
    """Links of a built site that lead nowhere, and what it loads from elsewhere."""
    pages = {path.resolve(): Links(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.leads | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                found += [f"{path.name} loads {link}"] if link in page.loads else []
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if path.name != "404.html" and not place.exists():
                found.append(f"{path.name} leads to {link}")
            elif parts.fragment and place in pages:
                names = pages[place].names
                known = unquote(parts.fragment) in names or parts.fragment.startswith("__")
                found += [] if known else [f"{path.name} leads to {link}"]
    return found


@pytest.mark.rotated
def test_the_site_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert problems(tmp_path / "site") == []
    fields = (tmp_path / "site/reference/algorithm.html").read_text()
    assert "algorithm.minibatch_size" in fields
    assert "n_steps" in fields
    assert "etude compare" in (tmp_path / "site/reference/command-line.html").read_text()
    python = (tmp_path / "site/reference/python.html").read_text()
    assert "load_policy" in python
    assert "Recipe.replace" in python


@pytest.mark.rotated
@pytest.mark.parametrize(
    "page",
    [page for page in FOLDERS if test_docs.blocks(page)],
    ids=lambda page: f"{page.parent.name}/{page.name}",
)
def test_pages_in_folders_do_what_they_say(page: Path, tmp_path: Path) -> None:
    test_docs.test_page(page, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="other.html">', "leads to other.html"),
        ('<a href="#below">', "leads to #below"),
        ('<script src="https://unpkg.com/x.js"></script>', "loads https://unpkg.com/x.js"),
        ('<img src="x.png">', "leads to x.png"),
    ],
)
def test_what_leads_nowhere_is_found(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(text)
    assert [each.partition(" ")[2] for each in problems(tmp_path)] == [problem]


def test_what_is_there_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<h2 id="a"></h2><a href="page.html#a"><a href="https://x">'
    )
    assert problems(tmp_path) == []


def test_the_gallery_is_that_of_its_table() -> None:
    assert gallery.PAGE.read_text() == gallery.page(), "run python docs/_site/gallery.py"


def test_the_page_of_coverage_adds_up() -> None:
    def file(statements: int, missing: int) -> dict[str, dict[str, int]]:
        return {"summary": {"num_statements": statements, "missing_lines": missing}}

    files = {
        "/a/src/etude/rl/ppo.py": file(80, 20),
        "/a/src/etude/rl/sac.py": file(20, 5),
        "/a/src/etude/core/keys.py": file(100, 0),
        "/a/src/etude/runs/__init__.py": file(0, 0),
    }
    text = coverage_page.page({"files": files}, "some tests", "a1b2c3d")
    assert "commit a1b2c3d: **87.5%** of 200" in text
    assert "| `core` | 100 | 100.0% |\n| `rl` | 100 | 75.0% |\n\n" in text
    assert text.index("| `rl/ppo.py` | 20 | 75.0% |") < text.index("| `rl/sac.py` | 5 | 75.0% |")


def test_decisions_have_numbers_without_holes_and_stand_in_their_index() -> None:
    assert decisions.problems() == []
    assert decisions.INDEX.read_text() == decisions.page(), "run python docs/_site/decisions.py"


def test_a_decision_with_a_hole_before_it_or_without_a_status_is_found(tmp_path: Path) -> None:
    (tmp_path / "0001-a.md").write_text("# 1. A\n\nStatus: accepted (since 1.0)\n")
    (tmp_path / "0003-b.md").write_text("# 2. B\n\nStatus: tried\n")
    found = "rename 0003-b.md to 0002-b.md: numbers have no holes"
    assert decisions.problems(tmp_path) == [found]
    (tmp_path / "0003-b.md").rename(tmp_path / "0002-b.md")
    assert decisions.problems(tmp_path) == []
    assert decisions.row(tmp_path / "0001-a.md") == "| 1 | [A](0001-a.md) | accepted |"
    with pytest.raises(ValueError, match=r"0002-b\.md must begin"):
        decisions.row(tmp_path / "0002-b.md")


def test_pages_are_published_under_the_version_of_the_package() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = ["make", "-n", "-C", ROOT, "site-version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"mike deploy --update-aliases {version.rpartition('.')[0]} latest" in said
    assert "provider: mike" in (ROOT / "mkdocs.yml").read_text()


def test_the_diagrams_are_those_of_their_script() -> None:
    for path, text in draw_diagrams.drawings():
        assert path.read_text() == text, "run python docs/images/draw_diagrams.py"


def test_files_of_the_repository_get_pages() -> None:
    text = "[a gate](../gates/exact/ranks.py), [a page](first-run.md#x), [nothing](../none.py)"
    made = repository.pages({"docs/page.md": text})
    assert list(made) == ["source/gates/exact/ranks.py.md"]
    assert '"""' in made["source/gates/exact/ranks.py.md"]
    on_site = repository.relinked(text, "docs/page.md", "page.md")
    assert on_site == (
        "[a gate](source/gates/exact/ranks.py.md), [a page](first-run.md#x), [nothing](../none.py)"
    )


def test_links_of_other_files_lead_to_pages() -> None:
    text = "[faults](docs/faults.md#x) [source](CONTRIBUTING.md) [web](https://example.org/a)"
    assert repository.relinked(text, "CHANGELOG.md", "about/changelog.md") == (
        "[faults](../faults.md#x) [source](../source/CONTRIBUTING.md) [web](https://example.org/a)"
    )
