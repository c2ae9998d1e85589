"""Collector and evaluator of a run with several ranks, as the loop and the checkpoint see them."""

from __future__ import annotations

from etude.core.contracts import Broadcast, Collector, Fragment, Snapshot
from etude.core.errors import NonFinite
from etude.core.ranks import Ranks
from etude.core.trees import Tree
from etude.rollout.local import CollectorWrapper, group_snapshots, group_state
from etude.training.evaluation import AnyEvaluator, EvaluationResult


class SharedCollector(CollectorWrapper):
    """Each rank collects the groups of its own shards; a checkpoint holds those of all ranks."""

    def __init__(self, ranks: Ranks, local: Collector) -> None:
        """`local`: the collector of this rank's groups."""
        super().__init__(local)
        self._ranks = ranks
        self._gathered: list[Snapshot] | None = None

    def collect(self, broadcast: Broadcast, iteration: int) -> list[Fragment]:
        """The next fragment of every group of this rank."""
        self._gathered = None
        try:
            return self._inner.collect(broadcast, iteration)
        except NonFinite as fault:
            owner = self._ranks.owner(self._ranks.rank, self._ranks.size)
            raise NonFinite(f"{fault.where}{owner}", fault.arrays) from fault

    def gather(self) -> None:
        """Bring together the snapshots of all ranks' groups, for `state_dict`."""
        local = group_snapshots(self._inner.state_dict()) or []
        self._gathered = self._ranks.gather(local)

    def state_dict(self) -> Tree:
        """The state with the groups of all ranks, which `gather` has brought together."""
        if self._gathered is None:
            raise RuntimeError("gather() comes before state_dict() of a collector with ranks")
        return {**self._inner.state_dict(), **group_state(self._gathered)}

    def load_state_dict(self, state: Tree) -> None:
        groups = group_snapshots(state) or []
        local = self._ranks.part(len(groups))
        self._inner.load_state_dict({**state, **group_state(groups[local.start : local.stop])})


class FirstRankEvaluator(AnyEvaluator):
    """An evaluator that the first rank alone has; its results are broadcast to the others."""

    def __init__(self, ranks: Ranks, evaluator: AnyEvaluator | None) -> None:
        """`evaluator`: None on all ranks but the first."""
        super().__init__()
        self._ranks, self._evaluator = ranks, evaluator

    def evaluate(self, broadcast: Broadcast) -> EvaluationResult:
        def on_first() -> EvaluationResult:
            assert self._evaluator is not None
            return self._evaluator.evaluate(broadcast)

        result = EvaluationResult(*self._ranks.from_first(on_first))
        self._copy_results()
        return result

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
