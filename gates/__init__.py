"""Gates measure at full size what the documentation promises: `python -m gates.speed.rollout_speed`
from the root of the repository.

exact    equal bits: resumed runs, threads, Ray actors, ranks, sweeps
faults   kills, damaged files, broken clusters and environments
learn    what recipes learn, and what they learn beside other libraries
speed    time, memory and scale
lib      what gates share: the result and its verdict, commands, runs of seconds
pages    pages and figures of the documentation, made from the results
results  the results at full size
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
# Gates use recipes, clusters and faults of the tests; their modules import each other by one name.
sys.path[:0] = [str(TESTS), str(TESTS / "lib")]
