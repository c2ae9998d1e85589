"""What processes listen on."""

from __future__ import annotations

import os
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """A process and all that it started, and they in turn."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> dict[str, set[str]]:
    """{"loopback": addresses, "beyond": addresses} that processes listen on."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found: dict[str, set[str]] = {"loopback": set(), "beyond": set()}
    home = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == state and columns[9] in inodes:
                where = "loopback" if columns[1].partition(":")[0] in home else "beyond"
                found[where].add(f"{table} {columns[1]}")
    return found
