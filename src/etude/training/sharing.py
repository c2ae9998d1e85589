"""Parts of a run that ranks have between them, as the loop and the checkpoint see them: whole."""

from __future__ import annotations

from collections.abc import Callable

from etude.core.contracts import Broadcast, Collector, Fragment
from etude.core.errors import NonFinite
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.rollout.local import group_snapshots, group_state
from etude.training.evaluation import AnyEvaluator, EvaluationResult


class SharedCollector:
    """Each rank collects the groups of its own shards; a checkpoint holds those of all."""

    def __init__(self, ranks: Ranks, own: Collector) -> None:
        self._ranks, self._own = ranks, own

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The next fragment of every group of this rank."""
        try:
            return self._own.collect(broadcast, iteration)
        except NonFinite as fault:
            owner = self._ranks.owner(self._ranks.rank, self._ranks.size)
            raise NonFinite(f"{fault.where}{owner}", fault.arrays) from fault

    def report_to(self, say: Callable[[str], None], not_exact: Callable[[str], None]) -> None:
        self._own.report_to(say, not_exact)

    def status(self) -> dict[str, float]:
        return self._own.status()

    def state_dict(self) -> Tree:
        own = self._own.state_dict()
        return {**own, **group_state(self._ranks.gather(group_snapshots(own) or []))}

    def load_state_dict(self, state: Tree) -> None:
        groups = group_snapshots(state) or []
        mine = self._ranks.part(len(groups))
        self._own.load_state_dict({**state, **group_state(groups[mine.start : mine.stop])})

    def close(self) -> None:
        self._own.close()


class FirstRankEvaluator:
    """A tester that only the first rank has; all are told what it found."""

    def __init__(self, ranks: Ranks, tester: AnyEvaluator | None) -> None:
        self._ranks, self._evaluator = ranks, tester
        self.best: tuple[float, float] | None = None
        self.num_done = 0
        self.num_episodes = 0

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        def verdict() -> EvaluationResult:
            assert self._evaluator is not None
            return self._evaluator.evaluate(broadcast)

        found = EvaluationResult(*self._ranks.from_first(verdict))
        self._copy_results()
        return found

    def _copy_results(self) -> None:
        if self._evaluator is not None:
            self.best, self.num_done = self._evaluator.best, self._evaluator.num_done
            self.num_episodes = self._evaluator.num_episodes

    def state_dict(self) -> Tree:
        return {} if self._evaluator is None else self._evaluator.state_dict()

    def load_state_dict(self, state: Tree) -> None:
        if self._evaluator is not None:
            self._evaluator.load_state_dict(state)
            self._copy_results()

    def close(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
