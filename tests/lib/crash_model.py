"""What a disk may hold after a crash, worked out from a recording of writes and flushes.

Promised by POSIX, and all that is promised here:

- After fsync of a file its bytes and its size are there, under whatever names it then has.
- After fsync of a folder the names in it are as they were: files and folders made in it, removed
  from it or renamed into, within or out of it. fsync of a file says nothing of its name.
- A rename is one change: never half done, never both names, never neither. One from a folder to
  another is certain only when both have been flushed.

Everything else that was asked for before the crash may have happened or not:

- Each write since a file's last fsync is lost, whole, cut short, or torn: any of its sectors of
  512 bytes is new and the others are as before (zero where there was nothing). So writes may be
  reordered in any way. A changed size is lost or kept, with or without the bytes.
- Of the changes to a folder's names since its last fsync a prefix has happened (`ordered`), each
  folder by itself; or any subset of them (`subset`), as where a file system logs single names. A
  change to a name that is not there without an earlier, lost one is lost as well.

ext4, xfs and btrfs promise more (a journal keeps the order over all folders; fsync of a new file
keeps its name); every state they can leave is among these. Not here: sectors torn within, flushes
that a disk acknowledges and does not do, damage to what was flushed.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from recording_fs import Entry

SECTOR = 512
FIXED = ("killed", "synced", "names", "sizes", "data")
"""Nothing lost; all lost that may be; only data lost; the same, with sizes; only names lost."""
DRAWN = ("ordered", "subset")
"""Chosen at random, in as many draws as one likes."""

State = dict[str, "bytes | str | None"]
"""A tree of files by path: bytes of a file, target of a symbolic link, None for a folder."""


@dataclass(eq=False)
class Node:
    """A file, folder or link; `live` is what a reader sees, `safe` what is flushed."""

    kind: str
    target: str = ""
    live: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes (offset, data) and changes of size (size, None) since the last fsync, in order."""
    names: dict[str, Node] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """A change of names: `node` leaves one place, comes to another, or both."""

    node: Node
    leaves: tuple[Node, str] | None
    comes: tuple[Node, str] | None
    waits: set[int]
    """Folders, by id, that must be flushed before it is certain."""


