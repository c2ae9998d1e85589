"""Makes expected.json with rliable, which is no dependency: in an environment of its own,
`pip install rliable==1.2.0 "pandas<3" && python make_expected.py`.

rliable draws from numpy's global generator, which is seeded before each call: so a test can repeat
its draws. `independent` is of many draws, for comparison with other draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rliable import library, metrics

SEED, REPS, MANY = 1, 2000, 30_000


def estimated(scores: Any, function: Callable[..., Any], reps: int = REPS) -> list[float]:
    """[value, low, high]"""
    np.random.seed(SEED)  # noqa: NPY002, what rliable draws from
    value, ends = library.get_interval_estimates({"x": scores}, function, reps=reps)
    return [float(np.ravel(value["x"])[0]), *map(float, np.ravel(ends["x"]))]


def iqm(scores: Any) -> Any:
    return np.array([metrics.aggregate_iqm(scores)])


def mean(scores: Any) -> Any:
    return np.array([metrics.aggregate_mean(scores)])


def main() -> None:
    generator = np.random.default_rng(7)
    cases: list[dict[str, Any]] = [
        {
            "a": [[0.91], [0.97], [0.88], [1.0], [0.62]],
            "b": [[0.55], [0.91], [0.71], [0.3], [0.66]],
        },
        {
            "a": generator.beta(6, 2, (10, 4)).round(3).tolist(),
            "b": generator.beta(4, 3, (8, 4)).round(3).tolist(),
        },
        {"a": [[10.0], [30.0], [20.0]], "b": [[5.0], [20.0], [40.0]]},
    ]
    made = []
    for scores in cases:
        arrays = {name: np.array(values) for name, values in scores.items()}
        made.append(
            {
                "scores": scores,
                "iqm": {name: estimated(array, iqm) for name, array in arrays.items()},
                "mean": {name: estimated(array, mean) for name, array in arrays.items()},
                "improvement": estimated(
                    (arrays["a"], arrays["b"]), metrics.probability_of_improvement
                ),
            }
        )
        print(len(made), flush=True)
    five = {name: np.array(values) for name, values in cases[0].items()}
    independent = {name: estimated(array, iqm, MANY) for name, array in five.items()}
    document = {"seed": SEED, "reps": REPS, "cases": made, "independent": independent}
    path = Path(__file__).with_name("expected.json")
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
