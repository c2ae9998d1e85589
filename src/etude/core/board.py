"""The board aggregates metrics to log rows, per cycle and per epoch; all of it is state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from etude.core.contracts import KINDS, Array
from etude.core.metrics import COUNTERS, EPISODES, Metrics
from etude.core.trees import Tree

REDUCERS = {m.name: m.reduce for m in (*COUNTERS, *EPISODES) if m.reduce != "mean"}
"""{metric or prefix: reducer} of metrics that are not averaged."""

FEWEST = 100
"""Fewest episodes in an average, if that many have finished."""


def reducer_of(name: str, reducers: Mapping[str, str] = REDUCERS) -> str:
    """The reducer of a metric: "mean", "last", "sum" or "max"."""
    return reducers.get(name) or reducers.get(name.split("/")[0] + "/") or "mean"


class Aggregator:
    """Running reductions of the metrics of one level."""

    def __init__(self, reducers: Mapping[str, str] = REDUCERS) -> None:
        self._reducers = reducers
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: float) -> None:
        kind = reducer_of(name, self._reducers)
        if kind == "last" or name not in self._sums:
            self._sums[name], self._counts[name] = value, 1
        elif kind == "max":
            self._sums[name] = max(self._sums[name], value)
        else:
            self._sums[name] += value
            self._counts[name] += kind == "mean"

    def read(self) -> dict[str, float]:
        return {name: self._sums[name] / self._counts[name] for name in sorted(self._sums)}

    def reset(self) -> None:
        self._sums, self._counts = {}, {}

    def state_dict(self) -> Tree:
        names = sorted(self._sums)
        return {
            "names": names,
            "sums": [self._sums[name] for name in names],
            "counts": [self._counts[name] for name in names],
        }

    def load_state_dict(self, state: Tree) -> None:
        self._sums = dict(zip(state["names"], state["sums"], strict=True))
        self._counts = dict(zip(state["names"], state["counts"], strict=True))


class EpisodeWindow:
    """Averages the episodes that finished since the last reading, and at least the last 100.

    With thousands of environments the last 100 alone would be those of the last group. Their mean
    return is logged too, as in stable-baselines3, and the number of successes since the last
    reading. Arrays have a constant size, so that the size of checkpoints is constant.
    """

    def __init__(self, statistics: Sequence[str] = ()) -> None:
        self._names = ("return", "length", *statistics)
        self._last = np.zeros((len(self._names), FEWEST))
        self._num_last = 0
        self._sums = np.zeros(len(self._names))
        self._count = 0

    def add(self, episodes: Mapping[str, Array]) -> None:
        """Add finished episodes {name: [k]}, with all names of the window."""
        new = np.stack([episodes[name] for name in self._names])
        self._last = np.concatenate([self._last, new], axis=1)[:, -FEWEST:]
        self._num_last = min(FEWEST, self._num_last + new.shape[1])
        self._sums += new.sum(axis=1)
        self._count += new.shape[1]

    def read(self) -> dict[str, float]:
        """Means over the window; {} before the first finished episode."""
        if not self._num_last:
            return {}
        if self._count > self._num_last:
            means = self._sums / self._count
        else:
            means = self._last[:, -self._num_last :].mean(axis=1)
        named = zip(self._names, means.tolist(), strict=True)
        row = {metric_of(name): value for name, value in sorted(named) if name not in KINDS}
        row[LAST_RETURNS] = float(self._last[0, -self._num_last :].mean())
        if SUCCESS in self._names:
            row[SUCCESSES] = float(self._sums[self._names.index(SUCCESS)])
        return row

    def reset(self) -> None:
        """Begin a new window; the last 100 episodes stay."""
        self._sums, self._count = np.zeros(len(self._names)), 0

    def state_dict(self) -> Tree:
        return {
            "last": self._last.copy(),
            "num_last": self._num_last,
            "sums": self._sums.copy(),
            "count": self._count,
        }

    def load_state_dict(self, state: Tree) -> None:
        self._last, self._sums = np.array(state["last"]), np.array(state["sums"])
        self._num_last, self._count = int(state["num_last"]), int(state["count"])


SUCCESS, SUCCESSES = "is_success", "rollout/success_count"
LAST_RETURNS = f"rollout/ep_rew_mean_{FEWEST}"
METRIC_OF = {
    "return": "rollout/ep_rew_mean",
    "length": "rollout/ep_len_mean",
    SUCCESS: "rollout/success_rate",
}
"""{statistic of episodes: column}, with the names of stable-baselines3."""


def metric_of(statistic: str) -> str:
    """The column of an episode statistic."""
    return METRIC_OF.get(statistic) or (statistic if "/" in statistic else f"rollout/{statistic}")


def epoch_means(summary: Mapping[str, float]) -> dict[str, float]:
    """Columns "epoch/<loss>" of an epoch's last row: the means of its losses."""
    return {
        f"epoch/{name.removeprefix('train/')}": value
        for name, value in summary.items()
        if name.startswith("train/") and name.endswith("loss")
    }


class Board:
    """Records metrics; read as a row at the end of a cycle, as a summary at that of an epoch."""

    def __init__(self, statistics: Sequence[str] = (), metrics: Metrics = ()) -> None:
        """statistics: those of the environment's episodes, besides return and length.

        metrics: those declared by the kinds of the recipe.
        """
        reducers = REDUCERS | {m.name: m.reduce for m in metrics if m.reduce != "mean"}
        self._levels = {
            name: (Aggregator(reducers), EpisodeWindow(statistics)) for name in ("cycle", "epoch")
        }

    def record(self, values: Mapping[str, float]) -> None:
        """Record one value of each metric."""
        for metrics, _ in self._levels.values():
            for name, value in values.items():
                metrics.add(name, value)

    def record_episodes(self, episodes: Mapping[str, Array]) -> None:
        """Record finished episodes {name: [k]}, with all statistics of the environment."""
        for _, window in self._levels.values():
            window.add(episodes)

    def read_cycle(self) -> dict[str, float]:
        """The metrics of a row; begins the next cycle."""
        return self._read("cycle")

    def read_epoch(self) -> dict[str, float]:
        """The metrics of an epoch; begins the next one."""
        return self._read("epoch")

    def _read(self, level: str) -> dict[str, float]:
        metrics, window = self._levels[level]
        row = {**window.read(), **metrics.read()}
        metrics.reset()
        window.reset()
        return row

    def state_dict(self) -> Tree:
        return {
            level: {"metrics": metrics.state_dict(), "episodes": window.state_dict()}
            for level, (metrics, window) in self._levels.items()
        }

    def load_state_dict(self, state: Tree) -> None:
        for level, (metrics, window) in self._levels.items():
            metrics.load_state_dict(state[level]["metrics"])
            window.load_state_dict(state[level]["episodes"])
