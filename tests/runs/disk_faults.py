"""Disks that die, fill up or lose power, and small checkpoints to try them on."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from etude.core.trees import Tree, is_array, leaves
from etude.runs import checkpoint
from etude.runs.files import Chunk, Disk


def make_state(tag: int) -> tuple[tuple[Tree, Tree], Tree]:
    """A small (policy, training) whose every part depends on `tag`."""
    rng = np.random.default_rng(tag)
    policy = {
        "net": {"w": torch.tensor(rng.normal(size=(8, 5)))},
        "normaliser": {"mean": rng.normal(size=3)},
    }
    training = {
        "adam": {"m": rng.normal(size=(5, 8)).T, "step": np.array(tag)},
        "clock": {"iteration": tag, "best": float("-inf")},
        "mask": np.array([True, False]),
    }
    return (policy, {"tag": tag, "observations": {"state": [5]}}), training


def save(folder: Path, step: int, tag: int | None = None) -> Path:
    """Save the state of `tag` (by default the step itself) as a step."""
    return checkpoint.save(folder, step, *make_state(step if tag is None else tag))


def bits(leaf: Any) -> Any:
    """A leaf as something that compares by type, shape and bits."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
        return ("tensor", str(leaf.dtype), tuple(leaf.shape), raw)
    if is_array(leaf):
        return ("array", leaf.dtype.name, leaf.shape, np.ascontiguousarray(leaf).tobytes())
    return repr(leaf)


def same(a: Tree, b: Tree) -> bool:
    return {p: bits(x) for p, x in leaves(a)} == {p: bits(x) for p, x in leaves(b)}


def tag_of(path: Path) -> int:
    """Which state a checkpoint holds, after comparing every bit of it."""
    arrays, contract, training = checkpoint.load_training(path)
    (expected_arrays, expected_contract), expected_training = make_state(contract["tag"])
    assert same(arrays, expected_arrays)
    assert contract == expected_contract
    assert same(training, expected_training)
    return int(contract["tag"])


class Died(BaseException):
    """The process is gone; nothing may catch this."""


CHANGES = ("mkdir", "open", "write", "fsync", "truncate", "rename", "unlink", "rmdir", "symlink")


class Watched(Disk):
    """Calls `meet(number, name)` before each change and `met` after it; fsync costs nothing.

    folder: only what is in a folder of that name is watched, None for everything.
    """

    folder: str | None = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.watched_files: set[int] = set()

    def watches(self, where: Path | int) -> bool:
        """Whether a path, or an open file, is one of those."""
        if self.folder is None:
            return True
        return where in self.watched_files if isinstance(where, int) else self.folder in where.parts

    def meet(self, number: int, name: str) -> None: ...

    def met(self, number: int, name: str) -> None: ...


def _watch(name: str) -> Any:
    def call(self: Watched, *arguments: Any) -> Any:
        watched, number = self.watches(arguments[name == "symlink"]), len(self.calls)
        if watched:
            self.calls.append(name)
            self.meet(number, name)
        answer = getattr(super(Watched, self), name)(*arguments) if name != "fsync" else None
        if watched:
            self.met(number, name)
        if name == "open":  # a number is given out again when its file is closed
            (self.watched_files.add if watched else self.watched_files.discard)(answer)
        return answer

    return call


for _name in CHANGES:
    setattr(Watched, _name, _watch(_name))


