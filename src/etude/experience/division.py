"""Sizes that must divide one another: what does not is refused, with sizes that do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

from etude.core.errors import UsageError

Sizes = Mapping[str, int]
Ratio = tuple[str, int, str, int]
"""(name, whole, name, part), of which the part must divide the whole."""
_FARTHEST = 1 << 16
"""How far from what was asked a size that works is looked for."""


def check_division(
    sizes: Sizes,
    ratios: Callable[[SimpleNamespace], tuple[Ratio, ...]],
    options: Mapping[str, str],
    otherwise: Callable[[Sizes], str],
) -> None:
    """Raise `UsageError` at the first part that does not divide its whole.

    ratios: called with the sizes as attributes. options: what a person calls the sizes that may be
    changed. otherwise: what to say where no change of a single one is enough.
    """

    def nearest(field: str, direction: int) -> list[int]:
        """The nearest size below or above the given one with which everything divides, if any."""
        given = sizes[field]
        for distance in range(1, min(max(given, 64), _FARTHEST) + 1):
            size = given + direction * distance
            tried = ratios(SimpleNamespace(**{**sizes, field: size})) if size > 0 else ()
            if tried and all(whole and whole % part == 0 for _, whole, _, part in tried):
                return [size]
        return []

    for whole_name, whole, part_name, part in ratios(SimpleNamespace(**sizes)):
        if whole % part:
            found = {option: nearest(n, -1) + nearest(n, 1) for n, option in options.items()}
            clauses = [f"{o} {' or '.join(map('{:,}'.format, n))}" for o, n in found.items() if n]
            works = f"Sizes that work: {'; or '.join(clauses)}." if clauses else otherwise(sizes)
            raise UsageError(
                f"{part_name} {part:,} does not divide {whole_name} {whole:,}. {works}"
            )


def nearest_divisor(whole: int, part: int) -> int:
    """The divisor of `whole` nearest to `part`, the smaller one of two."""
    divisors = {d for i in range(1, int(whole**0.5) + 1) if whole % i == 0 for d in (i, whole // i)}
    return min(sorted(divisors), key=lambda d: abs(d - part))
