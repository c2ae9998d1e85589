"""Find phrases in comments and strings of src, gates and benchmarks that readers have to decode.

    python tests/language.py    # part of `make check`

CONTRIBUTING.md says how to write instead.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "gates", "benchmarks")
UNCLEAN: tuple[str, ...] = ()
"""Files and packages that are not rewritten yet. Remove an entry once it is clean."""
PHRASES = {
    ("is no", "are no"): '"is not", or name what it is',
    ("so many", "so much", "so long", "so often"): "the name or the number: `steps`, 100 rows",
    ("in vain",): "the consequence: times out, fails",
    ("likewise",): "the sentence itself, once more",
    ("told",): "printed, reported, passed to",
    ("belongs into", "belong into"): "put it into, is part of",
    ("is such as", "are such as"): '"for example", or a noun before "such as"',
    ("stranger", "strangers"): "untrusted file, other package",
    ("whoever",): "the caller, the user, the process that",
    ("nobody", "somebody"): "no user, no process, unknown",
    ("it is none", "that is none", "which is none"): '"None", "without one", "if it is missing"',
    ("one's own",): '"your own", "user-defined"',
    ("of late",): "recently",
    ("as a rule",): "usually",
    ("otherwise than",): '"differs from", with both values',
}
"""{phrases: what to write instead}, in comments, docstrings and other strings."""
FINE = re.compile(
    r"\bthere (is|are) no\b|\b(is|are) no (longer|more)\b|\bso (many|much|long|often) (that|as)\b"
)
"""Plain uses of these words."""
BEGINNINGS = {
    r"What\b": "a verb or a noun: Compute ..., The ... of ...",
    r"Of\b": "the noun that it is of: Relative change of ..., Bytes of ...",
    r"Such as\b": '"For example"',
}
"""{beginning of a docstring: how to begin instead}."""
_SIMPLE = [each for phrases in PHRASES for each in phrases]
_ANY_PHRASE = re.compile(rf"\b({'|'.join(_SIMPLE)})\b")
_ANY_BEGINNING = re.compile(rf'"""({"|".join(BEGINNINGS)})')


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of all comments and strings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, " ".join(node.value.split()), id(node) in docstrings
    comment, first, last = "", 0, -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            if token.start[0] == last + 1:
                comment += f" {text}"
            else:
                yield first, comment, False
                comment, first = text, token.start[0]
            last = token.start[0]
    yield first, comment, False


def may_have_faults(source: str) -> bool:
    """A quick test of the source as one text, without parsing it."""
    text = " ".join(re.sub(r'"\s*\n\s*f?"|\n\s*#', " ", source).split()).lower()
    text = FINE.sub("", text) if any(each in text for each in _SIMPLE) else ""
    return bool(_ANY_PHRASE.search(text) or _ANY_BEGINNING.search(source))


def faults(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, phrase, what to write instead) of all phrases in a source."""
    if not may_have_faults(source):
        return
    for line, text, is_docstring in texts(source):
        left = FINE.sub("", text.lower())
        for phrases, instead in PHRASES.items():
            if found := re.search(rf"\b({'|'.join(phrases)})\b", left):
                yield line, found[0], instead
        for beginning, instead in BEGINNINGS.items() if is_docstring else ():
            if re.match(beginning, text):
                yield line, " ".join(text.split()[:3]), instead


def check(unclean: tuple[str, ...] = UNCLEAN) -> list[str]:
    """All phrases outside of `unclean`, and the entries of `unclean` that are clean."""
    wrong, left = [], set(unclean)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            entry = next((each for each in unclean if name.startswith(each)), None)
            if entry is None:
                found = faults(path.read_text(encoding="utf-8"))
                wrong += [f'{name}:{line}: "{text}": write {to}' for line, text, to in found]
            elif entry in left and next(faults(path.read_text(encoding="utf-8")), None):
                left.remove(entry)
    return wrong + [f"{entry} is clean: remove it from UNCLEAN" for entry in sorted(left)]


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems))
    sys.exit(bool(problems))