def apply(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write bytes at an offset, or change the size."""
    size = offset if data is None else offset + len(data)
    if data is None:
        del content[size:]
    content.extend(bytes(max(0, size - len(content))))
    if data is not None:
        content[offset:size] = data


class Model:
    """A disk that is told one entry of a recording after the other."""

    def __init__(self) -> None:
        self.root = Node("folder")
        self._changes: list[Change] = []

    def _find(self, path: str) -> Node:
        node = self.root
        for name in PurePosixPath(path).parts[1:]:
            node = node.names[name]
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        return self._find(str(PurePosixPath(path).parent)), PurePosixPath(path).name

    def take(self, entry: Entry) -> None:
        """The next entry of the recording."""
        kind, path = entry.kind, entry.path
        if kind in ("create", "mkdir", "symlink"):
            made = {"create": "file", "mkdir": "folder", "symlink": "link"}[kind]
            self._change(Node(made, entry.other or ""), None, self._place(path))
        elif kind == "link":
            self._change(self._find(path), None, self._place(entry.other))
        elif kind in ("unlink", "rmdir"):
            self._change(self._find(path), self._place(path), None)
        elif kind == "rename":
            self._change(self._find(path), self._place(path), self._place(entry.other))
        elif kind in ("write", "truncate"):
            node, change = self._find(path), (entry.other, entry.data if kind == "write" else None)
            apply(node.live, *change)
            node.pending.append(change)
        elif kind == "fsync":
            node = self._find(path)
            node.safe, node.pending = bytes(node.live), []
        elif kind == "fsyncdir":
            folder = id(self._find(path))
            for change in self._changes:
                change.waits.discard(folder)
        else:
            assert kind == "mark", kind

    def _change(
        self, node: Node, leaves: tuple[Node, str] | None, comes: tuple[Node, str] | None
    ) -> None:
        places = [place for place in (leaves, comes) if place is not None]
        if leaves is not None:
            del leaves[0].names[leaves[1]]
        if comes is not None:
            comes[0].names[comes[1]] = node
        self._changes.append(Change(node, leaves, comes, {id(folder) for folder, _ in places}))

    def crash(self, variant: str, seed: int = 0) -> State:
        """What the disk may hold if the machine stopped here."""
        chance = random.Random(f"{variant}-{seed}")
        keep = self._chooser(variant, chance)
        names: dict[int, dict[str, Node]] = {}
        for change in self._changes:
            if change.waits and not keep(change):
                continue
            if change.leaves is not None:
                folder, name = change.leaves
                if names.get(id(folder), {}).get(name) is not change.node:
                    continue  # It came here by a change that was lost.
                del names[id(folder)][name]
            if change.comes is not None:
                folder, name = change.comes
                names.setdefault(id(folder), {})[name] = change.node
        state: State = {}
        contents: dict[int, bytes] = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in sorted(names.get(id(folder), {}).items()):
                inside = f"{path}/{name}"
                if node.kind == "folder":
                    state[inside] = None
                    walk(node, inside)
                elif node.kind == "link":
                    state[inside] = node.target
                else:
                    if id(node) not in contents:
                        contents[id(node)] = _content(node, variant, chance)
                    state[inside] = contents[id(node)]

        walk(self.root, "")
        return state

    def _chooser(self, variant: str, chance: random.Random) -> Callable[[Change], bool]:
        """Which of the changes that are not certain have happened."""
        if variant in FIXED:
            return lambda change: variant in ("killed", "names", "sizes")
        pending = [change for change in self._changes if change.waits]
        if variant == "subset":
            share = chance.choice((0.2, 0.5, 0.8))
            kept = {id(change) for change in pending if chance.random() < share}
            return lambda change: id(change) in kept
        by_folder: dict[int, list[Change]] = {}
        for change in pending:
            for folder in change.waits:
                by_folder.setdefault(folder, []).append(change)
        lost: set[int] = set()
        for changes in by_folder.values():
            lost |= {id(change) for change in changes[chance.randint(0, len(changes)) :]}
        return lambda change: id(change) not in lost


def _content(node: Node, variant: str, chance: random.Random) -> bytes:
    if not node.pending or variant in ("synced", "names"):
        return node.safe
    if variant in ("killed", "data"):
        return bytes(node.live)
    content = bytearray(node.safe)
    if variant == "sizes":
        apply(content, len(node.live), None)
        return bytes(content)
    for offset, data in node.pending:
        for change in _torn(offset, data, chance):
            apply(content, *change)
    if chance.random() < 0.25:
        apply(content, len(node.live), None)
    return bytes(content)


def _torn(
    offset: int, data: bytes | None, chance: random.Random
) -> Iterator[tuple[int, bytes | None]]:
    """What came of one write."""
    fate = chance.choice(("lost", "whole") if data is None else ("lost", "whole", "cut", "torn"))
    if fate == "whole":
        yield offset, data
    elif fate == "cut" and data:
        yield offset, data[: chance.randrange(len(data))]
    elif fate == "torn" and data:
        edges = [0, *range(SECTOR - offset % SECTOR, len(data), SECTOR), len(data)]
        for begin, end in itertools.pairwise(edges):
            if chance.random() < 0.5:
                yield offset + begin, data[begin:end]


class Folders:
    """Makes plain folders of states.

    Files of checkpoints, which are never written in place, are links to one copy of each from the
    second time on: most of a state is the same as in the one before it.
    """

    def __init__(self, pool: Path) -> None:
        pool.mkdir(parents=True)
        self._pool, self._kept = pool, dict[bytes, Path]()
        self._seen = set[int]()

    def write(self, state: State, where: Path) -> None:
        where.mkdir()
        for path, content in state.items():
            target = Path(f"{where}{path}")
            if content is None:
                target.mkdir()
            elif isinstance(content, str):
                target.symlink_to(content)
            elif "/checkpoints/" in path and hash(content) in self._seen:
                os.link(self._copy(content), target)
            else:
                self._seen.add(hash(content))
                target.write_bytes(content)

    def _copy(self, content: bytes) -> Path:
        kept = self._kept.get(content)
        if kept is None:
            kept = self._kept[content] = self._pool / str(len(self._kept))
            kept.write_bytes(content)
        return kept