class Mortal(Watched):
    """Dies at one system call: before it, after it, or halfway through a write."""

    def __init__(self, fatal: int | None = None, moment: str = "before") -> None:
        super().__init__()
        self.fatal, self.moment, self.dead = fatal, moment, False

    def watches(self, where: Path | int) -> bool:
        return self.dead or super().watches(where)

    def meet(self, number: int, name: str) -> None:
        if self.dead or (number == self.fatal and self.moment == "before"):
            self.dead = True
            raise Died

    def met(self, number: int, name: str) -> None:
        if number == self.fatal:
            self.dead = True
            raise Died

    def write(self, fd: int, data: Chunk) -> int:
        if self.watches(fd) and len(self.calls) == self.fatal and self.moment == "torn":
            os.write(fd, bytes(data)[: len(data) // 2])
            self.dead = True
            raise Died
        return super().write(fd, data)


class Failing(Watched):
    """Answers with an error at one call, or at every call from then on."""

    def __init__(self, number: int, code: int, lasting: bool) -> None:
        super().__init__()
        self.number, self.code, self.lasting = number, code, lasting

    def meet(self, number: int, name: str) -> None:
        frees = name in ("unlink", "rmdir")  # a full disk still deletes
        if number == self.number or (self.lasting and number > self.number and not frees):
            raise OSError(self.code, os.strerror(self.code))


class Node:
    """A file, folder or symlink, as it is in memory and as it is on the platter."""

    def __init__(self, kind: str, target: str = "") -> None:
        self.kind, self.target = kind, target
        self.data, self.safe_data = b"", b""
        self.names: dict[str, Node] = {}
        self.safe_names: dict[str, Node] = {}


class Volatile(Mortal):
    """Keeps a model of what would be left if the power went: only what was fsynced is certain."""

    def __init__(self, root: Path, fatal: int | None = None) -> None:
        super().__init__(fatal)
        self.root, self.tree = root, self._read(root)
        self.open_files: dict[int, Node] = {}

    def _read(self, path: Path) -> Node:
        if path.is_symlink():
            return Node("link", os.readlink(path))
        if path.is_file():
            node = Node("file")
            node.data = node.safe_data = path.read_bytes()
            return node
        node = Node("folder")
        node.names = {child.name: self._read(child) for child in path.iterdir()}
        node.safe_names = dict(node.names)
        return node

    def _find(self, path: Path) -> Node:
        node = self.tree
        for name in path.relative_to(self.root).parts:
            node = node.names[name]
        return node

    def _add(self, path: Path, node: Node) -> None:
        self._find(path.parent).names[path.name] = node

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._add(path, Node("folder"))

    def open(self, path: Path, flags: int) -> int:
        existed = path.exists()
        fd = super().open(path, flags)
        if not path.is_relative_to(self.root):  # the folder that the root is in, to flush it
            self.open_files[fd] = Node("folder")
            return fd
        if not existed:
            self._add(path, Node("file"))
        self.open_files[fd] = self._find(path)
        return fd

    def write(self, fd: int, data: Chunk) -> int:
        count = super().write(fd, data)
        self.open_files[fd].data += bytes(data)[:count]
        return count

    def truncate(self, fd: int, size: int) -> None:
        super().truncate(fd, size)
        self.open_files[fd].data = self.open_files[fd].data[:size]

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        node = self.open_files[fd]
        node.safe_data, node.safe_names = node.data, dict(node.names)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        node = self._find(old.parent).names.pop(old.name)
        self._add(new, node)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._find(path.parent).names.pop(path.name, None)  # the lock's file is not made here

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        del self._find(path.parent).names[path.name]

    def symlink(self, target: str, path: Path) -> None:
        super().symlink(target, path)
        self._add(path, Node("link", target))

    def after_power_loss(self, where: Path, variant: str, seed: int = 0) -> None:
        """Write to `where` what the disk may hold after the power came back."""
        self._restore(self.tree, where, variant, random.Random(seed))

    def _restore(self, node: Node, path: Path, variant: str, rng: random.Random) -> None:
        kept = {"lost": False, "named": True, "zeroed": True}.get(variant, rng.random() < 0.5)
        if node.kind == "link":
            os.symlink(node.target, path)
        elif node.kind == "folder":
            path.mkdir()
            for name, child in (node.names if kept else node.safe_names).items():
                self._restore(child, path / name, variant, rng)
        elif node.data == node.safe_data or variant in ("lost", "named"):
            path.write_bytes(node.safe_data)
        elif variant == "zeroed":
            path.write_bytes(bytes(len(node.data)))
        else:
            path.write_bytes(node.data[: rng.randrange(len(node.data) + 1)])
