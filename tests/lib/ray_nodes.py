"""Ray clusters on this machine for tests and gates, and the processes on them.

Import it before Ray: that reads its settings when it is imported.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

os.environ.update(
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=secrets.token_hex(16),
    RAY_USAGE_STATS_ENABLED="0",
    RAY_worker_niceness="0",
)


def node(cpus: int) -> dict[str, Any]:
    """A node of a cluster on this machine only."""
    return {"num_cpus": cpus, "node_ip_address": "127.0.0.1", "include_dashboard": False}


def start(cpus: int) -> Any:
    """A cluster of one node; `add_node(**node(n))` gives it another."""
    from ray.cluster_utils import Cluster

    return Cluster(initialize_head=True, head_node_args=node(cpus))


STARTING = ("ray::Actor.__init__", "ray::Actor.hello")


def actors_of(cluster: Any) -> list[int]:
    """Process ids of the actors on a cluster's nodes that have started and are not stopped."""
    nodes = [cluster.head_node, *cluster.worker_nodes]
    raylets = {node.all_processes["raylet"][0].process.pid for node in nodes}
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            title = (path.parent / "cmdline").read_text()
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        started = title.startswith("ray::Actor") and not title.startswith(STARTING)
        if started and int(parent) in raylets and state not in "ZT":
            found.append(int(path.parent.name))
    return sorted(found)
