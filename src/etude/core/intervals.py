"""95 % intervals in closed form, of success rates and of differences of means and rates."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""Half the width of a 95 % interval, in standard deviations."""
Interval = tuple[float, float]


def wilson(successes: int, episodes: int) -> Interval:
    """The Wilson interval of a success rate, which is also right for 0 % and 100 %."""
    return wilson_of(successes / episodes, episodes) if episodes >= 1 else (0.0, 1.0)


def wilson_of(share: float, count: float) -> Interval:
    """The Wilson interval of a share of `count` trials, which may be an effective number."""
    spread = Z * Z / count
    middle = share + spread / 2
    half = Z * math.sqrt(max(share * (1 - share), 0.0) / count + spread / (4 * count))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    # Rounding must not put the estimate outside of its own interval.
    return min(max(low, 0.0), share), max(min(high, 1.0), share)


def difference_of_rates(a: float, num_a: float, b: float, num_b: float) -> Interval:
    """Newcombe's interval of a - b, two independent success rates, from their Wilson intervals."""
    (low_a, high_a), (low_b, high_b) = wilson_of(a, num_a), wilson_of(b, num_b)
    return (
        a - b - math.hypot(a - low_a, high_b - b),
        a - b + math.hypot(high_a - a, b - low_b),
    )


def difference_of_means(a: float, error_a: float, b: float, error_b: float) -> Interval:
    """The normal interval of a - b, two independent means with their standard errors."""
    half = Z * math.hypot(error_a, error_b)
    return a - b - half, a - b + half
