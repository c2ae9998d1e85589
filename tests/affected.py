"""The tests that a change touches, by the import graph.

    python tests/affected.py                     # run them, quick and slow, the nearest files first
    python tests/affected.py --since a1b2c3 --list
    python tests/affected.py -- -x -n 2          # with options of pytest

A file is affected by what it imports, directly or not, and by a module, class or function that it
names in a string ("package.module:name"). Tests and gates are also affected by what a key stands
for in a table of such strings ("reach", "ppo"), and by other files that they name, or whose folder
they name ("torn_checkpoints.py", "docs"). What a change breaks in any other way, only CI finds.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import rotation

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"^(\w+(?:\.\w+)+)(?::\w+)?$")
"""A module, class or function in a string, which is imported when it is used."""


class Graph:
    """Which Python file of a repository depends on which file.

    files: paths relative to the root, of Python and of anything else.
    """

    def __init__(self, root: Path, files: list[str]) -> None:
        self._root = root
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        self._by_name: dict[str, list[str]] = defaultdict(list)
        sources = [file for file in files if file.endswith(".py")]
        for file in files:
            self._by_name[Path(file).name].append(file)
            if not file.endswith(".py"):
                for folder in Path(file).parent.parts:
                    self._by_name[folder].append(file)
        for file in sources:
            self._by_stem[_dotted(file).rpartition(".")[2]].append(file)
        trees = {file: ast.parse((root / file).read_text()) for file in sources}
        self._keys = self._tables(trees)
        self.users: dict[str, set[str]] = defaultdict(set)
        """{file: those that depend on it directly}."""
        for file, tree in trees.items():
            for used in self._used(file, tree):
                self.users[used].add(file)

    def _tables(self, trees: dict[str, ast.Module]) -> dict[str, set[str]]:
        """{key: files} of all dictionaries from names to classes and functions in strings."""
        keys: dict[str, set[str]] = defaultdict(set)
        for file, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if (text := _text(key)) and (named := NAMED.match(_text(value))):
                            keys[text].update(self._modules(named[1], file))
        return keys

    def _modules(self, name: str, user: str) -> Iterator[str]:
        """Files of a dotted name as a file imports it, and the packages around them."""
        same = str(Path(user).parent)
        ends = [
            file
            for file in self._by_stem[name.rpartition(".")[2]]
            if f".{_dotted(file)}".endswith(f".{name}")
        ]
        # A module of one word is not inside a package; that of the same folder comes first.
        near = [file for file in ends if str(Path(file).parent) == same]
        found = near if near and "." not in name else ends
        if "." not in name:
            found = [f for f in found if not (self._root / f).with_name("__init__.py").exists()]
        for file in found:
            yield file
            for above in Path(file).parents:
                if (self._root / above / "__init__.py").exists():
                    yield str(above / "__init__.py")

    def _used(self, file: str, tree: ast.Module) -> Iterator[str]:
        in_tables = {
            id(value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for value in [*node.keys, *node.values]
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._modules(alias.name, file)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from self._modules(node.module, file)
                for alias in node.names:
                    yield from self._modules(f"{node.module}.{alias.name}", file)
            elif (text := _text(node)) and id(node) not in in_tables:
                if named := NAMED.match(text):
                    yield from self._modules(named[1], file)
                if not file.startswith("src/"):
                    yield from self._keys.get(text, ())
                    yield from self._by_name.get(text.rpartition("/")[2], ())

    def affected(self, changed: list[str]) -> dict[str, int]:
        """{file: imports between it and the nearest change}, of all that depend on the changes."""
        distance = dict.fromkeys(changed, 0)
        waiting = list(changed)
        for file in waiting:
            for user in sorted(self.users[file] - distance.keys()):
                distance[user] = distance[file] + 1
                waiting.append(user)
        return distance


def _dotted(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def changes(since: str | None) -> list[str]:
    """Files that differ from a commit, by default from where this branch left main; on main, from
    HEAD, or from the commit before it where nothing differs."""
    new = git("ls-files", "--others", "--exclude-standard")
    base = [since] if since else git("merge-base", "HEAD", "main")
    found = [*git("diff", "--name-only", *base), *new]
    return found or git("diff", "--name-only", "HEAD~1")


def tests(distance: dict[str, int]) -> list[str]:
    """Files of tests, the nearest to a change first."""
    found = [f for f in distance if Path(f).name.startswith("test_") and f.endswith(".py")]
    return sorted(found, key=lambda file: (distance[file], file))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--since", help="commit to compare with; default: where main was left")
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    parser.add_argument("pytest", nargs="*", help="options of pytest, after --")
    options = parser.parse_args()
    changed = changes(options.since)
    graph = Graph(ROOT, git("ls-files", "--cached", "--others", "--exclude-standard"))
    found = [file for file in tests(graph.affected(changed)) if (ROOT / file).exists()]
    taken = rotation.load()["always"]
    names = {Path(file).name for file in found}
    minutes = sum(s for test, s in taken.items() if test.partition("::")[0] in names) / 60
    print(f"{len(changed)} files changed, {len(found)} files of tests affected, {minutes:.1f} min")
    if options.list or not found:
        print("\n".join(found))
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "not rotated", *options.pytest, *found]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
