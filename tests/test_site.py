"""The documentation site builds without a warning, and no link in it leads nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

from etude.core.catalogue import RECIPES
from etude.planning.recipes import made_by

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
import screenshots  # noqa: E402
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[screenshots.Browser]:
    if shutil.which("chromium") is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with screenshots.Browser() as opened:
        yield opened


@pytest.mark.rotated
def test_the_site_is_whole(site: Path) -> None:
    assert problems(site) == []
    fields = (site / "reference/algorithm.html").read_text()
    assert "algorithm.minibatch_size" in fields
    assert "n_steps" in fields
    assert "etude compare" in (site / "reference/command-line.html").read_text()
    python = (site / "reference/python.html").read_text()
    assert "load_policy" in python
    assert "Recipe.replace" in python


@pytest.mark.rotated
def test_nothing_is_cut_in_a_wide_and_in_a_narrow_window(
    site: Path, browser: screenshots.Browser, tmp_path: Path
) -> None:
    cut = {}
    for page in screenshots.pages(site):
        for width in screenshots.WIDTHS:
            browser.open(site / page, width)
            if found := browser.cut():
                cut[page, width] = found
    assert cut == {}
    browser.open(site / "about/gallery.html", 420)
    browser.picture(tmp_path / "gallery.png")
    with Image.open(tmp_path / "gallery.png") as picture:
        assert picture.width == 420
        assert picture.height > 3000


def test_what_is_cut_is_found(browser: screenshots.Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    fits = '<pre style="white-space: pre-wrap">'
    for code, cut in (("<pre style='overflow: auto'>", 1), (fits, 0)):
        head = '<meta name="viewport" content="width=device-width"><div class="md-content">'
        page.write_text(f"{head}{code}{'a word ' * 90}</pre></div>")
        browser.open(page, 420)
        assert len(browser.cut()) == cut


COPIED = """
(async () => {
  let copied = null;
  document.addEventListener("copy", event => { copied = event.target.value; });
  const all = [...document.querySelectorAll("code")];
  const block = all.find(each => each.textContent.includes("%s"));
  block.closest(".highlight").querySelector(".md-clipboard, [data-clipboard-target]").click();
  await new Promise(done => setTimeout(done, 300));
  return copied;
})()
"""


@pytest.mark.rotated
def test_the_copy_button_takes_commands_alone(site: Path, browser: screenshots.Browser) -> None:
    """Without prompts and answers, and Python as it is."""
    browser.open(site / "index.html", 1400)
    commands = browser.evaluate(COPIED % "etude train reach --folder").splitlines()
    assert [" ".join(line.partition("#")[0].split()) for line in commands] == [
        "etude demo walk-go1 --seconds 3",
        "etude train reach --folder runs/first",
        "etude resume runs/first",
    ]
    assert browser.evaluate(COPIED % "import etude").startswith("import etude\n\nrecipe = ")
    browser.open(site / "first-run.html", 1400)
    copied = browser.evaluate(COPIED % "--lr 1e-4").splitlines()
    assert copied == ["etude plan reach --lr 1e-4", "etude plan reach --epochs 10"]


@pytest.mark.parametrize(
    ("head", "cells", "labelled"),
    [
        (
            ("a", "<code>b</code>", "c &amp; d"),
            ("1", "", "3"),
            '<td data-label="a"><div>1</div></td><td data-label="b"></td>'
            '<td data-label="c &amp; d"><div>3</div></td>',
        ),
        (("a",), ("1",), "<td>1</td>"),
        (("<img>", "b", "c"), ("1", "2", "3"), "<td>1</td><td>2</td><td>3</td>"),
    ],
)
def test_cells_of_tables_have_the_names_of_their_columns(
    head: tuple[str, ...], cells: tuple[str, ...], labelled: str
) -> None:
    pytest.importorskip("mkdocs")
    import hooks

    top = "".join(f"<th>{name}</th>" for name in head)
    row = "".join(f"<td>{text}</td>" for text in cells)
    table = f"<table><thead><tr>{top}</tr></thead><tbody><tr>{row}</tr></tbody></table>"
    assert f"<tr>{labelled}</tr>" in hooks.on_page_content(table)


def test_options_in_code_are_marked() -> None:
    pytest.importorskip("mkdocs")
    import hooks

    option, other = "<code>etude eval --video</code>", "<p>a --video</p><code>a--b -- -x</code>"
    marked = option.replace("--video", '<span class="option">--video</span>')
    assert hooks.on_page_content(option + other) == marked + other


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


NO_FILM_YET = {
    *("walker2d", "ant", "seek-pictures", "track-g1"),
    "humanoid",
}
"""Cards whose film is still to be made by docs/images/draw_films.py."""


def test_every_recipe_with_an_environment_is_on_a_card_with_a_film() -> None:
    shown = [name for entry in gallery.TASKS for name in (entry.recipe, *entry.variants)]
    assert len(shown) == len(set(shown))
    any_environment = {"ppo", "sac", "td3", "rlpd", "track"}  # or those of a dataset
    with_one = {name for name in RECIPES.built_in() if made_by(name)().env is not None}
    assert with_one - any_environment == set(shown)
    missing = {entry.recipe for entry in gallery.TASKS if not gallery.film(entry).is_file()}
    assert missing == NO_FILM_YET
    for entry in gallery.TASKS:
        card = gallery.card(entry, {})
        if entry.recipe not in missing:
            assert gallery.film(entry).stat().st_size < 300_000, entry.recipe
            assert f"images/{gallery.film(entry).name})" in card
        assert card.index("`etude train") < card.index("<details") < card.index("its recipe")


def test_the_readme_begins_with_films_a_sentence_a_chart_and_three_commands() -> None:
    first = (ROOT / "README.md").read_text().partition("## What it does")[0]
    places = [".webp", "Etude trains", "never run on a GPU", "-seconds.svg", "$ etude demo"]
    found = [first.index(text) for text in places]
    assert found == sorted(found)
    assert first.count(".svg") == 1
    assert first.count("\n$ etude") == 3
    assert "<!-- figure: headline" not in first


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
