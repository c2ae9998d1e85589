"""Comments and strings say what they mean in the field's words."""

from __future__ import annotations

import pytest

import language
from language import BEGINNINGS, PHRASES


def test_no_phrase_has_to_be_decoded() -> None:
    assert language.check() == []


@pytest.mark.parametrize("phrase", [each for phrases in PHRASES for each in phrases])
@pytest.mark.parametrize(
    "source",
    [
        '"""A sentence {} here."""\n',
        'def f():\n    raise ValueError(f"{{f}} {} here")\n',
        "x = 1  # here {} it is\n",
        'x = (\n    "one {0} "\n    "{1} other"\n)\n',
        '"""One {0}\n{1} other."""\n',
        "# One {0}\n# {1} other.\n",
    ],
)
def test_each_phrase_is_found(phrase: str, source: str) -> None:
    first, _, rest = phrase.partition(" ")
    broken = source.format(first, rest) if "{1}" in source else source.format(phrase)
    assert [found for _, found, _ in language.faults(broken)] == [phrase]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_each_beginning_is_found(beginning: str) -> None:
    text = beginning.removesuffix(r"\b")
    assert len([*language.faults(f'def f():\n    """{text} a run keeps."""\n')]) == 1
    assert not [*language.faults(f'f = "{text} a run keeps"\n')]


@pytest.mark.parametrize(
    "text",
    [
        '"""There is no run in this folder."""',
        "# It is no longer exact.",
        '"""Resume a run, for example after a kill, so that nothing is lost."""',
        "told = so_many = 1",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not [*language.faults(text)]


def test_a_clean_entry_must_go() -> None:
    assert language.check((*language.UNCLEAN, "src/etude/models/")) == [
        "src/etude/models/ is clean: remove it from UNCLEAN"
    ]
