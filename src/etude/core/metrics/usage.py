"""Time and machine columns of a log row in words."""

from __future__ import annotations

from collections.abc import Mapping

from etude.core.metrics.declared import ELAPSED

_PHASES = {"transport": "transport", "train": "learning", "test": "evaluation", "save": "saving"}
"""{column under `time/`: its displayed name}"""


def seconds_of(row: Mapping[str, float], before: float) -> dict[str, float]:
    """{activity: seconds} since the row before, at which `before` seconds had passed."""
    parts = {name: row.get(f"time/{name}", 0.0) for name in ("physics", "inference", "environment")}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    inside = sum(parts[name] for name in ("physics", "inference", "environment", "transport"))
    parts["collecting"] = max(row.get("time/collect", 0.0) - inside, 0.0)
    return parts | {"other": max(row.get(ELAPSED, 0.0) - before - sum(parts.values()), 0.0)}


def machine(row: Mapping[str, float]) -> list[str]:
    """The `system/` columns in words."""
    words = fleet(row)
    if (cores := row.get("system/cpu_cores")) is not None:
        words.append(f"processor {cores:.2f} cores")
    for name, key in (("memory", "system/memory_mib"), ("GPU memory", "system/gpu_memory_mib")):
        if (mib := row.get(key)) is not None:
            size = f"{mib:,.0f} MiB" if mib < 10_240 else f"{mib / 1024:.1f} GiB"
            words.append(f"{name} {size}")
    return words


def fleet(row: Mapping[str, float]) -> list[str]:
    """Workers in other processes or on other machines, in words; [] without workers."""
    if "system/workers" not in row:
        return []
    workers, restarts = int(row["system/workers"]), int(row.get("system/restarts", 0))
    rate = row.get("system/bytes_per_second", 0.0) / 1e6
    many = "" if workers == 1 else "s"
    return [
        f"{workers:,} worker{many}, {row['system/groups']:,.0f} groups, {restarts:,} restarts",
        f"{rate:,.1f} MB/s, bottleneck {bottleneck(row)}",
    ]


def bottleneck(row: Mapping[str, float]) -> str:
    """The activity that took most of the time."""
    parts = {"collection": row.get("time/collect", 0.0) - row.get("time/transport", 0.0)}
    parts |= {name: row.get(f"time/{key}", 0.0) for key, name in _PHASES.items()}
    return max(parts, key=lambda name: parts[name])
