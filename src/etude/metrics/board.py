"""The board: metrics on their way to log rows, one aggregator per level, all of it state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from etude.core.contracts import KINDS, Array
from etude.core.trees import Tree

REDUCERS = {
    "train/n_updates": "last",
    "train/learning_rate": "last",
    "train/std": "last",
    "eval/": "last",
    "curriculum/": "last",
    "dataset/": "last",
}
"""How a metric's values become one, by name or by prefix; a mean unless listed."""

WINDOW = 100


def reducer_of(name: str) -> str:
    prefix = name.split("/")[0] + "/"
    return REDUCERS.get(name) or REDUCERS.get(prefix) or "mean"


class Aggregator:
    """Values of one level, reduced as they come: sums and counts, so nothing grows."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: float) -> None:
        kind = reducer_of(name)
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
    """The last 100 finished episodes, in the order groups report them.

    Its arrays have their full size from the start, so a checkpoint's size does not drift.
    """

    def __init__(self, statistics: Sequence[str] = ()) -> None:
        self._names = ("return", "length", *statistics)
        self._values = np.zeros((len(self._names), WINDOW))
        self._count = 0

    def add(self, episodes: Mapping[str, Array]) -> None:
        """episodes: {name: [k]}, every name of the window."""
        new = np.stack([episodes[name] for name in self._names])
        self._values = np.concatenate([self._values, new], axis=1)[:, -WINDOW:]
        self._count = min(WINDOW, self._count + new.shape[1])

    def read(self) -> dict[str, float]:
        """Means over the episodes there are; nothing before the first has finished."""
        if not self._count:
            return {}
        means = self._values[:, -self._count :].mean(axis=1).tolist()
        named = zip(self._names, means, strict=True)
        return {metric_of(name): value for name, value in sorted(named) if name not in KINDS}

    def state_dict(self) -> Tree:
        return {"values": self._values.copy(), "count": self._count}

    def load_state_dict(self, state: Tree) -> None:
        self._values = np.array(state["values"])
        self._count = int(state["count"])


METRIC_OF = {
    "return": "rollout/ep_rew_mean",
    "length": "rollout/ep_len_mean",
    "is_success": "rollout/success_rate",
}
"""The names people have dashboards for."""


def metric_of(statistic: str) -> str:
    """The column an episode statistic stands in."""
    return METRIC_OF.get(statistic) or (statistic if "/" in statistic else f"rollout/{statistic}")


class Board:
    """Where metrics are recorded; a row is read at a cycle's end and a summary at an epoch's."""

    def __init__(self, statistics: Sequence[str] = ()) -> None:
        """`statistics`: what the environment reports of an episode, besides return and length."""
        self.cycle = Aggregator()
        self.epoch = Aggregator()
        self.window = EpisodeWindow(statistics)

    def record(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.cycle.add(name, value)
            self.epoch.add(name, value)

    def read_cycle(self) -> dict[str, float]:
        """One row's metrics; the cycle's aggregator starts again."""
        row = {**self.window.read(), **self.cycle.read()}
        self.cycle.reset()
        return row

    def read_epoch(self) -> dict[str, float]:
        row = {**self.window.read(), **self.epoch.read()}
        self.epoch.reset()
        return row

    def state_dict(self) -> Tree:
        return {
            "cycle": self.cycle.state_dict(),
            "epoch": self.epoch.state_dict(),
            "window": self.window.state_dict(),
        }

    def load_state_dict(self, state: Tree) -> None:
        self.cycle.load_state_dict(state["cycle"])
        self.epoch.load_state_dict(state["epoch"])
        self.window.load_state_dict(state["window"])
