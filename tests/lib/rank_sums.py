"""What ranks tell each other, checked by the ranks themselves:  python rank_sums.py SIZE."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from etude.building.build import joined
from etude.core.errors import NonFinite, UsageError
from etude.core.ranks import Ranks, ReportedElsewhere, is_first_process, raise_first
from rank_driver import fork_ranks, wait

SHARDS, WIDTH = 4, 1_001
"""A width that no number of ranks divides."""


def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every shard's two vectors; large and small numbers, so that the order of a sum shows."""
    stream = torch.Generator().manual_seed(1)
    scale = torch.logspace(-6, 6, WIDTH)
    return [
        (torch.randn(WIDTH, generator=stream) * scale.roll(s), torch.randn(3).double() * s)
        for s in range(SHARDS)
    ]


def check_sums(ranks: Ranks) -> None:
    torch.manual_seed(2)
    known = parts()
    totals = torch.full((WIDTH,), 7.0), torch.full((3,), 7.0, dtype=torch.float64)

    def add(ranks: Ranks) -> None:
        for s in ranks.ordered_sum(totals, ranks.part(SHARDS)):
            for total, part in zip(totals, known[s], strict=True):
                total.add_(part)

    expected = [torch.zeros_like(total) for total in totals]
    for part in known:
        for total, own in zip(expected, part, strict=True):
            total += own
    add(ranks)
    for total, one in zip(totals, expected, strict=True):
        assert torch.equal(total, one)
    backwards = sum(own for own, _ in reversed(known[:-1])) + known[-1][0]
    assert not torch.equal(backwards, expected[0])  # the order matters
    add(ranks.adding(exactly=False, patience=lambda: 60.0))
    assert torch.allclose(totals[0].double(), sum(own.double() for own, _ in known), rtol=1e-4)


def check_words(ranks: Ranks) -> None:
    own = [{"shard": s, "array": np.arange(s * 500.0), "a/b": None} for s in ranks.part(SHARDS)]
    told = ranks.gather(own)
    assert [part["shard"] for part in told] == list(range(SHARDS))
    assert all(np.array_equal(p["array"], np.arange(s * 500.0)) for s, p in enumerate(told))
    assert ranks.gather(["x"] * ranks.rank) == ["x"] * sum(range(ranks.size))
    assert ranks.from_first(lambda: ranks.rank) == 0
    long = ranks.from_first(lambda: torch.arange(10_000))
    assert torch.equal(long, torch.arange(10_000))
    assert long.dtype == torch.int64


def check_failures(ranks: Ranks) -> None:
    faults = [NonFinite(f"shard {s}", {"x": np.ones(s)}) if s else None for s in range(SHARDS)]
    with pytest.raises(NonFinite, match="shard 1") as raised:
        raise_first(ranks, [faults[s] for s in ranks.part(SHARDS)])
    assert raised.value.arrays["x"].tolist() == [1.0]


def work(rank: int) -> None:
    with joined() as ranks:
        assert is_first_process() == ranks.is_first == (rank == 0)
        check_sums(ranks)
        check_words(ranks)
        check_failures(ranks)
        assert ranks.differing(lambda: "same") == []
        others = list(range(1, ranks.size))
        assert ranks.differing(lambda: str(ranks.rank > 0)) == others


def work_in_vain(rank: int) -> None:
    with pytest.raises(UsageError if rank == 0 else ReportedElsewhere) as raised, joined() as ranks:
        ranks.from_first(fail)
    assert raised.value.exit_code == UsageError.exit_code


def fail() -> None:
    raise UsageError("no")


if __name__ == "__main__":
    size = int(sys.argv[1])
    sys.exit(max(*wait(fork_ranks(size, work)), *wait(fork_ranks(size, work_in_vain))))
