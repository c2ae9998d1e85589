"""`python -m etude_runtime DIR`: what an exported policy reads, and whether it works here."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from etude_runtime.contract import Array, ContractError
from etude_runtime.policy import Policy
from etude_runtime.rate import Timing


def main(arguments: list[str] | None = None) -> int:
    """Describe, replay and time a policy; 1 where it must not be run."""
    parser = argparse.ArgumentParser(prog="etude-runtime", description=__doc__)
    parser.add_argument("folder", help="what `etude export` wrote")
    parser.add_argument("--steps", type=int, default=5000, help="steps that are timed")
    options = parser.parse_args(arguments)
    try:
        policy = Policy.load(options.folder)
        print(describe(policy))
        steps, largest = policy.replay()
        print(f"replay  {steps:,} recorded steps, largest difference {largest:.1e}")
        print(f"timing  {measure(policy, options.steps)}")
    except (ContractError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def describe(policy: Policy) -> str:
    """A line for every term, and one for the action."""
    document = policy.document
    lines = [f"policy  {document.get('name', '')}, format {document['format']}"]
    sizes = {each.terms[0].key: each.image for each in policy.contract.observations}
    for term in policy.contract.terms:
        shape = sizes.get(term.key)
        size = term.size if shape is None else " x ".join(map(str, shape))
        how = [f"x {_told(term.scale)}"] * (not term.is_plain)
        how += [f"the last {term.history}"] * (term.history > 1)
        how += [f"late by {term.delay} steps in training"] * (term.delay[1] > 0)
        how += [f"noise {_told(term.noise)} in training"] * bool(term.noise.any())
        note = f" ({', '.join(how)})" if how else ""
        what = ": ".join(text for text in (term.unit.removesuffix("1"), term.about) if text)
        lines.append(f"reads   {term.key:<16} {size:>3}  {what}{note}")
    output = policy.contract.output
    about = document.get("action", {}).get("about", "")
    lines.append(f"acts    {output.space} of {output.size}" + (f": {about}" if about else ""))
    if policy.period is not None:
        lines.append(f"every   {policy.period * 1e3:g} ms")
    return "\n".join(lines)


def _told(numbers: Array) -> str:
    return ", ".join(f"{number:g}" for number in np.unique(numbers))


def measure(policy: Policy, steps: int) -> Timing:
    """How long `act` takes on this machine, measurements of zero."""
    timing = Timing(policy.period or 0.02)
    terms = {term.key: np.zeros(term.size) for term in policy.contract.terms}
    pictures = [each for each in policy.contract.observations if each.image is not None]
    terms |= {each.terms[0].key: np.zeros(each.shape, np.uint8) for each in pictures}
    for _ in range(50):
        policy.act(terms)
    for _ in range(steps):
        begin = time.perf_counter()
        policy.act(terms)
        timing.seconds.append(time.perf_counter() - begin)
    timing.missed = sum(seconds > timing.period for seconds in timing.seconds)
    policy.reset()
    return timing


if __name__ == "__main__":
    sys.exit(main())
