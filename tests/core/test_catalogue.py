"""Names and purposes of kinds, read without importing their modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.core.catalogue import Catalogue

MODULE = '''
raise RuntimeError("this module was imported")


class Plain:
    """One purpose."""


class Flush:
    text = """
text that is not indented"""


class Cut(Plain):
    """Another purpose.

    Second paragraph.
    """

    text = """
class Text:
    """


def make(
    first: int,
    second: str = "a",
) -> Plain:
    """A third purpose."""


class Text:
    """The last purpose."""
'''


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        ("Plain", "One purpose."),
        ("Flush", ""),
        ("Cut", "Another purpose."),
        ("make", "A third purpose."),
        ("Text", "The last purpose."),
        ("Missing", ""),
    ],
)
def test_purposes_are_first_lines_of_docstrings(
    name: str, purpose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "purposes_of_a_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    catalogue = Catalogue("etude.nothing", ())
    monkeypatch.setattr(catalogue, "built_in", lambda: {"a": f"purposes_of_a_package:{name}"})
    assert catalogue.purpose("a") == purpose
