"""Sizes that must divide one another: what does not is refused, with sizes that do."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from etude.core.errors import UsageError

Sizes = Mapping[str, int]
Ratio = tuple[str, int, str, int]
"""(name, whole, name, part), of which the part must divide the whole."""
_FARTHEST = 1 << 16
"""How far from what was asked a size that works is looked for."""


def check_division(
    sizes: Sizes,
    ratios: Callable[..., tuple[Ratio, ...]],
    options: Mapping[str, str],
    otherwise: Callable[[Sizes], str],
) -> None:
    """Raise `UsageError` at the first part that does not divide its whole.

    ratios: called with the sizes by name. options: what a person calls the sizes that may be
    changed. otherwise: what to say where no change of a single one is enough.
    """
    for whole_name, whole, part_name, part in ratios(**sizes):
        if whole % part:
            raise UsageError(
                f"{part_name} {part:,} does not divide {whole_name} {whole:,}. "
                f"{_way_out(sizes, ratios, options) or otherwise(sizes)}"
            )


def _way_out(
    sizes: Sizes, ratios: Callable[..., tuple[Ratio, ...]], options: Mapping[str, str]
) -> str:
    """For each size, the nearest ones that make everything divide if only it is changed."""
    clauses = []
    for field, option in options.items():
        near = _nearest_working(sizes, field, ratios)
        if near:
            clauses.append(f"{option} {' or '.join(f'{size:,}' for size in near)}")
    return f"Sizes that work: {'; or '.join(clauses)}." if clauses else ""


def _nearest_working(
    sizes: Sizes, field: str, ratios: Callable[..., tuple[Ratio, ...]]
) -> list[int]:
    """The nearest below and the nearest above the given size."""
    found = []
    given = sizes[field]
    reach = min(max(given, 64), _FARTHEST)
    for candidates in (
        range(given - 1, max(given - reach, 0), -1),
        range(given + 1, given + reach + 1),
    ):
        for size in candidates:
            if all(w and w % part == 0 for _, w, _, part in ratios(**{**sizes, field: size})):
                found.append(size)
                break
    return found


def nearest_divisor(whole: int, part: int) -> int:
    """The divisor of `whole` nearest to `part`, the smaller one of two."""
    divisors = {d for i in range(1, int(whole**0.5) + 1) if whole % i == 0 for d in (i, whole // i)}
    return min(sorted(divisors), key=lambda d: abs(d - part))
